"""Sets of hand-made run folders: equal programs with a little noise from run to run, and one part that may differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.builders import MS, T0, step_rows
from tests.run_folders import make_run_folder

MINUTE = 60_000 * MS
NOISE = (1.0, 1.012, 0.991, 1.006, 0.996)  # of runs, the same for both sides: the machine's


def make_run(
    folder: Path, *, data_wait_ms: float = 1, factor: float = 1.0, start_ns: int = T0, steps: int = 60, **options: Any
) -> Path:
    """One run of `steps` steps of about 10 ms; `factor` makes all of them longer."""
    manifest = {"started_ns": start_ns, "name": folder.name, **options.pop("manifest", {})}
    rows = step_rows(
        steps,
        data_wait_ms=data_wait_ms * factor,
        forward_ms=3 * factor,
        backward_ms=4 * factor,
        optimizer_ms=factor,
        other_ms=factor,
        start_ns=start_ns,
        samples=8,
        **options.pop("columns", {}),
    )
    return make_run_folder(folder.parent, name=folder.name, steps=rows, manifest=manifest, **options)


def make_set(folder: Path, *, runs: int = 4, data_wait_ms: float = 1, noise: Sequence[float] = NOISE) -> Path:
    """A folder of runs that started one after the other."""
    for number in range(runs):
        start = T0 + number * MINUTE
        make_run(folder / f"run-{number}", data_wait_ms=data_wait_ms, factor=noise[number], start_ns=start)
    return folder
