"""The first pass over a source: its clock, its steps, its tracks and their names.

What it keeps grows with the number of steps and tracks, not of events; only a cut to steps needs two integers of every
launch.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct, field

from stepscope.engine import collective_names as words
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.export.entry import DECODING_ERRORS, FLOWS, Entry, Timed, Track, safe, timed
from stepscope.read import read_paths
from stepscope.read.kineto import RawEvents, host_of_name
from stepscope.read.run_folder import machines_of
from stepscope.read.text import moment_ns, whole_number

MEMORY = "[memory]"
STEP = re.compile(r"ProfilerStep#(\d{1,18})")
DEVICE_ANNOTATION = "gpu_user_annotation"
_LAUNCHES = re.compile(r"Runtime|(?:\w+_)?(?:runtime|driver)")
_LABELS = {  # metadata events that are kept, and the one argument each is kept for
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
_MAX_LABEL_CHARS = 400
_MAX_CATEGORIES = 1000
_STRAY_NS = 60 * 10**9  # what stands further before the first slice is damage, not the trace's start
# As in the reader: times later than this are since 1970, whatever base the file names.
_SINCE_1970_NS = 10**18
_MIN_ANCHORS = 2
_NEGLIGIBLE_NS = 1_000_000  # a profiler with stacks makes 0.3 to 0.5 ms of leaving an optimizer's step
_MAX_OFFSET_NS = 2_000_000_000

Progress = Callable[[int, int], None]  # gets the bytes of a file consumed and its size


class _Arguments(Struct, gc=False):
    name: Any = None
    labels: Any = None
    sort_index: Any = None
    correlation: Any = None


_DECODE_ARGUMENTS = msgspec.json.Decoder(_Arguments).decode


def argument(entry: Entry, key: str) -> Any:
    """One of an entry's arguments that are looked at here, None where it has none."""
    try:
        return getattr(_DECODE_ARGUMENTS(entry.args), key)
    except DECODING_ERRORS:
        return None


def correlation_of(entry: Entry) -> int | None:
    """The correlation id in the arguments, if it fits 64 bits and is one (0 and below stand for none)."""
    value = argument(entry, "correlation")
    return value if type(value) is int and 0 < value < 2**63 else None


def step_of(entry: Entry) -> int | None:
    """The N of a `ProfilerStep#N` annotation."""
    match = STEP.fullmatch(entry.name) if entry.name.startswith("ProfilerStep#") else None
    return int(match[1]) if match else None


MAX_CALLS = 50_000  # collectives of a source; more tell a clock no better
MAX_NAMES = 20_000  # of slices; real traces have some thousand
MAX_GROUPS = 4_000
_KERNEL = frozenset(("kernel", "Kernel"))
_ON_HOST = frozenset(("user_annotation", "cpu_op"))
NO_GROUP = ""


class _CollectiveArguments(Struct, gc=False, rename=None):
    collective: Any = field(default=None, name="Collective name")
    sent: Any = field(default=None, name="In msg nelems")
    received: Any = field(default=None, name="Out msg nelems")
    dtype: Any = None
    size: Any = field(default=None, name="Group size")
    group: Any = field(default=None, name="Process Group Name")
    description: Any = field(default=None, name="Process Group Description")
    ranks: Any = field(default=None, name="Process Group Ranks")
    first: Any = field(default=None, name="Global rank start")
    stride: Any = field(default=None, name="Global rank stride")
    sequence: Any = field(default=None, name="Seq")
    correlation: Any = None


_DECODE_COLLECTIVE = msgspec.json.Decoder(_CollectiveArguments).decode
Row = tuple[int, int, str, str, int, int, int, bool]  # start, end, kind, group, sequence, bytes, correlation, on device


class Collectives(Struct):
    """Collectives of one source, by which clocks of hosts are told; of numbers in `rows` -1 is unknown."""

    rows: list[Row] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    kinds: dict[tuple[str, bool], str | None] = field(default_factory=dict)  # of slices by name; None of no collective

    def look(self, entry: Entry, start: int, end: int) -> None:
        """Keep a slice that is a collective."""
        category = entry.cat
        if not isinstance(category, str) or len(self.rows) >= MAX_CALLS:
            return
        on_device = category in _KERNEL
        if not on_device and category not in _ON_HOST:
            return
        name = entry.name, on_device
        if name not in self.kinds and len(self.kinds) < MAX_NAMES:
            is_one = words.is_collective_kernel(entry.name) if on_device else words.runs_on_host(entry.name)
            self.kinds[name] = words.kind_of(entry.name) or words.UNKNOWN if is_one else None
        kind = self.kinds.get(name)
        if kind is None:
            return
        try:
            told = _DECODE_COLLECTIVE(entry.args)
        except DECODING_ERRORS:
            told = _CollectiveArguments()
        if isinstance(told.collective, str):
            kind = words.kind_of(told.collective) or kind
        if kind == words.UNKNOWN or kind in words.POINT_TO_POINT:
            return
        group = NO_GROUP
        if len(self.groups) < MAX_GROUPS and any(one is not None for one in (told.group, told.description, told.ranks)):
            # ranks and description tell a group apart on all its members; where ranks are cut short, all that there is
            whole = isinstance(told.ranks, list) or (isinstance(told.ranks, str) and told.ranks.endswith("]"))
            rest = () if whole else (told.group, told.size, told.first, told.stride)
            group = repr((str(told.ranks), str(told.description), *map(str, rest)))[:4096]
        sequence = told.sequence if type(told.sequence) is int and 0 <= told.sequence < 2**62 else -1
        correlation = told.correlation if type(told.correlation) is int and 0 < told.correlation < 2**62 else -1
        self.groups.add(group)
        self.rows.append((start, end, kind, group, sequence, _bytes(told), correlation, on_device))


def _bytes(told: _CollectiveArguments) -> int:
    known = words.type_of(told.dtype) if isinstance(told.dtype, str) else None
    counts = [count for count in (told.sent, told.received) if type(count) is int and 0 <= count <= words.MAX_ELEMENTS]
    return max(counts) * known[1] if known is not None and counts else -1


Labels = dict[tuple[str, bytes, bytes], str | int]  # (kind, pid, tid) -> value


class Rank(Struct):
    """A rank of the export, of which there may be several sources: windows, or spans.

    `steps` are its journal's, number -> start and end on the journal's clock, or nothing without one. `optimizer_ends`
    are the ends of those of them that an optimizer's step ended while a trace was recorded.
    """

    number: int
    label: str  # "rank 0"
    host: str | None  # the machine; None where nothing tells it
    steps: dict[int, tuple[int, int]]
    optimizer_ends: tuple[int, ...]


class Source(Struct):
    """One trace file, and what one pass over it tells. Times are ns as the file counts them: add `base_ns` for the
    epoch's.
    """

    path: Path
    rank: Rank
    base_ns: int = 0
    ahead_ns: int = 0  # what its host's clock is ahead of the export's
    metadata: dict[str, Any] = field(default_factory=dict)  # allow-listed keys only
    first_ns: int = 0
    last_ns: int = 0
    entries: int = 0  # that can be exported, metadata events included
    slices: int = 0  # that stay
    lost: int = 0
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> start and end, of host annotations
    optimizer_ends: list[int] = field(default_factory=list)  # of the host's Optimizer.step annotations
    categories: set[str] = field(default_factory=set)
    tracks: set[Track] = field(default_factory=set)  # of what stays
    processes: set[bytes] = field(default_factory=set)  # of all tracks
    labels: Labels = field(default_factory=dict)
    launches: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))  # start, id
    kept: bytearray | None = None  # of a cut: 1 for each entry that stays
    collectives: Collectives | None = None  # where clocks are compared

    @property
    def zero_ns(self) -> int:
        """What to add to times of the file for times on the export's clock."""
        return self.base_ns - self.ahead_ns

    def read(self, progress: Progress) -> Iterator[Timed]:
        """The entries, in the same order as the survey saw them."""
        return timed(RawEvents(self.path, progress=progress), Counter())


def find(paths: list[Path], wanted: tuple[int, ...]) -> tuple[list[Source], list[str]]:
    """The traces below `paths`, of the ranks `wanted` or of all, in order of ranks, and sentences about their ranks.

    Raises UnreadableInputError or UsageError.
    """
    run = read_paths(paths)
    traced = [rank for rank in run.ranks if rank.traces]
    if not traced:
        raise UnreadableInputError(f"{run.folder}: no trace in it; nothing to export, record one with a window")
    there = sorted({rank.rank for rank in traced})
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise UsageError(f"--rank {missing[0]}: no trace of that rank; there are ranks {numbers(there)}")
    machines = machines_of(f"host-{host.name}" for host in run.hosts)
    chosen = []
    for rank in traced:
        if not wanted or rank.rank in wanted:
            steps = {row["step"]: (row["start_ns"], row["start_ns"] + row["wall_ns"]) for row in rank.steps}
            ended = [row["step"] for row in rank.steps if row["in_window"] and row["signal"] == "optimizer"]
            label = rank.name.replace("rank-", "rank ", 1)
            told = (rank.info or {}).get("host")
            host = machines.get(f"host-{told}", told if isinstance(told, str) else None)
            if host is None:
                host = next(filter(None, (host_of_name(ref.path.name) for ref in rank.traces)), None)
            ends = tuple(steps[number][1] for number in ended)
            chosen.append((rank, Rank(rank.rank, label, host, steps, ends)))
    problems = []
    if len(chosen) > 1:  # a trace's rank is not what its own metadata says
        said = {"duplicate_ranks": "names the rank of another trace", "guessed_ranks": "names no rank"}
        for kind, why in said.items():
            problems += [f"{file}: {why}; it got the next free one" for file in run.losses.files.get(kind, ())]
    return [Source(ref.path, rank) for raw, rank in chosen for ref in raw.traces], problems


def numbers(numbers: list[int]) -> str:
    """`0 to 7`, or the first few of numbers with gaps."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def clock_offset_ns(source: Source) -> int:
    """What to add to a trace's times to get its journal's.

    The two clocks part when time of day is corrected. Both saw the same optimizer steps end; the median distance of
    each to the nearest is the offset, unless it is too small to matter or too large to be a clock's.
    """
    ends = source.rank.optimizer_ends
    seen = sorted(end + source.base_ns for end in source.optimizer_ends)
    if len(seen) < _MIN_ANCHORS or len(ends) < _MIN_ANCHORS:
        return 0
    if len(seen) == len(ends):
        distances = [end - other for end, other in zip(sorted(ends), seen, strict=True)]
    else:
        after = [(end, min(bisect_left(seen, end), len(seen) - 1)) for end in ends]
        distances = [min(end - seen[max(right - 1, 0)], end - seen[right], key=abs) for end, right in after]
    offset = int(median(distances))
    return offset if _NEGLIGIBLE_NS < abs(offset) <= _MAX_OFFSET_NS else 0


def survey(source: Source, *, launches: bool, clocks: bool, progress: Progress) -> tuple[str, ...]:
    """Fill in `source`; what is wrong with the file, in words. Without tracks nothing in it has a time.

    `launches` and `clocks`: whether launches of device work are wanted, and collectives with them.

    Raises UnreadableInputError when the file has no event in it.
    """
    events = RawEvents(source.path, progress=progress)
    source.collectives = Collectives() if clocks else None
    counts: Counter[str] = Counter()
    first_slice: int | None = None
    first_other: int | None = None
    for entry, start, duration in timed(events, counts):
        source.entries += 1
        if entry.ph == "M":
            _label(source, entry)
            continue
        source.tracks.add(entry.track)
        end = start + duration
        if end > source.last_ns:
            source.last_ns = end
        if entry.ph == "X":
            source.slices += 1
            if first_slice is None or start < first_slice:
                first_slice = start
            _slice(source, entry, start, end, launches=launches or clocks)
            if source.collectives is not None:
                source.collectives.look(entry, start, end)
            continue
        if first_other is None or start < first_other:
            first_other = start
        # the allocator's instants can be asked for by a name of their own; arrows go with their slices
        if entry.name == MEMORY:
            source.categories.add("memory")
        elif entry.ph not in FLOWS:
            _category(source, entry.cat)
    source.processes = {pid for pid, _ in source.tracks}
    source.lost = events.lost + counts["lost"]
    source.metadata = events.metadata()
    base_ns = moment_ns(whole_number(source.metadata.pop("baseTimeNanoseconds", None))) or 0
    if first_slice is None or (first_other is not None and first_slice - _STRAY_NS < first_other < first_slice):
        first_slice = first_other
    source.first_ns = first_slice or 0
    source.base_ns = 0 if source.first_ns > _SINCE_1970_NS else base_ns
    return events.problems


def _category(source: Source, category: Any) -> None:
    if isinstance(category, str) and len(source.categories) < _MAX_CATEGORIES:
        source.categories.add(category)


def _slice(source: Source, entry: Entry, start: int, end: int, *, launches: bool) -> None:
    category = entry.cat
    _category(source, category)
    if launches and isinstance(category, str) and _LAUNCHES.fullmatch(category):  # starts device work
        correlation = correlation_of(entry)
        if correlation is not None:
            source.launches[0].append(start)
            source.launches[1].append(correlation)
    if category == DEVICE_ANNOTATION:
        return
    if entry.name.startswith("Optimizer.step#"):
        source.optimizer_ends.append(end)
    number = step_of(entry)
    if number is not None:
        known = source.steps.get(number, (start, end))
        source.steps[number] = min(known[0], start), max(known[1], end)


def _label(source: Source, entry: Entry) -> None:
    key = _LABELS.get(entry.name) if isinstance(entry.name, str) else None
    value = argument(entry, key) if key is not None else None
    pid, tid = entry.track
    place = (entry.name, pid, tid if key is not None and entry.name.startswith("thread") else b"")
    if key == "sort_index":
        if type(value) is int and abs(value) < 2**31:
            source.labels[place] = value
    elif isinstance(value, str) and value:
        source.labels[place] = safe(value, _MAX_LABEL_CHARS)
