"""Samples that no frame marks, in the part of the step where the journal's forward pass lies.

The journal calls forward all that runs from a batch to its backward pass: the loss, a transform on the device, a model
that is no module. No frame says so, but where a sample's time is known the step it lies in does: a step is data wait,
forward and backward of its batches, and then what follows. Where steps are short beside the time between two samples,
or where an optimizer calls a closure and so stands around the forward pass, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.raw import RawRank

MOSTLY = 0.5  # of the time of a path in one segment: a line stands before the backward pass or behind it
SHORT = 4.0  # times between two samples that a step has to last: with less a sample's time tells no part; untuned
_BEFORE = ("data_wait_ns", "forward_ns", "backward_ns")


def mostly_forward(rows: pl.DataFrame, stretches: Mapping[str, Any], ranks: Sequence[RawRank]) -> pl.Series:
    """By row, whether most of its time lies in the forward part of steps.

    Args:
        rows: `process`, `rate_hz`, and `in_closure`: the row stands in a closure that an optimizer calls.
        stretches: `row`, `start_ns`, `end_ns` of what the sampler gave times.
    """
    count = rows.height
    inside, whole = np.zeros(count), np.zeros(count)
    if not len(stretches.get("row", ())):
        return pl.Series(inside > whole, dtype=pl.Boolean)
    row = np.asarray(stretches["row"])
    start, end = np.asarray(stretches["start_ns"]), np.asarray(stretches["end_ns"])
    process = rows["process"].fill_null("")[row].to_numpy()
    for rank in ranks:
        own = process == rank.name
        mine = rows.filter(pl.col("process") == rank.name)
        if mine["in_closure"].any():
            continue
        steps = _forward_parts(rank, mine["rate_hz"].median())
        if own.any() and len(steps[0]):
            np.add.at(inside, row[own], _covered(start[own], end[own], *steps))
            np.add.at(whole, row[own], np.maximum(end[own] - start[own], 1))
    return pl.Series(inside > MOSTLY * whole, dtype=pl.Boolean)


def _forward_parts(rank: RawRank, rate_hz: object) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each step's forward part begins and ends; without a loader the first module begins it."""
    parts: list[tuple[int, int]] = []
    walls = [step["wall_ns"] for step in rank.steps if step["wall_ns"] is not None]
    long = isinstance(rate_hz, float) and rate_hz > 0 and sum(walls) * rate_hz >= SHORT * 1e9 * len(walls)
    for step in rank.steps:
        if not long or step["start_ns"] is None or step["forward_ns"] is None:
            continue
        wait = step["data_wait_ns"] or 0
        end = step["start_ns"] + sum(step[name] or 0 for name in _BEFORE)
        parts.append((step["start_ns"] + (0 if step["fetches"] else wait), end))
    found = np.array(sorted(parts), np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _covered(
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Of each stretch, how much lies in parts, which follow each other."""
    done = np.concatenate([[0], np.cumsum(ends - begins)])

    def before(moments: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        index = np.searchsorted(begins, moments, side="right")
        last = np.maximum(index - 1, 0)
        found: npt.NDArray[np.int64] = done[index] - np.where(index > 0, np.maximum(0, ends[last] - moments), 0)
        return found

    covered: npt.NDArray[np.int64] = before(end) - before(start)
    return covered
