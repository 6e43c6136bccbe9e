"""What is said of a hang: the call at which ranks part, who is not there, where they stand, and by which source."""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place

MISSING = "missing"  # a rank, of which there is a dump, did not make a call that others wait in
MISMATCH = "mismatch"  # ranks made another call, or one of other sizes or types, at the same number
CROSSED = "crossed"  # groups are entered in different orders: each waits for the other
NO_DUMP = "no_dump"  # all of whom there is a dump are there: it is one of those of whom there is none
ENDED = "ended"  # a rank that others wait for is gone
STUCK = "stuck"  # all came and made the same call, which had not ended
NONE, NOT_ENOUGH = "none", "not_enough"
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
