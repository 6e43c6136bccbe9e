"""What a reader of traces yields, whatever the format: chunks of columns, and a summary once all chunks were taken.

A chunk is a stretch of the file of bounded size, so that memory does not grow with the trace. Every column of a part
has the same length; a missing integer is `MISSING`, a missing float NaN, a missing text code -1. Times are integer
nanoseconds since the trace's base; the base itself may stand behind the events, so it is in the summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

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


class TraceSource(Protocol):
    """A trace being read: take all of `chunks()`, then ask for `summary()`; both once."""

    def chunks(self) -> Iterator[TraceChunk]: ...

    def summary(self) -> TraceSummary: ...
