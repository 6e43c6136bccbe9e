"""The numbers of an export: processes and threads as viewers take them, ids that never meet across ranks.

Viewers want numbers from 0 to 2^31 for processes and threads; traces also hold texts, negative and 64-bit ones. With
one rank everything that can keep its number keeps it. With several, every process gets a new one (the first rank's from
1000, the next rank's from the next thousand on), because ranks share GPU numbers and, on several hosts, process ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec
from msgspec import Struct, field

from stepscope.export.entry import DECODING_ERRORS, safe
from stepscope.export.survey import Survey, Track

LARGEST = 2**31 - 1
FIRST_INVENTED = 10_000_000  # above every number Linux gives to a process or thread
BLOCK = 1000
_EXACT_IN_VIEWERS = 2**53
# Arguments that name something inside one process; collectives' "Seq" is not among them, it joins ranks.
ID_ARGUMENTS = frozenset(
    (
        "correlation",
        "External id",
        "external id",
        "Sequence number",
        "Python id",
        "Python parent id",
        "Python module id",
    )
)


def integer(text: bytes) -> int | None:
    """JSON text as an integer, also one in quotes; None if it is none."""
    digits = text.strip(b'"')
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        return None
    return int(digits)


def word(text: bytes) -> str:
    """JSON text of a process or thread id, without quotes, as a person would read it."""
    try:
        value: str = msgspec.json.decode(b'"%b"' % text)
    except DECODING_ERRORS:
        return "unknown"
    return safe(value, 200) or "unknown"


def distinct(texts: Iterable[bytes]) -> dict[bytes, int]:
    """A number of its own for each text: its own where it is one that viewers take, else an invented one."""
    ordered = sorted(set(texts))
    numbers: dict[bytes, int] = {}
    taken: set[int] = set()
    invented = []
    for text in ordered:
        value = integer(text)
        if value is not None and 0 <= value <= LARGEST and value not in taken:
            numbers[text] = value
            taken.add(value)
        else:
            invented.append(text)
    following = FIRST_INVENTED
    for text in invented:
        while following in taken:
            following += 1
        numbers[text] = following
        taken.add(following)
    return numbers


class RankTracks(Struct):
    """All that the sources of one rank (several windows, or spans) say of its processes and threads."""

    label: str  # "rank 0"
    tracks: set[Track] = field(default_factory=set)  # in the export
    processes: set[bytes] = field(default_factory=set)  # in the sources: all have numbers, the same in every cut
    labels: dict[tuple[str, bytes, bytes], str | int] = field(default_factory=dict)

    def add(self, survey: Survey, tracks: set[Track]) -> None:
        """Take in one source, of which `tracks` are in the export."""
        self.tracks |= tracks
        self.processes.update(pid for pid, _ in survey.tracks)
        self.labels.update(survey.labels)


class Numbering:
    """Process and thread numbers of the whole export, and the metadata events that name them."""

    def __init__(self, ranks: dict[int, RankTracks]) -> None:
        self._ranks = ranks
        self._processes: dict[int, dict[bytes, int]] = {}
        self._threads = {position: _threads(rank.tracks) for position, rank in ranks.items()}
        start = BLOCK
        for position, rank in sorted(ranks.items()):
            pids = rank.processes
            if len(ranks) == 1:
                self._processes[position] = distinct(pids)
            else:
                ordered = sorted(pids, key=_order(rank))
                self._processes[position] = {pid: start + index for index, pid in enumerate(ordered)}
                start += -(-max(1, len(pids)) // BLOCK) * BLOCK

    def track(self, rank: int, track: Track) -> tuple[int, int]:
        """(process, thread) of a track that was given for the rank at position `rank`."""
        return self._processes[rank][track[0]], self._threads[rank][track]

    def metadata(self) -> list[bytes]:
        """Metadata events as JSON, in the order of processes and threads."""
        events: list[bytes] = []
        for position in sorted(self._ranks):
            events += self._rank_metadata(position)
        return events

    def _rank_metadata(self, position: int) -> list[bytes]:
        rank, several = self._ranks[position], len(self._ranks) > 1
        threads: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        for track, number in self._threads[position].items():
            threads[track[0]].append((number, track[1]))
        events = []
        for pid, number in sorted(self._processes[position].items(), key=lambda item: item[1]):
            if pid not in threads:
                continue
            name = rank.labels.get(("process_name", pid, b""))
            label = rank.labels.get(("process_labels", pid, b""))
            order = rank.labels.get(("process_sort_index", pid, b""))
            if several:
                name, order = _merged_name(rank.label, pid, name, label), number
            elif name is None and integer(pid) != number:
                name = word(pid)
            events += _label("process_name", number, 0, "name", name)
            events += _label("process_labels", number, 0, "labels", label)
            events += _label("process_sort_index", number, 0, "sort_index", order)
            for thread, tid in sorted(threads[pid]):
                title = rank.labels.get(("thread_name", pid, tid))
                if title is None and integer(tid) != thread:
                    title = word(tid)
                events += _label("thread_name", number, thread, "name", title)
                index = rank.labels.get(("thread_sort_index", pid, tid))
                events += _label("thread_sort_index", number, thread, "sort_index", index)
        return events


def _order(rank: RankTracks) -> Callable[[bytes], tuple[int, int, bytes]]:
    def key(pid: bytes) -> tuple[int, int, bytes]:
        index = rank.labels.get(("process_sort_index", pid, b""))
        value = integer(pid)
        return (index if isinstance(index, int) else LARGEST, LARGEST if value is None else value, pid)

    return key


def _threads(tracks: set[Track]) -> dict[Track, int]:
    by_process: dict[bytes, list[bytes]] = defaultdict(list)
    for pid, tid in tracks:
        by_process[pid].append(tid)
    return {(pid, tid): number for pid, tids in by_process.items() for tid, number in distinct(tids).items()}


def _merged_name(rank: str, pid: bytes, name: str | int | None, label: str | int | None) -> str:
    if integer(pid) is None:
        return f"{rank}: {word(pid)}"
    own = f"{name or 'process'} {word(pid)}"
    return f"{rank}: {label} ({own})" if label else f"{rank}: {own}"


def _label(kind: str, pid: int, tid: int, key: str, value: str | int | None) -> list[bytes]:
    if value is None:
        return []
    return [msgspec.json.encode({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}})]


class Ids:
    """Ids of arrows and arguments of one source among `count`: distinct between sources, the same ones inside each.

    An id n of source k becomes n * count + k; what would then be too large for a viewer's numbers, or is no number,
    becomes a hash below 2^52. With one source everything stays as it is.
    """

    def __init__(self, source: int, count: int) -> None:
        self._source, self._count = source, count

    @property
    def unchanged(self) -> bool:
        """Whether ids stay as they are."""
        return self._count == 1

    def number(self, text: bytes) -> bytes:
        """The id written `text` in the file; zero and negative ones, which stand for none, stay."""
        value = integer(text)
        if value is not None and value <= 0:
            return text
        if value is not None and value * self._count + self._source < _EXACT_IN_VIEWERS:
            return b"%d" % (value * self._count + self._source)
        digest = blake2b(b"%d:%b" % (self._source, text), digest_size=8).digest()
        return b"%d" % (int.from_bytes(digest, "big") >> 12)

    def arrow(self, text: bytes) -> bytes:
        """An arrow's id; here zero is an id like others."""
        value = integer(text)
        if self.unchanged and value is not None and 0 <= value < 2**64:
            return b"%d" % value
        if value is not None and 0 <= value * self._count + self._source < _EXACT_IN_VIEWERS:
            return b"%d" % (value * self._count + self._source)
        digest = blake2b(b"%d:%b" % (self._source, text), digest_size=8).digest()
        return b"%d" % (int.from_bytes(digest, "big") >> 12)
