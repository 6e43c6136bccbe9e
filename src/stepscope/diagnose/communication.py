"""Communication itself: many small collectives, exposed ones, slow backends; and DataParallel, which copies the model
to all devices in every step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.device import DEVICE_WORK, TRACED, ProfiledLoss, loss_rule, profiled_losses, profiled_step_ms
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.diagnose.ranks import LEARN, straggler_ms, workers_of
from stepscope.diagnose.rule import (
    ON_DEVICE,
    Claim,
    Need,
    Thresholds,
    advice,
    always,
    at,
    bare,
    clip_share,
    distinct,
    figure,
    figures,
    ms,
    overviews,
    rule,
    spot,
    traced_confidence,
    traces_source,
)
from stepscope.diagnose.training import TRAINING
from stepscope.model import Analysis, Evidence, Place
from stepscope.model import device_losses as kinds
from stepscope.model.trace import SpanRef
from stepscope.model.views import DEVICE, HOST, Overview


class COLLECTIVES(Thresholds):
    exposed: float = 0.10  # of the step, where PyTorch's TensorBoard plugin begins to warn
    waiting: float = 0.5  # of the communication: then it is the ranks' unequal work, not the network
    small_bytes: int = 1 << 20  # DistributedDataParallel's first bucket; smaller messages do not fill a link
    calls: int = 10  # per step; buckets of the smallest models and a few reduced metrics are fewer; chosen, untuned
    every_pass: float = 0.9  # of the gradients that are added up: under no_sync() they are a part of the passes
    sync_batch_norms: float = 20  # layers per step, from which Ascend's msprof-analyze advises to have fewer
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    kinds_shown: int = 3
    outside: float = 0.05  # of what nothing hides, by which all calls of a trace may exceed those in its steps


CALLED = Need(
    "a profiler window or trace with collectives",
    lambda a: a.views.communication if a.views is not None else (),
    traced=always,
)
COMMUNICATES = Need(
    "several ranks", lambda a: len(a.run.ranks) > 1 or (a.run.world_size or 1) > 1 or CALLED.present(a), quiet=True
)
EXPOSURE = Need(  # what hides communication: work of devices, or operators where ranks train on processors
    "a profiler trace with device work", lambda a: DEVICE_WORK.present(a) or not ON_DEVICE.present(a)
)


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
    steps, calls = max(1, sum(len(one.steps) for one in found)), sum(row.calls for row in rows)
    inside = times.total() <= (1 + COLLECTIVES.outside) * exposed_ns * steps
    listed = names[: COLLECTIVES.kinds_shown] if inside else ()
    name, source = found[0].span.run, _spans_source(spans)
    passes = _exchanging_passes(analysis)
    layers = sum(losses.sync_batch_norms_per_step for losses in analysis.device_losses if losses.run == name)
    view = analysis.views.distributed if analysis.views is not None else None
    ended = [row for row in (view.collectives if view is not None else ()) if row.last_rank is not None]
    longest = max(ended, key=lambda row: (row.synchronizing_ns * row.calls, row.name), default=None)
    late = longest.last_rank if longest is not None and waiting is not None and waiting >= COLLECTIVES.waiting else None
    caveat = "Compressed gradients change the numbers; larger buckets take memory."
    if waiting is None:
        caveat = "One rank's trace does not tell a transfer from waiting for another rank."
    elif view is not None and view.missing_ranks:
        caveat = "Not all ranks were recorded: waiting for one that was not counts as transfer."
    gain = replayed(analysis, name, kinds.COLLECTIVES)
    known = gain.caveat(share) if gain is not None else BY_SUBTRACTION
    in_ceiling = "Waiting for other ranks is in the ceiling, not in the cost." if on_host and waiting else ""
    yield Claim(
        title=f"Nothing hides {exposed_ns / 1e6:.1f} ms of communication per step"
        + (f" ({names[0]})" if names else "")
        + (f", exchanged in all {passes} backward passes of an update" if passes else "")
        + (f" of {run}" if run else ""),
        step_ms=step_ms,
        cost_ms=share * step_ms,
        ceiling_ms=max(most, gain.share if gain is not None else 0.0) * step_ms,
        levels=(_steps_confidence(found, not on_host), "high" if waiting is not None else "medium"),
        where=distinct(place for one in (*(listed or names[:1]), "") for place in _line(analysis, one)[0])
        if on_host
        else (),
        key=Place(run, None) if run else None,
        ranks=tuple(sorted({span.rank for span in spans})),
        evidence=(
            ms("communication that nothing hides, per step", exposed_ns / 1e6, source),
            ms("mean profiled step", step_ns / 1e6, source),
            *figures(source, ("collectives per step", calls / steps if inside and calls else None, "calls", 1)),
            *(ms(f"of it in {one}", times[one] / steps / 1e6, source) for one in listed),
            figure("waiting for other ranks, of all communication", waiting, "fraction", source, 4),
            figure("rank that came last where others waited longest", late, "rank", source, 0),
            figure("SyncBatchNorm layers per step", layers or None, "calls", source, 1),
            *(gain.evidence if gain is not None else ()),
        ),
        fix=exposed_fix(waiting, layers, passes),
        caveat=f"{caveat} {in_ceiling} {known}".strip(),
        falsified_by="With the collectives left out (DistributedDataParallel.no_sync(), or one rank alone on the same "
        "batch), the mean step does not get shorter",
    )


def _waiting(analysis: Analysis, spans: set[SpanRef]) -> float | None:
    """The part of matched communication that is waiting for other ranks."""
    shares = [share for share in workers_of(analysis) if share.span in spans]
    wait = sum(share.synchronizing_ns or 0 for share in shares)
    move = sum(share.transferring_ns or 0 for share in shares)
    return wait / (wait + move) if wait + move > 0 else None


def _exchanging_passes(analysis: Analysis) -> int | None:
    """Backward passes of an update, where DistributedDataParallel exchanges gradients in all of several."""
    operators = analysis.views.operators if analysis.views is not None else ()
    added, sent = (
        sum(row.calls for row in operators if row.name == name)
        for name in ("torch::autograd::AccumulateGrad", "torch.distributed.ddp.reducer::copy_bucket_to_grad")
    )
    several = (analysis.metrics.accumulation or ()) if analysis.metrics is not None else ()
    told = max((one.passes for one in several if one.share >= TRAINING.same_passes), default=None)
    return told if sent and sent >= COLLECTIVES.every_pass * added else None


def exposed_fix(waiting: float | None, sync_batch_norms: float, passes: int | None = None) -> str:
    """By the part of it that is waiting for other ranks (None: unknown), SyncBatchNorm layers, exchanging passes."""
    text = advice("exposed", "").format("" if passes else ", gradient accumulation")
    if passes:
        text = advice("exposed", "every pass").format(passes) + text
    if waiting is None:
        text += advice("exposed", "one rank")
    elif waiting >= COLLECTIVES.waiting:
        text = advice("exposed", "waiting") + text
    if sync_batch_norms > COLLECTIVES.sync_batch_norms:
        text += advice("exposed", "norms").format(sync_batch_norms)
    return text


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
        fix=advice("data_parallel", "fix"),
        caveat=advice("data_parallel", "caveat"),
        falsified_by="With DistributedDataParallel on the same GPUs and the same total batch the mean step does "
        "not get shorter",
    )


def _steps_confidence(found: Iterable[Overview], sure: bool) -> str:
    steps = min(len(one.steps) if one.has_steps else 0 for one in found)
    return traced_confidence(steps, COLLECTIVES.steps_for_high, "high" if sure else "medium")


def _spans_source(spans: Iterable[SpanRef]) -> str:
    return traces_source(sorted({span.trace or span.process for span in spans}))
