"""What the launcher tells the agent, parsed from the JSON text in STEPSCOPE_RECORD, and the clock it sets.

Every field has a default, unknown fields are ignored and a field of the wrong type falls back to its default: an older
or newer launcher must never stop the training process from starting.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from time import monotonic_ns
from typing import Any

from stepscope.schema import Knob

ENVIRONMENT_NAME = "STEPSCOPE_RECORD"
WATCH_NAME = "STEPSCOPE_WATCH"
WATCH_SHARE = 0.01  # of the run's time, for all monitors together: nobody has to think about whether to ask for them
ON, OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


def watch_asked() -> bool | None:
    """What the environment says of monitors; None where it says nothing."""
    word = os.environ.get(WATCH_NAME, "").lower()
    return True if word in ON else False if word in OFF else None


@dataclass(frozen=True)
class WindowConfig:
    """When torch.profiler records everything. The five counts are steps and apply to mode "schedule" only."""

    mode: str = "auto"  # auto | schedule | off
    skip_first: int = 0
    wait: int = 0
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    memory: str = "auto"  # on | off | auto: in a window of its own, once memory grows or is nearly full
    byte_budget: int = 200_000_000  # a trace beyond this takes longer to read than it tells
    time_share: float = 0.02  # all windows together, export included, as a share of the run's wall time
    everywhere: bool = False  # also over evaluation, checkpoint and logging steps


@dataclass(frozen=True)
class Config:
    """The agent's settings. `run` is the run folder, `host_dir` its RUN/host-H.

    With knobs or a seed the training is not the one the script alone describes: `record.agent.knobs`, `core`.
    """

    run: str
    host_dir: str
    epoch_offset_ns: int = 0
    window: WindowConfig = WindowConfig()
    max_steps: int | None = None
    sampler_hz: int = 50
    faults: str | None = None
    knobs: tuple[Knob, ...] = ()
    seed: int | None = None
    watch: float = 0.0  # of the run's time, the share that monitors may take; 0: none are wanted


def of_standard_library(name: str) -> Any:
    """A module that torch does not import, for ourselves: the script may have a file of that name beside it."""
    spec = PathFinder.find_spec(name, [folder for folder in sys.path if folder.endswith("lib-dynload")])
    if spec is None or spec.loader is None:  # built in
        return import_module(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """One clock for all processes of a host: monotonic nanoseconds plus the offset the launcher chose.

    CLOCK_MONOTONIC is the same in every process of a Linux machine, so files of ranks, workers and the sampler line up
    without any exchange, and a correction of the wall clock during the run cannot bend a step. `now()` gives
    nanoseconds since the epoch; the hooks of every step add `monotonic_ns()` and `epoch_offset_ns` themselves, which
    saves a call among cold caches.
    """

    def __init__(self, epoch_offset_ns: int) -> None:
        self.epoch_offset_ns = epoch_offset_ns

    def now(self) -> int:
        return monotonic_ns() + self.epoch_offset_ns


def epoch_offset_ns() -> int:
    """`time_ns() - monotonic_ns()`, from the tightest of a few readings (well under a microsecond of error)."""
    found = []
    for _ in range(9):
        before = monotonic_ns()
        wall = time.time_ns()
        width = monotonic_ns() - before
        found.append((width, wall - before - width // 2))
    return min(found)[1]


def parse(text: str) -> Config | None:
    """The configuration in `text`, or None when it is no JSON object that names a run folder."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("run"), str) or not data["run"]:
        return None
    run, host = data["run"], os.uname().nodename
    # Started on another host than the launcher (`stepscope run -- srun ...`): monotonic clocks of hosts differ by days.
    offset = _typed(data, "epoch_offset_ns", int, None) if _typed(data, "host", str, host) == host else None
    default, window, pairs = asdict(Config.window), _typed(data, "window", dict, {}), _typed(data, "knobs", list, [])
    kinds = {name: (int, float) if type(value) is float else type(value) for name, value in default.items()}
    return Config(
        run=run,
        host_dir=_typed(data, "host_dir", str, os.path.join(run, "host-" + host)),
        epoch_offset_ns=offset or epoch_offset_ns(),
        window=WindowConfig(**{name: _typed(window, name, kinds[name], value) for name, value in default.items()}),
        max_steps=_typed(data, "max_steps", int, None),
        sampler_hz=_typed(data, "sampler_hz", int, 50),
        faults=_typed(data, "faults", str, None),
        knobs=tuple(Knob(*pair) for pair in pairs if isinstance(pair, list) and list(map(type, pair)) == [str, str]),
        seed=_typed(data, "seed", int, None),
        watch=float(_typed(data, "watch", (int, float), 0.0)),
    )


def _typed(data: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = data.get(name)
    return value if isinstance(value, kind) else default
