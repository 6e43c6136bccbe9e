"""A replay of the step's dependency structure: how much shorter the mean step can become without one loss.

A step is over when its main thread is done, on every rank: the thread works, waits for a batch and exchanges gradients.
Workers make batches meanwhile, a device works off what it was given. Taking a loss of the main thread away makes the
step shorter by that loss, but no shorter than what runs beside it takes: the workers' time for a batch, the device's
work, the next slowest rank. Every answer is an upper bound: a bound from beside the thread is used only where it is
certain, which it is not while the run's own processes fight for cores. There, less work of one frees cores for the
others, so that more may be gained than the loss itself: at most what the rest of the step waited for a core. And what
follows the loss on the same core finds caches that the loss has filled with its own data.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.diagnose.thresholds import PIPELINE
from stepscope.model import Analysis
from stepscope.model.ranks import Pipeline, RanksFacts


def without_main(analysis: Analysis, loss_ms: float, *, behind: float = 0.0) -> float:
    """ms by which the mean step gets shorter at most, were `loss_ms` of the main thread's work left out.

    `behind`: of the shorter of the work and the rest of the step, what the rest takes longer behind such work, which
    is more than is allowed for anyway where it goes through much memory (`PIPELINE.cold_tensors`, `cold_copies`).
    """
    pipeline = analysis.pipeline
    if pipeline is None:
        return loss_ms
    mean_ms = pipeline.mean_ms
    gain = _warm(analysis, pipeline, min(loss_ms, mean_ms), behind=behind)
    if not _contended(pipeline):
        gain = min(gain, mean_ms - _beside_ms(analysis, pipeline))
    return min(mean_ms, max(0.0, gain) + _freed_ms(pipeline, gain))


def without_wait(analysis: Analysis) -> float | None:
    """ms by which the mean step gets shorter at most, were every batch there when it is asked for; None if unknown."""
    pipeline = analysis.pipeline
    if pipeline is None or pipeline.wait_at_most_ms is None:
        return None
    gain = pipeline.wait_at_most_ms
    if not pipeline.workers:
        gain = _warm(analysis, pipeline, gain)
    if len(pipeline.ranks) > 1:
        # ranks wait for each other, and the one that waits longest for data makes the step
        gain = max(gain, *(each.wait_ms * pipeline.mean_ms / max(each.wall_ms, 1e-9) for each in pipeline.ranks))
        gain = min(gain, _barrier_ms(analysis, {each.rank: each.wait_ms for each in pipeline.ranks}))
    return min(pipeline.mean_ms, gain + _freed_ms(pipeline, gain))


def without_lead(analysis: Analysis, ranks: RanksFacts) -> float:
    """ms by which the mean step gets shorter at most, did the slow ranks work no longer than the others do.

    In the quarter of the run in which they worked longest.
    """
    return without_work(analysis, lead_ms(ranks) + max(0.0, ranks.most_excess_ms - ranks.excess_ms))


def without_work(analysis: Analysis, loss_ms: float) -> float:
    """ms by which the mean step gets shorter at most, were a rank's own work `loss_ms` shorter."""
    pipeline = analysis.pipeline
    if pipeline is None:
        return loss_ms
    gain = min(loss_ms, pipeline.mean_ms)
    return min(pipeline.mean_ms, gain + _freed_ms(pipeline, gain))


def lead_ms(ranks: RanksFacts) -> float:
    """By how much the slow ranks' own work is longer than that of the slowest of the others."""
    slow = ranks.slow or (ranks.slowest,)
    others = [work.own_ms for work in ranks.ranks if work.rank not in slow]
    longest = max(ranks.longest_own_ms, ranks.of(ranks.slowest).own_ms)
    return max(0.0, longest - max(others, default=0.0))


def _warm(analysis: Analysis, pipeline: Pipeline, gain: float, *, behind: float = 0.0) -> float:
    """With what the rest of the step may gain on caches that the loss no longer empties; a device has its own."""
    if gain <= 0 or any(device != "cpu" for device in analysis.devices):
        return gain
    rest = max(0.0, pipeline.mean_ms - gain)
    warmer = min(PIPELINE.cold_ms, PIPELINE.cold * rest)
    return gain + max(warmer, behind * min(gain, rest))


def _contended(pipeline: Pipeline) -> bool:
    """Whether what runs beside the main thread is, or may be, slowed by it."""
    if pipeline.contended_ms is None:
        return True
    crowded = pipeline.cores is not None and (pipeline.workers or 0) + 1 > pipeline.cores
    return crowded or pipeline.contended_ms >= PIPELINE.contended * pipeline.mean_ms


def _freed_ms(pipeline: Pipeline, gain: float) -> float:
    """What the rest of the step waits for cores that the run itself holds: it may go with the loss."""
    contended = pipeline.contended_ms or 0.0
    if contended < PIPELINE.contended * pipeline.mean_ms:
        return 0.0
    return contended * max(0.0, 1.0 - gain / pipeline.mean_ms)


def _beside_ms(analysis: Analysis, pipeline: Pipeline) -> float:
    """What runs beside the main thread takes for a step, surely."""
    workers = (pipeline.workers_ms or 0.0) / pipeline.workers if pipeline.workers else 0.0
    device = max((losses.compute_ns_per_step / 1e6 for losses in analysis.device_losses if losses.has_steps), default=0)
    return PIPELINE.certain * max(workers, device)


def _barrier_ms(analysis: Analysis, loss_ms: Mapping[int, float]) -> float:
    """By how much the longest of the ranks' own work shrinks at most, less what each loses."""
    ranks = analysis.ranks
    if ranks is None or any(phase == "data_wait" for phase in ranks.exchange):
        return float("inf")
    return max(0.0, ranks.longest_own_ms - max(work.own_ms - loss_ms.get(work.rank, 0.0) for work in ranks.ranks))
