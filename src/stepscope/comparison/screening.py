"""Screening of several knobs with two values each: in few runs, every knob is on in one half and off in the other.

Up to three knobs all combinations are run; beyond that Plackett and Burman's designs of 8 or 12 runs, whose columns are
orthogonal too. A main effect is an average over the settings of the other knobs; in the small designs two knobs that
only work together show up, diluted, in the others' effects, so a screening proposes and paired runs decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np

from stepscope.comparison.estimates import exp, student
from stepscope.comparison.thresholds import CONFIDENCE
from stepscope.errors import UsageError
from stepscope.model.comparison import Effect

MOST_KNOBS = 11
_FACTORIAL = 3  # knobs up to which all combinations are no more than eight runs
_GENERATORS = {8: "+++-+--", 12: "++-+++---+-"}  # first rows of Plackett and Burman's designs

Levels = tuple[bool, ...]


def design(knobs: int) -> list[Levels]:
    """The runs of one replicate for so many knobs: for each run, which knobs are on. One run has all of them off.

    Raises `UsageError` for none, or more than `MOST_KNOBS`.
    """
    if not 1 <= knobs <= MOST_KNOBS:
        raise UsageError(f"a screening takes 1 to {MOST_KNOBS} knobs, not {knobs}; leave some out")
    if knobs <= _FACTORIAL:
        return [tuple(reversed(levels)) for levels in itertools.product((False, True), repeat=knobs)]
    size = 8 if knobs < 8 else 12
    first = [sign == "+" for sign in _GENERATORS[size]]
    rows = [tuple(first[-shift:] + first[:-shift]) for shift in range(size - 1)]
    return [(False,) * knobs, *(row[:knobs] for row in rows)]


def main_effects(runs: Sequence[tuple[Levels, Hashable, float]]) -> list[Effect | None]:
    """What each knob does on average, from (levels, block, mean step in ms): on over off.

    Logs are fitted by least squares with a level of its own for each block (a replicate), so that a machine that
    drifts between replicates costs nothing. `pairs` is the number of runs, `spread` the residual standard deviation;
    limits and p-value are None where no runs are left over to estimate it. An effect is None where the runs at hand
    cannot tell it. Runs whose figure is not positive and finite are left out.
    """
    usable = [run for run in runs if math.isfinite(run[2]) and run[2] > 0]
    if not usable:
        return [None] * (len(runs[0][0]) if runs else 0)
    blocks = list(dict.fromkeys(block for _, block, _ in usable))
    signs = np.array([[1.0 if on else -1.0 for on in levels] for levels, _, _ in usable])
    shifts = np.array([[1.0 if block == each else 0.0 for each in blocks] for _, block, _ in usable])
    matrix = np.hstack([signs, shifts])
    logs = np.log([mean for _, _, mean in usable])
    inverse = np.linalg.pinv(matrix)
    found = inverse @ logs
    freedom = len(usable) - int(np.linalg.matrix_rank(matrix))
    square = float(np.sum((logs - matrix @ found) ** 2))
    spread = math.sqrt(square / freedom) if freedom > 0 else None
    resolution = inverse @ matrix  # the identity in the rows of what the runs can tell
    effects: list[Effect | None] = []
    for knob in range(signs.shape[1]):
        told = np.zeros(matrix.shape[1])
        told[knob] = 1.0
        if not np.allclose(resolution[knob], told, atol=1e-6):
            effects.append(None)
            continue
        error = None if spread is None else 2 * spread * float(np.linalg.norm(inverse[knob]))
        effects.append(_effect(2 * float(found[knob]), error, freedom, len(usable), spread))
    return effects


def _effect(size: float, error: float | None, freedom: int, runs: int, spread: float | None) -> Effect:
    """`size` and its standard `error` are on logs."""
    if error is None:
        return Effect(exp(size), None, None, runs, spread)
    half = student(CONFIDENCE, freedom) * error
    return Effect(exp(size), exp(size - half), exp(size + half), runs, spread, _p(size, error, freedom))


def _p(size: float, error: float, freedom: int) -> float:
    if error == 0:
        return 0.0 if size else 1.0
    from scipy import special

    return float(2 * special.stdtr(freedom, -abs(size) / error))
