"""Single entries of an event list as typed records: a lean event, and arguments by what the entry is.

Arguments stay raw until the kind of an event is known, so that only a kernel pays for the figures of kernels. An entry
whose types are not the usual ones is decoded again, loosely, and made usual; that costs the entries around it time
but no content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from stepscope.read.lenient import first_value
from stepscope.read.metadata import whole
from stepscope.read.trace import MISSING

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
    """A metadata entry: the name of a thread or process, or a process's labels."""

    name: Any = None
    labels: Any = None


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
    return whole(value) if kind == Whole else value
