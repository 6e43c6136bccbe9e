"""Single entries of an event list as typed records: a lean event, and arguments by what the entry is.

Arguments stay raw until the kind of an event is known, so that only a kernel pays for the figures of kernels. An entry
whose types are not the usual ones is decoded again, loosely, and made usual; that costs the entries around it time
but no content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from itertools import count
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stepscope.read.event_list import first_value
from stepscope.read.text import LATEST_NS, LONGEST_NS, clean, whole_number
from stepscope.read.trace import MISSING, Float64, Flows, Int32, Int64, MemoryEvents, Slices, Text, TraceChunk

Id: TypeAlias = int | str
Whole: TypeAlias = int | str | None  # text and null are made usual later
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


class ExactEvent(msgspec.Struct, gc=False):
    """An entry whose time since 1970 would lose nanoseconds as a float."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Id = "?"
    tid: Id = "?"
    ts: msgspec.Raw = NO_RAW
    dur: float = NAN
    args: msgspec.Raw = NO_RAW
    id: Id | None = None


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


class LinkArgs(msgspec.Struct, gc=False):
    """What every kind may say about who caused it."""

    external_id: Whole = msgspec.field(default=MISSING, name="External id")
    external_old: Whole = msgspec.field(default=MISSING, name="external id")


class RuntimeArgs(LinkArgs, gc=False):
    """A call of the device's runtime or driver."""

    correlation: Whole = MISSING


class PythonArgs(LinkArgs, gc=False):
    """A Python function."""

    python_module: Whole = msgspec.field(default=MISSING, name="Python module id")


class OperatorArgs(LinkArgs, gc=False):
    """An operator on the host."""

    sequence: Whole = msgspec.field(default=MISSING, name="Sequence number")
    forward_thread: Whole = msgspec.field(default=MISSING, name="Fwd thread id")
    types: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input type")
    shapes: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Dims")
    shapes_old: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input dims")
    call_stack: str | None = msgspec.field(default=None, name="Call stack")
    collective: msgspec.Raw = msgspec.field(default=NO_RAW, name="Collective name")


class DeviceArgs(LinkArgs, gc=False):
    """A kernel, copy or memset on the device."""

    device: Whole = MISSING
    stream: Whole = MISSING
    correlation: Whole = MISSING
    bytes: Whole = MISSING
    registers: Whole = msgspec.field(default=MISSING, name="registers per thread")
    shared_memory: Whole = msgspec.field(default=MISSING, name="shared memory")
    blocks_per_sm: float | None = msgspec.field(default=NAN, name="blocks per SM")
    warps_per_sm: float | None = msgspec.field(default=NAN, name="warps per SM")
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    occupancy: float | None = msgspec.field(default=NAN, name="est. achieved occupancy %")
    collective: msgspec.Raw = msgspec.field(default=NO_RAW, name="Collective name")


class AnyArgs(DeviceArgs, gc=False):
    """Of a kind we do not know: everything that any kind may say."""

    python_module: Whole = msgspec.field(default=MISSING, name="Python module id")
    sequence: Whole = msgspec.field(default=MISSING, name="Sequence number")
    forward_thread: Whole = msgspec.field(default=MISSING, name="Fwd thread id")
    types: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input type")
    shapes: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Dims")
    shapes_old: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input dims")
    call_stack: str | None = msgspec.field(default=None, name="Call stack")


class MemoryArgs(msgspec.Struct, gc=False):
    """A `[memory]` instant."""

    address: Whole = msgspec.field(default=MISSING, name="Addr")
    bytes: Whole = msgspec.field(default=MISSING, name="Bytes")
    device_type: Whole = msgspec.field(default=MISSING, name="Device Type")
    device: Whole = msgspec.field(default=MISSING, name="Device Id")
    allocated_bytes: Whole = msgspec.field(default=MISSING, name="Total Allocated")
    reserved_bytes: Whole = msgspec.field(default=MISSING, name="Total Reserved")


class NameArgs(msgspec.Struct, gc=False):
    """A metadata entry: the name of a thread."""

    name: Any = None


# By category in lower case. What is not here is decoded as AnyArgs.
ARGS_BY_CATEGORY: dict[str, type[msgspec.Struct]] = {
    "python_function": PythonArgs,
    "cpu_op": OperatorArgs,
    "operator": OperatorArgs,
    "cuda_runtime": RuntimeArgs,
    "runtime": RuntimeArgs,
    "cuda_driver": RuntimeArgs,
    "kernel": DeviceArgs,
    "gpu_memcpy": DeviceArgs,
    "memcpy": DeviceArgs,
    "gpu_memset": DeviceArgs,
    "memset": DeviceArgs,
}
_KINDS: tuple[Any, ...] = (PythonArgs, OperatorArgs, RuntimeArgs, DeviceArgs, AnyArgs, MemoryArgs, NameArgs)
_ONE: dict[Any, Any] = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}
_MANY: dict[Any, Any] = {kind: msgspec.json.Decoder(list.__class_getitem__(kind)) for kind in _KINDS}
_DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_args(kind: type[msgspec.Struct], raws: Sequence[msgspec.Raw]) -> list[Any]:
    """Arguments of many events as records of `kind`; what does not fit the types is made to fit or is missing."""
    try:
        return _MANY[kind].decode(b"[" + b",".join([raw or b"{}" for raw in raws]) + b"]")  # type: ignore[no-any-return]
    except _DAMAGE:
        return [_decode_one(kind, raw) for raw in raws]


def _decode_one(kind: type[msgspec.Struct], raw: msgspec.Raw) -> Any:
    try:
        return _ONE[kind].decode(raw or b"{}")
    except _DAMAGE:
        record = kind()
    value = first_value(bytes(raw))
    if isinstance(value, dict):
        for field in msgspec.structs.fields(kind):
            if field.encode_name in value:
                fitted = _fit(field.type, value[field.encode_name])
                if fitted is not None:
                    setattr(record, field.name, fitted)
    return record


def _fit(kind: Any, value: Any) -> Any:
    if kind is msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(value))
    if kind == float | None:
        return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
    if kind == str | None:
        return value if isinstance(value, str) else None
    if kind == tuple[int, int, int] | None:
        sides = value if isinstance(value, list) and len(value) == 3 else []
        return tuple(sides) if sides and all(type(side) is int for side in sides) else None
    return whole_number(value) if kind == Whole else value


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
    texts = list(map(bytes, values))
    exact = [_one(text) for text in texts]
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
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Process Group ID",
    "Src Rank",
    "Dst Rank",
    "Seq",
    "In split size",
    "Out split size",
    "Comms Id",
    "Global rank start",
    "Global rank stride",
    "Root Rank",
)
_MAX_VALUE_BYTES = 2048


def collective_text(raw: Any) -> str | None:
    """The allow-listed arguments among `raw`, a JSON object; None where there is none that can be kept."""
    value = first_value(bytes(raw))
    if not isinstance(value, dict):
        return None
    kept = {key: value[key] for key in COLLECTIVE_KEYS if value.get(key) is not None}
    small = {key: item for key, item in kept.items() if len(msgspec.json.encode(item)) <= _MAX_VALUE_BYTES}
    return msgspec.json.encode(small).decode() if small else None


_NO_CODE = np.int32(-1)
MAX_NAME_CHARS = 4096
MAX_ARGUMENT_CHARS = 65_536  # shapes, types, call stacks
MAX_ID_CHARS = 200


class Codes:
    """Values to codes in order of appearance; None and no bytes are -1."""

    def __init__(self) -> None:
        self._codes: defaultdict[Any, int] = defaultdict(count().__next__)
        self._codes[None] = self._codes[b""] = -1
        self._parts: list[Int32] = []

    def add(self, values: Iterable[Any], size: int) -> Int32:
        """Append `size` hashable values; returns their codes."""
        part = self.codes(values, size)
        self._parts.append(part)
        return part

    def add_codes(self, codes: Int32 | None, size: int) -> None:
        """Append `size` codes that `codes` gave, or as many missing values."""
        self._parts.append(np.broadcast_to(_NO_CODE, size) if codes is None else codes)

    def codes(self, values: Iterable[Any], size: int) -> Int32:
        """The codes of `size` hashable values, which are not appended yet."""
        return np.fromiter(map(self._codes.__getitem__, values), np.int32, size)

    def values(self) -> list[Any]:
        return list(self._codes)[2:]

    def text(self, spell: Any) -> Text:
        """The column, with every distinct value spelled by `spell` (which may return None for missing)."""
        spelled = [spell(value) for value in self.values()]
        codes = np.concatenate(self._parts) if self._parts else np.empty(0, np.int32)
        known: dict[str, int] = {}
        final = [-1 if value is None else known.setdefault(value, len(known)) for value in spelled]
        if len(known) < len(final) and len(codes):  # spelled alike, or not at all
            codes = np.array([*final, -1], np.int32)[codes]
        return Text(list(known), codes)


def name_text(value: str) -> str:
    """A name that can be stored: valid Unicode of bounded length."""
    return clean(value[:MAX_NAME_CHARS])


def argument_text(value: str) -> str | None:
    """A long text, or missing where it has no sensible length."""
    return clean(value[:MAX_ARGUMENT_CHARS]) or None


def json_text(value: bytes) -> str | None:
    """Raw JSON as compact text; missing where it is null, empty or absurdly long."""
    if len(value) > MAX_ARGUMENT_CHARS or value == b"null":
        return None
    try:
        return msgspec.json.format(value, indent=-1).decode() or None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def track_text(ids: tuple[Any, Any]) -> str:
    """ "pid/tid"."""
    return "/".join(id_text(part) for part in ids)


def id_text(value: Any) -> str:
    """A process or thread id as text; "?" for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return "?"
    return clean(str(value)[:MAX_ID_CHARS])


class Numbers:
    """An integer or float column that is filled in parts."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._missing = np.nan if kind is np.float64 else MISSING
        self._parts: list[Any] = []
        self._any = False

    def add(self, part: Any) -> None:
        self._parts.append(part)
        self._any = True

    def add_missing(self, size: int) -> None:
        self._parts.append(self._absent(size))

    def array(self) -> Any:
        """The whole column. Where no row has a value, one value stands for all (its stride is 0)."""
        if not self._any:
            return self._absent(sum(map(len, self._parts)))
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)

    def _absent(self, size: int) -> Any:
        return np.broadcast_to(self._kind(self._missing) if size else np.empty(0, self._kind), size)


def integers(values: Sequence[Any]) -> Int64:
    """Whole numbers as int64; text of a number counts, anything else is MISSING."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_integer, values), np.int64, len(values))


def _integer(value: Any) -> int:
    if type(value) is int and 2**63 <= value < 2**64:
        return value - 2**64 if value > 2**63 else MISSING  # an address or handle: distinct ones stay distinct
    number = whole_number(value)
    return MISSING if number is None else number


def attribute(name: str, records: Sequence[Any]) -> Int64:
    """The integers that `records` hold under `name`."""
    try:
        return np.fromiter(map(attrgetter(name), records), np.int64, len(records))
    except (TypeError, ValueError, OverflowError):
        return integers([getattr(record, name) for record in records])


def decimals(name: str, records: Sequence[Any]) -> Float64:
    """The floats that `records` hold under `name`; null is NaN."""
    return np.array([getattr(record, name) for record in records], dtype=np.float64)


def volumes(sides: Sequence[tuple[int, int, int] | None]) -> Int64:
    """The product of three sides, where there are any and it is no absurd number."""
    products = [MISSING if side is None else side[0] * side[1] * side[2] for side in sides]
    return np.fromiter([p if 0 < p < 2**62 else MISSING for p in products], np.int64, len(products))


CHUNK_ENTRIES = 65_536
_FLOW_PHASES = frozenset("stf")
_INSTANT_PHASES = frozenset("iI")
_INTEGERS = (
    "correlation", "external_id", "sequence", "forward_thread", "device", "stream", "bytes", "python_module", "blocks",
    "threads", "registers", "shared_memory",
)  # fmt: skip
_FLOATS = ("blocks_per_sm", "warps_per_sm", "occupancy")
_TEXTS = ("shapes", "types", "call_stack", "collective")
_MEMORY = ("address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
_DERIVED = {"blocks": "grid", "threads": "block"}


def _ids(events: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip([event.pid for event in events], [event.tid for event in events], strict=True)


class ChunkBuilder:
    """Collects entries; `take` hands out a chunk once there are enough. Counts what it cannot use."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}  # track -> name
        self.events = 0
        self.lost = 0
        self.unsupported = 0
        self._reset()

    def _reset(self) -> None:
        self._slices = _SliceColumns()
        self._flows: dict[str, Any] = {
            "kind": Codes(), "id": Numbers(np.int64), "finish": Numbers(np.bool_), "track": Codes(),
            "time_ns": Numbers(np.int64),
        }  # fmt: skip
        self._memory: dict[str, Any] = {name: Numbers(np.int64) for name in ("time_ns", *_MEMORY)}
        self._memory["track"] = Codes()
        self._pending = 0

    def add(self, events: list[Any]) -> None:
        """Sort entries by what they are and append them."""
        self.events += len(events)
        self._pending += len(events)
        slices = [event for event in events if event.ph == "X"]
        if slices:
            self.lost += self._slices.add(slices)
        if len(slices) == len(events):
            return
        others = [event for event in events if event.ph != "X"]
        flows = [event for event in others if event.ph in _FLOW_PHASES]
        if flows:
            self._add_flows(flows)
        if len(flows) == len(others):
            return
        memory = [event for event in others if event.name == "[memory]" and event.ph in _INSTANT_PHASES]
        named = [event for event in others if event.ph == "M"]
        self.unsupported += len(others) - len(flows) - len(memory) - len(named)
        if memory:
            self._add_memory(memory)
        if named:
            for event, args in zip(named, decode_args(NameArgs, [event.args for event in named]), strict=True):
                if event.name == "thread_name" and isinstance(args.name, str):
                    self.threads[track_text((event.pid, event.tid))] = name_text(args.name)

    def full(self) -> bool:
        return self._pending >= CHUNK_ENTRIES

    def take(self) -> TraceChunk:
        """Everything collected since the last one."""
        flows = self._flows
        memory = self._memory
        chunk = TraceChunk(
            self._slices.finish(),
            Flows(
                kind=flows["kind"].text(name_text),
                id=flows["id"].array(),
                finish=flows["finish"].array(),
                track=flows["track"].text(track_text),
                time_ns=flows["time_ns"].array(),
            ),
            MemoryEvents(
                track=memory["track"].text(track_text),
                **{name: column.array() for name, column in memory.items() if name != "track"},
            ),
        )
        self._reset()
        return chunk

    def _add_flows(self, flows: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in flows])
        ids = integers([event.id for event in flows])
        ok &= ids != MISSING
        flows, times, ids = self._keep(flows, ok, times, ids)
        self._flows["kind"].add([event.cat or event.name for event in flows], len(flows))
        self._flows["id"].add(ids)
        self._flows["finish"].add(np.fromiter(map("f".__eq__, [event.ph for event in flows]), np.bool_, len(flows)))
        self._flows["track"].add(_ids(flows), len(flows))
        self._flows["time_ns"].add(times)

    def _add_memory(self, events: list[Any]) -> None:
        times, ok = nanoseconds([event.ts for event in events])
        events, times = self._keep(events, ok, times)
        args = decode_args(MemoryArgs, [event.args for event in events])
        self._memory["track"].add(_ids(events), len(events))
        self._memory["time_ns"].add(times)
        for name in _MEMORY:
            self._memory[name].add(attribute(name, args))

    def _keep(self, events: list[Any], ok: npt.NDArray[np.bool_], *columns: Any) -> Any:
        if ok.all():
            return (events, *columns)
        self.lost += int(len(ok) - ok.sum())
        kept = [event for event, good in zip(events, ok.tolist(), strict=True) if good]
        return (kept, *(column[ok] for column in columns))


class _SliceColumns:
    """The columns of `Slices` while they grow."""

    def __init__(self) -> None:
        self._category = Codes()
        self._name = Codes()
        self._track = Codes()
        self._start = Numbers(np.int64)
        self._duration = Numbers(np.int64)
        self._numbers = {name: Numbers(np.int64) for name in _INTEGERS}
        self._numbers |= {name: Numbers(np.float64) for name in _FLOATS}
        self._texts = {name: Codes() for name in _TEXTS}
        self._kinds: list[type[msgspec.Struct]] = []  # of the arguments, by category code

    def add(self, events: list[Any]) -> int:
        """Append slices; returns how many had no usable name or time."""
        start, ok = nanoseconds([event.ts for event in events])
        duration, duration_ok = nanoseconds([event.dur for event in events])
        ok &= duration_ok & (duration >= 0) & (duration <= LONGEST_NS)
        names = [event.name for event in events]
        if None in names:
            ok &= np.fromiter((name is not None for name in names), np.bool_, len(names))
        lost = int(len(ok) - ok.sum())
        if lost:
            events = [event for event, good in zip(events, ok.tolist(), strict=True) if good]
            start, duration, names = start[ok], duration[ok], [event.name for event in events]
        size = len(events)
        self._start.add(start)
        self._duration.add(duration)
        self._name.add(names, size)
        self._track.add(_ids(events), size)
        codes = self._category.add([event.cat for event in events], size)
        self._add_arguments(events, codes, size)
        return lost

    def _add_arguments(self, events: list[Any], codes: Any, size: int) -> None:
        known = self._category.values()
        for category in known[len(self._kinds) :]:
            self._kinds.append(ARGS_BY_CATEGORY.get(category.lower(), AnyArgs))
        # The last for a missing category, whose code is -1.
        kinds: list[type[msgspec.Struct]] = [*self._kinds, AnyArgs]
        columns = _Part(size, self._texts)
        for kind in set(kinds):
            wanted = np.array([each is kind for each in kinds])
            at = np.flatnonzero(wanted[codes])
            if len(at):
                columns.fill(kind, at, [events[i].args for i in at.tolist()])
        filled: dict[str, Any] = {**columns.integers, **columns.floats}
        for name, column in self._numbers.items():
            if name in filled:
                column.add(filled[name])
            else:
                column.add_missing(size)
        for name, text in self._texts.items():
            text.add_codes(columns.texts.get(name), size)

    def finish(self) -> Slices:
        numbers = {name: column.array() for name, column in self._numbers.items()}
        return Slices(
            category=self._category.text(name_text),
            name=self._name.text(name_text),
            track=self._track.text(track_text),
            start_ns=self._start.array(),
            duration_ns=self._duration.array(),
            shapes=self._texts["shapes"].text(json_text),
            types=self._texts["types"].text(json_text),
            call_stack=self._texts["call_stack"].text(argument_text),
            collective=self._texts["collective"].text(str),
            **numbers,
        )


class _Part:
    """The argument columns of one stretch of slices, filled group by group."""

    def __init__(self, size: int, codes: dict[str, Codes]) -> None:
        self.size = size
        self.integers: dict[str, Int64] = {}
        self.floats: dict[str, Any] = {}
        self.texts: dict[str, Int32] = {}
        self._codes = codes

    def fill(self, kind: type[msgspec.Struct], at: Int64, raws: list[msgspec.Raw]) -> None:
        """Decode the arguments `raws` of the slices `at` as `kind` and put them into the columns."""
        args = decode_args(kind, raws)
        fields = set(kind.__struct_fields__)
        for name in _INTEGERS:
            source = _DERIVED.get(name, name)
            if source in fields:
                values = volumes([getattr(a, source) for a in args]) if name in _DERIVED else attribute(name, args)
                if name == "external_id" and (values == MISSING).any():
                    values = np.where(values == MISSING, attribute("external_old", args), values)
                self.integers.setdefault(name, np.full(self.size, MISSING, np.int64))[at] = values
        for name in _FLOATS:
            if name in fields:
                self.floats.setdefault(name, np.full(self.size, np.nan))[at] = decimals(name, args)
        if "shapes" in fields:
            shapes = self._raw("shapes", "shapes", args)
            if (shapes < 0).any():
                shapes = np.where(shapes < 0, self._raw("shapes", "shapes_old", args), shapes)
            self._put("shapes", at, shapes)
            self._put("types", at, self._raw("types", "types", args))
            stacks = map(attrgetter("call_stack"), args)
            self._put("call_stack", at, self._codes["call_stack"].codes(stacks, len(args)))
        if "collective" in fields:
            self._collectives(at, args, raws)

    def _raw(self, name: str, field: str, args: list[Any]) -> Int32:
        return self._codes[name].codes(map(bytes, map(attrgetter(field), args)), len(args))

    def _put(self, name: str, at: Int64, codes: Int32) -> None:
        if (codes >= 0).any():
            self.texts.setdefault(name, np.full(self.size, -1, np.int32))[at] = codes

    def _collectives(self, at: Int64, args: list[Any], raws: list[msgspec.Raw]) -> None:
        given = [args_of_one.collective for args_of_one in args]
        if any(given):
            texts = [collective_text(raws[i]) if each else None for i, each in enumerate(given)]
            self._put("collective", at, self._codes["collective"].codes(texts, len(texts)))
