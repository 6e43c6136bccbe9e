"""What every file of stacks says of itself: the common part of the readers in this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.read.raw import FrameNames, Losses, RawStack

Progress = Callable[[int], None]

SAMPLES = "samples"
MICROSECONDS = "us"
BYTES = "bytes"
MAX_COUNT_DIGITS = 15
MAX_SAMPLES = 10**15  # of one stack; sums of thousands of these still fit 64 bits
MAX_FRAMES = 20_000  # of one stack


class FileSource:
    """A `StackSource` with what the beginning of its file tells: who wrote it, and whether waiting was sampled.

    `label` names the file in the losses. `idle` is None where nothing tells it.
    """

    format = ""

    def __init__(self, path: Path, label: str | None = None, *, tool: str = "unknown") -> None:
        self.path = path
        self.label = label or path.name
        self.tool = tool
        self.idle: bool | None = None
        self.unit = SAMPLES
        self.rate_hz: float | None = None
        self.wall_ns: int | None = None
        self.hints: dict[int, str] = {}

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks; see `StackSource`."""
        raise NotImplementedError


def count_of(digits: str) -> int | None:
    """The count at the end of a record, None where it is none."""
    if digits.isdigit() and digits.isascii() and len(digits) <= MAX_COUNT_DIGITS:
        return int(digits)
    return None
