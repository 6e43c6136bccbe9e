"""The data of a step on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from stepscope.model.metrics import Alarm, StepBatch, StepData
from stepscope.report import words
from stepscope.report.escape import json_bytes, plain, plain_rows
from stepscope.report.words import Shortener

SCHEMA = "stepscope.batch/1"
MAX_SAMPLES = 20  # of a batch on a terminal
MAX_NAME = 120  # characters
PER_LINE = 16  # indices without names


def to_json(found: Sequence[Alarm], logged: Sequence[StepData], step: int | None) -> bytes:
    alarms, data = plain_rows(found, len(found)), plain_rows(logged, len(logged))
    return json_bytes({"schema": SCHEMA, "step": step, "alarms": alarms, "data": data})


def show_list(found: Sequence[Alarm], console: Console, shorten: Shortener, more: str) -> None:
    """Two lines for each alarm, and `more` where the first has data."""
    none = "No alarm: no recorded loss or gradient norm leapt, or was not finite"
    console.print(Text(words.things(len(found), "alarm") if found else none, style="bold"))
    for alarm in found:
        console.print(Text(_headline(alarm, shorten)), soft_wrap=True)
        suspects = [batch for batch in alarm.batches if batch.suspect]
        for line in (_of_batch(batch, shorten) for batch in suspects[:MAX_SAMPLES]):
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
        for line in _origin(alarm, shorten):
            console.print(Text(f"  {line}"), soft_wrap=True)
    if any(batch.indices for alarm in found for batch in alarm.batches):
        console.print(Text(more), soft_wrap=True)


def show_step(found: Sequence[Alarm], logged: Sequence[StepData], console: Console, shorten: Shortener) -> None:
    """Every alarm with its batches and their samples, the batch of the value first; else what was logged."""
    for data in logged:
        console.print(Text(f"rank {data.rank}: no loss and no norm went wrong", style="bold"), soft_wrap=True)
        _show_batches(data.batches, console, shorten)
    for alarm in found:
        console.print(Text(_headline(alarm, shorten), style="bold"), soft_wrap=True)
        for line in _origin(alarm, shorten):
            console.print(Text(f"  {line}"), soft_wrap=True)
        if not alarm.batches:
            console.print(Text("  no batch is known: the step had no loader of torch, or was long ago"))
        _show_batches(alarm.batches, console, shorten)


def _show_batches(batches: Sequence[StepBatch], console: Console, shorten: Shortener) -> None:
    for batch in reversed(batches):
        role = "the batch" if batch.suspect else "before"
        console.print(Text(f"{role}, step {batch.step}: {_of_batch(batch, shorten)}"), soft_wrap=True)
        for line in _samples(batch):
            console.print(Text(f"  {line}"), soft_wrap=True)


def _headline(alarm: Alarm, shorten: Shortener) -> str:
    step = "unfinished step" if alarm.step is None else f"step {alarm.step}"
    value = alarm.value if isinstance(alarm.value, str) else words.number(alarm.value)
    usual = "" if alarm.low is None else f" (before: {words.number(alarm.low)} to {words.number(alarm.high)})"
    place = f", {shorten(alarm.place.file, alarm.place.line)}" if alarm.place is not None else ""
    return f"{step}, rank {alarm.rank}: {plain(alarm.series)} is {value}{usual}{place}"


def _origin(alarm: Alarm, shorten: Shortener) -> Iterator[str]:
    if alarm.origin is not None:
        place = alarm.origin.place
        yield plain(alarm.origin.sentence) + (f", {shorten(place.file, place.line)}" if place is not None else "")


def _of_batch(batch: StepBatch, shorten: Shortener) -> str:
    parts = ["batch of unknown position" if batch.batch is None else f"batch {batch.batch}"]
    if batch.epoch is not None:
        parts[0] += f" of epoch {batch.epoch}"
    if batch.loader is not None:
        parts.append(f"loader at {shorten(batch.loader.file, batch.loader.line)}")
    parts.append(words.things(batch.samples, "sample") if batch.samples else plain(batch.reason or "indices unknown"))
    return ", ".join(parts)


def _samples(batch: StepBatch) -> Iterator[str]:
    indices = batch.indices or ()
    shown = indices[:MAX_SAMPLES]
    if batch.files is None and batch.targets is None:
        for at in range(0, len(indices[: MAX_SAMPLES * PER_LINE]), PER_LINE):
            yield " ".join(map(str, indices[at : at + PER_LINE]))
        shown = indices[: MAX_SAMPLES * PER_LINE]
    else:
        files, targets = batch.files or (None,) * len(indices), batch.targets or (None,) * len(indices)
        for index, file, target in zip(shown, files, targets, strict=False):
            name = "" if file is None else f"  {plain(file, MAX_NAME)}"
            yield f"{index}{name}" + ("" if target is None else f"  target {plain(target, MAX_NAME)}")
    left = len(indices) - len(shown)
    if left:
        yield f"… and {words.count(left)} more; --json FILE has them"
    if batch.samples is not None and batch.samples > len(indices) > 0:
        yield f"{words.count(batch.samples - len(indices))} more samples of the batch were not kept"
