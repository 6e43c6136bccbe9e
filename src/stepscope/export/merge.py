"""From sources to the file: one clock, one numbering, metadata events first, then every event that stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, field

from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError
from stepscope.export.entry import DECODING_ERRORS, FLOWS, Encoder, arguments, renumbered_arguments, safe, safe_value
from stepscope.export.selection import FOREVER_NS, Cut, Selection, Window, select
from stepscope.export.survey import Progress, Source, Sources, Survey, Track, clock_offset_ns, entries, find, survey

_ONE_RANK_ONLY = frozenset(("distributedInfo",))


class Exported(Struct, frozen=True):
    """What was written; `problems` are sentences about what could not be taken along."""

    path: Path
    bytes: int
    slices: int
    ranks: int
    lost: int
    problems: tuple[str, ...]


def export(
    paths: Sequence[Path],
    out: Path,
    cut: Cut = Cut(),  # noqa: B008  # immutable
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write what `cut` asks for of the traces below `paths` to `out`, packed if its name ends in .gz.

    `progress` gets the share done, 0 to 1. Raises UsageError, UnreadableInputError or EnvironmentRefusal, and then
    leaves `out` as it was.
    """
    check(out, list(paths), force=force)
    sources = find(list(paths), cut.ranks)
    check(out, [source.path for source in sources.traces], force=force)
    passes = _passes((2 if cut.whole else 3) * len(sources.traces), progress or (lambda _: None))
    traces = _surveyed(sources, cut, passes)
    start_ns = min(source.survey.base_ns + (source.survey.first_ns or 0) for source in traces)
    parts = _parts(traces, sources, cut, start_ns, passes)
    tracks: dict[int, RankTracks] = {}
    for part in parts:
        taken, rank = part.source.survey, part.source.rank
        rank_tracks = tracks.setdefault(rank, RankTracks(sources.ranks[rank].label))
        rank_tracks.add(taken, taken.tracks if part.selection is None else part.selection.tracks)
    with atomic(out, force=force) as sink:
        sink.write(_head(parts, start_ns))
        _write(parts, Numbering(tracks), start_ns, sink, passes)
        sink.write(b"\n]}\n")
    return Exported(
        path=out,
        bytes=sink.written,
        slices=sum(part.slices for part in parts),
        ranks=len({part.source.rank for part in parts}),
        lost=sum(source.survey.counts["lost"] for source in traces),
        problems=tuple(sources.problems),
    )


def _passes(total: int, report: Progress) -> Callable[[], Progress]:
    """What gives the callback of the next pass over a file: it turns progress within it into the share of `total`."""
    begun = itertools.count()

    def next_pass() -> Progress:
        before = next(begun)
        return lambda share: report((before + min(1.0, share)) / total)

    return next_pass


class _Part(Struct, frozen=True):
    """A source with what stays of it; without a selection, that is all."""

    source: Source
    selection: Selection | None

    @property
    def slices(self) -> int:
        return self.source.survey.slices if self.selection is None else self.selection.slices


def _surveyed(sources: Sources, cut: Cut, passes: Callable[[], Progress]) -> list[Source]:
    good = []
    for source in sources.traces:
        try:
            survey(source, launches=cut.steps is not None, progress=passes())
        except UnreadableInputError as error:
            if len(sources.traces) == 1:
                raise
            sources.problems.append(f"left out: {error}")
            continue
        sources.problems.extend(f"{source.path.name}: {problem}" for problem in source.survey.problems)
        if source.survey.first_ns is not None:
            good.append(source)
    if not good:
        what = sources.traces[0].path if len(sources.traces) == 1 else "these traces"
        raise UnreadableInputError(f"{what}: nothing with a time in it; give traces that torch.profiler wrote")
    return good


# ------------------------------------------------------------------------------------------------------- choosing


def _parts(
    traces: list[Source], sources: Sources, cut: Cut, start_ns: int, passes: Callable[[], Progress]
) -> list[_Part]:
    if cut.whole:
        return [_Part(source, None) for source in traces]
    _require_categories(traces, cut)
    windows = [_window(source, sources, cut, start_ns) for source in traces]
    if cut.steps is not None and not any(windows):
        raise UsageError(f"--steps {_span(cut.steps)}: {_known_steps(traces, sources)}")
    without = {source.path.name for source, window in zip(traces, windows, strict=True) if window is None}
    sources.problems.extend(f"{name}: has none of these steps" for name in sorted(without))
    parts = []
    for source, window in zip(traces, windows, strict=True):
        advance = passes()
        if window is not None:
            selection = select(entries(source, advance), window, source.survey)
            if selection.events:
                parts.append(_Part(source, selection))
    if not parts:
        end_ns = max(source.survey.base_ns + source.survey.last_ns for source in traces)
        raise UsageError(
            f"no event is in that cut; the traces end {(end_ns - start_ns) / 10**6:.3f} ms after they start"
        )
    return parts


def _require_categories(traces: list[Source], cut: Cut) -> None:
    there = {name.casefold(): name for source in traces for name in source.survey.categories}
    for name in cut.categories:
        if name.casefold() not in there:
            known = ", ".join(sorted(there.values())[:20])
            raise UsageError(f"--categories {name}: no event is of that category; there are {known}")


def _window(source: Source, sources: Sources, cut: Cut, start_ns: int) -> Window | None:
    """What is wanted of `source`, on its own clock; None where it has none of the steps."""
    base = source.survey.base_ns
    categories = frozenset(name.casefold() for name in cut.categories) or None
    if cut.steps is not None:
        known = _steps_of(source, sources)
        asked = [times for number, times in known.items() if cut.steps[0] <= number <= cut.steps[1]]
        if not asked:
            return None
        start, end = min(times[0] for times in asked), max(times[1] for times in asked)
        return Window(
            start, end, of_steps=True, steps=cut.steps if known is source.survey.steps else None, categories=categories
        )
    start, end = cut.range_ns or (0, FOREVER_NS)
    offset = start_ns - base
    return Window(start + offset, min(end + offset, FOREVER_NS), categories=categories)


def _steps_of(source: Source, sources: Sources) -> dict[int, tuple[int, int]]:
    """Start and end of the steps in `source` on its own clock: those of its run's journal, else its annotations."""
    rank, taken = sources.ranks[source.rank], source.survey
    if not rank.steps:
        return taken.steps
    shift = taken.base_ns + clock_offset_ns(rank, taken)
    journal = {number: (start - shift, end - shift) for number, (start, end) in rank.steps.items()}
    first = taken.first_ns or 0
    return {number: times for number, times in journal.items() if times[0] < taken.last_ns and times[1] > first}


def _span(steps: tuple[int, int]) -> str:
    return f"{steps[0]}" if steps[0] == steps[1] else f"{steps[0]}:{steps[1]}"


def _known_steps(traces: list[Source], sources: Sources) -> str:
    """In words, what steps there are."""
    known = {number for source in traces for number in _steps_of(source, sources)}
    if not known:
        return "the traces mark no steps; cut by time with --range"
    return f"no such step in the traces, which hold steps {_span((min(known), max(known)))}"


# -------------------------------------------------------------------------------------------------------- writing


def _head(parts: list[_Part], base_ns: int) -> bytes:
    """The beginning of the file up to the event list: the metadata that all sources agree on."""
    first, *others = (part.source.survey.metadata for part in parts)
    several = len({part.source.rank for part in parts}) > 1
    kept: dict[str, Any] = {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others) and not (several and key in _ONE_RANK_ONLY)
    }
    kept["baseTimeNanoseconds"] = base_ns
    return msgspec.json.encode(safe_value(kept)).removesuffix(b"}") + b',"traceEvents":['


def _write(parts: list[_Part], numbering: Numbering, base_ns: int, sink: Sink, passes: Callable[[], Progress]) -> None:
    """Write the metadata events, then what stays of every part."""
    separator = b"\n"
    for event in numbering.metadata():
        sink.write(separator + event)
        separator = b",\n"
    encoder = Encoder()
    for number, part in enumerate(parts):
        for event in _events(part, Ids(number, len(parts)), numbering, base_ns, encoder, passes()):
            sink.write(separator + event)
            separator = b",\n"


def _events(
    part: _Part, ids: Ids, numbering: Numbering, base_ns: int, encoder: Encoder, progress: Progress
) -> Iterator[bytes]:
    """Every entry of `part` that stays, as JSON on the common clock."""
    source, survey_ = part.source, part.source.survey
    kept = part.selection.kept if part.selection is not None else None
    first_ns = survey_.first_ns or 0
    index = -1
    for index, taken in enumerate(entries(source, progress)):
        entry, start, _ = taken
        if entry.ph == "M" or start < first_ns or (kept is not None and not (index < len(kept) and kept[index])):
            continue
        pid, tid = numbering.track(source.rank, entry.track)
        args = arguments(entry) if ids.unchanged else renumbered_arguments(entry, ID_ARGUMENTS, ids.number)
        identifier = ids.arrow(bytes(entry.id)) if entry.ph in FLOWS else b""
        yield encoder.entry(taken, base_ns - survey_.base_ns, pid, tid, identifier, args)
    if index + 1 != survey_.entries:
        raise UnreadableInputError(f"{source.path}: changed while it was read; try again when it is complete")


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
    own: dict[int, bytes] = {}
    invented = []
    for text in sorted(set(texts)):
        value = integer(text)
        if value is not None and 0 <= value <= LARGEST and value not in own:
            own[value] = text
        else:
            invented.append(text)
    free = (number for number in itertools.count(FIRST_INVENTED) if number not in own)
    return {text: value for value, text in own.items()} | dict(zip(invented, free, strict=False))


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
        return [event for position in sorted(self._ranks) for event in self._rank_metadata(position)]

    def _rank_metadata(self, position: int) -> list[bytes]:
        rank, several = self._ranks[position], len(self._ranks) > 1
        threads: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        for track, number in self._threads[position].items():
            threads[track[0]].append((number, track[1]))
        events = []
        for pid, number in sorted(self._processes[position].items(), key=lambda item: item[1]):
            if pid not in threads:
                continue
            kinds = ("process_name", "process_labels", "process_sort_index")
            name, label, order = (rank.labels.get((kind, pid, b"")) for kind in kinds)
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
        self.unchanged = count == 1  # ids stay as they are

    def number(self, text: bytes) -> bytes:
        """The id written `text` in the file; zero and negative ones, which stand for none, stay."""
        value = integer(text)
        return text if value is not None and value <= 0 else self._of_all(text, value)

    def arrow(self, text: bytes) -> bytes:
        """An arrow's id; here zero is an id like others."""
        value = integer(text)
        if self.unchanged and value is not None and 0 <= value < 2**64:
            return b"%d" % value
        return self._of_all(text, value)

    def _of_all(self, text: bytes, value: int | None) -> bytes:
        """The id among those of all sources."""
        if value is not None and 0 <= value * self._count + self._source < _EXACT_IN_VIEWERS:
            return b"%d" % (value * self._count + self._source)
        digest = blake2b(b"%d:%b" % (self._source, text), digest_size=8).digest()
        return b"%d" % (int.from_bytes(digest, "big") >> 12)


_BUFFER = 2**20
_LEVEL = 9  # as the profilers pack their own; at level 6 a whole trace could come out larger than its source
_GZIP = 31  # zlib's way to say: with a gzip header, which then holds neither a name nor a time


class Sink:
    """Takes bytes and counts how many reach the file."""

    def __init__(self, file: BinaryIO, *, packed: bool) -> None:
        self._file = file
        self._packer = zlib.compressobj(_LEVEL, wbits=_GZIP) if packed else None
        self._parts: list[bytes] = []
        self._waiting = 0
        self.written = 0

    def write(self, data: bytes) -> None:
        """Add `data`."""
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting >= _BUFFER:
            self._flush()

    def finish(self) -> None:
        """Write what waits."""
        self._flush()
        if self._packer is not None:
            self._put(self._packer.flush())

    def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts, self._waiting = [], 0
        self._put(self._packer.compress(data) if self._packer is not None else data)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self.written += len(data)


def check(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Raise UsageError if writing `path` would lose something: a file that exists, or one we are about to read."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file in it")
    if path.is_char_device() or path.is_fifo():
        raise UsageError(f"{path}: is no file; name one, or - for standard output")
    if any(_same(path, source) for source in inputs):
        raise UsageError(f"{path}: is one of the traces to read; name another file")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists; add --force to overwrite it, or name another file")


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


@contextlib.contextmanager
def atomic(path: Path, *, force: bool) -> Iterator[Sink]:
    """A sink whose content stands at `path` once the block has ended well; raises EnvironmentRefusal.

    Its folder is made where there is none.
    """
    temporary = path.parent / f".{path.name[:200]}.{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:  # exclusive: a link that someone laid in the way is not followed
            sink = Sink(file, packed=path.suffix.lower() == ".gz")
            yield sink
            sink.finish()
        check(path, [], force=force)
        os.replace(temporary, path)
    except OSError as error:
        raise EnvironmentRefusal(f"{path}: cannot be written ({error.strerror}); name another place") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
