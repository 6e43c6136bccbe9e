"""The communication itself: many small collectives, collectives that nothing hides, and a backend that is slow on GPUs.

Costs stand on profiler windows or traces of others: what of the mean profiled step is communication and nothing else.
In a recorded run the share is carried over to the steady step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.collectives_words import exposed_caveat, exposed_fix
from stepscope.diagnose.common import bare, clip_share, finding_id, lowest, severity, shown, train_steps
from stepscope.diagnose.communication import straggler_ms
from stepscope.diagnose.dataparallel import runs as data_parallel_runs
from stepscope.diagnose.replayed import BY_SUBTRACTION, replayed
from stepscope.diagnose.thresholds import COLLECTIVES
from stepscope.model import Analysis, Evidence, Finding, Place
from stepscope.model.device_losses import COLLECTIVES as ALL_COLLECTIVES
from stepscope.model.trace import SpanRef
from stepscope.model.views import DEVICE, HOST, CollectiveRow, Overview, WorkerShare

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
