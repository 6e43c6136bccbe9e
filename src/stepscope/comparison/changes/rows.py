"""Amounts of the same things on both sides, and which of their differences are worth a row.

A row needs more than the floor of `thresholds`, more than sampling can make of nothing, and more than runs differ among
themselves: with three pairs or more by the interval of the paired differences, with fewer by a share of the amount. The
rest is "same" and left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from stepscope.comparison import estimates, thresholds
from stepscope.model.comparison import Change

PER_STEP = "ms per step"
DEVICE_PER_STEP = "ms of the device per step"
IN_ALL = "ms"
OF_SAMPLES = "% of samples"  # where no step is known
GREW, SHRANK, NEW, GONE, CHANGED, SAME = "grew", "shrank", "new", "gone", "changed", "same"


class Thing(Struct, frozen=True):
    """What a row is about. `file` is as it is shown, relative to the run's own folder."""

    name: str
    file: str | None = None
    line: int | None = None


class Amount(Struct, frozen=True):
    """`value` in the rows' unit; `samples` is how many sampled stacks it stands on, None where it was measured."""

    value: float
    samples: float | None = None


Amounts = Mapping[Thing, Amount]
Pair = tuple[Amounts, Amounts]  # (baseline, candidate)
NOTHING = Amount(0.0)


def rows(kind: str, unit: str, pairs: Sequence[Pair], floor: float) -> list[Change]:
    """A row for each thing that differs, the largest difference first."""
    things = dict.fromkeys(thing for pair in pairs for side in pair for thing in side)
    found = (row(kind, thing, unit, pairs, floor) for thing in things)
    return ordered(change for change in found if change.status != SAME)


def row(kind: str, thing: Thing, unit: str, pairs: Sequence[Pair], floor: float) -> Change:
    """Of one thing, also where it stayed the same. Values are means over the runs of a side."""
    values = [[side.get(thing) for side in pair] for pair in pairs]
    known = [any(value[side] is not None for value in values) for side in (0, 1)]
    amounts = [(one or NOTHING, other or NOTHING) for one, other in values]
    means = [math.fsum(pair[side].value for pair in amounts) / max(1, len(amounts)) for side in (0, 1)]
    difference = means[1] - means[0]
    status = SAME
    if abs(difference) >= floor and _is_told(amounts, means):
        status = NEW if not known[0] else GONE if not known[1] else GREW if difference > 0 else SHRANK
    return Change(
        kind=kind,
        name=thing.name,
        baseline=means[0] if known[0] else None,
        candidate=means[1] if known[1] else None,
        difference=difference,
        unit=unit,
        status=status,
        file=thing.file,
        line=thing.line,
    )


def total(name: str, amounts: Amounts) -> Amounts:
    """The sum of all under one name."""
    return {Thing(name): Amount(math.fsum(amount.value for amount in amounts.values()))} if amounts else {}


def merged(items: Iterable[tuple[Thing, Amount]]) -> dict[Thing, Amount]:
    """Amounts of equal things added up."""
    found: dict[Thing, Amount] = {}
    for thing, amount in items:
        before = found.get(thing)
        if before is not None:
            samples = None if amount.samples is None else amount.samples + (before.samples or 0)
            amount = Amount(before.value + amount.value, samples)
        found[thing] = amount
    return found


def ordered(changes: Iterable[Change]) -> list[Change]:
    """The largest difference first; what has none by name."""
    return sorted(changes, key=lambda one: (-abs(one.difference or 0), one.name, one.file or "", one.line or 0))


def _is_told(amounts: Sequence[tuple[Amount, Amount]], means: Sequence[float]) -> bool:
    difference = abs(means[1] - means[0])
    if difference <= thresholds.SAMPLING_SIGMAS * _sampling_error(amounts):
        return False
    count = len(amounts)
    if count < thresholds.INTERVAL_PAIRS:
        return difference >= thresholds.SAME_SHARE * max(abs(mean) for mean in means)
    spread = statistics.stdev(other.value - one.value for one, other in amounts)
    return difference > estimates.student(thresholds.CONFIDENCE, count - 1) * spread / math.sqrt(count)


def _sampling_error(amounts: Sequence[tuple[Amount, Amount]]) -> float:
    """Standard error of the difference of means, as far as counting samples makes it: n of them vary by their root."""
    variance = math.fsum(_variance(amount, other) for pair in amounts for amount, other in (pair, pair[::-1]))
    return math.sqrt(variance) / max(1, len(amounts))


def _variance(amount: Amount, other: Amount) -> float:
    if amount.samples:
        return amount.value**2 / amount.samples
    # nothing was seen here: one sample could have been missed, and is worth what it is on the other side
    return (other.value / other.samples) ** 2 if other.samples else 0.0
