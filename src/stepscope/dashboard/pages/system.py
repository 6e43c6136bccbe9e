"""The page of the machine: telemetry beside the steps, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import asdict

from stepscope.analyze.pictures.series import telemetry
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Row
from stepscope.dashboard.pages import PageContext, traced
from stepscope.dashboard.pages.steps import labelled
from stepscope.model.machine import EnergyFacts, MachineFacts
from stepscope.model.timeline import Telemetry
from stepscope.report import sentences, words
from stepscope.report.escape import plain

POINTS, EMBEDDED_POINTS = 500, 150
WHY = "This recording holds no telemetry: traces and stacks of other tools have none."
NOT_HERE = "No reading lies in the steps that are chosen, nor within a second of them."
AROUND_NS = 1_000_000_000  # a reading tells of the second before it
RECORD = "stepscope run reads the machine once a second, beside the training, and the GPUs through NVML."
CHARTS = (
    *("gpu-utilisation", "cpu", "cores", "delay", "resident", "gpu-memory", "gpu-power", "cpu-power", "gpu-clock"),
    *("gpu-temperature", "io", "pressure", "faults", "switches"),
)


def build(context: PageContext) -> list[Block]:
    """The blocks of the page."""
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


def empty(context: PageContext) -> bool:
    """Whether there is neither telemetry nor anything else about the machine."""
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
