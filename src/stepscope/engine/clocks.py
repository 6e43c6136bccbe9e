"""Clocks of hosts, by the ends of collectives: what each is ahead of a reference host's, within a stated bound.

Nobody leaves a small blocking collective long before the others: true ends are nearly equal, so what is left between
hosts is their clocks. Hosts are fitted, not ranks: ranks of one host share its clock, and one that ends later than its
mates has work inside what is taken for the collective. Large collectives run in waves round a ring; of them, and of
messages from one rank to another, only what must hold is used: every end comes after every member's start. Where that
cannot hold, data are mismatched, and the host is refused. A host that ends all its collectives late by a constant
cannot be told from a clock by ends alone; so no bound is below three times the scatter. What is known is laid down in
pieces of time (`Piece`); rates go from window to window, and steps stand between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.engine import collective_names as words
from stepscope.engine.clock_fit import (
    DEVIATION,
    ROBUST,
    Ends,
    Fit,
    broken,
    fit,
    greatest_of_others,
    line,
    low_quantiles,
    medians,
    middles,
)
from stepscope.tables.arrays import Bools, Floats, Int64, unique

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


# Every member's end comes after every member's start. Of broadcast, reduce, scatter and gather that holds between the
# root and the others alone, and no recording names the root.
BLOCKING = frozenset({words.ALL_REDUCE, words.ALL_GATHER, words.REDUCE_SCATTER, words.ALL_TO_ALL, "barrier"})

SMALL_BYTES = 2**20  # up to here latency decides, not bandwidth; rings of large messages end in waves of 1 to 3 ms
SMALL_NS = 1_000_000  # the shortest stay in a call of unknown size that counts as small
MIN_CALLS = 4  # of a host in a window, for a claim: of fewer no scatter can be told
SURE_CALLS = 20  # a host's own scatter is believed from here on; below, that of all hosts counts as well
DEVICE_FLOOR_NS = 2_000.0  # ends of one collective on devices of one host differ by 1 to 7 us
HOST_FLOOR_NS = 100_000.0  # a call that returns on the host includes its thread's waking
CALL_FLOOR_NS = 50_000.0  # small calls take 10 to 50 us; what takes longer waits or is a range around one
HOST_WEIGHT = 0.1
WORK_NS = 50_000.0  # ranks and kinds of a host agree within 10 to 20 us, kinds of 16 hosts within 50
WORK_SIGMAS = 6.0
AGREEING = 0.25  # of the distance of two camps: so near must be what decides between them
USUAL_PPM = 100.0  # free oscillators differ by up to 30 ppm, ntpd slews by up to 500: what short windows assume
RATE_BOUND_PPM = 0.5  # a rate that is less well known is not told
TOGETHER = 0.1  # of half a window: breaks of two clocks so near each other may be one clock's
ROUNDS = 3  # of looking for steps, for work and for mismatches; each needs the fit of the last
MISMATCHED = 0.2  # part of a host's collectives that may contradict order, by outliers
MISMATCH_NS = 1_000_000.0  # of contradiction is never scatter
TRIMMED = 0.05  # of the hard bounds on either side, for the same outliers: without them a bound only widens
HULL_ROUNDS = 12
MAX_STAY_NS = 3_600_000_000_000  # a call of an hour is damage
LATEST_NS = 2**62  # since the epoch
MAX_SPREAD_NS = 2**52  # clocks of one run that are 52 days apart are damage; exact in a float
MAX_FITTED = 100_000  # ends of hosts; more are thinned out evenly

MISMATCH = "its collectives contradict each other's order: mismatched data"
UNCONNECTED = "no collective that could be matched connects it with the reference"


class Members(Struct, frozen=True):
    """Members of collectives; arrays of one length, a row for each. Rows with the same `call` are of one collective.

    `host` is a position, `kind` one in `kinds`; `rank` is a rank's number; `window` and `step` ascend with time, step
    -1: unknown; `bytes` -1: unknown; times in ns on the host's own clock.
    """

    host: Int64
    rank: Int64
    window: Int64
    step: Int64
    call: Int64
    group: Int64
    kind: Int64
    bytes: Int64
    start_ns: Int64
    end_ns: Int64
    on_device: Bools
    kinds: tuple[str, ...]

    def at(self, rows: Int64 | Bools) -> Members:
        arrays = {name: getattr(self, name)[rows] for name in self.__struct_fields__ if name != "kinds"}
        return Members(**arrays, kinds=self.kinds)


class Clocks(Struct, frozen=True):
    """`pieces` by host and time; `reference`: by window, the host by whose clock the others are told."""

    hosts: tuple[str, ...]
    reference: dict[int, int]
    pieces: tuple[Piece, ...]

    def ahead(self, host: int, times_ns: Int64) -> tuple[Floats, Floats]:
        """What a host's clock is ahead of the reference's at times on its own, and the bound of that, ns; NaN: unknown.

        Beyond what was recorded the bound grows by the fastest slew of a clock.
        """
        known = [piece for piece in self.pieces if piece.host == host and piece.offset_ns is not None]
        if not known:
            nothing = np.full(len(times_ns), np.nan)
            return nothing, nothing
        starts = np.array([piece.start_ns for piece in known], np.int64)
        ends = np.array([piece.end_ns for piece in known], np.int64)
        before = np.maximum(np.searchsorted(starts, times_ns, side="right") - 1, 0)
        after = np.minimum(before + 1, len(known) - 1)
        at = np.where(times_ns - ends[before] > np.abs(starts[after] - times_ns), after, before)
        offset, bound, rate, rate_bound = (
            np.array([float(getattr(piece, name)) for piece in known])[at]
            for name in ("offset_ns", "bound_ns", "rate_ppm", "rate_bound_ppm")
        )
        away = (times_ns - np.array([piece.middle_ns for piece in known], np.int64)[at]).astype(np.float64)
        outside = np.maximum(np.maximum(starts[at] - times_ns, times_ns - ends[at]), 0).astype(np.float64)
        growth = 1e-6 * (rate_bound * np.abs(away) + GROWTH_PPM * outside)
        return offset + 1e-6 * rate * away, bound + growth


def estimate(members: Members, hosts: Sequence[str]) -> Clocks:
    """Clocks of `hosts` in every window, in time that grows with the rows.

    A host without collectives in a window has no piece there.
    """
    stay = members.end_ns - members.start_ns
    usable = (members.start_ns > 0) & (members.end_ns < LATEST_NS) & (stay >= 0) & (stay < MAX_STAY_NS)
    members = members.at(usable & (members.host >= 0) & (members.host < len(hosts)))
    members = members.at(np.lexsort((members.host, members.call, members.window)))
    edges = np.flatnonzero(np.diff(members.window)) + 1
    parts = np.split(np.arange(len(members.call)), edges) if len(members.call) else []
    windows = [_Window(members.at(rows), len(hosts)) for rows in parts]
    fits = [window.fitted() for window in windows]
    lowest = np.full(len(hosts), np.iinfo(np.int64).max)
    np.minimum.at(lowest, members.host, members.rank)
    wanted = _references(windows, lowest)
    reference, pieces = {}, []
    for window, found in zip(windows, fits, strict=True):
        chosen = next(host for host in wanted if host in window.candidates)
        reference[window.number] = chosen
        pieces += window.pieces(found, chosen)
    pieces.sort(key=lambda piece: (piece.host, piece.window, piece.start_ns))
    return Clocks(tuple(hosts), reference, tuple(linked(pieces, reference)))


def _references(windows: Sequence[_Window], lowest: Int64) -> list[int]:
    """Hosts by how well they serve as reference: in most windows, without steps or doubts, of the lowest rank."""
    count, steps = np.zeros(len(lowest), np.int64), np.zeros(len(lowest), np.int64)
    for window in windows:
        count[list(window.candidates)] += 1
        steps += np.bincount(window.unit_host, minlength=len(lowest)) - 1 + (window.doubt > WORK_NS)
    found: list[int] = np.lexsort((lowest, steps, -count)).tolist()
    return found


class _Window:
    """Members of one window, by call and host; times in floats of ns from its middle.

    `unit` is the clock of each member: its host's, and after a step of that clock another one.
    """

    def __init__(self, members: Members, hosts: int) -> None:
        self.base = int(np.partition(members.end_ns, len(members.end_ns) // 2)[len(members.end_ns) // 2])
        self.members = members = members.at(np.abs(members.end_ns - self.base) < MAX_SPREAD_NS)
        self.number, self.hosts = int(members.window[0]), hosts
        self.start = (members.start_ns - self.base).astype(np.float64)
        self.end = (members.end_ns - self.base).astype(np.float64)
        first = np.diff(members.call, prepend=members.call[0] - 1) != 0
        self.call, at = np.cumsum(first) - 1, np.flatnonzero(first)
        self.calls = len(at)
        self.shortest = np.minimum.reduceat(self.end - self.start, at)
        lowest, highest = (part.reduceat(members.kind, at) for part in (np.minimum, np.maximum))
        blocking = np.array([name in BLOCKING for name in members.kinds])
        self.blocking = (lowest == highest) & blocking[np.clip(lowest, 0, len(blocking) - 1)]
        hosts_of_call = np.bincount(self.call[first | (np.diff(members.host, prepend=-1) != 0)], minlength=self.calls)
        self.across = hosts_of_call > 1
        size = np.maximum.reduceat(members.bytes, at)
        self.small = self.blocking & self.across & (size <= SMALL_BYTES) & ((size >= 0) | (self.shortest <= SMALL_NS))
        # by each host's own middle: clocks may be hours apart
        self.middle = np.nan_to_num(medians(members.host, self.end, hosts))
        self.half = max(float(np.abs(self.end - self.middle[members.host]).max()), 1.0)
        self.tau = (self.end - self.middle[members.host]) / self.half
        self.unit, self.unit_host = members.host.copy(), list(range(hosts))
        self.step: dict[int, int] = {}  # by unit that begins with a step of its clock: in which of the run
        self.work = np.zeros(len(members.call), bool)  # members that end with work of their own
        self.doubt, self.witnesses = np.zeros(hosts), np.zeros(hosts, np.int64)
        self.refused = np.zeros(hosts, bool)
        self.reasons: dict[int, list[str]] = {}
        self.part = np.arange(hosts)  # units that small collectives connect have the same
        self.main = np.zeros(hosts, bool)  # those of the part with the most
        self.candidates: frozenset[int] = frozenset()

    def fitted(self) -> Fit:
        for _ in range(3 * ROUNDS):
            found = fit(self._ends(self.small), len(self.unit_host), self.calls, 1e-6 * USUAL_PPM * self.half, None)
            if not (self._cut(found) or self._leave_work(found) or self._refuse(found)):
                break
        claimed = found.known & (found.count >= MIN_CALLS)
        self.part = _connected(found.ends, len(claimed), claimed)
        sizes = np.bincount(self.part[claimed], minlength=int(self.part.max()) + 1)
        self.main = claimed & (self.part == np.argmax(sizes))
        hosts = {self.unit_host[unit] for unit in np.flatnonzero(self.main)}
        self.candidates = frozenset(hosts or unique(self.members.host).tolist())
        return found

    def _ends(self, calls: Bools) -> Ends:
        """Middle ends of each host in these calls, where at least two hosts are left."""
        rows = np.flatnonzero(calls[self.call] & ~self.work & ~self.refused[self.members.host])
        groups, first = _runs(self.call[rows] * self.hosts + self.members.host[rows])
        low, high = middles(groups, self.end[rows], len(first))
        # where half of a host's ranks end later, that half works: its clock is one
        end = np.where(high - low > 2 * WORK_NS, low, (low + high) / 2)
        rows = rows[first]
        kept = np.bincount(self.call[rows], minlength=self.calls)[self.call[rows]] > 1
        every = -(-int(kept.sum()) // MAX_FITTED)
        if every > 1:  # whole calls
            kept &= np.isin(self.call[rows], unique(self.call[rows[kept]])[::every])
        rows, end = rows[kept], end[kept]
        tau = (end - self.middle[self.members.host[rows]]) / self.half
        weight = np.where(self.members.on_device[rows], 1.0, HOST_WEIGHT)
        return Ends(self.call[rows], self.unit[rows], end, tau, self.members.step[rows], weight)

    def _cut(self, found: Fit) -> bool:
        """Give a clock that stepped, or changed its rate, another unit from there on; whether there was one."""
        ends = found.ends
        breaks = []
        for rows in _parts(ends.unit, ends.tau):
            unit = int(ends.unit[rows[0]])
            at = broken(ends.tau[rows], found.residual[rows])
            if at is not None and self.unit_host.count(self.unit_host[unit]) <= ROUNDS:
                # a call's members leave at once; between two calls is room
                moment = float(ends.tau[rows[at[0]]] + ends.tau[rows[at[0] - 1]]) / 2
                breaks.append((at[1], unit, moment, int(ends.step[rows[at[0]]])))
        # the others of its calls may only seem to step: the next fit tells. Of two hosts alone nothing tells which it
        # was; then it is the later one
        cut: list[tuple[float, int, float, int]] = []
        for one in sorted(breaks, reverse=True):
            beside = next((other for other in cut if abs(one[2] - other[2]) <= TOGETHER), None)
            if beside is not None and one[0] > 0.8 * beside[0] and one[1] > beside[1]:
                cut.remove(beside)
                beside = None
            if beside is None:
                cut.append(one)
        for _, unit, moment, step in cut:
            self.unit[(self.unit == unit) & (self.tau >= moment)] = len(self.unit_host)
            self.step[len(self.unit_host)] = step
            self.unit_host.append(self.unit_host[unit])
        return bool(cut)

    def _corrected(self, found: Fit, rows: Int64) -> tuple[Floats, Floats]:
        """Starts and ends of members on the clock of the hosts' middle."""
        unit = self.unit[rows]
        ahead = found.offset[unit] + found.rate[unit] * self.tau[rows]
        return self.start[rows] - ahead, self.end[rows] - ahead

    def _refuse(self, found: Fit) -> bool:
        """Refuse hosts that often leave before others came, or come when all have left; whether there was one."""
        rows = np.flatnonzero((self.blocking & self.across)[self.call] & found.known[self.unit])
        _, first = _runs(self.call[rows] * self.hosts + self.members.host[rows])
        if not len(first):
            return False
        start, end = self._corrected(found, rows)
        start, end = np.maximum.reduceat(start, first), np.minimum.reduceat(end, first)
        unit, host = self.unit[rows[first]], self.members.host[rows[first]]
        # clocks that no small collective connects can be hours apart
        apart = _connected(found.ends, len(self.unit_host), found.known)[unit]
        _, call = np.unique(self.call[rows[first]] * len(self.unit_host) + apart, return_inverse=True)
        left = medians(call, end, int(call.max()) + 1)[call]
        spare = np.minimum(RESIDUALS * found.sigma[unit] + WORK_NS, MISMATCH_NS)
        latest = np.minimum(greatest_of_others(call, start), left)
        against = (start > left + spare) | (latest > end + spare)
        count = np.bincount(host, minlength=self.hosts)
        share = np.bincount(host, against, minlength=self.hosts) / np.maximum(count, 1)
        share[(count < MIN_CALLS) | self.refused] = 0
        refused = share >= max(0.9 * float(share.max()), MISMATCHED)
        for number in np.flatnonzero(refused).tolist():
            self._say(number, f"{MISMATCH} ({share[number]:.0%} of them)")
        self.refused |= refused
        return bool(refused.any())

    def _leave_work(self, found: Fit) -> bool:
        """Leave out ranks and kinds that end apart from the rest of their host: that is work, not its clock."""
        rows = np.flatnonzero(self.small[self.call] & ~self.work & found.known[self.unit])
        rows = rows[np.isfinite(found.left[self.call[rows]]) & ~self.refused[self.members.host[rows]]]
        _, end = self._corrected(found, rows)
        apart = end - found.left[self.call[rows]]
        pair = self.members.rank[rows] * len(self.members.kinds) + self.members.kind[rows]
        _, first, cell, count = np.unique(pair, return_index=True, return_inverse=True, return_counts=True)
        centre = medians(cell, apart, len(first))
        spread = DEVIATION * medians(cell, np.abs(apart - centre[cell]), len(first))
        spare = np.maximum(WORK_NS, WORK_SIGMAS * spread / np.sqrt(count))
        left = np.zeros(len(first), bool)
        large = self._large(found)
        for own in _parts(self.members.host[rows[first]], centre):
            host = int(self.members.host[rows[first[own[0]]]])
            own = own[count[own] >= MIN_CALLS]
            self.witnesses[host] = max(self.witnesses[host], len(own))
            if not len(own):
                continue
            agree = np.abs(centre[own] - np.median(centre[own])) <= spare[own]
            if 2 * int(agree.sum()) <= len(own):
                agree, self.doubt[host] = self._sided(centre[own], spare[own], large[host])
            left[own[~agree]] = True
            if not agree.all():
                usual, apart_ns = float(np.median(centre[own[agree]])), centre[own[~agree]]
                worst = int(np.argmax(np.abs(apart_ns - usual)))
                row, late_ms = rows[first[own[~agree][worst]]], float(apart_ns[worst] - usual) / 1e6
                kind = self.members.kinds[int(self.members.kind[row])]
                which = f"rank {int(self.members.rank[row])} ends {kind} {late_ms:+.3g} ms beside the rest of its host"
                self._say(host, f"{which}: work, not its clock")
        self.work[rows[left[cell]]] = True
        return bool(left.any())

    @staticmethod
    def _sided(centres: Floats, spare: Floats, large: float) -> tuple[Bools, float]:
        """Which of two camps of a host's ranks and kinds, in order, shows its clock, and what stays open (ns).

        That with which large collectives agree; else the earlier one, for work makes an end later, never earlier, and
        the bound has to reach the other.
        """
        low, high = float(centres[0]), float(centres[-1])
        for level in (low, high):
            if abs(large - level) <= AGREEING * (high - low):
                return np.abs(centres - level) <= spare, abs(large - level)
        return centres - low <= spare, high - low

    def _large(self, found: Fit) -> Floats:
        """By how much later than the other hosts each ends its large collectives, by the fit; NaN without any, ns."""
        rows = np.flatnonzero((self.blocking & self.across & ~self.small)[self.call] & found.known[self.unit])
        _, end = self._corrected(found, rows)
        groups, first = _runs(self.call[rows] * self.hosts + self.members.host[rows])
        end = medians(groups, end, len(first))
        call, host = self.call[rows[first]], self.members.host[rows[first]]
        count, total = np.bincount(call, minlength=self.calls)[call], np.bincount(call, end, minlength=self.calls)[call]
        several = count > 1
        others = (total[several] - end[several]) / (count[several] - 1)
        return medians(host[several], end[several] - others, self.hosts)

    def _say(self, host: int, reason: str) -> None:
        self.reasons.setdefault(host, []).append(reason)

    def pieces(self, found: Fit, reference: int) -> list[Piece]:
        """What is known of each unit against the reference host's."""
        of_host, units = np.array(self.unit_host), len(self.unit_host)
        if not self.main.any():
            self.main = of_host == reference
        offset, rate, half, spread, count = self._hull(found)
        within = self._within_hosts()
        own = self._own_bounds(found)
        base = np.flatnonzero(self.main & (of_host == reference))
        far = self._way(found, base, own)
        # of the reference, where its clock was cut: the unit that holds for a moment
        mean = np.bincount(self.unit, self.tau, minlength=units) / np.maximum(
            np.bincount(self.unit, minlength=units), 1
        )
        nearest = base[np.argmin(np.abs(mean[:, None] - mean[base]), axis=1)]
        result = []
        for rows in _parts(self.unit, self.end):
            unit, members = int(self.unit[rows[0]]), self.members
            host, to = int(of_host[unit]), int(nearest[unit])
            tau = float(mean[unit])
            reasons = list(self.reasons.get(host, ()))
            piece = Piece(
                host, self.number, int(members.end_ns[rows[0]]), int(members.end_ns[rows[-1]]),
                self.base + int(self.middle[host] + tau * self.half), int(found.count[unit]), step=self.step.get(unit),
            )  # fmt: skip
            if host == reference:
                deviation = None if np.isnan(within[host]) else float(within[host])
                piece = replace(piece, offset_ns=0.0, rate_bound_ppm=0.0, claimed=True, residual_ns=deviation)
                piece = replace(piece, bound_ns=RESIDUALS * deviation if deviation is not None else 0.0)
                if not piece.calls:
                    piece = replace(piece, calls=len(unique(self.call[rows[self.blocking[self.call[rows]]]])))
            elif self.refused[host]:
                pass
            elif self.main[unit]:
                bound = max(float(far[unit]), float(own[unit])) + float(self.doubt[host] + self.doubt[reference])
                if self.witnesses[host] < 2:
                    reasons.append("one rank and one kind of collective tell it")
                to_ppm, errors = 1e6 / self.half, found.rate_error[[unit, to]]
                piece = replace(
                    piece,
                    offset_ns=float(found.offset[unit] - found.offset[to] + (found.rate[unit] - found.rate[to]) * tau),
                    bound_ns=bound,
                    rate_ppm=float(found.rate[unit] - found.rate[to]) * to_ppm,
                    rate_bound_ppm=RESIDUALS * float(np.hypot(*errors)) * to_ppm,
                    residual_ns=float(found.sigma[unit]),
                    claimed=True,
                )
            elif np.isfinite(half[unit]):
                piece = replace(
                    piece,
                    offset_ns=float(offset[unit] - found.offset[to] + (rate[unit] - found.rate[to]) * tau),
                    bound_ns=float(half[unit] + spread[unit]),
                    rate_ppm=float(rate[unit] - found.rate[to]) * 1e6 / self.half,
                    rate_bound_ppm=0.0,
                    calls=int(count[unit]),
                )
                reasons.append("no small collectives with the reference: order alone bounds it")
            else:
                reasons.append(MISMATCH if np.isnan(half[unit]) else UNCONNECTED)
            result.append(replace(piece, reason="; ".join(reasons)))
        return result

    def _within_hosts(self) -> Floats:
        """Robust deviation of the ends of ranks of one host, by host; NaN where no two are in a call."""
        rows = np.flatnonzero(self.blocking[self.call])
        every = -(-len(rows) // MAX_FITTED)
        rows = rows[self.call[rows] % every == 0] if every > 1 else rows
        groups, first = _runs(self.call[rows] * self.hosts + self.members.host[rows])
        count = np.bincount(groups, minlength=len(first))
        apart = self.end[rows] - medians(groups, self.end[rows], len(first))[groups]
        several = count[groups] > 1
        return DEVIATION * medians(self.members.host[rows[several]], np.abs(apart[several]), self.hosts)

    def _own_bounds(self, found: Fit) -> Floats:
        """What each unit's own ends leave open of its offset, ns."""
        units, ends = len(self.unit_host), found.ends
        sigma = np.nan_to_num(found.sigma)
        usual = float(np.median(sigma[self.main & found.known])) if (self.main & found.known).any() else 0.0
        sigma = np.where(found.count < SURE_CALLS, np.maximum(sigma, usual), sigma)
        on_host = np.bincount(ends.unit, ends.weight < 1, minlength=units) > 0
        # some may leave later than others each time, by as much as the call itself takes
        call = np.minimum(low_quantiles(ends.unit, self.shortest[ends.call], units, 0.1), CALL_FLOOR_NS)
        floor = np.maximum(np.where(on_host, HOST_FLOOR_NS, DEVICE_FLOOR_NS), call)
        own: Floats = np.maximum(RESIDUALS * sigma, floor)
        for unit in np.flatnonzero(self.main & (self.witnesses[self.unit_host] < 2)).tolist():
            own[unit] = max(own[unit], self._room(found, unit))
        return own

    def _room(self, found: Fit, unit: int) -> float:
        """How far a unit could be moved before order is broken, ns: the bound of what nobody else bears witness to."""
        calls = unique(self.call[(self.unit == unit) & (self.blocking & self.across)[self.call]])
        rows = np.flatnonzero(np.isin(self.call, calls) & self.main[self.unit])
        start, end = self._corrected(found, rows)
        own = self.unit[rows] == unit
        at = np.searchsorted(calls, self.call[rows])
        none = np.full(len(calls), np.inf)
        came, left, others_came, others_left = -none, none.copy(), -none, none.copy()
        np.maximum.at(came, at[own], start[own])
        np.minimum.at(left, at[own], end[own])
        np.maximum.at(others_came, at[~own], start[~own])
        np.minimum.at(others_left, at[~own], end[~own])
        zero = np.zeros(len(calls), np.int64)
        sides = [low_quantiles(zero, side, 1, TRIMMED)[0] for side in (left - others_came, others_left - came)]
        return float(max(sides)) if np.isfinite(sides).all() else np.inf

    def _way(self, found: Fit, base: Int64, own: Floats) -> Floats:
        """Bounds add up along the way from the reference to each unit, from group to group; the shortest, ns."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import dijkstra

        units, ends = len(own), found.ends
        first = np.searchsorted(self.call, np.arange(self.calls))
        _, group = np.unique(self.members.group[first], return_inverse=True)
        pairs = np.unique(np.stack([ends.unit, group[ends.call]]), axis=1)
        size = units + int(group.max()) + 1
        graph = coo_matrix((own[pairs[0]] / 2, (pairs[0], units + pairs[1])), shape=(size, size)).tocsr()
        far: Floats = dijkstra(graph, directed=False, indices=base).min(axis=0)[:units]
        return far

    def _hull(self, found: Fit) -> tuple[Floats, Floats, Floats, Floats, Int64]:
        """Offsets and rates of units that nothing small connects with the main ones, by all blocking collectives.

        Then what order allows of their offsets (half of it; inf where it says nothing, NaN where it contradicts itself)
        and what the clocks that move together are not known to, ns; and the number of calls.
        """
        units = len(self.unit_host)
        used = (np.bincount(self.unit, minlength=units) > 0) & ~self.refused[self.unit_host]
        if not (used & ~self.main).any():
            return found.offset, found.rate, np.full(units, np.inf), np.zeros(units), found.count
        # what small collectives connect moves as one
        part = np.where(self.main, 0, self.part + 1)
        parts = int(part.max()) + 1
        fixed = np.arange(parts) == 0
        ends = self._ends(self.blocking & self.across)
        offset, rate = (np.where(found.known, values, 0.0) for values in (found.offset, found.rate))
        moved = ends.end - offset[ends.unit] - rate[ends.unit] * ends.tau
        usual = 1e-6 * USUAL_PPM * self.half
        moved_ends = Ends(ends.call, part[ends.unit], moved, ends.tau, ends.step, ends.weight)
        rough = fit(moved_ends, parts, self.calls, usual, fixed)
        offset, rate = offset + rough.offset[part], rate + rough.rate[part]
        low, high = self._order(part, offset, rate, used)
        open_rate = np.where(rough.count > 0, RESIDUALS * np.nan_to_num(rough.rate_error), usual)
        open_rate = np.minimum(open_rate, usual)
        empty = low - high > 2 * (MISMATCH_NS + open_rate)
        # order is compared at all times, and by all clocks that move together
        known = self.main & found.known
        within = np.nan_to_num(RESIDUALS * (found.sigma + found.rate_error))
        within += float(np.median(within[known])) if known.any() else 0.0
        half = np.where(empty, np.nan, np.abs(high - low) / 2 + open_rate)
        told = np.isfinite(half)
        middle = np.where(told, low, 0.0) / 2 + np.where(told, high, 0.0) / 2
        return offset + middle[part], rate, half[part], within, rough.count[part]

    def _order(self, part: Int64, offset: Floats, rate: Floats, used: Bools) -> tuple[Floats, Floats]:
        """How far parts can be ahead (at least, at most) of where they are put, part 0 staying: nobody leaves before
        the last has come, and a message is not there before it is sent.
        """
        members, parts = self.members, int(part.max()) + 1
        is_send, is_recv = (
            np.array([name == kind for name in members.kinds])[members.kind] for kind in ("send", "recv")
        )
        sent, received = (np.bincount(self.call, flag, minlength=self.calls) for flag in (is_send, is_recv))
        whole = ((sent == 1) & (received == 1) & (np.bincount(self.call, minlength=self.calls) == 2)) | self.blocking
        rows = np.flatnonzero((whole & self.across)[self.call] & used[self.unit])
        unit = self.unit[rows]
        ahead = offset[unit] + rate[unit] * self.tau[rows]
        came = np.where(is_recv[rows], -np.inf, self.start[rows] - ahead)
        left = np.where(is_send[rows], np.inf, self.end[rows] - ahead)
        order = np.lexsort((part[unit], self.call[rows]))
        call, of = self.call[rows][order], part[unit][order]
        _, first = _runs(call * parts + of)
        low, high = np.full(parts, -np.inf), np.full(parts, np.inf)
        low[0] = high[0] = 0.0
        if not len(first):
            return low, high
        came, left = np.maximum.reduceat(came[order], first), np.minimum.reduceat(left[order], first)
        call, of = call[first], of[first]
        places, starts = _runs(call)
        for _ in range(HULL_ROUNDS):
            before = low.copy(), high.copy()
            least = np.maximum.reduceat(came - high[of], starts)[places]
            high = np.minimum(high, low_quantiles(of, left - least, parts, TRIMMED))
            most = np.minimum.reduceat(left - low[of], starts)[places]
            low = np.maximum(low, -low_quantiles(of, most - came, parts, TRIMMED))
            low[0] = high[0] = 0.0
            if np.array_equal(before[0], low) and np.array_equal(before[1], high):
                break
        return low, high


def _runs(key: Int64) -> tuple[Int64, Int64]:
    """Number of the run of equal keys that each row is in, and where each run begins."""
    first = np.diff(key, prepend=key[:1] - 1) != 0
    return np.cumsum(first) - 1, np.flatnonzero(first)


def _parts(key: Int64, values: Floats) -> list[Int64]:
    """Rows of each key, in order of their values."""
    order = np.lexsort((values, key))
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else []


def _connected(ends: Ends, units: int, claimed: Bools) -> Int64:
    """A number for all units that calls connect, each of the others having its own."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    kept = claimed[ends.unit]
    unit, call = ends.unit[kept], ends.call[kept]
    size = units + (int(call.max()) + 1 if len(call) else 0)
    graph = coo_matrix((np.ones(len(unit)), (unit, units + call)), shape=(size, size))
    found: Int64 = connected_components(graph, directed=False)[1][:units].astype(np.int64)
    return found
