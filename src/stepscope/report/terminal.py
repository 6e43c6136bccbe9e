"""The report on a terminal: one screen, most important first.

Headline, what to distrust, where a step goes, findings, what to do next. Colour only supports what characters already
say, so a log file or a colour-blind reader loses nothing. Every text of the run passes `escape.plain` and is put into
`rich.text.Text`, which interprets no markup.

Each section yields its rows, None where an empty line stands, and nothing where there is nothing worth a look.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import compiler_words as compiled
from stepscope.report import sentences, words
from stepscope.report import terminal_parts as draw
from stepscope.report.escape import one_line, plain
from stepscope.report.experiment_report import experiment_rows
from stepscope.report.sentences import Group
from stepscope.report.terminal_parts import Glyphs, TextColumn, clipped, soft
from stepscope.report.words import Shortener

MAX_WIDTH = 100  # longer lines are hard to read
MAX_WARNINGS = 4
HOT_LINES = 3  # shown where no finding points at a line
Row = Mapping[str, Any]
Rows = Iterator[RenderableType | None]


class Screen(Struct, frozen=True):
    """What a section is made from."""

    report: Report
    shorten: Shortener
    width: int
    glyphs: Glyphs

    def place(self, place: Row, function: int = 0) -> str:
        """`file:line`, with as many characters of the function."""
        named = f"  {plain(place['function'] or '', function)}" if function else ""
        return self.shorten(place["file"], place["line"]) + named

    def view(self, name: str) -> Any:
        """A view of the report, None where it is missing or empty."""
        return self.report.views.get(name) or None


def render(report: Report, console: Console, *, page: str | None = None, again: str | None = None) -> None:
    """Print `report` to `console`.

    `page` is where the HTML report lies, if it was written; `again` is the command that would write it.
    """
    width = min(console.width, MAX_WIDTH)
    screen = Screen(report, Shortener(report.run), width, draw.glyphs_for(console.encoding))
    rows = (row for section in SECTIONS for row in (*section(screen), None))
    folder = shlex.quote(plain(report.run.get("folder") or "RUN"))
    asked = page or again
    everything = plain(asked) if asked else f"stepscope analyze {folder} --html report.html"
    steps = [*sentences.next_steps(report), ("everything", everything)]
    draw.show((*rows, *_top_line(screen)), draw.next_lines(steps), console, width)


def _more(left: int, what: str) -> Iterator[Text]:
    """That `left` more are not shown, if so."""
    if left > 0:
        yield soft(what.format(words.count(left)))


# ---- the headline ----------------------------------------------------------------------------------------------------


def _headline(screen: Screen) -> Rows:
    report, steps = screen.report, screen.report.steps
    yield from (soft(text) for text in sentences.quality(report))
    name = draw.head(plain(report.run.get("name") or "run", 60))
    if steps is None:
        yield name + Text(f": {plain(sentences.without_steps(report))}")
    else:
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
        trained_by, compiling = sentences.framework(report), compiled.kind_note(report, steps["kind"])
        if trained_by:
            yield Text(one_line(trained_by, 300))
        if compiling:
            yield Text(compiling)
        for other in report.views.get("steps_by_kind", ())[1:]:
            text = sentences.step_kind(report, other)
            yield Text(text, style="bold" if sentences.stands_out(report, other) else "dim")
    knobs = sentences.trial_line(report, screen.shorten)
    if knobs:
        yield Text.assemble(("Knobs  ", "bold"), (one_line(knobs), "yellow" if sentences.refused(report) else ""))
    texts = sentences.warnings(report)
    yield from map(draw.warned, texts[:MAX_WARNINGS])
    yield from _more(len(texts) - MAX_WARNINGS, "  and {} more notes on quality in the report's files")


# ---- where a step goes -----------------------------------------------------------------------------------------------


def _partition(screen: Screen) -> Rows:
    if screen.report.steps is None:
        return
    parts = [part for part in screen.report.steps["partition"] if part["share"] > 0]
    if parts and (len(parts) > 1 or parts[0]["category"] != "unattributed"):
        yield draw.head("Where a step goes")
        yield from _split(parts, screen)
    fixed = sentences.fixed_costs(screen.report.views.get("fixed_costs") or {})
    if fixed:
        yield soft(fixed)


def _split(parts: list[dict[str, Any]], screen: Screen) -> Rows:
    yield draw.bar(parts, screen.width, screen.glyphs)
    yield draw.legend(parts, screen.width, screen.glyphs)


SPANS = 3  # shown one by one
SMALLEST = 0.0005  # share of a part that is still shown


def _overviews(screen: Screen) -> Rows:
    """Where profiled steps go, where nothing better is known of the run's steps: a journal of ours tells the phases of
    all of them."""
    overviews = screen.view("overview") or []
    parts = [part for part in (screen.report.steps or {}).get("partition", ()) if part["share"] > 0]
    if len(parts) > 1 and not any(item["basis"] == "device" for item in overviews):
        return
    for item in overviews[:SPANS]:
        if item["steps"]:
            yield from _overview(item, screen, several=len(overviews) > 1)
            yield None
    yield from _more(len(overviews) - SPANS, "{} more spans: --table overview")


def _overview(item: Row, screen: Screen, *, several: bool) -> Rows:
    marked = f"mean of {words.things(len(item['steps']), 'step')}"
    steps = marked if item["has_steps"] else "no step is marked: the whole trace"
    of = f" in {plain(item['span']['worker'], 60)}, span {item['span']['span']}" if several else ""
    late = f", {item['dropped_steps']} without their device work left out" if item["dropped_steps"] else ""
    yield Text.assemble(
        ("Where a profiled step goes", "bold"),
        f"{of}: {words.nanoseconds(item['wall']['mean_ns'])}",
        (f" ({steps}{late})", "dim"),
    )
    parts = [
        {"category": words.PARTS.get(name, name), "ms": part["mean_ns"] / 1e6, "share": part["share"]}
        for name, part in item["parts"].items()
        if part["share"] >= SMALLEST
    ]
    if parts:
        yield from _split(parts, screen)
    shares = {name: part["share"] for name, part in item["plugin"].items()}
    plugin = (f"{name} {words.percent(share)}" for name, share in shares.items() if share >= SMALLEST)
    yield soft(f"As the TensorBoard plugin split it: {', '.join(plugin)}")


# ---- devices and memory ----------------------------------------------------------------------------------------------

GPUS = 6
GPU_COLUMNS = (
    ("utilisation", "utilization_pct"),
    ("SM efficiency", "sm_efficiency_pct"),
    ("occupancy", "achieved_occupancy_pct"),
    ("tensor cores", "tensor_core_pct"),
)


def _gpus(screen: Screen) -> Rows:
    gpus = [gpu for gpu in screen.view("gpus") or () if gpu["kernels"]]
    if not gpus:
        return
    shown, names = gpus[:GPUS], []
    for gpu in shown:
        of = f" {plain(gpu['span']['worker'], 40)}, span {gpu['span']['span']}" if len(gpus) > 1 else ""
        names.append(f"{gpu['gpu']['device']} {plain(gpu['gpu']['name'] or '', 60)}{of}".strip())
    shares = [
        TextColumn(heading, [words.percent(None if gpu[key] is None else gpu[key] / 100) for gpu in shown])
        for heading, key in GPU_COLUMNS
    ]
    yield from draw.lines([TextColumn("GPUs", names, flexible=True), *shares], screen.width)
    more = f"{len(gpus) - GPUS} more in --table gpus; " if len(gpus) > GPUS else ""
    yield soft(f"{more}utilisation says that some kernel ran, not that the GPU was full")


TRACES = 4  # rows of the table of times
# (heading, key, how it is shown): compute, exposed communication, exposed copies and idle sum to the span
TIMES = (
    ("span", "total_ns", words.nanoseconds),
    ("compute", "compute_ns", words.nanoseconds),
    ("+ comm.", "exposed_communication_ns", words.nanoseconds),
    ("+ copies", "exposed_memcpy_ns", words.nanoseconds),
    ("idle", "idle_ns", words.nanoseconds),
    ("busy", "busy_share", words.percent),
)


def _device_times(screen: Screen) -> Rows:
    rows = sentences.device_rows(screen.report)
    if not rows:
        return
    names = TextColumn("Device time", [plain(row["label"], 80) for row in rows[:TRACES]], flexible=True)
    yield from draw.lines([names, *draw.figures(rows[:TRACES], TIMES)], screen.width)
    more = f"{len(rows) - TRACES} more rows in the report's files; " if len(rows) > TRACES else ""
    yield soft(f"{more}+ is what no compute hides; these four sum to the span")


LINES, LINES_BESIDE_FINDINGS = 5, 3


def _device_lines(screen: Screen) -> Rows:
    """Lines by the time they cause; what stacks sampled on the host says more about the host than operators do."""
    view = screen.view("device_lines")
    if not view or not view["total_ns"] or (view["basis"] != "device" and screen.view("stacks")):
        return
    yield draw.head(sentences.DEVICE_LINES[view["basis"]])
    for row in view["lines"][: LINES_BESIDE_FINDINGS if screen.report.findings else LINES]:
        notes = sentences.line_notes(row)
        line = clipped(f"{words.percent(row['share']):>7}  {screen.place(row['place'], 60)}")
        yield line + soft(f"  {notes}" if notes else "")
        if row.get("code") and row["exact_line"]:
            yield draw.quoted(row["code"], 9, screen.glyphs)
    if not view["lines"]:
        yield soft("no line could be found:")
    for why, share in sentences.unattributed(view):
        yield clipped(f"{words.percent(share):>7}  {plain(why, 120)}", "dim")
    footer = sentences.line_footer(view)
    if footer:
        yield soft(footer)


PEAKS = 4
MEMORY_LINES = 3


def _memory(screen: Screen) -> Rows:
    """The peaks of memory and the lines that stood in it then, where it was recorded with what tells them."""
    view = screen.view("memory")
    curves = [curve for curve in (view or {}).get("curves", ()) if curve["peak_allocated_bytes"]]
    shown = [curve for curve in curves if curve["device"] != "cpu"] or ([] if screen.report.steps else curves)
    if not shown:
        return
    yield draw.head("Memory at its peak")
    yield from (Text(_peak(curve, several=len(shown) > 1)) for curve in shown[:PEAKS])
    devices = {curve["device"] for curve in shown}
    own = [line for line in view["lines"] if line["device"] in devices and line["at_peak_bytes"] and line["place"]]
    for line in own[:MEMORY_LINES]:
        yield clipped(f"{words.size(line['at_peak_bytes']):>10}  {screen.place(line['place'])}")
    for state in view["states"][:PEAKS]:
        free, fragmented = words.size(state["free_bytes"]), words.size(state["fragmented_bytes"])
        held = f"{words.size(state['reserved_bytes'])} held, {words.size(state['in_use_bytes'])} in use"
        yield soft(f"{plain(state['device'], 40)} in the snapshot: {held}, {free} free, of it {fragmented} fragmented")


def _peak(curve: Row, *, several: bool) -> str:
    of = f" ({plain(curve['worker'], 40)}, span {curve['span']})" if several else ""
    parts = [f"{plain(curve['device'], 40)}{of}: {words.size(curve['peak_allocated_bytes'])} allocated"]
    for key, text in (
        ("peak_reserved_bytes", "{} reserved"),
        ("capacity_bytes", "of {}"),
        ("peak_before_bytes", "{} from before the recording"),
    ):
        if curve[key]:
            parts.append(text.format(words.size(curve[key])))
    return ", ".join(parts)


# ---- findings and risks ----------------------------------------------------------------------------------------------

IN_FULL = 3  # what fits a screen
LISTED = 8
MAX_EVIDENCE = 5
MAX_EXPLAINED = 3
SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def _findings(screen: Screen) -> Rows:
    """The first few in full, the others one line each, then what no rule found, and the rules with nothing to go by.

    What a finding explains stands below it, in one line: it is no loss in addition.
    """
    report, causes = screen.report, sentences.groups(screen.report)
    for index, cause in enumerate(causes[:IN_FULL], start=1):
        yield _title(index, cause.finding)
        yield draw.indented(*_where(cause.finding["where"], screen), draw.labelled(_details(cause, screen)))
        yield None
    for index, cause in enumerate(causes[IN_FULL:LISTED], start=IN_FULL + 1):
        yield _title(index, cause.finding)
        if cause.explained:
            yield draw.indented(clipped(f"explains, not in addition: {_rules(cause.explained)}", "dim"))
    yield from _more(len(causes) - LISTED, "and {} smaller findings")
    overlap, unexplained = sentences.overlap(report), sentences.unexplained(report)
    if overlap:
        yield Text(overlap, style="yellow")
    healthy = sentences.healthy(report) if not report.findings and sentences.is_judged(report) else None
    if healthy:
        yield Text(healthy, style="bold green")
    if unexplained:
        yield Text(unexplained, style="yellow")
    if report.abstained:
        needs = f" (needs {one_line(report.abstained[0]['needs'], 120)})" if len(report.abstained) == 1 else ""
        yield clipped(f"Not judged: {_rules(report.abstained)}{needs}", "dim")
    if report.ignored:
        yield soft(f"Ignored by configuration: {_rules(report.ignored)}")


def _rules(rows: Iterable[Row]) -> str:
    return ", ".join(plain(row["rule"], 60) for row in rows)


def _title(number: int, finding: Row) -> Table:
    severity = plain(finding["severity"])
    title = draw.head(one_line(finding["title"], 160))
    if finding["confidence"] != "high":
        title.append(f"  ({plain(finding['confidence'])} confidence)", style="not bold dim")
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    head = Text.assemble((f"{number} ", "bold"), (severity, SEVERITY_STYLES.get(severity, "bold")))
    table.add_row(head, title, draw.head(sentences.cost(finding)))
    return table


def _where(places: Sequence[Row], screen: Screen) -> Iterator[RenderableType]:
    if not places:
        return
    first, source = places[0], places[0].get("source")
    line = clipped(screen.place(first), "cyan")
    if first.get("function"):
        line.append(f"  {plain(first['function'], 80)}", style="default")
    if first.get("share") is not None and first["share"] < words.WHOLE:
        line.append(f"  {words.percent(first['share'])} of it", style="dim")
    yield line
    if source:
        text = source["lines"][first["line"] - source["first_line"]].strip()
        quote = clipped(f"{first['line']:>5} {screen.glyphs.quote} ", "dim")
        quote.append(plain(text), style="default")
        if source["changed_since"]:
            quote.append("   (edited since the run)", style="yellow")
        yield quote
    if len(places) > 1:
        others = ", ".join(map(screen.place, places[1:3]))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        yield clipped(f"also {others}{more}", "dim")


def _details(cause: Group, screen: Screen) -> Iterator[tuple[str, Text]]:
    finding = cause.finding
    said = (words.milliseconds(finding["cost_ms_per_step"]), words.percent(finding["share"]))  # by the title's line
    seen = [each for row in finding["evidence"] if (each := words.evidence(row))[1] not in said]
    if seen:
        yield "Seen", _seen(seen[:MAX_EVIDENCE], screen)
    for row in finding.get("disagreements") or ():
        yield "Sources", Text(one_line(sentences.disagreement(row), 300), style="yellow")
    ranks, everywhere = finding["ranks"], screen.report.run.get("ranks") or []
    if ranks and len(everywhere) > 1 and set(ranks) != set(everywhere):
        yield "Ranks", Text(", ".join(str(rank) for rank in ranks[:16]))
    yield "Fix", Text(one_line(finding["fix"], 400))
    if finding["caveat"]:
        yield "Note", soft(one_line(finding["caveat"], 200))
    tried = [plain(f"{row['knob']}={row['value']}") for row in finding["try"]]
    yield "Try" if tried else "Gain", Text(screen.glyphs.separator.join([*tried, sentences.gain(finding)]))
    for index, row in enumerate(cause.explained[:MAX_EXPLAINED]):
        yield "" if index else "Explains", Text(one_line(sentences.explained(row), 240))
    for text in _more(len(cause.explained) - MAX_EXPLAINED, "and {} more"):
        yield "", text


def _seen(evidence: Iterable[tuple[str, str]], screen: Screen) -> Text:
    parts = [Text.assemble((f"{metric}: ", "dim"), value) for metric, value in evidence]
    return soft(screen.glyphs.separator).join(parts)


RISKS_SHOWN = 3
RISK_EVIDENCE = 4


def _risks(screen: Screen) -> Rows:
    """Each risk with its line, what was seen and what to do."""
    if screen.report.risks:
        yield draw.head("Risks, without a measured cost")
    for risk in screen.report.risks[:RISKS_SHOWN]:
        sure = "" if risk["confidence"] == "high" else f"  ({plain(risk['confidence'])} confidence)"
        title = Text.assemble(one_line(risk["title"], 240), (sure, "dim"))
        yield draw.warned(title, style="yellow" if risk["severity"] != "info" else "cyan")
        places = ", ".join(map(screen.place, risk["where"][:RISKS_SHOWN]))
        seen = [words.evidence(row) for row in risk["evidence"][:RISK_EVIDENCE]]
        rows = [("At", Text(places, style="cyan"))] if places else []
        rows += [("Seen", _seen(seen, screen))] if seen else []
        yield draw.indented(draw.labelled([*rows, ("Fix", Text(one_line(risk["fix"], 400)))]))
    yield from _more(len(screen.report.risks) - RISKS_SHOWN, "and {} more in the report's files")


# ---- experiments and compilers ---------------------------------------------------------------------------------------


def _experiment(screen: Screen) -> Rows:
    return experiment_rows(screen.view("experiment"), screen.width)


CAUSES = 5
WARNINGS = 4
NOTES = 4
MAX_WHAT = 60  # characters of what happened, before where
QUIET_KINDS = ("fallback",)  # told in a sentence for all of them
_INDENT = " " * 2
COMPILING = (
    ("steps", "steps", words.count),
    ("compiled", "compiling_steps", words.count),
    ("compile time", "compile_ms", words.milliseconds),
    ("share", "share", words.percent),
    ("a compiling step", "mean_compiling_ms", words.milliseconds),
    ("another", "mean_quiet_ms", words.milliseconds),
)


def _compilers(screen: Screen) -> Rows:
    """What compilers did, what it took of which steps, and the causes no finding has told."""
    view = compiled.view_of(screen.report)
    if view is None:
        return
    findings = sentences.members(screen.report, LISTED)
    yield draw.head("Compilers")
    yield from (Text(one_line(compiled.backend(facts), 400)) for facts in view["backends"])
    kinds = view["steps"]
    if any(row["compiling_steps"] or row["compile_ms"] for row in kinds):
        several = len({row["backend"] for row in kinds}) > 1
        names = [f"{row['backend']}, {row['kind']}" if several else row["kind"] for row in kinds]
        known = [figure for figure in COMPILING if any(row[figure[1]] is not None for row in kinds)]
        first = TextColumn("", [_INDENT + plain(name, 40) for name in names], flexible=True)
        yield from draw.lines([first, *draw.figures(kinds, known)], screen.width)
    yield from (soft(one_line(text)) for row in kinds if (text := compiled.after_warmup(row)))
    titles = [finding["title"] for finding in findings]
    warnings = [row for row in view["warnings"] if not any(row["text"] in title for title in titles)]
    for row in warnings[:WARNINGS]:
        text, note = compiled.warning(row)
        yield draw.warned(Text.assemble(one_line(text, 300), (f"  ({one_line(note, 80)})", "dim")))
    yield from _more(len(warnings) - WARNINGS, _INDENT + "and {} more such lines in the report's files")
    yield from _causes(view, findings, screen)
    untold = [row for row in view["causes"] if row["kind"] in QUIET_KINDS and not compiled.told(row, findings)]
    said = list(compiled.operators(untold))
    if not any(finding["category"] == "compile" for finding in findings):
        said += [text for storm in view["storms"] for text in compiled.storm(storm)]
    yield from (Text(_INDENT + one_line(text, 300)) for text in said)
    yield from (draw.indented(soft(one_line(note, 300))) for note in view["notes"][:NOTES])


def _causes(view: Row, findings: Sequence[Any], screen: Screen) -> Rows:
    """Causes worth a line. A first compile is nobody's fault, unless the source cannot tell it from another."""
    blurred = {facts["backend"] for facts in view["backends"] if facts["recompiles"] is None}
    limits = {limit["cause"]: limit for limit in view["limits"]}
    left = [
        row
        for row in view["causes"]
        if row["kind"] not in QUIET_KINDS
        and (row["kind"] != "compile" or row["backend"] in blurred)
        and not (compiled.told(row, findings) or compiled.says_nothing(row))
    ]
    for row in left[:CAUSES]:
        place, ranks = row["place"] or row["definition"] or row["call"], compiled.of_ranks(row, view)
        line = clipped(f"{_INDENT}{one_line(compiled.what(row), MAX_WHAT)}")
        line.append(f"  {screen.place(place)}" if place else "", style="cyan")
        line.append(f"  {one_line(compiled.often(row), 100)}{f', {ranks}' if ranks else ''}", style="dim")
        yield line
        if row.get("code"):
            yield draw.quoted(row["code"], 5, screen.glyphs)
        if row["id"] in limits:
            yield draw.indented(Text(one_line(compiled.eager(limits[row["id"]]), 200)), by=5)
    yield from _more(len(left) - CAUSES, _INDENT + "and {} more causes: --table compiles")


# ---- what sampled stacks say -----------------------------------------------------------------------------------------


def _hot_lines(screen: Screen) -> Rows:
    """The most sampled lines; not beside findings, see `_top_line`."""
    stacks = screen.view("stacks")
    if not stacks or not stacks["hot_lines"] or screen.report.findings:
        return
    yield draw.head("Most sampled lines")
    for row in stacks["hot_lines"][:HOT_LINES]:
        yield clipped(_hot_line(row, screen))
        if row.get("code"):
            yield draw.quoted(row["code"], 9, screen.glyphs)


def _top_line(screen: Screen) -> Iterator[Text]:
    """Beside findings the first of the most sampled lines alone: they need not speak of it."""
    stacks = screen.view("stacks")
    if stacks and stacks["hot_lines"] and screen.report.findings:
        top = clipped("")
        top.append("Most sampled", "bold")
        top.append(_hot_line(stacks["hot_lines"][0], screen))
        yield top


def _hot_line(row: Row, screen: Screen) -> str:
    """Its share, place and phase, and the library's function that is mostly on top of it."""
    file, _, leaf = (row.get("library_leaf") or "").rpartition(":")
    inside = f", in {plain(leaf, 40)} ({plain(posixpath.basename(file), 40)})" if leaf else ""
    return f"{words.percent(row['share']):>7}  {screen.place(row, 60)}, {words.term(row['phase'])}{inside}"


RANKS = 2  # whose waits are shown, the longest first
WAIT_PARTS = 5
SMALLEST_WAIT = 0.05  # of the loop: a shorter wait is not worth lines
SMALLEST_WAIT_PART = 0.03  # of a wait
SLOW_LINES = 4
RANK_LINES = 3
SMALLEST_STAGE = 0.01


def _sampled(screen: Screen) -> Rows:
    """Waiting taken apart, slow steps, ranks, stages."""
    view = screen.view("sampled")
    if not view:
        return
    yield from _waits(view["waits"], screen)
    yield None
    yield from _slow_steps(view["slow_steps"], screen)
    yield None
    yield from _rank_lines(view["rank_lines"], screen)
    yield None
    stages = [
        f"{words.STAGES.get(stage['stage'], words.term(stage['stage']))} {words.percent(stage['share'])}"
        for stage in view["stages"]
        if stage["share"] >= SMALLEST_STAGE
    ]
    if len(stages) > 1:
        yield soft(f"Sampled in the main process: {', '.join(stages)}")
    phases = [
        f"{words.term(phase)} {words.percent(share)}"
        for phase, share in view["phases"].items()
        if share >= SMALLEST_STAGE
    ]
    if phases and screen.report.steps is None:  # else they are measured, which is better than samples
        yield soft(f"Sampled in the loop, by what stands on the stack: {', '.join(phases)}")


def _waits(waits: Sequence[Row], screen: Screen) -> Rows:
    if sentences.names_input(screen.report):  # a finding has named the lines of a main process that loads everything
        waits = [wait for wait in waits if not _is_alone(wait)]
    if any(wait["idle_sampled"] is False for wait in waits):
        text = "waiting threads were not sampled, so how long the loader is waited for cannot be said"
        yield Text.assemble((f"{draw.WARNING} ", "yellow"), text)
    seen = [wait for wait in waits if wait["idle_sampled"] is not False and (wait["wait_share"] or 0) >= SMALLEST_WAIT]
    for wait in sorted(seen, key=lambda wait: -wait["wait_share"])[:RANKS]:
        step = "" if wait["wait_ms_per_step"] is None else f", {words.milliseconds(wait['wait_ms_per_step'])} a step"
        whose = f"rank {wait['rank']}'s loop" if len(waits) > 1 else "the loop"
        yield Text.assemble(
            ("In the loader", "bold"),
            f": {words.percent(wait['wait_share'])} of {whose}{step}",
            (f" ({words.count(wait['samples'])} samples)", "dim"),
        )
        for part in wait["parts"][:WAIT_PARTS]:
            if part["share"] >= SMALLEST_WAIT_PART:
                yield clipped(f"{words.percent(part['share']):>7}  {_wait_part(part, screen)}")
        if not wait["simultaneous"] and not _is_alone(wait):
            yield soft("what workers did in the whole period stands for what they did during waits")
    yield from _more(len(seen) - RANKS, "{} more ranks wait for their loaders")


def _is_alone(wait: Row) -> bool:
    """Whether the main process does all the loading itself: no worker is in the wait."""
    return all(part["kind"] == "loading_here" for part in wait["parts"])


def _wait_part(part: Row, screen: Screen) -> str:
    kind = words.WAIT_PARTS.get(part["kind"], words.term(part["kind"]))
    if part["place"]:
        return f"{kind} at {_sampled_place(part['place'], screen)}"
    if part["lines"] > 1:
        return f"{kind} at {words.count(part['lines'])} more lines"
    return f"{kind} in {plain(part['leaf'], 80)}" if part["leaf"] else kind


def _slow_steps(view: Row | None, screen: Screen) -> Rows:
    if not view:
        return
    yield Text.assemble(
        ("Slow steps", "bold"),
        f": {words.count(view['slow_steps'])} above {words.milliseconds(view['threshold_ms'])} take "
        f"{words.milliseconds(view['slow_mean_ms'])}, {words.count(view['typical_steps'])} typical ones "
        f"{words.milliseconds(view['typical_mean_ms'])}",
    )
    for line in view["lines"][:SLOW_LINES]:
        where = f"{_sampled_place(line['place'], screen)}, {words.term(line['phase'])}"
        note = ", in slow steps only" if line["only_slow"] else ""
        yield clipped(f"{'+' + words.milliseconds(line['extra_ms_per_step']):>10}  {where}{note}")
    if not view["lines"]:
        yield soft("no single line makes them slow")


def _rank_lines(view: Row | None, screen: Screen) -> Rows:
    if not view or not (view["lines"] or view["straggler"] is not None):
        return
    yield Text.assemble(("Where ranks differ", "bold"), f": {one_line(view['verdict'], 300)}")
    show = words.milliseconds if view["unit"] == "ms per step" else words.percent
    for line in view["lines"][:RANK_LINES]:
        values = line["by_rank"].values()
        phase = f", {words.term(line['phase'])}" if line["phase"] else ""
        waits = ", waiting" if line["waiting"] else ""
        spread = f"{show(max(values))} on rank {line['most']}, down to {show(min(values))}"
        yield clipped(f"{_INDENT}{_sampled_place(line['place'], screen)}{phase}{waits}: {spread}")


def _sampled_place(place: Row, screen: Screen) -> str:
    return screen.place(place, 60 if place["function"] else 0)


SECTIONS: tuple[Callable[[Screen], Rows], ...] = (
    *(_headline, _partition, _overviews, _gpus, _device_times, _device_lines, _memory, _findings, _risks),
    *(_experiment, _compilers, _hot_lines, _sampled),
)
