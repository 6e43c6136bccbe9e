"""Timelines of traces written by hand, for the tests of windows, details and searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.timeline import Timeline, timeline
from stepscope.model.timeline import TimelineWindow
from tests.analyze.traces import US, Slices, tables
from tests.builders import make_tables

PROJECT = "/home/user/project"
SOURCE = """def main(model, x):
    for _ in range(3):
        y = model(x)
    return y


def forward(x, w):
    y = x @ w
    return y.relu()
"""
MAIN, FORWARD = f"{PROJECT}/train.py(1): main", f"{PROJECT}/train.py(7): forward"


class Drawn(NamedTuple):
    """A slice of a window; times in µs since the run's first instant."""

    track: str
    depth: int
    name: str
    kind: str
    start_us: float
    end_us: float
    id: int
    count: int


def drawn(window: TimelineWindow) -> list[Drawn]:
    """The slices of a window one by one."""
    return [
        Drawn(
            track.key,
            depth,
            window.names[name],
            window.kinds[kind],
            (window.from_ns + start) / US,
            (window.from_ns + start + duration) / US,
            identifier,
            count,
        )
        for track in window.tracks
        for start, duration, depth, name, kind, identifier, count in zip(
            track.start, track.duration, track.depth, track.name, track.kind, track.id, track.count, strict=True
        )
    ]


def of_traces(*traces: Slices, sources: Mapping[str, str] | None = None, **more: Any) -> Timeline:
    """The timeline of traces and further rows (`steps`, `stretches`)."""
    return timeline(Context(tables(*traces, **more), sources or {f"{PROJECT}/train.py": SOURCE}))


def of_rows(**rows: Any) -> Timeline:
    """The timeline of a run without a trace."""
    return timeline(Context(make_tables(**rows)))


def a_step() -> Slices:
    """A step of 1,000 µs: main > forward > mm > launch, and the kernel of the launch at 500 µs, for 200 µs."""
    made = Slices()
    main = made.add("python_function", MAIN, 0, 1_000)
    forward = made.add("python_function", FORWARD, 100, 600, parent=main, frame=main, depth=1)
    mm = made.add("cpu_op", "aten::matmul", 150, 100, parent=forward, frame=forward, depth=2, shapes="[[2, 2], [2, 2]]")
    launch = made.add("cuda_runtime", "cudaLaunchKernel", 200, 10, parent=mm, frame=forward, depth=3)
    made.add("cuda_runtime", "cudaDeviceSynchronize", 800, 100, parent=main, frame=main, depth=1)
    device = {"track": "0/7", "stream": 7, "device": 0}
    kernel = made.add("kernel", "gemm_f16", 500, 200, **device, blocks=64, threads=256, step=None)
    made.add("gpu_memcpy", "Memcpy HtoD", 750, 50, **device, bytes=4_000)
    made.links.append(
        {
            "process": "rank-0",
            "trace": made.events[0]["trace"],
            "event": kernel,
            "launch": launch,
            "operator": mm,
            "frame": forward,
            "method": "correlation",
            "state": "linked",
        }
    )
    return made
