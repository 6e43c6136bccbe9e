"""What the launcher tells the agent, parsed from the JSON text in STEPSCOPE_RECORD.

Every field has a default, unknown fields are ignored and a field of the wrong type falls back to its default: an older
or newer launcher must never stop the training process from starting.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from stepscope.schema import Knob

ENVIRONMENT_NAME = "STEPSCOPE_RECORD"


@dataclass(frozen=True)
class WindowConfig:
    """When torch.profiler is opened. `mode` is "auto", "schedule" or "off"; the counts are steps."""

    mode: str = "auto"
    skip_first: int = 0
    wait: int = 0
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    memory: bool = False
    byte_budget: int = 200_000_000
    time_share: float = 0.02
    everywhere: bool = False


@dataclass(frozen=True)
class Config:
    """The agent's settings. `run` is the run folder, `host_dir` its RUN/host-H.

    With knobs or a seed the training is not the one the script alone describes: `record.agent.knobs`, `.seed`.
    """

    run: str
    host_dir: str
    epoch_offset_ns: int = 0
    window: WindowConfig = field(default_factory=WindowConfig)
    max_steps: int | None = None
    sampler_hz: int = 50
    faults: str | None = None
    knobs: tuple[Knob, ...] = ()
    seed: int | None = None
    losses: bool = False  # keep the loss of every step


def epoch_offset_ns() -> int:
    """The offset that turns this host's monotonic clock into epoch time."""
    return time.time_ns() - time.monotonic_ns()


def parse(text: str) -> Config | None:
    """The configuration in `text`, or None when it is no JSON object that names a run folder."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("run"), str) or not data["run"]:
        return None
    run = data["run"]
    window = data.get("window")
    # Started on another host than the launcher (`stepscope run -- srun ...`): monotonic clocks of hosts differ by days.
    elsewhere = _typed(data, "host", str, os.uname().nodename) != os.uname().nodename
    offset = None if elsewhere else _typed(data, "epoch_offset_ns", int, None)
    return Config(
        run=run,
        host_dir=_typed(data, "host_dir", str, os.path.join(run, "host-" + os.uname().nodename)),
        epoch_offset_ns=offset or epoch_offset_ns(),
        window=_window(window if isinstance(window, dict) else {}),
        max_steps=_typed(data, "max_steps", int, None),
        sampler_hz=_typed(data, "sampler_hz", int, 50),
        faults=_typed(data, "faults", str, None),
        knobs=_knobs(data.get("knobs")),
        seed=_typed(data, "seed", int, None),
        losses=_typed(data, "losses", bool, False),
    )


def from_environment() -> Config | None:
    """The configuration this process was started with, or None outside of `stepscope run`."""
    text = os.environ.get(ENVIRONMENT_NAME)
    return parse(text) if text else None


def _window(data: dict[str, Any]) -> WindowConfig:
    default = WindowConfig()
    return WindowConfig(
        mode=_typed(data, "mode", str, default.mode),
        skip_first=_typed(data, "skip_first", int, default.skip_first),
        wait=_typed(data, "wait", int, default.wait),
        warmup=_typed(data, "warmup", int, default.warmup),
        active=_typed(data, "active", int, default.active),
        repeat=_typed(data, "repeat", int, default.repeat),
        memory=_typed(data, "memory", bool, default.memory),
        byte_budget=_typed(data, "byte_budget", int, default.byte_budget),
        time_share=float(_typed(data, "time_share", (int, float), default.time_share)),
        everywhere=_typed(data, "everywhere", bool, default.everywhere),
    )


def _knobs(data: Any) -> tuple[Knob, ...]:
    """`[[name, value], …]` as knobs; what is no pair of texts is left out."""
    pairs = data if isinstance(data, list) else []
    return tuple(
        Knob(*pair)
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
    )


def _typed(data: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = data.get(name)
    return value if isinstance(value, kind) else default
