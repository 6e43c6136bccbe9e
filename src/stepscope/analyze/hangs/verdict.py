"""The verdict on a hang: open calls, what else is known, and both in words.

What else is known of ranks that hang: NCCL's RAS, sampled stacks, processes and devices of the run's recording.

Each says what it knows in words of its own, rank by rank; the verdict lays them beside what the flight recorders say.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.analyze.hangs.calls import calls
from stepscope.analyze.hangs.waits import Cause, Wait, Waits
from stepscope.engine.call_tree import UserPaths
from stepscope.model.counted import things
from stepscope.model.findings import Place
from stepscope.model.ranks import (
    CROSSED,
    ENDED,
    MISMATCH,
    MISSING,
    NO_DUMP,
    NONE,
    NOT_ENOUGH,
    STUCK,
    CallMismatch,
    HangCause,
    HangRank,
    HangVerdict,
    PendingCall,
)
from stepscope.read.hang_recording import Communicator, HangRecording, RasRank, Signature
from stepscope.tables.reduced import ranges
from stepscope.tables.schema import Tables

MAX_CALLS = 200  # of the table
MAX_RANKS = 2_000  # of the table, causes first
MAX_BLAMED = 16
MAX_LOOKED_AT = 200  # ranks whose stacks and processes are asked for
MAX_LEFT_OUT = 8  # calls that a rank may have left out, or made beyond the others, and it still shows
MAX_DISAGREEMENTS = 20
SHAPES_SHOWN = 4
SAID_OF_CIRCLE = 4  # calls


class Judged(Waits, frozen=True, dict=True):
    """All that the verdict is made from."""

    context: Context
    ras: RasView

    @cached_property
    def asked(self) -> set[int]:
        """Ranks that stacks and processes are asked about: causes first, then some of those who wait."""
        ranks = dict.fromkeys(rank for cause in self.causes for rank in cause.ranks)
        waiting = (rank for wait in self.waits for rank in wait.waiting)
        return set(list(dict.fromkeys([*ranks, *waiting]))[:MAX_LOOKED_AT])

    @cached_property
    def standing(self) -> dict[int, Standing]:
        return standing(self.context, self.asked)

    @cached_property
    def endings(self) -> dict[int, Ending]:
        return endings(self.context.tables, self.asked)

    def gone(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that are known to be gone, and why."""
        told = {rank: ending.said for rank, ending in self.endings.items() if ending.gone}
        told |= dict.fromkeys(self.ras.gone, "NCCL RAS considers it dead")
        return {rank: told[rank] for rank in ranks if rank in told}

    @cached_property
    def _places(self) -> list[Place | None]:
        """The user's own line of each stack, the innermost one; the last is of calls without a stack."""
        code = self.context.code
        found: list[Place | None] = []
        for stack in self.recording.stacks:
            resolved = ((code.resolve(frame.file), frame) for frame in stack)
            lines = (Place(file, frame.line, frame.function) for file, frame in resolved if file is not None)
            found.append(next(lines, None))
        return [*found, None]

    def place(self, row: int) -> Place | None:
        return self._places[int(self.calls.stack[row])]

    def common_place(self, rows: Sequence[int]) -> Place | None:
        """The line that most of these rows have."""
        lines: Counter[Place] = Counter()
        for number, count in Counter(self.calls.stack[list(rows)].tolist() if len(rows) else []).items():
            place = self._places[number]
            if place is not None:
                lines[place] += count
        return lines.most_common(1)[0][0] if lines else None

    def collective(self, rank: int, group: int) -> dict[int, int]:
        """A rank's collective calls in a group: the row of each number."""
        calls, mine = self.calls, self.calls.of_rank(rank)
        chosen = (calls.group[mine] == group) & ~calls.p2p[mine] & ~calls.part[mine]
        rows = mine.start + np.flatnonzero(chosen)
        return dict(zip(calls.sequence[rows].tolist(), rows.tolist(), strict=True))


def blamed_ranks(recording: HangRecording) -> tuple[int, ...]:
    """Ranks whom the others wait for, by dumps and RAS alone: those to look at in full; 16 at most."""
    seen = ras(recording)
    named = sorted(seen.gone | seen.silent | seen.behind)
    if recording.dumps:
        waits = Waits(recording, calls(recording, seen.world_size))
        named = [rank for cause in waits.causes if cause.kind not in (STUCK, CROSSED) for rank in cause.ranks] + named
    return tuple(dict.fromkeys(named))[:MAX_BLAMED]


def judge(recording: HangRecording, context: Context, world_size: int | None = None) -> HangVerdict:
    """The verdict; `context` is of the run that was recorded beside it, or empty. `world_size` where it is known."""
    seen = ras(recording)
    sizes = [size for size in (world_size, seen.world_size) if size]
    known = calls(recording, max(sizes, default=None))
    judged = Judged(recording, known, context, seen)
    if not recording.dumps:
        return _by_ras(judged)
    world = max(
        [int(known.ranks.max()) + 1, *sizes, *(int(one.members.max()) + 1 for one in known.groups if len(one.members))]
    )
    there = set(known.ranks.tolist())
    absent = tuple(rank for rank in range(world) if rank not in there)
    # the number of each open call in the table: those of causes first, then by time
    waits = judged.waits
    first = [at for cause in judged.causes for at in cause.waits]
    others = sorted(range(len(waits)), key=lambda at: (waits[at].since_ns or 2**63, at))
    numbers = {at: number for number, at in enumerate(dict.fromkeys([*first, *others]), 1)}
    causes = [_CAUSES[cause.kind](judged, cause, numbers[cause.waits[0]]) for cause in judged.causes]
    shown = sorted(numbers, key=numbers.__getitem__)[:MAX_CALLS]
    verdict, sentence = (causes[0].kind, causes[0].sentence) if causes else _nothing_open(judged)
    return HangVerdict(
        verdict=verdict,
        sentence=sentence,
        causes=tuple(causes),
        calls=tuple(_pending(judged, at, numbers) for at in shown),
        mismatches=tuple(_mismatch(judged, wait) for wait in judged.waits if wait.differing is not None),
        ranks=tuple(_ranks(judged, causes, numbers, absent)),
        dumps=len(recording.dumps),
        ras_reports=len(recording.ras),
        world_size=world,
        absent=absent,
        disagreements=tuple(_disagreements(judged))[:MAX_DISAGREEMENTS],
        notes=tuple(_notes(judged, absent, world)),
    )


def _nothing_open(judged: Judged) -> tuple[str, str]:
    count = len(judged.calls.rank)
    dumps = things(len(judged.recording.dumps), "dump")
    if not count:
        return NOT_ENOUGH, f"not enough: no call is in the {dumps}; set TORCH_FR_BUFFER_SIZE before the job starts"
    return (
        NONE,
        f"no call is open: all {things(count, 'call')} in the {dumps} had ended, and none lacks a rank of theirs",
    )


# ------------------------------------------------------------------------------------------------------------- causes


def _missing(judged: Judged, cause: Cause, number: int) -> HangCause:
    wait, ranks, one = judged.waits[cause.waits[0]], cause.ranks, len(cause.ranks) == 1
    gone, (call, line, waiting) = judged.gone(ranks), _said(judged, wait)
    all_gone = len(gone) == len(ranks)
    if all_gone:
        sentence = f"{_rank_words(ranks)} ended before {call}, in which {waiting}: {next(iter(gone.values()))}"
    else:
        sentence = f"{_rank_words(ranks)} did not come to {call}, in which {waiting}"
    rank, place = ranks[0], None
    standing = judged.standing.get(rank)
    if standing is not None and not gone:
        place = standing.place
        where = f"{_at(place)} ({standing.function})" if place is not None else f" in {standing.function}"
        sentence += f"; its main thread stood{where} at last" if one else f"; rank {rank} stood{where}"
    left_out, mine = _left_out(judged, wait, rank), judged.calls.of_rank(rank)
    if left_out is not None:
        sentence += f"; {left_out[0]}" if one else f"; rank {rank}: {left_out[0]}"
        place = place or left_out[1]
    elif standing is None and mine.start == mine.stop:
        sentence += "; no call of it is in its dump"
    elif standing is None:
        whose, last = "its last call" if one else f"the last call of rank {rank}", mine.stop - 1
        sentence += f"; {whose} was {_row_words(judged, last)}{_at(judged.place(last))}"
    behind = judged.ras.behind & set(ranks)
    if behind:
        sentence += f"; NCCL RAS agrees ({judged.ras.said[min(behind)]})"
    return HangCause(ENDED if all_gone else MISSING, number, ranks, sentence, place or line)


def _left_out(judged: Judged, wait: Wait, rank: int) -> tuple[str, Place | None] | None:
    """Where a rank's calls in a group are from some call on those that the others made later, or earlier.

    Calls are compared by what they are and by the user's line, with those of a rank that waits.
    """
    if wait.sequence is None or not wait.waiting:
        return None
    mine, others = (judged.collective(at, wait.group) for at in (rank, wait.waiting[0]))

    def token(row: int) -> tuple[int, Place | None]:
        return int(judged.tokens[row]), judged.place(row)

    common = sorted(mine.keys() & others.keys())
    first = next((sequence for sequence in common if token(mine[sequence]) != token(others[sequence])), None)
    if first is None:
        return None
    later = [sequence for sequence in mine if sequence >= first]
    for shift in range(1, MAX_LEFT_OUT + 1):
        for by in (shift, -shift):
            moved = [one for one in later if one >= first - min(by, 0)]
            if not moved or any(one + by not in others or token(mine[one]) != token(others[one + by]) for one in moved):
                continue
            row = others[first] if by > 0 else mine[first]
            call, place = f"{_row_words(judged, row)}{_at(judged.place(row))}", judged.place(row)
            if by > 0:
                return f"it left out {call}" + (f" and {things(shift - 1, 'more call')}" if shift > 1 else ""), place
            return f"it made {call} beyond the others" + (f", and {shift - 1} more" if shift > 1 else ""), place
    return None


def _differs(judged: Judged, cause: Cause, number: int) -> HangCause:
    wait = judged.waits[cause.waits[0]]
    assert wait.differing is not None
    found, call = _mismatch(judged, wait), _call(judged, wait, name=False)
    if found.expected is None:
        sentence = f"ranks part at {call}: {' and '.join(_sides(judged, wait))}"
        return HangCause(MISMATCH, number, cause.ranks, sentence, found.place)
    made = f"{_rank_words(cause.ranks)} made {found.found}{_at(found.place)} as {call}"
    sentence = f"{made}, where the others made {found.expected}{_at(found.expected_place)}"
    place = found.place or found.expected_place
    if wait.sequence is not None:
        rank, left_out = cause.ranks[0], None
        others = [other for other in wait.waiting if other not in cause.ranks]
        if others:
            left_out = _left_out(judged, Wait(wait.group, wait.sequence, None, wait.row, 0, others), rank)
        own = next(row for row in wait.differing.rows.tolist() if judged.calls.rank[row] == rank)
        usual = judged.usual(rank, own)
        if left_out is None and usual is not None:
            row, skipped = usual
            verb = "it left out" if skipped else "before, it made"
            left_out = f"{verb} {_plain(judged, row)}{_at(judged.place(row))}", judged.place(row)
        if left_out is not None:
            sentence, place = f"{sentence}; {left_out[0]}", left_out[1] or place
    return HangCause(MISMATCH, number, cause.ranks, sentence, place)


def _sides(judged: Judged, wait: Wait) -> Iterator[str]:
    """Each side of a call that ranks made differently, where none has most."""
    assert wait.differing is not None
    by_token: dict[tuple[int, int], list[int]] = {}
    for row in wait.differing.rows.tolist():
        by_token.setdefault((int(judged.tokens[row]), int(judged.calls.signature[row])), []).append(row)
    for some in list(by_token.values())[:4]:
        ranks = judged.calls.rank[some].tolist()
        made = _made(judged, some[0], wait.differing.what)
        yield f"{_rank_words(ranks).lower()} made {made}{_at(judged.common_place(some))}"


def _crossed(judged: Judged, cause: Cause, number: int) -> HangCause:
    waits = judged.waits
    said = []
    for at in cause.waits[:SAID_OF_CIRCLE]:
        wait = waits[at]
        before = [other for other in cause.waits if other in wait.follows]
        call, _, waiting = _said(judged, wait)
        text = f"{call} ({waiting})"
        said.append(text + (f" waits for those in {_call(judged, waits[before[0]])}" if before else ""))
    more = f", and {len(cause.waits) - SAID_OF_CIRCLE} more calls" if len(cause.waits) > SAID_OF_CIRCLE else ""
    sentence = (
        "calls wait for each other in a circle, as ranks made them in different orders or one left a call out: "
        f"{'; '.join(said)}{more}"
    )
    ranks = list(dict.fromkeys(rank for at in cause.waits for rank in waits[at].waiting))[:MAX_LOOKED_AT]
    left = {rank: rows for rank in ranks if (rows := judged.departed(rank)) is not None}
    if len(left) != 1:
        return HangCause(CROSSED, number, cause.ranks, sentence, _line(judged, waits[cause.waits[0]]))
    rank, (made, usual) = next(iter(left.items()))
    place = judged.place(made)
    sentence += (
        f"; rank {rank} alone left its own pattern: where it made {_plain(judged, usual)}{_at(judged.place(usual))} "
        f"before, it made {_plain(judged, made)}{_at(place)}"
    )
    return HangCause(CROSSED, number, (rank,), sentence, judged.place(usual) or place)


def _plain(judged: Judged, row: int) -> str:
    """A call without its number."""
    return f"{judged.kind(row)} of group {judged.calls.groups[int(judged.calls.group[row])].label}"


def _no_dump(judged: Judged, cause: Cause, number: int) -> HangCause:
    wait = judged.waits[cause.waits[0]]
    gone, (call, line, waiting) = judged.gone(cause.ranks), _said(judged, wait)
    if gone:
        ranks = tuple(gone)
        why = next(iter(gone.values()))
        sentence = f"{_rank_words(ranks)} ended, without a dump, before {call}, in which {waiting}: {why}"
        return HangCause(ENDED, number, ranks, sentence, line)
    them = _rank_words(cause.ranks) if cause.ranks else f"{things(wait.unnamed, 'rank')} that no dump names"
    are = "is" if (len(cause.ranks) or wait.unnamed) == 1 else "are"
    sentence = f"{waiting} in {call}, all of whom there is a dump; {them} {are} without a dump"
    if are == "are":
        sentence += ", and one of them at least is missing"
    if wait.unnamed and cause.ranks:
        sentence += f", and {things(wait.unnamed, 'rank')} more that no dump names"
    quiet = sorted(judged.ras.silent & set(cause.ranks))
    if quiet:
        sentence += f"; to NCCL RAS {_rank_words(quiet).lower()} did not answer"
    stood = [rank for rank in cause.ranks if rank in judged.standing and not judged.standing[rank].waits]
    place = line
    if stood:
        standing = judged.standing[stood[0]]
        sentence += f"; rank {stood[0]} stood{_at(standing.place)} ({standing.function}) at last"
        place = standing.place or line
    ranks = tuple(quiet) or (tuple(stood) if len(stood) == 1 else cause.ranks)
    return HangCause(NO_DUMP, number, ranks, sentence, place)


def _stuck(judged: Judged, cause: Cause, number: int) -> HangCause:
    call, line, waiting = _said(judged, judged.waits[cause.waits[0]])
    sentence = (
        f"{waiting} in {call}, and all made it alike: no rank is missing. It had not ended when the dumps were "
        "written: the job was still running, a transfer does not end, or the device is busy with what was queued "
        "before it"
    )
    return HangCause(STUCK, number, cause.ranks, sentence, line)


_CAUSES = {MISSING: _missing, MISMATCH: _differs, CROSSED: _crossed, NO_DUMP: _no_dump, STUCK: _stuck}


def _by_ras(judged: Judged) -> HangVerdict:
    """What RAS says alone: who is gone, who does not answer, who has made fewer calls."""
    view = judged.ras
    notes = [*judged.recording.problems, "no dump of a flight recorder was given: no line, and no call by its number"]
    if view.still is not None:
        notes.append("no count grew between the reports" if view.still else "counts grew between the reports")
    causes = []
    for kind, ranks, what in (
        (ENDED, view.gone, "considered dead by NCCL RAS"),
        (NO_DUMP, view.silent - view.gone, "did not answer to NCCL RAS"),
        (MISSING, view.behind - view.gone - view.silent, "made fewer calls than the others"),
    ):
        if ranks:
            told = sorted(ranks)
            verb = ("is " if len(told) == 1 else "are ") if kind == ENDED else ""
            said = "; ".join(f"rank {rank}: {view.said[rank]}" for rank in told[:4])
            causes.append(HangCause(kind, None, tuple(told), f"{_rank_words(told)} {verb}{what} ({said})"))
    if causes:
        verdict, sentence = causes[0].kind, causes[0].sentence
    else:
        verdict = NOT_ENOUGH
        sentence = (
            "not enough: to NCCL RAS all ranks answer and have made as many calls, which a hang inside of one does too"
        )
    rows = tuple(
        HangRank(rank, "cause" if any(rank in one.ranks for one in causes) else "", nccl_ras=text)
        for rank, text in sorted(view.said.items())
    )
    return HangVerdict(
        verdict=verdict, sentence=sentence, causes=tuple(causes), ranks=rows[:MAX_RANKS], world_size=view.world_size,
        ras_reports=len(judged.recording.ras), notes=tuple(notes),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- tables


def _pending(judged: Judged, at: int, numbers: dict[int, int]) -> PendingCall:
    wait, calls = judged.waits[at], judged.calls
    group, signature = calls.groups[wait.group], judged.signature(wait.row)
    causes = {one for cause in judged.causes for one in cause.waits}
    return PendingCall(
        number=numbers[at],
        group=group.label,
        size=2 if wait.ends is not None else group.size,
        sequence=wait.sequence,
        call=_operation(judged, wait),
        sizes=_sizes(signature),
        dtypes=_types(signature),
        waiting=len(set(wait.waiting)),
        waiting_ranks=named(wait.waiting),
        absent=len(wait.absent),
        absent_ranks=named(wait.absent),
        no_dump=len(wait.silent),
        no_dump_ranks=named(wait.silent),
        role="cause" if at in causes else "follows",
        follows=tuple(sorted(numbers[one] for one in wait.follows if one in numbers))[:16],
        place=_line(judged, wait),
        since_ns=wait.since_ns or None,
    )


def _mismatch(judged: Judged, wait: Wait) -> CallMismatch:
    differing = wait.differing
    assert differing is not None
    calls = judged.calls
    rows = differing.rows.tolist()
    return CallMismatch(
        what=differing.what,
        group=calls.groups[wait.group].label,
        sequence=wait.sequence,
        ranks=named(calls.rank[rows].tolist()),
        found=_made(judged, rows[0], differing.what),
        expected=None if differing.expected is None else _made(judged, differing.expected, differing.what),
        place=judged.common_place(rows) if differing.expected is not None else judged.place(rows[0]),
        expected_place=None if differing.expected is None else judged.place(differing.expected),
    )


def _ranks(
    judged: Judged, causes: Sequence[HangCause], numbers: dict[int, int], absent: Sequence[int]
) -> Iterator[HangRank]:
    """Causes first, then those who wait, then those between calls."""
    calls = judged.calls
    blamed = dict.fromkeys(rank for cause in causes if cause.kind != STUCK for rank in cause.ranks)
    waiting: dict[int, int] = {}
    for at, wait in enumerate(judged.waits):
        for rank in wait.waiting:
            waiting[rank] = min(waiting.get(rank, numbers[at]), numbers[at])
    others = (rank for rank in calls.ranks.tolist() if rank not in waiting)
    for rank in list(dict.fromkeys([*blamed, *waiting, *absent, *others]))[:MAX_RANKS]:
        mine, known = calls.of_rank(rank), rank in judged.dumps
        last = mine.stop - 1 if mine.stop > mine.start else None
        standing, ending = judged.standing.get(rank), judged.endings.get(rank)
        state = "waits" if rank in waiting else "between calls" if known else "no dump"
        yield HangRank(
            rank=rank,
            state="cause" if rank in blamed and known and state != "waits" else state,
            call=waiting.get(rank),
            last_call="" if last is None else _row_words(judged, last),
            place=None if last is None else judged.place(last),
            stands=standing.place if standing is not None else None,
            stands_in=standing.function if standing is not None else "",
            nccl_ras=judged.ras.said.get(rank, ""),
            process=ending.said if ending is not None else "",
        )


# ------------------------------------------------------------------------------------------ what sources do not share


def _disagreements(judged: Judged) -> Iterator[str]:
    view = judged.ras
    waiting = {rank for wait in judged.waits for rank in wait.waiting}
    missing = {rank for cause in judged.causes if cause.kind == MISSING for rank in cause.ranks}
    for rank in sorted(view.gone & waiting):
        yield f"rank {rank}: NCCL RAS considers it dead, and by its dump it waits in a call"
    if missing and view.behind and not missing & view.behind:
        yield (
            f"by the dumps {_rank_words(sorted(missing)).lower()} did not come, by NCCL RAS "
            f"{_rank_words(sorted(view.behind)).lower()} made fewer calls"
        )
    if missing and not view.behind and any(missing & ranks for ranks in view.equal):
        yield (
            f"by the dumps {_rank_words(sorted(missing)).lower()} did not come, and NCCL RAS counts as many calls on "
            "all: it was asked at another moment, or the call did not reach NCCL"
        )
    for rank in sorted(missing):
        standing = judged.standing.get(rank)
        if standing is not None and standing.waits:
            yield (
                f"rank {rank}: by its dump it waits in no call, and its main thread was sampled in one "
                f"({standing.function})"
            )
    for rank in sorted(waiting & set(judged.endings)):
        if judged.endings[rank].gone:
            yield f"rank {rank}: by its dump it waits in a call, and {judged.endings[rank].said}"


def _notes(judged: Judged, absent: Sequence[int], world: int) -> Iterator[str]:
    recording = judged.recording
    if absent:
        yield f"no dump of {things(len(absent), 'rank')} of {world:,}: {named(absent)}"
    if not any((dump.calls.stack >= 0).any() for dump in recording.dumps) and len(judged.calls.rank):
        yield "the dumps hold no stacks, so that no line is known: dump pickles with includeStackTraces"
    gaps = sum(dump.gaps for dump in recording.dumps)
    if gaps:
        yield f"{things(gaps, 'dump')} left out calls that were over: who did not come to a call is less certain"
    unknown = [group.label for group in judged.calls.groups if group.size is None]
    if unknown:
        yield (
            f"the ranks of {things(len(unknown), 'group')} are told by no dump ({', '.join(unknown[:4])}): those that "
            "made calls in them are taken for all"
        )
    if judged.ras.still is not None:
        yield (
            "no count of NCCL RAS grew between its reports"
            if judged.ras.still
            else "counts of NCCL RAS grew between its reports"
        )
    yield from recording.problems


# -------------------------------------------------------------------------------------------------------------- words


def _rank_words(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]}" if len(set(ranks)) == 1 else f"Ranks {named(ranks)}"


def _at(place: Place | None) -> str:
    if place is None:
        return ""
    name = posixpath.basename(place.file)
    return f" at {name}:{place.line}" if place.line is not None else f" in {name}"


def _said(judged: Judged, wait: Wait) -> tuple[str, Place | None, str]:
    """An open call with its line in words, that line, and who waits in it."""
    line = _line(judged, wait)
    return f"{_call(judged, wait)}{_at(line)}", line, _waiting(judged, wait)


def _line(judged: Judged, wait: Wait) -> Place | None:
    """The user's line of a call, as most of those who wait in it have it."""
    return judged.common_place(wait.rows) or judged.place(wait.row)


def _operation(judged: Judged, wait: Wait) -> str:
    if wait.ends is None:
        return judged.kind(wait.row)
    return f"transfer {wait.ends[0]} -> {wait.ends[1]}"


def _call(judged: Judged, wait: Wait, *, name: bool = True) -> str:
    """`all_reduce #812 of group 0 (default_pg)`, without its name `call #812 of ...`."""
    group = judged.calls.groups[wait.group].label
    if wait.sequence is None:
        return f"the {_operation(judged, wait)} in group {group}"
    return f"{_operation(judged, wait) if name else 'call'} #{wait.sequence} of group {group}"


def _row_words(judged: Judged, row: int) -> str:
    calls = judged.calls
    group = calls.groups[int(calls.group[row])].label
    number = f" #{int(calls.sequence[row])}" if not calls.p2p[row] and calls.sequence[row] >= 0 else ""
    return f"{judged.kind(row)}{number} of group {group}"


def _waiting(judged: Judged, wait: Wait) -> str:
    count = len(set(wait.waiting))
    size = 2 if wait.ends is not None else judged.calls.groups[wait.group].size
    if count == 1:
        return f"rank {wait.waiting[0]} waits"
    return f"{count:,} of {size:,} ranks wait" if size else f"{count:,} ranks wait"


def _made(judged: Judged, row: int, what: str) -> str:
    """A call, with what of it differs."""
    signature = judged.signature(row)
    told = {"sizes": _sizes(signature), "dtypes": _types(signature)}.get(what, "")
    return f"{judged.kind(row)}{f' of {told}' if told else ''}"


def _sizes(signature: Signature) -> str:
    sides = [_shapes(signature.input_sizes), _shapes(signature.output_sizes)]
    return sides[0] if sides[0] == sides[1] else " -> ".join(side or "nothing" for side in sides)


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    texts = [f"[{', '.join(map(str, shape))}]" for shape in shapes[:SHAPES_SHOWN]]
    return ", ".join(texts) + (f" and {len(shapes) - SHAPES_SHOWN} more" if len(shapes) > SHAPES_SHOWN else "")


def _types(signature: Signature) -> str:
    return ", ".join(dict.fromkeys((*signature.input_dtypes, *signature.output_dtypes)))


GONE_BEFORE_NS = 5 * 10**9  # a process that ended as long before the last reading of its host did not end with the run
LAST_NS = 30 * 10**9  # readings of a device that tell what it did at last
BUSY_PCT = 90.0  # a kernel of a collective that waits keeps a GPU "busy", work that ends has pauses
IDLE_PCT = 5.0
MOST_NAMED = 120  # characters of ranks in a sentence or a cell
_DISTRIBUTED = "torch/distributed/"


class Standing(Struct, frozen=True):
    """Where the main thread of a rank stood in its last sample; `waits` where that is inside a collective call."""

    place: Place | None
    function: str
    waits: bool


class RasView(Struct, frozen=True):
    """What RAS says. `said` by rank, where there is anything odd; `behind` made fewer calls than others.

    `equal` are sets of ranks of communicators in which all have made as many.
    """

    said: Mapping[int, str] = {}
    gone: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()
    equal: tuple[frozenset[int], ...] = ()
    world_size: int | None = None
    still: bool | None = None  # whether no count has grown from the first report to the last; None with one report


def ras(recording: HangRecording) -> RasView:
    """The newest report in words. Ranks of small communicators are found in the largest by host, process and device."""
    communicators = recording.ras[-1].communicators if recording.ras else ()
    if not communicators:
        return RasView()
    world = max(communicators, key=lambda one: one.size)
    numbers = {(one.host, one.pid, one.device): one.rank for one in world.ranks}
    said: dict[int, list[str]] = {}
    sets: dict[str, set[int]] = {"gone": set(), "silent": set(), "behind": set(), "": set()}
    equal: list[frozenset[int]] = []
    for communicator in communicators:
        counted, slower = set[int](), _behind(communicator)
        for one in communicator.ranks:
            rank = numbers.get((one.host, one.pid, one.device))
            if rank is None:
                continue
            if one.counts:
                counted.add(rank)
            for text, kind in (*_odd(one), *((text, "behind") for text in slower.get(one.rank, ()))):
                said.setdefault(rank, []).append(text)
                sets[kind].add(rank)
        if not slower and len(counted) > 1:
            equal.append(frozenset(counted))
    still = None
    if len(recording.ras) > 1:  # whether no rank has made more calls in the last report than in the first
        first, last = (
            {(each.hash, one.rank): one.counts for each in report.communicators for one in each.ranks if one.counts}
            for report in (recording.ras[0], recording.ras[-1])
        )
        still = all(last[key] == counts for key, counts in first.items() if key in last)
    gone, silent, behind = (frozenset(sets[name]) for name in ("gone", "silent", "behind"))
    words = {rank: "; ".join(dict.fromkeys(some)) for rank, some in said.items()}
    return RasView(words, gone, silent, behind, tuple(equal), world.size, still)


def _odd(one: RasRank) -> list[tuple[str, str]]:
    """What is odd about a rank, in words, and the set that it puts the rank in."""
    found = []
    if one.dead:
        found.append(("considered dead", "gone"))
    elif one.unresponsive or one.counts is None:
        found.append(("does not answer" if one.unresponsive else "no answer in time", "silent"))
    if one.error:
        found.append((f"error {one.error} of NCCL", ""))
    if one.ending:
        found.append(("ends its communicator", ""))
    return found


def _behind(communicator: Communicator) -> dict[int, list[str]]:
    """Ranks of a communicator that have made fewer calls of a kind than most, or than the others where two differ."""
    found: dict[int, list[str]] = {}
    counts = {one.rank: one.counts for one in communicator.ranks if one.counts}
    for name in sorted({name for each in counts.values() for name in each}):
        most = max(each.get(name, 0) for each in counts.values())
        for rank, each in counts.items():
            if each.get(name, 0) < most:
                found.setdefault(rank, [f"{each.get(name, 0):,} calls of {name}, others {most:,}"])
    return found


# ------------------------------------------------------------------------------------------------- the run's recording


def standing(context: Context, ranks: Collection[int]) -> dict[int, Standing]:
    """Where the main threads of these ranks stood at last, of those that were sampled."""
    tables = context.tables
    of_rank = {info.process: info.rank for info in tables.ranks if info.rank in ranks}
    if not of_rank or tables.stacks.is_empty():
        return {}
    main = (pl.col("role") == "rank") & pl.col("main_thread") & pl.col("process").is_in(list(of_rank))
    timed = tables.stretches.filter(main & pl.col("node").is_not_null()).sort("end_ns", maintain_order=True)
    last = timed.group_by("process", maintain_order=True).last().select("process", "node", "end_ns")
    sampled = tables.stacks.filter(main & pl.col("node").is_not_null()).sort("end_ns", "samples", maintain_order=True)
    rough = sampled.group_by("process", maintain_order=True).last().select("process", "node", "end_ns")
    rough = rough.join(last.select("process"), on="process", how="anti")
    users = UserPaths(context.calls, context.code)
    found: dict[int, Standing] = {}
    for process, node in pl.concat([last, rough]).select("process", "node").rows():
        path = context.calls.path(node)
        user = int(users.innermost[node])
        place = None
        if user >= 0:
            frame = context.calls.frames[int(context.calls.frame[user])]
            file = context.code.resolve(frame.file)
            place = Place(file, frame.line, frame.function) if file is not None else None
        waits = any(_DISTRIBUTED in frame.file for frame in path)
        found[of_rank[process]] = Standing(place, path[-1].function, waits)
    return found


class Ending(Struct, frozen=True):
    """How the process of a rank was at last: `gone` where it ended before the others did."""

    gone: bool
    said: str


def endings(tables: Tables, ranks: Collection[int]) -> dict[int, Ending]:
    """What processes and devices of these ranks did at last, in words."""
    found: dict[int, Ending] = {}
    ends = dict(tables.processes.drop_nulls("process").select("process", "end_ns").rows())
    latest = tables.system["time_ns"].max() if tables.system.height else None
    load = _device_load(tables)
    for info in tables.ranks:
        if info.rank not in ranks:
            continue
        said = []
        ended = ends.get(info.process)
        gone = isinstance(ended, int) and isinstance(latest, int) and ended < latest - GONE_BEFORE_NS
        if gone:
            said.append(f"process {info.pid} ended {(latest - ended) / 1e9:.0f} s before the last reading")  # type: ignore[operator]
        util = load.get((info.host, info.pid))
        if util is not None:
            word = "idle" if util <= IDLE_PCT else "busy" if util >= BUSY_PCT else "partly busy"
            said.append(f"its device was {word} at last ({util:.0f} %)")
        if said:
            found[info.rank] = Ending(gone, "; ".join(said))
    return found


def _device_load(tables: Tables) -> dict[tuple[str, int], float]:
    """Mean utilisation of the device that a process holds memory of, in the last seconds, by (host, pid)."""
    system = tables.system
    if system.is_empty() or not system["device"].drop_nulls().len():
        return {}
    latest = system["time_ns"].max()
    recent = system.filter(pl.col("time_ns") >= latest - LAST_NS)  # type: ignore[operator]
    util = recent.filter(pl.col("metric") == "gpu_util_pct").group_by("host", "device").agg(pl.col("value").mean())
    held = recent.filter(pl.col("pid").is_not_null() & pl.col("device").is_not_null()).select("host", "pid", "device")
    rows = held.unique().join(util, on=["host", "device"]).select("host", "pid", "value").rows()
    counts = Counter((host, pid) for host, pid, _ in rows)
    return {(host, pid): value for host, pid, value in rows if counts[host, pid] == 1}


def named(ranks: Collection[int]) -> str:
    """Numbers of ranks with neighbours folded, "0-6, 8"; of many pieces the first."""
    text = ranges(sorted(set(ranks)))
    return text if len(text) <= MOST_NAMED else f"{text[:MOST_NAMED].rpartition(', ')[0]} …"
