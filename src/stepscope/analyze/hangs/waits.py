"""Who waits in which call for whom, and at which call it begins.

A call is open where a rank made it and had not come out of it. Its group waits for those who did not make it, and they
may wait in another call: so open calls wait for each other, and where that ends is the cause. It ends in ranks that
wait nowhere, in calls that differ, in a circle, or in ranks of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from stepscope.analyze.hangs.calls import COALESCED, Calls, comparable, elements, peers
from stepscope.model.ranks import CROSSED, MISMATCH, MISSING, NO_DUMP, STUCK
from stepscope.read.hang_recording import Dump, HangRecording, Signature
from stepscope.tables.arrays import Bools, Int32, Int64, Numbers

UNKNOWN = -1  # how far a rank came in a group whose calls its ring no longer holds
SHORTEST_PATTERN = 4  # calls in the same order that tell what comes next
SURE_PATTERN = 16  # from here on another call than before is a departure
LONGEST_PATTERN = 256
DEPARTED_WITHIN = 64  # calls before the end: later ones than the departure are few, as all soon wait
MAX_WAITS = 20_000  # open calls that are followed; of more the first by time

_Key = tuple[int, "int | None", "tuple[int, int] | None"]  # group, sequence number, ends


class Differing(Struct, frozen=True):
    """One call of a group that ranks made differently: rows of the table of calls, most alike first where most are."""

    what: str  # operation | sizes | dtypes
    rows: Int64  # of those who made another one, all where no side has most
    expected: int | None  # a row of the others


class Wait(Struct):
    """An open call, of one group either by its sequence number or, a send or receive, by its ends.

    `row` is the row of the first rank that made it; `follows` are positions of the calls that it waits for. `unnamed`
    ranks more belong to the group, and no dump tells which.
    """

    group: int
    sequence: int | None
    ends: tuple[int, int] | None  # of a send or receive: from, to
    row: int
    since_ns: int
    waiting: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of those who wait
    absent: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # of the absent, those that wait in no call
    silent: list[int] = field(default_factory=list)  # no dump, or one that does not reach back
    unnamed: int = 0
    follows: set[int] = field(default_factory=set)
    differing: Differing | None = None


class Cause(Struct, frozen=True):
    """`waits` are positions; of a circle all of it. `ranks` are whom the others wait for."""

    kind: str
    waits: tuple[int, ...]
    ranks: tuple[int, ...]


class Waits(Struct, frozen=True, dict=True):
    """All open calls of a recording."""

    recording: HangRecording
    calls: Calls

    @cached_property
    def tokens(self) -> Int32:
        """By row, the same for calls that ranks may make together."""
        calls, signatures = self.calls, self.recording.signatures
        known: Numbers[object] = Numbers()
        pairs = calls.kind.astype(np.int64) * (len(signatures) + 1) + calls.signature + 1
        distinct, inverse = np.unique(pairs, return_inverse=True)
        numbers = []
        for pair in distinct.tolist():
            kind, given = divmod(pair, len(signatures) + 1)
            name, signature = calls.kinds[kind], signatures[given - 1] if given else Signature()
            numbers.append(known[name, () if COALESCED.fullmatch(name) else comparable(name, signature)])
        return np.array(numbers, np.int32)[inverse]

    @cached_property
    def _collective(self) -> Bools:
        return ~self.calls.p2p & ~self.calls.part & (self.calls.sequence >= 0)

    @cached_property
    def _last(self) -> tuple[dict[tuple[int, int], int], Int64]:
        """The last collective call of each (rank, group), and of each group the last that all made."""
        calls, chosen = self.calls, np.flatnonzero(self._collective)
        pair = calls.rank[chosen] * max(1, len(calls.groups)) + calls.group[chosen]
        known, inverse = np.unique(pair, return_inverse=True)
        last = np.zeros(len(known), np.int64)
        np.maximum.at(last, inverse, calls.sequence[chosen])
        rank, group = np.divmod(known, max(1, len(calls.groups)))
        found = dict(zip(zip(rank.tolist(), group.tolist(), strict=True), last.tolist(), strict=True))
        least = np.full(len(calls.groups), np.iinfo(np.int64).max)
        np.minimum.at(least, group, last)
        for number, one in enumerate(calls.groups):
            silent = (rank for rank in one.members.tolist() if (rank, number) not in found)
            if any(rank in self.dumps and self.dumps[rank].whole for rank in silent):
                least[number] = 0
        return found, least

    @cached_property
    def dumps(self) -> dict[int, Dump]:
        """By rank."""
        return {dump.rank: dump for dump in self.recording.dumps}

    def came(self, rank: int, group: int) -> int:
        """The last collective call of a rank in a group, 0 where it made none, UNKNOWN where its ring does not tell."""
        return self._last[0].get((rank, group), 0 if self.dumps[rank].whole else UNKNOWN)

    @cached_property
    def open(self) -> Bools:
        """Rows that their rank had not come out of.

        A call that is retired may have ended by a timeout: it is over only where no rank of the group is missing in it.
        """
        calls = self.calls
        ended = calls.retired & (~self._collective | (calls.sequence <= self._last[1][calls.group]))
        return ~(calls.completed | ended | calls.part) & (self._collective | self._peered | calls.p2p)

    @cached_property
    def _ends(self) -> tuple[Int64, Int64]:
        """(from, to) of each kind, as ranks of the group; -1 of what is no send or receive."""
        told = [peers(kind) or (-1, -1) for kind in self.calls.kinds]
        return np.array([one[0] for one in told], np.int64), np.array([one[1] for one in told], np.int64)

    @cached_property
    def _peered(self) -> Bools:
        return self._ends[0][self.calls.kind] >= 0 if len(self.calls.kind) else np.zeros(0, bool)

    # ---------------------------------------------------------------------------------------------- the open calls

    @cached_property
    def waits(self) -> list[Wait]:
        """Every call that is the first open one of a rank in its group, and calls that differ."""
        calls = self.calls
        found: dict[_Key, int] = {}
        waits: list[Wait] = []
        heads: dict[int, list[tuple[int, int, int]]] = {}  # of a rank: (order, row, wait)
        for row, key in self._heads():
            if key not in found:
                if len(waits) >= MAX_WAITS:
                    continue
                found[key] = len(waits)
                waits.append(Wait(*key, row, 0))
            rank, at = int(calls.rank[row]), found[key]
            waits[at].waiting.append(rank)
            waits[at].rows.append(row)
            created = int(calls.created_ns[row])
            if created and (not waits[at].since_ns or created < waits[at].since_ns):
                waits[at].since_ns, waits[at].row = created, row
            heads.setdefault(rank, []).append((int(calls.order[row]), row, at))
        for mine in heads.values():
            mine.sort()
            for (_, _, before), (_, row, at) in pairwise(mine):
                if before != at and not calls.started[row]:
                    waits[at].follows.add(before)
        for wait in waits:
            self._fill(wait, heads)
        self._differ(waits)
        return waits

    def _heads(self) -> Iterator[tuple[int, _Key]]:
        """(row, key) of each rank's first open collective call in each group, and of its sends and receives by pair."""
        calls = self.calls
        rows = np.flatnonzero(self.open & self._collective)
        order = rows[np.lexsort((calls.sequence[rows], calls.group[rows], calls.rank[rows]))]
        pair = np.stack([calls.rank[order], calls.group[order]])
        first = np.append(True, (pair[:, 1:] != pair[:, :-1]).any(axis=0)) if len(order) else np.zeros(0, bool)
        for row in order[first].tolist():
            yield row, (int(calls.group[row]), int(calls.sequence[row]), None)
        seen: set[tuple[int, _Key]] = set()
        # those in an open coalesced call included
        for row in np.flatnonzero(self._peered & ~calls.completed & ~calls.retired).tolist():
            key = (int(calls.group[row]), None, self._pair(row))
            mine = (int(calls.rank[row]), key)
            if mine not in seen:
                seen.add(mine)
                yield row, key

    def _pair(self, row: int) -> tuple[int, int]:
        """(from, to) of a send or receive."""
        members, kind = self.calls.groups[int(self.calls.group[row])].members, int(self.calls.kind[row])
        ends = (int(end[kind]) for end in self._ends)
        source, target = (int(members[rank]) if rank < len(members) else rank for rank in ends)
        return source, target

    def _fill(self, wait: Wait, heads: dict[int, list[tuple[int, int, int]]]) -> None:
        """Who of its group is not there, and what they wait in."""
        members = sorted(set(wait.ends or self.calls.groups[wait.group].members.tolist()))
        if wait.ends is None:
            wait.unnamed = max(0, (self.calls.groups[wait.group].size or 0) - len(members))
        wait.silent = [rank for rank in members if rank not in self.dumps]
        waiting = {*wait.waiting, *wait.silent}
        for rank in members:
            if rank in waiting:
                continue
            came = 0 if wait.ends is not None else self.came(rank, wait.group)
            if came == UNKNOWN or (wait.ends is not None and self.dumps[rank].gaps):
                wait.silent.append(rank)
            elif wait.ends is not None or came < (wait.sequence or 0):
                wait.absent.append(rank)
                pending = heads.get(rank, ())
                if not pending:
                    wait.free.append(rank)
                # what a device has taken up after the first call waits for that one, unless it has begun
                wait.follows.update(at for n, (_, row, at) in enumerate(pending) if not n or self.calls.started[row])

    # ------------------------------------------------------------------------------------------ calls that differ

    def _differ(self, waits: list[Wait]) -> None:
        """Mark each group's first call that ranks made differently, where it is the last, or a later one is open.

        A call that is retired may have ended by a timeout, or by the error that the difference led to.
        """
        calls = self.calls
        of_group: dict[int, list[int]] = {}
        for at, wait in enumerate(waits):
            if wait.sequence is not None:
                of_group.setdefault(wait.group, []).append(at)
            else:
                self._differ_p2p(wait)
        for group, rows in self._differing().items():
            sequence = int(calls.sequence[rows[0]])
            later = [at for at in of_group.get(group, ()) if (waits[at].sequence or 0) >= sequence]
            if not later and int(self._last[1][group]) != sequence:
                continue  # all went on
            differing = self._sides(rows)
            same = next((at for at in later if waits[at].sequence == sequence), None)
            if same is None:
                same = len(waits)
                times = calls.created_ns[rows]
                since = int(times[times > 0].min()) if (times > 0).any() else 0
                ranks = calls.rank[rows].tolist()
                waits.append(Wait(group, sequence, None, int(rows[0]), since, ranks, rows.tolist()))
            waits[same].differing = differing
            waits[same].follows.clear()
            if differing.expected is not None:
                waits[same].row = differing.expected
            for at in later:
                if at != same:
                    waits[at].follows = {same}
                    waits[at].free = []

    def _differing(self) -> dict[int, Int64]:
        """Of each group the rows of the first call that differs and had not ended for all."""
        calls = self.calls
        rows = np.flatnonzero(self._collective)
        if not len(rows):
            return {}
        rows = rows[np.lexsort((calls.sequence[rows], calls.group[rows]))]
        group, sequence, token = calls.group[rows], calls.sequence[rows], self.tokens[rows]
        starts = np.flatnonzero(np.append(True, (group[1:] != group[:-1]) | (sequence[1:] != sequence[:-1])))
        low, high = np.minimum.reduceat(token, starts), np.maximum.reduceat(token, starts)
        ended = np.logical_and.reduceat(calls.completed[rows], starts)
        found: dict[int, Int64] = {}
        ends = np.append(starts[1:], len(rows))
        for at in np.flatnonzero((low != high) & ~ended).tolist():
            found.setdefault(int(group[starts[at]]), rows[starts[at] : ends[at]])
        return found

    def _sides(self, rows: Int64) -> Differing:
        """Who differs from most, and in what."""
        values, inverse, counts = np.unique(self.tokens[rows], return_inverse=True, return_counts=True)
        ordered = np.sort(counts)
        clear = len(ordered) > 1 and ordered[-1] > ordered[-2]
        most = inverse == int(np.argmax(counts))
        others = rows[~most] if clear else rows
        examples = [int(rows[inverse == value][0]) for value in range(len(values))]
        kinds = {self.kind(row) for row in examples}
        sizes = {comparable(self.kind(row), self.signature(row))[0] for row in examples}
        what = "operation" if len(kinds) > 1 else "sizes" if len(sizes) > 1 else "dtypes"
        return Differing(what, others, int(rows[most][0]) if clear else None)

    def _differ_p2p(self, wait: Wait) -> None:
        """A send and its receive of other sizes, each the first open one of its pair."""
        if len(wait.rows) != 2 or wait.ends is None:
            return
        given = [self.signature(row) for row in wait.rows]
        amounts = {elements(told.input_sizes) or elements(told.output_sizes) for told in given}
        types = {(*told.input_dtypes, *told.output_dtypes)[:1] for told in given}
        if len(amounts) > 1 or len(types) > 1:
            wait.differing = Differing("sizes" if len(amounts) > 1 else "dtypes", np.array(wait.rows), None)
            wait.follows.clear()

    def kind(self, row: int) -> str:
        """Name of the operation, with both ranks of a send or receive."""
        return self.calls.kinds[int(self.calls.kind[row])]

    def signature(self, row: int) -> Signature:
        """What it was given; empty where nothing tells."""
        number = int(self.calls.signature[row])
        return self.recording.signatures[number] if number >= 0 else Signature()

    # ------------------------------------------------------------------------------------------------- the causes

    @cached_property
    def causes(self) -> list[Cause]:
        """What all others wait for: what is certain first, and of that what began first."""
        waits = self.waits
        if not waits:
            return []
        component, leaves = _components([sorted(wait.follows) for wait in waits])
        members: dict[int, list[int]] = {}
        for at, number in enumerate(component):
            members.setdefault(number, []).append(at)
        found: list[Cause] = []
        for number, inside in members.items():
            definite = [at for at in inside if waits[at].differing is not None or waits[at].free]
            for at in definite:
                differing = waits[at].differing
                ranks = waits[at].free if differing is None else self.calls.rank[differing.rows].tolist()
                kind = MISSING if differing is None else MISMATCH
                found.append(Cause(kind, (at,), tuple(sorted(set(ranks)))))
            if definite or number in leaves:
                continue
            wait = waits[inside[0]]
            if len(inside) > 1:
                ranks = sorted({rank for at in inside for rank in waits[at].waiting})
                found.append(Cause(CROSSED, tuple(inside), tuple(ranks)))
            elif wait.silent or wait.unnamed:
                found.append(Cause(NO_DUMP, (inside[0],), tuple(wait.silent)))
            else:
                found.append(Cause(STUCK, (inside[0],), tuple(sorted(set(wait.waiting)))))
        never, less_certain = np.iinfo(np.int64).max, {NO_DUMP: 1, STUCK: 2}
        found.sort(
            key=lambda one: (
                less_certain.get(one.kind, 0), min(waits[at].since_ns for at in one.waits) or never, min(one.waits)
            )
        )  # fmt: skip
        return self._first_calls(found)

    def _first_calls(self, causes: list[Cause]) -> list[Cause]:
        """Causes of which no earlier one names all ranks: who came nowhere is missing in every call behind.

        Of several calls in which a rank is missing the first one is what it would have made next, by its own past.
        """
        found: list[Cause] = []
        named: set[int] = set()
        for cause in causes:
            if cause.kind == MISSING:
                if set(cause.ranks) <= named:
                    continue
                expected = self.expected(cause.ranks[0])
                own = [one for one in causes if one.kind == MISSING and cause.ranks[0] in one.ranks]
                cause = next((one for one in own if expected is not None and self._is_of(one, expected)), cause)
                named.update(cause.ranks)
            found.append(cause)
        return found

    def _is_of(self, cause: Cause, row: int) -> bool:
        """Whether a row is of the group, and of the same two ends, as the call of a cause."""
        wait = self.waits[cause.waits[0]]
        if wait.group != int(self.calls.group[row]):
            return False
        return wait.ends == (self._pair(row) if self._peered[row] else None)

    # ------------------------------------------------------------------------------------------ what a rank does next

    def past(self, rank: int) -> tuple[int, Int64]:
        """The first row of a rank, and for each of its rows what tells it from its others: group, kind, sizes, line."""
        mine = self.calls.of_rank(rank)
        columns = np.stack([getattr(self.calls, name)[mine] for name in ("group", "kind", "signature", "stack")])
        inverse = np.unique(columns, axis=1, return_inverse=True)[1] if columns.size else np.zeros(0)
        return mine.start, inverse.reshape(-1).astype(np.int64)

    def expected(self, rank: int) -> int | None:
        """A row of a rank's past like the call that it would make next; None where its past does not tell."""
        first, past = self.past(rank)
        at, length = followed(past, len(past))
        return first + at if length >= SHORTEST_PATTERN else None

    def usual(self, rank: int, row: int) -> tuple[int, bool] | None:
        """A row like what a rank made before at the point of `row`, where that is another call than `row`.

        With it whether what it made instead is what came next before: then it left that call out.
        """
        first, past = self.past(rank)
        end = row - first
        at, length = followed(past, end)
        if length < SHORTEST_PATTERN or past[at] == past[end]:
            return None
        return first + at, bool(past[at + 1] == past[end])

    def departed(self, rank: int) -> tuple[int, int] | None:
        """(row it made, row like what it made before at that point) where a rank left its own pattern at last."""
        first, past = self.past(rank)
        for end in range(max(SHORTEST_PATTERN, len(past) - DEPARTED_WITHIN), len(past)):
            at, length = followed(past, end)
            if length >= SURE_PATTERN and past[at] != past[end]:
                return first + end, first + at
        return None


def _components(follows: Sequence[Sequence[int]]) -> tuple[list[int], set[int]]:
    """The circle that each wait is in, by a number, and the circles from which a way leads into another one."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    starts = np.repeat(np.arange(len(follows)), [len(some) for some in follows])
    ends = np.array([at for some in follows for at in some], np.int64)
    graph = csr_matrix((np.ones(len(ends), np.int8), (starts, ends)), shape=(len(follows), len(follows)))
    _, component = connected_components(graph, directed=True, connection="strong")
    crossing = component[starts] != component[ends]
    return component.tolist(), set(component[starts[crossing]].tolist())


def followed(past: Int64, end: int) -> tuple[int, int]:
    """Where in `past` before `end` what led up to `end` happened before, longest and last, and for how many calls."""
    if end < 2:
        return 0, 0
    before = np.flatnonzero(past[: end - 1] == past[end - 1])
    length = 1 if len(before) else 0
    while length and length < LONGEST_PATTERN:
        longer = before[before >= length]
        longer = longer[past[longer - length] == past[end - 1 - length]]
        if not len(longer):
            break
        before, length = longer, length + 1
    return (int(before[-1]) + 1, length) if length else (0, 0)
