"""What a reader of traces yields, whatever the format, and how entries of an event list become it.

A chunk is a stretch of the file of bounded size, so that memory does not grow with the trace. Every column of a part
has the same length; a missing integer is `MISSING`, a missing float NaN, a missing text code -1. Times are integer
nanoseconds since the trace's base; the base itself may stand behind the events, so it is in the summary.

Arguments of entries stay raw until the kind of an event is known, so that only a kernel pays for the figures of
kernels. An entry whose types are not the usual ones is decoded again, loosely, and made usual; that costs the entries
around it time but no content.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import count
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from stepscope.read.event_list import DAMAGE, first_value
from stepscope.read.text import LATEST_NS, LONGEST_NS, clean, whole_number

MISSING = -(2**63)

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Text(Struct, frozen=True):
    """A column of texts: row i is `values[codes[i]]`, or missing where the code is -1. Values are distinct."""

    values: list[str]
    codes: Int32

    def __len__(self) -> int:
        return len(self.codes)


class Slices(Struct, frozen=True):
    category: Text
    name: Text
    track: Text  # "pid/tid"
    start_ns: Int64
    duration_ns: Int64
    correlation: Int64
    external_id: Int64
    sequence: Int64
    forward_thread: Int64  # "Fwd thread id" of an operator of the backward pass
    device: Int64
    stream: Int64
    bytes: Int64
    python_module: Int64
    blocks: Int64  # of the grid: the product of its three dimensions
    threads: Int64  # of a block
    registers: Int64  # per thread
    shared_memory: Int64  # bytes per block
    blocks_per_sm: Float64
    warps_per_sm: Float64
    occupancy: Float64  # "est. achieved occupancy %"
    shapes: Text  # JSON text of "Input Dims"
    types: Text  # JSON text of "Input type"
    call_stack: Text  # "Call stack" of an operator (2021 traces): "file(line): function;...", innermost first
    collective: Text  # JSON object of the allow-listed arguments of a collective (kernel or record_param_comms)

    def __len__(self) -> int:
        return len(self.start_ns)


class Flows(Struct, frozen=True):
    """Ends of arrows between slices: `kind` is "ac2g" (launch to device), "fwdbwd" (forward to backward) or other."""

    kind: Text
    id: Int64
    finish: npt.NDArray[np.bool_]  # False: the start of the arrow
    track: Text
    time_ns: Int64

    def __len__(self) -> int:
        return len(self.id)


class MemoryEvents(Struct, frozen=True):
    """`[memory]` instants: an allocation (`bytes` > 0) or a release (< 0), and the totals after it."""

    track: Text
    time_ns: Int64
    address: Int64
    bytes: Int64
    device_type: Int64  # 0 CPU, 1 CUDA, others as the writer numbers them
    device: Int64
    allocated_bytes: Int64
    reserved_bytes: Int64

    def __len__(self) -> int:
        return len(self.time_ns)


class TraceChunk(Struct, frozen=True):
    slices: Slices
    flows: Flows
    memory: MemoryEvents


class TraceQuality(Struct, frozen=True):
    """What reading one trace cost.

    `events` entries were seen in all, of which `salvaged` needed the tolerant pass and `lost` could not be used;
    `unsupported` are well-formed entries of kinds that hold no slice, flow, memory or name. `problems` say in words
    what was wrong with the file, empty for a sound one.
    """

    events: int = 0
    salvaged: int = 0
    lost: int = 0
    unsupported: int = 0
    problems: tuple[str, ...] = ()


class TraceSummary(Struct, frozen=True):
    """What is known of a trace after its last chunk. `metadata` holds allow-listed keys only."""

    base_ns: int  # add it to every time of the chunks
    world_size: int | None
    threads: dict[str, str]  # track -> thread name
    metadata: dict[str, Any] = field(default_factory=dict)
    quality: TraceQuality = field(default_factory=TraceQuality)


Id: TypeAlias = int | str
NAN = float("nan")
NO_RAW = msgspec.Raw()


class Event(msgspec.Struct, gc=False):
    """One entry as sound files write it; fields in the order of the file, which is how the decoder expects them."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Id = "?"
    tid: Id = "?"
    ts: float = NAN
    dur: float = NAN
    args: msgspec.Raw = NO_RAW
    id: Id | None = None


class ExactEvent(Event, gc=False):
    """An entry whose time since 1970 would lose nanoseconds as a float."""

    ts: msgspec.Raw = NO_RAW  # type: ignore[assignment]


class LooseEvent(msgspec.Struct, gc=False):
    """An entry of any types."""

    ph: Any = ""
    cat: Any = None
    name: Any = None
    pid: Any = "?"
    tid: Any = "?"
    ts: msgspec.Raw = NO_RAW
    dur: msgspec.Raw = NO_RAW
    args: msgspec.Raw = NO_RAW
    id: Any = None


Whole: TypeAlias = int | str | None  # text and null are made usual later
_FLOAT = (float | None, NAN)
_SIDES = (tuple[int, int, int] | None, None)
_TEXT = (str | None, None)
_RAW = (msgspec.Raw, NO_RAW)
_WHOLE = (Whole, MISSING)


def _record(*groups: dict[str, tuple[str, tuple[Any, Any]]]) -> Any:
    fields = {name: field for group in groups for name, field in group.items()}
    typed = [(name, kind[0], msgspec.field(default=kind[1], name=key)) for name, (key, kind) in fields.items()]
    return msgspec.defstruct("Arguments", typed, gc=False)


# What every kind may say about who caused it.
_CAUSE = {"external_id": ("External id", _WHOLE), "external_old": ("external id", _WHOLE)}
_CALL = {"correlation": ("correlation", _WHOLE)}
_PYTHON = {"python_module": ("Python module id", _WHOLE)}
_COLLECTIVE = {"collective": ("Collective name", _RAW)}
_OPERATOR = {
    "sequence": ("Sequence number", _WHOLE),
    "forward_thread": ("Fwd thread id", _WHOLE),
    "types": ("Input type", _RAW),
    "shapes": ("Input Dims", _RAW),
    "shapes_old": ("Input dims", _RAW),
    "call_stack": ("Call stack", _TEXT),
}
_DEVICE = {
    "device": ("device", _WHOLE),
    "stream": ("stream", _WHOLE),
    **_CALL,
    "bytes": ("bytes", _WHOLE),
    "registers": ("registers per thread", _WHOLE),
    "shared_memory": ("shared memory", _WHOLE),
    "blocks_per_sm": ("blocks per SM", _FLOAT),
    "warps_per_sm": ("warps per SM", _FLOAT),
    "grid": ("grid", _SIDES),
    "block": ("block", _SIDES),
    "occupancy": ("est. achieved occupancy %", _FLOAT),
}
OPERATOR_ARGS = _record(_CAUSE, _OPERATOR, _COLLECTIVE)
DEVICE_ARGS = _record(_CAUSE, _DEVICE, _COLLECTIVE)
RUNTIME_ARGS = _record(_CAUSE, _CALL)
PYTHON_ARGS = _record(_CAUSE, _PYTHON)
ANY_ARGS = _record(_CAUSE, _DEVICE, _COLLECTIVE, _PYTHON, _OPERATOR)
# By category in lower case. What is not here is decoded as ANY_ARGS.
_ARGS_BY_CATEGORY = {
    "python_function": PYTHON_ARGS,
    **dict.fromkeys(("cpu_op", "operator"), OPERATOR_ARGS),
    **dict.fromkeys(("cuda_runtime", "runtime", "cuda_driver"), RUNTIME_ARGS),
    **dict.fromkeys(("kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset"), DEVICE_ARGS),
}
MEMORY_ARGS = _record(
    {
        "address": ("Addr", _WHOLE),
        "bytes": ("Bytes", _WHOLE),
        "device_type": ("Device Type", _WHOLE),
        "device": ("Device Id", _WHOLE),
        "allocated_bytes": ("Total Allocated", _WHOLE),
        "reserved_bytes": ("Total Reserved", _WHOLE),
    }
)
NAME_ARGS = _record({"name": ("name", (Any, None))})  # of a metadata entry: the name of a thread
_ALL_ARGS = (OPERATOR_ARGS, DEVICE_ARGS, RUNTIME_ARGS, PYTHON_ARGS, ANY_ARGS, MEMORY_ARGS, NAME_ARGS)
_ONE = {kind: msgspec.json.Decoder(kind) for kind in _ALL_ARGS}
_MANY = {kind: msgspec.json.Decoder(list.__class_getitem__(kind)) for kind in _ALL_ARGS}


def decode_args(kind: Any, raws: Sequence[msgspec.Raw]) -> list[Any]:
    """Arguments of many events as records of `kind`; what does not fit the types is made to fit or is missing."""
    try:
        return _MANY[kind].decode(b"[" + b",".join([raw or b"{}" for raw in raws]) + b"]")  # type: ignore[no-any-return]
    except DAMAGE:
        return [_decode_one(kind, raw) for raw in raws]


def _decode_one(kind: Any, raw: msgspec.Raw) -> Any:
    try:
        return _ONE[kind].decode(raw or b"{}")
    except DAMAGE:
        record = kind()
    value = first_value(bytes(raw))
    if isinstance(value, dict):
        for field in msgspec.structs.fields(kind):
            given = value.get(field.encode_name)
            if type(given) is float and given.is_integer():  # tools that keep columns with gaps write ids as 86.0
                given = int(given)
            if given is not None:
                with contextlib.suppress(*DAMAGE, OverflowError):
                    # through JSON, which raw arguments stay
                    setattr(record, field.name, msgspec.json.decode(msgspec.json.encode(given), type=field.type))
    return record


# Below, a float of microseconds with three decimals rounds to the right nanosecond: 2**43 us are 101 days, and the
# writer's base is at most three months old.
EXACT_MICROSECONDS = 2.0**43
_WHOLE_MICROSECONDS = 2.0**53
_US = 1000
_FAR_NS = 2 * LATEST_NS
_POINT = (ord(".") - ord("0")) % 256  # among digits, as bytes without a sign


def loses_nanoseconds(microseconds: Sequence[float]) -> bool:
    """Whether one of these floats has decimals that a float cannot hold."""
    times = np.fromiter(microseconds, np.float64, len(microseconds))
    far = times[np.abs(times) >= EXACT_MICROSECONDS]
    return bool((far != np.rint(far)).any())


def nanoseconds(values: Sequence[Any]) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Floats of microseconds, or their raw JSON, as nanoseconds, and which of them are usable. One kind at a time."""
    if len(values) and isinstance(values[0], msgspec.Raw):  # which numpy would take for text of a float
        return _exact(values)
    times = np.fromiter(values, np.float64, len(values))
    ok = np.abs(times) < _WHOLE_MICROSECONDS  # False for NaN too
    if not ok.all():
        times = np.where(ok, times, 0.0)
    whole = times.astype(np.int64)
    result = whole * _US + np.rint((times - whole) * _US).astype(np.int64)
    return result, ok & (np.abs(result) <= _FAR_NS)


def _exact(values: Sequence[Any]) -> tuple[Int64, npt.NDArray[np.bool_]]:
    usual = _three_decimals(values)
    if usual is not None:
        return usual, np.abs(usual) <= _FAR_NS
    exact = [_one(bytes(value)) for value in values]
    ok = np.fromiter((value is not None for value in exact), bool, len(exact))
    return np.array([value or 0 for value in exact], dtype=np.int64), ok


def _three_decimals(values: Sequence[Any]) -> Int64 | None:
    """Times since 1970 have as many digits each and three decimals: all at once, or None where they have not."""
    data = b"".join(values)
    width = len(data) // len(values)
    if width * len(values) != len(data) or not 5 <= width <= 20:
        return None
    digits = np.frombuffer(data, np.uint8).reshape(len(values), width) - np.uint8(ord("0"))
    if (digits[:, -4] != _POINT).any():
        return None
    digits = np.delete(digits, width - 4, axis=1)
    if (digits > 9).any():
        return None
    result = np.zeros(len(values), np.int64)
    for column in digits.T:
        result = result * 10 + column
    return result


def _one(text: bytes) -> int | None:
    """One JSON number or text of a number, rounded to nanoseconds where it has more decimals; None if it is none."""
    try:
        number = Decimal(text.decode("ascii").strip().strip('"').strip())
        if not number.is_finite() or number.adjusted() > 20:
            return None
        result = int((number * _US).to_integral_value())
    except (InvalidOperation, UnicodeDecodeError):
        return None
    return result if abs(result) <= _FAR_NS else None


COLLECTIVE_KEYS = (
    *("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size", "Process Group Name"),
    *("Process Group Description", "Process Group Ranks", "Process Group ID", "Src Rank", "Dst Rank", "Seq"),
    *("In split size", "Out split size", "Comms Id", "Global rank start", "Global rank stride", "Root Rank"),
)
_MAX_VALUE_BYTES = 2048
_NO_CODE = np.int32(-1)
MAX_NAME_CHARS = 4096
MAX_ARGUMENT_CHARS = 65_536  # shapes, types, call stacks
MAX_ID_CHARS = 200
CHUNK_ENTRIES = 65_536
_MOST_BEGUN = 100_000  # open slices that wait for their ends, each some 300 bytes; real tracks are tens deep
_NAMED_NEAR = 64  # open slices among which the one that an end names is looked for; overlaps are shallow


def collective_text(raw: msgspec.Raw) -> str | None:
    """The allow-listed arguments among `raw`, a JSON object; None where there is none that can be kept."""
    value = first_value(bytes(raw))
    if not isinstance(value, dict):
        return None
    kept = {key: value[key] for key in COLLECTIVE_KEYS if value.get(key) is not None}
    small = {key: item for key, item in kept.items() if len(msgspec.json.encode(item)) <= _MAX_VALUE_BYTES}
    return msgspec.json.encode(small).decode() if small else None


def _name_text(value: str) -> str:
    return clean(value[:MAX_NAME_CHARS])


def _json_text(value: bytes) -> str | None:
    """Raw JSON as compact text; missing where it is null, empty or absurdly long."""
    if len(value) > MAX_ARGUMENT_CHARS or value == b"null":
        return None
    try:
        return msgspec.json.format(value, indent=-1).decode() or None
    except DAMAGE:
        return None


def _track_text(ids: tuple[Any, Any]) -> str:
    """Process and thread as "pid/tid"; "?" for what is no id."""
    known = (str(part) if isinstance(part, int | str) and not isinstance(part, bool) else "?" for part in ids)
    return "/".join(clean(part[:MAX_ID_CHARS]) for part in known)


# How the distinct values of a column of texts are spelled; None is missing.
_SPELL: dict[str, Any] = {
    **dict.fromkeys(("category", "name", "kind"), _name_text),
    "track": _track_text,
    **dict.fromkeys(("shapes", "types"), _json_text),
    "call_stack": lambda value: clean(value[:MAX_ARGUMENT_CHARS]) or None,
    "collective": str,
}


class Codes:
    """Texts as codes in order of appearance; None and no bytes are -1. `whole` is the column."""

    kind = np.int32
    missing = _NO_CODE

    def __init__(self, spell: Any) -> None:
        self._spell = spell
        self._codes: defaultdict[Any, int] = defaultdict(count().__next__)
        self._codes[None] = self._codes[b""] = -1
        self._parts: list[Int32] = []

    def codes(self, values: Iterable[Any], size: int) -> Int32:
        """The codes of `size` hashable values, which are not appended yet."""
        return np.fromiter(map(self._codes.__getitem__, values), np.int32, size)

    def add(self, codes: Int32 | None, size: int) -> None:
        self._parts.append(np.broadcast_to(_NO_CODE, size) if codes is None else codes)

    def values(self) -> list[Any]:
        return list(self._codes)[2:]

    def whole(self) -> Text:
        spelled = [self._spell(value) for value in self.values()]
        codes = np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)
        known: dict[str, int] = {}
        final = [-1 if value is None else known.setdefault(value, len(known)) for value in spelled]
        if len(known) < len(final) and len(codes):  # spelled alike, or not at all
            codes = np.array([*final, -1], np.int32)[codes]
        return Text(list(known), codes)


class Numbers:
    """A column of integers, floats or truths that is filled in parts."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.missing = np.nan if kind is np.float64 else MISSING
        self._parts: list[Any] = []
        self._any = False

    def add(self, part: Any | None, size: int) -> None:
        self._parts.append(self._absent(size) if part is None else part)
        self._any |= part is not None

    def whole(self) -> Any:
        """The whole column. Where no row has a value, one value stands for all (its stride is 0)."""
        if not self._any:
            return self._absent(sum(map(len, self._parts)))
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)

    def _absent(self, size: int) -> Any:
        return np.broadcast_to(self.kind(self.missing) if size else np.empty(0, self.kind), size)


_KINDS: dict[Any, Any] = {Int64: np.int64, Float64: np.float64, npt.NDArray[np.bool_]: np.bool_}


def _empty(table: type[msgspec.Struct]) -> dict[str, Any]:
    """The columns of a part of a chunk, by the types of its fields, to be filled."""
    fields = msgspec.structs.fields(table)
    return {f.name: Codes(_SPELL[f.name]) if f.type is Text else Numbers(_KINDS[f.type]) for f in fields}


def _attribute(name: str, records: Sequence[Any]) -> Int64:
    """The integers that `records` hold under `name`; text of a number counts, anything else is MISSING."""
    try:
        return np.fromiter(map(attrgetter(name), records), np.int64, len(records))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter((_integer(getattr(record, name)) for record in records), np.int64, len(records))


def _integer(value: Any) -> int:
    if type(value) is int and 2**63 <= value < 2**64:
        return value - 2**64  # an address or handle: distinct ones stay distinct
    number = whole_number(value)
    return MISSING if number is None else number


# Columns of slices that arguments tell -> the fields that may hold them, of which the first that does counts.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*_PYTHON, *_OPERATOR, *_DEVICE, "collective") if name in Slices.__struct_fields__},
    "external_id": ("external_id", "external_old"),
    "blocks": ("grid",),
    "threads": ("block",),
    "shapes": ("shapes", "shapes_old"),
}
_MEMORY = tuple(name for name in MemoryEvents.__struct_fields__ if name not in ("track", "time_ns"))


class ChunkBuilder:
    """Collects entries; `take` hands out a chunk once there are enough. Counts what it cannot use."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}  # track -> name
        self.events = 0
        self.lost = 0
        self.unsupported = 0
        self._begun: defaultdict[Any, list[tuple[Any, int]]] = defaultdict(list)  # by track, innermost last
        self._waiting = 0  # how many all of these are
        self._reset()

    def _reset(self) -> None:
        self._slices, self._flows, self._memory = _empty(Slices), _empty(Flows), _empty(MemoryEvents)
        self._pending = 0

    def add(self, events: list[Any]) -> None:
        self.events += len(events)
        self._pending += len(events)
        slices = [event for event in events if event.ph == "X"]
        if slices:
            lengths, ok = nanoseconds([event.dur for event in slices])
            start, start_ok = nanoseconds([event.ts for event in slices])
            self._add_slices(slices, start, lengths, ok & start_ok)
        if len(slices) == len(events):
            return
        others = [event for event in events if event.ph != "X"]
        flows = [event for event in others if event.ph in ("s", "t", "f")]
        memory = [event for event in others if event.name == "[memory]" and event.ph in ("i", "I")]
        named = [event for event in others if event.ph == "M"]
        halves = [event for event in others if event.ph in ("B", "E")]
        self.unsupported += len(others) - len(flows) - len(memory) - len(named) - len(halves)
        if halves:
            self._add_halves(halves)
        if flows:
            self._add_flows(flows)
        if memory:
            self._add_memory(memory)
        if named:
            for event, args in zip(named, decode_args(NAME_ARGS, [event.args for event in named]), strict=True):
                if event.name == "thread_name" and isinstance(args.name, str):
                    self.threads[_track_text((event.pid, event.tid))] = _name_text(args.name)

    def full(self) -> bool:
        return self._pending >= CHUNK_ENTRIES

    def take(self) -> TraceChunk:
        parts = ((Slices, self._slices), (Flows, self._flows), (MemoryEvents, self._memory))
        whole: list[Any] = [
            table(**{name: column.whole() for name, column in columns.items()}) for table, columns in parts
        ]
        chunk = TraceChunk(*whole)
        self._reset()
        return chunk

    def _add(self, columns: dict[str, Any], events: list[Any], **values: Any) -> None:
        """Append the tracks of `events`, and `values` by column: numbers, or the texts of each."""
        size = len(events)
        ids = zip([event.pid for event in events], [event.tid for event in events], strict=True)
        for name, given in {"track": ids, **values}.items():
            column = columns[name]
            column.add(column.codes(given, size) if isinstance(column, Codes) else given, size)

    def _usable(self, events: list[Any], ok: npt.NDArray[np.bool_], *columns: Any) -> Any:
        """Those of `events`, and of `columns` beside them, that are `ok`; the others are lost."""
        if ok.all():
            return (events, *columns)
        self.lost += int(len(ok) - ok.sum())
        kept = [event for event, good in zip(events, ok.tolist(), strict=True) if good]
        return (kept, *(column[ok] for column in columns))

    def _add_flows(self, flows: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in flows])
        ids = _attribute("id", flows)
        flows, times, ids = self._usable(flows, ok & (ids != MISSING), times, ids)
        finish = np.fromiter(map("f".__eq__, [event.ph for event in flows]), np.bool_, len(flows))
        kinds = [event.cat or event.name for event in flows]
        self._add(self._flows, flows, kind=kinds, id=ids, finish=finish, time_ns=times)

    def _add_memory(self, events: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in events])
        events, times = self._usable(events, ok, times)
        args = decode_args(MEMORY_ARGS, [event.args for event in events])
        self._add(self._memory, events, time_ns=times, **{name: _attribute(name, args) for name in _MEMORY})

    def _add_halves(self, halves: list[Any]) -> None:
        """Slices told by two entries: an end is of what began last on its track, under its name where it has one. One
        without the other is lost.
        """
        whole: list[tuple[Any, int, int]] = []
        times, ok = nanoseconds([event.ts for event in halves])
        for event, time, usable in zip(halves, times.tolist(), ok.tolist(), strict=True):
            begun = self._begun[event.pid, event.tid]
            if usable and event.ph == "E" and begun:
                near = range(-1, -1 - min(len(begun), _NAMED_NEAR), -1)
                first, start = begun.pop(next((at for at in near if begun[at][0].name == event.name), -1))
                whole.append((first, start, time - start))
                self.lost -= 1
                self._waiting -= 1
                continue
            self.lost += 1
            if usable and event.ph == "B" and self._waiting < _MOST_BEGUN:
                self._waiting += 1
                event.args, event.ts, event.dur = event.args.copy(), None, None  # which would hold all of the stretch
                begun.append((event, time))
        if whole:
            events, starts, lengths = zip(*whole, strict=True)
            self._add_slices(list(events), np.array(starts), np.array(lengths), np.ones(len(whole), bool))

    def _add_slices(self, events: list[Any], start: Int64, duration: Int64, ok: npt.NDArray[np.bool_]) -> None:
        ok = ok & (duration >= 0) & (duration <= LONGEST_NS)
        ok &= np.fromiter([event.name is not None for event in events], np.bool_, len(events))
        events, start, duration = self._usable(events, ok, start, duration)
        names, categories = [event.name for event in events], [event.cat for event in events]
        self._add(self._slices, events, name=names, category=categories, start_ns=start, duration_ns=duration)
        category = self._slices["category"]
        codes = category.codes(categories, len(events))
        # The last for a missing category, whose code is -1.
        kinds = [*(_ARGS_BY_CATEGORY.get(each.lower(), ANY_ARGS) for each in category.values()), ANY_ARGS]
        filled: dict[str, Any] = {}
        for kind in set(kinds):
            at = np.flatnonzero(np.array([each is kind for each in kinds])[codes])
            if len(at):
                for name, values in self._arguments(kind, [events[i].args for i in at.tolist()]):
                    column = self._slices[name]
                    filled.setdefault(name, np.full(len(events), column.missing, column.kind))[at] = values
        for name in _ARGUMENTS:
            self._slices[name].add(filled.get(name), len(events))

    def _arguments(self, kind: Any, raws: list[msgspec.Raw]) -> Iterator[tuple[str, Any]]:
        """The columns that arguments of `kind` fill, with their values."""
        args = decode_args(kind, raws)
        for name, sources in _ARGUMENTS.items():
            column = self._slices[name]
            found = None
            for source in sources:
                if source in kind.__struct_fields__ and (found is None or (found == column.missing).any()):
                    values = self._values(column, source, args, raws)
                    found = values if found is None else np.where(found == column.missing, values, found)
            if found is not None and (isinstance(column, Numbers) or (found >= 0).any()):
                yield name, found

    def _values(self, column: Any, field: str, args: list[Any], raws: list[msgspec.Raw]) -> Any:
        given = map(attrgetter(field), args)
        if field == "collective":
            texts = [collective_text(raw) if each else None for raw, each in zip(raws, given, strict=True)]
            return column.codes(texts, len(args))
        if isinstance(column, Codes):
            return column.codes(given if field == "call_stack" else map(bytes, given), len(args))
        if field in ("grid", "block"):
            products = [0 if side is None else side[0] * side[1] * side[2] for side in given]
            return np.fromiter([p if 0 < p < 2**62 else MISSING for p in products], np.int64, len(products))
        if column.kind is np.float64:
            return np.array(list(given), np.float64)  # null is NaN
        return _attribute(field, args)
