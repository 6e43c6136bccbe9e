"""Which trace a figure is of: run, worker and span, in the words of the TensorBoard plugin."""

from __future__ import annotations

from msgspec import Struct


class SpanRef(Struct, frozen=True):
    """One trace file. `worker` is the file's name before its first dot, with its folder in front where two folders hold
    a worker of that name; of a run that stepscope recorded, the folder of the rank. `span` counts the worker's traces
    from 1 in order of the time in their names. `run` is the file's folder relative to what was given, "" where all
    traces lie in one. `rank` is what the trace says of itself: workers of different runs may have the same.
    """

    worker: str
    span: int
    rank: int
    process: str
    trace: str
    run: str = ""

    @property
    def label(self) -> str:
        return f"{self.worker}/span{self.span}"


class GpuProperties(Struct, frozen=True):
    """What a trace says of a device; None where it does not."""

    device: int
    name: str | None
    memory_bytes: int | None
    capability: str | None  # "7.0"
    multiprocessors: int | None
    max_threads_per_multiprocessor: int | None
    warp_size: int | None
