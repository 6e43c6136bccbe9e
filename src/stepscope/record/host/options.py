"""What the user may choose about a recording, and the parsing of `--window`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError, refuse
from stepscope.record.agent.config import WindowConfig
from stepscope.record.agent.knobs import check_all, masked
from stepscope.schema import Knob

# Sampling may slow training by at most 2 %. Measured with py-spy 0.4.3 on two cores: 15 ms of processor time to start
# the sampler of a process for a segment, 0.3 ms per sample. At 20 Hz in segments of 5 s that is 0.9 % of a core per
# sampled process; 50 Hz cost 1.8 %. A line that takes 5 % of a 20 s run still gets 20 samples.
DEFAULT_RATE_HZ = 20.0
SEGMENT_SECONDS = 5.0
HIGHEST_RATE_HZ = 1000.0
FALLBACK_RATE_HZ = 50.0  # in-process sampling holds the interpreter lock while it walks the stacks

HIGHEST_SEED = (1 << 32) - 1  # of numpy, and of PYTHONHASHSEED


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """One call of `stepscope run`. `command` is argv; `out` None means the default name in the working directory.

    `knobs` change the training without its script (`record.agent.knobs`).
    """

    command: tuple[str, ...]
    out: Path | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    rate_hz: float = DEFAULT_RATE_HZ
    window: WindowConfig = field(default_factory=WindowConfig)
    max_steps: int | None = None
    knobs: tuple[Knob, ...] = ()
    seed: int | None = None
    watch: float = 0.0  # of the run's time, the share that monitors may take

    def __post_init__(self) -> None:
        steps, rate, seed = self.max_steps, self.rate_hz, self.seed
        refuse(
            {
                f"--rate must lie between 0 and {HIGHEST_RATE_HZ:g} Hz, not {rate:g}": not 0 < rate <= HIGHEST_RATE_HZ,
                f"--max-steps must be at least 1, not {steps}": steps is not None and steps < 1,
                f"--seed must lie between 0 and {HIGHEST_SEED}, not {seed}": not 0 <= (seed or 0) <= HIGHEST_SEED,
            }
        )
        check_all(self.knobs)

    def for_manifest(self) -> dict[str, Any]:
        return {
            "rate_hz": self.rate_hz,
            "window": asdict(self.window),
            "max_steps": self.max_steps,
            "knobs": [[knob.knob, masked(knob.knob, knob.value)] for knob in self.knobs],
            "seed": self.seed,
            "watch": self.watch,
        }


_COUNTS = ("skip_first", "wait", "warmup", "active", "repeat")


def parse_window(text: str | None, *, off: bool = False, memory: bool | None = None) -> WindowConfig:
    """`--window`, `--no-window` and `--window-memory` (None: where memory asks for it) as one value.

    `text` is a comma-separated list of `skip_first=`, `wait=`, `warmup=`, `active=`, `repeat=` and the bare word
    `everywhere`. Any of the counts turns the automatic choice into a schedule. Raises `UsageError`.
    """
    if off:
        if text is not None or memory:
            raise UsageError("--no-window contradicts --window and --window-memory; drop one of them")
        return WindowConfig(mode="off")
    counts: dict[str, int] = {}
    everywhere = False
    for part in (text or "").split(","):
        name, equals, value = part.strip().partition("=")
        if not name and not equals:
            continue
        if name == "everywhere" and not equals:
            everywhere = True
        elif name in _COUNTS and value.isdecimal():
            counts[name] = int(value)
        else:
            allowed = ", ".join(f"{count}=N" for count in _COUNTS)
            raise UsageError(f"--window cannot use {part.strip()!r}; it takes {allowed} and the word everywhere")
    if counts.get("active", 1) < 1:
        raise UsageError("--window active= must be at least 1; use --no-window to record none")
    mode = "schedule" if counts else "auto"
    return WindowConfig(
        mode=mode, memory="auto" if memory is None else "on" if memory else "off", everywhere=everywhere, **counts
    )
