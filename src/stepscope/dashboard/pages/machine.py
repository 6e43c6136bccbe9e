"""The page of the machine: telemetry beside the steps, and what was made of it.

The page of the environment: what ran where, what the recording could see and what was lost of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import asdict

from stepscope.analyze.pictures.series import telemetry
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Row
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.steps import labelled
from stepscope.model import Report
from stepscope.model.machine import EnergyFacts, MachineFacts
from stepscope.model.timeline import Telemetry
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.sentences import refused, trial_line

POINTS, EMBEDDED_POINTS = 500, 150
WHY = "This recording holds no telemetry: traces and stacks of other tools have none."
NOT_HERE = "No reading lies in the steps that are chosen, nor within a second of them."
AROUND_NS = 1_000_000_000  # a reading tells of the second before it
RECORD = "stepscope run reads the machine once a second, beside the training, and the GPUs through NVML."
CHARTS = (
    *("gpu-utilisation", "cpu", "cores", "delay", "resident", "gpu-memory", "gpu-power", "cpu-power", "gpu-clock"),
    *("gpu-temperature", "io", "pressure", "faults", "switches"),
)


def system(context: PageContext) -> list[Block]:
    found = _telemetry(context)
    analysis = context.run.analysis
    if found is None:
        why = WHY if context.run.tables.system.is_empty() else NOT_HERE
        made = [blocks.empty("No telemetry", why, RECORD, traced.again(context))]
    else:
        help_ = blocks.meaning("system", "system")
        items = [{**item, "help": help_} for item in blocks.measures(analysis.system, "system", of="system")]
        made = [blocks.figures(items, "While it trained")] if items else []  # means and peaks over the training time
        made += [_about(found), *_step_chart(found), *_charts(found)]
    return [*made, *_energy(context, analysis.energy), *blocks.folded(_machine(context, analysis.machine))]


def system_empty(context: PageContext) -> bool:
    return context.run.tables.system.is_empty() and not list(_groups(context.run.analysis.machine))


def _telemetry(context: PageContext) -> Telemetry | None:
    between = None
    if context.scope.steps is not None:
        steps = context.run.tables.steps.drop_nulls(["start_ns", "wall_ns"])
        if not steps.is_empty():
            ends = (steps["start_ns"] + steps["wall_ns"]).max()
            between = (int(steps["start_ns"].min()) - AROUND_NS, int(ends) + AROUND_NS)  # type: ignore[arg-type]
    limit = EMBEDDED_POINTS if context.embedded else POINTS
    return telemetry(context.run.tables, labelled(context), limit, between)


def _reasons(row: Row) -> str | None:
    found = sorted(row["reasons"].items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {words.percent(share)}" for name, share in found) or None


def _about(found: Telemetry) -> Block:
    text = f"{found.readings:,} readings"
    if found.bucket_s is not None:
        text += f"; each point is the mean of {words.seconds(found.bucket_s)}"
    if found.dropped:
        text += f"; {found.dropped} further series are left out"
    if len(found.hosts) > 1:
        text += f"; of {len(found.hosts)} hosts"
    return blocks.text(f"{text}. Times are since the start of the run.", "note")


def _step_chart(found: Telemetry) -> Iterator[Block]:
    if len(found.step_ms) < 2:
        return
    longest = max(range(len(found.step_ms)), key=lambda at: found.step_ms[at])
    yield blocks.drawn(
        "steps-over-time",
        f"Steps of {found.step_process} over time; the longest takes "
        f"{words.milliseconds(found.step_ms[longest])}, {words.seconds(found.step_time_s[longest])} in.",
        found.step_time_s,
        [("step time", found.step_ms, "wall")],
    )


def _charts(found: Telemetry) -> Iterator[Block]:
    for id in CHARTS:
        chart = blocks.LAYOUT.charts[id]
        declared = {name: rest for name, _, rest in (each.partition(" ") for each in chart.metrics.split("; "))}
        shown = [one for one in found.series if one.metric in declared and (not chart.quiet or any(one.values))]
        if not shown:
            continue
        several = len({one.subject for one in shown}) > 1
        made = []
        for one in shown:
            role, _, label = declared[one.metric].partition(" ")
            name = f"{one.subject}: {label}" if several and label else label or one.subject
            made.append((name, one.values, role if role and not several else None))
        names = [plain(name) for name, *_ in made]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield blocks.drawn(id, f"{chart.title} over time of {listed}.", found.time_s, made)


def _energy(context: PageContext, energy: EnergyFacts | None) -> Iterator[Block]:
    if energy is None:
        return
    said = list(sentences.energy(context.base.report(source=context.source)))
    yield from (blocks.text(text) for text in said)
    if not said:
        yield blocks.text(f"Energy: not measured: {energy.absent}", "note")
        return
    rows = [asdict(one) for one in energy.domains]
    notes = [blocks.sentence(note) for note in energy.notes]
    yield from blocks.folded(blocks.rows_table(context, "energy", rows, notes=notes))
    yield from (blocks.text(blocks.sentence(text), "warning") for text in energy.warnings)


def _groups(machine: MachineFacts) -> Iterator[Block]:
    for title, record, figures in (
        ("How training shared its cores", machine.cpu, "cpu"),
        ("Threads of a training process", machine.cpu and machine.cpu.pool, "pool"),
        ("Pauses for garbage collection", machine.pauses, "pauses"),
        ("Memory pressure", machine.memory, "memory-pressure"),
        ("Storage", machine.storage, "storage"),
        ("Nodes of memory", machine.numa, "numa"),
    ):
        made = blocks.measures(record, figures) if record is not None else []
        if any(item["value"] for item in made):
            yield blocks.figures(made, title)


def _machine(context: PageContext, machine: MachineFacts) -> Iterator[Block]:
    yield from _groups(machine)
    if machine.pauses is not None:
        lines = [{**asdict(line), "place": asdict(line.place)} for line in machine.pauses.lines]
        yield from blocks.rows_table(context, "pauses", lines)
    yield from blocks.rows_table(context, "gpu-clocks", map(asdict, machine.gpus), say={"reasons": _reasons})
    if machine.storage is not None and machine.storage.mounts:
        mounts = machine.storage.mounts
        facts = [blocks.fact(f"{each.path} ({each.kind})", f"{each.files} files", each.source) for each in mounts]
        yield blocks.facts("File systems that data is read from", facts)


MAX_NESTED = 6  # values of a list or mapping that are shown in a fact
TOPOLOGIES = 8  # nodes whose place in the network is shown


def environment(context: PageContext) -> list[Block]:
    """The blocks of the page; of the whole run, whatever is chosen."""
    report = context.base.report(source=context.source)
    run = report.run
    # what was lost, repaired or not seen: before any figure
    told = [(text, "warning") for text in sentences.warnings(report)]
    told += [(note["text"], "note") for note in report.quality.get("notes") or () if note["level"] != "warning"]
    nothing = ("Nothing that the recording should have seen is known to be missing.", "good")
    made = [blocks.text(blocks.sentence(text), tone) for text, tone in told or [nothing]]
    if facts := report.quality.get("reading"):
        made.append(blocks.figures(blocks.measures(facts, "reading", of="ReadingFacts"), "Quality of the traces"))
        if facts.get("link_rate") is None and (linked := sentences.links(report)):  # else a figure says it
            made.append(blocks.text(blocks.sentence(linked), "note"))
    made.append(blocks.facts("The run", _run(context, report)))
    made += _job(context, run.get("job"))
    for title in ("Versions", "Hardware", "Noise", "Git"):
        rows = list(_flat(run.get(title.lower()) or {}))
        if rows:
            made.append(blocks.facts(title, rows))
    made += _counts(report)
    for name, found in (
        ("windows", report.views.get("windows")),
        ("traces", report.quality.get("traces")),
        ("environment/processes", report.views.get("processes")),
        ("sites", report.views.get("sites")),
    ):
        say = {"arguments": lambda row: ", ".join(f"{key}={value}" for key, value in row["arguments"].items())}
        made += blocks.rows_table(context, name, found, say=say)
    return made


def _run(context: PageContext, report: Report) -> Iterator[dict[str, Any]]:
    run = report.run
    if run.get("command"):
        import shlex

        yield blocks.fact("Command", shlex.join(str(word) for word in run["command"])[: words.MAX_COMMAND])
    yield blocks.fact("Folder", str(context.base.folder))
    for label, key in (("Working directory", "cwd"), ("Name", "name"), ("Tags", "tags"), ("Hosts", "hosts")):
        if run.get(key):
            yield blocks.fact(label, _text(run[key]))
    if run.get("ranks"):
        world = f" of {run['world_size']}" if run.get("world_size") else ""
        yield blocks.fact("Ranks", f"{_text(run['ranks'])}{world}")
    started, ended = run.get("started_ns"), run.get("ended_ns")
    if started is not None:
        began, over = (words.moment(at, "%Y-%m-%d %H:%M:%S UTC") for at in (started, ended))
        yield blocks.fact("Started", began or str(started))
        over = over or (None if ended is None else str(ended))
        yield blocks.fact("Ended", over, None if ended else "no end was written")
    if run.get("exit_status") is not None:
        yield blocks.fact("Exit status", str(run["exit_status"]), sentences.ended(run["exit_status"]))
    if trial := trial_line(report, context.shorten):
        yield blocks.fact("Knobs", trial, "not all were applied" if refused(report) else None)
    if devices := report.views.get("devices"):
        yield blocks.fact("Trained on", _text(devices))
    if stacks := report.views.get("stacks"):
        yield blocks.fact(
            "Sampled stacks", f"{stacks['samples']:,} by {stacks['source']}, {stacks['rate_hz']:g} a second"
        )


def _job(context: PageContext, job: Mapping[str, Any] | None) -> Iterator[Block]:
    if not job:
        return
    step = f", step {job['step']}" if job["step"] else ""
    rows = [blocks.fact("Started by", job["kind"])]
    if job["id"]:
        rows.append(blocks.fact("Job", f"{job['id']}{step}", f"attempt {job['attempt'] + 1}"))
    for label, key in (("Tasks", "members"), ("Cluster", "cluster"), ("Partition", "partition"), ("Nodes", "nodes")):
        if job[key]:
            rows.append(blocks.fact(label, _text(job[key])))
    if job["topology"]:
        places = [f"{host}: {place}" for host, place in list(job["topology"].items())[:TOPOLOGIES]]
        left = len(job["topology"]) - len(places)
        more = f"; and {left} more" if left else ""
        pattern = f"as {job['topology_pattern']}" if job["topology_pattern"] else None
        rows.append(blocks.fact("Place in the network", "; ".join(places) + more, pattern))
    if job["absent"]:
        rows.append(blocks.fact("Accounting", None, job["absent"]))
    else:
        rows.append(blocks.fact("Started again", _text(job["requeues"]) if job["requeues"] is not None else None))
        rows.append(blocks.fact("Attempts ended by a failing node", _text(job["node_failures"])))
    yield blocks.facts("The job", rows)
    yield from blocks.rows_table(context, "accounting", job["steps"])


def _counts(report: Report) -> Iterator[Block]:
    help_ = blocks.meaning("Quality", "counts")
    counts = report.quality.get("counts") or {}
    known = {key: value for key, value in counts.items() if isinstance(value, (int, float))}
    items = [
        blocks.figure(_counted(key), value, blocks.unit_of(key) or "count", help=help_)
        for key, value in known.items()
        if value
    ]
    if items:
        yield blocks.figures(items, "What was read")
    none = [_counted(key) for key, value in known.items() if not value]
    if none:
        yield blocks.text(f"None of these: {', '.join(none)}.", "note")


def _counted(key: str) -> str:
    return words.term(f"{key.removesuffix('_ns')}_time" if key.endswith("_ns") else key)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[dict[str, Any]]:
    for key, value in values.items():
        label = f"{before}{words.term(key)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{label}: ")
        else:
            yield blocks.fact(label, None if value is None or value == [] else _text(value, str(key)))


def _text(value: Any, key: str | None = None) -> str:
    """A fact in words; figures that have a name with the unit that it carries."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key is not None:
        return words.size(value) if key.endswith("bytes") else words.count(value)
    if isinstance(value, Mapping):
        return ", ".join(
            f"{words.term(key)} {_text(item, str(key))}" for key, item in value.items() if item is not None
        )
    if isinstance(value, (list, tuple)):
        shown = [_text(item) for item in value[:MAX_NESTED]]
        more = f" and {len(value) - MAX_NESTED} more" if len(value) > MAX_NESTED else ""
        return ("; " if any("," in text for text in shown) else ", ").join(shown) + more
    return str(value)
