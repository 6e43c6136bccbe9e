"""Telemetry over time, all series on one axis, and the steps that ran meanwhile."""

from __future__ import annotations

from msgspec import Struct


class TelemetrySeries(Struct, frozen=True):
    """One figure of one subject: a training process ("rank-0"), "loader workers" together, a GPU, or a host.

    `values` are as many as the axis has points, None where nothing was read. Counters are given as growth per second.
    """

    metric: str
    subject: str
    values: tuple[float | None, ...]


class Telemetry(Struct, frozen=True):
    """All series. Times are since the start of the run.

    `bucket_s` is how long a point stands for, as the mean of the readings in it; None where each point is one reading.
    `dropped` counts series of further subjects that are left out.
    """

    time_s: tuple[float, ...]
    bucket_s: float | None
    series: tuple[TelemetrySeries, ...]
    readings: int
    dropped: int
    step_time_s: tuple[float, ...]  # when each step began
    step_ms: tuple[float, ...]
    step_process: str | None
    hosts: tuple[str, ...]
