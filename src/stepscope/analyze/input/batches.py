"""The alarms of a run with the data of their steps, and the data of any step, as the recorder wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.analyze.sites import site_of
from stepscope.engine.journal import event_data, place_of
from stepscope.model.metrics import Alarm, Origin, StepBatch, StepData
from stepscope.read import run_folder
from stepscope.read.text import integer, number, string
from stepscope.tables.schema import Tables

WORDS = ("nan", "inf", "-inf")
BATCHES_BEFORE = 2  # as many as an alarm has


def alarms(tables: Tables) -> tuple[Alarm, ...]:
    """In order of time."""
    made = []
    for row, data in event_data(tables, "alarm"):
        value, series = data.get("value"), string(data.get("series"))
        known = value if value in WORDS else number(value)
        if known is None or series is None:
            continue
        entries = data.get("batches")
        found = [_batch(tables, entry, row["process"]) for entry in entries] if isinstance(entries, list) else []
        made.append(
            Alarm(
                rank=row["rank"] or 0,
                process=row["process"],
                step=row["step"],
                time_ns=row["time_ns"],
                series=series,
                value=known,
                low=number(data.get("low")),
                high=number(data.get("high")),
                place=place_of(data),
                batches=tuple(batch for batch in found if batch is not None),
                origin=_origin(data.get("origin")),
            )
        )
    return tuple(made)


def _origin(entry: object) -> Origin | None:
    """Where the value was made, in words as well."""
    if not isinstance(entry, Mapping):
        return None
    texts: dict[str, Any] = {
        name: string(entry.get(name)) for name in ("module", "parameter", "operator", "behind", "reason")
    }
    numbers: dict[str, Any] = {name: integer(entry.get(name)) for name in ("again", "not_finite", "looked_at")}
    found = Origin(where=string(entry.get("where")), place=place_of(entry), sentence="", **texts, **numbers)
    return replace(found, sentence=_in_words(found))


def _in_words(found: Origin) -> str:
    module, operator = found.module, found.operator or "an operator"
    behind = f" behind {found.behind}" if found.behind else ""
    if found.where in ("parameters", "gradients"):
        kind, named = found.where[:-1], found.parameter or module
        one = f"the {kind} {named}" if found.where == "parameters" else f"the gradient of {named}"
        some = "all" if found.not_finite == found.looked_at else f"{found.not_finite} of"
        several = f"{some} {found.looked_at} {found.where}" + (f", the last of them of {module}," if named else "")
        text = f"{one} is not finite" if found.not_finite == 1 else f"{several} are not finite"
    elif found.where == "forward":
        by = f" ({found.operator})" if found.operator else ""
        text = f"first seen in the output of {module}{by}" if module else f"made by {operator}{behind}, in no module"
    elif found.where == "inputs":
        given = f"{module} is given" if module else f"{operator} is given{behind}"
        text = f"first seen in what {given}, and no gradient goes to: an input, a target or a mask"
    else:
        return f"who made it is not known: {found.reason or 'the recording does not say'}"
    return text if found.again is None else f"{text} (in step {found.again}, when it came again)"


def of_step(found: Iterable[Alarm], step: int) -> tuple[Alarm, ...]:
    """The alarms that tell of data of `step`, each with the batches up to that step alone."""
    told = []
    for alarm in found:
        if alarm.step == step:
            told.append(alarm)
            continue
        batches = tuple(batch for batch in alarm.batches if batch.step <= step)
        if any(batch.step == step for batch in batches):
            told.append(replace(alarm, batches=batches))
    return tuple(told)


def logged(tables: Tables, folder: Path, step: int, rank: int | None) -> tuple[StepData, ...]:
    """What `step` was trained on, by process; those that did not log it are left out. `folder` is the run's."""
    found = []
    for own_rank, process in tables.steps.select("rank", "process").unique().sort("rank", "process").rows():
        if rank not in (None, own_rank) or (folder / process).is_symlink():
            continue
        entries = run_folder.batches_of(folder / process, step, BATCHES_BEFORE)
        batches = [batch for entry in entries if (batch := _batch(tables, entry, process)) is not None]
        if batches:
            found.append(StepData(own_rank or 0, process, tuple(batches)))
    return tuple(found)


def steps_told(found: Iterable[Alarm]) -> list[int]:
    """The steps of which batches are known."""
    return sorted({batch.step for alarm in found for batch in alarm.batches})


def _batch(tables: Tables, entry: object, process: str) -> StepBatch | None:
    if not isinstance(entry, Mapping) or integer(entry.get("step")) is None:
        return None
    loader, indices = integer(entry.get("loader")), entry.get("indices")
    site = site_of(tables, {"id": loader, "_process": process}) if loader else None
    known = tuple(index for index in indices if integer(index) is not None) if isinstance(indices, list) else None
    return StepBatch(
        step=entry["step"],
        suspect=entry.get("suspect") is True,
        epoch=integer(entry.get("epoch")),
        batch=integer(entry.get("batch")),
        samples=integer(entry.get("samples")),
        indices=known,
        files=_column(entry.get("files"), known, str),
        targets=_column(entry.get("targets"), known, (int, str)),
        reason=string(entry.get("reason")),
        loader=place_of(site),
    )


def _column(values: object, indices: tuple[int, ...] | None, kinds: Any) -> tuple[Any, ...] | None:
    """One for each index; None where there is none."""
    if not isinstance(values, list) or indices is None:
        return None
    own = [value if isinstance(value, kinds) else None for value in values[: len(indices)]]
    return (*own, *[None] * (len(indices) - len(own)))
