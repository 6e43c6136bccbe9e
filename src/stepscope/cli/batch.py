"""`stepscope batch`: the data of a step, foremost of one in which a loss or a norm went wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from stepscope.cli.options import Force, JsonFile, OneRank, Reading, argument, option
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.model.alarms import StepData

MAX_STEPS = 12  # named where the wanted one is not kept


def batch(
    path: Annotated[Path, argument("RUN", "A run folder.")],
    step: Annotated[
        int | None, option("--step N", "Name the samples of this step and of the two batches before.")
    ] = None,
    rank: OneRank = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Say which samples of the data set a step was trained on, and which steps' loss or gradient norm went wrong.

    While a run is recorded, every loss that `backward` is called on and every gradient norm that the script clips by
    are held against the 200 before. The first that is not finite, or leaps far beyond them, is an alarm, kept with the
    indices of its batch and of the two before it, and with file names and targets where the data set has them in plain
    lists (`samples`, `imgs`, `files`, `paths`, `image_files`, `targets`). Without --step the alarms are listed.

    Of other steps the indices are kept as long as there is room: 24,000 steps of 64 samples at least. An iterable data
    set has no indices; then the position of the batch in the loader's order is all there is.
    """
    from stepscope import api
    from stepscope.analyze.input import batches
    from stepscope.report import batches as report
    from stepscope.report import outputs
    from stepscope.report.words import Shortener

    outputs.check_files({"--json": json_file}, force=force)
    with outputs.reading("reading") as progress:
        run = api.open_run(path, options=Reading().options(progress))
        if not run.recorded:
            raise UsageError(f"{path}: no run folder; the data of steps is known where `stepscope run` recorded them")
        found = tuple(alarm for alarm in batches.alarms(run.tables) if rank in (None, alarm.rank))
        if not found and run.tables.metrics.is_empty():
            raise UnreadableInputError(
                f"{path}: no loss and no gradient norm in it; they are recorded from `backward` and clipping"
            )
    logged: tuple[StepData, ...] = ()
    if step is not None:
        told = batches.of_step(found, step)
        logged = () if told else batches.logged(run.tables, run.folder, step, rank)
        if not told and not logged:
            raise UsageError(f"--step {step}: {_kept(batches.steps_told(found))}")
        found = told
    if json_file is not None:
        outputs.emit(json_file, report.to_json(found, logged, step))
    if json_file == outputs.STDOUT:
        return
    facts = run.tables.run
    shorten = Shortener({"cwd": facts.cwd or str(run.folder), "user_roots": facts.user_roots})
    console = outputs.console(sys.stdout)
    if step is not None:
        report.show_step(found, logged, console, shorten)
        return
    first = next((alarm.step for alarm in found if alarm.step is not None and alarm.batches), None)
    report.show_list(found, console, shorten, f"Their samples: stepscope batch {path} --step {first}")


def _kept(steps: list[int]) -> str:
    """Why a step's data is not there."""
    why = "no batch of it was kept: there is no such step, it had no loader of torch, or there was no more room"
    if not steps:
        return why
    named = ", ".join(map(str, steps[:MAX_STEPS])) + (", …" if len(steps) > MAX_STEPS else "")
    return f"{why}; those of steps {named} were, as a loss or a norm went wrong there"
