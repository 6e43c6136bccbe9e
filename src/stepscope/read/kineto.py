"""Chrome traces as torch.profiler (Kineto) writes them, of all ages, from any vendor, whole or damaged.

The file is read once, in pieces; a stretch of events is decoded, turned into columns and forgotten. Nothing branches on
a version: `schemaVersion` is 1 for everything since 2021, so types and units are told by the values themselves. A
process of its own may read while another imports what analyses the chunks (`read_ahead`, `TraceAhead`).

Of traces that others recorded (`read_traces`), a rank comes from the trace's own metadata, else from the file's name or
its folder's, else it is the next free number. Files of one worker (the same name but for its time, as
tensorboard_trace_handler writes one per profiled span) belong to one rank; any other two files never do, and what had
to be guessed is counted in the losses.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from stepscope.errors import UnreadableInputError, readable
from stepscope.files import INDEX, key_of, open_regular
from stepscope.read.event_list import DAMAGE, Decode, Frames, first_value
from stepscope.read.raw import Losses, Progress, RawRank, RawRun, TraceRef
from stepscope.read.streams import (
    BYTE_ORDER_MARK,
    GZIP,
    ByteStream,
    Limits,
    common_folder,
    files_in,
    name_below,
    natural,
    read_head,
)
from stepscope.read.text import clean, moment_ns, number, whole_number
from stepscope.read.trace import (
    EXACT_MICROSECONDS,
    ChunkBuilder,
    Event,
    ExactEvent,
    LooseEvent,
    TraceChunk,
    TraceQuality,
    TraceSummary,
    loses_nanoseconds,
)
from stepscope.workers import Beside, Ended, Send

METADATA_KEYS = (
    *("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit", "deviceProperties", "distributedInfo"),
    *("with_stack", "with_modules", "with_flops", "record_shapes", "profile_memory"),
    *("cuda_runtime_version", "cuda_driver_version", "cupti_version"),
    *("hip_runtime_version", "hip_driver_version", "roctracer_version"),
)
_MAX_DEVICES = 64
_MAX_RAW_BYTES = 2**22  # before nested parts are cut; the groups of thousands of ranks are long
_MAX_GROUPS_BYTES = 2**16
_MAX_TEXT_CHARS = 256
_DISTRIBUTED_KEYS = ("backend", "rank", "world_size", "pg_count", "pg_config", "nccl_version")

_Metadata = msgspec.defstruct("_Metadata", [(key, msgspec.Raw, msgspec.Raw()) for key in METADATA_KEYS])
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Metadata)
_SAMPLES = 8
_FREED_BYTES = 2**24
_SURE_BYTES = 4 * 2**20  # of far times without decimals, after which a writer is taken to write none
_FAR_DECIMAL = re.compile(rb'"ts"\s*:\s*-?\d{13,}\.\d*[1-9]')
# Times later than this after their base (September 2001 from 1970) are times since 1970, whatever the base says.
_SINCE_1970_NS = 10**18
_GIVE = "give a file that torch.profiler's export_chrome_trace wrote"
_KEY = re.compile(rb'"(' + "|".join(METADATA_KEYS).encode() + rb')"\s*:\s*')


def read_metadata(head: bytes, tail: bytes) -> dict[str, Any]:
    """Allow-listed values of the text before the event list's bracket and of the text behind the closing one."""
    result: dict[str, Any] = {}
    for text, whole in ((head, head + b"[]}"), (tail, b'{"":[]' + tail)):
        if not text.strip():
            continue
        try:
            found = _DECODER.decode(whole)
            raws = {key: bytes(getattr(found, key)) for key in METADATA_KEYS}
        except DAMAGE:  # no valid JSON: the first value behind each of the keys
            raws = {}
            for match in _KEY.finditer(text):
                raws.setdefault(match[1].decode(), text[match.end() : match.end() + _MAX_RAW_BYTES])
        for key, raw in raws.items():
            value = _value(key, first_value(raw)) if 0 < len(raw) <= _MAX_RAW_BYTES else None
            if value is not None:
                result.setdefault(key, value)
    return result


def _value(key: str, value: Any) -> Any:
    if key == "deviceProperties":
        devices = value if isinstance(value, list) else [value]
        return [_flat(device) for device in devices[:_MAX_DEVICES] if isinstance(device, dict)]
    if key == "distributedInfo":
        if not isinstance(value, dict):
            return None
        kept = {name: value[name] for name in _DISTRIBUTED_KEYS if name in value}
        sizes = {name: _MAX_GROUPS_BYTES + 1 for name, part in kept.items() if isinstance(part, list | dict)}
        sizes |= {name: len(part) for name, part in kept.items() if isinstance(part, str)}
        if "pg_config" in sizes:
            sizes["pg_config"] = len(msgspec.json.encode(kept["pg_config"]))
        # of a size that everything downstream can carry
        return {name: part for name, part in kept.items() if sizes.get(name, 0) <= _MAX_GROUPS_BYTES}
    return next(iter(_flat({key: value}).values()), None)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that a column can hold, truths and short text; nothing nested."""
    return {
        clean(name)[:_MAX_TEXT_CHARS]: clean(value)[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in values.items()
        if isinstance(value, str | bool) or number(value) is not None
    }


def rank_and_size(metadata: dict[str, Any]) -> tuple[int | None, int | None]:
    """The rank and the world size that `distributedInfo` gives."""
    info = metadata.get("distributedInfo") or {}
    rank, size = whole_number(info.get("rank")), whole_number(info.get("world_size"))
    return rank if rank is not None and 0 <= rank < 2**31 else None, size if size is not None and size > 0 else None


def is_trace(head: bytes) -> bool:
    """Whether a file begins like JSON; whether there are events in it shows only later."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[", b'"')


class _TraceFile:
    """A trace that is read once; raises UnreadableInputError where it does not begin like one or cannot be read."""

    def __init__(self, path: Path, limits: Limits | None, progress: Progress | None, decode: Decode) -> None:
        self.path = path
        self._nothing = "no trace event in it"
        self._useful = 0  # entries of use that were met so far
        limits = limits or Limits()
        with readable(path):
            if not is_trace(read_head(path)):
                raise UnreadableInputError(f"{path}: no trace event in it; {_GIVE}")
            self._bytes = ByteStream(path, limits, progress)
        self._frames = Frames(self._watched(limits.barren_bytes), decode, limits)

    def _watched(self, barren_bytes: int) -> Iterator[bytes]:
        """The file's bytes, up to the point where it has shown that it holds nothing."""
        size = 0
        for piece in self._bytes:
            yield piece
            size += len(piece)
            if size > barren_bytes and not self._useful:
                return

    def _stretches(self) -> Iterator[list[Any]]:
        """Decoded entries; raises UnreadableInputError where there is none of use."""
        with readable(self.path, "check the file"):
            yield from self._frames.batches()
        if not self._useful:
            why = f" ({self._bytes.problem})" if self._bytes.problem else ""
            raise UnreadableInputError(f"{self.path}: {self._nothing}{why}; {_GIVE}")

    @property
    def problems(self) -> tuple[str, ...]:
        return (*([self._bytes.problem] if self._bytes.problem else []), *self._frames.problems)

    def metadata(self) -> dict[str, Any]:
        return read_metadata(self._frames.head, self._frames.tail)


class RawEvents(_TraceFile):
    """The entries of a Chrome trace as they stand in it, once."""

    def __init__(self, path: Path, limits: Limits | None = None, progress: Progress | None = None) -> None:
        super().__init__(path, limits, progress, _decode_raw)

    def __iter__(self) -> Iterator[bytes]:
        """Entries in file order; raises UnreadableInputError when there is none or the file cannot be read."""
        for batch in self._stretches():
            self._useful += len(batch)
            yield from map(bytes, batch)

    @property
    def lost(self) -> int:
        return self._frames.lost


_RAW_ENTRIES: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])


def _decode_raw(text: bytes) -> list[Any]:
    entries = _RAW_ENTRIES.decode(text)
    text.decode()  # the decoder does not look inside texts that it skips
    return entries


class KinetoTrace(_TraceFile):
    """A Kineto trace being read: take all of `chunks()`, then ask for `summary()`; both once.

    With `only`, nothing but entries that hold this text is decoded; what the summary says is then of them alone.
    """

    def __init__(
        self, path: Path, limits: Limits | None = None, progress: Progress | None = None, *, only: bytes = b""
    ) -> None:
        self._builder = ChunkBuilder()
        self._earliest: int | None = None
        self._only = only
        self._decode = EventDecoder().decode
        super().__init__(path, limits, progress, self._decode_some if only else self._decode)
        self._useful = int(bool(only))  # no entry with the text is an answer as well

    def _decode_some(self, text: bytes) -> list[Any]:
        if self._only not in text:
            return []
        entries = [entry for entry in map(bytes, _decode_raw(text)) if self._only in entry]
        return self._decode(b"".join((b"[", b",".join(entries), b"]")))

    def chunks(self) -> Iterator[TraceChunk]:
        """The trace in order; raises UnreadableInputError when not a single event can be read."""
        builder = self._builder
        # glibc returns large blocks to the system at once; what it takes for large grows with the largest block that
        # was freed. One is freed here whose pages were never touched, so that blocks of the size of a stretch are used
        # again.
        bytes(_FREED_BYTES)
        for events in self._stretches():
            builder.add(events)
            if builder.lost > builder.events / 2:
                self._nothing = "no event of it has times that can be: ts and dur of a trace count microseconds"
            if not self._only:
                self._useful = max(0, builder.events - builder.lost - builder.unsupported)
            if builder.full():
                yield self._seen(builder.take())
        yield self._seen(builder.take())
        if self._earliest is None and builder.lost > builder.events / 2 and not self._only:
            raise UnreadableInputError(f"{self.path}: {self._nothing}; {_GIVE}")

    def _seen(self, chunk: TraceChunk) -> TraceChunk:
        if self._earliest is None and len(chunk.slices):
            self._earliest = int(chunk.slices.start_ns.min())
        return chunk

    def summary(self) -> TraceSummary:
        """Known only after the last chunk."""
        metadata = self.metadata()
        base = moment_ns(whole_number(metadata.get("baseTimeNanoseconds"))) or 0
        problems = self.problems
        if base and self._earliest is not None and self._earliest > _SINCE_1970_NS:
            problems = (*problems, "its times are since 1970 although it names another base; the base was left out")
            base = 0
        builder, frames = self._builder, self._frames
        lost = builder.lost + frames.lost
        quality = TraceQuality(builder.events + frames.lost, frames.repaired, lost, builder.unsupported, problems)
        return TraceSummary(base, rank_and_size(metadata)[1], builder.threads, metadata, quality)


class EventDecoder:
    """Decodes stretches of an event list with the fastest types that fit, and remembers which did."""

    def __init__(self) -> None:
        self._usual: Any = msgspec.json.Decoder(list[Event])
        self._exact: Any = msgspec.json.Decoder(list[ExactEvent])
        self._loose: Any = msgspec.json.Decoder(list[LooseEvent])
        self._fastest = self._usual
        self._misfits = 0
        self._whole_bytes = 0

    def decode(self, text: bytes) -> list[Any]:
        """A JSON array of entries; raises what msgspec raises where it is not one."""
        try:
            events: list[Any] = self._fastest.decode(text)
        except msgspec.ValidationError:
            events = [_usual(event) for event in self._loose.decode(text)]
            self._misfits += 1
            if self._misfits > _SAMPLES:  # no single odd entry: the file is like that
                self._fastest = self._loose
            return events
        if self._fastest is self._loose:
            return [_usual(event) for event in events]
        if self._fastest is self._usual and self._loses(events, text):
            self._fastest = self._exact
            return self.decode(text)
        return events

    def _loses(self, events: list[Any], text: bytes) -> bool:
        step = len(events) // _SAMPLES + 1
        samples = [event.ts for event in events[::step] if abs(event.ts) >= EXACT_MICROSECONDS]
        if not samples or loses_nanoseconds(samples):
            return bool(samples)
        # A float may have lost its decimals altogether. Writers do not change, so the first stretches tell.
        self._whole_bytes += len(text)
        return self._whole_bytes - len(text) <= _SURE_BYTES and _FAR_DECIMAL.search(text) is not None


def _usual(event: Any) -> Any:
    """Replace what has no usable type by what stands for missing."""
    event.ph = event.ph if isinstance(event.ph, str) else ""
    event.cat = event.cat if isinstance(event.cat, str) else None
    event.name = event.name if isinstance(event.name, str) else None
    for name in ("pid", "tid", "id"):
        given = getattr(event, name)
        setattr(event, name, given if type(given) in (int, str) else whole_number(given))
    return event


Tell = Callable[[int, int], None]


_LARGE_BYTES = 48 * 2**20  # of a packed trace, whose digest takes longer than its first chunk


def read_ahead(send: Send, path: Path, tables: Path | None) -> None:
    """Read a trace and send its chunks, then its summary, or why it cannot be read; each with the bytes read so far.

    Nothing where its tables are among `tables` already.
    """
    done = [0, 0]

    def told(read: int, size: int) -> None:
        done[:] = read, size

    try:
        if tables is not None and path.stat().st_size <= _LARGE_BYTES and (tables / key_of(path) / INDEX).exists():
            return
        trace = KinetoTrace(path, progress=told)
        for chunk in trace.chunks():
            send(_packed((chunk, *done)))
        send(_packed((trace.summary(), *done)))
    except (UnreadableInputError, OSError) as error:
        send(_packed((error, *done)))


class TraceAhead:
    """As `KinetoTrace`: take all of `chunks()`, then ask for `summary()`."""

    def __init__(self, path: Path, child: Beside, progress: Tell | None) -> None:
        self.path, self._child, self._progress = path, child, progress
        self._summary: TraceSummary | None = None

    def chunks(self) -> Iterator[TraceChunk]:
        """The trace in order; raises what reading it does, and `Ended` where the other process did not finish."""
        try:
            for value, done, size in self._child.values():
                if self._progress is not None and size:
                    self._progress(done, size)
                if isinstance(value, Exception):
                    raise value
                if isinstance(value, TraceChunk):
                    yield value
                else:
                    self._summary = value
        finally:
            self._child.wait()
        if self._summary is None:
            raise Ended

    def summary(self) -> TraceSummary:
        """Known only after the last chunk."""
        assert self._summary is not None
        return self._summary


class _Packer(pickle.Pickler):
    """A column of one value for all rows stays one, in the file and in memory."""

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, np.ndarray) and given.strides == (0,) and len(given):
            return np.broadcast_to, (given[0], given.shape)
        return NotImplemented


def _packed(value: tuple[Any, ...]) -> bytes:
    file = BytesIO()
    _Packer(file, 5).dump(value)
    return file.getvalue()


MAX_FILES = 100_000
_SUFFIXES = (".json", ".json.gz")
_HEAD_BYTES = 2**20
_TAIL_BYTES = 2**16
_MAX_SCANNED_BYTES = 64 * 2**20  # of a packed file whose rank only its end can tell
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_ENTRY = re.compile(rb'\{[^{}]{0,400}"ph"\s*:')
_LISTED = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*" + _ENTRY.pattern)
_SPAN = re.compile(r"\.\d{6,}(?=\.pt\.trace\.json|\.json)")
_NAMED_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|trainer|gpu|process|proc)[-_=. ]?(\d{1,7})(?!\d)", re.IGNORECASE)
# As tensorboard_trace_handler names a trace: by host and process. In names of a script's own a number may be a step's.
_OF_WORKER = re.compile(
    r"(?P<host>.+?)(?<!step)(?<!iter)(?<!iteration)(?<!epoch)(?<!rank)(?<!worker)_\d+(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?",
    re.IGNORECASE,
)
# where things stand in a run folder of ours or in a report, which are no traces
_PLACES = ("report.json", "experiment.json", "manifest.json", "rank.json")


def begins_as_trace(path: Path) -> bool:
    """Whether a file can be nothing but a trace by its first bytes; False for a trace that lists its events later."""
    try:
        head = read_head(path)
    except OSError:  # who reads it says what is wrong with it
        return False
    return is_trace(head) and bool(_LIST.search(head) or _LISTED.match(head))


class _Found(Struct, frozen=True):
    path: Path
    top: Path  # the given path it was found under
    rank: int | None
    world_size: int | None
    certain: bool  # the metadata said so


def read_traces(paths: Sequence[Path]) -> RawRun:
    """The traces in and under `paths` as a run without hosts, steps or journal; a rank's in the order of their names.

    Counts `foreign_files` (JSON in a folder that is no trace), `unreadable_files`, `duplicate_ranks` (a file that names
    a rank another worker has; it gets the next free one), `guessed_ranks` and `missing_ranks`. Raises
    UnreadableInputError for a given path that does not exist, and where there is no trace.
    """
    losses = Losses()
    found: list[_Found] = []
    for path in paths:
        if not path.exists():
            raise UnreadableInputError(f"{path}: no such file or folder; give traces of torch.profiler")
        looked = (_look(file, path, losses) for file in _candidates(path))
        found.extend(trace for trace in looked if trace is not None)
    if not found:
        raise UnreadableInputError(
            f"{paths[0]}: no trace in it; give files of torch.profiler, of sampled stacks or of torch_xla"
        )
    kept: dict[str, _Found] = {}
    for trace in sorted(found, key=lambda trace: natural(str(trace.path))):
        kept.setdefault(os.path.realpath(trace.path).removesuffix(".gz"), trace)
    ranks = _by_rank(list(kept.values()), common_folder(paths), losses)
    parents = [str(ref.path.parent) for rank in ranks for ref in rank.traces]
    return RawRun(folder=Path(os.path.commonpath(parents)), hosts=(), ranks=ranks, losses=losses)


def holds_traces(folders: Sequence[Path]) -> bool:
    """Whether there is a trace in one of the folders; looks no further than to the first."""
    return any(_look(file, folder, Losses()) is not None for folder in folders for file in _candidates(folder))


def host_of_name(name: str) -> str | None:
    """The host that a trace's name tells, where it is one of tensorboard_trace_handler's."""
    match = _OF_WORKER.fullmatch(name)
    return match["host"] if match else None


def _candidates(path: Path) -> Iterator[Path]:
    return (file for file in files_in(path, MAX_FILES, _SUFFIXES) if file == path or file.name not in _PLACES)


def _look(path: Path, top: Path, losses: Losses) -> _Found | None:
    """What the beginning of a file tells; None for one that is no trace, unless it was named itself."""
    named = path == top
    label = path.name if named else str(path.relative_to(top))
    try:
        if named and not path.is_file():
            raise UnreadableInputError(f"{path}: no file and no folder; give traces of torch.profiler")
        head = read_head(path, _HEAD_BYTES)
        if not is_trace(head):
            if not named:
                losses.add("foreign_files", label)
                return None
            return _Found(path, top, None, None, False)
        listed = _LIST.search(head)
        if not named and listed is None and not _ENTRY.search(head):
            losses.add("foreign_files", label)
            return None
        rank, size = rank_and_size(read_metadata(head[: listed.end()], b"") if listed else {})
        if rank is None:
            rank, size = rank_and_size(read_metadata(b"", _tail(path, head)))
    except OSError as error:
        if named:
            raise UnreadableInputError(f"{path}: {error.strerror or error}; check its permissions") from error
        losses.add("unreadable_files", label)
        return None
    certain = rank is not None
    return _Found(path, top, rank if certain else _rank_of_name(path, top), size, certain)


def _tail(path: Path, head: bytes) -> bytes:
    """The last bytes of a file after unpacking; of a large packed one none, as that would mean to read it all."""
    size = path.stat().st_size
    with open_regular(path, follow=True) as file:
        packed = file.read(2) == GZIP
        if not head or (size > _MAX_SCANNED_BYTES and packed):
            return b""
        if not packed:
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    last: deque[bytes] = deque()
    length = 0
    for piece in ByteStream(path, Limits()):
        last.append(piece)
        length += len(piece)
        while length - len(last[0]) >= _TAIL_BYTES:
            length -= len(last.popleft())
    return b"".join(last)[-_TAIL_BYTES:]


def _rank_of_name(path: Path, top: Path) -> int | None:
    """A number behind `rank`, `worker` or the like in the file's name, or in a folder's below the given one."""
    below = path.relative_to(top).parts if path != top else (path.name,)
    matches = (_NAMED_RANK.search(name) for name in reversed(below))
    return next((int(match[1]) for match in matches if match), None)


def _by_rank(found: list[_Found], root: Path, losses: Losses) -> tuple[RawRank, ...]:
    workers: dict[tuple[str, str], list[_Found]] = {}
    for trace in found:
        key = (str(trace.path.parent), _SPAN.sub("", trace.path.name.removesuffix(".gz")))
        if any(other.certain and trace.certain and other.rank != trace.rank for other in workers.get(key, ())):
            key = (key[0], str(trace.path))  # the same name but for its time, of another rank
        workers.setdefault(key, []).append(trace)
    ranks: dict[int, list[_Found]] = {}
    later: list[list[_Found]] = []
    for traces in sorted(workers.values(), key=lambda traces: not any(trace.certain for trace in traces)):
        rank = next((trace.rank for trace in traces if trace.rank is not None), None)
        if rank is None or rank in ranks:
            kind = "guessed_ranks" if rank is None else "duplicate_ranks"
            if rank is not None or len(workers) > 1:
                losses.add(kind, traces[0].path.name)
            later.append(traces)
        else:
            ranks[rank] = traces
    free = 0
    for traces in later:
        while free in ranks:
            free += 1
        ranks[free] = traces
    size = max(trace.world_size or 0 for trace in found)
    losses.add("missing_ranks", found[0].top.name, max(size, max(ranks) + 1 if len(ranks) > 1 else 0) - len(ranks))
    return tuple(
        RawRank(name=f"rank-{number}", rank=number, traces=tuple(_reference(trace, root) for trace in traces))
        for number, traces in sorted(ranks.items())
    )


def _reference(trace: _Found, root: Path) -> TraceRef:
    folder = name_below(root, trace.path.parent)
    name = trace.path.name.removesuffix(".gz")
    return TraceRef(trace.path, name, "user", "" if folder == "." else folder, trace.rank)
