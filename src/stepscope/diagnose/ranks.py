"""Ranks that wait for one of them, of few or of a thousand, and the job that hangs because some never come.

A rank is slow because it works longer on equal batches, or because its batches are larger. The cost is what the others
wait, measured in the phases in which nobody waits: how much longer the slowest rank works there than the median of the
others. It counts as far as the others are that much longer in the exchange. Of many ranks
reduced tables tell, by a verdict on all of them. A hang is no loss of a step: a risk, and the first thing to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from msgspec import Struct

from stepscope.diagnose import gains
from stepscope.diagnose.rule import (
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    accelerator,
    advice,
    at,
    at_place,
    clip_share,
    distinct,
    figure,
    figures,
    lowest,
    ms,
    risk_rule,
    rule,
    sampled_confidence,
    shown,
)
from stepscope.model import Analysis, Finding, Interval, Place, Risk, StepFacts
from stepscope.model.counted import things
from stepscope.model.machine import RanksFacts
from stepscope.model.ranks import MISMATCH, NO_DUMP, STUCK, Straggler
from stepscope.model.views import WorkerShare


class RANKS(Thresholds):
    """When one rank keeps the others waiting, rather than jitter or a slow moment."""

    persistent: float = 0.8  # of the steps one rank is the slowest; TraceML names a cause from as much coverage on
    every_quarter: float = (
        0.5  # of the mean excess, in each quarter of the run: else something else was busy for a while
    )
    waited: float = 0.5  # of the excess: ranks that do not wait for each other as long are not in step
    agree: float = 0.75  # waiting by excess, either way; both are measured, so sound runs lie near 1
    unequal: float = 1.1  # samples by the others' median: fewer are the remainder of a data set; chosen, untuned
    mostly: float = 0.5  # of the excess in the data wait: an input problem
    steps_for_high: int = 20  # as TraceML asks for to call a difference critical
    lines_shown: int = 3
    of_all: float = 0.1  # of a rank's time at a line: others that spend as much there do the same work
    line_share: float = 0.1  # of the excess; a phase with less explains nothing
    ranks_shown: int = 4


SEVERAL_RANKS = Need(  # of many, some are read beside the verdict on all (`many_ranks`), and prove nothing alone
    "several ranks", lambda a: len(a.run.ranks) > 1 and a.many_ranks is None, quiet=True
)
RANK_STEPS = Need("steady steps of every rank, with their phases", lambda a: a.ranks)
RANK_SAMPLES = Need(
    "the samples of every rank's steps",
    lambda a: a.ranks is not None and all(work.samples is not None for work in a.ranks.ranks),
)
_RANKS = (SEVERAL_RANKS, STEPS, RANK_STEPS)
LEARN = "https://docs.pytorch.org/docs/stable/notes/ddp.html"


class _Late(Struct, frozen=True):
    """The rank the others wait for. `by_phase` (ms) is empty where only sampled lines tell."""

    rank: int
    cost_ms: float
    by_phase: dict[str, float]
    evidence: tuple[Known, ...]
    level: str
    ranks: tuple[int, ...]  # all that are late for the same reason


@rule("communication.straggler", *_RANKS, learn=LEARN)
def straggler(analysis: Analysis) -> Iterator[Claim]:
    train, ranks, loader = STEPS.of(analysis), RANK_STEPS.of(analysis), analysis.loader
    if unequal(ranks):
        return
    late = _by_lines(analysis, ranks)
    if persistent(ranks):
        agrees = RANKS.agree <= ranks.waited_ms / ranks.excess_ms <= 1 / RANKS.agree
        sure = ranks.steps >= RANKS.steps_for_high and agrees and not ranks.exchange_source.startswith("assumed")
        level = "high" if sure else "medium"
        by_phase, slow = ranks.excess_by_phase_ms, ranks.slow or (ranks.slowest,)
        late = _Late(ranks.slowest, _waited_ms(ranks), by_phase, _step_evidence(ranks), level, slow)
    if late is None:
        return
    # without a loader that phase is the gap before the forward pass
    has_loader = loader is not None and (loader.num_workers is not None or loader.site is not None)
    from_input = has_loader and late.by_phase.get("data_wait", 0.0) >= RANKS.mostly * late.cost_ms
    where = _lines(analysis, late, from_input)
    phase = max(late.by_phase, key=lambda name: late.by_phase[name], default=None)
    if phase == "before_forward" and not where:
        return  # a gap that no sample tells of, in which ranks may wait for each other as well
    title, fix = _words(analysis, ranks, late, phase, where, from_input)
    on_device = accelerator(analysis) is not None
    yield Claim(
        title=title,
        steps=train,
        cost_ms=late.cost_ms,
        ceiling_ms=gains.without_lead(analysis, ranks) if late.by_phase else 0.0,
        expected_gain=_expected(analysis, train, ranks, late),
        levels=(late.level, *(("medium",) if on_device else ())),
        where=where,
        ranks=late.ranks,
        evidence=late.evidence,
        fix=fix,
        caveat="Phases are times of the host, which on a device runs ahead of the work: what the device alone does "
        "longer on one rank is not in them; traces of two ranks show it."
        if on_device
        else "On cores that the ranks share, a rank that waits leaves more of them to the others: less may be gained.",
        falsified_by=f"With the extra work of rank {late.rank} left out, the mean step of all ranks does not get "
        "shorter",
    )


def persistent(ranks: RanksFacts) -> bool:
    """Whether one rank is the slowest throughout the run, and the others wait for it: no jitter, no slow moment."""
    return (
        ranks.slowest_share >= RANKS.persistent
        and ranks.excess_ms > 0
        and ranks.least_excess_ms >= RANKS.every_quarter * ranks.excess_ms
        and ranks.waited_ms >= RANKS.waited * ranks.excess_ms
    )


def straggler_ms(analysis: Analysis) -> float:
    """What the others wait for the slowest rank, ms a step; 0 where none keeps them waiting."""
    ranks = analysis.ranks
    return _waited_ms(ranks) if ranks is not None and persistent(ranks) else 0.0


def _waited_ms(ranks: RanksFacts) -> float:
    """The excess as far as the others wait that long, and until the next slowest rank is the one all wait for."""
    return max(0.0, min(ranks.excess_ms, ranks.waited_ms, gains.lead_ms(ranks)))


def _by_lines(analysis: Analysis, ranks: RanksFacts) -> _Late | None:
    """By sampled lines: work inside a phase in which ranks also wait cannot be told from the steps."""
    lines = analysis.sampled.rank_lines if analysis.sampled is not None else None
    if lines is None or lines.straggler is None or lines.straggler_place is None or lines.unit != "ms per step":
        return None
    line = next((one for one in lines.lines if one.place == lines.straggler_place and not one.waiting), None)
    waits = [one for one in lines.lines if one.waiting and one.place == lines.waiter_place]
    if line is None or not waits or line.most != lines.straggler:
        return None
    late = line.most
    extra = line.by_rank[late] - _median_of_others(line.by_rank, late)
    own_wait = sum(one.by_rank.get(late, 0.0) for one in waits)
    waited = sum(_median_of_others(one.by_rank, late) for one in waits) - own_wait
    if waited < RANKS.waited * extra:
        return None
    step_ms = ranks.of(late).wall_ms if any(work.rank == late for work in ranks.ranks) else 0.0
    samples = analysis.stacks.steady_samples if analysis.stacks is not None else 0
    count = round(samples / max(1, len(lines.ranks)) * extra / step_ms) if step_ms else 0
    evidence = (
        ms(f"longer at {shown(line.place)} on rank {late}", extra, lines.source),
        ms("longer wait of the others", waited, lines.source),
    )
    return _Late(late, min(extra, waited), {}, evidence, lowest(["medium", sampled_confidence(count)]), (late,))


def _median_of_others(by_rank: dict[int, float], rank: int) -> float:
    return median([value for other, value in by_rank.items() if other != rank] or [0.0])


def _lines(analysis: Analysis, late: _Late, from_input: bool) -> tuple[Place, ...]:
    """The lines that rank spends longer at than the others, longest first; else where its loader was made."""
    view, loader = analysis.sampled.rank_lines if analysis.sampled is not None else None, analysis.loader
    found: list[Place] = []
    if view is not None:
        # as an input problem the loader's lines lead, else they are the others' business
        ahead = [one for one in view.lines if one.most == late.rank and not one.waiting]
        ahead.sort(key=lambda one: (from_input != (one.phase == "data_wait"), -one.spread))
        found = [one.place for one in ahead]
        if view.straggler == late.rank and view.straggler_place is not None:
            found.insert(0, view.straggler_place)
    if from_input and loader is not None:
        found = found or [Place(line.file, line.line, line.function) for line in loader.entries or loader.lines]
        found += [loader.site] if loader.site is not None else []
    return distinct(found)[: RANKS.lines_shown]


_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}


def _words(
    analysis: Analysis, ranks: RanksFacts, late: _Late, phase: str | None, where: tuple[Place, ...], from_input: bool
) -> tuple[str, str]:
    """(title, fix)."""
    rank, others = late.rank, len(ranks.ranks) - len(late.ranks)
    slow = f"Rank {rank}" + (f" (and {len(late.ranks) - 1} more)" if len(late.ranks) > 1 else "")
    waits = "the other rank waits" if others == 1 else f"{others} other ranks wait"
    amount = f"{late.cost_ms:.1f} ms longer a step than the others{at(*where)}"
    if from_input:
        shorten = f", and shorten the work{at_place(where[0])}" if where else ""
        fix = advice("straggler", "input").format(rank=rank, at=shorten)
        return f"{slow} loads its batches {amount}: {waits} for it", fix
    inside = f", in {_PHASES[phase]}" if phase in _PHASES and not where else ""
    view = analysis.sampled.rank_lines if analysis.sampled is not None else None
    lines = [one.by_rank for one in view.lines if one.place in where[:1]] if view is not None else []
    of_all = any(_median_of_others(each, rank) >= RANKS.of_all * each.get(rank, 0.0) for each in lines)
    fix = advice("straggler", "of_all" if of_all or inside else "").format(rank=rank, at=at(*where))
    return f"{slow} works {amount}{inside}: {waits} for it", fix


def _expected(analysis: Analysis, train: StepFacts, ranks: RanksFacts, late: _Late) -> Interval | None:
    """Of ranks on one host without an accelerator; None for others.

    While the others wait the slow rank has the machine for itself: phases in which it has no more to do than they have
    are shorter there. At worst its pass with the exchange becomes longer by as much, once nobody waits.
    """
    loader = analysis.loader
    one_host = loader is not None and loader.ranks_on_host >= len(ranks.ranks)
    if not late.by_phase or not one_host or accelerator(analysis) is not None:
        return None
    slow, share = ranks.of(ranks.slowest), clip_share(late.cost_ms, train.mean_ms)
    shorter = {phase: more for phase, more in late.by_phase.items() if more < 0 and slow.phases_ms.get(phase, 0.0) > 0}
    own = sum(slow.phases_ms[phase] for phase in shorter)
    longer = -sum(shorter.values()) / own * slow.exchange_ms if own else 0.0
    return Interval(low=max(0.0, share - longer / train.mean_ms), high=share)


def _step_evidence(ranks: RanksFacts) -> tuple[Known, ...]:
    source = f"steps.jsonl of {things(len(ranks.ranks), 'rank')}, {things(ranks.steps, 'step')} side by side"
    waits = f"{source}; waits in {', '.join(ranks.exchange)}: {ranks.exchange_source}"
    least = RANKS.line_share * max(ranks.excess_ms, 0.0)
    return (
        ms(f"own work of rank {ranks.slowest}", ranks.of(ranks.slowest).own_ms, waits),
        ms("longer than the others (median)", ranks.excess_ms, source),
        ms("longer in the slowest rank's best quarter of the run", ranks.least_excess_ms, source),
        ms("longer wait of the others (median)", ranks.waited_ms, waits),
        figure("steps in which that rank worked longest", ranks.slowest_share, "fraction", source),
        *(
            ms(f"longer in {phase.replace('_', ' ')}", extra, source)
            for phase, extra in ranks.excess_by_phase_ms.items()
            if extra >= least and extra > 0
        ),
    )


@rule(
    "communication.unbalanced_work",
    *_RANKS,
    RANK_SAMPLES,
    learn="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
)
def unbalanced_work(analysis: Analysis) -> Iterator[Claim]:
    train, ranks = STEPS.of(analysis), RANK_STEPS.of(analysis)
    if not unequal(ranks) or not persistent(ranks):
        return
    cost, most, level = _imbalance(analysis, ranks)
    # The user's own constructions, else the line that the framework makes its loader by.
    found = [site.place for site in analysis.sites if site.what == "DataLoader" and site.via is None and site.place]
    if not found and analysis.loader is not None and analysis.loader.site is not None:
        found.append(analysis.loader.site)
    where = distinct(found)[: RANKS.lines_shown]
    known = [(work.rank, work.samples) for work in ranks.ranks[: RANKS.ranks_shown] if work.samples is not None]
    counts = ", ".join(f"rank {rank}: {samples:.0f}" for rank, samples in known)
    more = " …" if len(ranks.ranks) > RANKS.ranks_shown else ""
    in_loader = f" in the DataLoader at {shown(where[0])}" if where else ""
    yield Claim(
        title=f"Ranks work on batches of different size ({counts}{more} samples a step): all wait for rank "
        f"{ranks.slowest}",
        steps=train,
        cost_ms=cost,
        ceiling_ms=most,
        levels=(level,),
        where=where,
        ranks=(ranks.slowest,),
        evidence=(
            *_step_evidence(ranks),
            *(
                figure(f"samples per step of rank {rank}", samples, "samples", f"rank-{rank}/steps.jsonl", 2)
                for rank, samples in known
            ),
        ),
        fix=f"Give every rank as many samples per step{in_loader}: a DistributedSampler with one batch_size for all; "
        "with samples of different length, batches of equal total length",
        caveat="Gradients averaged over ranks weigh a sample of a small batch more than one of a large batch: with "
        "equal batches the training changes, towards what is usually meant.",
        falsified_by="With as many samples on every rank and the same total, the mean step does not get shorter",
    )


def unequal(ranks: RanksFacts) -> bool:
    own = ranks.of(ranks.slowest).samples
    known = sorted(work.samples for work in ranks.ranks if work.rank != ranks.slowest and work.samples is not None)
    return own is not None and bool(known) and own >= RANKS.unequal * known[len(known) // 2]


def _imbalance(analysis: Analysis, ranks: RanksFacts) -> tuple[float, float, str]:
    """(ms a step, at most, confidence) that equal batches save.

    Own work is measured: that of the slowest rank less the mean. The pass that also waits for others shrinks as the
    forward pass does, at most as the samples do, but for what the transfer takes.
    """
    slowest = ranks.of(ranks.slowest)
    own = [work.own_ms for work in ranks.ranks]
    measured = slowest.own_ms - sum(own) / len(own)
    samples = [work.samples for work in ranks.ranks if work.samples is not None]
    by_samples = 1.0 - sum(samples) / len(samples) / max(samples)
    by_work = max(0.0, min(by_samples, measured / slowest.own_ms if slowest.own_ms > 0 else 0.0))
    # the transfer in a step of that rank, from traces of several ranks: waiting for another is no part of it
    transfers = [
        share.transferring_ns / 1e6
        for share in workers_of(analysis)
        if share.span.rank == slowest.rank and share.transferring_ns is not None
    ]
    transfer = sum(transfers) / len(transfers) if transfers else 0.0
    computed = max(0.0, slowest.exchange_ms - transfer)
    cost = max(0.0, measured) + by_work * computed
    own_most = slowest.own_ms + ranks.most_excess_ms - ranks.excess_ms
    most = gains.without_work(analysis, by_samples * (own_most + computed))
    return cost, most, "high" if transfers else "medium"


def workers_of(analysis: Analysis) -> tuple[WorkerShare, ...]:
    view = analysis.views.distributed if analysis.views is not None else None
    return view.workers if view is not None else ()


class MANY_RANKS(Thresholds):
    persistent: float = 0.8  # of the steps: TraceML names a cause from as much coverage on
    steps_for_high: int = 20  # as TraceML asks for to call a difference critical
    floor: float = 0.04  # of the step: below it Holmes loses the signal (slower by 1.04)
    floor_persistent: float = 0.01  # of one that is late in nearly every step, as the verdict names it
    named: int = 4  # ranks in a title


REDUCED = Need("reduced tables of many ranks", lambda a: a.many_ranks, quiet=True)
JUDGED = Need(
    "enough in the reduced tables to judge by: 20 steps of several ranks, and windows where ranks form a pipeline",
    lambda a: a.many_ranks if a.many_ranks is not None and a.many_ranks.verdict != "not_enough" else None,
)
MEAN_STEP = Need("the mean step", lambda a: a.many_ranks.step_ms if a.many_ranks is not None else None)


@rule("communication.late_ranks", REDUCED, JUDGED, MEAN_STEP, learn=LEARN)
def late_ranks(analysis: Analysis) -> Iterator[Claim]:
    verdict, step_ms = JUDGED.of(analysis), MEAN_STEP.of(analysis)
    source = f"reduced tables of {things(verdict.ranks, 'rank')}, {things(verdict.steps, 'step')}"
    absent = len(verdict.missing or ())
    for late in verdict.stragglers:
        sure = late.share_of_steps >= MANY_RANKS.persistent and verdict.steps >= MANY_RANKS.steps_for_high
        yield Claim(
            title=_title(late),
            step_ms=step_ms,
            cost_ms=late.cost_ms,
            floor=MANY_RANKS.floor_persistent if sure else MANY_RANKS.floor,
            levels=("high" if sure else "medium", *(("medium",) if absent or late.cause == "unknown" else ())),
            where=(late.place,) if late.place is not None else (),
            key=f"{late.kind} {late.cause} {late.ranks[:1]} {late.stage} {late.group}",
            ranks=late.ranks,
            evidence=(
                ms("shorter step without it, the steps played again", late.cost_ms, source),
                figure("steps in which it came last", late.share_of_steps, "fraction", source, 3),
                figure("ranks of the job that were not judged", absent or None, "count", source, 0),
                *late.evidence,
            ),
            fix=advice("late_ranks", late.cause).format(at_place(late.place)),
            caveat=f"The cause is known by {late.cause_source}."
            if late.cause != "unknown"
            else "What it was busy with was not recorded: record stacks and telemetry, and windows on all ranks.",
            falsified_by=advice("late_falsified", late.kind).format(advice("late_by", late.cause)),
        )


def _who(late: Straggler) -> str:
    if late.kind == "stage":
        return f"Pipeline stage {late.stage}"
    if late.kind == "host" or (late.kind == "link" and late.hosts):
        return f"Host {late.hosts[0]}"
    if late.kind == "link":
        return f"Group {late.group}"
    ranks = ", ".join(map(str, late.ranks[: MANY_RANKS.named]))
    more = f" and {len(late.ranks) - MANY_RANKS.named} more" if len(late.ranks) > MANY_RANKS.named else ""
    host = f" (host {late.hosts[0]})" if len(late.hosts) == 1 else ""
    return f"Rank{'s' if len(late.ranks) > 1 else ''} {ranks}{more}{host}"


def _title(late: Straggler) -> str:
    amount, line = f"{late.cost_ms:,.1f} ms a step", at(late.place)
    by = advice("late_by", late.cause)
    if late.kind == "rotating":
        return f"Another rank is late in each step, by {by}{line}: all wait {amount}"
    if late.kind == "global":
        return f"All ranks are slow together in some steps, by {by}{line}: {amount} in the mean"
    if late.kind == "stage":
        return f"{_who(late)} has more work than the others{line}: they wait {amount} for it"
    does = advice("late_does", late.cause)
    if len(late.ranks) > 1 and late.kind == "rank":
        does = " ".join(_PLURAL.get(word, word) for word in does.split(" "))
    return f"{_who(late)} {does} {late.excess_ms:,.1f} ms longer a step than its peers{line}: all wait {amount} for it"


_PLURAL = {
    "waits": "wait", "its": "their", "works": "work", "collects": "collect", "computes": "compute",
    "shares": "share", "gets": "get", "transfers": "transfer",
}  # fmt: skip


LEARN_RECORDER = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
NAMED = 4  # ranks in a title
HANG = Need(
    "dumps of flight recorders or a report of NCCL RAS",
    lambda a: a.hang if a.hang is not None and a.hang.causes else None,
    quiet=True,
)


@risk_rule("communication.hang", HANG)
def hang(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk for each thing that the others wait for."""
    verdict = HANG.of(analysis)
    calls = {call.number: call for call in verdict.calls}
    for cause in verdict.causes:
        call = calls.get(cause.call or 0)
        source = f"dumps of {things(verdict.dumps, 'rank')}" if verdict.dumps else "NCCL RAS"
        names = ", ".join(map(str, cause.ranks[:NAMED])) + (" …" if len(cause.ranks) > NAMED else "")
        sure = "low" if cause.kind in (STUCK, NO_DUMP) or cause.call is None else "high"
        doubts = ("medium",) if verdict.disagreements or (verdict.absent and cause.kind != MISMATCH) else ()
        head = advice("hang_head", cause.kind).format(who=f"Rank{'s' if len(cause.ranks) > 1 else ''} {names}")
        waiting = call.waiting if call is not None else None
        yield hang.risk(
            f"{cause.kind} {cause.call} {names}",
            learn=LEARN_RECORDER,
            title=f"{head}{at(cause.place)}",
            severity="warning" if cause.kind == STUCK else "critical",
            confidence=lowest((sure, *doubts)),
            where=(cause.place,) if cause.place is not None else (),
            ranks=cause.ranks,
            evidence=(
                *figures(
                    source,
                    ("ranks that wait in the call", waiting, "count", 0),
                    ("ranks of its group without a dump", (call.no_dump or None) if call else None, "count", 0),
                ),
                figure("open calls that wait for this one or others", len(verdict.calls) or None, "count", source, 0),
            ),
            fix=advice("hang", cause.kind),
            caveat=cause.sentence,
            falsified_by="With dumps of all ranks written later, the same ranks have come to that call",
        )
