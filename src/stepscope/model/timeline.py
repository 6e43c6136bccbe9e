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
    """A row of slices; `group` is the worker.

    depth: The most slices that lie above each other on the track.
    """

    key: str
    label: str
    group: str
    kind: TrackKind
    depth: int


class TimelineStep(Struct, frozen=True):
    """A step as the ruler shows it.

    step: Number of the step in its process.
    from_ns: When it begins, since the first instant of the run.
    to_ns: When it ends, since the first instant of the run.
    """

    step: int
    process: str
    from_ns: int
    to_ns: int
    kind: str


class TrackSlices(Struct, frozen=True):
    """Slices of one track in a window, one entry each in all lists, by depth and start.

    start (ns): When each begins, since the window's start; below 0 for one that began before it.
    duration (ns): How long each lasts; where several are drawn as one, from the first's start to the last's end.
    depth: Slices around it on its track.
    name: Which of the window's `names`; of merged slices that of the longest.
    kind: Which of the window's `kinds`; of merged slices that of the longest.
    id: Number of the slice, -1 where several are drawn as one.
    count: Slices drawn as this one: 1, or more where each was too thin to be seen.
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
    """What there is to draw between two moments.

    from_ns: Where the window begins, since the first instant of the run.
    to_ns: Where it ends.
    total: Slices with any part in the window, before those too thin to be seen are merged; to within a pixel at its
        borders.
    """

    from_ns: int
    to_ns: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    tracks: tuple[TrackSlices, ...]
    total: int
    notes: tuple[str, ...] = ()


class SliceFact(Struct, frozen=True):
    """One more thing that is known of a slice; `unit` is "" of texts.

    value (as stated beside it): What the trace or the journal says of the slice.
    """

    label: str
    value: int | float | str
    unit: str = ""


class SliceRef(Struct, frozen=True):
    """Another slice that has to do with the one shown.

    id: Number of the slice; holds for one reading of the run.
    start_ns: When it begins, since the first instant of the run.
    duration_ns: How long it lasts; 0 for an instant.
    """

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
    """All that is known of one slice. `stack` is innermost first; `launched` is cut, its full number in the notes.

    id: Number of the slice; holds for one reading of the run.
    start_ns: When it begins, since the first instant of the run.
    duration_ns: How long it lasts; 0 for an instant.
    self_ns: Duration without the slices directly inside it; missing of steps, phases and samples.
    step: The step it begins in, of a device slice the one its launch begins in; missing outside steps, and of samples.
    """

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
    """A slice whose name holds what was searched.

    id: Number of the slice; holds for one reading of the run.
    depth: Slices around it on its track.
    start_ns: When it begins, since the first instant of the run.
    duration_ns: How long it lasts; 0 for an instant.
    step: The step it begins in, of a device slice the one its launch begins in; missing outside steps, and of samples.
    """

    id: int
    name: str
    track: str
    depth: int
    start_ns: int
    duration_ns: int
    step: int | None


class SearchResult(Struct, frozen=True):
    """The first hits in order of time.

    total: Slices that were found, of which the first are listed.
    """

    total: int
    hits: tuple[SearchHit, ...]


class StepPhases(Struct, frozen=True):
    """Steps of one process and kind in order, thinned so that the longest stay. All sequences are equally long.

    steps: Numbers of the steps, thinned so that the longest stay.
    wall_ms: Wall time of each of them, on the host's clock.
    parts_ms: phase -> its time in each of them; `unattributed` is what no phase explains.
    total: Steps before thinning.
    """

    process: str
    kind: str
    steps: tuple[int, ...]
    wall_ms: tuple[float, ...]
    reasons: tuple[str, ...]
    parts_ms: dict[str, tuple[float | None, ...]]
    total: int


class StepDistribution(Struct, frozen=True):
    """How many steps of a kind take how long. `longer`: the last bin holds all steps above its lower edge.

    edges_ms: Edges of the bins, equally wide; the last bin also holds all longer steps.
    steady: Steady steps in each bin: the ones that statistics stand on.
    others: All other steps in each bin: warm-up, first batches, under a profiler, compiling.
    longest_ms: The longest step.
    """

    edges_ms: tuple[float, ...]  # one more than counts
    steady: tuple[int, ...]
    others: tuple[int, ...]
    longer: bool
    longest_ms: float


class ProcessSteps(Struct, frozen=True):
    """Steps of one kind of one process. Statistics are of steady steps; None without any.

    rank: Rank of the process.
    steps: All steps of the kind.
    steady: Of these, steady ones.
    mean_ms: Mean wall time of the steady steps of this process.
    median_ms: Median of the same.
    p95_ms: 95th percentile of the same: one step in twenty takes longer.
    longest_ms: The longest of all its steps, steady or not.
    """

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
    """Something the recorder noted in a step, with the time it took.

    ms: Time that the event took.
    """

    kind: str
    name: str | None
    ms: float


class LongStep(Struct, frozen=True):
    """A step among the longest.

    `phase` is the one that `phase_extra_ms` is of; None where phases are not known or none is longer than usual.
    `events` took the most time in the step, the longest first.

    step: Number of the step, counted from 0 in its process.
    wall_ms: Wall time of the step.
    extra_ms: The same above the median of the steady steps of this process and kind.
    phase_extra_ms: Of the phase that is longest above its own median, by how much.
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

    values (in the name): Readings, or the mean of those of a point's time; of counters the growth per second.
        docs/run_folder.md says what each metric is.
    """

    metric: str
    subject: str
    values: tuple[float | None, ...]


class Telemetry(Struct, frozen=True):
    """All series. Times are since the start of the run.

    time_s: Of each point, since the start of the run.
    bucket_s: How long a point stands for; missing where each is one reading.
    readings: Moments at which telemetry was read.
    dropped: Series of further processes or devices that are left out.
    step_time_s: When each step of the first training process began, since the start of the run.
    step_ms: Wall time of these steps.
    """

    time_s: tuple[float, ...]
    bucket_s: float | None
    series: tuple[TelemetrySeries, ...]
    readings: int
    dropped: int
    step_time_s: tuple[float, ...]
    step_ms: tuple[float, ...]
    step_process: str | None
    hosts: tuple[str, ...]
