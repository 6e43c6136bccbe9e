"""What was read, what was lost, who was not heard from and what could be linked, in words and counts.

Shares are of device time: the summed duration of kernels, copies and fills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from stepscope.model import Note, Quality
from stepscope.model.counted import things
from stepscope.read.raw import RawHost, RawRank, RawRun
from stepscope.read.text import integer, string
from stepscope.tables.cache import EventsTable
from stepscope.tables.links import METHODS
from stepscope.tables.processes import RANK, HostProcesses, job_notes

REMEDY = (
    "run it without -I, -E or -S, keep PYTHONPATH and STEPSCOPE_RECORD in its environment, and for a container run "
    "stepscope inside it"
)
# Without stopping the process a sampler cannot read a stack that changes under its eyes. In a loop of Python code a
# fifth failed, and its share was seen as 47 % where steps measured 61 %; a few percent shift no figure that matters.
_MANY_FAILED = 0.05
# Faults per step before and after a window: medians over steps, the first of a process left out.
_SETTLED, _FEW_FAULT_STEPS, _FAULT_STEPS = 2, 6, 40
_FAULTS_CHANGED, _FAULTS_CHANGED_SHARE = 1000, 0.1
_MAX_NAMED = 3  # files or processes named in one note
_MAX_QUOTED = 300  # characters of a recorded message in a note

INFO, WARNING = "info", "warning"
# loss -> (level, what to say; {n} is the count, {s} and {were} agree with it)
_LOSSES = msgspec.json.decode(Path(__file__).with_name("losses.json").read_bytes(), type=dict[str, tuple[str, str]])
_SAMPLERS: dict[Any, tuple[str, str]] = {
    "agent": (INFO, "stacks come from a thread inside the process, at a lower rate, not from py-spy"),
    "none": (WARNING, "no stacks were sampled, so lines rest on the window alone"),
}
_SKIPPED = {
    "window_skipped": "no profiler window was opened in",
    "suspended": "probes were suspended, so some phases are unknown, in",
}
# losses that have another name in the counts
_COUNTED_AS = {"bad_lines": "skipped_lines", "bad_steps": "skipped_steps", "skipped_samples": "stack_samples_skipped"}


def quality(
    raw: RawRun,
    processes: Sequence[HostProcesses],
    events: EventsTable,
    stack_counts: Counter[str],
    unknown_messages: int,
) -> Quality:
    """Counts (every one of them at least 0) and notes, warnings first.

    `unknown_messages` of compilers are worded in a way that is not known.
    """
    segments = [segment for host in raw.hosts for segment in host.segments]
    counts: Counter[str] = Counter({_COUNTED_AS.get(loss, loss): raw.losses.counts.get(loss, 0) for loss in _LOSSES})
    counts["steps_read"] = sum(len(rank.steps) for rank in raw.ranks)
    counts["stack_errors"] = sum(max(segment.errors or 0, 0) for segment in segments)
    counts["segments"] = len(segments)
    counts["segments_failed"] = sum(segment.status == "failed" for segment in segments)
    counts["probe_errors"] = sum(len(_events(rank, "probe_error")) for rank in raw.ranks)
    for name in ("stack_samples", "torn_stack_samples", "own_stack_samples", "left_out_path_samples"):
        counts[name] = stack_counts[name]
    for name in EVENT_COUNTS:
        counts[name] = events.counts[name]
    lost, files = raw.losses.counts, raw.losses.files
    told = ((loss, level, text) for loss, (level, text) in _LOSSES.items() if text and lost.get(loss))
    notes = [Note(level, _of(text, lost[loss]), _named(files[loss])) for loss, level, text in told]
    notes += [*_host_notes(raw.hosts), *_process_notes(processes), *_stack_notes(counts)]
    notes += [*_foreign_notes(raw.hosts, raw.ranks), *job_notes(raw)]
    for rank in raw.ranks:
        notes += [*_rank_notes(rank, events), *_faults_at_window(rank)]
    notes += [*_read(events), *_links(events)]
    if unknown_messages:
        # compilers word their messages anew in every release; one that is not understood is counted, not swallowed
        text = "{n} compiler message{s} in words that this version does not know {were} counted, the cause is unknown"
        notes.append(Note(WARNING, _of(text, unknown_messages), "torch.compile"))
    if not counts["steps_read"]:
        notes += _no_steps(raw, processes)
    notes.sort(key=lambda note: note.level != WARNING)
    return Quality(counts=dict(counts), notes=tuple(notes))


def _of(text: str, count: int) -> str:
    return text.format(n=count, s="" if count == 1 else "s", were="was" if count == 1 else "were")


def _said(source: str, *notes: tuple[object, str, str]) -> Iterator[Note]:
    """The notes, (whether it holds, level, text), that hold."""
    return (Note(level, text, source) for holds, level, text in notes if holds)


def _quoted(value: Any) -> str:
    return (string(value) or "no reason recorded")[:_MAX_QUOTED]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _host_notes(hosts: Sequence[RawHost]) -> Iterator[Note]:
    endless = [host.name for host in hosts if host.name and host.manifest and host.manifest.get("ended_ns") is None]
    if endless:
        where = f"host {endless[0]}" if len(endless) == 1 else f"{len(endless)} hosts ({_named(endless)})"
        text = f"the recording on {where} never ended: stepscope was killed, or the run is still going"
        yield Note(WARNING, text, f"host-{endless[0]}/manifest.json")
    for host in hosts:
        if not host.name:
            continue  # files of stacks that something else recorded
        source, manifest = f"host-{host.name}/manifest.json", host.manifest
        if manifest is None:
            text = f"host {host.name} left no manifest: command, hardware and exit are unknown"
            yield Note(WARNING, text, source)
            continue
        problems, sampler = manifest.get("problems"), manifest.get("sampler")
        for problem in problems[:_MAX_NAMED] if isinstance(problems, list) else ():
            yield Note(WARNING, f"on host {host.name}: {_quoted(problem)}", source)
        if isinstance(sampler, dict) and string(sampler.get("source")) in _SAMPLERS:
            level, text = _SAMPLERS[sampler["source"]]
            yield Note(level, f"{text}: {_quoted(sampler.get('reason'))}", source)


def _process_notes(processes: Iterable[HostProcesses]) -> Iterator[Note]:
    for host in processes:
        silent = [process for process in host.all if process.role == RANK and process.torch and not process.reported]
        texts = [
            f"the agent never reported from process {process.pid} ({(process.command or 'unknown command')[:200]}), "
            f"so it has no steps: {REMEDY}"
            for process in silent[:_MAX_NAMED]
        ]
        if len(silent) > _MAX_NAMED:
            texts.append(f"the agent never reported from {len(silent) - _MAX_NAMED} more processes with torch")
        yield from (Note(WARNING, text, f"host-{host.host}/processes.jsonl") for text in texts)


def _stack_notes(counts: Counter[str]) -> Iterator[Note]:
    torn, taken, missed = counts["torn_stack_samples"], counts["stack_samples"], counts["stack_errors"]
    failed, left_out = counts["segments_failed"], counts["left_out_path_samples"]
    yield from _said(
        "stacks.jsonl",
        (failed, WARNING, f"{failed} of {counts['segments']} stack segments failed, their time has no stacks"),
        (
            missed > _MANY_FAILED * (taken + missed),
            INFO,
            f"{missed} of {taken + missed} samples could not be taken while the program ran on; most are missing "
            "from busy Python code, whose share is larger than stacks show",
        ),
        (torn, INFO, f"of {taken} sampled stacks {torn} left out as torn: read while the program ran on"),
    )
    text = f"{left_out} samples are of more different call paths than are kept; they stand under one name"
    yield from _said("stacks", (left_out, WARNING, text))


def _foreign_notes(hosts: Iterable[RawHost], ranks: Sequence[RawRank]) -> Iterator[Note]:
    """What files of stacks that something else recorded cannot tell."""
    told = ["files of stacks know no steps, so nothing can be said in time per step"]
    if len(ranks) > 1:
        told.append(f"nothing in the files says which rank is which: {len(ranks)} are numbered by file and process id")
    for host in hosts:
        if not host.name:
            named = _named([segment.file for segment in host.segments])
            yield from (Note(INFO, text, named) for text in told)


def _rank_notes(rank: RawRank, events: EventsTable) -> Iterator[Note]:
    source = f"{rank.name}/events.jsonl"
    for event in _events(rank, "probe_error"):
        probe, error = (_quoted(event.get(key)) for key in ("probe", "error"))
        yield Note(WARNING, f"probe {probe} failed in {rank.name} and was off from then on: {error}", source)
    yield from _missing_notes(rank)
    yield from _watch_notes(rank)
    traces = {trace.name for trace in rank.traces if f"{rank.name}/{trace.name}" not in events.unreadable}
    for event in _events(rank, "window"):
        name = (string(event.get("trace")) or "").removesuffix(".gz")
        if event.get("status") == "kept" and name and name not in traces:
            yield Note(WARNING, f"the trace of a profiler window is missing or unreadable: {name}", source)
        if event.get("status") == "dropped":
            reason = string(event.get("reason")) or "no reason recorded"
            yield Note(WARNING, f"a profiler window of {rank.name} was dropped: {reason}", source)
    for kind, text in _SKIPPED.items():
        reasons = {_quoted(event.get("reason")): event.get("asked") is True for event in _events(rank, kind)}
        for reason, asked in reasons.items():
            where = f"{rank.name} where one was asked for" if asked else rank.name
            yield Note(WARNING if asked else INFO, f"{text} {where}: {reason}", source)


def _watch_notes(rank: RawRank) -> Iterator[Note]:
    source = f"{rank.name}/events.jsonl"
    told = _events(rank, "watch")
    lists = [why for event in told if isinstance(why := event.get("not_measured"), list)]
    reasons = [why for own in lists for why in own]
    for why in dict.fromkeys(map(_quoted, reasons)):
        yield Note(INFO, f"not watched in {rank.name}: {why}", source)
    monitors, rows = _events(rank, "monitor"), rank.steps
    if not monitors or not rows:
        return
    told_ns = integer(told[-1].get("spent_ns")) if told else None  # a run that was killed did not tell the last
    spent = max(told_ns or 0, sum(integer(event.get("cost_ns")) or 0 for event in monitors))
    whole = max(1, max(row["start_ns"] + row["wall_ns"] for row in rows) - min(row["start_ns"] for row in rows))
    text = (
        f"{len(monitors)} of {len(rows)} steps of {rank.name} carried monitors, which took {100 * spent / whole:.2g} %"
    )
    yield Note(INFO, f"{text} of the time; no figure of steps stands on them", source)


def _missing_notes(rank: RawRank) -> list[Note]:
    """What the journal could not write, as its last word says."""
    said = rank.last_word or {}
    missing, reasons = said.get("missing"), said.get("reasons")
    if not isinstance(missing, dict) or not isinstance(reasons, dict):
        return []
    numbers = {what: integer(missing.get(what)) or 0 for what in ("steps", "events")}
    lost = " and ".join(f"at least {number} {what}" for what, number in numbers.items() if number > 0)
    why = "; ".join(f"{_quoted(file)}: {_quoted(reason)}" for file, reason in islice(reasons.items(), _MAX_NAMED))
    text = f"{lost or 'rows'} of {rank.name} could not be written ({why}); what follows is of the others"
    return [Note(WARNING, text, f"{rank.name}/last-word.json")]


def _faults_at_window(rank: RawRank) -> list[Note]:
    """Whether training steps fault more or less often since our first window: a heap that lies otherwise since."""
    edges = [
        (first, first + steps)
        for event in _events(rank, "window")
        if event.get("owner") != "user"
        and isinstance(first := event.get("first_step"), int)
        and isinstance(steps := event.get("steps"), int)
    ]
    counted = [
        (row["step"], row["minor_faults"])
        for row in rank.steps
        if row["kind"] == "train"
        and not row["in_window"]
        and row["minor_faults"] is not None
        and not row["first_batch"]
    ]
    if not edges:
        return []
    before = [faults for step, faults in counted if _SETTLED <= step < edges[0][0]]
    after = [faults for step, faults in counted if step > edges[0][1]][:_FAULT_STEPS]
    if len(before) < _FEW_FAULT_STEPS or len(after) < _FEW_FAULT_STEPS:
        return []
    usual, later = median(before), median(after)
    lower, higher = sorted((quantiles(before, method="inclusive"), quantiles(after, method="inclusive")))
    # They go up and down from step to step of themselves: half of the steps on either side must lie apart.
    if abs(later - usual) < max(_FAULTS_CHANGED, _FAULTS_CHANGED_SHARE * max(usual, later)) or higher[0] <= lower[2]:
        return []
    text = (
        f"steps of {rank.name} had {usual:,.0f} page faults before the profiler window and {later:,.0f} after it: "
        "memory lies otherwise since, by itself or for the window; compare with a run without one (--no-window)"
    )
    return [Note(WARNING, text, f"{rank.name}/steps.jsonl")]


def _no_steps(raw: RawRun, processes: Sequence[HostProcesses]) -> list[Note]:
    if any(not host.name for host in raw.hosts):
        return []
    if not raw.hosts and all(rank.journal and not (rank.info or {}).get("schema") for rank in raw.ranks):
        return []  # files of torch_xla: they count steps and mark none
    everyone = [process for host in processes for process in host.all]
    foreign = next((process.foreign for process in everyone if process.foreign), None)
    if foreign is not None:
        text = f"no step was seen: {foreign} has the name of this recorder, which then stays out; rename that file"
        return [Note(WARNING, text, "agents.jsonl")]
    if any(process.torch and not process.reported for process in everyone):
        return []  # that process may have stepped; the note on it says so and what to do
    if not raw.hosts and not any(rank.info or rank.journal for rank in raw.ranks):
        return [
            Note(INFO, "the traces mark no step: the script never called the step() of its profiler", "ProfilerStep#N")
        ]
    if any(_events(rank, "suspended") for rank in raw.ranks):
        text = (
            "no step was seen: the script's own profiler recorded stacks all the time, and nothing of ours may stand "
            "on them; profile a few steps (torch.profiler.schedule), or leave out with_stack"
        )
    elif raw.ranks or any(process.torch for process in everyone):
        text = (
            "no step was seen: the script ended before its first one, or its loop is none that the recorder knows; "
            "mark its steps with stepscope.step()"
        )
    elif any(process.python and process.torch is None for process in everyone):
        text = f"no step was seen, nor whether any process imported torch; if one did, {REMEDY}"
    else:
        text = "no process of this run imported torch: there is no training to speak of"
    return [Note(WARNING, text, "steps.jsonl")]


def _events(rank: RawRank, kind: str) -> list[dict[str, Any]]:
    return [event for event in rank.journal if event["kind"] == kind]


EVENT_COUNTS = (
    "trace_events",
    "trace_events_lost",
    "trace_events_salvaged",
    "clipped_overlaps",
    "repaired_durations",
    "missing_steps",
    "unreadable_traces",
    "device_slices",
    "device_ns",
    *(f"linked_by_{method}_ns" for method in METHODS),
    "before_recording_ns",
    "graph_ns",
    "unlinked_ns",
)
_SAID_AS = {
    "correlation": "by correlation",
    "flow": "by an arrow from the launch",
    "external_id": "by External id",
    "containment": "by time on the launch's thread",
}


def _read(events: EventsTable) -> Iterator[Note]:
    for name, why in islice(events.unreadable.items(), _MAX_NAMED):
        yield Note(WARNING, f"a trace could not be read: {why}", name)
    if len(events.unreadable) > _MAX_NAMED:
        yield Note(WARNING, f"{things(len(events.unreadable) - _MAX_NAMED, 'more trace')} could not be read", "traces")
    for trace in events.read:
        index, source = trace.index, f"{trace.rank.name}/{trace.name}"
        said = "".join(f"; {problem}" for problem in index.problems)
        part = f"{index.lost:,} of {index.events:,} events of a trace could not be read"
        cut = "had impossible durations (negative, over a week, or on a stream over later work) and were cut"
        mended = f"{index.salvaged:,} of {index.events:,} events of a trace are no valid JSON and were mended"
        yield from _said(
            source,
            (index.lost or index.problems, WARNING, f"{part if index.lost else 'a trace is not sound'}{said}"),
            (index.salvaged, INFO, mended),
            (index.repaired, WARNING, f"{index.repaired:,} slices {cut}"),
        )
    if missing := events.counts["missing_steps"]:
        yield Note(INFO, f"no trace has {things(missing, 'step')} between the first and the last", "traces")
    for trace in events.read:
        if trace.offset_ns:
            where = "ahead of" if trace.offset_ns < 0 else "behind"
            text = f"the trace's clock was {abs(trace.offset_ns) / 1e6:.1f} ms {where} the journal's and has been moved"
            yield Note(INFO, text, f"{trace.rank.name}/{trace.name}")


def _links(events: EventsTable) -> Iterator[Note]:
    counts = events.counts
    total, before, graph = counts["device_ns"], counts["before_recording_ns"], counts["graph_ns"]
    if not total:
        return
    launched = total - before
    if not launched:
        text = "no launch of a kernel or copy was recorded, so device time cannot be linked to operators or lines"
        yield Note(WARNING, text, "traces")
        return
    by_method = {method: counts[f"linked_by_{method}_ns"] for method in METHODS}
    linked = sum(by_method.values())
    ways = ", ".join(f"{_share(ns, launched)} {_SAID_AS[method]}" for method, ns in by_method.items() if ns)
    text = f"{_share(linked, launched)} of the device time whose launch was recorded is linked to an operator"
    level = WARNING if linked + graph < 0.99 * launched else INFO
    earlier = "of device time was launched before the recording began: its launches are in no trace"
    apart = (
        "of device time was launched by CUDA graphs and cannot be linked to single "
        "operators: a replay is one call for all its kernels, and the operators ran when the graph was captured"
    )
    yield from _said(
        "traces",
        (True, level, f"{text} ({ways})" if ways else text),
        (before, INFO, f"{_share(before, total)} {earlier}"),
        (graph, INFO, f"{_share(graph, total)} {apart}"),
    )


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    if part and percent < 0.1:
        return "under 0.1 %"
    if part < whole and percent > 99.9:
        return "over 99.9 %"
    return f"{percent:.1f} %"
