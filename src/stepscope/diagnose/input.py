"""The step waits for its batch: in this process, for busy workers, behind idle ones, in waves, or for new workers.

What a device does meanwhile hides the wait: where traces show it, only the time it idles for the loader counts. In
traces without a journal that idle time is the cost. What reading from storage says of a slow loader comes as evidence
and advice of these rules.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.common import (
    ALL,
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    stacks_source,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.gains import BY_SUBTRACTION, Gain, replayed
from stepscope.diagnose.in_script import of_loader
from stepscope.diagnose.machine import device_doubt
from stepscope.diagnose.thresholds import EPOCHS, LOADER, STORAGE, TRACED_LOADER, WAVES
from stepscope.model import Analysis, Evidence, Finding, HotLine, Interval, LoaderFacts, Place, Settings, StepFacts, Try
from stepscope.model.device_losses import LOADER as LOADER_LOSS
from stepscope.model.machine import EpochFacts, StorageFacts, TraceLoader, WaveFacts
from stepscope.model.views import DEVICE, Overview

LOADER_RULE = "input.loader_bound"
_SAME_BATCH = "With the same batch handed out again and again instead of loaded, the mean step does not get shorter"
LEARN = "https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading"


def loader_bound(analysis: Analysis) -> list[Finding]:
    """One finding when waiting for data takes more of the mean step than the floor.

    A wait that comes in waves is left to `input.prefetch_waves`. Of traces without a journal, one for each run.
    """
    if analysis.loader is None:
        return traced_loader_bound(analysis, LOADER_RULE, LEARN)
    return [] if in_waves(analysis) else waiting(analysis)


def in_waves(analysis: Analysis) -> bool:
    """Whether nearly all of the wait lies in one step of as many as there are workers."""
    waves = analysis.machine.waves if analysis.machine is not None else None
    return waves is not None and waves.share >= WAVES.share and waves.regular >= WAVES.regular


def waiting(analysis: Analysis) -> list[Finding]:
    """The finding of a recorded run, whatever the rhythm of its waits."""
    train, loader = train_steps(analysis), analysis.loader
    if train is None or loader is None:
        return []
    cost, hidden = _cost(analysis, train, loader)
    if cost < LOADER.floor * train.mean_ms:
        return []
    where = _where(loader)
    share = clip_share(cost, train.mean_ms)
    gains = _gains(analysis, train, loader, share)
    if gains is not None and loader.batch is not None and gains.high < LOADER.floor:
        return _without_workers(analysis, train, loader, cost, where)
    title, fix = _words(loader, analysis.settings, where, share)
    fix += _packing(loader) + storage_advice(analysis)
    levels = [steps_confidence(train)]
    if loader.samples:
        levels.append(sampled_confidence(loader.samples))
    elif analysis.stacks is None:
        levels.append("medium")  # the wait is measured, its reason is not
    if hidden:
        levels.append("low")
    return [
        Finding(
            id=finding_id(LOADER_RULE, loader.site or (where[0] if where else None)),
            rule=LOADER_RULE,
            category="input",
            title=title,
            severity=severity(share),
            confidence=lowest(levels),
            cost_ms_per_step=cost,
            share=share,
            gain_ceiling=_ceiling(analysis, train, cost) - _handed_over_share(train, loader, where),
            expected_gain=gains if gains is not None and gains.low > 0 else None,
            where=where,
            ranks=train.ranks,
            evidence=(*_evidence(analysis, train, loader), *_replayed(analysis), *storage_evidence(analysis)),
            fix=fix,
            caveat=" ".join([hidden, _caveat(loader), _packing_caveat(loader)]).strip(),
            learn=LEARN,
            try_=_tries(loader),
            falsified_by=_falsified(loader),
        )
    ]


def _without_workers(
    analysis: Analysis, train: StepFacts, loader: LoaderFacts, cost: float, where: tuple[Place, ...]
) -> list[Finding]:
    """What else can be done where handing batches over costs what workers would gain; nothing where that is unknown."""
    hot = next((place for place in where if place.share is not None), None)
    if hot is not None:
        fix = f"Shorten the work at {shown(hot)}{_packing(loader)}"
    elif loader.arguments.get("dataset") == "TensorDataset" and (loader.batch_size or 1) > 1 and loader.site:
        order = "RandomSampler" if loader.arguments.get("shuffle") == "True" else "SequentialSampler"
        fix = (
            "Take whole batches out of the tensors, not items that are put together again: DataLoader(data, "
            f"sampler=BatchSampler({order}(data), {loader.batch_size}, drop_last=False), batch_size=None) at "
            f"{shown(loader.site)}"
        )
    else:
        return []
    share = clip_share(cost, train.mean_ms)
    levels = [steps_confidence(train), sampled_confidence(loader.samples) if loader.samples else "medium"]
    return [
        Finding(
            id=finding_id(LOADER_RULE, loader.site or hot),
            rule=LOADER_RULE,
            category="input",
            title=f"The training process makes every batch itself, {share:.0%} of the step{_named(loader, hot)}",
            severity=severity(share),
            confidence=lowest(levels),
            cost_ms_per_step=cost,
            share=share,
            gain_ceiling=_ceiling(analysis, train, cost),
            where=where,
            ranks=train.ranks,
            evidence=_evidence(analysis, train, loader),
            fix=fix,
            caveat="Worker processes would not help: to hand a batch over takes as long as they would save.",
            learn=LEARN,
            falsified_by=_SAME_BATCH,
        )
    ]


def _handover_ms(loader: LoaderFacts) -> float:
    """What the training process works at least to take a step's batches from workers; 0 where they were not looked at.

    A worker works as long to hand them over.
    """
    batch = loader.batch
    if batch is None:
        return 0.0
    one = (
        LOADER.handover_batch_ms + LOADER.handover_tensor_ms * batch.tensors + LOADER.handover_mb_ms * batch.bytes / 1e6
    )
    return one * batch.per_step


def _handed_over_share(train: StepFacts, loader: LoaderFacts, where: tuple[Place, ...]) -> float:
    """Of the step, what workers leave of the wait where nothing but workers is proposed."""
    if not loader.in_main_process or any(place.share is not None for place in where):
        return 0.0
    return min(loader.data_wait_share, clip_share(_handover_ms(loader), train.mean_ms))


def _cost(analysis: Analysis, train: StepFacts, loader: LoaderFacts) -> tuple[float, str]:
    """(ms per step, why it may be less): on an accelerator the time it idles for the loader, by windows."""
    accelerator = next((device for device in analysis.devices if device != "cpu"), None)
    if accelerator is None:
        return loader.data_wait_ms, ""
    share = idle_share(analysis)
    if share is not None:
        return min(loader.data_wait_ms, share * train.mean_ms), ""
    return (
        loader.data_wait_ms,
        f"The {accelerator} may be working meanwhile: then the gain is smaller, down to nothing.",
    )


def _ceiling(analysis: Analysis, train: StepFacts, cost: float) -> float:
    """Fraction of the step: all waiting, on the rank that waits longest; beside a device what a replay saves."""
    if any(device != "cpu" for device in analysis.devices):
        gain = loader_gain(analysis)
        return max(clip_share(cost, train.mean_ms), gain.share if gain is not None else 0.0)
    return clip_share(max(cost, gains.without_wait(analysis) or 0.0), train.mean_ms)


def _replayed(analysis: Analysis) -> tuple[Evidence, ...]:
    gain = loader_gain(analysis)
    return gain.evidence if gain is not None else ()


def _where(loader: LoaderFacts) -> tuple[Place, ...]:
    """The outermost user lines below the loader (`__getitem__`), then the hottest lines inside them, then its site.

    Shares are of the sampled loading time; those of the outer lines include the inner ones.
    """
    places: list[Place] = []
    for lines in (loader.entries, loader.lines):
        for line in lines[: LOADER.lines_shown]:
            place = _place(line)
            known = any((p.file, p.line) == (place.file, place.line) for p in places)
            if line.share >= LOADER.line_share and not known:
                places.append(place)
    if loader.site is not None and not any((p.file, p.line) == (loader.site.file, loader.site.line) for p in places):
        places.append(loader.site)
    return tuple(places)


def _place(line: HotLine) -> Place:
    return Place(line.file, line.line, line.function, line.share)


def _words(loader: LoaderFacts, settings: Settings | None, where: tuple[Place, ...], share: float) -> tuple[str, str]:
    """(title, fix)."""
    waits = f"{share:.0%} of the step"
    hot = next((place for place in where if place.share is not None), None)
    named = _named(loader, hot)
    shorter = f"; then shorten the work at {shown(hot)}" if hot else ""
    wanted, count = loader.suggested_workers, loader.num_workers or 0
    if loader.in_main_process:
        return (
            f"The training process loads every batch itself, {waits}{named}",
            "Load in worker processes: "
            + of_loader(loader.site, settings, num_workers=wanted, persistent_workers=True)
            + shorter,
        )
    many = f"{count} loader workers" if count != 1 else "1 loader worker"
    if _parked(loader):
        return (
            f"The step waits for batches, {waits}, while {many} sat parked",
            "The workers are not the bottleneck. Make what crosses the process border smaller (tensors, not lists "
            "of objects; fewer, larger ones), and keep more in reserve: "
            + of_loader(loader.site, settings, prefetch_factor=4),
        )
    if wanted > count:
        return (
            f"{many} cannot keep up: the step waits, {waits}{named}",
            f"Raise the number of workers from {count}: "
            + of_loader(loader.site, settings, num_workers=wanted)
            + shorter,
        )
    place = f"at {shown(hot)}" if hot else "per item"
    return (
        f"{many} cannot keep up and no core is left: the step waits, {waits}{named}",
        f"{_cores(loader)}, so more workers will not help: do less {place} (decode or "
        "resize once and store the result, transform whole batches instead of items), or ask for more cores",
    )


def _many_files(loader: LoaderFacts) -> bool:
    """Whether opening and reading files is a notable part of the loading, and items have files of their own."""
    files = loader.files
    if files is None or files.samples < LOADER.file_samples or files.share < LOADER.files:
        return False
    return files.files_per_item is None or files.files_per_item >= LOADER.files_per_item


def _packing(loader: LoaderFacts) -> str:
    if _many_files(loader):
        return (
            ". Items have files of their own: pack them into few large ones that are read in sequence (tar shards as "
            "WebDataset reads them, LMDB, HDF5, one memory-mapped array), or copy the data to storage of the node first"
        )
    hot = loader.entries[0] if loader.entries else None
    one_by_one = hot is not None and hot.function.rsplit(".", 1)[-1] == "__getitem__" and (loader.batch_size or 1) > 1
    if one_by_one and hot is not None and hot.share >= LOADER.mostly:
        return (
            ". What every item gets alike (scaling, conversion) can be done to a whole batch by tensor operators: in "
            "collate_fn, or behind the loader on the device that trains"
        )
    return ""


def _packing_caveat(loader: LoaderFacts) -> str:
    if not _many_files(loader):
        return ""
    return (
        "Packed files are fast in sequence: shuffle the order of shards and within a buffer, because single items "
        "picked at random from one large file can be slower than files of their own."
    )


def _parked(loader: LoaderFacts) -> bool:
    return loader.workers_idle_share is not None and loader.workers_idle_share >= LOADER.idle


def _cores(loader: LoaderFacts) -> str:
    ranks = f" for {loader.ranks_on_host} ranks" if loader.ranks_on_host > 1 else ""
    return f"There are {loader.cpu_limit:g} cores{ranks}"


def _named(loader: LoaderFacts, hot: Place | None) -> str:
    """The function most of the loading time lies in, else the hottest line."""
    if hot is None:
        return ""
    of_function: dict[str, float] = {}
    for line in loader.entries or loader.lines:
        of_function[line.function] = of_function.get(line.function, 0.0) + line.share
    function = max(of_function, key=lambda name: of_function[name], default=None)
    if function is not None and of_function[function] >= LOADER.mostly:
        return f", mostly in {function} (hottest: {shown(hot)})"
    return f", hottest in {hot.function} ({shown(hot)})"


def _evidence(analysis: Analysis, train: StepFacts, loader: LoaderFacts) -> tuple[Evidence, ...]:
    steps = steps_source(train)
    found = [
        Evidence("data wait per step", round(loader.data_wait_ms, 3), "ms", f"{steps}, {train.count} steady steps"),
        Evidence("data wait share of the step", round(loader.data_wait_share, 4), "fraction", steps),
    ]
    if loader.num_workers is not None:
        found.append(Evidence("num_workers", loader.num_workers, "processes", "events.jsonl, the loader's own setting"))
    if loader.batch_size is not None:
        found.append(Evidence("batch_size", loader.batch_size, "samples", "events.jsonl, the loader's own setting"))
    if loader.batch is not None and loader.in_main_process:
        looked = f"events.jsonl, median of {loader.batch.batches} batches that were looked at"
        found += [
            Evidence("tensors of a batch", round(loader.batch.tensors, 1), "tensors", looked),
            Evidence("bytes of a batch", round(loader.batch.bytes), "bytes", looked),
            Evidence(
                "handing a step's batches over, at least",
                round(_handover_ms(loader), 3),
                "ms",
                f"{looked}, times what one takes",
            ),
        ]
    if loader.files is not None and loader.files.samples >= LOADER.file_samples and loader.files.share > 0:
        source = f"{stacks_source(analysis)}, {loader.files.samples} samples of loading"
        found.append(
            Evidence("loading time in opening and reading files", round(loader.files.share, 4), "fraction", source)
        )
        if loader.files.files_per_item is not None:
            opened = Evidence(
                "files opened per item", round(loader.files.files_per_item, 3), "files", "profiler window"
            )
            found.append(opened)
    idle = idle_share(analysis)
    if idle is not None:
        found.append(Evidence("device idle while the host loads", round(idle, 4), "fraction", "windows, idle_data"))
    source = f"{stacks_source(analysis)}, {loader.samples} samples of loading"
    for line in loader.lines[: LOADER.lines_shown]:
        if line.share >= LOADER.line_share:
            place = Place(line.file, line.line, line.function)
            found.append(Evidence(f"loading time at {shown(place)}", round(line.share, 4), "fraction", source))
    if loader.workers_busy_share is not None:
        found.append(Evidence("workers busy", round(loader.workers_busy_share, 4), "fraction", stacks_source(analysis)))
    if loader.load_ms is not None and not loader.in_main_process:
        found.append(
            Evidence("loading work per step", round(loader.load_ms, 3), "ms", "worker samples times step time")
        )
    found.append(
        Evidence("cores this process may use", loader.cpu_limit, "cores", "manifest.json, affinity and cgroup")
    )
    if loader.cores_used is not None:
        found.append(Evidence("cores in use", round(loader.cores_used, 2), "cores", "system.jsonl"))
    return tuple(found)


def _gains(analysis: Analysis, train: StepFacts, loader: LoaderFacts, most: float) -> Interval | None:
    """What the suggested workers gain, when loading moves out of this process.

    At best loading and computing overlap fully, only the CPU time measured now has to fit into the cores, and handing
    over costs what it does at least. At worst two of the cores are one that runs two threads in turn, on a CPU the
    computation keeps all its threads busy all the time, and handing a batch over takes a while; where the main thread
    waits for cores now, workers may get none. None where the times are not known.
    """
    if not loader.in_main_process or loader.compute_ms is None or loader.load_ms is None:
        return None
    step, cores = train.mean_ms, max(1.0, loader.cpu_limit / loader.ranks_on_host)
    real, handed = max(1.0, cores / LOADER.threads_of_a_core), _handover_ms(loader)
    best = max(loader.compute_ms + handed, (loader.load_ms + handed) / loader.suggested_workers)
    worst = max(loader.compute_ms, loader.load_ms / min(loader.suggested_workers, real))
    if not any(device != "cpu" for device in analysis.devices):
        threads = min(cores, loader.threads or cores)
        best = max(best, ((loader.cores_used or 0.0) * step + 2 * handed) / cores)
        worst = max(worst, (loader.compute_ms * threads + loader.load_ms) / real)
    worst += LOADER.handover * loader.load_ms + max(LOADER.handover_ms, handed)
    cpu = analysis.machine.cpu if analysis.machine is not None else None
    if cpu is not None and cpu.run_delay_share >= LOADER.crowded:
        worst = step
    high = max(0.0, min(most, loader.data_wait_share, 1.0 - best / step))
    return Interval(low=max(0.0, min(high, 1.0 - worst / step)), high=high)


def _caveat(loader: LoaderFacts) -> str:
    if loader.in_main_process or loader.suggested_workers > (loader.num_workers or 0):
        text = "Each worker holds its own copy of the data set object and draws its own random numbers."
        if loader.cpu_limit / loader.ranks_on_host <= 2:
            text += f" {_cores(loader)}: workers compete with the training process on a CPU."
        return text
    return "Work stored ahead of training costs disk space and fixes random transforms done before it."


def _tries(loader: LoaderFacts) -> tuple[Try, ...]:
    tries = []
    if loader.suggested_workers > (loader.num_workers or 0) and not _parked(loader):
        tries.append(Try("loader.num_workers", str(loader.suggested_workers)))
    if str(loader.arguments.get("persistent_workers", False)) != "True":
        tries.append(Try("loader.persistent_workers", "true"))
    if not loader.in_main_process:
        tries.append(Try("loader.prefetch_factor", "4"))
    return tuple(tries)


def _falsified(loader: LoaderFacts) -> str:
    if loader.in_main_process:
        return f"With num_workers={loader.suggested_workers} the mean step does not get shorter"
    return _SAME_BATCH


WAVES_RULE = "input.prefetch_waves"
FIRST_RULE = "input.first_batch"


def prefetch_waves(analysis: Analysis) -> list[Finding]:
    """The finding of the loader in other words, where one step of as many as there are workers holds the wait."""
    train, machine = train_steps(analysis), analysis.machine
    if train is None or machine is None or machine.waves is None or not in_waves(analysis):
        return []
    waves = machine.waves
    return [
        replace(
            finding,
            id=finding_id(WAVES_RULE, finding.where[0] if finding.where else None),
            rule=WAVES_RULE,
            title=f"One step in {waves.period} waits {waves.wave_wait_ms:.3g} ms for data: {waves.period} workers make "
            f"batches in step and cannot keep up, {finding.share:.0%} of the mean step",
            evidence=(*_wave_evidence(train, waves), *finding.evidence),
            caveat="The median step hides this loss, the mean shows it. More prefetching does not help while the "
            f"workers are busy all the time. {finding.caveat}",
        )
        for finding in waiting(analysis)
    ]


def first_batch(analysis: Analysis) -> list[Finding]:
    """One finding per loader whose workers are started for every epoch, at more than the floor of all step time."""
    train, machine = train_steps(analysis), analysis.machine
    if train is None or machine is None:
        return []
    return [
        _epoch_finding(analysis, train, fact)
        for fact in machine.epochs or ()
        if not fact.persistent and fact.lost_ms_per_step >= EPOCHS.floor * fact.total_ms_per_step
    ]


def _wave_evidence(train: StepFacts, waves: WaveFacts) -> tuple[Evidence, ...]:
    source = f"{steps_source(train)}, {waves.waves} waves"
    return (
        Evidence(f"data wait in one step of {waves.period}", round(waves.wave_wait_ms, 3), "ms", source),
        Evidence("data wait in the others", round(waves.other_wait_ms, 3), "ms", source),
        Evidence("part of the wait that lies in waves", round(waves.share, 4), "fraction", source),
        Evidence(f"distances between waves that are {waves.period} steps", round(waves.regular, 4), "fraction", source),
    )


def _epoch_finding(analysis: Analysis, train: StepFacts, fact: EpochFacts) -> Finding:
    share = clip_share(fact.lost_ms_per_step, fact.total_ms_per_step)
    workers = f"{fact.num_workers} workers" if fact.num_workers != 1 else "its worker"
    doubt, words = device_doubt(analysis)
    return Finding(
        id=finding_id(FIRST_RULE, fact.site),
        rule=FIRST_RULE,
        category="input",
        title=f"The {'training' if fact.kind == 'train' else 'evaluation'} loader starts {workers} anew for every "
        f"epoch, {share:.0%} of all step time",
        severity=severity(share),
        confidence=lowest(["high" if fact.restarts >= 3 else "medium", steps_confidence(train), *doubt]),
        cost_ms_per_step=fact.lost_ms_per_step,
        share=share,
        basis=ALL,
        step_ms=fact.total_ms_per_step,
        gain_ceiling=max(share, clip_share(fact.at_most_ms_per_step, fact.total_ms_per_step)),
        where=(fact.site,) if fact.site is not None else (),
        ranks=train.ranks,
        evidence=_epoch_evidence(train, fact),
        fix="Keep the workers between epochs: " + of_loader(fact.site, analysis.settings, persistent_workers=True),
        caveat=f"Workers that stay keep their memory between epochs, and their copy of the data set: what the script "
        f"changes in it later does not reach them. Longer epochs make the loss smaller.{words}",
        learn=LEARN,
        try_=(Try("loader.persistent_workers", "true"),),
        falsified_by="With persistent_workers=True an epoch does not get shorter",
    )


def _epoch_evidence(train: StepFacts, fact: EpochFacts) -> tuple[Evidence, ...]:
    source = f"events.jsonl, {fact.restarts} iterators after the first"
    found = [
        Evidence("making an iterator, median", round(fact.make_ms, 3), "ms", source),
        Evidence("iterators made during training", fact.restarts, "iterators", "events.jsonl"),
        Evidence("wait for an epoch's first batch, median", round(fact.first_wait_ms, 3), "ms", steps_source(train)),
        Evidence("wait for the other batches, median", round(fact.usual_wait_ms, 3), "ms", steps_source(train)),
    ]
    at_most = Evidence(
        "with ending the old workers and the slower first steps, at most",
        round(fact.at_most_ms_per_step, 3),
        "ms",
        f"{steps_source(train)}, per training step",
    )
    found.append(at_most)
    if fact.batch_ms is not None:
        found.append(
            Evidence("work for one batch, left out", round(fact.batch_ms, 3), "ms", "worker samples times step time")
        )
    else:
        found.append(
            Evidence("counted of each epoch", "making the iterator", "", "the work for one batch is not known")
        )
    return tuple(found)


class _Wait(Struct, frozen=True):
    """The loader in the profiled steps of one run. ms per step."""

    overviews: tuple[Overview, ...]
    steps: int
    mean_ms: float
    lost_ms: float
    device: bool


def profiled(analysis: Analysis, run: str | None = None) -> list[Overview]:
    """Overviews whose steps are marked; of one run where it is named."""
    spans = analysis.views.spans if analysis.views is not None else ()
    found = [span.overview for span in spans if span.overview is not None and span.overview.has_steps]
    return [one for one in found if run is None or one.span.run == run]


def idle_share(analysis: Analysis) -> float | None:
    """The share of profiled steps in which a device idles for the loader; None without a trace of a device."""
    wait = _wait([one for one in profiled(analysis) if one.basis == DEVICE])
    return wait.lost_ms / wait.mean_ms if wait is not None else None


def loader_gain(analysis: Analysis, run: str = "") -> Gain | None:
    """What profiled steps with device work save without the loader; None where none were replayed."""
    return replayed(analysis, run, LOADER_LOSS)


def traced_loader_bound(analysis: Analysis, rule: str, learn: str) -> list[Finding]:
    """One finding for each run of traces whose loader takes more of the mean profiled step than the floor."""
    machine = analysis.machine
    loaders = machine.trace_loaders if machine is not None else ()
    found = []
    for loader in loaders:
        wait = _wait(profiled(analysis, loader.run))
        if wait is not None and wait.lost_ms >= TRACED_LOADER.floor * wait.mean_ms:
            gain = loader_gain(analysis, loader.run) if wait.device else None
            found.append(_traced_finding(wait, loader, gain, rule, learn, several=len(loaders) > 1))
    return found


def _wait(overviews: list[Overview]) -> _Wait | None:
    with_device = [one for one in overviews if one.basis == DEVICE]
    chosen = with_device or overviews
    steps = [step for one in chosen for step in one.steps]
    wall_ns = sum(step.wall_ns for step in steps)
    if not wall_ns:
        return None
    part = "idle_data" if with_device else "host_data"
    lost_ns = sum(step.parts_ns.get(part, 0) for step in steps)
    count = len(steps)
    return _Wait(tuple(chosen), count, wall_ns / count / 1e6, lost_ns / count / 1e6, bool(with_device))


def _traced_finding(
    wait: _Wait, loader: TraceLoader, gain: Gain | None, rule: str, learn: str, *, several: bool
) -> Finding:
    share = clip_share(wait.lost_ms, wait.mean_ms)
    place = loader.call or (loader.entries[0] if loader.entries else None)
    wanted = _workers_of_trace(wait, loader)
    key = Place(loader.run, None, rule) if several or place is None else place
    return Finding(
        id=finding_id(rule, key),
        rule=rule,
        category="input",
        title=_title(wait, loader, several=several),
        severity=severity(share),
        confidence=_traced_confidence(wait),
        cost_ms_per_step=wait.lost_ms,
        share=share,
        gain_ceiling=max(share, gain.share) if gain is not None else share,
        where=(*loader.entries, *((loader.call,) if loader.call is not None else ())),
        ranks=tuple(sorted({one.span.rank for one in wait.overviews})),
        evidence=(*_traced_evidence(wait, loader), *(gain.evidence if gain is not None else ())),
        fix=_traced_fix(loader, wanted),
        caveat=_traced_caveat(wait, gain),
        learn=learn,
        try_=(Try("loader.num_workers", str(wanted)), Try("loader.persistent_workers", "true")) if wanted else (),
        falsified_by="With the same batch handed out again and again instead of loaded, the mean step does not get "
        "shorter",
    )


def _title(wait: _Wait, loader: TraceLoader, *, several: bool) -> str:
    who = {
        "none": "The training process loads every batch itself",
        "some": "The loader's workers do not keep up",
        None: "The step waits for its batch",
    }[loader.workers]
    what = "the device idles for it" if wait.device else "that takes"
    of = f" of {loader.run}" if several and loader.run else ""
    return f"{who}: {what} {wait.lost_ms:.3g} of {wait.mean_ms:.3g} ms of the step{of}"


def _workers_of_trace(wait: _Wait, loader: TraceLoader) -> int | None:
    """How many keep up, by the time of a fetch and of the rest of the step, and one more for jitter.

    None where there are some already, or nothing else takes time.
    """
    rest_ms = wait.mean_ms - wait.lost_ms
    if loader.workers != "none" or rest_ms <= 0:
        return None
    return math.ceil(loader.fetch_ms * loader.fetches / wait.steps / rest_ms) + 1


def _traced_fix(loader: TraceLoader, wanted: int | None) -> str:
    hot = loader.entries[0] if loader.entries else None
    shorter = f"; then shorten the work at {shown(hot)}" if hot is not None else ""
    if wanted is not None:
        return (
            f"Load in worker processes: num_workers={wanted} keeps up by these times, with persistent_workers=True in "
            f"the DataLoader{shorter}"
        )
    if loader.workers == "some":
        return (
            "Raise num_workers as far as there are cores, and shorten the work per item; `stepscope run` samples the "
            "workers and names its lines"
        )
    return f"Load in worker processes that are far enough ahead (num_workers, prefetch_factor){shorter}"


def _traced_confidence(wait: _Wait) -> str:
    if wait.steps >= TRACED_LOADER.steps_for_high:
        return "high"
    return "medium" if wait.steps >= TRACED_LOADER.steps_for_medium else "low"


def _traced_evidence(wait: _Wait, loader: TraceLoader) -> tuple[Evidence, ...]:
    what = "device idle while the host loads" if wait.device else "loading on the training thread"
    part = "idle_data" if wait.device else "host_data"
    found = [
        Evidence(f"{what}, per step", round(wait.lost_ms, 3), "ms", f"{part} of {_profiled(wait.steps)}"),
        Evidence("mean profiled step", round(wait.mean_ms, 3), "ms", _profiled(wait.steps)),
        Evidence("one fetch of the loader", round(loader.fetch_ms, 3), "ms", f"{loader.fetches} ranges of the loader"),
    ]
    if len(wait.overviews) > 1:
        for one in wait.overviews:
            lost = one.parts[part].mean_ns / 1e6
            found.append(Evidence(f"{what}, {one.span.label}", round(lost, 3), "ms", one.span.trace))
    if loader.workers is not None:
        words = "0" if loader.workers == "none" else "at least 1"
        found.append(Evidence("num_workers", words, "processes", "the iterator's name in the trace"))
    return tuple(found)


def _traced_caveat(wait: _Wait, gain: Gain | None) -> str:
    text = "A profiler slows the host more than the device, so the share without one may be smaller. "
    if wait.device:
        text += (
            "Device work that is queued while a batch is made is not counted; what else waits behind it may take over. "
        )
        text += BY_SUBTRACTION if gain is None else ""
    return text.strip()


def _profiled(steps: int) -> str:
    return f"{steps} profiled step{'s' * (steps != 1)}"


# Kinds of file systems whose data lies on other machines, as the kernel calls them.
NETWORK = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "afs", "panfs", "wekafs")
)
_FUSE = "fuse"  # fuse.sshfs, fuse.s3fs, fuse.juicefs: a program answers, mostly over a network


def storage_evidence(analysis: Analysis) -> tuple[Evidence, ...]:
    """Where the data lies and whether reading it reaches a device; nothing without telemetry or noteworthy reads."""
    facts = _facts(analysis)
    if facts is None or not _reads(facts):
        return ()
    who = "loader workers" if facts.role == "loader_worker" else "the training process"
    source = f"system.jsonl, {who}"
    found = []
    if facts.mounts:
        top = facts.mounts[0]
        name = f"{top.kind} at {top.path}"
        found.append(Evidence("file system of the data", name, "", f"system.jsonl, {top.source}"))
    rates = (("read", facts.requested_bytes_per_s), ("read from the device", facts.device_bytes_per_s))
    found += [Evidence(name, round(rate / 1e6, 2), "MB/s", source) for name, rate in rates if rate is not None]
    if facts.cold_share is not None:
        found.append(Evidence("of it not in the page cache", round(facts.cold_share, 4), "fraction", source))
    if facts.blocked_share is not None and facts.blocked_readings >= STORAGE.readings:
        text = f"{source}, state in {facts.blocked_readings} readings"
        found.append(Evidence("blocked for a disk or network storage", round(facts.blocked_share, 4), "fraction", text))
    if facts.io_delay_share is not None:
        found.append(Evidence("waiting for a block device", round(facts.io_delay_share, 4), "fraction", source))
    if (facts.major_faults_per_s or 0.0) >= STORAGE.faults_per_s:
        found.append(Evidence("mapped pages read from a disk", round(facts.major_faults_per_s or 0, 1), "1/s", source))
    return tuple(found)


def storage_advice(analysis: Analysis) -> str:
    """What to do about it, a sentence to add to a fix; empty where reads do not reach a slow device."""
    facts = _facts(analysis)
    if facts is None or not _reads(facts):
        return ""
    cold = (facts.cold_share or 0.0) >= STORAGE.cold
    far = next((mount for mount in facts.mounts if is_network(mount.kind)), None)
    if cold and facts.late_cold_share is not None and facts.late_cold_share < STORAGE.warm:
        return (
            ". The first pass read the device, later ones come from the page cache: measure those, or read the files "
            "once before training"
        )
    if far is not None:
        return (
            f". The data lies on {far.kind} at {far.path}: copy it to node-local storage before training "
            "($SLURM_TMPDIR, $TMPDIR), as a few large files that are read in order rather than many small ones"
        )
    if cold:
        return (
            ". Reads reach the device: pack small files into a few large ones that are read in order, or keep the data "
            "on faster storage or, where it fits, in memory"
        )
    return ""


def is_network(kind: str) -> bool:
    """Whether a file system of that kind mostly keeps its data on other machines."""
    return kind in NETWORK or kind == _FUSE or kind.startswith(f"{_FUSE}.")


def _facts(analysis: Analysis) -> StorageFacts | None:
    return analysis.machine.storage if analysis.machine is not None else None


def _reads(facts: StorageFacts) -> bool:
    """Whether there is anything to say: bytes that matter, or mapped pages that a disk had to bring."""
    rate = max(facts.requested_bytes_per_s or 0.0, facts.device_bytes_per_s or 0.0)
    return rate >= STORAGE.bytes_per_s or (facts.major_faults_per_s or 0.0) >= STORAGE.faults_per_s
