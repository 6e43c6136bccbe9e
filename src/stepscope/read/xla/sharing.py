"""Sharing out events over the lines that caused them, where one source counts steps and another one counts lines.

Both counts are kept: every step has as many events as its source says, every line as many as the other says. Which
event of a step is of which line is exact where the order is known, and otherwise an even mixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def in_order(counts: Sequence[int], keys: Sequence[Key]) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of `keys`, of which there must be as many as all counts together, or more."""
    position = 0
    for count in counts:
        yield Counter(keys[position : position + count])
        position += count


def evenly(counts: Sequence[int], weights: Mapping[Key, int], rest: Key) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of the keys, each of which is had `weights` times; `rest` for what is over."""
    whole = sum(counts)
    left = Counter({key: weight for key, weight in weights.items() if weight > 0})
    left[rest] += max(0, whole - sum(left.values()))
    for count in counts:
        share = _share(count, left)
        left -= share
        yield share


def _share(count: int, left: Counter[Key]) -> Counter[Key]:
    """`count` of what is `left`, in its proportions; what rounding leaves goes to the largest remainders."""
    total = sum(left.values())
    if count <= 0 or total <= 0:
        return Counter()
    share = Counter({key: have * count // total for key, have in left.items()})
    over = count - sum(share.values())
    order = sorted(left, key=lambda key: (-(left[key] * count % total), -left[key], str(key)))
    for key in order[: max(0, over)]:
        share[key] += 1
    return +share


def split(total: float, parts: Mapping[Key, int]) -> dict[Key, int]:
    """`total` as whole numbers in proportion to `parts`; together they are `total`, rounded."""
    whole, count = round(total), sum(parts.values())
    found: dict[Key, int] = {}
    given = taken = 0
    for key, part in parts.items():
        taken += part
        upto = whole * taken // count if count else 0
        found[key] = upto - given
        given = upto
    return found
