"""The report on a terminal: one screen, most important first.

Headline, what to distrust, where a step goes, findings, what to do next. Colour only supports what characters already
say, so a log file or a colour-blind reader loses nothing. Every text of the run passes `escape.plain` and is put into
`rich.text.Text`, which interprets no markup.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import compiler_words, sentences, words
from stepscope.report.compilers import compiler_blocks
from stepscope.report.escape import one_line, plain
from stepscope.report.experiment_terminal import experiment_blocks
from stepscope.report.places import Shortener
from stepscope.report.sampled import sampled_blocks
from stepscope.report.terminal_devices import device_blocks, memory_block, overview_blocks
from stepscope.report.terminal_findings import findings_block, risks_block
from stepscope.report.terminal_parts import Glyphs, bar, glyphs_for, legend
from stepscope.report.trial import refused, trial_line

MAX_WIDTH = 100  # longer lines are hard to read
MAX_WARNINGS = 4
HOT_LINES = 3  # shown where no finding points at a line


def render(report: Report, console: Console, *, page: str | None = None, again: str | None = None) -> None:
    """Print `report` to `console`.

    `page` is where the HTML report lies, if it was written; `again` is the command that would write it.
    """
    width = min(console.width, MAX_WIDTH)
    glyphs = glyphs_for(console.encoding)
    shorten = Shortener(report.run)
    blocks = [
        Group(*_quality(report), *_headline(report), *_trial(report, shorten), *_warnings(report, glyphs)),
        *_partition(report, width, glyphs),
        *overview_blocks(report, width, glyphs),
        *device_blocks(report, shorten, width, glyphs),
        *memory_block(report, shorten),
        *findings_block(report, shorten, glyphs),
        *risks_block(report, shorten, glyphs),
        *experiment_blocks(report.views.get("experiment"), width),
        *compiler_blocks(report, shorten, width, glyphs),
        *_hot_lines(report, shorten, glyphs),
        *sampled_blocks(
            report.views.get("sampled"),
            shorten,
            glyphs,
            told=sentences.names_input(report),
            measured=report.steps is not None,
        ),
    ]
    with console.capture() as captured:
        for index, block in enumerate(blocks):
            if index:
                console.print()
            console.print(block, width=width)
        console.print()
        for top in _top_line(report, shorten):
            console.print(top, width=width, no_wrap=True, overflow="ellipsis")
        for step in _next(report, page, again):
            console.print(step, soft_wrap=True)  # a path or a command broken over lines cannot be copied
    # tables pad their cells; a report pasted elsewhere should not carry that along
    for line in captured.get().splitlines():
        text = Text.from_ansi(glyphs.encodable(line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _quality(report: Report) -> Iterator[RenderableType]:
    for text in sentences.quality(report):
        yield Text(text, style="dim")


def _headline(report: Report) -> Iterator[RenderableType]:
    name = Text(plain(report.run.get("name") or "run", 60), style="bold")
    steps = report.steps
    if steps is None:
        yield name + Text(f": {plain(sentences.without_steps(report))}")
        return
    rates = [f"{words.number(steps['per_second'])} steps/s"]
    if steps.get("samples_per_second") is not None:
        rates.append(f"{words.number(steps['samples_per_second'])} samples/s")
    yield Text.assemble(
        name,
        f": {plain(sentences.counted(steps))}, ",
        (f"{words.number(steps['mean_ms'])} ms a step", "bold"),
        f" (median {words.number(steps['median_ms'])}, p95 {words.number(steps['p95_ms'])}), {', '.join(rates)}; ",
        f"cut by {words.signal(steps.get('signal', ''))}",
    )
    trained_by = sentences.framework(report)
    if trained_by:
        yield Text(one_line(trained_by, 300))
    compiling = compiler_words.kind_note(report, steps["kind"])
    if compiling:
        yield Text(compiling)
    for other in report.views.get("steps_by_kind", ())[1:]:
        text = sentences.step_kind(report, other)
        yield Text(text, style="bold" if sentences.stands_out(report, other) else "dim")


def _trial(report: Report, shorten: Shortener) -> Iterator[RenderableType]:
    text = trial_line(report, shorten)
    if text:
        yield Text.assemble(("Knobs  ", "bold"), (one_line(text), "yellow" if refused(report) else ""))


def _warnings(report: Report, glyphs: Glyphs) -> Iterator[RenderableType]:
    texts = sentences.warnings(report)
    for text in texts[:MAX_WARNINGS]:
        yield _hanging(Text(f"{glyphs.warning} ", style="yellow"), Text(one_line(text, 300)))
    if len(texts) > MAX_WARNINGS:
        yield Text(f"  and {len(texts) - MAX_WARNINGS} more notes on quality in the report's files", style="dim")


def _partition(report: Report, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    if report.steps is None:
        return
    rows: list[RenderableType] = []
    parts = [part for part in report.steps["partition"] if part["share"] > 0]
    if parts and (len(parts) > 1 or parts[0]["category"] != "unattributed"):
        rows += [Text("Where a step goes", style="bold"), bar(parts, width, glyphs), legend(parts, width, glyphs)]
    fixed = sentences.fixed_costs(report.views.get("fixed_costs") or {})
    if fixed:
        rows.append(Text(fixed, style="dim"))
    if rows:
        yield Group(*rows)


def _hot_lines(report: Report, shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    """The most sampled lines; not beside findings, see `_top_line`."""
    stacks = report.views.get("stacks")
    if not stacks or not stacks["hot_lines"] or report.findings:
        return
    rows: list[RenderableType] = [Text("Most sampled lines", style="bold")]
    for row in stacks["hot_lines"][:HOT_LINES]:
        rows.append(Text(_hot_line(row, shorten), no_wrap=True, overflow="ellipsis"))
        if row.get("code"):
            rows.append(
                Text(f"{'':9}{glyphs.quote} {plain(row['code'])}", style="dim", no_wrap=True, overflow="ellipsis")
            )
    yield Group(*rows)


def _top_line(report: Report, shorten: Shortener) -> Iterator[Text]:
    """Beside findings the first of the most sampled lines alone: they need not speak of it."""
    stacks = report.views.get("stacks")
    if stacks and stacks["hot_lines"] and report.findings:
        top = _hot_line(stacks["hot_lines"][0], shorten)
        yield Text.assemble(("Most sampled", "bold"), top)


def _hot_line(row: dict[str, Any], shorten: Shortener) -> str:
    """Its share, place and phase, and the library's function that is mostly on top of it."""
    place = f"{shorten(row['file'], row['line'])}  {plain(row['function'], 60)}"
    file, _, leaf = (row.get("library_leaf") or "").rpartition(":")
    inside = f", in {plain(leaf, 40)} ({plain(posixpath.basename(file), 40)})" if leaf else ""
    return f"{words.percent(row['share']):>7}  {place}, {words.term(row['phase'])}{inside}"


def _next(report: Report, page: str | None, again: str | None) -> Iterator[Text]:
    folder = shlex.quote(plain(report.run.get("folder") or "RUN"))
    again = plain(again) if again else f"stepscope analyze {folder} --html report.html"
    steps = [*sentences.next_steps(report), ("everything", plain(page) if page else again)]
    for index, (label, text) in enumerate(steps):
        yield Text.assemble(("    " if index else "Next", "bold"), (f"  {label:<14}  ", "dim"), text)


def _hanging(head: Text, body: Text) -> Table:
    table = Table.grid()
    table.add_row(head, body)
    return table
