"""A report's screen as blocks: what the terminal shows of a run, and a notebook below a cell.

Headline, what to distrust, where a step goes, findings, and what belongs to them, most important first; pages show the
rest. Each section yields its blocks, and nothing where there is nothing worth a look.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.model import Report
from stepscope.report import compiler_words as compiled
from stepscope.report import replays, sentences, words
from stepscope.report.escape import one_line, plain
from stepscope.report.words import Shortener

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext

MAX_WARNINGS = 4
SENTENCE = 2_000


class Screen(Alone, frozen=True, kw_only=True):
    """What a section is made from; `shorten` shows places as the reader knows them."""

    report: Report
    shorten: Shortener

    def place(self, place: Row, *, named: bool = True) -> dict[str, Any]:
        """A line of code, with its function if `named`."""
        file, line = str(place["file"]), place.get("line")
        function = place.get("function") if named else None
        return blocks.place(file, line, function or None, shown=self.shorten(file, line), code=place.get("code"))

    def view(self, name: str) -> Any:
        """A view of the report, None where it is missing or empty."""
        return self.report.views.get(name) or None

    def rows(self, name: str, rows: Iterable[Row], title: str = "", notes: Iterable[str] = ()) -> list[Block]:
        return rows_table(self, f"screen/{name}", rows, title=title, notes=notes)


def _more(left: int, what: str) -> Iterator[Block]:
    if left > 0:
        yield blocks.text(what.format(words.count(left)), "note")


def headline(screen: Screen) -> Iterator[Block]:
    """What was read, the steps, knobs, and what a reader has to know before the first figure."""
    report, steps = screen.report, screen.report.steps
    yield from (blocks.text(one_line(text), tone) for text, tone in sentences.hang(report))
    yield from (blocks.text(text, "note") for text in sentences.quality(report))
    for number, text in enumerate(sentences.many_ranks(report)):
        yield blocks.text(one_line(text), "note" if number else "head")
    name = plain(report.run.get("name") or "run")
    if steps is None:
        yield blocks.text(f"{name}: {sentences.without_steps(report)}", "head")
    else:
        rates = [f"{words.number(steps['per_second'])} steps/s"]
        if steps.get("samples_per_second") is not None:
            rates.append(f"{words.number(steps['samples_per_second'])} samples/s")
        yield blocks.text(
            f"{name}: {sentences.counted(steps)}, {words.number(steps['mean_ms'])} ms a step (median "
            f"{words.number(steps['median_ms'])}, p95 {words.number(steps['p95_ms'])}), {', '.join(rates)}; cut by "
            f"{words.signal(steps.get('signal', ''))}",
            "head",
        )
        for said in (sentences.framework(report), compiled.kind_note(report, steps["kind"])):
            if said:
                yield blocks.text(one_line(said))
        for other in report.views.get("steps_by_kind", ())[1:]:
            tone = "plain" if sentences.stands_out(report, other) else "note"
            yield blocks.text(sentences.step_kind(report, other), tone)
    knobs = sentences.trial_line(report, screen.shorten)
    if knobs:
        yield blocks.text(f"Knobs: {one_line(knobs)}", "warning" if sentences.refused(report) else "head")
    texts = sentences.warnings(report)
    yield from (blocks.text(one_line(text), "warning") for text in texts[:MAX_WARNINGS])
    yield from _more(len(texts) - MAX_WARNINGS, "and {} more notes on quality in the report's files")


CALLS, RANKS = 5, 8


def hang_rows(rows: Iterable[Row], shorten: blocks.Shorten) -> Iterator[Row]:
    """Rows of the view of a hang as a table takes them: what is not said is missing, where a rank stood is a place."""
    for row in rows:
        stood = row.get("stands")
        shown = {"stands": blocks.place_of(stood, shorten)} if stood else {}
        yield {key: None if value in ("", []) else value for key, value in row.items()} | shown


def _hang(screen: Screen) -> Iterator[Block]:
    """Who waits in which call, who made another one, and where those stand who did not come."""
    view = screen.view("hang")
    if not view:
        return
    causes = [row for row in view["ranks"] if row["state"] in ("cause", "no dump")]
    for name, title, rows in (
        ("calls", "Open calls", view["calls"][:CALLS]),
        ("mismatches", "Calls that differ", view["mismatches"][:CALLS]),
        ("ranks", "Ranks that others wait for", causes[:RANKS]),
    ):
        yield from rows_table(screen, f"hang/{name}", hang_rows(rows, screen.shorten), title=title)
    yield from _more(len(view["calls"]) - CALLS, "{} more open calls: --table pending-calls")
    yield from _more(len(causes) - RANKS, "{} more such ranks: --table hang-ranks")


SPANS = 3  # shown one by one
SMALLEST = 0.0005  # share of a part that is still shown


def partition(screen: Screen) -> Iterator[Block]:
    """The mean step by part, and what was paid once."""
    if screen.report.steps is None:
        return
    parts = [part for part in screen.report.steps["partition"] if part["share"] > 0]
    fixed = sentences.fixed_costs(screen.report.views.get("fixed_costs") or {})
    known = len(parts) > 1 or any(part["category"] != "unattributed" for part in parts)
    yield from _split("Where a step goes", parts if known else [], fixed, screen)


def _split(title: str, parts: Sequence[Row], note: str | None, screen: Screen) -> Iterator[Block]:
    rows = [{**part, "part": words.term(part["category"])} for part in parts]
    notes = [note] if note else []
    for table in screen.rows("partition", rows, title, notes):
        yield table | {"stacked": True}
    if not rows:
        yield from (blocks.text(note, "note") for note in notes)


def _overviews(screen: Screen) -> Iterator[Block]:
    """Where profiled steps go, where nothing better is known of the run's steps: a journal of ours tells the phases of
    all of them."""
    overviews = screen.view("overview") or []
    parts = [part for part in (screen.report.steps or {}).get("partition", ()) if part["share"] > 0]
    if len(parts) > 1 and not any(item["basis"] == "device" for item in overviews):
        return
    for item in (item for item in overviews[:SPANS] if item["steps"]):
        marked = f"mean of {words.things(len(item['steps']), 'step')}"
        steps = marked if item["has_steps"] else "no step is marked: the whole trace"
        of = f" in {plain(item['span']['worker'])}, span {item['span']['span']}" if len(overviews) > 1 else ""
        late = f", {item['dropped_steps']} without their device work left out" if item["dropped_steps"] else ""
        mean = words.nanoseconds(item["wall"]["mean_ns"])
        title = f"Where a profiled step goes{of}: {mean} ({steps}{late})"
        parts = [
            {"category": words.PARTS.get(name, name), "ms": part["mean_ns"] / 1e6, "share": part["share"]}
            for name, part in item["parts"].items()
            if part["share"] >= SMALLEST
        ]
        shares = {name: part["share"] for name, part in item["plugin"].items()}
        plugin = (f"{name} {words.percent(share)}" for name, share in shares.items() if share >= SMALLEST)
        yield from _split(title, parts, f"As the TensorBoard plugin split it: {', '.join(plugin)}", screen)
    yield from _more(len(overviews) - SPANS, "{} more spans: --table overview")


STOOD_OUT = 3


def _learned(screen: Screen) -> Iterator[Block]:
    if text := sentences.learned(screen.report):
        yield blocks.text(one_line(text))
    found = sentences.stood_out(screen.report)
    yield from (blocks.text(one_line(text), "warning") for text in found[:STOOD_OUT])
    yield from _more(len(found) - STOOD_OUT, "and {} more changes and spikes in the report's files")


def _energy(screen: Screen) -> Iterator[Block]:
    yield from (blocks.text(one_line(text)) for text in sentences.energy(screen.report))
    warnings = (screen.view("energy") or {}).get("warnings") or ()
    yield from (blocks.text(one_line(text), "warning") for text in warnings[:ENERGY_WARNINGS])
    yield from _more(len(warnings) - ENERGY_WARNINGS, "and {} more such lines: --table energy")


ENERGY_WARNINGS = 2
GPUS = 6


def _gpus(screen: Screen) -> Iterator[Block]:
    gpus = [gpu for gpu in screen.view("gpus") or () if gpu["kernels"]]
    if not gpus:
        return
    rows = []
    for gpu in gpus[:GPUS]:
        of = f" {plain(gpu['span']['worker'])}, span {gpu['span']['span']}" if len(gpus) > 1 else ""
        rows.append({**gpu, "name": f"{gpu['gpu']['device']} {plain(gpu['gpu']['name'] or '')}{of}".strip()})
    yield from screen.rows("gpus", rows)
    more = f"{len(gpus) - GPUS} more in --table gpus; " if len(gpus) > GPUS else ""
    yield blocks.text(f"{more}utilisation says that some kernel ran, not that the GPU was full", "note")


TRACES = 4  # rows of the table of times


def _device_times(screen: Screen) -> Iterator[Block]:
    rows = sentences.device_rows(screen.report)
    if not rows:
        return
    yield from screen.rows("device-times", rows[:TRACES])
    more = f"{len(rows) - TRACES} more rows in the report's files; " if len(rows) > TRACES else ""
    yield blocks.text(f"{more}+ is what no compute hides; these four sum to the span", "note")


LINES, LINES_BESIDE_FINDINGS = 5, 3


def _device_lines(screen: Screen) -> Iterator[Block]:
    """Lines by the time they cause; what stacks sampled on the host says more about the host than operators do."""
    view = screen.view("device_lines")
    if not view or not view["total_ns"] or (view["basis"] != "device" and screen.view("stacks")):
        return
    yield blocks.text(sentences.DEVICE_LINES[view["basis"]], "head")
    rows: list[Row] = []
    for row in view["lines"][: LINES_BESIDE_FINDINGS if screen.report.findings else LINES]:
        code = row.get("code") if row["exact_line"] else None
        where = screen.place({**row["place"], "code": code})
        rows.append({"share": row["share"], "where": where, "notes": sentences.line_notes(row) or None})
    rows += [{"share": share, "where": plain(why)} for why, share in sentences.unattributed(view)]
    if not view["lines"]:
        yield blocks.text("no line could be found:", "note")
    yield from screen.rows("device-lines", rows)
    footer = sentences.line_footer(view)
    if footer:
        yield blocks.text(footer, "note")


PEAKS = 4
MEMORY_LINES = 3


def _memory(screen: Screen) -> Iterator[Block]:
    """The peaks of memory and the lines that stood in it then, where it was recorded with what tells them."""
    if screen.report.steps and not (screen.view("memory_losses") or {}).get("peaks"):
        return  # none but the host's is known, which is not shown
    view = screen.view("memory")
    curves = [curve for curve in (view or {}).get("curves", ()) if curve["peak_allocated_bytes"]]
    shown = [curve for curve in curves if curve["device"] != "cpu"] or ([] if screen.report.steps else curves)
    if not shown:
        return
    yield blocks.text("Memory at its peak", "head")
    yield from (blocks.text(_peak(curve, several=len(shown) > 1)) for curve in shown[:PEAKS])
    devices = {curve["device"] for curve in shown}
    own = [line for line in view["lines"] if line["device"] in devices and line["at_peak_bytes"] and line["place"]]
    rows = [
        {"held": line["at_peak_bytes"], "where": screen.place(line["place"], named=False)}
        for line in own[:MEMORY_LINES]
    ]
    yield from screen.rows("memory-lines", rows)
    for state in view["states"][:PEAKS]:
        free, fragmented = words.size(state["free_bytes"]), words.size(state["fragmented_bytes"])
        held = f"{words.size(state['reserved_bytes'])} held, {words.size(state['in_use_bytes'])} in use"
        snapshot = f"{plain(state['device'])} in the snapshot"
        yield blocks.text(f"{snapshot}: {held}, {free} free, of it {fragmented} fragmented", "note")


def _peak(curve: Row, *, several: bool) -> str:
    of = f" ({plain(curve['worker'])}, span {curve['span']})" if several else ""
    parts = [f"{plain(curve['device'])}{of}: {words.size(curve['peak_allocated_bytes'])} allocated"]
    for key, text in (
        ("peak_reserved_bytes", "{} reserved"),
        ("capacity_bytes", "of {}"),
        ("peak_before_bytes", "{} from before the recording"),
    ):
        if curve[key]:
            parts.append(text.format(words.size(curve[key])))
    return ", ".join(parts)


def findings(screen: Screen) -> Iterator[Block]:
    """Findings, then what no rule found, the rules with nothing to go by, and risks."""
    report = screen.report
    everywhere = set(report.run.get("ranks") or ())

    def cards(rows: Iterable[Row], *, risk: bool = False) -> Iterator[dict[str, Any]]:
        for row in rows:
            some = len(everywhere) > 1 and set(row["ranks"]) != everywhere  # of all ranks goes without saying
            made = card(row, report, screen.shorten, risk=risk)
            cost = None if risk else sentences.cost(row)
            yield {**made, "ranks": made["ranks"] if some else [], "learn": "", "cost": cost}

    causes = (row for group in sentences.groups(report) for row in (group.finding, *group.explained))
    yield blocks.findings(cards(causes), ())
    if overlap := sentences.overlap(report):
        yield blocks.text(overlap, "warning")
    healthy = sentences.healthy(report) if not report.findings and sentences.is_judged(report) else None
    if healthy:
        yield blocks.text(healthy, "good")
    if unexplained := sentences.unexplained(report):
        yield blocks.text(unexplained, "warning")
    yield blocks.findings((), cards(report.risks, risk=True), abstained=report.abstained, ignored=report.ignored)
    yield from _hottest(screen)


def card(
    row: Row, report: Report, shorten: blocks.Shorten, linked: Sequence[blocks.Link] = (), *, risk: bool = False
) -> dict[str, Any]:
    """A finding or risk of the report with all that is said of it; `linked` are pages that show more."""
    titles = {one["id"]: one["title"] for one in (*report.findings, *report.risks)}
    by = [one for one in (*report.findings, *report.risks) if row["id"] in one["explains"] and one["id"] != row["id"]]
    return {
        "id": row["id"],
        "rule": row["rule"],
        "category": row["category"],
        "title": one_line(row["title"], SENTENCE),
        "severity": row["severity"] if row["severity"] in ("critical", "warning", "info") else "info",
        "confidence": row["confidence"] if row["confidence"] in ("high", "medium", "low") else "low",
        "cost_ms_per_step": None if risk else row["cost_ms_per_step"],
        "share": None if risk else row["share"],
        "gain_ceiling": None if risk else row["gain_ceiling"],
        "expected_gain": None if risk or not row["expected_gain"] else dict(row["expected_gain"]),
        "gain": None if risk else sentences.gain(row),
        "of": None if risk else sentences.basis(row),
        "where": [where_of(place, shorten) for place in row["where"]],
        "ranks": list(row["ranks"]),
        "evidence": [
            {**dict(zip(("metric", "text"), words.evidence(dict(each)), strict=True)), "source": each["source"]}
            for each in row["evidence"]
        ],
        "fix": one_line(row["fix"], SENTENCE),
        "caveat": one_line(row["caveat"], SENTENCE),
        "learn": row["learn"] if row["learn"].startswith("https://") else "",
        "falsified_by": one_line(row["falsified_by"], SENTENCE),
        "try": [{"knob": each["knob"], "value": each["value"]} for each in row["try"]],
        "explains": [{"id": name, "title": titles[name]} for name in row["explains"] if name in titles],
        "explained_by": [{"id": one["id"], "title": one["title"]} for one in by],
        "disagreements": [one_line(sentences.disagreement(each), SENTENCE) for each in row.get("disagreements") or ()],
        "links": list(linked),
        "command": sentences.proof(row, report.run),
    }


def where_of(place: Row, shorten: blocks.Shorten) -> dict[str, Any]:
    """A place with the lines around it."""
    made = blocks.place_of(place, shorten)
    quoted = place.get("source")
    lines = None
    if quoted:
        numbered = enumerate(quoted["lines"], start=quoted["first_line"])
        lines = [{"line": number, "text": text, "here": number == place["line"]} for number, text in numbered]
    edited = bool(quoted and quoted["changed_since"])
    return {**made, "share": place.get("share"), "source": lines, "edited": edited}


def _experiment(screen: Screen) -> Iterator[Block]:
    document = screen.view("experiment")
    if document:
        from stepscope.dashboard.pages import experiments

        yield blocks.text("Experiment", "head")
        yield from experiments.outcome(screen, document)


def replayed(context: PageContext | Alone, replay: Row) -> Iterator[Block]:
    """An operator that was replayed alone: a table for each list of its inputs."""
    place = replay["place"]
    at = f" ({context.shorten(place['file'], place['line'])})" if place else ""
    yield blocks.text(f"Replayed alone: {plain(replay['operator'])}{at}", "head")
    for number, call in enumerate(replay["calls"]):
        yield blocks.text(replays.headline(replay, call))
        if call["reason"]:
            yield blocks.text(f"Not replayed: {one_line(call['reason'], SENTENCE)}", "warning")
        yield from rows_table(context, "screen/replay", replays.rows(replay, call), id=f"replay-{number}")
    for note in replay["notes"]:
        yield blocks.text(blocks.sentence(one_line(note, SENTENCE)), "note")


def _replays(screen: Screen) -> Iterator[Block]:
    for replay in (screen.view("replayed_operators") or ())[:MAX_REPLAYED]:
        yield from replayed(screen, replay)


MAX_REPLAYED = 3  # operators on a screen
CAUSES = 5
WARNINGS = 4
NOTES = 4
QUIET_KINDS = ("fallback",)  # told in a sentence for all of them
LISTED = 8  # findings whose causes need not be told again


def _compilers(screen: Screen) -> Iterator[Block]:
    view = compiled.view_of(screen.report)
    if view is None:
        return
    found = sentences.members(screen.report, LISTED)
    yield blocks.text("Compilers", "head")
    yield from (blocks.text(one_line(compiled.backend(facts))) for facts in view["backends"])
    kinds = view["steps"]
    if any(row["compiling_steps"] or row["compile_ms"] for row in kinds):
        several = len({row["backend"] for row in kinds}) > 1
        rows = [{**row, "name": f"{row['backend']}, {row['kind']}" if several else row["kind"]} for row in kinds]
        yield from screen.rows("compiling", rows)
    yield from (blocks.text(one_line(text), "note") for row in kinds if (text := compiled.after_warmup(row)))
    titles = [finding["title"] for finding in found]
    warnings = [row for row in view["warnings"] if not any(row["text"] in title for title in titles)]
    for text, note in map(compiled.warning, warnings[:WARNINGS]):
        yield blocks.text(f"{one_line(text)}  ({one_line(note)})", "warning")
    yield from _more(len(warnings) - WARNINGS, "and {} more such lines in the report's files")
    yield from _causes(view, found, screen)
    untold = [row for row in view["causes"] if row["kind"] in QUIET_KINDS and not compiled.told(row, found)]
    said = list(compiled.operators(untold))
    if not any(finding["category"] == "compile" for finding in found):
        said += [text for storm in view["storms"] for text in compiled.storm(storm)]
    yield from (blocks.text(one_line(text)) for text in said)
    yield from (blocks.text(one_line(note), "note") for note in view["notes"][:NOTES])


def _causes(view: Row, found: Sequence[Any], screen: Screen) -> Iterator[Block]:
    """Causes worth a line. A first compile is nobody's fault, unless the source cannot tell it from another."""
    blurred = {facts["backend"] for facts in view["backends"] if facts["recompiles"] is None}
    limits = {limit["cause"]: limit for limit in view["limits"]}
    left = [
        row
        for row in view["causes"]
        if row["kind"] not in QUIET_KINDS
        and (row["kind"] != "compile" or row["backend"] in blurred)
        and not (compiled.told(row, found) or compiled.says_nothing(row))
    ]
    rows = []
    for row in left[:CAUSES]:
        place, ranks = row["place"] or row["definition"] or row["call"], compiled.of_ranks(row, view)
        where = screen.place({**place, "code": row.get("code")}, named=False) if place else None
        often = f"{one_line(compiled.often(row))}{f', {ranks}' if ranks else ''}"
        rows.append({"what": one_line(compiled.what(row)), "where": where, "often": often})
    yield from screen.rows("causes", rows)
    for row in left[:CAUSES]:
        if row["id"] in limits:
            function = f"{plain(row['function'])}: " if row["function"] else ""
            yield blocks.text(f"{function}{one_line(compiled.eager(limits[row['id']]))}")
    yield from _more(len(left) - CAUSES, "and {} more causes: --table compiles")


HOT_LINES = 3  # shown where no finding points at a line
RANKS = 2  # whose waits are shown, the longest first
WAIT_PARTS = 5
SMALLEST_WAIT = 0.05  # of the loop: a shorter wait is not worth lines
SMALLEST_WAIT_PART = 0.03  # of a wait
SLOW_LINES = 4
RANK_LINES = 3
SMALLEST_STAGE = 0.01


def _hot_lines(screen: Screen) -> Iterator[Block]:
    stacks = screen.view("stacks")
    if stacks and stacks["hot_lines"] and not screen.report.findings:
        yield blocks.text("Most sampled lines", "head")
        yield from screen.rows("hot-lines", (_hot(row, screen) for row in stacks["hot_lines"][:HOT_LINES]))


def _hottest(screen: Screen) -> Iterator[Block]:
    """Beside findings the first of the most sampled lines alone: they need not speak of it."""
    stacks = screen.view("stacks")
    if stacks and stacks["hot_lines"] and screen.report.findings:
        row = {**stacks["hot_lines"][0], "code": None}
        yield from screen.rows("hottest", [{"what": "Most sampled", **_hot(row, screen)}])


def _hot(row: Row, screen: Screen) -> dict[str, Any]:
    file, _, leaf = (row.get("library_leaf") or "").rpartition(":")
    inside = f", in {plain(leaf)} ({plain(posixpath.basename(file))})" if leaf else ""
    return {"share": row["share"], "where": screen.place(row), "doing": f"{words.term(row['phase'])}{inside}"}


def _waits(screen: Screen) -> Iterator[Block]:
    waits = (screen.view("sampled") or {}).get("waits") or ()
    if any(row["category"] == "input" for row in screen.report.findings):  # names the lines of a loading main process
        waits = [wait for wait in waits if not _is_alone(wait)]
    if any(wait["idle_sampled"] is False for wait in waits):
        text = "waiting threads were not sampled, so how long the loader is waited for cannot be said"
        yield blocks.text(text, "warning")
    seen = [wait for wait in waits if wait["idle_sampled"] is not False and (wait["wait_share"] or 0) >= SMALLEST_WAIT]
    for wait in sorted(seen, key=lambda wait: -wait["wait_share"])[:RANKS]:
        step = "" if wait["wait_ms_per_step"] is None else f", {words.milliseconds(wait['wait_ms_per_step'])} a step"
        whose = f"rank {wait['rank']}'s loop" if len(waits) > 1 else "the loop"
        samples = words.count(wait["samples"])
        yield blocks.text(
            f"In the loader: {words.percent(wait['wait_share'])} of {whose}{step} ({samples} samples)", "head"
        )
        parts = [part for part in wait["parts"][:WAIT_PARTS] if part["share"] >= SMALLEST_WAIT_PART]
        rows = [{"share": part["share"], "what": _wait_part(part, screen)} for part in parts]
        yield from screen.rows("waits", rows)
        if not wait["simultaneous"] and not _is_alone(wait):
            yield blocks.text("what workers did in the whole period stands for what they did during waits", "note")
    yield from _more(len(seen) - RANKS, "{} more ranks wait for their loaders")


def _is_alone(wait: Row) -> bool:
    return all(part["kind"] == "loading_here" for part in wait["parts"])


def _wait_part(part: Row, screen: Screen) -> str:
    kind, place = words.WAIT_PARTS.get(part["kind"], words.term(part["kind"])), part["place"]
    if place:
        named = f"  {plain(place['function'])}" if place["function"] else ""
        return f"{kind} at {screen.shorten(place['file'], place['line'])}{named}"
    if part["lines"] > 1:
        return f"{kind} at {words.count(part['lines'])} more lines"
    return f"{kind} in {plain(part['leaf'])}" if part["leaf"] else kind


def _slow_steps(screen: Screen) -> Iterator[Block]:
    view = (screen.view("sampled") or {}).get("slow_steps")
    if not view:
        return
    yield blocks.text(
        f"Slow steps: {words.count(view['slow_steps'])} above {words.milliseconds(view['threshold_ms'])} take "
        f"{words.milliseconds(view['slow_mean_ms'])}, {words.count(view['typical_steps'])} typical ones "
        f"{words.milliseconds(view['typical_mean_ms'])}",
        "head",
    )
    rows = [
        {
            "extra_ms": line["extra_ms_per_step"],
            "where": screen.place(line["place"]),
            "note": words.term(line["phase"]) + (", in slow steps only" if line["only_slow"] else ""),
        }
        for line in view["lines"][:SLOW_LINES]
    ]
    yield from screen.rows("slow-lines", rows)
    if not view["lines"]:
        yield blocks.text("no single line makes them slow", "note")


def _rank_lines(screen: Screen) -> Iterator[Block]:
    view = (screen.view("sampled") or {}).get("rank_lines")
    if not view or not (view["lines"] or view["straggler"] is not None):
        return
    yield blocks.text(f"Where ranks differ: {one_line(view['verdict'])}", "head")
    show = words.milliseconds if view["unit"] == "ms per step" else words.percent
    rows = []
    for line in view["lines"][:RANK_LINES]:
        values = line["by_rank"].values()
        phase = f"{words.term(line['phase'])}{', waiting' if line['waiting'] else ''}: " if line["phase"] else ""
        spread = f"{show(max(values))} on rank {line['most']}, down to {show(min(values))}"
        rows.append({"where": screen.place(line["place"]), "spread": f"{phase}{spread}"})
    yield from screen.rows("rank-lines", rows)


def _stages(screen: Screen) -> Iterator[Block]:
    view = screen.view("sampled") or {}
    shares = {words.STAGES.get(row["stage"], words.term(row["stage"])): row["share"] for row in view.get("stages", ())}
    phases = {words.term(phase): share for phase, share in view.get("phases", {}).items()}
    for least, text, given in (
        (2, "Sampled in the main process", shares),
        # where steps are known their phases are measured, which is better than samples
        (1, "Sampled in the loop, by what stands on the stack", phases if screen.report.steps is None else {}),
    ):
        said = [f"{name} {words.percent(share)}" for name, share in given.items() if share >= SMALLEST_STAGE]
        if len(said) >= least:
            yield blocks.text(f"{text}: {', '.join(said)}", "note")


SECTIONS: tuple[Callable[[Screen], Iterator[Block]], ...] = (
    *(
        headline,
        _hang,
        partition,
        _learned,
        _energy,
        _overviews,
        _gpus,
        _device_times,
        _device_lines,
        _memory,
        findings,
        _experiment,
        _replays,
    ),
    *(_compilers, _hot_lines, _waits, _slow_steps, _rank_lines, _stages),
)


def sections(
    report: Report,
    shortener: Shortener | None = None,
    chosen: Sequence[Callable[[Screen], Iterator[Block]]] = SECTIONS,
) -> list[list[Block]]:
    """The blocks of each section that has any."""
    screen = Screen(report=report, shorten=shortener or Shortener(report.run))
    return [made for section in chosen if (made := list(section(screen)))]
