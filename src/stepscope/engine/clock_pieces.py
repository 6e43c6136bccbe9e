"""What is known of clocks, in pieces of time; rates from window to window, and steps between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.engine.clock_fit import ROBUST, broken, line

RESIDUALS = 3.0  # no claim is smaller than so many robust deviations of single ends
GROWTH_PPM = 500.0  # how fast a bound grows beyond what was recorded: ntpd's fastest slew
LEAST_ERROR_NS = 5_000.0  # of an offset: hosts differ by as much in how they leave a call
STEP_NS = 200_000.0  # a smaller step of a clock is not told
CHANGED = "the rate of its clock changed, or it stepped, since the window before"


class Piece(Struct, frozen=True):
    """A host's clock in a window, or in a part of one that a step of the clock begins or ends.

    It is ahead of the reference's by `offset_ns` + `rate_ppm` x (time - `middle_ns`); None where nothing connects it.
    Without `claimed` the offset is the middle of what order allows, and `bound_ns` reaches to its edges.

    host: position; of the reference itself the offset is 0.
    window: as in `Members`.
    start_ns, end_ns: of its calls, like `middle_ns` on its own clock.
    calls: it was estimated from.
    bound_ns: The true offset at `middle_ns` lies within so much of `offset_ns`.
    residual_ns: robust deviation of its single ends from those of others; of ranks of one host where it is alone.
    step_ns: what the clock leapt by at its start, in step `step` of the run or since the window before.
    """

    host: int
    window: int
    start_ns: int
    end_ns: int
    middle_ns: int
    calls: int
    offset_ns: float | None = None
    bound_ns: float | None = None
    rate_ppm: float = 0.0
    rate_bound_ppm: float = GROWTH_PPM
    residual_ns: float | None = None
    claimed: bool = False
    step_ns: float | None = None
    step: int | None = None
    reason: str = ""


def linked(pieces: Sequence[Piece], reference: dict[int, int]) -> list[Piece]:
    """The same pieces with steps between them, and with rates from window to window where no step is between."""
    result = list(pieces)
    chains: dict[int, list[int]] = {}
    for at, piece in enumerate(result):
        if piece.claimed:
            chains.setdefault(piece.host, []).append(at)
    # unexplained changes (ns, and what of them the bounds explain) from piece to piece of a host
    against_reference = {
        pair: _change(result[pair[0]], result[pair[1]])
        for chain in chains.values()
        for pair in pairwise(chain)
        if reference[result[pair[0]].window] == reference[result[pair[1]].window]
    }
    changes = _told_by_all(result, against_reference, chains, reference)
    for chain in chains.values():
        segment = chain[:1]
        for before, after in pairwise(chain):
            change, explained = changes.get((before, after), (0.0, 0.0))
            same = result[before].window == result[after].window
            if abs(change) > max(explained, STEP_NS):
                step = result[after].step
                how = f"stepped by {change / 1e6:+.3g} ms"
                if not same:  # what came between was not recorded
                    how = f"stepped or was slewed by {change / 1e6:+.3g} ms since the window before"
                elif step is not None and step >= 0:
                    how += f" in step {step}"
                result[after] = _with_reason(replace(result[after], step_ns=change), f"its clock {how}")
            elif same:
                result[after] = _with_reason(result[after], "the rate of its clock changed in this window")
            if same or abs(against_reference.get((before, after), (np.inf, 0.0))[0]) > max(explained, STEP_NS):
                _rated(result, segment)
                segment = []
            segment.append(after)
        _rated(result, segment)
    _of_reference(result, reference)
    return result


def _of_reference(result: list[Piece], reference: dict[int, int]) -> None:
    """What most clocks have at once is the reference's."""
    for window, host in reference.items():
        marked = [at for at, piece in enumerate(result) if piece.window == window and CHANGED in piece.reason]
        if len(marked) > 2 and 2 * len(marked) > sum(piece.window == window and piece.claimed for piece in result):
            for at in marked:
                parts = [part for part in result[at].reason.split("; ") if part != CHANGED]
                result[at] = replace(result[at], reason="; ".join(parts))
            own = next(at for at, piece in enumerate(result) if piece.window == window and piece.host == host)
            result[own] = _with_reason(result[own], CHANGED)


def _with_reason(piece: Piece, reason: str) -> Piece:
    return replace(piece, reason="; ".join(part for part in (piece.reason, reason) if part))


def _change(before: Piece, after: Piece) -> tuple[float, float]:
    """What a clock leapt by from one claimed piece to the next, beyond its rate, and what the bounds explain of it."""
    assert before.offset_ns is not None
    assert before.bound_ns is not None
    assert after.offset_ns is not None
    assert after.bound_ns is not None
    sides = before, after
    if before.window == after.window:  # at the very moment: each rate holds on its side
        lengths = float(after.start_ns - before.middle_ns), float(after.middle_ns - after.start_ns)
    else:
        lengths = (float(after.middle_ns - before.middle_ns) / 2,) * 2
        if abs(before.rate_ppm - after.rate_ppm) > before.rate_bound_ppm + after.rate_bound_ppm:
            # one of them is a slew, which ends
            sides = (min(sides, key=lambda piece: abs(piece.rate_ppm)),) * 2
    drift = 1e-6 * sum(piece.rate_ppm * length for piece, length in zip(sides, lengths, strict=True))
    open_ns = 1e-6 * sum(piece.rate_bound_ppm * length for piece, length in zip(sides, lengths, strict=True))
    return after.offset_ns - before.offset_ns - drift, before.bound_ns + after.bound_ns + open_ns


def _told_by_all(
    result: list[Piece],
    changes: dict[tuple[int, int], tuple[float, float]],
    chains: dict[int, list[int]],
    reference: dict[int, int],
) -> dict[tuple[int, int], tuple[float, float]]:
    """The same changes, each clock's own: what most hosts have at once is the reference's, the other way round."""
    changes = dict(changes)
    between: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pair in changes:
        windows = result[pair[0]].window, result[pair[1]].window
        if windows[0] != windows[1] and result[pair[0]].host != reference[windows[0]]:
            between.setdefault(windows, []).append(pair)
    for windows, pairs in between.items():
        values, explained = np.array([changes[pair] for pair in pairs]).T
        common = float(np.median(values))
        if len(pairs) < 3 or abs(common) <= max(STEP_NS, float(np.median(explained))):
            continue
        chain = chains.get(reference[windows[0]], [])
        own = [pair for pair in pairwise(chain) if result[pair[1]].window == windows[1]]
        for pair in pairs:
            changes[pair] = changes[pair][0] - common, changes[pair][1]
        for pair in own[:1]:
            changes[pair] = -common, changes[pair][1]
    return changes


def _rated(result: list[Piece], segment: Sequence[int]) -> None:
    """Give pieces of a clock without a step between them the rate from the first to the last, where it is surer."""
    if len(segment) < 2:
        return
    pieces = [result[at] for at in segment]
    times = np.array([piece.middle_ns - pieces[0].middle_ns for piece in pieces], np.float64)
    offsets = np.array([piece.offset_ns for piece in pieces], np.float64)
    if not np.ptp(times):
        return
    bound = float(np.median([piece.bound_ns for piece in pieces]))
    rate, start = line(times, offsets)
    missed = np.abs(offsets - start - rate * times)
    at_break = broken(times, offsets)
    cut = None if at_break is None else at_break[0]
    if cut is None and len(segment) > 2 and float(missed.max()) > bound + STEP_NS / 2:
        cut = int(np.argmax(np.abs(np.diff(offsets) - rate * np.diff(times)))) + 1
    if cut is not None:
        result[segment[cut]] = _with_reason(result[segment[cut]], CHANGED)
        _rated(result, segment[:cut])
        _rated(result, segment[cut:])
        return
    error = bound / RESIDUALS
    if len(segment) > 2:  # the line itself shows how well they are known
        ends = [(piece.residual_ns or 0.0) / max(piece.calls, 1) ** 0.5 for piece in pieces]
        square = float((missed**2).sum()) / (len(segment) - 2)
        error = max(square**0.5, ROBUST * float(np.median(ends)), LEAST_ERROR_NS)
    rate_bound = RESIDUALS * error / float(np.sqrt(((times - times.mean()) ** 2).sum())) * 1e6
    for at, piece in zip(segment, pieces, strict=True):
        if rate_bound < piece.rate_bound_ppm:
            result[at] = replace(piece, rate_ppm=rate * 1e6, rate_bound_ppm=rate_bound)
