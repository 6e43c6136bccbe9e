"""What is said of many ranks: who holds the others up, why, where in the source, and what it costs; and of a hang."""

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

    window (step): First step of the window.
    offset_us: What its clock is ahead, in the middle of the window; missing where too little tells it.
    rate_ppm: How much faster it runs; missing where the window is too short.
    bound_us: The true offset lies within so much of `offset_us`; missing with it.
    calls (count): Collectives it was estimated from.
    reason (text): Why there is no offset, or what is odd about it; else empty.
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

    kind (text): What is late: rank, host, link, stage; rotating is another rank in each step, global all together.
    ranks (numbers): The late ranks; of a rotating cause those that were late at all, most often first, 16 at most.
    hosts (names): Of those ranks.
    group (text): Id of the group whose transfers are slow; missing otherwise.
    stage (number): Number of the heavy pipeline stage; missing otherwise.
    cause (text): By what: data, python, gc, compute, clock, memory, other_processes, checkpoint, sequence_length,
        stage, link or unknown.
    cause_source (text): What the cause is known by.
    place (line): The line of the cause, where stacks tell it.
    cost_ms: What a mean step would be shorter if this were as with the peers, by playing the steps again.
    excess_ms: Own work of the late ranks beyond that of their peers, in the steps in which they are late.
    share_of_steps: Part of the judged steps in which they, or this cause, came last.
    peers (text): Whom they were compared with, in words.
    evidence (list): Figures with their sources.
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

    verdict (text): The kind of the first straggler, "none", or "not_enough".
    reason (text): One sentence: why there is none, or what is missing to tell.
    stragglers (list): Largest cost first.
    ranks (count): Ranks that were judged.
    world_size (count): Ranks of the job; missing where unknown.
    missing (numbers): Ranks of which nothing was recorded; missing where the world's size is unknown.
    steps (count): Steady training steps that were judged.
    windowed_steps (count): Of them, or beside them, steps of windows, whose collectives were matched.
    step_ms: The mean steady step.
    least_ms: An effect of a rank smaller than this would not have been seen.
    layout (text): What is known of stages and slots, in words.
    clocks (list): Of hosts and windows.
    suspects (numbers): Ranks to look at in full, with a peer or two; 20 at most.
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


class RankMap(Struct, frozen=True, kw_only=True):
    """How much longer each rank works than its peers, along the run.

    of (text): Whose work: the host's, in every step, or the device's, in the steps of windows.
    title (text): The same as a heading.
    source (text): What it is made from.
    ranks (numbers): Number of each row.
    hosts (names): Of each row.
    stages (numbers): Pipeline stage of each row; missing where no layout is known.
    steps (numbers): First step of each column.
    excess_ms: Rows of columns: the mean of the steps of a column, beyond the middle one of the peers; missing where
        nothing was recorded.
    notable_ms: The smallest effect that a verdict would name: less stays pale.
    """

    of: str  # "host" | "device"
    title: str
    source: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    stages: tuple[int, ...] | None
    steps: tuple[int, ...]
    excess_ms: tuple[tuple[float | None, ...], ...]
    notable_ms: float | None = None


class RanksRead(Struct, frozen=True):
    """What a report on many ranks stands on, beside the reduced tables of all.

    `judged_hosts` are the names of those hosts.

    hosts (count): Hosts whose reduced tables were read.
    in_full (numbers): Ranks whose own recording was read: those that the verdict points at, with a peer or two, or of
        a run without a straggler a few that are spread evenly.
    by_steps (numbers): Ranks that were looked at by the steps of their reduced tables, because their own recording is
        not here.
    absent (count): Ranks of the job of which neither a recording nor a reduced table is here; missing where the
        number of ranks is unknown.
    absent_ranks (text): Their numbers.
    not_reduced (count): Ranks that were recorded, but are in no reduced table, so nobody judged them.
    not_reduced_ranks (text): Their numbers.
    problems (texts): Why a host's tables were left out, and what a host left out of its tables.
    """

    hosts: int
    in_full: tuple[int, ...]
    by_steps: tuple[int, ...]
    absent: int | None
    absent_ranks: str
    not_reduced: int
    not_reduced_ranks: str
    problems: tuple[str, ...]
    judged_hosts: tuple[str, ...] = ()


# Of a hang: the call at which ranks part, who is not there, where they stand, and by which source.
MISSING = "missing"  # a rank, of which there is a dump, did not make a call that others wait in
MISMATCH = "mismatch"  # ranks made another call, or one of other sizes or types, at the same number
CROSSED = "crossed"  # groups are entered in different orders: each waits for the other
NO_DUMP = "no_dump"  # all of whom there is a dump are there: it is one of those of whom there is none
ENDED = "ended"  # a rank that others wait for is gone
STUCK = "stuck"  # all came and made the same call, which had not ended
KINDS = (MISSING, MISMATCH, CROSSED, NO_DUMP, ENDED, STUCK)


class PendingCall(Struct, frozen=True):
    """A call in which ranks wait, or in which they parted.

    number: Its number in this table, by which other rows name it.
    group (text): Name of the process group, with its description.
    size (count): Ranks of the group; missing where no dump tells them.
    sequence: Its number among the collective calls of the group; missing of sends and receives.
    call (text): The operation, of sends and receives with both ranks.
    sizes (text): Shapes of its inputs and outputs, as most ranks gave them.
    dtypes (text): Their types.
    waiting (count): Ranks that made the call and had not come out of it.
    waiting_ranks (text): Which.
    absent (count): Ranks with a dump that did not make the call.
    absent_ranks (text): Which.
    no_dump (count): Ranks of the group without a dump.
    no_dump_ranks (text): Which.
    role (text): "cause", or "follows" where those who are absent wait in another call.
    follows (text): Numbers of the calls that it waits for.
    place (text): Line of the user's code that made it, as most ranks have it.
    since_ns: When the first rank made it; missing where nothing tells.
    """

    number: int
    group: str
    size: int | None
    sequence: int | None
    call: str
    sizes: str
    dtypes: str
    waiting: int
    waiting_ranks: str
    absent: int
    absent_ranks: str
    no_dump: int
    no_dump_ranks: str
    role: str
    follows: tuple[int, ...]
    place: Place | None
    since_ns: int | None


class CallMismatch(Struct, frozen=True):
    """Ranks that disagree on one call.

    what (text): "operation", "sizes" or "dtypes".
    group (text): Name of the process group, with its description.
    sequence: Number of the call in the group; missing of sends and receives.
    ranks (text): Who made another one than most, or all where no side has most.
    found (text): What they made.
    expected (text): What most made; missing where no side has most.
    place (text): Line of theirs.
    expected_place (text): Line of the others.
    """

    what: str
    group: str
    sequence: int | None
    ranks: str
    found: str
    expected: str | None
    place: Place | None
    expected_place: Place | None


class HangRank(Struct, frozen=True):
    """One rank at the end.

    rank: Its number.
    state (text): "cause", "waits", "left the call", "no dump", or "between calls".
    call (text): Number of the pending call that it waits in; missing otherwise.
    last_call (text): Its last call, in words.
    place (text): Line of the user's code that made the last call.
    stands (text): Line in which its main thread stood at last, by sampled stacks.
    stands_in (text): The innermost function of that stack.
    nccl_ras (text): What NCCL's RAS said of it, in words.
    process (text): What the recording of the run says of its process and device.
    """

    rank: int
    state: str
    call: int | None = None
    last_call: str = ""
    place: Place | None = None
    stands: Place | None = None
    stands_in: str = ""
    nccl_ras: str = ""
    process: str = ""


class HangCause(Struct, frozen=True):
    """One thing that the others wait for.

    kind (text): Of KINDS.
    call (text): Number of the pending call in which it shows; missing where RAS alone tells it.
    ranks (text): Whom the others wait for, or who disagree.
    sentence (text): What happened, in a sentence.
    place (text): The line: where the missing rank stands, else where the call was made that it did not make.
    """

    kind: str
    call: int | None
    ranks: tuple[int, ...]
    sentence: str
    place: Place | None = None


class HangVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on a hang, from everything that was given.

    verdict (text): Kind of the first cause, "none" where no call was open, or "not_enough".
    sentence (text): The verdict in a sentence.
    causes (text): The first one first.
    calls (text): Pending calls, causes first.
    mismatches (text): Of calls that did not end.
    ranks (text): Causes first, then those who wait.
    dumps (count): Ranks of which there is a dump.
    ras_reports (count): Reports of NCCL's RAS; the newest one is judged by.
    world_size (count): Ranks of the job; missing where unknown.
    absent (text): Ranks of the job without a dump.
    disagreements (text): Where two sources do not say the same.
    notes (text): What is missing, and what was odd about the files.
    """

    verdict: str
    sentence: str
    causes: tuple[HangCause, ...] = ()
    calls: tuple[PendingCall, ...] = ()
    mismatches: tuple[CallMismatch, ...] = ()
    ranks: tuple[HangRank, ...] = ()
    dumps: int = 0
    ras_reports: int = 0
    world_size: int | None = None
    absent: tuple[int, ...] = ()
    disagreements: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
