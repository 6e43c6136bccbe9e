"""Ranks that wait for one of them: because it works longer on equal batches, or because its batches are larger.

The cost is what the others wait, measured in the phases in which nobody waits: how much longer the slowest rank works
there than the median of the others. It counts as far as the others are that much longer in the exchange.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose import pipeline
from stepscope.diagnose.common import (
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    steps_confidence,
    train_steps,
)
from stepscope.diagnose.thresholds import RANKS
from stepscope.model import Analysis, Evidence, Finding, Interval, Place, StepFacts
from stepscope.model.ranks import RanksFacts

STRAGGLER_RULE = "communication.straggler"
UNBALANCED_RULE = "communication.unbalanced_work"
LEARN = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
LEARN_BATCHES = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"


class _Late(Struct, frozen=True):
    """The rank the others wait for. `by_phase` (ms) is empty where only sampled lines tell."""

    rank: int
    cost_ms: float
    by_phase: dict[str, float]
    evidence: tuple[Evidence, ...]
    level: str
    ranks: tuple[int, ...] = ()  # all that are late for the same reason


def straggler(analysis: Analysis) -> list[Finding]:
    """One finding when one rank makes the others wait, and larger batches are not the reason."""
    train, ranks = train_steps(analysis), analysis.ranks
    if train is None or ranks is None or unequal(ranks):
        return []
    late = _by_steps(ranks) or _by_lines(analysis, ranks)
    if late is None or late.cost_ms < RANKS.floor * train.mean_ms:
        return []
    from_input = _from_input(analysis, late)
    where = _lines(analysis, late, from_input)
    share = clip_share(late.cost_ms, train.mean_ms)
    ceiling = clip_share(pipeline.without_lead(analysis, ranks), train.mean_ms) if late.by_phase else share
    title, fix = _words(ranks, late, where, from_input)
    return [
        Finding(
            id=finding_id(STRAGGLER_RULE, where[0] if where else None),
            rule=STRAGGLER_RULE,
            category="communication",
            title=title,
            severity=severity(share),
            confidence=_confidence(analysis, train, late),
            cost_ms_per_step=share * train.mean_ms,
            share=share,
            gain_ceiling=max(share, ceiling),
            expected_gain=_expected(analysis, train, ranks, late, share),
            where=where,
            ranks=late.ranks or (late.rank,),
            evidence=late.evidence,
            fix=fix,
            caveat=_caveat(analysis),
            learn=LEARN,
            falsified_by=f"With the extra work of rank {late.rank} left out, the mean step of all ranks does not get "
            "shorter",
        )
    ]


def unbalanced_work(analysis: Analysis) -> list[Finding]:
    """One finding when the rank that the others wait for works on more samples than they do."""
    train, ranks = train_steps(analysis), analysis.ranks
    if train is None or ranks is None or not unequal(ranks) or not persistent(ranks):
        return []
    measured, bound, most = _imbalance(analysis, ranks)
    if measured < RANKS.floor * train.mean_ms:
        return []
    share, ceiling = clip_share(measured, train.mean_ms), clip_share(bound, train.mean_ms)
    where = _loaders(analysis)
    counts = ", ".join(f"rank {work.rank}: {work.samples:.0f}" for work in ranks.ranks[: RANKS.ranks_shown])
    more = " …" if len(ranks.ranks) > RANKS.ranks_shown else ""
    at = f" in the DataLoader at {shown(where[0])}" if where else ""
    return [
        Finding(
            id=finding_id(UNBALANCED_RULE, where[0] if where else None),
            rule=UNBALANCED_RULE,
            category="communication",
            title=f"Ranks work on batches of different size ({counts}{more} samples a step): all wait for rank "
            f"{ranks.slowest}",
            severity=severity(share),
            confidence=lowest([steps_confidence(train), most]),
            cost_ms_per_step=share * train.mean_ms,
            share=share,
            gain_ceiling=max(share, ceiling),
            where=where,
            ranks=(ranks.slowest,),
            evidence=(*_step_evidence(ranks), *_sample_evidence(ranks)),
            fix=f"Give every rank as many samples per step{at}: a DistributedSampler with one batch_size for all; with "
            "samples of different length, batches of equal total length",
            caveat="Gradients averaged over ranks weigh a sample of a small batch more than one of a large batch: with "
            "equal batches the training changes, towards what is usually meant.",
            learn=LEARN_BATCHES,
            falsified_by="With as many samples on every rank and the same total, the mean step does not get shorter",
        )
    ]


def unequal(ranks: RanksFacts) -> bool:
    """Whether the slowest rank has notably more samples than the others."""
    samples = [work.samples for work in ranks.ranks if work.rank != ranks.slowest]
    own = ranks.of(ranks.slowest).samples
    known = sorted(count for count in samples if count is not None)
    return own is not None and bool(known) and own >= RANKS.unequal * known[len(known) // 2]


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
    return waited_ms(ranks) if ranks is not None and persistent(ranks) else 0.0


def waited_ms(ranks: RanksFacts) -> float:
    """The excess as far as the others wait that long, and until the next slowest rank is the one all wait for."""
    return max(0.0, min(ranks.excess_ms, ranks.waited_ms, pipeline.lead_ms(ranks)))


# ------------------------------------------------------------------------------------------------- one slow rank


def _by_steps(ranks: RanksFacts) -> _Late | None:
    """By the phases of the steps."""
    if not persistent(ranks):
        return None
    agree = ranks.waited_ms / ranks.excess_ms
    level = (
        "high"
        if ranks.steps >= RANKS.steps_for_high and agree <= 1 / RANKS.agree and agree >= RANKS.agree
        else "medium"
    )
    if ranks.exchange_source.startswith("assumed"):
        level = "medium"
    return _Late(ranks.slowest, waited_ms(ranks), ranks.excess_by_phase_ms, _step_evidence(ranks), level, ranks.slow)


def _by_lines(analysis: Analysis, ranks: RanksFacts) -> _Late | None:
    """By sampled lines: work inside a phase in which ranks also wait cannot be told from the steps."""
    lines = analysis.sampled.rank_lines if analysis.sampled is not None else None
    if lines is None or lines.straggler is None or lines.straggler_place is None or lines.unit != "ms per step":
        return None
    line = next((one for one in lines.lines if one.place == lines.straggler_place and not one.waiting), None)
    waits = [one for one in lines.lines if one.waiting and one.place == lines.waiter_place]
    if line is None or not waits or line.most != lines.straggler:
        return None
    extra = line.by_rank[line.most] - _median(value for rank, value in line.by_rank.items() if rank != line.most)
    own_wait = sum(one.by_rank.get(line.most, 0.0) for one in waits)
    waited = sum(_median(v for rank, v in one.by_rank.items() if rank != line.most) for one in waits) - own_wait
    if waited < RANKS.waited * extra:
        return None
    step_ms = ranks.of(line.most).wall_ms if any(work.rank == line.most for work in ranks.ranks) else 0.0
    samples = analysis.stacks.steady_samples if analysis.stacks is not None else 0
    count = round(samples / max(1, len(lines.ranks)) * extra / step_ms) if step_ms else 0
    evidence = (
        Evidence(f"longer at {shown(line.place)} on rank {line.most}", round(extra, 3), "ms", lines.source),
        Evidence("longer wait of the others", round(waited, 3), "ms", lines.source),
    )
    return _Late(line.most, min(extra, waited), {}, evidence, lowest(["medium", sampled_confidence(count)]))


def _median(values: object) -> float:
    ordered = sorted(values)  # type: ignore[call-overload]
    middle = len(ordered) // 2
    if not ordered:
        return 0.0
    return float(ordered[middle]) if len(ordered) % 2 else float(ordered[middle - 1] + ordered[middle]) / 2


def _from_input(analysis: Analysis, late: _Late) -> bool:
    """Whether the slow rank waits for its loader. Without a loader that phase is the gap before the forward pass."""
    loader = analysis.loader
    if loader is None or (loader.num_workers is None and loader.site is None):
        return False
    return late.by_phase.get("data_wait", 0.0) >= RANKS.mostly * late.cost_ms


def _lines(analysis: Analysis, late: _Late, from_input: bool) -> tuple[Place, ...]:
    """The lines that rank spends longer at than the others, longest first; else where its loader was made."""
    view = analysis.sampled.rank_lines if analysis.sampled is not None else None
    found: list[Place] = []
    if view is not None:
        # as an input problem the loader's lines lead, else they are the others' business
        ahead = [one for one in view.lines if one.most == late.rank and not one.waiting]
        ahead.sort(key=lambda one: (from_input != (one.phase == "data_wait"), -one.spread))
        found = [one.place for one in ahead]
        if view.straggler == late.rank and view.straggler_place is not None:
            found.insert(0, view.straggler_place)
    if from_input and not found and analysis.loader is not None:
        lines = analysis.loader.entries or analysis.loader.lines
        found = [Place(line.file, line.line, line.function) for line in lines]
    if from_input and analysis.loader is not None and analysis.loader.site is not None:
        found.append(analysis.loader.site)
    return _distinct(found)[: RANKS.lines_shown]


def _words(ranks: RanksFacts, late: _Late, where: tuple[Place, ...], from_input: bool) -> tuple[str, str]:
    """(title, fix)."""
    rank, others = late.rank, len(ranks.ranks) - max(1, len(late.ranks))
    also = f" (and {len(late.ranks) - 1} more)" if len(late.ranks) > 1 else ""
    waits = "the other rank waits" if others == 1 else f"{others} other ranks wait"
    amount = f"{late.cost_ms:.1f} ms longer a step"
    at = f" ({shown(where[0])})" if where else ""
    if from_input:
        return (
            f"Rank {rank}{also} loads its batches {amount} than the others{at}: {waits} for it",
            f"Find what makes the input of rank {rank} slower: other files, another format or another storage than on "
            "the other ranks. Give all ranks equal work to load, or load ahead of the step in worker processes"
            + (f", and shorten the work at {shown(where[0])}" if where else ""),
        )
    phase = max(late.by_phase, key=lambda name: late.by_phase[name], default=None)
    inside = f", in {_PHASES[phase]}" if phase in ("forward", "backward", "optimizer") and not where else ""
    return (
        f"Rank {rank}{also} works {amount} than the others{at}{inside}: {waits} for it",
        f"Take the work that rank {rank} alone does out of the step"
        + (f" ({shown(where[0])})" if where else "")
        + ": do it every N steps, share it among the ranks, or move it to a thread or process beside the training",
    )


def _expected(analysis: Analysis, train: StepFacts, ranks: RanksFacts, late: _Late, share: float) -> Interval | None:
    """Of ranks on one host without an accelerator; None for others.

    While the others wait the slow rank has the machine for itself: phases in which it has no more to do than they have
    are shorter there. At worst its pass with the exchange becomes longer by as much, once nobody waits.
    """
    loader = analysis.loader
    if not late.by_phase or loader is None or loader.ranks_on_host < len(ranks.ranks) or _on_device(analysis):
        return None
    slow = ranks.of(ranks.slowest)
    shorter = {phase: ms for phase, ms in late.by_phase.items() if ms < 0 and slow.phases_ms.get(phase, 0.0) > 0}
    own = sum(slow.phases_ms[phase] for phase in shorter)
    longer = -sum(shorter.values()) / own * slow.exchange_ms if own else 0.0
    return Interval(low=max(0.0, share - longer / train.mean_ms), high=share)


_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}


def _confidence(analysis: Analysis, train: StepFacts, late: _Late) -> str:
    levels = [steps_confidence(train), late.level]
    if _on_device(analysis):
        levels.append("medium")
    return lowest(levels)


def _caveat(analysis: Analysis) -> str:
    if _on_device(analysis):
        return (
            "Phases are times of the host, which on a device runs ahead of the work: what the device alone does longer "
            "on one rank is not in them; traces of two ranks show it."
        )
    return "On cores that the ranks share, a rank that waits leaves more of them to the others: less may be gained."


def _on_device(analysis: Analysis) -> bool:
    return any(device != "cpu" for device in analysis.devices)


# ------------------------------------------------------------------------------------------------ unequal batches


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
    transfer = _transfer_ms(analysis, slowest.rank)
    computed = max(0.0, slowest.exchange_ms - (transfer or 0.0))
    cost = max(0.0, measured) + by_work * computed
    own_most = slowest.own_ms + ranks.most_excess_ms - ranks.excess_ms
    most = pipeline.without_work(analysis, by_samples * (own_most + computed))
    return cost, max(cost, most), "medium" if transfer is None else "high"


def _transfer_ms(analysis: Analysis, rank: int) -> float | None:
    """The transfer in a step of that rank, from traces of several ranks. Waiting for another is no part of it."""
    view = analysis.views.distributed if analysis.views is not None else None
    if view is None:
        return None
    found = [
        share.transferring_ns / 1e6
        for share in view.workers
        if share.span.rank == rank and share.transferring_ns is not None
    ]
    return sum(found) / len(found) if found else None


def _loaders(analysis: Analysis) -> tuple[Place, ...]:
    """The user's own constructions, else the line that the framework makes its loader by."""
    own = [site.place for site in analysis.sites if site.what == "DataLoader" and site.via is None]
    known = [place for place in own or [analysis.loader.site if analysis.loader is not None else None] if place]
    return _distinct(known)[: RANKS.lines_shown]


def _distinct(places: list[Place]) -> tuple[Place, ...]:
    return tuple({(place.file, place.line): place for place in reversed(places)}.values())[::-1]


def _step_evidence(ranks: RanksFacts) -> tuple[Evidence, ...]:
    source = f"steps.jsonl of {len(ranks.ranks)} ranks, {ranks.steps} steps side by side"
    waits = f"{source}; waits in {', '.join(ranks.exchange)}: {ranks.exchange_source}"
    found = [
        Evidence(f"own work of rank {ranks.slowest}", round(ranks.of(ranks.slowest).own_ms, 3), "ms", waits),
        Evidence("longer than the others (median)", round(ranks.excess_ms, 3), "ms", source),
        Evidence("longer in the slowest rank's best quarter of the run", round(ranks.least_excess_ms, 3), "ms", source),
        Evidence("longer wait of the others (median)", round(ranks.waited_ms, 3), "ms", waits),
        Evidence("steps in which that rank worked longest", round(ranks.slowest_share, 4), "fraction", source),
    ]
    for phase, extra in ranks.excess_by_phase_ms.items():
        if extra >= RANKS.line_share * max(ranks.excess_ms, 0.0) and extra > 0:
            found.append(Evidence(f"longer in {phase.replace('_', ' ')}", round(extra, 3), "ms", source))
    return tuple(found)


def _sample_evidence(ranks: RanksFacts) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            f"samples per step of rank {work.rank}", round(work.samples, 2), "samples", f"rank-{work.rank}/steps.jsonl"
        )
        for work in ranks.ranks[: RANKS.ranks_shown]
        if work.samples is not None
    )
