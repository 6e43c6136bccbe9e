"""Ceilings: how much shorter the step can become without one loss, by replays of its dependency structure.

Of profiled steps a replay says what they save. Of what makes device work shorter there are two: with the host as
recorded, and with one that is never late, because a profiler slows the host and not the device. The larger saving
bounds the gain. Of steady steps the pipeline is replayed: main thread, workers, device, other ranks.

A step is over when its main thread is done, on every rank: the thread works, waits for a batch and exchanges gradients.
Workers make batches meanwhile, a device works off what it was given. Taking a loss of the main thread away makes the
step shorter by that loss, but no shorter than what runs beside it takes: the workers' time for a batch, the device's
work, the next slowest rank. Every answer is an upper bound: a bound from beside the thread is used only where it is
certain, which it is not while the run's own processes fight for cores. There, less work of one frees cores for the
others, so that more may be gained than the loss itself: at most what the rest of the step waited for a core. And what
follows the loss on the same core finds caches that the loss has filled with its own data.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.rule import Known, Thresholds, accelerator, advice, ms, traces_source
from stepscope.model import Analysis
from stepscope.model.machine import Pipeline, RanksFacts


class REPLAY(Thresholds):
    """When a replay tells so much less than the cost that it is worth a word."""

    close: float = 0.01  # of the step: titles and shares are shown to a percent
    unexplained: float = 0.10  # of the step, as much as makes a finding a warning; sound traces stay below 0.05


class PIPELINE(Thresholds):
    """How far a replay of a run's step may be trusted. Ceilings are raised by what it does not know."""

    certain: float = 0.9  # of a time beside the main thread: busy shares and profiled kernels are known to some percent
    # What the rest of a step takes longer on a CPU behind Python that made batches or records: 0 to 0.3 ms, and 0 to
    # 20 % of it, measured in three small models against the same steps without that Python.
    cold_ms: float = 0.3
    cold: float = 0.2
    # The same behind a call of the model on other data, of the shorter of call and rest: medians of up to 24 % in
    # five models (benchmarks/cold_caches.py); 24 % where the model and a batch alone fit a core's own cache.
    cold_tensors: float = 0.25
    # The same behind a copy of the model, which also leaves the allocator other blocks, and the next step pages to map:
    # medians of up to 50 % and upper quartiles of up to 67 % of the shorter of both in eight models, by the CPU time of
    # one thread (benchmarks/cold_caches.py measures it as the rows "copy").
    cold_copies: float = 0.75
    contended: float = 0.02  # of the step without a core because of the run itself: more slows what runs beside, too


BY_SUBTRACTION = "The ceiling is by subtraction: these steps could not be replayed without the loss."


class Gain(Struct, frozen=True):
    """What a replay saves: `share` of the recorded step at most, `as_recorded` with the host as it was.

    `left`: of work, the share of the step that stays whatever the host does; 0 where that is not known.
    `unexplained`: the share of the step in which the device idles although something was launched.
    """

    share: float
    as_recorded: float
    left: float
    unexplained: float
    work: bool
    evidence: tuple[Known, ...]

    def at_most(self, longer: float, beyond: float = 0.0) -> float:
        """The share of a steady step, where the profiled one takes `longer` times as long.

        A profiler makes nothing shorter and slows no two things alike. So a steady step loses no more time than was
        saved here, if perhaps a larger part of it, but never what the device still has to do. `beyond` comes on top.
        """
        share = self.share + beyond
        return min(1.0, max(share, min(share * longer, 1.0 - self.left * longer)))

    def caveat(self, cost_share: float) -> str:
        """Where the recorded host would hide what work costs, and where a replay knows too little to bound anything."""
        found = []
        if self.work and self.as_recorded < cost_share - REPLAY.close:
            found.append(
                f"The recorded host was late as well: with it {self.as_recorded:.0%} of the step would be saved. A "
                "profiler slows the host, so cost and ceiling are those of one that is never late."
            )
        if self.unexplained >= REPLAY.unexplained:
            found.append(
                f"For {self.unexplained:.0%} of the step the device idles with work launched and nothing in the trace "
                "says why: if it goes with this loss, more can be gained than the ceiling says."
            )
        return " ".join(found)


def replayed(analysis: Analysis, run: str, kind: str, *, use_median: bool = False) -> Gain | None:
    """What the profiled steps of a run save without a loss; None where there is no such replay.

    `use_median`: the median step's, for losses of few steps.
    """
    replay = next((one for one in analysis.replays if one.run == run), None)
    without = replay.of(kind) if replay is not None else None
    if replay is None or without is None:
        return None
    # ns of the step as it was and without the loss; then with a host that is never late, where the loss is work
    which, before, after = "mean", replay.unchanged_mean_ns, without.mean_ns
    all_work, less_work = replay.never_late_mean_ns, without.never_late_mean_ns
    if use_median:
        which, before, after = "median", replay.unchanged_median_ns, without.median_ns
        all_work, less_work = replay.never_late_median_ns, without.never_late_median_ns
    if before <= 0:
        return None
    words, traces = advice("replayed", kind.partition("/")[0], "without it"), traces_source(replay.traces)
    steps = f"{which} of {replay.steps} step{'s' if replay.steps != 1 else ''}"
    evidence = [
        ms(f"replayed step {words}", after / 1e6, f"replay of {traces}, {steps}"),
        ms("the same steps as recorded", before / 1e6, f"{traces}, {steps}"),
    ]
    at_most = as_recorded = max(0.0, before - after)
    if less_work is not None:
        at_most = max(as_recorded, all_work - less_work)
        if all_work - less_work > before - after:
            source = f"replay of {traces}, a host that is never late"
            evidence.append(ms(f"the same {words}, the host never late", less_work / 1e6, source))
            evidence.append(ms("the same with all work, the host never late", all_work / 1e6, source))
    return Gain(
        share=min(1.0, at_most / before),
        as_recorded=min(1.0, as_recorded / before),
        left=0.0 if less_work is None else less_work / before,
        unexplained=replay.unexplained_ns / replay.recorded_mean_ns,
        work=less_work is not None,
        evidence=tuple(evidence),
    )


def without_main(analysis: Analysis, loss_ms: float, *, behind: float = 0.0, launches: bool = False) -> float:
    """ms by which the mean step gets shorter at most, were `loss_ms` of the main thread's work left out.

    `launches`: the work launches what the device does, which then goes with it and bounds nothing.

    `behind`: of the shorter of the work and the rest of the step, what the rest takes longer behind such work, which
    is more than is allowed for anyway where it goes through much memory (`PIPELINE.cold_tensors`, `cold_copies`).
    """
    pipeline = analysis.pipeline
    if pipeline is None:
        return loss_ms
    mean_ms, contended_ms = pipeline.mean_ms, pipeline.contended_ms
    gain = _with_warm_caches(analysis, pipeline, min(loss_ms, mean_ms), behind=behind)
    # what runs beside the main thread bounds the gain where it is surely not slowed by it
    crowded = pipeline.cores is not None and (pipeline.workers or 0) + 1 > pipeline.cores
    if not crowded and contended_ms is not None and contended_ms < PIPELINE.contended * mean_ms:
        workers = (pipeline.workers_ms or 0.0) / pipeline.workers if pipeline.workers else 0.0
        on_device = [] if launches else analysis.device_losses
        devices = [losses.compute_ns_per_step / 1e6 for losses in on_device if losses.has_steps]
        gain = min(gain, mean_ms - PIPELINE.certain * max(workers, *devices, 0.0))
    return min(mean_ms, max(0.0, gain) + _freed_ms(pipeline, gain))


def without_wait(analysis: Analysis) -> float | None:
    """ms by which the mean step gets shorter at most, were every batch there when it is asked for; None if unknown."""
    pipeline, ranks = analysis.pipeline, analysis.ranks
    if pipeline is None or pipeline.wait_at_most_ms is None:
        return None
    gain = pipeline.wait_at_most_ms
    if not pipeline.workers:
        gain = _with_warm_caches(analysis, pipeline, gain)
    if len(pipeline.ranks) > 1:
        # ranks wait for each other, and the one that waits longest for data makes the step
        gain = max(gain, *(each.wait_ms * pipeline.mean_ms / max(each.wall_ms, 1e-9) for each in pipeline.ranks))
        if ranks is not None and "data_wait" not in ranks.exchange:
            # by as much as the longest of the ranks' own work shrinks at most, less what each waits
            waits = {each.rank: each.wait_ms for each in pipeline.ranks}
            left = max(work.own_ms - waits.get(work.rank, 0.0) for work in ranks.ranks)
            gain = min(gain, max(0.0, ranks.longest_own_ms - left))
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


def _with_warm_caches(analysis: Analysis, pipeline: Pipeline, gain: float, *, behind: float = 0.0) -> float:
    """With what the rest of the step may gain on caches that the loss no longer empties; a device has its own."""
    if gain <= 0 or accelerator(analysis) is not None:
        return gain
    rest = max(0.0, pipeline.mean_ms - gain)
    warmer = min(PIPELINE.cold_ms, PIPELINE.cold * rest)
    return gain + max(warmer, behind * min(gain, rest))


def _freed_ms(pipeline: Pipeline, gain: float) -> float:
    """What the rest of the step waits for cores that the run itself holds: it may go with the loss."""
    contended = pipeline.contended_ms or 0.0
    if contended < PIPELINE.contended * pipeline.mean_ms:
        return 0.0
    return contended * max(0.0, 1.0 - gain / pipeline.mean_ms)
