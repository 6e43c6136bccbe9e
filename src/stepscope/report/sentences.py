"""Sentences that more than one surface says, so that terminal and page never disagree. Plain text, not escaped."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from stepscope.model import ProfiledFacts, Report
from stepscope.model.comparison import APPLIED, REFUSED
from stepscope.model.counted import things
from stepscope.model.metrics import RATES
from stepscope.report import compiler_words, words
from stepscope.report.escape import plain
from stepscope.report.words import MAX_COMMAND, Shortener, command_line, near

Row = dict[str, Any]
RUNS = "stepscope-runs"  # in which folders of runs are made whose name nobody gave


class Group(Struct, frozen=True):
    """A finding that no other explains, and the findings it explains, directly or not, each once."""

    finding: Row
    explained: tuple[Row, ...]


def groups(report: Report) -> list[Group]:
    """All groups; a finding with several causes stands below the most expensive one."""
    rows = {row["id"]: row for row in report.findings}
    known = {name for row in report.findings for name in row["explains"] if name in rows and name != row["id"]}
    taken: set[str] = set()
    found = []
    for row in (row for row in report.findings if row["id"] not in known):
        below = []
        for name in _below(row, rows):
            if name not in taken:
                taken.add(name)
                below.append(rows[name])
        found.append(Group(row, tuple(below)))
    # a report made elsewhere may hold a circle: nobody leads it, so each of it leads itself
    led = {group.finding["id"] for group in found}
    found += [Group(row, ()) for row in report.findings if row["id"] not in led | taken]
    position = {row["id"]: index for index, row in enumerate(report.findings)}
    return sorted(found, key=lambda group: min(position[row["id"]] for row in (group.finding, *group.explained)))


def members(report: Report, count: int) -> list[Row]:
    return [row for group in groups(report)[:count] for row in (group.finding, *group.explained)]


def _below(row: Row, rows: dict[str, Row]) -> Iterator[str]:
    seen, level = {row["id"]}, _explains(row, rows)
    while level:
        new = [name for name in dict.fromkeys(level) if name not in seen]
        seen.update(new)
        yield from new
        level = [below for name in new for below in _explains(rows[name], rows)]


def _explains(row: Row, rows: dict[str, Row]) -> Sequence[str]:
    return [name for name in row["explains"] if name in rows]


_SLOWED = 1.05  # from here on profiled steps are called slower: below it a mean of few steps moves by itself
_NOTHING = 0.005  # of the step: shown as a whole percentage it is none


def ended(status: int | None) -> str | None:
    """How the command ended, where it did not end well. `status` is the shell's."""
    if not status:
        return None
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"the command ended with status {status}"
    return f"the command was ended by {name} (status {status})"


def warnings(report: Report) -> list[str]:
    texts = [ended(report.run.get("exit_status"))]
    if report.steps and report.steps.get("low_confidence"):
        texts.append("few steady steps: take every figure below as a rough one")
    texts += [note["text"] for note in report.quality.get("notes", ()) if note["level"] == "warning"]
    return [text for text in texts if text]


def framework(report: Report) -> str | None:
    """Which training framework ran, what was not found of it, and what cut its steps; None for a loop of the user's."""
    facts = report.run.get("framework")
    if not facts:
        return None
    text = f"{facts['name']} {facts['version'] or '(version unknown)'}"
    if facts["on_top"]:
        text += f" with {' and '.join(facts['on_top'])}"
    if facts["also"]:
        text += f" (also {', '.join(facts['also'])})"
    if facts["cut_by"]:
        text += f"; steps cut by: {words.signal(facts['cut_by'])}"
    if facts["steps_counted"] is not None and facts["steps_counted"] == facts["steps_cut"]:
        text += f", as many as {facts['counter']} counts"
    if facts["missing"]:
        text += f"; not found in this version: {', '.join(facts['missing'])}"
    elif not facts["supported"]:
        text += f"; all its seams were found, though they were read in {' and '.join(facts['checked'])}"
    return text


MOST_RANGES = 120  # characters of ranks' numbers in a sentence


def many_ranks(report: Report) -> list[str]:
    """By what ranks were judged that were not read in full, the verdict, and who is missing; empty where all were."""
    verdict, read = report.views.get("many_ranks"), report.views.get("ranks_read")
    if not verdict or not read:
        return []
    of = f" of {verdict['world_size']:,}" if verdict["world_size"] not in (None, verdict["ranks"]) else ""
    hosts = words.things(read["hosts"], "host")
    said = [f"{verdict['ranks']:,}{of} ranks judged by the reduced tables of {hosts}: {verdict['reason']}"]
    if read["absent"]:
        named = read["absent_ranks"]
        if len(named) > MOST_RANGES:
            named = f"{named[:MOST_RANGES].rpartition(', ')[0]} …"
        said.append(f"Of {words.things(read['absent'], 'rank')} nothing that can be read is here: {named}")
    elif read["absent"] is None:
        said.append("How many ranks there should be is not known, so none can be called missing")
    return [*said, f"All other figures are of {looked_at(read)}"]


def looked_at(read: Mapping[str, Any]) -> str:
    """The ranks of which everything is that is not said of all; `read` is the view `ranks_read`."""
    full, by_steps = (", ".join(map(str, read[key])) for key in ("in_full", "by_steps"))
    parts = [f"rank{'s' * (len(read['in_full']) > 1)} {full}, read in full"] if full else []
    if by_steps:
        plural = "s" * (len(read["by_steps"]) > 1)
        parts.append(f"rank{plural} {by_steps}, of which only the reduced steps are here")
    return "; and of ".join(parts)


HANG_NOTES = 4


def hang(report: Report) -> list[tuple[str, str]]:
    """The verdict on a hang, where sources disagree on it, and what it stands on, each with its tone."""
    view = report.views.get("hang")
    if not view:
        return []
    said = [(f"Hang: {view['sentence']}", "head")]
    said += [(f"Sources disagree: {text}", "warning") for text in view["disagreements"]]
    read = [f"dumps of {words.things(view['dumps'], 'rank')}"] if view["dumps"] else []
    read += [f"{words.things(view['ras_reports'], 'report')} of NCCL RAS"] if view["ras_reports"] else []
    said.append((f"Judged by {' and '.join(read)}", "note"))
    more = len(view["notes"]) - HANG_NOTES
    said += [(text, "note") for text in view["notes"][:HANG_NOTES]]
    return said + ([(f"and {more} more notes in the report's files", "note")] if more > 0 else [])


def quality(report: Report) -> list[str]:
    """What reading traces cost, before any figure; nothing of a recording of ours on a CPU that lost nothing."""
    facts = report.quality.get("reading") or {}
    if not facts or (report.run.get("hosts") and not (facts["device_events"] or facts["lost"] or facts["repaired"])):
        return []
    return [text for text in (reading(report), links(report)) if text]


def reading(report: Report) -> str | None:
    """What was read of traces and what was lost, None where no trace was read."""
    facts = report.quality.get("reading")
    if not facts:
        return None
    traces = things(facts["traces"], "trace")
    counts = (("salvaged", "salvaged"), ("clipped", "overlaps cut"), ("repaired", "durations repaired"))
    said = [f"{words.count(facts['lost'])} lost" if facts["lost"] else "none lost"]
    said += [f"{words.count(facts[key])} {label}" for key, label in counts if facts[key]]
    return f"Read {traces}, {things(facts['events'], 'event')}: {', '.join(said)}"


def links(report: Report) -> str | None:
    """How much of the device time could be linked to operators and how, None where no trace was read."""
    facts = report.quality.get("reading")
    if not facts:
        return None
    if not facts["device_events"]:
        return "No work of a device in it: times are the host's"
    if facts["link_rate"] is None:
        return "No launch of any device work in it, so none is linked to operators"
    shares = [(words.term(method), share) for method, share in facts["linked_shares"].items()]
    shares += [("CUDA graph", facts["graph_share"]), ("no link", facts["unlinked_share"])]
    ways = ", ".join(f"{way} {words.percent(share)}" for way, share in shares if share)
    early = facts["before_recording_share"]
    before = f"; {words.percent(early)} of all was launched before the recording" if early else ""
    return f"Device time linked to operators: {words.percent(facts['link_rate'])} ({ways}){before}"


DEVICE_LINES = {
    "device": "Lines by the device time they cause",
    "cpu_op": "Lines by the time of the operators they call",
}
SHOWN_REASONS = 2  # why device time has no line


def device_rows(report: Report) -> list[dict[str, Any]]:
    """Device times as they are shown: of each trace what was launched in it, and all where that is more."""
    rows: list[dict[str, Any]] = []
    several = len({row["trace"] for row in report.views.get("device_time") or ()}) > 1
    for row in report.views.get("device_time") or ():
        launched = next(
            (other for other in rows if (other["rank"], other["trace"]) == (row["rank"], row["trace"])), None
        )
        if not row["events"] or (launched is not None and launched["events"] == row["events"]):
            continue
        label = f"rank {row['rank']}" + (" with earlier launches" if launched is not None else "")
        rows.append({**row, "label": f"{label} {row['trace']}" if several else label})
    return rows


def line_notes(row: Mapping[str, Any]) -> str:
    """What to know of a line by device time: time a step, whether it is the backward pass's, whether a library's."""
    said = [f"{words.milliseconds(row['ms_per_step'])} a step"] if row["ms_per_step"] is not None else []
    back = sum(1 for way in row["via"] if way != "direct")
    if back:
        said.append("mostly its backward" if next(iter(row["via"])) != "direct" else "with its backward")
    if row["guess"]:
        said.append("library code")
    return ", ".join(said)


def line_footer(view: Mapping[str, Any]) -> str | None:
    """What to know of the lines together, None where they are exact and the user's."""
    said = []
    if any(row["guess"] for row in view["lines"]):
        said.append("library code: no code of yours is on the stack there, so this is a guess")
    whole = [row for row in view["lines"] if not row["exact_line"]]
    if any(row.get("code") is None for row in whole):
        said.append("a line is where its function begins; --source-root DIR finds the call in it")
    elif whole:
        said.append("where several calls of a function may be meant, a line is where the function begins")
    return "; ".join(said) or None


def unattributed(view: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(why, share) of the device time that has no line, the largest first."""
    return [(why, share) for why, share in view["unattributed_shares"].items() if share][:SHOWN_REASONS]


def step_kind(report: Report, steps: Mapping[str, Any]) -> str:
    text = (
        f"{words.term(steps['kind'])}: {counted(steps, named=False)}, "
        f"{words.milliseconds(steps['mean_ms'])} a step "
        f"(median {words.number(steps['median_ms'])}, p95 {words.number(steps['p95_ms'])})"
    )
    if report.steps is not None and is_slower(report, steps):
        text += f", slower than {words.term(report.steps['kind'])}"
    compiling = compiler_words.kind_note(report, steps["kind"])
    return f"{text}; {compiling}" if compiling else text


def stands_out(report: Report, steps: Mapping[str, Any]) -> bool:
    """Whether a kind that is not the headline's deserves a look: slower, or compiling again and again."""
    return is_slower(report, steps) or compiler_words.kind_note(report, steps["kind"]) is not None


def is_slower(report: Report, steps: Mapping[str, Any]) -> bool:
    return report.steps is not None and steps["mean_ms"] > report.steps["mean_ms"]


def counted(steps: Mapping[str, Any], *, named: bool = True) -> str:
    """Which steps the figures stand on, and how many of how many: 178 of 192 train steps are steady.

    `named` False leaves out the kind, for where it has been said.
    """
    ranks, count = len(steps.get("ranks") or ()), steps["count"]
    every = count + sum((steps.get("excluded") or {}).values())
    by_rank = set(steps.get("by_rank") or ())
    noun, of = f"{words.term(steps['kind'])} step" if named else "step", ""
    if ranks > 1:
        of = f" of {ranks} ranks together"
        if len(by_rank) == 1 and every % ranks == 0:
            count, every, of = by_rank.pop(), every // ranks, f" on each of {ranks} ranks"
    if count == every:
        return f"{words.things(count, noun)}{of}"
    return f"{words.count(count)} of {words.things(every, noun)}{of} {'is' if count == 1 else 'are'} steady"


def profiled(facts: ProfiledFacts | None) -> str | None:
    """What to know of every total of operators, kernels and modules; None where no step was profiled."""
    if facts is None:
        return None
    text = f"Of {words.things(facts.steps, 'profiled step')}, {words.milliseconds(facts.mean_ms)} each"
    if facts.steady_ms is None:
        return f"{text}: a profiler makes steps longer, by how much is not known here"
    ratio, steady = facts.mean_ms / facts.steady_ms, words.milliseconds(facts.steady_ms)
    if ratio < _SLOWED:
        return f"{text}, as long as the steady step's {steady}"
    return f"{text}, {ratio:.1f} times the steady step's {steady}: times below are longer than in steady steps"


def fixed_costs(costs: Mapping[str, Any]) -> str | None:
    if costs.get("total_s") is None:
        return None
    # warm-up includes the first step
    warmup = ("first_step_s", "first step") if costs.get("warmup_s") is None else ("warmup_s", "warm-up")
    shown = (("before_first_step_s", "before the first step"), warmup, ("windows_s", "profiler windows"))
    parts = [f"{label} {words.seconds(costs[key])}" for key, label in shown if costs.get(key)]
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"Paid once: {words.seconds(costs['total_s'])}{detail}"


def healthy(report: Report) -> str | None:
    """What to say where no rule found a loss.

    None where no rule could be judged, a compiler's own rule warns, or `unexplained` has something to say.
    """
    if compiler_words.warns(report) or unexplained(report) is not None:
        return None
    floor_share = report.views.get("floor_share")  # the smallest loss that would have been named
    limit = f" above {words.percent(floor_share)} of the step" if floor_share is not None else ""
    if not report.abstained:
        return f"Nothing worth fixing{limit}."
    judged = report.views.get("rules_judged")
    return f"Nothing worth fixing{limit}, by the rules that could be judged." if judged else None


def unexplained(report: Report) -> str | None:
    """What of the step nobody explained, where that is much; without a finding also what was not seen at all."""
    row = report.unexplained
    if row is None:
        return None
    said = []
    if row["large"]:
        parts = ", ".join(f"{part['what']} {words.percent(part['share'])}" for part in row["parts"])
        said.append(
            f"No finding explains {words.percent(row['share'])} of the step ({words.milliseconds(row['ms'])}): {parts}."
        )
    if row["unseen"] and not report.findings:
        floor_share = report.views.get("floor_share")
        limit = f" above {words.percent(floor_share)} of the step" if floor_share is not None else ""
        lead = "" if said else f"No loss{limit} was found, but not all could be seen. "
        said.append(f"{lead}Not recorded: {'; '.join(row['unseen'])}.")
    return " ".join(said) or None


def is_judged(report: Report) -> bool:
    """Whether steps were seen, or counted by a compiler, so that "nothing" is worth saying."""
    return report.steps is not None or compiler_words.without_steps(report) is not None


def cost(finding: Mapping[str, Any]) -> str:
    lost, step = words.milliseconds(finding["cost_ms_per_step"]), finding.get("step_ms")
    if finding.get("basis") == "all" and step:
        lost = f"{lost} of {words.milliseconds(step)}"
    return f"{lost} a step, {words.percent(finding['share'])}"


def basis(finding: Mapping[str, Any]) -> str | None:
    step = finding.get("step_ms")
    if finding.get("basis") != "all" or not step:
        return None
    return f"of {words.milliseconds(step)}, the mean of all steps: those that compile, warm up or are profiled too"


def overlap(report: Report) -> str | None:
    counted = report.views.get("findings_share") or 0.0
    if counted <= 1.0:
        return None
    return (
        f"These findings overlap: together they are {words.percent(counted)} of the step, so what fixing one gains may "
        "not be left for another."
    )


def gain(finding: Mapping[str, Any]) -> str:
    """The prediction where there is one, and the ceiling; why it is above the cost, where it is."""
    ceiling, expected = words.percent(finding["gain_ceiling"]), finding["expected_gain"]
    said = f"{ceiling} of the step at most"
    if expected:
        low, high = words.percent(expected["low"]), words.percent(expected["high"])
        likely = high if low == high else f"up to {high}" if expected["low"] < _NOTHING else f"{low} to {high}"
        said = f"{likely} of the step expected, {ceiling} at most"
    above = finding["gain_ceiling"] - finding["share"] >= _NOTHING and ceiling != words.percent(finding["share"])
    return f"{said}, an upper bound; the cost is an estimate" if above else said


def disagreement(row: Mapping[str, Any]) -> str:
    first, second = (words.quantity(row[key], str(row["unit"])) for key in ("value", "other"))
    return f"disagree on {row['quantity']}: {first} by {row['source']}, {second} by {row['other_source']}"


def proof(finding: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    """The command that proves a finding's fix: an experiment with all its knobs as one candidate.

    None where it names none, where how the run was started is not known, or where it is too long to be shown whole.
    """
    command = [str(word) for word in run.get("command") or ()]
    tries = [f"{row['knob']}={row['value']}" for row in finding.get("try") or ()]
    if not tries or not command:
        return None
    knobs = [word for each in tries for word in ("--try", each)]
    if len(tries) > 1:
        knobs.append("--together")
    if any("," in each for each in tries):  # a comma parts candidates
        knobs = ["--from", str(run.get("folder") or "RUN")]
    line = plain(shlex.join(["stepscope", "experiment", *knobs, "--", *command]), MAX_COMMAND + 1)
    return line if len(line) <= MAX_COMMAND else None


def next_steps(report: Report, cwd: str | None = None) -> list[tuple[str, str]]:
    """(what for, command) of what is worth doing after the report, for one who stands in `cwd`.

    A run's command was typed in a folder of its own, which is changed to where that is another one.
    """
    steps, command = [], command_line(report.run)
    typed_in = str(report.run.get("cwd") or "")
    there = f"cd {shlex.quote(plain(typed_in))} && " if cwd and os.path.isdir(typed_in) and typed_in != cwd else ""
    proofs = (proof(finding, report.run) for finding in report.findings)
    if proving := next(filter(None, proofs), None):
        steps.append(("prove a fix", there + proving))
    if report.findings and command:
        out = _next_folder(str(report.run.get("folder") or ""), typed_in)
        steps.append(("after a change", f"{there}stepscope run {out}-- {command}"))
    if any(note["source"] == "sampler" and note["level"] == "warning" for note in report.quality.get("notes", ())):
        steps.append(("more evidence", "stepscope doctor"))
    return steps


def _next_folder(folder: str, typed_in: str) -> str:
    """`--out` beside the folder of a run that was named; nothing where its name was made."""
    if not folder or os.path.basename(os.path.dirname(folder)) == RUNS:
        return ""
    free = next(path for number in itertools.count(2) if not os.path.lexists(path := f"{folder}-{number}"))
    return f"--out {shlex.quote(plain(near(free, typed_in)))} "


def without_steps(report: Report) -> str:
    counted = compiler_words.without_steps(report)
    if counted:
        return counted
    if report.quality.get("reading") or report.run.get("hosts"):
        return "no step was seen"
    if report.quality.get("counts", {}).get("stack_samples"):
        return "sampled stacks, which know no steps; stepscope hotspots lists their lines"
    if report.views.get("hang") and not report.run.get("ranks"):
        return "the last calls of ranks, which know no steps"
    return "a recording of memory" if report.views.get("memory") else "no step was seen"


MAX_KNOBS = 8  # in the line


def refused(report: Report) -> bool:
    trial = report.views.get("trial") or {}
    return REFUSED in (trial.get("standing") or {}).values()


def trial_line(report: Report, shorten: Shortener) -> str | None:
    """Knobs and seed in a sentence without a head; None of a run without any. Not escaped for HTML."""
    trial = report.views.get("trial")
    if not trial:
        return None
    parts = list(_knobs(trial, shorten)) or ["none"]
    if trial["seed"] is not None:
        parts.append(f"seed {trial['seed']}")
    if trial["skipped"]:
        parts.append(f"{words.count(trial['skipped'])} entries could not be read")
    return "; ".join(parts)


def _knobs(trial: Row, shorten: Shortener) -> Iterator[str]:
    for name in list(trial["standing"])[:MAX_KNOBS]:
        rows = [row for row in trial["knobs"] if row["knob"] == name]
        standing_of = trial["standing"][name]
        yield _knob(standing_of, rows, shorten) if rows else f"{plain(name)} ({standing_of})"
    if len(trial["standing"]) > MAX_KNOBS:
        yield f"{len(trial['standing']) - MAX_KNOBS} more knobs"


def _knob(found: str, rows: list[Row], shorten: Shortener) -> str:
    """`loader.num_workers=2 (applied, train.py:77)`, `amp.dtype=bf16 NOT applied: why`."""
    setting = f"{plain(rows[0]['knob'])}={plain(rows[0]['value'])}"
    bad = next((row for row in rows if not row["applied"]), None)
    if found == REFUSED and bad is not None:
        where = f" on rank {bad['rank']}" if any(row["applied"] for row in rows) and bad["rank"] is not None else ""
        return f"{setting} NOT applied{where}{_why(bad)}"
    good = [row for row in rows if row["applied"]]
    places = dict.fromkeys(_place(row, shorten) for row in good if row["place"] is not None)
    at = f", {next(iter(places))}" if places else ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    rest = "" if found == APPLIED or bad is None else f"; not at {_place(bad, shorten)}{_why(bad)}"
    return f"{setting} (applied{at}{more}{rest})"


def _why(row: Row) -> str:
    return f": {plain(row['reason'])}" if row["reason"] else ""


def _place(row: Row, shorten: Shortener) -> str:
    place = row["place"]
    return shorten(place["file"], place["line"]) if place is not None else "another place"


def energy(report: Report) -> Iterator[str]:
    """What the run drew, and what it cost where prices are known; nothing where nothing was read or asked for."""
    view = report.views.get("energy")
    if not view:
        return
    if view["absent"] is None:
        parts = [f"{words.joules(view['joules'])} ({words.number(view['wh'])} Wh)", f"{words.count(view['mean_w'])} W"]
        per_step = view["per_step"]
        parts += [
            f"{words.joules(per_step[f'joules_per_{of}'])} a {of}"
            for of in ("step", "sample")
            if per_step[f"joules_per_{of}"] is not None
        ]
        if view["idle_joules_per_step"] is not None:
            share = words.percent(view["idle_share"])
            parts.append(
                f"of it at most {words.joules(view['idle_joules_per_step'])} while GPUs wait ({share}, estimated)"
            )
        yield f"Energy: {', '.join(parts)}; {', '.join(view['sources'])}"
    elif view["domains"] or view["cost"] is not None:
        yield f"Energy: not told of the run ({view['absent']})"
    costs = (("the run", view["cost"]), ("1,000 steps", view["cost_per_1000_steps"]))
    said = [f"{text} for {of}" for of, cost in costs if cost is not None and (text := cost_text(cost))]
    if said:
        yield f"Cost, at your prices: {'; '.join(said)}"


def cost_text(cost: Row) -> str:
    """In the user's currency, which has no sign here; empty where nothing is known."""
    parts = [words.money(cost["cost"])] if cost["cost"] is not None else []
    if cost["cost"] is None:
        known = (("energy", cost["energy"]), ("GPUs", cost["gpus"]))
        parts = [f"{words.money(value)} of {what}" for what, value in known if value is not None]
    if cost["co2_g"] is not None:
        parts.append(f"{words.number(cost['co2_g'])} g of CO2")
    return ", ".join(parts)


LOSS, NORM = "train/loss", "train/grad_norm"


def learned(report: Report) -> str | None:
    """`Loss 2.31 -> 0.42 over 1,000 steps; gradient norm 1.2 (median), ...`; None where nothing tells of it."""
    view = report.views.get("metrics") or {}
    by_name: dict[str, Row] = {}
    for row in view.get("series", ()):
        by_name.setdefault(row["name"], row)
    rates = [row for name, row in by_name.items() if name.startswith(RATES)]
    parts = []
    if (loss := by_name.get(LOSS)) and loss["last"] is not None:
        parts.append(f"loss {_course(loss)} over {things(loss['points'], 'update')}")
    if (norm := by_name.get(NORM)) and norm["median"] is not None:
        clipped = view.get("clipping")
        share = f", clipped in {words.percent(clipped['clipped_share'])} of updates" if clipped else ""
        parts.append(f"gradient norm {norm['median']:.3g} (median){share}")
    if rates and rates[0]["last"] is not None:
        more = len({(row["first"], row["last"]) for row in rates}) > 1
        parts.append(f"lr {_course(rates[0])}{f' (first of {len(rates)} groups)' if more else ''}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] if text else None


def _course(row: Row) -> str:
    first, last = f"{row['first']:.3g}", f"{row['last']:.3g}"
    return first if first == last else f"{first} -> {last}"


def stood_out(report: Report) -> list[str]:
    """What of the series broke, leapt or changed its level: the first value lost, then the largest of each."""
    view = report.views.get("metrics") or {}
    spikes = sorted(view.get("spikes", ()), key=lambda row: -(row["score"] or 0))
    changes = sorted(view.get("changes", ()), key=lambda row: -abs(row["change"] or 0))
    lost = view.get("non_finite")
    return [
        row["sentence"] for row in (*((lost,) if lost else ()), *spikes[:1], *changes[:1], *spikes[1:], *changes[1:])
    ]
