"""The occupancy of kernels whose trace gives none: warps held by warps that fit, by NVIDIA's published rules.

Kineto asks NVIDIA's calculator (cuda_occupancy.h) without saying that a kernel may take more shared memory than the
48 KB every kernel may: one that does, as most matrix kernels from Ampere on, gets 0 %. The rules here are that
calculator's, its constants those of "Technical Specifications per Compute Capability" in the CUDA programming guide.
They are for Volta and later: no earlier device lets a block have more than 48 KB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.model.trace import OTHER_MAKERS
from stepscope.read.text import integer
from stepscope.tables.arrays import Floats

_BLOCKS = {  # that a multiprocessor holds at most, by compute capability
    **dict.fromkeys(((7, 0), (7, 2), (8, 0), (9, 0), (10, 0), (10, 3)), 32),
    **dict.fromkeys(((7, 5), (8, 6), (8, 7)), 16),
    **dict.fromkeys(((8, 9), (10, 1), (11, 0), (12, 0), (12, 1)), 24),
}
_WARP = 32
_PARTITIONS = 4  # of a multiprocessor; a warp's registers lie in one of them
_REGISTERS = 256  # are given to a warp at a time
_FIRST_RESERVING = 8  # capability from which on a block takes _RESERVED bytes of shared memory for the system
_RESERVED = 1024
_ROUNDED_PCT = 0.5  # Kineto writes whole percent: its 0 is right below this


class _Device(Struct, frozen=True):
    """What one multiprocessor has, and their number."""

    major: int
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    multiprocessors: int

    def occupancy_pct(self, blocks: Floats, threads: Floats, registers: Floats, shared_bytes: Floats) -> Floats:
        """In Kineto's meaning: a grid too small to fill the device holds what it has; nan where anything is missing."""
        reserved, unit = (_RESERVED, 128) if self.major >= _FIRST_RESERVING else (0, 256)
        warps = np.ceil(threads / _WARP)
        of_warp = np.maximum(_up(registers * _WARP, _REGISTERS), 1)
        of_block = np.maximum(_up(shared_bytes + reserved, unit), 1)
        fit = np.minimum(self.threads // _WARP // warps, self.shared_bytes // of_block)
        fit = np.minimum(fit, self.registers // _PARTITIONS // of_warp * _PARTITIONS // warps)
        held = np.minimum(np.minimum(fit, self.blocks), blocks / self.multiprocessors)
        could_run = (fit > 0) & (threads > 0)
        return np.where(could_run, 100 * held * threads / self.threads, np.nan)


def _up(value: Floats, unit: int) -> Floats:
    return np.ceil(value / unit) * unit


def devices(metadata: dict[str, Any]) -> dict[int, _Device]:
    """By number those of a trace that the rules are known for."""
    listed = metadata.get("deviceProperties")
    found = {}
    for item in [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else ():
        major, minor = integer(item.get("computeMajor")) or 0, integer(item.get("computeMinor")) or 0
        keys = ("maxThreadsPerMultiprocessor", "regsPerMultiprocessor", "sharedMemPerMultiprocessor", "numSms")
        figures = [integer(item.get(key)) or 0 for key in keys]
        other = item.get("warpSize") != _WARP or any(maker in str(item.get("name")) for maker in OTHER_MAKERS)
        if (major, minor) in _BLOCKS and min(figures) > 0 and not other:
            found[integer(item.get("id")) or 0] = _Device(major, _BLOCKS[major, minor], *figures)
    return found


def completed(events: pl.DataFrame, known: dict[int, _Device]) -> pl.DataFrame:
    """Rows of `events`, with an estimate where the writer gave none or a 0 that is not its rounding.

    Where what is needed is missing, so is the occupancy: a kernel that ran held some warp.
    """
    given = pl.col("occupancy_percent")
    rows = events.select(pl.arg_where(pl.col("threads").is_not_null() & ~(given > 0).fill_null(False))).to_series()
    if rows.is_empty():
        return events
    names = ("device", "blocks", "threads", "registers", "shared_memory_bytes", "occupancy_percent")
    device, *launch, written = (events[name].gather(rows).cast(pl.Float64).to_numpy() for name in names)
    found = np.full(len(rows), np.nan)
    for number, one in known.items():
        of_device = np.flatnonzero(device == number)
        found[of_device] = one.occupancy_pct(*(column[of_device] for column in launch))
    found = np.where((found < _ROUNDED_PCT) & (written == 0), 0.0, found)
    return events.with_columns(events["occupancy_percent"].scatter(rows, pl.Series(found, nan_to_null=True)))
