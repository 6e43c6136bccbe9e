"""The calls of all ranks as one table: which call of one rank is which of another's, and what of them is still open.

Collective calls of a group are matched by the number that each rank counts for itself, sends and receives by their two
ends and by their order, as their numbers are each rank's own. A rank's last call in a group tells how far it came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepscope.read.hang_recording import COMPLETED, STARTED, GroupName, HangRecording, Signature
from stepscope.tables.arrays import Bools, Int32, Int64, Numbers, flags

DEFAULT_GROUPS = ("default_pg",)  # how torch describes the group of all ranks
MAX_WORLD = 2**20
_PEERS = re.compile(r"(send|recv) (\d{1,8})(->|<-)(\d{1,8})$")
_GATHERS = re.compile(r"_?all_?gather", re.IGNORECASE)
# Of which tensors all ranks must give as many elements; the other side is one rank's own, or may be uneven.
_COMPARED = (
    (re.compile(r"all_?to_?all|_v(?:_|$)|_oop$", re.IGNORECASE), False, False),
    (re.compile(r"_?all_?gather|_?scatter", re.IGNORECASE), False, True),
    (re.compile(r"_?reduce_?scatter|_?gather", re.IGNORECASE), True, False),
    (re.compile(r""), True, True),
)
COALESCED = re.compile(r"coalesced", re.IGNORECASE)


class Group(Struct, frozen=True):
    """A process group of the job. `members` are ranks in the order of the group, as far as they are known.

    `size` may be more than the members: then some are unknown, and where it is None nobody knows how many there are.
    """

    name: str
    description: str
    members: Int64
    size: int | None

    @property
    def label(self) -> str:
        known = self.description not in ("", "undefined")
        return f"{self.name} ({self.description})" if known else self.name


class Calls(Struct, frozen=True):
    """Columns over all calls of all dumps, in the order of ranks and, within a rank, as they were made.

    `group` is a position in `groups`, `order` counts a rank's calls. `open` are those that a
    rank had not come out of. `part` are pieces of a coalesced call, whose own row stands behind them.
    """

    ranks: Int64  # numbers, of which there is a dump
    groups: tuple[Group, ...]
    kinds: Sequence[str]
    rank: Int64
    group: Int32
    order: Int64
    sequence: Int64
    kind: Int32
    signature: Int32
    stack: Int32
    started: Bools
    completed: Bools
    retired: Bools
    p2p: Bools
    part: Bools
    created_ns: Int64

    def of_rank(self, rank: int) -> slice:
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())


def calls(recording: HangRecording, world_size: int | None) -> Calls:
    """The table; `world_size` is what others know of it, None where nobody does."""
    dumps = recording.dumps
    ranks = np.array([dump.rank for dump in dumps], np.int64)
    lengths = np.array([len(dump.calls.group) for dump in dumps], np.int64)
    rank = np.repeat(ranks, lengths)

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(dump.calls, name) for dump in dumps]) if dumps else np.zeros(0, np.int64)

    raw, kind, signature = column("group").astype(np.int32), column("kind"), column("signature")
    worlds = [number for number, name in enumerate(recording.groups) if _is_world(name)]
    told = [max(name.ranks) + 1 for name in recording.groups if name.ranks]
    told += [world_size or 0, _size_by_gathers(recording, np.isin(raw, worlds), kind, signature)]
    world = max([int(ranks.max(initial=-1)) + 1, *told])
    groups, number = _groups(recording, rank, raw, kind, signature, min(world, MAX_WORLD))
    group = number[raw] if len(raw) else raw
    sequence, p2p_sequence, p2p = column("sequence"), column("p2p_sequence"), column("p2p").astype(bool)
    coalesced = np.array([COALESCED.search(name) is not None for name in recording.kinds], bool)
    ends = coalesced[kind] if len(kind) else np.zeros(0, bool)
    state = column("state").copy()
    part = _parts(rank, group, sequence, p2p_sequence, ends, state)
    holds_p2p = np.zeros(len(part), bool)  # coalesced calls whose last piece, right before them, is a send or receive
    holds_p2p[1:] = ~part[1:] & part[:-1] & p2p[:-1]
    order = np.arange(len(rank)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return Calls(
        ranks=ranks,
        groups=groups,
        kinds=recording.kinds,
        rank=rank,
        group=group,
        order=order,
        sequence=sequence,
        kind=kind,
        signature=signature,
        stack=column("stack"),
        started=state >= STARTED,
        completed=state == COMPLETED,
        retired=column("retired").astype(bool),
        p2p=p2p | holds_p2p,
        part=part,
        created_ns=column("created_ns"),
    )


def _parts(rank: Int64, group: Int32, sequence: Int64, p2p_sequence: Int64, ends: Bools, state: np.ndarray) -> Bools:
    """Pieces of coalesced calls: rows of a group right before its row and of the same numbers. They get its state."""
    part = np.zeros(len(rank), bool)
    if not ends.any():
        return part
    by_group = np.lexsort((np.arange(len(rank)), group, rank))
    same = np.ones(len(rank), bool)
    for column in (rank, group, sequence, p2p_sequence):
        sorted_column = column[by_group]
        same[1:] &= sorted_column[1:] == sorted_column[:-1]
    same[:1] = False
    same[1:] &= ~ends[by_group][:-1]  # a coalesced call ends a run
    run = np.cumsum(~same) - 1
    last = np.flatnonzero(np.append(~same[1:], True))
    ended = ends[by_group[last]]
    inside = ended[run] & ~ends[by_group]
    part[by_group[inside]] = True
    state[by_group[inside]] = state[by_group[last[run[inside]]]]
    return part


def _is_world(group: GroupName) -> bool:
    return group.description in DEFAULT_GROUPS or (group.name == "0" and group.description in ("", "undefined"))


def _size_by_gathers(recording: HangRecording, chosen: Bools, kind: Int32, signature: Int32) -> int:
    """The most common ratio of output to input of the chosen gathers; 0 without one that tells."""
    pairs = np.unique(np.stack([kind[chosen], signature[chosen]]), axis=1).T if chosen.any() else []
    sizes: Numbers[int] = Numbers()
    for one, given in pairs:
        if given < 0 or not _GATHERS.match(recording.kinds[one]):
            continue
        told = recording.signatures[given]
        inputs, outputs = elements(told.input_sizes), elements(told.output_sizes)
        if inputs > 0 and outputs % inputs == 0 and outputs // inputs <= MAX_WORLD:
            sizes[outputs // inputs]
    return next(iter(sizes), 0)


def elements(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of tensors of these shapes together."""
    return sum(math.prod(shape) for shape in shapes)


def _groups(
    recording: HangRecording, rank: Int64, raw: Int32, kind: Int32, signature: Int32, world: int
) -> tuple[tuple[Group, ...], Int32]:
    """The groups, and for each of the recording's the number of its group.

    Names may repeat, so a group is a name and its ranks. Where no dump tells the ranks they are those that made calls
    in it, and of the group of all ranks all.
    """
    known: Numbers[tuple[str, frozenset[int] | None]] = Numbers()
    sets: dict[int, frozenset[int]] = {}  # dumps of one file share their lists of ranks
    number, found = np.zeros(len(recording.groups), np.int32), list[GroupName]()
    for at, name in enumerate(recording.groups):
        members = None if name.ranks is None else sets.setdefault(id(name.ranks), frozenset(name.ranks))
        number[at] = known[name.name, members]
        if number[at] == len(found):
            found.append(name)
    made: list[Group] = []
    of_row = number[raw] if len(raw) else raw
    by_group = np.argsort(of_row, kind="stable")
    bounds = np.searchsorted(of_row[by_group], np.arange(len(found) + 1))
    for at, name in enumerate(found):
        rows = by_group[bounds[at] : bounds[at + 1]]
        size: int | None
        if name.ranks is not None:
            members_of, size = np.array(name.ranks, np.int64), len(name.ranks)
        elif _is_world(name):
            members_of, size = np.arange(world, dtype=np.int64), world
        else:
            members_of = np.unique(rank[rows])
            told = _size_by_gathers(recording, flags(len(raw), rows), kind, signature)
            size = max(told, len(members_of)) if told else None
        made.append(Group(name.name, name.description, members_of, size))
    return tuple(made), number


def comparable(kind: str, signature: Signature) -> tuple[tuple[int, int], tuple[str, ...]]:
    """What all ranks must give alike to a call: elements of its inputs and outputs, and types."""
    name = kind.partition(" ")[0]
    first, *rest = _COMPARED
    rules = (first,) if first[0].search(name) else rest
    inputs, outputs = next((rule[1], rule[2]) for rule in rules if rule[0].match(name) or rule is first)
    sizes = (
        elements(signature.input_sizes) if inputs else 0,
        elements(signature.output_sizes) if outputs else 0,
    )
    return sizes, tuple(sorted({*signature.input_dtypes, *signature.output_dtypes}))


def peers(kind: str) -> tuple[int, int] | None:
    """(from, to), as ranks of the group, of a send or receive; None of all else."""
    match = _PEERS.search(kind)
    if match is None:
        return None
    first, second = int(match[2]), int(match[4])
    return (first, second) if match[3] == "->" else (second, first)
