"""What pages draw over time: the timeline's slices, steps one by one, and telemetry.

Times of the timeline are ns since the first instant of the run (`TrackSlices`: since the window's start), so that they
stay exact in languages whose numbers hold 53 bits. Names and kinds are numbers of lists, because a window repeats them.
Of steps one by one, `reason` is "steady", or why a step counts for no statistics: "warmup", "first_batch", "window" or
"compile".
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from stepscope.model.findings import Place

TrackKind = Literal["steps", "phases", "thread", "stream", "worker"]

# What a slice is; decides its colour. "sampled" and "waiting" are what a sampled process did, "sync" waits for a
# device.
KINDS = (
    *("user_function", "library_function", "operator", "runtime", "sync", "annotation"),
    *("kernel", "communication", "copy", "fill", "sampled", "waiting"),
    *("step", "eval_step", "data_wait", "before_forward", "forward", "backward", "optimizer", "other"),
)


class TimelineTrack(Struct, frozen=True):
    """A row of slices; `depth` is how many lie above each other at most, `group` the worker."""

    key: str
    label: str
    group: str
    kind: TrackKind
    depth: int


class TimelineStep(Struct, frozen=True):
    """A step as the ruler shows it."""

    step: int
    process: str
    from_ns: int
    to_ns: int
    kind: str


class TrackSlices(Struct, frozen=True):
    """Slices of one track in a window, one entry each in all lists, by depth and start.

    Where `count` slices too thin to be seen are drawn as one, `id` is -1 and name and kind are those of the longest.
    """

    key: str
    start: tuple[int, ...]
    duration: tuple[int, ...]
    depth: tuple[int, ...]
    name: tuple[int, ...]
    kind: tuple[int, ...]
    id: tuple[int, ...]
    count: tuple[int, ...]


class TimelineWindow(Struct, frozen=True):
    """What there is to draw between two moments; `total` counts its slices before thinning."""

    from_ns: int
    to_ns: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    tracks: tuple[TrackSlices, ...]
    total: int
    notes: tuple[str, ...] = ()


class SliceFact(Struct, frozen=True):
    """One more thing that is known of a slice; `unit` is "" of texts."""

    label: str
    value: int | float | str
    unit: str = ""


class SliceRef(Struct, frozen=True):
    """Another slice that has to do with the one shown."""

    id: int
    name: str
    start_ns: int
    duration_ns: int


class StackPlace(Struct, frozen=True):
    """A frame; `guess` marks code of a library that stands in for the user's, `code` is the source line."""

    place: Place
    guess: bool = False
    code: str | None = None


class SliceDetail(Struct, frozen=True):
    """All that is known of one slice. `stack` is innermost first; `launched` is cut, its full number in the notes."""

    id: int
    name: str
    category: str
    track: str
    start_ns: int
    duration_ns: int
    self_ns: int | None
    step: int | None
    facts: tuple[SliceFact, ...] = ()
    operator: SliceRef | None = None
    launched: tuple[SliceRef, ...] = ()
    place: StackPlace | None = None
    stack: tuple[StackPlace, ...] = ()
    notes: tuple[str, ...] = ()


class SearchHit(Struct, frozen=True):
    """A slice whose name holds what was searched."""

    id: int
    name: str
    track: str
    depth: int
    start_ns: int
    duration_ns: int
    step: int | None


class SearchResult(Struct, frozen=True):
    """The first hits in order of time; `total` counts all."""

    total: int
    hits: tuple[SearchHit, ...]


class StepPhases(Struct, frozen=True):
    """Steps of one process and kind in order, thinned so that the longest stay. All sequences are equally long.

    `parts_ms` is by phase, "unattributed" what no phase explains; empty where no phase is known.
    """

    process: str
    kind: str
    steps: tuple[int, ...]
    wall_ms: tuple[float, ...]
    reasons: tuple[str, ...]
    parts_ms: dict[str, tuple[float | None, ...]]
    total: int  # steps before thinning


class StepDistribution(Struct, frozen=True):
    """How many steps of a kind take how long: `counts[i]` lie from `edges_ms[i]` to the next edge.

    Bins are equally wide, but the last one also holds everything `longer`: all above its lower edge.
    """

    edges_ms: tuple[float, ...]  # one more than counts
    steady: tuple[int, ...]
    others: tuple[int, ...]  # of all other reasons
    longer: bool
    longest_ms: float


class ProcessSteps(Struct, frozen=True):
    """Steps of one kind of one process. Statistics are of steady steps; None without any."""

    process: str
    rank: int | None
    kind: str
    steps: int
    steady: int
    mean_ms: float | None
    median_ms: float | None
    p95_ms: float | None
    longest_ms: float


class StepEvent(Struct, frozen=True):
    """Something the recorder noted in a step, with the time it took."""

    kind: str
    name: str | None
    ms: float


class LongStep(Struct, frozen=True):
    """A step among the longest. `extra_ms` is above the median of its process and kind.

    `phase` is the one that is longest above its own median, by `phase_extra_ms`; None where phases are not known or
    none is longer than usual. `events` took the most time in the step, the longest first.
    """

    process: str
    step: int
    wall_ms: float
    extra_ms: float
    reason: str
    phase: str | None
    phase_extra_ms: float | None
    events: tuple[StepEvent, ...]


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
