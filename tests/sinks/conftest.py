"""A run with all that is hard to carry over, and an environment without a network and without the user's own files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.builders import MS, T0, step_rows
from tests.run_folders import make_run_folder, metrics_event

NAN, INF = float("nan"), float("inf")
ODD = (
    "train/loss",
    "=1+1",
    "ünï/☃ (a)",
    "step",
    "timestamp",
    "a/../b",
    "/x",
    "..",
    "__own",
    "loss\n2",
    "x" * 200,
    "a:b_c",
)
_BITS = np.random.default_rng(7).integers(0, 2**64, 60, dtype=np.uint64).view(np.float64)
VALUES = [NAN, INF, -INF, 0.0, -0.0, 0.1, 1e300, -1e300, 5e-324, 2**53 + 1.0, *_BITS.tolist()]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with everything that tools would keep elsewhere in it."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB", "MLFLOW", "TRACKIO", "HF_"))]:
        monkeypatch.delenv(name)
    kept = {"WANDB_DATA_DIR": "data", "WANDB_CACHE_DIR": "cache", "WANDB_CONFIG_DIR": "config", "XDG_CACHE_HOME": "xdg"}
    for name, folder in kept.items():
        monkeypatch.setenv(name, str(tmp_path / "kept" / folder))
    for name, value in {
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def odd_run(tmp_path: Path) -> Path:
    """Two ranks; names that tools refuse or keep for themselves, values that JSON, SQL or single precision cannot hold,
    one name of two sources, several values of a name in one moment, values before the first step, and a finding."""
    times = [T0 + at * 7 * MS // 3 for at in range(len(VALUES))]
    early = metrics_event(("early", "log", [T0 - 5 * MS, T0 - 5 * MS, T0 - 4 * MS], [1.0, 1.0, 1.0]))
    loader = {"kind": "loader", "num_workers": 0, "batch_size": 8, "pin_memory": False}
    events = [loader, early, metrics_event(*((name, "log", times, VALUES) for name in ODD))]
    events += [metrics_event(("train/loss", "wandb", times[:5], [1.0] * 5))]
    events += [metrics_event(("twice", "log", [T0 + MS] * 3, [2.0, 2.0, 3.0]))]
    system = [
        {"time_ns": T0 + at * 1000 * MS, "metrics": [["load_1m", "1", 0.5 + at, None, None]]} for at in range(-1, 3)
    ]
    manifest = {
        "options": {"knobs": [["loader.num_workers", "2"]], "seed": 3},
        "command": ["python", "t.py", "<b>![x](y)"],
    }
    make_run_folder(
        tmp_path, steps=step_rows(30, data_wait_ms=20), events=events, system=system, manifest=manifest, name="odd run"
    )
    other = [metrics_event(("train/loss", "log", times[:9], VALUES[:9]))]
    return make_run_folder(tmp_path, steps=step_rows(20), events=other, rank=1, pid=101, name="odd run")


@pytest.fixture
def growing(tmp_path: Path) -> Callable[..., Path]:
    """Makes or continues a run that goes on, by `steps` steps with a loss each; with `last` it ends."""
    alive = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_ns": time.time_ns(),
        "ended_ns": None,
        "exit": None,
    }
    done = 0

    def more(steps: int, *, last: bool = False) -> Path:
        nonlocal done
        rows = step_rows(steps, start_ns=T0 + done * 10 * MS, first_step=done)
        times = [row["start_ns"] + MS for row in rows]
        loss = metrics_event(("train/loss", "log", times or [T0], [1.0 / (done + at + 1) for at in range(steps)]))
        began = {
            "time_ns": T0 - 5 * MS,
            "metrics": [["load_1m", "1", 0.5, None, None], ["rss_bytes", "B", 5.0, 100, None]],
        }
        system = [] if done else [began]
        events = [loss] if steps else []
        run = make_run_folder(tmp_path, steps=rows, events=events, system=system, manifest=alive, name="growing")
        done += steps
        if last:
            path = run / "host-a" / "manifest.json"
            path.write_text(path.read_text().replace('"ended_ns": null', f'"ended_ns": {time.time_ns()}'))
        return run

    return more
