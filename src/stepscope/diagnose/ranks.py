"""Ranks that wait for one of them, and communication itself: many small collectives, exposed ones, slow backends.

A rank is slow because it works longer on equal batches, or because its batches are larger. The cost is what the others
wait, measured in the phases in which nobody waits: how much longer the slowest rank works there than the median of the
others. It counts as far as the others are that much longer in the exchange. DataParallel, one process that copies the
model to all devices in every step, is a rule here too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose import gains
from stepscope.diagnose.common import (
    bare,
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    steps_confidence,
    train_steps,
)
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.diagnose.thresholds import COLLECTIVES, RANKS
from stepscope.model import Analysis, Evidence, Finding, Interval, Place, StepFacts
from stepscope.model.device_losses import COLLECTIVES as ALL_COLLECTIVES
from stepscope.model.device_losses import DATA_PARALLEL, DeviceLosses, Loss
from stepscope.model.ranks import RanksFacts
from stepscope.model.trace import SpanRef
from stepscope.model.views import DEVICE, HOST, CollectiveRow, Overview, WorkerShare

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
    ceiling = clip_share(gains.without_lead(analysis, ranks), train.mean_ms) if late.by_phase else share
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
    return max(0.0, min(ranks.excess_ms, ranks.waited_ms, gains.lead_ms(ranks)))


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
    most = gains.without_work(analysis, by_samples * (own_most + computed))
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


SMALL_RULE = "communication.many_small_collectives"
EXPOSED_RULE = "communication.exposed"
GLOO_RULE = "communication.gloo_on_gpu"
LEARN_DDP = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
LEARN_BACKENDS = "https://docs.pytorch.org/docs/stable/distributed.html#backends"
_EXPOSED = {DEVICE: "exposed_communication", HOST: "host_communication"}
_OPERATOR = "c10d::"
_WITHOUT_WAITING = "Waiting for other ranks is in the ceiling, not in the cost."


# ------------------------------------------------------------------------------------------------ small messages


class _Small(Struct, frozen=True):
    """The small collectives of one span, per step. `kept_ns` is what the same bytes take in one call."""

    span: SpanRef
    calls: float
    bytes: float
    exposed_ns: float
    kept_ns: float
    step_ns: float
    steps: int
    name: str  # of the kind with most time
    largest: int


def many_small_collectives(analysis: Analysis) -> list[Finding]:
    """One finding when a step makes many calls for messages that one call could carry."""
    spans = _small(analysis)
    if not spans:
        return []
    alone = sum(one.exposed_ns for one in spans) / len(spans)
    step_ns = sum(one.step_ns for one in spans) / len(spans)
    kept = sum(one.kept_ns for one in spans) / len(spans)
    most = max(spans, key=lambda one: (one.exposed_ns, one.span.rank))
    where, measured = _line(analysis, most.name)
    step_ms = _step_ms(analysis, step_ns)
    # Calls cost Python, too, and a window slows Python down: sampled stacks of steady steps know better.
    all_ms = measured if measured is not None else alone / step_ns * step_ms
    all_ms = max(0.0, all_ms - straggler_ms(analysis))
    cost = all_ms * (1.0 - min(1.0, kept / alone))
    share = clip_share(cost, step_ms)
    if share < COLLECTIVES.floor:
        return []
    calls = sum(one.calls for one in spans) / len(spans)
    size = sum(one.bytes for one in spans) / len(spans) / calls
    at = f" ({shown(where[0])})" if where else ""
    return [
        Finding(
            id=finding_id(SMALL_RULE, where[0] if where else None),
            rule=SMALL_RULE,
            category="communication",
            title=f"{calls:.0f} small collectives per step, {_size(size)} each on average{at}: their number costs more "
            "than their bytes",
            severity=severity(share),
            confidence=_trace_confidence(most.steps, measured is not None),
            cost_ms_per_step=share * step_ms,
            share=share,
            gain_ceiling=max(share, clip_share(max(all_ms, _loop_ms(analysis, where)), step_ms)),
            where=where,
            ranks=tuple(sorted({one.span.rank for one in spans})),
            evidence=_small_evidence(spans, calls, size, alone, kept, measured),
            fix="Send one message instead of many: DistributedDataParallel gathers gradients in buckets and sends them "
            "during the backward pass; by hand, flatten the tensors into one (torch.cat of their flattened values), "
            "reduce that, and copy the parts back",
            caveat="The flat copy takes memory for all messages together, and copying it takes a little time.",
            learn=LEARN_DDP,
            falsified_by="With all tensors flattened into one message per step, the mean step does not get shorter",
            explains=tuple(finding.id for finding in exposed(analysis)),
        )
    ]


def small_lines(analysis: Analysis) -> tuple[Place, ...]:
    """The lines of what `many_small_collectives` reports: no other rule tells their time again."""
    return tuple(place for finding in many_small_collectives(analysis) for place in finding.where)


def _small(analysis: Analysis) -> list[_Small]:
    """Spans with many small calls per step whose bytes would take one call notably less."""
    views = analysis.views
    if views is None:
        return []
    rows: dict[SpanRef, list[CollectiveRow]] = defaultdict(list)
    for row in views.communication:
        rows[row.span].append(row)
    found = []
    for span in views.spans:
        overview = span.overview
        if overview is None or not overview.has_steps or not overview.steps:
            continue
        one = _small_of(span.span, rows.get(span.span, []), overview)
        if one is not None and one.calls >= COLLECTIVES.calls and one.exposed_ns > one.kept_ns and one.step_ns > 0:
            found.append(one)
    return found


def _small_of(ref: SpanRef, rows: list[CollectiveRow], overview: Overview) -> _Small | None:
    steps = len(overview.steps)
    small = [row for row in rows if row.message_bytes is not None and row.message_bytes < COLLECTIVES.small_bytes]
    if not small:
        return None
    latency = min(row.min_ns for row in small)
    rates = [(row.message_bytes or 0) / row.min_ns for row in rows if row.min_ns > 0]
    best = max(rates, default=0.0)
    total = sum((row.message_bytes or 0) * row.calls for row in small) / steps
    times: dict[str, int] = defaultdict(int)
    for row in small:
        times[row.name] += row.total_ns
    return _Small(
        span=ref,
        calls=sum(row.calls for row in small) / steps,
        bytes=total,
        exposed_ns=sum(row.exposed_ns for row in small) / steps,
        kept_ns=latency + (total / best if best > 0 else 0.0),
        step_ns=overview.wall.mean_ns,
        steps=steps,
        name=max(times, key=lambda name: (times[name], name)),
        largest=max(row.message_bytes or 0 for row in small),
    )


def _line(analysis: Analysis, name: str) -> tuple[tuple[Place, ...], float | None]:
    """The user's line that calls most collectives of this kind ("" for any), and its sampled ms in a steady step, where
    known."""
    letters = "".join(filter(str.isalpha, name))
    operators = [
        row
        for row in (analysis.views.operators if analysis.views is not None else ())
        if row.name.startswith(_OPERATOR) and letters in row.name.replace("_", "") and row.place is not None
    ]
    if not operators:
        return (), None
    most = max(operators, key=lambda row: (row.calls_per_step or 0.0, row.calls, row.name))
    place = most.place
    assert place is not None
    for line in analysis.stacks.hot_lines if analysis.stacks is not None else ():
        inside = "/torch/distributed/" in f"/{line.library_leaf or ''}"
        # where only the function is known, its line that samples saw in a collective
        same = line.line == place.line if most.place_exact else bare(line.function) == bare(place.function or "")
        if line.file == place.file and same and inside and line.role == "rank":
            return (replace(place, line=line.line),), line.ms_per_step
    return (place,), None


def _loop_ms(analysis: Analysis, where: tuple[Place, ...]) -> float:
    """What the loop around that line takes in a step: it goes with the calls. 0 where no loop is known."""
    lines = {(place.file, place.line) for place in where}
    return max(
        (loop.ms_per_step for loop in analysis.loops or () if (loop.place.file, loop.place.line) in lines), default=0.0
    )


def _small_evidence(
    spans: list[_Small], calls: float, size: float, exposed: float, kept: float, measured: float | None
) -> tuple[Evidence, ...]:
    source = _spans_source(one.span for one in spans)
    found = [
        Evidence("small collectives per step", round(calls, 1), "calls", source),
        Evidence("mean message", round(size), "bytes", source),
        Evidence("largest small message", max(one.largest for one in spans), "bytes", source),
        Evidence("small collectives that nothing hides, per step", round(exposed / 1e6, 3), "ms", source),
        Evidence("the same bytes at the best rate seen, in one call", round(kept / 1e6, 3), "ms", source),
        Evidence("mean profiled step", round(sum(one.step_ns for one in spans) / len(spans) / 1e6, 3), "ms", source),
    ]
    if measured is not None:
        found.append(Evidence("time at that line, per steady step", round(measured, 3), "ms", "sampled stacks"))
    return tuple(found)


# ---------------------------------------------------------------------------------------- exposed, on any backend


def exposed(analysis: Analysis) -> list[Finding]:
    """One finding per run that does nothing but communicate in more than a tenth of the step.

    On devices that is what their kernels tell; of ranks that train on processors, collectives of gloo or MPI beside
    which no operator computes.
    """
    runs: dict[str, list[Overview]] = defaultdict(list)
    for one in _communicating(analysis):
        runs[one.span.run].append(one)
    findings = []
    for run in data_parallel_runs(analysis):
        runs.pop(run, None)
    for run, overviews in sorted(runs.items()):
        finding = _exposed(analysis, run if len(runs) > 1 else "", overviews)
        if finding is not None:
            findings.append(finding)
    return findings


def exposed_share(analysis: Analysis) -> float:
    """The part of profiled steps in which nothing but communication happens, mean over ranks; 0 without collectives.

    Waiting for other ranks, where it is known, is left out: that somebody waits explains nothing.
    """
    found = list(_communicating(analysis))
    if not found:
        return 0.0
    waiting = _waiting(_workers(analysis, {one.span for one in found})) or 0.0
    return (1.0 - waiting) * sum(one.parts[_EXPOSED[one.basis]].share for one in found) / len(found)


def _communicating(analysis: Analysis) -> Iterator[Overview]:
    """Of each trace with collectives where its steps go."""
    views = analysis.views
    called = {row.span for row in views.communication} if views is not None else set()
    for span in views.spans if views is not None else ():
        one = span.overview
        if one is not None and _EXPOSED[one.basis] in one.parts and (one.basis == DEVICE or one.span in called):
            yield one


def _exposed(analysis: Analysis, run: str, overviews: list[Overview]) -> Finding | None:
    exposed_ns = sum(one.parts[_EXPOSED[one.basis]].mean_ns for one in overviews) / len(overviews)
    step_ns = sum(one.wall.mean_ns for one in overviews) / len(overviews)
    spans = {one.span for one in overviews}
    shares = _workers(analysis, spans)
    waiting = _waiting(shares)
    on_host = all(one.basis == HOST for one in overviews)
    step_ms = _step_ms(analysis, step_ns)
    most = share = clip_share(exposed_ns, step_ns)
    if on_host:
        # Ranks that share a machine's cores wait for each other by turns, whatever they send. A window slows Python and
        # operators down, and hardly what crosses between processes.
        told = straggler_ms(analysis) if waiting is None else waiting * share * step_ms
        share = clip_share(share * step_ms - told, step_ms)
        most = clip_share(exposed_ns / 1e6, step_ms)
    if share < COLLECTIVES.exposed:
        return None
    rows = [row for row in analysis.views.communication if row.span in spans] if analysis.views is not None else []
    times: dict[str, int] = defaultdict(int)
    for row in rows:
        times[row.name] += row.exposed_ns
    kinds = sorted((name for name in times if times[name] > 0), key=lambda name: (-times[name], name))
    steps = min(len(one.steps) if one.has_steps else 0 for one in overviews)
    source = _spans_source(spans)
    evidence = [
        Evidence("communication that nothing hides, per step", round(exposed_ns / 1e6, 3), "ms", source),
        Evidence("mean profiled step", round(step_ns / 1e6, 3), "ms", source),
    ]
    windows = max(1, sum(len(one.steps) for one in overviews))
    calls = sum(row.calls for row in rows) / windows
    if calls:
        evidence.append(Evidence("collectives per step", round(calls, 1), "calls", source))
    for name in kinds[: COLLECTIVES.kinds_shown]:
        ns = times[name] / windows
        evidence.append(Evidence(f"of it in {name}", round(ns / 1e6, 3), "ms", source))
    if waiting is not None:
        evidence.append(
            Evidence("waiting for other ranks, of all communication", round(waiting, 4), "fraction", source)
        )
    late = _last_rank(analysis, spans)
    if late is not None and waiting is not None and waiting >= COLLECTIVES.waiting:
        evidence.append(Evidence("rank that came last where others waited longest", late, "rank", source))
    layers = _sync_batch_norms(analysis, overviews[0].span.run)
    if layers:
        evidence.append(Evidence("SyncBatchNorm layers per step", round(layers, 1), "calls", source))
    gain = replayed(analysis, overviews[0].span.run, ALL_COLLECTIVES)
    evidence += gain.evidence if gain is not None else ()
    known = gain.caveat(share) if gain is not None else BY_SUBTRACTION
    where = _line(analysis, kinds[0])[0] or _line(analysis, "")[0] if on_host and kinds else ()
    title = f"Nothing hides {exposed_ns / 1e6:.1f} ms of communication per step{f' ({kinds[0]})' if kinds else ''}"
    return Finding(
        id=finding_id(EXPOSED_RULE, Place(run, None) if run else None),
        rule=EXPOSED_RULE,
        category="communication",
        title=title + (f" of {run}" if run else ""),
        severity=severity(share),
        confidence=lowest([_trace_confidence(steps, not on_host), "high" if waiting is not None else "medium"]),
        cost_ms_per_step=share * step_ms,
        share=share,
        gain_ceiling=max(share, most, gain.share if gain is not None else 0.0),
        where=where,
        ranks=tuple(sorted({span.rank for span in spans})),
        evidence=tuple(evidence),
        fix=exposed_fix(waiting, layers),
        caveat=f"{exposed_caveat(analysis, waiting)} {_WITHOUT_WAITING if on_host and waiting else ''} {known}".strip(),
        learn=LEARN_DDP,
        falsified_by="With the collectives left out (DistributedDataParallel.no_sync(), or one rank alone on the same "
        "batch), the mean step does not get shorter",
    )


def _sync_batch_norms(analysis: Analysis, run: str) -> float:
    return sum(losses.sync_batch_norms_per_step for losses in analysis.device_losses if losses.run == run)


def _workers(analysis: Analysis, spans: set[SpanRef]) -> list[WorkerShare]:
    view = analysis.views.distributed if analysis.views is not None else None
    return [share for share in view.workers if share.span in spans] if view is not None else []


def _waiting(shares: list[WorkerShare]) -> float | None:
    """The part of matched communication that is waiting for other ranks."""
    wait = sum(share.synchronizing_ns or 0 for share in shares)
    move = sum(share.transferring_ns or 0 for share in shares)
    return wait / (wait + move) if wait + move > 0 else None


def _last_rank(analysis: Analysis, spans: set[SpanRef]) -> int | None:
    view = analysis.views.distributed if analysis.views is not None else None
    if view is None or not any(share.span in spans for share in view.workers):
        return None
    rows = [row for row in view.collectives if row.last_rank is not None]
    return max(rows, key=lambda row: (row.synchronizing_ns * row.calls, row.name)).last_rank if rows else None


# ------------------------------------------------------------------------------------------- gloo on a device


def gloo_on_gpu(analysis: Analysis) -> list[Finding]:
    """One finding when tensors of GPUs are exchanged by gloo, which goes through the host's memory."""
    views = analysis.views
    if views is None:
        return []
    rows = [row for row in views.communication if row.library == "gloo"]
    overviews = {
        span.span: span.overview for span in views.spans if span.overview is not None and span.overview.basis == DEVICE
    }
    rows = [row for row in rows if row.span in overviews]
    if not rows:
        return []
    used = [overviews[span] for span in {row.span for row in rows}]
    steps = max(1, sum(len(one.steps) for one in used))
    lost = sum(row.exposed_ns for row in rows) / steps
    step_ns = sum(one.wall.mean_ns for one in used) / len(used)
    share = clip_share(lost, step_ns)
    if share < COLLECTIVES.floor:
        return []
    step_ms = _step_ms(analysis, step_ns)
    source = _spans_source(row.span for row in rows)
    return [
        Finding(
            id=finding_id(GLOO_RULE, None),
            rule=GLOO_RULE,
            category="communication",
            title=f"Ranks with GPUs exchange by gloo, through the host's memory: {lost / 1e6:.1f} ms per step in which "
            "no GPU computes",
            severity=severity(share),
            confidence=_trace_confidence(min(len(one.steps) if one.has_steps else 0 for one in used), True),
            cost_ms_per_step=share * step_ms,
            share=share,
            gain_ceiling=share,
            where=(),
            ranks=tuple(sorted({row.span.rank for row in rows})),
            evidence=(
                Evidence(
                    "collectives of gloo per step", round(sum(row.calls for row in rows) / steps, 1), "calls", source
                ),
                Evidence("gloo while no device computes, per step", round(lost / 1e6, 3), "ms", source),
                Evidence("mean profiled step", round(step_ns / 1e6, 3), "ms", source),
            ),
            fix='init_process_group("nccl"): it moves data from GPU to GPU without the host',
            caveat="Tensors of the CPU still need gloo: init_process_group('cpu:gloo,cuda:nccl') has both.",
            learn=LEARN_BACKENDS,
            falsified_by="With the nccl backend the mean step does not get shorter",
        )
    ]


# ---------------------------------------------------------------------------------------------------------- shared


def _step_ms(analysis: Analysis, step_ns: float) -> float:
    """The step a share is of: of a recorded run the steady one, of traces of others the profiled one."""
    train = train_steps(analysis)
    return train.mean_ms if train is not None and analysis.windows else step_ns / 1e6


def _trace_confidence(steps: int, sure: bool) -> str:
    if not steps:
        return "low"
    return "high" if sure and steps >= COLLECTIVES.steps_for_high else "medium"


def _spans_source(spans: Iterable[SpanRef]) -> str:
    names = sorted({span.trace for span in spans if span.trace} | {span.process for span in spans if not span.trace})
    return f"trace {names[0]}" if len(names) == 1 else f"{len(names)} traces"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"


def exposed_fix(waiting: float | None, sync_batch_norms: float) -> str:
    """By the part of it that is waiting for other ranks, None where unknown, and SyncBatchNorm layers per step."""
    return _moves(waiting) + _sync_fix(sync_batch_norms)


def _moves(waiting: float | None) -> str:
    moves = (
        "Overlap it with computation (larger or earlier buckets, bucket_cap_mb and gradient_as_bucket_view of "
        "DistributedDataParallel, prefetching in FSDP), or move less: gradients in half precision "
        "(bf16_compress_hook), gradient accumulation, fewer and larger messages"
    )
    if waiting is None:
        return f"{moves}. Record two ranks or more to see what of it is waiting for a slower rank"
    if waiting >= COLLECTIVES.waiting:
        return f"Most of it is waiting for other ranks: give all ranks equal work first. What is left: {moves}"
    return moves


def _sync_fix(layers: float) -> str:
    if layers <= COLLECTIVES.sync_batch_norms:
        return ""
    return (
        f". {layers:.0f} SyncBatchNorm layers exchange statistics forward and backward, and nothing can hide it: keep "
        "them only where a rank's batch is too small for statistics of its own"
    )


def exposed_caveat(analysis: Analysis, waiting: float | None) -> str:
    """What the traces of the ranks at hand do not tell."""
    view = analysis.views.distributed if analysis.views is not None else None
    if waiting is None:
        return "One rank's trace does not tell a transfer from waiting for another rank."
    if view is not None and view.missing_ranks:
        return "Not all ranks were recorded: waiting for one that was not counts as transfer."
    return "Compressed gradients change the numbers; larger buckets take memory."


DATA_PARALLEL_RULE = "communication.data_parallel"
LEARN_DATA_PARALLEL = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-nn-ddp-instead"


def data_parallel(analysis: Analysis) -> list[Finding]:
    """One finding when what DataParallel does around the model costs more than the floor."""
    return [_data_parallel(analysis, *one) for one in basis.seen(analysis, DATA_PARALLEL)]


def data_parallel_runs(analysis: Analysis) -> frozenset[str]:
    """Runs of which `data_parallel` speaks: their collectives are its own."""
    return frozenset(losses.run for losses, _, _ in basis.seen(analysis, DATA_PARALLEL))


def _data_parallel(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    devices = loss.details.get("devices", 0.0)
    words = Words(
        title=f"DataParallel copies the model to {devices:.0f} devices and splits and gathers batches in every step: "
        f"{cost / 1e6:.1f} ms per step that nothing hides{basis.first_at(loss)}",
        fix="Wrap the model in DistributedDataParallel and start one process for each GPU (torchrun): each keeps its "
        "model, and only gradients are exchanged, during the backward pass",
        caveat="The cost leaves out that one Python process launches for all devices in turn, and that the first "
        "device computes the loss alone. Under DistributedDataParallel the batch size is that of one process.",
        falsified_by="With DistributedDataParallel on the same GPUs and the same total batch the mean step does not "
        "get shorter",
        learn=LEARN_DATA_PARALLEL,
    )
    evidence = (
        ms("replicating, scattering and gathering with no kernel beside it", loss.ns_per_step, source),
        Evidence("devices", round(devices), "devices", source),
        *basis.parts_evidence(loss, source, "of it in {}"),
    )
    claim = Claim(DATA_PARALLEL_RULE, "communication", loss, cost, cost, words, evidence)
    return basis.finding(analysis, losses, claim)
