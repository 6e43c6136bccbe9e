"""What is said of many ranks: who holds the others up, why, where in the source, and what it costs."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Evidence, Place

# What keeps being late. "rotating": another rank in each step, by one cause; "global": all together.
LATE = ("rank", "host", "link", "stage", "rotating", "global")
NONE, NOT_ENOUGH = "none", "not_enough"
CAUSES = (
    "data",  # its loader
    "python",  # a line of Python between a step's device work
    "gc",  # Python's collections
    "compute",  # the same kernels take longer, at the same clocks
    "clock",  # a lower clock or power limit of its device
    "memory",  # allocator retries, swapping
    "other_processes",  # others on its cores or device
    "checkpoint",
    "sequence_length",  # more tokens in its batches
    "stage",  # its stage holds more layers than the others
    "link",  # transfers over it take longer
    "unknown",
)


class HostClock(Struct, frozen=True):
    """A host's clock against the reference host's, in one window of recording.

    window: First step of the window.
    offset_us: What its clock is ahead, in the middle of the window; missing where too little tells it.
    rate_ppm: How much faster it runs; missing where the window is too short.
    bound_us: The true offset lies within so much of `offset_us`; missing with it.
    calls (count): Collectives it was estimated from.
    reason: Why there is no offset, or what is odd about it; else empty.
    """

    host: str
    window: int
    offset_us: float | None
    rate_ppm: float | None
    bound_us: float | None
    calls: int
    reason: str = ""


class Straggler(Struct, frozen=True):
    """One thing that holds the others up.

    kind: Of LATE.
    ranks: The late ranks; of a rotating cause those that were late at all, most often first, 16 at most.
    hosts: Of those ranks.
    group: Id of the group whose transfers are slow; missing otherwise.
    stage: Number of the heavy pipeline stage; missing otherwise.
    cause: Of CAUSES.
    cause_source: What the cause is known by.
    place: The line of the cause, where stacks tell it.
    cost_ms: What a mean step would be shorter if this were as with the peers, by playing the steps again.
    excess_ms: Own work of the late ranks beyond that of their peers, in the steps in which they are late.
    share_of_steps: Part of the judged steps in which they, or this cause, came last.
    peers: Whom they were compared with, in words.
    evidence: Figures with their sources.
    """

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    cause: str
    cause_source: str
    cost_ms: float
    excess_ms: float
    share_of_steps: float
    peers: str
    group: str | None = None
    stage: int | None = None
    place: Place | None = None
    evidence: tuple[Evidence, ...] = ()


class RanksVerdict(Struct, frozen=True):
    """All that reduced tables tell of a run's ranks.

    verdict: The kind of the first straggler, "none", or "not_enough".
    reason: One sentence: why there is none, or what is missing to tell.
    stragglers: Largest cost first.
    ranks (count): Ranks that were judged.
    world_size (count): Ranks of the job; missing where unknown.
    missing: Ranks of which nothing was recorded; missing where the world's size is unknown.
    steps (count): Steady training steps that were judged.
    windowed_steps (count): Of them, or beside them, steps of windows, whose collectives were matched.
    step_ms: The mean steady step.
    least_ms: An effect of a rank smaller than this would not have been seen.
    layout: What is known of stages and slots, in words.
    clocks: Of hosts and windows.
    suspects: Ranks to look at in full, with a peer or two; 20 at most.
    slowdown (ratio): The mean step by that in which all ranks, stages and microbatches had the mean work of all, the
        steps played again; missing where too little of their work is known.
    """

    verdict: str
    reason: str
    stragglers: tuple[Straggler, ...]
    ranks: int
    world_size: int | None
    missing: tuple[int, ...] | None
    steps: int
    windowed_steps: int
    step_ms: float | None
    least_ms: float | None
    layout: str
    clocks: tuple[HostClock, ...] = ()
    suspects: tuple[int, ...] = ()
    slowdown: float | None = None


class RankMap(Struct, frozen=True):
    """How much longer each rank works than its peers, along the run.

    title: Of what: work of the host in every step, or of host and device in the steps of windows.
    source: What it is made from.
    ranks: Number of each row.
    hosts: Of each row.
    stages: Pipeline stage of each row; missing where no layout is known.
    steps: First step of each column.
    excess_ms: Rows of columns: the mean of the steps of a column, beyond the middle one of the peers; missing where
        nothing was recorded.
    """

    title: str
    source: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    stages: tuple[int, ...] | None
    steps: tuple[int, ...]
    excess_ms: tuple[tuple[float | None, ...], ...]


class RanksRead(Struct, frozen=True):
    """What a report on many ranks stands on, beside the reduced tables of all.

    hosts (count): Hosts whose reduced tables were read.
    in_full: Ranks whose own recording was read: those that the verdict points at, with a peer or two, or of a run
        without a straggler a few that are spread evenly.
    by_steps: Ranks that were looked at by the steps of their reduced tables, because their own recording is not here.
    absent (count): Ranks of the job of which neither a recording nor a reduced table is here; missing where the
        number of ranks is unknown.
    absent_ranks: Their numbers.
    not_reduced (count): Ranks that were recorded, but are in no reduced table, so nobody judged them.
    not_reduced_ranks: Their numbers.
    problems: Why a host's tables were left out, and what a host left out of its tables.
    """

    hosts: int
    in_full: tuple[int, ...]
    by_steps: tuple[int, ...]
    absent: int | None
    absent_ranks: str
    not_reduced: int
    not_reduced_ranks: str
    problems: tuple[str, ...]
