"""What the pages on traces share: which spans are asked for, rows of tables, and what to record where there are none.

Rows come from `Run.analysis.views`, which is made once, wherever they are all spans' or one span's; other groupings are
made when first asked for, and the latest of each run are kept.
"""

from __future__ import annotations

import re
import shlex
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from msgspec import Struct

from stepscope.analyze.views.select import NO_TRACE, Rows, Selection
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, ViewLayout
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.table import Choice, TableDocument, document, headed, unit_of_row, worth_showing

if TYPE_CHECKING:
    from stepscope.api import Run
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.views import SpanViews, Views

Made = TypeVar("Made")

KEPT = 12  # results of one run that were made for a page and are not in its analysis
MAX_COMMAND = 1_000  # characters of a command that can still be copied
MAX_ROWS = 20_000  # of a table that are laid out at all, the largest first; pages show fewer
MAX_RUNS = 100  # offered to compare with
TOP = 12  # bars of a chart of the largest

_OF_UNIT = re.compile(" (ns|ms|bytes)$")


class Chosen(Struct, frozen=True):
    """The spans that the scope asks for. `absent` says why there is nothing of a view; `spans` are then of no use.

    `whole`: they are all spans of the run.
    """

    spans: tuple[SpanViews, ...]
    whole: bool
    absent: Block | None = None
    slowed: str | None = None

    @property
    def single(self) -> SpanViews | None:
        """The one span whose rows are shown, None for all together. Of a worker's several it is the first."""
        return None if self.whole and len(self.spans) != 1 else self.spans[0]

    def notes(self) -> list[Block]:
        """How much slower the steps were that all figures are of; that a worker has more spans than the one shown."""
        made = [blocks.text(blocks.sentence(self.slowed), "note")] if self.slowed else []
        if not self.whole and len(self.spans) > 1:
            ref = self.spans[0].span
            text = f"{ref.worker} has {len(self.spans)} traces; this is span {ref.span}. Choose another above."
            made.append(blocks.text(text, "note"))
        return made

    def rows(self, context: PageContext, table: str, **more: Any) -> Rows:
        """The rows of a table of `Run.table` for these spans; `more` are other fields of its selection."""
        ref = None if self.whole else self.spans[0].span
        return rows(context, table, worker=ref and ref.worker, span=ref and ref.span, **more)

    def known(self, context: PageContext, table: str) -> Sequence[Any]:
        """The rows that the analysis holds of a table already, of the one span or of all together."""
        found: Sequence[Any] = getattr(self.single or context.run.analysis.views, table)
        return found


def chosen(context: PageContext, view: str, title: str) -> Chosen:
    """The spans of the scope for a page on `view`, a key of `Views.absent` and of the declared advice."""
    views = context.run.analysis.views
    if views is None:
        return Chosen((), whole=True, absent=absent(context, view, title, NO_TRACE))
    found = of_scope(context, views)
    whole = len(found) == len(views.spans)
    why = views.absent.get(view)
    if not found and views.spans:
        why = f"no trace of {context.scope.worker or context.scope.span} was recorded: choose another worker, or all"
    said = absent(context, view, title, why) if why else None
    return Chosen(found, whole, said, sentences.profiled(context.run.profiled))


def of_scope(context: PageContext, views: Views) -> tuple[SpanViews, ...]:
    """The spans of the worker and span that are asked for; raises `UsageError` for what names no span."""
    wanted = context.selection()
    return tuple(
        item
        for item in views.spans
        if wanted.worker in (None, item.span.worker, plain(item.span.worker)) and wanted.span in (None, item.span.span)
    )


def absent(context: PageContext, view: str, title: str, reason: str) -> Block:
    """Why there is nothing of a view, and what to record."""
    advised = blocks.LAYOUT.advice[view]
    advice = advised.text
    steps = context.scope.steps
    if steps is not None and _elsewhere(context.base, view):
        views = context.base.analysis.views
        found = [item.overview for item in views.spans if item.overview] if views is not None else []
        held = [int(step.step) for item in found if item.has_steps for step in item.steps if step.step.isdecimal()]
        known = f"traces hold steps between {min(held)} and {max(held)}; " if held else ""
        reason = f"nothing of it is in steps {steps[0]} to {steps[1]}: {known}choose others, or all"
    if view in ("kernels", "gpus") and set(context.run.analysis.devices) == {"cpu"}:
        reason, advice = "the run trained on the CPU alone, so that no GPU did any work", "Train on a GPU."
    return blocks.empty(title, sentence(reason), advice, again(context, *advised.options))


def _elsewhere(base: Run, view: str) -> bool:
    views = base.analysis.views
    if view == "stacks":
        return bool(base.tables.stacks.height or (views is not None and views.operators))
    if view == "compilers":
        return base.analysis.compilers is not None
    return bool(getattr(views, "kernels" if view == "gpus" else view, None))


def again(context: PageContext, *options: str) -> str:
    """A command that records the run once more, with these options."""
    run = context.run.analysis.run
    command = shlex.join(run.command) if context.run.recorded else ""
    if not 0 < len(command) <= MAX_COMMAND:
        command = "python train.py"
    return " ".join(("stepscope run", *options, "--", command))


_MADE: WeakKeyDictionary[Run, OrderedDict[Any, Any]] = WeakKeyDictionary()


def kept(run: Run, key: Any, make: Callable[[], Made]) -> Made:
    """What `make` returned for this run and key the last time, or now."""
    known = _MADE.setdefault(run, OrderedDict())
    if key in known:
        found: Made = known[key]
        known.move_to_end(key)
        return found
    made = make()
    known[key] = made
    while len(known) > KEPT:
        known.popitem(last=False)
    return made


def rows(context: PageContext, table: str, **selected: Any) -> Rows:
    """The rows of a table of `Run.table` with this selection; raises `UsageError` as that does."""
    selection = Selection(**selected)
    return kept(context.run, (table, selection), lambda: context.run.table(table, selection))


def block(
    context: PageContext,
    name: str,
    found: Sequence[Any],
    *,
    title: str | None = None,
    sort: str | None = None,
    notes: Iterable[str] = (),
    total: int | None = None,
    columns: Sequence[tuple[str, str]] = (),
    given: Mapping[str, str] | None = None,
) -> Block:
    """Rows of a table of `analyze --table` as a block, ordered and defined as on the command line.

    What differs from there is declared (`blocks.LAYOUT.views`). The key "file" is the place: file, line and function of
    the row.

    Args:
        name: of the view, which is its id on its page too: links restore its order by it.
        sort: key of the column to order by, instead of the table's own.
        total: rows that there are, where `found` has been cut.
        columns: (heading, key) in order, instead of those declared, else of the terminal.
        given: parameters of every link; in a file, where nothing answers them, there is none.
    """
    view = blocks.LAYOUT.views.get(name, _PLAIN)
    made = document(view.table or name, found[:MAX_ROWS], Choice(sort=sort))
    declared = [(column.removesuffix(" bar"), column.endswith(" bar")) for column in view.columns.split("; ") if column]
    own = headed("; ".join(column for column, _ in declared)) if declared else ()
    bars = (*view.bars, *(key for (_, key), (_, bar) in zip(own, declared, strict=True) if bar))
    links = {key: blocks.cell_link(*link, given) for key, link in view.links.items() if not context.embedded}
    return laid(
        context,
        made,
        id=name,
        title=title or view.title or made.title,
        total=len(found) if total is None else total,
        columns=columns or own,
        bars=bars,
        notes=(*(made.notes if view.own_notes else ()), *notes),
        links=links,
        open_depth=view.open_depth,
    )


_PLAIN = ViewLayout()


def laid(
    context: PageContext | Alone,
    made: TableDocument,
    *,
    id: str,
    title: str,
    total: int,
    columns: Sequence[tuple[str, str]] = (),
    bars: Collection[str] = (),
    notes: Iterable[str] = (),
    links: Mapping[str, Mapping[str, Any]] | None = None,
    open_depth: int | None = None,
) -> Block:
    """A table's document as a block, with the headings and units that it has everywhere."""
    links = links or {}
    shown = [(blocks.capital(label), key) for label, key in columns or made.shown.columns if worth_showing(made, key)]
    units = {each.key: each.unit for each in made.columns}
    heads = [label for label, _ in shown]
    columns_laid = []
    for label, key in shown:
        twice = heads.count(label) > 1 and label != "→"
        name = _OF_UNIT.sub("", plain(key.replace("_", " "))) if twice else label
        columns_laid.append(_column(made, key, name, units.get(key, ""), key in bars, links.get(key)))
    keys = [*(key for _, key in shown if key != "file"), *(link["key"] for link in links.values())]
    return blocks.table(
        id,
        title,
        columns_laid,
        [_row(row, keys, context) for row in made.rows[: context.limit]],
        limit=context.limit,
        total=total,
        sorted_by=made.sorted_by,
        notes=notes,
        tree=open_depth is not None,
        open_depth=open_depth,
    )


def _column(
    found: TableDocument, key: str, label: str, stated: str, bar: bool, link: Mapping[str, Any] | None
) -> dict[str, Any]:
    if key == "file":
        return blocks.column("place", label, place=True)
    help_of = blocks.column_meaning(found.table, key)
    value = next((row[key] for row in found.rows if row.get(key) is not None), None)
    if isinstance(value, (str, bool)):
        return blocks.column(key, label, "text", help=help_of, link=link)
    unit = blocks.unit_of(key, stated) or "number"
    made = blocks.column(key, label, unit, help=help_of, bar=bar, signed="delta" in key, link=link)
    return {**made, "unit_key": "unit"} if any(unit_of_row(row, key) for row in found.rows) else made


def _row(row: Mapping[str, Any], keys: Iterable[str], context: PageContext | Alone) -> dict[str, Any]:
    made = {key: row.get(key) for key in keys}
    if row.get("file"):
        made["place"] = blocks.place_of(row, context.shorten)
    if "depth" in row or "level" in row:
        made["depth"] = row.get("depth") or row.get("level") or 0
    return made


def choice(context: PageContext, label: str, param: str, value: str, options: Sequence[tuple[str, str]]) -> list[Block]:
    """A choice that loads the page again; none where there is one option, or nobody to ask."""
    if context.embedded or len(options) < 2:
        return []
    return [blocks.choice(label, param, value, options)]


def other_runs(context: PageContext) -> list[tuple[str, str]]:
    """(id, name) of the runs that this one can be laid beside, the newest; experiments are none."""
    entries = context.catalog.runs()[: MAX_RUNS + 1] if context.catalog is not None else ()
    runs = [entry for entry in entries if entry["id"] != context.key and entry["kind"] != "experiment"]
    return [(str(entry["id"]), str(entry["name"])) for entry in runs[:MAX_RUNS]]


def paragraphs(texts: Iterable[str | None], tone: str = "note") -> list[Block]:
    """A paragraph for each text, each once."""
    return [blocks.text(sentence(each), tone) for each in dict.fromkeys(texts) if each]


def sentence(text: str) -> str:
    """A reason as a sentence, but without a capital letter in a name of code that it begins with."""
    made = blocks.sentence(text)
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    return made if first.rstrip(",.:").isalpha() else text.strip()[:1] + made[1:]


DEVICE, HOST = "device", "cpu_op"  # whose time it is


def device_lines(context: PageContext, basis: str) -> Iterator[Block]:
    """The table by this time, `DEVICE` or `HOST`, of all traces together; or why no line could be found."""
    found = context.run.analysis.device_lines
    if found is None or found.basis != basis or not found.total_ns:
        return
    view: dict[str, Any] = context.run.report(source=context.source).views["device_lines"]
    without = [f"{words.percent(share)} {why}" for why, share in sentences.unattributed(view)]
    if not found.lines:
        yield blocks.empty(sentences.DEVICE_LINES[basis], f"No line could be found. {', '.join(without)}")
        return
    rows = [
        {
            **row,
            "place_exact": row["exact_line"] and not row["guess"],
            "note": sentences.line_notes({**row, "ms_per_step": None}) or None,
            "mostly": ", ".join(f"{name} {words.nanoseconds(ns)}" for name, ns in row["top"]),
        }
        for row in view["lines"]
    ]
    whose = "" if context.scope.worker is None and context.scope.span is None else ", all traces together"
    notes = [note for note in (sentences.line_footer(view), *without) if note]
    title, total = f"{sentences.DEVICE_LINES[view['basis']]}{whose}", len(found.lines)
    yield from blocks.rows_table(context, "device-lines", rows, title=title, total=total, notes=notes)
