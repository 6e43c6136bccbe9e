"""Chrome traces as torch.profiler (Kineto) writes them, of all ages: one pass of typed decoding, then columns.

Times become integer nanoseconds without loss: old files write whole microseconds, newer ones three decimals, since
2024 relative to `baseTimeNanoseconds`. Only slices ("ph": "X") are kept. A file that is no valid JSON (cut off,
unescaped names) is salvaged event by event, and what was lost is counted. Of a trace's top-level metadata only an
allow-list is read: real traces carry dumps of the environment with tokens in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.errors import UnreadableInputError
from stepscope.read import salvage
from stepscope.read.inflate import read_bounded
from stepscope.read.text import EARLIEST_NS, LATEST_NS, LONGEST_NS, clean, clean_value, integer, moment_ns

MAX_TRACE_BYTES = 2**30
MAX_NAME_CHARS = 4096
METADATA_KEYS = (
    "schemaVersion",
    "baseTimeNanoseconds",
    "displayTimeUnit",
    "deviceProperties",
    "distributedInfo",
    "with_stack",
    "with_modules",
    "with_flops",
    "record_shapes",
    "profile_memory",
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
)
# Up to here a float of microseconds with three decimals still rounds to the right nanosecond. Times relative to
# baseTimeNanoseconds stay below (at most three months); those of some traces of 2024 since 1970 do not.
_EXACT_MICROSECONDS = 2**43
_US = 1000

Int64 = npt.NDArray[np.int64]


class Args(msgspec.Struct, gc=False):
    """The arguments of a slice that matter; everything else is skipped while decoding."""

    external: Any = msgspec.field(default=None, name="External id")
    external_old: Any = msgspec.field(default=None, name="external id")
    correlation: Any = None
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    device: Any = None
    stream: Any = None
    bytes: Any = None
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    shapes_old: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    name: Any = None


class Event(msgspec.Struct, gc=False):
    """One entry of traceEvents. Types are checked later: one odd event must not cost the others."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class _Times(msgspec.Struct, gc=False):
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_File = msgspec.defstruct("_File", [("traceEvents", list[Event]), *((key, Any, None) for key in METADATA_KEYS)])
_TimesFile = msgspec.defstruct("_TimesFile", [("traceEvents", list[_Times])])


@dataclass(frozen=True)
class TraceEvents:
    """The slices of a trace, one column each, all of the same length, in file order."""

    category: list[str]
    name: list[str]
    track: list[str]  # "pid/tid"
    start_ns: Int64
    duration_ns: Int64
    correlation: list[int | None]
    external_id: list[int | None]
    sequence: list[int | None]
    device: list[int | None]
    stream: list[int | None]
    bytes: list[int | None]
    shapes: list[str | None]  # JSON text
    types: list[str | None]  # JSON text

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True)
class TraceQuality:
    """What reading cost: `lost` events could not be read, `problem` says why the file was not whole, else None."""

    events: int
    lost: int
    problem: str | None


@dataclass(frozen=True)
class RawTrace:
    """A trace file. `owner` is "stepscope" for a window of ours, "user" for one their own profiler wrote."""

    name: str  # the file's name without a .gz ending, or the path as the user's profiler wrote it
    owner: str
    events: TraceEvents
    threads: dict[str, str]  # track -> thread name
    metadata: dict[str, Any]
    quality: TraceQuality


def read_trace(path: Path, *, name: str | None = None, owner: str = "stepscope") -> RawTrace:
    """Read one .json or .json.gz trace; raises UnreadableInputError when not a single event can be read."""
    try:
        content = read_bounded(path, MAX_TRACE_BYTES)
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}; check the path and its permissions") from error
    decoded = _decode(content.data)
    events, times, lost, problem = decoded.events, decoded.times, decoded.lost, content.problem or decoded.problem
    if not events:
        raise UnreadableInputError(
            f"{path}: no trace event in it; give a file that torch.profiler's export_chrome_trace wrote"
        )
    base = moment_ns(_whole(decoded.metadata.get("baseTimeNanoseconds"))) or 0
    slices = [index for index, event in enumerate(events) if event.ph == "X"]
    columns, dropped = _columns([events[i] for i in slices], [times[i] for i in slices] if times else None, base)
    return RawTrace(
        name=name or path.name.removesuffix(".gz"),
        owner=owner,
        events=columns,
        threads=_threads(events),
        metadata={key: value for key, value in decoded.metadata.items() if value is not None},
        quality=TraceQuality(len(slices) + lost, dropped + lost, problem),
    )


# -------------------------------------------------------------------------------------------------------- decode


@dataclass(frozen=True)
class _Decoded:
    events: list[Event]
    times: list[_Times] | None  # beside `events`, where a float would lose nanoseconds
    metadata: dict[str, Any]
    lost: int
    problem: str | None


def _decode(data: bytes) -> _Decoded:
    is_array = data[:64].lstrip()[:1] == b"["
    try:
        if is_array:
            events = msgspec.json.decode(data, type=list[Event])
            metadata: dict[str, Any] = {}
        else:
            file: Any = msgspec.json.decode(data, type=_File)
            events = file.traceEvents
            metadata = {key: clean_value(getattr(file, key)) for key in METADATA_KEYS}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        salvaged = salvage.events(data, Event)
        metadata = salvage.metadata(data, METADATA_KEYS)
        reason = "it is cut off" if "truncated" in str(error) else "it is not valid JSON"
        return _Decoded(salvaged.events, None, metadata, salvaged.lost, f"{reason}; its events were read one by one")
    times: list[_Times] | None = None
    if any(type(event.ts) is float and abs(event.ts) > _EXACT_MICROSECONDS for event in events):
        exact: Any = msgspec.json.decode(data, type=list[_Times] if is_array else _TimesFile)
        times = exact if is_array else exact.traceEvents
    return _Decoded(events, times, metadata, 0, None)


def _threads(events: Sequence[Event]) -> dict[str, str]:
    return {
        _track(event.pid, event.tid): clean(event.args.name)[:MAX_NAME_CHARS]
        for event in events
        if event.ph == "M" and event.name == "thread_name" and event.args and isinstance(event.args.name, str)
    }


# ------------------------------------------------------------------------------------------------------- columns


def _columns(events: list[Event], times: list[_Times] | None, base_ns: int) -> tuple[TraceEvents, int]:
    """Columns of slices, and how many had no usable time or name."""
    start, start_ok = _nanoseconds([t.ts for t in times] if times else [e.ts for e in events], base_ns)
    duration, duration_ok = _nanoseconds([t.dur for t in times] if times else [e.dur for e in events], 0)
    good = start_ok & duration_ok & (duration >= 0) & (duration <= LONGEST_NS)
    good &= (start >= EARLIEST_NS) & (start <= LATEST_NS)
    good &= np.fromiter((isinstance(event.name, str) for event in events), bool, len(events))
    if not good.all():
        events = [event for event, keep in zip(events, good.tolist(), strict=True) if keep]
    tracks: dict[Any, str] = {}
    arguments = [event.args or _NO_ARGS for event in events]
    columns = TraceEvents(
        category=[event.cat if isinstance(event.cat, str) else "" for event in events],
        name=[event.name[:MAX_NAME_CHARS] for event in events],
        track=[_cached_track(event.pid, event.tid, tracks) for event in events],
        start_ns=start[good],
        duration_ns=duration[good],
        correlation=[_whole(a.correlation) for a in arguments],
        external_id=[_whole(a.external if a.external is not None else a.external_old) for a in arguments],
        sequence=[_whole(a.sequence) for a in arguments],
        device=[_small(a.device) for a in arguments],
        stream=[_whole(a.stream) for a in arguments],
        bytes=[_whole(a.bytes) for a in arguments],
        shapes=[_text(a.shapes) or _text(a.shapes_old) for a in arguments],
        types=[_text(a.types) for a in arguments],
    )
    return columns, int(len(good) - good.sum())


def _nanoseconds(values: list[Any], base_ns: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Microseconds as ints, floats, text or raw JSON → ns since `base_ns`, and which of them could be converted."""
    if all(type(value) is float or (type(value) is int and abs(value) < _EXACT_MICROSECONDS) for value in values):
        floats = np.array(values, dtype=np.float64)
        ok = np.isfinite(floats) & (np.abs(floats) < _EXACT_MICROSECONDS)
        result = np.zeros(len(values), dtype=np.int64)
        result[ok] = np.rint(floats[ok] * _US).astype(np.int64)
        return result + base_ns, ok
    exact = [_exact_ns(value) for value in values]
    ok = np.fromiter((value is not None for value in exact), bool, len(exact))
    return np.array([0 if value is None else value + base_ns for value in exact], dtype=np.int64), ok


def _exact_ns(value: Any) -> int | None:
    """One time in microseconds as exact nanoseconds (rounded where it has more decimals), or None."""
    if type(value) is int:
        result = value * _US
    else:
        try:
            text = bytes(value).decode().strip('"') if isinstance(value, msgspec.Raw) else str(value)
            number = Decimal(text)
            result = int((number * _US).to_integral_value()) if number.is_finite() and number.adjusted() < 20 else -1
        except (InvalidOperation, UnicodeDecodeError):
            return None
    return result if EARLIEST_NS <= result <= LATEST_NS else None


def _cached_track(pid: Any, tid: Any, known: dict[Any, str]) -> str:
    try:
        return known[pid, tid]
    except KeyError:
        track = known[pid, tid] = _track(pid, tid)
        return track
    except TypeError:  # an unhashable id
        return _track(None, None)


def _track(pid: Any, tid: Any) -> str:
    parts = (str(part) if isinstance(part, (int, str)) and not isinstance(part, bool) else "?" for part in (pid, tid))
    return "/".join(clean(part)[:200] for part in parts)


def _whole(value: Any) -> int | None:
    """An integer id, also where a writer put it into text."""
    if type(value) is str and value.isdecimal() and len(value) < 19:
        return int(value)
    return integer(value)


def _small(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and -(2**31) <= number < 2**31 else None


def _text(raw: msgspec.Raw) -> str | None:
    if not raw:
        return None
    text = bytes(raw)
    return text.decode("utf-8", "backslashreplace") if text != b"null" else None


_NO_ARGS = Args()
