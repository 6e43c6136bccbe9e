"""The pages of a run, in the order in which they stand, and how one of them becomes a document.

Each page is a module of this package with `build(context) -> list of blocks` and, where a page can be empty, a cheap
`empty(context) -> bool`, asked after the run's analysis is there; or, where a module makes several, a function named as
the page is, and `NAME_empty`. A page that cannot follow a worker, a span or a range of steps shows everything, and the
document's scope says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.errors import UsageError
from stepscope.report import sentences
from stepscope.report.escape import plain
from stepscope.report.words import Shortener

if TYPE_CHECKING:
    from stepscope import api
    from stepscope.analyze.views.select import Selection
    from stepscope.dashboard.server.catalog import Catalog

PAGE_SCHEMA, HEAD_SCHEMA = "stepscope.page/1", "stepscope.run/1"
SERVED_ROWS, EMBEDDED_ROWS = 1_000, 100
SERVED_BOXES, EMBEDDED_BOXES = 120_000, 20_000
ONLY = "this"  # the id of the run in a file
SPAN = "/span"  # between a worker and its number in the key of a span, as in `SpanRef.label`


class Scope(Struct, frozen=True):
    """What is shown. `span` is a number, or the key of a span as `SpanRef.label` has it ("worker0/span2").

    A range of steps is applied before: the run of the context has been read with these steps alone.
    """

    worker: str | None = None
    span: str | None = None
    steps: tuple[int, int] | None = None


_WHOLE = Scope()


class PageContext(Struct, frozen=True, dict=True):
    """What a page is made from.

    Attributes:
        run: the run, read with the scope's steps alone.
        base: the whole run; the same object where no steps are chosen.
        params: what the page is asked for beside its scope; of a request, so nothing in it can be trusted.
        catalog: other runs; None in the single-file report.
        limit: rows that a table may have.
        boxes: those that all trees of a flame graph may have together.
        key: the run's id in the catalog.
        source: False quotes no line of source text.
    """

    run: api.Run
    base: api.Run
    scope: Scope = field(default_factory=Scope)
    params: Mapping[str, str] = field(default_factory=dict)
    catalog: Catalog | None = None
    limit: int = SERVED_ROWS
    boxes: int = SERVED_BOXES
    embedded: bool = False
    key: str = ONLY
    revision: int = 0
    source: bool = True

    @cached_property
    def shorten(self) -> Shortener:
        """Paths as people read them, relative to where the run was started."""
        run = self.run.analysis.run
        return Shortener({"cwd": run.cwd, "user_roots": run.user_roots})

    def selection(self) -> Selection:
        """The scope's worker and span for `Run.table`; raises `UsageError` for a span that is none."""
        from stepscope.analyze.views.select import Selection

        worker, given = self.scope.worker, self.scope.span
        if given is None:
            return Selection(worker=worker)
        before, _, digits = given.rpartition(SPAN)
        if not digits.isdecimal() or len(digits) > 9:
            raise UsageError(f"span {given[:80]!r}: not a span of this run; choose one of the list")
        return Selection(worker=before or worker, span=int(digits))

    def choice(self, param: str, known: Sequence[str]) -> str:
        """The value of a parameter if it is one of `known`, else the first of them."""
        given = self.params.get(param, "")
        return given if given in known else known[0]


class Page(Struct, frozen=True):
    """`follows` are the selectors whose choice changes what the page shows; without `held`, a view of traces, it is
    empty, unless its module knows better. `module` is that of several pages."""

    key: str
    title: str
    group: str
    follows: tuple[str, ...]
    held: str = ""
    module: str = ""

    def _made_by(self, what: str) -> Callable[[PageContext], Any] | None:
        module = import_module(f"{__name__}.{self.module or self.key}")
        name = what if not self.module else self.key if what == "build" else f"{self.key}_{what}"
        made: Callable[[PageContext], Any] | None = getattr(module, name, None)
        return made

    def build(self, context: PageContext) -> list[Block]:
        """The blocks of the page; raises `UsageError` for parameters that make no sense."""
        make = self._made_by("build")
        made: list[Block] = make(context) if make is not None else []
        if (
            self.key in _OF_ALL_RANKS
            or context.base.ranks_read is None
            or all(each["kind"] == "empty" for each in made)
        ):
            return made
        looked_at = sentences.looked_at(context.base.report(source=context.source).views["ranks_read"])
        link = blocks.link("Ranks has all of them", "ranks")
        return [blocks.text(f"This page is of {looked_at}.", "note", link), *made]

    def choices(self, context: PageContext) -> Iterable[tuple[Mapping[str, str], list[Block]]]:
        """What a file holds of the page beside what it shows first: parameters, and the blocks that they ask for."""
        make = self._made_by("choices")
        return () if make is None else make(context)

    def empty(self, context: PageContext) -> bool:
        """Whether the page has nothing but the reason why; needs the analysis, and is quick once that is there."""
        if self.held:
            return not getattr(context.run.analysis.views, self.held, None)
        asked = self._made_by("empty")
        return asked is not None and bool(asked(context))


_EVERY = ("worker", "span", "steps")
# the others are of the ranks that were looked at
_OF_ALL_RANKS = ("overview", "findings", "ranks", "compare", "environment")
_LIST = (
    Page("overview", "Overview", "", ("steps",), module="findings"),
    Page("findings", "Findings", "", ("steps",), module="findings"),
    Page("steps", "Steps", "", _EVERY),
    Page("metrics", "Metrics", "", ("worker", "steps")),
    Page("ranks", "Ranks", "", (), module="ranks"),
    Page("hang", "Hang", "", (), module="ranks"),
    Page("timeline", "Timeline", "Time", _EVERY),
    Page("flame", "Flame graph", "Time", _EVERY),
    Page("operators", "Operators", "Work", _EVERY, "operators", "work"),
    Page("kernels", "Kernels", "Work", _EVERY, "kernels", "work"),
    Page("modules", "Modules", "Work", _EVERY, "modules", "work"),
    Page("memory", "Memory", "Work", _EVERY),
    Page("compiles", "Compiles", "Work", ("steps",)),
    Page("gpu", "GPU summary", "Machine", _EVERY),
    Page("system", "System", "Machine", ("steps",), module="machine"),
    Page("compare", "Compare", "Run", ()),
    Page("environment", "Environment and trace quality", "Run", (), module="machine"),
)
PAGES: dict[str, Page] = {page.key: page for page in _LIST}

_SELECTORS = {"worker": "worker", "span": "span", "steps": "range of steps"}


def page(context: PageContext, key: str) -> dict[str, Any]:
    """The document of one page; raises `UsageError` for a page that there is not, or a scope that makes no sense."""
    if key not in PAGES:
        raise UsageError(f"{key[:80]!r}: no such page; there are {', '.join(PAGES)}")
    return document(key, PAGES[key].build(context), context.scope, context.revision)


def document(key: str, shown: list[Block], scope: Scope = _WHOLE, revision: int = 0) -> dict[str, Any]:
    """The document of a page with these blocks; the note says what of the scope the page cannot follow."""
    found = PAGES[key]
    left = [words for name, words in _SELECTORS.items() if getattr(scope, name) and name not in found.follows]
    note = f"This page does not follow the choice of a {' or '.join(left)}: it shows all." if left else None
    asked = {"worker": scope.worker, "span": scope.span, "steps": scope.steps and list(scope.steps)}
    return {
        "schema": PAGE_SCHEMA,
        "page": key,
        "title": found.title,
        "revision": revision,
        "scope": {**asked, "follows": list(found.follows), "note": note},
        "blocks": shown,
    }


def head(listed: Iterable[Page], empty: Container[str] = (), **known: Any) -> dict[str, Any]:
    """A RunHead of `web/src/lib/types.ts` with these pages, of which `empty` show nothing.

    What `known` does not say is that of a file: a trace, complete, of which no worker, span or steps can be chosen.
    """
    pages = [{"key": p.key, "title": p.title, "group": p.group, "empty": p.key in empty} for p in listed]
    nothing: dict[str, Any] = {
        "command": None,
        "started_ns": None,
        "revision": 0,
        "workers": [],
        "spans": [],
        "steps": None,
    }
    unknown = {"id": ONLY, "name": "", "kind": "trace", "state": "finished", **nothing}
    return {"schema": HEAD_SCHEMA, **unknown, "pages": pages, "preparing": None, "error": None, **known}


# A worker is what traces are of, by the name that the views use, or a training process that left a journal. All of this
# needs the analysis of the run, and is quick once that is there.
def workers(run: api.Run) -> list[dict[str, str]]:
    """(key, label) of each worker: those with traces first, in their order, then processes with nothing but steps."""
    refs = _refs(run)
    traced = {ref.worker: ref.rank for ref in refs}
    behind = {ref.process for ref in refs}
    steps = run.tables.steps.select("process", "rank").unique().sort("rank", "process")
    silent = {str(process): rank for process, rank in steps.rows() if process not in behind and process not in traced}
    return [{"key": plain(key), "label": _label(key, rank)} for key, rank in {**traced, **silent}.items()]


def spans(run: api.Run) -> list[dict[str, str]]:
    """(key, label, worker) of each span; the key is what `Scope.span` takes."""
    return [{"key": plain(ref.label), "label": f"span {ref.span}", "worker": plain(ref.worker)} for ref in _refs(run)]


def step_range(run: api.Run) -> dict[str, int] | None:
    """The first and the last step that can be chosen, None of a run without steps."""
    numbers = run.tables.steps["step"].drop_nulls()
    return {"first": int(numbers.min()), "last": int(numbers.max())} if len(numbers) else None  # type: ignore[arg-type]


def processes(run: api.Run, worker: str | None) -> frozenset[str] | None:
    """The processes behind a worker, as the table of steps names them; None for all. A key is one of `workers`."""
    if worker is None:
        return None
    behind = {ref.process for ref in _refs(run) if worker in (ref.worker, plain(ref.worker))}
    own = run.tables.steps["process"].unique().drop_nulls().to_list()
    return frozenset(behind | {process for process in own if worker in (process, plain(process))})


def _refs(run: api.Run) -> list[Any]:
    views = run.analysis.views
    return [span.span for span in views.spans] if views is not None else []


def _label(worker: str, rank: int | None) -> str:
    name = plain(worker)
    return name if rank is None or name in (f"rank-{rank}", f"rank {rank}") else f"{name} (rank {rank})"
