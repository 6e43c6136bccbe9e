"""How to build tables, in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from stepscope.read.formats import Limits

Progress = Callable[[str, int, int], None]


class BuildOptions(Struct, frozen=True):
    """What `tables.build` may use.

    `cache` is where the tables of traces stay (`cache.default_folder()` is the user's); without it, or where it cannot
    be written to, they are made anew each time. `workers` processes take in several traces side by side; by default
    one per core where that is safe. `progress` gets a trace's name, the bytes of it done so far, and its size.
    `steps` keeps the slices of the steps from the first to the last given, both included, and what encloses them.
    """

    cache: Path | None = None
    workers: int | None = None
    progress: Progress | None = None
    limits: Limits | None = None
    steps: tuple[int, int] | None = None
