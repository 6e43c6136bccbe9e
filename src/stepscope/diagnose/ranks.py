"""Ranks that wait for one of them, and communication itself: many small collectives, exposed ones, slow backends.

A rank is slow because it works longer on equal batches, or because its batches are larger. The cost is what the others
wait, measured in the phases in which nobody waits: how much longer the slowest rank works there than the median of the
others. It counts as far as the others are that much longer in the exchange. DataParallel, one process that copies the
model to all devices in every step, is a rule here too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.device import DEVICE_WORK, TRACED, ProfiledLoss, loss_rule, profiled_losses, profiled_step_ms
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.diagnose.rule import (
    ON_DEVICE,
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    accelerator,
    always,
    at,
    at_place,
    bare,
    clip_share,
    figure,
    figures,
    lowest,
    ms,
    overviews,
    rule,
    sampled_confidence,
    shown,
    spot,
    traced_confidence,
    traces_source,
)
from stepscope.model import Analysis, Evidence, Interval, Place, StepFacts
from stepscope.model import device_losses as kinds
from stepscope.model.counted import things
from stepscope.model.machine import RanksFacts
from stepscope.model.trace import SpanRef
from stepscope.model.views import DEVICE, HOST, Overview, WorkerShare


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
    line_share: float = 0.1  # of the excess; a phase with less explains nothing
    ranks_shown: int = 4


class COLLECTIVES(Thresholds):
    exposed: float = 0.10  # of the step, where PyTorch's TensorBoard plugin begins to warn
    waiting: float = 0.5  # of the communication: then it is the ranks' unequal work, not the network
    small_bytes: int = 1 << 20  # DistributedDataParallel's first bucket; smaller messages do not fill a link
    calls: int = 10  # per step; buckets of the smallest models and a few reduced metrics are fewer; chosen, untuned
    sync_batch_norms: float = 20  # layers per step, from which Ascend's msprof-analyze advises to have fewer
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    kinds_shown: int = 3


CALLED = Need(
    "a profiler window or trace with collectives",
    lambda a: a.views.communication if a.views is not None else (),
    traced=always,
)
COMMUNICATES = Need(
    "several ranks", lambda a: len(a.run.ranks) > 1 or (a.run.world_size or 1) > 1 or CALLED.present(a), quiet=True
)
SEVERAL_RANKS = Need(  # of many, some are read beside the verdict on all (`many_ranks`), and prove nothing alone
    "several ranks", lambda a: len(a.run.ranks) > 1 and a.many_ranks is None, quiet=True
)
RANK_STEPS = Need("steady steps of every rank, with their phases", lambda a: a.ranks)
RANK_SAMPLES = Need(
    "the samples of every rank's steps",
    lambda a: a.ranks is not None and all(work.samples is not None for work in a.ranks.ranks),
)
EXPOSURE = Need(  # what hides communication: work of devices, or operators where ranks train on processors
    "a profiler trace with device work", lambda a: DEVICE_WORK.present(a) or not ON_DEVICE.present(a)
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
    title, fix = _words(ranks, late, where, from_input)
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
    return _distinct(found)[: RANKS.lines_shown]


def _distinct(places: list[Place]) -> tuple[Place, ...]:
    """Each line once, in the order of their last."""
    return tuple({spot(place): place for place in reversed(places)}.values())[::-1]


_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}


def _words(ranks: RanksFacts, late: _Late, where: tuple[Place, ...], from_input: bool) -> tuple[str, str]:
    """(title, fix)."""
    rank, others = late.rank, len(ranks.ranks) - len(late.ranks)
    slow = f"Rank {rank}" + (f" (and {len(late.ranks) - 1} more)" if len(late.ranks) > 1 else "")
    waits = "the other rank waits" if others == 1 else f"{others} other ranks wait"
    amount = f"{late.cost_ms:.1f} ms longer a step than the others{at(*where)}"
    if from_input:
        shorten = f", and shorten the work{at_place(where[0])}" if where else ""
        return (
            f"{slow} loads its batches {amount}: {waits} for it",
            f"Find what makes the input of rank {rank} slower: other files, another format or another storage than on "
            "the other ranks. Give all ranks equal work to load, or load ahead of the step in worker processes"
            f"{shorten}",
        )
    phase = max(late.by_phase, key=lambda name: late.by_phase[name], default=None)
    inside = f", in {_PHASES[phase]}" if phase in _PHASES and not where else ""
    return (
        f"{slow} works {amount}{inside}: {waits} for it",
        f"Take the work that rank {rank} alone does out of the step{at(*where)}: do it every N steps, share it among "
        "the ranks, or move it to a thread or process beside the training",
    )


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
    where = _distinct(found)[: RANKS.lines_shown]
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
        for share in _workers(analysis)
        if share.span.rank == slowest.rank and share.transferring_ns is not None
    ]
    transfer = sum(transfers) / len(transfers) if transfers else 0.0
    computed = max(0.0, slowest.exchange_ms - transfer)
    cost = max(0.0, measured) + by_work * computed
    own_most = slowest.own_ms + ranks.most_excess_ms - ranks.excess_ms
    most = gains.without_work(analysis, by_samples * (own_most + computed))
    return cost, most, "high" if transfers else "medium"


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


@rule("communication.many_small_collectives", COMMUNICATES, CALLED, learn=LEARN)
def many_small_collectives(analysis: Analysis) -> Iterator[Claim]:
    spans = list(_small(analysis))
    if not spans:
        return
    alone, step_ns, kept, calls, size = (
        sum(values) / len(spans)
        for values in zip(*((s.exposed_ns, s.step_ns, s.kept_ns, s.calls, s.bytes) for s in spans), strict=True)
    )
    most = max(spans, key=lambda one: (one.exposed_ns, one.span.rank))
    where, measured = _line(analysis, most.name)
    step_ms = profiled_step_ms(analysis, step_ns)
    # Calls cost Python, too, and a window slows Python down: sampled stacks of steady steps know better.
    all_ms = measured if measured is not None else alone / step_ns * step_ms
    all_ms = max(0.0, all_ms - straggler_ms(analysis))
    cost = all_ms * (1.0 - min(1.0, kept / alone))
    lines = {spot(place) for place in where}
    around = [loop.ms_per_step for loop in analysis.loops or () if spot(loop.place) in lines]  # it goes with the calls
    source = _spans_source(one.span for one in spans)
    evidence = [
        figure("small collectives per step", calls, "calls", source, 1),
        Evidence("mean message", round(size / calls), "bytes", source),
        Evidence("largest small message", max(one.largest for one in spans), "bytes", source),
        ms("small collectives that nothing hides, per step", alone / 1e6, source),
        ms("the same bytes at the best rate seen, in one call", kept / 1e6, source),
        ms("mean profiled step", step_ns / 1e6, source),
        ms("time at that line, per steady step", measured, "sampled stacks"),
    ]
    yield Claim(
        title=f"{calls:.0f} small collectives per step, {_size(size / calls)} each on average{at(*where)}: their "
        "number costs more than their bytes",
        step_ms=step_ms,
        cost_ms=cost,
        ceiling_ms=max(all_ms, max(around, default=0.0)),
        levels=(
            traced_confidence(most.steps, COLLECTIVES.steps_for_high, "high" if measured is not None else "medium"),
        ),
        where=where,
        ranks=tuple(sorted({one.span.rank for one in spans})),
        evidence=evidence,
        fix="Send one message instead of many: DistributedDataParallel gathers gradients in buckets and sends them "
        "during the backward pass; by hand, flatten the tensors into one (torch.cat of their flattened values), "
        "reduce that, and copy the parts back",
        caveat="The flat copy takes memory for all messages together, and copying it takes a little time.",
        falsified_by="With all tensors flattened into one message per step, the mean step does not get shorter",
        explains=tuple(exposed.id_of(claim) for claim in exposed.judge(analysis)),
    )


def small_lines(analysis: Analysis) -> tuple[Place, ...]:
    """The lines of what `many_small_collectives` reports: no other rule tells their time again."""
    return tuple(place for claim in many_small_collectives.judge(analysis) for place in claim.where)


def _small(analysis: Analysis) -> Iterator[_Small]:
    """Spans with many small calls per step whose bytes would take one call notably less."""
    for overview in overviews(analysis):
        rows = [row for row in CALLED.find(analysis) or () if row.span == overview.span]
        small = [row for row in rows if row.message_bytes is not None and row.message_bytes < COLLECTIVES.small_bytes]
        steps = len(overview.steps)
        if not small or not steps or not overview.has_steps:
            continue
        best = max(((row.message_bytes or 0) / row.min_ns for row in rows if row.min_ns > 0), default=0.0)
        total = sum((row.message_bytes or 0) * row.calls for row in small) / steps
        times: Counter[str] = Counter()
        for row in small:
            times[row.name] += row.total_ns
        one = _Small(
            span=overview.span,
            calls=sum(row.calls for row in small) / steps,
            bytes=total,
            exposed_ns=sum(row.exposed_ns for row in small) / steps,
            kept_ns=min(row.min_ns for row in small) + (total / best if best > 0 else 0.0),
            step_ns=overview.wall.mean_ns,
            steps=steps,
            name=max(times, key=lambda name: (times[name], name)),
            largest=max(row.message_bytes or 0 for row in small),
        )
        if one.calls >= COLLECTIVES.calls and one.exposed_ns > one.kept_ns and one.step_ns > 0:
            yield one


def _line(analysis: Analysis, name: str) -> tuple[tuple[Place, ...], float | None]:
    """The user's line that calls most collectives of this kind ("" for any), and its sampled ms in a steady step, where
    known."""
    letters = "".join(filter(str.isalpha, name))
    operators = [
        (row, row.place)
        for row in (analysis.views.operators if analysis.views is not None else ())
        if row.name.startswith("c10d::") and letters in row.name.replace("_", "") and row.place is not None
    ]
    if not operators:
        return (), None
    most, place = max(operators, key=lambda pair: (pair[0].calls_per_step or 0.0, pair[0].calls, pair[0].name))
    for line in analysis.stacks.hot_lines if analysis.stacks is not None else ():
        inside = "/torch/distributed/" in f"/{line.library_leaf or ''}"
        # where only the function is known, its line that samples saw in a collective
        same = line.line == place.line if most.place_exact else bare(line.function) == bare(place.function or "")
        if line.file == place.file and same and inside and line.role == "rank":
            return (replace(place, line=line.line),), line.ms_per_step
    return (place,), None


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"


_EXPOSED = {DEVICE: "exposed_communication", HOST: "host_communication"}


@rule("communication.exposed", COMMUNICATES, EXPOSURE, CALLED, learn=LEARN)
def exposed(analysis: Analysis) -> Iterator[Claim]:
    """A run does nothing but communicate in more than a tenth of the step.

    On devices that is what their kernels tell; of ranks that train on processors, collectives of gloo or MPI beside
    which no operator computes. What DataParallel does is told there.
    """
    runs: dict[str, list[Overview]] = defaultdict(list)
    told = {seen.losses.run for seen in profiled_losses(analysis, kinds.DATA_PARALLEL)}
    for one in _communicating(analysis):
        if one.span.run not in told:
            runs[one.span.run].append(one)
    for run, found in sorted(runs.items()):
        yield from _exposed(analysis, run if len(runs) > 1 else "", found)


def exposed_share(analysis: Analysis) -> float:
    """The part of profiled steps in which nothing but communication happens, mean over ranks; 0 without collectives.

    Waiting for other ranks, where it is known, is left out: that somebody waits explains nothing.
    """
    found = _communicating(analysis)
    if not found:
        return 0.0
    waiting = _waiting(analysis, {one.span for one in found}) or 0.0
    return (1.0 - waiting) * sum(one.parts[_EXPOSED[one.basis]].share for one in found) / len(found)


def _communicating(analysis: Analysis) -> list[Overview]:
    called = {row.span for row in CALLED.find(analysis) or ()}
    found = [one for one in overviews(analysis) if _EXPOSED[one.basis] in one.parts]
    return [one for one in found if one.basis == DEVICE or one.span in called]


def _exposed(analysis: Analysis, run: str, found: list[Overview]) -> Iterator[Claim]:
    exposed_ns = sum(one.parts[_EXPOSED[one.basis]].mean_ns for one in found) / len(found)
    step_ns = sum(one.wall.mean_ns for one in found) / len(found)
    step_ms = profiled_step_ms(analysis, step_ns)
    spans = {one.span for one in found}
    waiting = _waiting(analysis, spans)
    on_host = all(one.basis == HOST for one in found)
    most = share = clip_share(exposed_ns, step_ns)
    if on_host:
        # Ranks that share a machine's cores wait for each other by turns, whatever they send. A window slows Python and
        # operators down, and hardly what crosses between processes.
        told = straggler_ms(analysis) if waiting is None else waiting * share * step_ms
        share = clip_share(share * step_ms - told, step_ms)
        most = clip_share(exposed_ns / 1e6, step_ms)
    if share < COLLECTIVES.exposed:
        return
    rows = [row for row in CALLED.find(analysis) or () if row.span in spans]
    times: Counter[str] = Counter()
    for row in rows:
        times[row.name] += row.exposed_ns
    names = sorted((name for name in times if times[name] > 0), key=lambda name: (-times[name], name))
    steps = max(1, sum(len(one.steps) for one in found))
    name, source = found[0].span.run, _spans_source(spans)
    layers = sum(losses.sync_batch_norms_per_step for losses in analysis.device_losses if losses.run == name)
    late = _last_rank(analysis, spans) if waiting is not None and waiting >= COLLECTIVES.waiting else None
    gain = replayed(analysis, name, kinds.COLLECTIVES)
    known = gain.caveat(share) if gain is not None else BY_SUBTRACTION
    in_ceiling = "Waiting for other ranks is in the ceiling, not in the cost." if on_host and waiting else ""
    yield Claim(
        title=f"Nothing hides {exposed_ns / 1e6:.1f} ms of communication per step"
        + (f" ({names[0]})" if names else "")
        + (f" of {run}" if run else ""),
        step_ms=step_ms,
        cost_ms=share * step_ms,
        ceiling_ms=max(most, gain.share if gain is not None else 0.0) * step_ms,
        levels=(_steps_confidence(found, not on_host), "high" if waiting is not None else "medium"),
        where=_line(analysis, names[0])[0] or _line(analysis, "")[0] if on_host and names else (),
        key=Place(run, None) if run else None,
        ranks=tuple(sorted({span.rank for span in spans})),
        evidence=(
            ms("communication that nothing hides, per step", exposed_ns / 1e6, source),
            ms("mean profiled step", step_ns / 1e6, source),
            *figures(source, ("collectives per step", sum(row.calls for row in rows) / steps or None, "calls", 1)),
            *(ms(f"of it in {one}", times[one] / steps / 1e6, source) for one in names[: COLLECTIVES.kinds_shown]),
            figure("waiting for other ranks, of all communication", waiting, "fraction", source, 4),
            figure("rank that came last where others waited longest", late, "rank", source, 0),
            figure("SyncBatchNorm layers per step", layers or None, "calls", source, 1),
            *(gain.evidence if gain is not None else ()),
        ),
        fix=exposed_fix(waiting, layers),
        caveat=f"{_exposed_caveat(analysis, waiting)} {in_ceiling} {known}".strip(),
        falsified_by="With the collectives left out (DistributedDataParallel.no_sync(), or one rank alone on the same "
        "batch), the mean step does not get shorter",
    )


def _workers(analysis: Analysis) -> tuple[WorkerShare, ...]:
    view = analysis.views.distributed if analysis.views is not None else None
    return view.workers if view is not None else ()


def _waiting(analysis: Analysis, spans: set[SpanRef]) -> float | None:
    """The part of matched communication that is waiting for other ranks."""
    shares = [share for share in _workers(analysis) if share.span in spans]
    wait = sum(share.synchronizing_ns or 0 for share in shares)
    move = sum(share.transferring_ns or 0 for share in shares)
    return wait / (wait + move) if wait + move > 0 else None


def _last_rank(analysis: Analysis, spans: set[SpanRef]) -> int | None:
    view = analysis.views.distributed if analysis.views is not None else None
    if view is None or not any(share.span in spans for share in view.workers):
        return None
    rows = [row for row in view.collectives if row.last_rank is not None]
    return max(rows, key=lambda row: (row.synchronizing_ns * row.calls, row.name)).last_rank if rows else None


def exposed_fix(waiting: float | None, sync_batch_norms: float) -> str:
    """By the part of it that is waiting for other ranks, None where unknown, and SyncBatchNorm layers per step."""
    text = (
        "Overlap it with computation (larger or earlier buckets, bucket_cap_mb and gradient_as_bucket_view of "
        "DistributedDataParallel, prefetching in FSDP), or move less: gradients in half precision "
        "(bf16_compress_hook), gradient accumulation, fewer and larger messages"
    )
    if waiting is None:
        text += ". Record two ranks or more to see what of it is waiting for a slower rank"
    elif waiting >= COLLECTIVES.waiting:
        text = f"Most of it is waiting for other ranks: give all ranks equal work first. What is left: {text}"
    if sync_batch_norms > COLLECTIVES.sync_batch_norms:
        text += (
            f". {sync_batch_norms:.0f} SyncBatchNorm layers exchange statistics forward and backward, and nothing can "
            "hide it: keep them only where a rank's batch is too small for statistics of its own"
        )
    return text


def _exposed_caveat(analysis: Analysis, waiting: float | None) -> str:
    view = analysis.views.distributed if analysis.views is not None else None
    if waiting is None:
        return "One rank's trace does not tell a transfer from waiting for another rank."
    if view is not None and view.missing_ranks:
        return "Not all ranks were recorded: waiting for one that was not counts as transfer."
    return "Compressed gradients change the numbers; larger buckets take memory."


@rule(
    "communication.gloo_on_gpu",
    COMMUNICATES,
    *TRACED,
    CALLED,
    learn="https://docs.pytorch.org/docs/stable/distributed.html#backends",
)
def gloo_on_gpu(analysis: Analysis) -> Iterator[Claim]:
    on_device = {one.span: one for one in overviews(analysis) if one.basis == DEVICE}
    rows = [row for row in CALLED.of(analysis) if row.library == "gloo" and row.span in on_device]
    if not rows:
        return
    used = [on_device[span] for span in {row.span for row in rows}]
    steps = max(1, sum(len(one.steps) for one in used))
    lost_ms = sum(row.exposed_ns for row in rows) / steps / 1e6
    step_ns = sum(one.wall.mean_ns for one in used) / len(used)
    share = clip_share(lost_ms, step_ns / 1e6)
    step_ms = profiled_step_ms(analysis, step_ns)
    source = _spans_source(row.span for row in rows)
    yield Claim(
        title=f"Ranks with GPUs exchange by gloo, through the host's memory: {lost_ms:.1f} ms per step in which no "
        "GPU computes",
        step_ms=step_ms,
        cost_ms=share * step_ms,
        levels=(_steps_confidence(used, True),),
        ranks=tuple(sorted({row.span.rank for row in rows})),
        evidence=(
            figure("collectives of gloo per step", sum(row.calls for row in rows) / steps, "calls", source, 1),
            ms("gloo while no device computes, per step", lost_ms, source),
            ms("mean profiled step", step_ns / 1e6, source),
        ),
        fix='init_process_group("nccl"): it moves data from GPU to GPU without the host',
        caveat="Tensors of the CPU still need gloo: init_process_group('cpu:gloo,cuda:nccl') has both.",
        falsified_by="With the nccl backend the mean step does not get shorter",
    )


@loss_rule(
    "communication.data_parallel",
    kinds.DATA_PARALLEL,
    learn="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-nn-ddp-instead",
)
def data_parallel(seen: ProfiledLoss) -> Iterator[Claim]:
    devices = seen.detail("devices")
    yield seen.claim(
        title=f"DataParallel copies the model to {devices:.0f} devices and splits and gathers batches in every "
        f"step: {seen.cost_ms:.1f} ms per step that nothing hides{seen.at}",
        evidence=(
            seen.ms("replicating, scattering and gathering with no kernel beside it", seen.loss.ns_per_step),
            seen.figure("devices", round(devices), "devices"),
            *seen.parts("of it in {}"),
        ),
        fix="Wrap the model in DistributedDataParallel and start one process for each GPU (torchrun): each keeps "
        "its model, and only gradients are exchanged, during the backward pass",
        caveat="The cost leaves out that one Python process launches for all devices in turn, and that the first "
        "device computes the loss alone. Under DistributedDataParallel the batch size is that of one process.",
        falsified_by="With DistributedDataParallel on the same GPUs and the same total batch the mean step does "
        "not get shorter",
    )


def _steps_confidence(found: Iterable[Overview], sure: bool) -> str:
    steps = min(len(one.steps) if one.has_steps else 0 for one in found)
    return traced_confidence(steps, COLLECTIVES.steps_for_high, "high" if sure else "medium")


def _spans_source(spans: Iterable[SpanRef]) -> str:
    return traces_source(sorted({span.trace or span.process for span in spans}))
