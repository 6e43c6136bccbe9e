"""The step waits for its batch: in this process, for busy workers, behind idle ones, in waves, or for new workers.

What a device does meanwhile hides the wait: where traces show it, only the time it idles for the loader counts. In
traces without a journal that idle time is the cost. What reading from storage says of a slow loader comes as evidence
and advice of these rules.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.gains import BY_SUBTRACTION, Gain, replayed
from stepscope.diagnose.in_script import of_loader
from stepscope.diagnose.rule import (
    ALL,
    REPORT_FLOOR,
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    accelerator,
    bare,
    clip_share,
    device_doubt,
    distinct,
    figure,
    figures,
    ms,
    overviews,
    rule,
    sampled_confidence,
    shown,
    stacks_source,
    steps_source,
    traced_confidence,
)
from stepscope.model import Analysis, Evidence, Interval, LoaderFacts, Place, Settings, StepFacts, Try
from stepscope.model import device_losses as kinds
from stepscope.model.counted import short, things
from stepscope.model.machine import StorageFacts, TraceLoader
from stepscope.model.views import DEVICE, Overview


class LOADER(Thresholds):
    """When the workers are the bottleneck and when something behind them is."""

    idle: float = 0.6  # workers parked for most of their time make batches faster than they are taken
    lines_shown: int = 3  # of each kind; a share below `line_share` names nothing worth reading
    line_share: float = 0.05
    needless: float = 0.5  # of the wait, to make the batch itself: with less it is the handing over; chosen, untuned
    mostly: float = 0.5  # a function with more than half of the loading time is named in the title
    files: float = 0.3  # of the loading: with less, packing the items gains less than other advice; chosen, untuned
    file_samples: int = 30  # as CONFIDENCE.few_samples
    part_samples: int = 15  # for a library's function: half of them are a quarter of the time at least (95 %)
    files_per_item: float = 0.5  # below it items share files already; chosen, untuned
    handover: float = 0.1  # of the load time: handing batches over, seen at 5 to 10 % for images of a few MB
    handover_ms: float = 1.0  # of a small batch: a queue, a descriptor and two processes that wake; chosen, untuned
    # Processor time at least, of each of the two processes, to hand over a batch: measured with one worker that has
    # them ready (torch 2.13, two virtual cores, other load beside): 0.10 to 0.15 for a batch, 0.13 to 0.25 for each
    # tensor (a file descriptor over a socket, a mapping), 0.38 to 1.1 for a MB (pages of shared memory touched anew).
    handover_batch_ms: float = 0.1
    handover_tensor_ms: float = 0.1
    handover_mb_ms: float = 0.25
    threads_of_a_core: float = 2.0  # logical cores; two ranks on such a pair were seen to compute no faster than one
    crowded: float = 0.05  # of the time without a core: then nothing can be promised of more processes


class TRACED_LOADER(Thresholds):
    """When the loader of a trace without a journal counts: time in it while the device idles."""

    steps_for_high: int = 10
    steps_for_medium: int = 3


class WAVES(Thresholds):
    """When the wait for data is a wave of all workers at once and not one per step."""

    share: float = 0.7  # of the wait in one step of N: evenly spread waits put 1/N there
    regular: float = 0.7  # of the distances between waves that are N; an epoch's end breaks one


class STORAGE(Thresholds):
    """When reads are worth telling beside a slow loader, and when they reach a device rather than the page cache."""

    bytes_per_s: float = 1e6  # below it a page cache and any disk are alike
    faults_per_s: float = 10.0  # of a millisecond each they would take 1 %
    readings: int = 20  # of the state of a process: 5 points per look
    cold: float = 0.5  # of the bytes asked for; chosen, untuned
    warm: float = 0.1  # the same in the last third; chosen, untuned


DATA_WAIT = Need(
    "the data wait of the steps", lambda a: a.loader is not None or bool(profiled(a)), traced=lambda a: a.loader is None
)
# Without a DataLoader the data wait is the gap before the first operator: whatever fills it is Python work or file I/O,
# and the rules for those name its lines.
A_LOADER = Need("a torch DataLoader in the training process", lambda analysis: _has_loader(analysis))
IN_WAVES = Need("a DataLoader with two workers or more, and enough steps", lambda a: a.machine.waves, quiet=True)
RESTARTED = Need(
    "a DataLoader with workers, iterated again while training", lambda a: a.machine.epochs is not None, quiet=True
)
LEARN = "https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading"
_SAME_BATCH = "With the same batch handed out again and again instead of loaded, the mean step does not get shorter"


def _has_loader(analysis: Analysis) -> bool:
    loader = analysis.loader
    if loader is not None:
        return loader.num_workers is not None or loader.site is not None
    return not profiled(analysis) or bool(analysis.machine.trace_loaders)


@rule("input.loader_bound", STEPS, DATA_WAIT, A_LOADER, learn=LEARN)
def loader_bound(analysis: Analysis) -> Iterator[Claim]:
    """Waiting for data takes more of the mean step than the floor.

    A wait that comes in waves is left to `input.prefetch_waves`. Of traces without a journal, one claim for each run.
    """
    if analysis.loader is None:
        yield from _in_traces(analysis)
    elif not in_waves(analysis):
        yield from _waiting(analysis, analysis.loader)


def in_waves(analysis: Analysis) -> bool:
    """Whether nearly all of the wait lies in one step of as many as there are workers."""
    waves = IN_WAVES.find(analysis)
    return waves is not None and waves.share >= WAVES.share and waves.regular >= WAVES.regular


def _waiting(analysis: Analysis, loader: LoaderFacts) -> Iterator[Claim]:
    train, on_device = STEPS.of(analysis), accelerator(analysis) is not None
    idle, replay = idle_share(analysis), loader_gain(analysis)
    if on_device and idle is not None:
        cost, hidden = min(loader.data_wait_ms, idle * train.mean_ms), ""
    else:
        cost, hidden = loader.data_wait_ms, device_doubt(analysis)[1].strip()
    # all waiting, on the rank that waits longest; beside a device of it what a replay saves
    most = gains.without_wait(analysis) or 0.0
    cpu = analysis.machine.cpu
    if cpu is not None and not loader.in_main_process and _parked(loader):
        # with batches at hand the main thread wakes up for each, and all of its waiting for a core may lie here
        cost, most = (max(0.0, each - cpu.run_delay_share * train.mean_ms) for each in (cost, most))
    if on_device:
        saved = 0.0 if replay is None else replay.share * train.mean_ms
        wait = _device_wait(analysis)
        if replay is not None and wait is not None:
            saved = max(saved, min(most, replay.at_most(wait.mean_ms / train.mean_ms) * train.mean_ms))
        most = saved
    share, where = clip_share(cost, train.mean_ms), _where(loader)
    hot = next((place for place in where if place.share is not None), None)  # the first place that samples saw
    named, part = _named(loader, hot), None if hot else _library_part(loader)
    claim = Claim(
        title=f"The training process makes every batch itself, {share:.0%} of the step{named}",
        steps=train,
        cost_ms=cost,
        ceiling_ms=min(train.mean_ms, max(cost, most)),
        levels=[sampled_confidence(loader.samples)] if loader.samples else [],
        where=where,
        key=loader.site or (where[0] if where else None),
        evidence=tuple(_evidence(analysis, train, loader)),
        fix="",
        caveat="Worker processes would not help: to hand a batch over takes as long as they would save.",
        falsified_by=_SAME_BATCH,
    )
    gained = None if loader.anew else _gained_by_workers(analysis, train, loader, share)
    if gained is not None and loader.batch is not None and gained.high < REPORT_FLOOR:
        # where handing batches over costs what workers would gain: what else can be done, as far as that is known
        if hot is not None:
            yield replace(
                claim, levels=claim.levels or ["medium"], fix=f"Shorten the work at {shown(hot)}{_packing(loader)}"
            )
        elif loader.arguments.get("dataset") == "TensorDataset" and (loader.batch_size or 1) > 1 and loader.site:
            order = "RandomSampler" if loader.arguments.get("shuffle") == "True" else "SequentialSampler"
            fix = (
                "Take whole batches out of the tensors, not items that are put together again: DataLoader(data, "
                f"sampler=BatchSampler({order}(data), {loader.batch_size}, drop_last=False), batch_size=None) at "
                f"{shown(loader.site)}"
            )
            yield replace(claim, levels=claim.levels or ["medium"], fix=fix)
        return
    # without samples the wait is measured, its reason is not
    unsure = ["medium"] if not loader.samples and analysis.stacks is None else []
    kept_ms = 0.0
    if loader.in_main_process and hot is None and part is None and not loader.anew:
        # what workers leave of the wait, where nothing but workers is proposed
        kept_ms = min(loader.data_wait_share, clip_share(_handover_ms(loader), train.mean_ms)) * train.mean_ms
    title, fix = _words(loader, analysis.settings, hot, f"{share:.0%} of the step", named)
    yield replace(
        claim,
        title=title,
        kept_ms=kept_ms,
        expected_gain=gained if gained is not None and gained.low > 0 else None,
        levels=[*claim.levels, *unsure, *(["low"] if hidden else [])],
        evidence=(*claim.evidence, *(replay.evidence if replay is not None else ()), *_storage_evidence(analysis)),
        fix=fix + _packing(loader) + _storage_advice(analysis),
        caveat=f"{hidden} {_caveat(loader)}".strip(),
        tries=_tries(loader),
        falsified_by=f"With num_workers={loader.suggested_workers} the mean step does not get shorter"
        if loader.in_main_process and not loader.anew
        else _SAME_BATCH,
    )


def _caveat(loader: LoaderFacts) -> str:
    """What the proposed change costs."""
    caveat = "Work stored ahead of training costs disk space and fixes random transforms done before it."
    if loader.anew:
        return "An epoch then holds each sample once, where now the same may come again in the next step."
    if _needless_workers(loader):
        caveat = "Batches are then made while nothing trains, and random numbers are those of the training process."
    elif loader.in_main_process or loader.suggested_workers > (loader.num_workers or 0):
        caveat = "Each worker holds its own copy of the data set object and draws its own random numbers."
        if loader.cpu_limit / loader.ranks_on_host <= 2:
            caveat += f" {_cores(loader)}: workers compete with the training process on a CPU."
    if _many_files(loader):
        caveat += (
            " Packed files are fast in sequence: shuffle the order of shards and within a buffer, because single items "
            "picked at random from one large file can be slower than files of their own."
        )
    return caveat


def _handover_ms(loader: LoaderFacts) -> float:
    """What the training process works at least to take a step's batches from workers; 0 where they were not looked at.

    A worker works as long to hand them over.
    """
    batch = loader.batch
    if batch is None:
        return 0.0
    tensors_ms = LOADER.handover_tensor_ms * batch.tensors + LOADER.handover_mb_ms * batch.bytes / 1e6
    return (LOADER.handover_batch_ms + tensors_ms) * batch.per_step


def _where(loader: LoaderFacts) -> tuple[Place, ...]:
    """The outermost user lines below the loader (`__getitem__`), then the hottest lines inside them, then its site.

    Before them a line in which most of the time passes: it does what the outer ones only lead to. Shares are of the
    sampled loading time; those of the outer lines include the inner ones.
    """
    inner = loader.lines[: LOADER.lines_shown]
    most = inner[:1] if inner and inner[0].share >= LOADER.mostly else ()
    lines = (*most, *loader.entries[: LOADER.lines_shown], *inner)
    notable = [Place(one.file, one.line, one.function, one.share) for one in lines if one.share >= LOADER.line_share]
    return distinct([*notable, *((loader.site,) if loader.site is not None else ())])


def _words(
    loader: LoaderFacts, settings: Settings | None, hot: Place | None, waits: str, named: str
) -> tuple[str, str]:
    """(title, fix)."""
    part = None if hot else _library_part(loader)
    at_part = f"in {_library_name(part)}" if part is not None else ""
    shorter = f"; then shorten the work {f'at {shown(hot)}' if hot else at_part}" if hot or part else ""
    wanted, count = loader.suggested_workers, loader.num_workers or 0
    if loader.anew:
        return (
            f"Each step asks the loader for an iterator and takes one batch of it, {waits}{named}",
            "Make one for each epoch, in front of the loop: `for batch in loader`, or batches = iter(loader) and in a "
            "step next(batches). A new one draws the order of all samples again, and its workers make batches that "
            f"nobody takes{shorter}",
        )
    if loader.in_main_process:
        return (
            f"The training process loads every batch itself, {waits}{named}",
            "Load in worker processes: "
            + of_loader(loader.site, settings, loader.via, num_workers=wanted, persistent_workers=True)
            + _shares(loader)
            + shorter,
        )
    many = f"{count} loader workers" if count != 1 else "1 loader worker"
    if _needless_workers(loader):
        return (
            f"The step waits for batches, {waits}, with next to nothing to do for {many}{named}",
            f"Make batches in the training process, where one takes {short(loader.load_ms or 0.0)} ms and the wait "
            f"{short(loader.data_wait_ms)} ms: "
            + of_loader(loader.site, settings, loader.via, num_workers=0)
            + ", without persistent_workers and prefetch_factor; or give workers more to do at once: larger batches",
        )
    if _parked(loader):
        return (
            f"The step waits for batches, {waits}, while {many} sat parked",
            "The workers are not the bottleneck. Make what crosses the process border smaller (tensors, not lists "
            "of objects; fewer, larger ones), and keep more in reserve: "
            + of_loader(loader.site, settings, loader.via, prefetch_factor=4),
        )
    if wanted > count:
        more = of_loader(loader.site, settings, loader.via, num_workers=wanted)
        return (
            f"{many} cannot keep up: the step waits, {waits}{named}",
            f"Raise the number of workers from {count}: {more}{_shares(loader)}{shorter}",
        )
    place = f"at {shown(hot)}" if hot else at_part or "per item"
    return (
        f"{many} cannot keep up and no core is left: the step waits, {waits}{named}",
        f"{_cores(loader)}, so more workers will not help: do less {place} (decode or "
        "resize once and store the result, transform whole batches instead of items), or ask for more cores",
    )


def _shares(loader: LoaderFacts) -> str:
    """What workers need first, of a data set that nobody has divided among several yet as far as can be seen."""
    if not loader.iterable or (loader.num_workers or 0) > 1:
        return ""
    return (
        ", once its IterableDataset gives each worker a share of its own (torch.utils.data.get_worker_info()): else "
        "every worker reads all of it, and the training gets each sample several times"
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
    one_by_one = hot is not None and bare(hot.function) == "__getitem__" and (loader.batch_size or 1) > 1
    if one_by_one and hot is not None and hot.share >= LOADER.mostly:
        return (
            ". What every item gets alike (scaling, conversion) can be done to a whole batch by tensor operators: in "
            "collate_fn, or behind the loader on the device that trains"
        )
    return ""


def _parked(loader: LoaderFacts) -> bool:
    return loader.workers_idle_share is not None and loader.workers_idle_share >= LOADER.idle


def _needless_workers(loader: LoaderFacts) -> bool:
    """Whether parked workers make a batch in much less time than the step waits for it: handing it over is the wait."""
    load_ms = loader.load_ms
    return _parked(loader) and load_ms is not None and 0 < load_ms <= LOADER.needless * loader.data_wait_ms


def _cores(loader: LoaderFacts) -> str:
    ranks = f" for {loader.ranks_on_host} ranks" if loader.ranks_on_host > 1 else ""
    return f"There are {loader.cpu_limit:g} cores{ranks}"


def _named(loader: LoaderFacts, hot: Place | None) -> str:
    """The function most of the loading time lies in, else the hottest line."""
    if hot is None:
        part = _library_part(loader)
        return "" if part is None else f", mostly in {_library_name(part)}"
    of_function: dict[str, float] = defaultdict(float)
    for line in loader.entries or loader.lines:
        of_function[line.function] += line.share
    function = max(of_function, key=lambda name: of_function[name], default="")
    if of_function[function] >= LOADER.mostly:
        return f", mostly in {function} (hottest: {shown(hot)})"
    return f", hottest in {hot.function} ({shown(hot)})"


def _library_part(loader: LoaderFacts) -> Place | None:
    """The function of a library that most of the loading passes in."""
    part = loader.library[0] if loader.library and loader.samples >= LOADER.part_samples else None
    return part if part is not None and (part.share or 0.0) >= LOADER.mostly else None


def _library_name(part: Place) -> str:
    return f"{part.function} ({part.file})"


def _evidence(analysis: Analysis, train: StepFacts, loader: LoaderFacts) -> Iterator[Known]:
    steps, stacks = steps_source(train), stacks_source(analysis)
    loading = f"{stacks}, {things(loader.samples, 'sample')} of loading"
    yield ms("data wait per step", loader.data_wait_ms, f"{steps}, {things(train.count, 'steady step')}")
    yield figure("data wait share of the step", loader.data_wait_share, "fraction", steps)
    for part in loader.library[: LOADER.lines_shown] if loader.samples >= LOADER.part_samples else ():
        if part.share is not None and part.share >= LOADER.line_share:
            yield figure(f"loading time in {_library_name(part)}", part.share, "fraction", loading)
    yield from figures(
        "events.jsonl, the loader's own setting",
        ("num_workers", loader.num_workers, "processes", 0),
        ("batch_size", loader.batch_size, "samples", 0),
    )
    if loader.batch is not None and loader.in_main_process:
        looked = f"events.jsonl, median of {things(loader.batch.batches, 'batch')} that were looked at"
        handed = f"{looked}, times what one takes"
        yield figure("tensors of a batch", loader.batch.tensors, "tensors", looked, 1)
        yield Evidence("bytes of a batch", round(loader.batch.bytes), "bytes", looked)
        yield ms("handing a step's batches over, at least", _handover_ms(loader), handed)
    files = loader.files
    if files is not None and files.samples >= LOADER.file_samples and files.share > 0:
        of_files = f"{stacks}, {things(files.samples, 'sample')} of loading"
        yield figure("loading time in opening and reading files", files.share, "fraction", of_files)
        yield from figures("profiler window", ("files opened per item", files.files_per_item, "files", 3))
    yield from figures("windows, idle_data", ("device idle while the host loads", idle_share(analysis), "fraction", 4))
    for line in loader.lines[: LOADER.lines_shown]:
        if line.share >= LOADER.line_share:
            place = shown(Place(line.file, line.line))
            yield figure(f"loading time at {place}", line.share, "fraction", loading)
    yield from figures(stacks, ("workers busy", loader.workers_busy_share, "fraction", 4))
    if loader.load_ms is not None and not loader.in_main_process:
        yield ms("loading work per step", loader.load_ms, "worker samples times step time")
    yield Evidence("cores this process may use", loader.cpu_limit, "cores", "manifest.json, affinity and cgroup")
    yield from figures("system.jsonl", ("cores in use", loader.cores_used, "cores", 2))


def _gained_by_workers(analysis: Analysis, train: StepFacts, loader: LoaderFacts, most: float) -> Interval | None:
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
    if accelerator(analysis) is None:
        threads = min(cores, loader.threads or cores)
        best = max(best, ((loader.cores_used or 0.0) * step + 2 * handed) / cores)
        worst = max(worst, (loader.compute_ms * threads + loader.load_ms) / real)
    worst += LOADER.handover * loader.load_ms + max(LOADER.handover_ms, handed)
    cpu = analysis.machine.cpu
    if cpu is not None and cpu.run_delay_share >= LOADER.crowded:
        worst = step
    high = max(0.0, min(most, loader.data_wait_share, 1.0 - best / step))
    return Interval(low=max(0.0, min(high, 1.0 - worst / step)), high=high)


def _tries(loader: LoaderFacts) -> tuple[Try, ...]:
    if loader.anew or _shares(loader):
        return ()  # a person has to see to it first
    if _needless_workers(loader):
        return (Try("loader.num_workers", "0"),)
    tries = []
    if loader.suggested_workers > (loader.num_workers or 0) and not _parked(loader):
        tries.append(Try("loader.num_workers", str(loader.suggested_workers)))
    if str(loader.arguments.get("persistent_workers", False)) != "True":
        tries.append(Try("loader.persistent_workers", "true"))
    if not loader.in_main_process:
        tries.append(Try("loader.prefetch_factor", "4"))
    return tuple(tries)


@rule("input.prefetch_waves", STEPS, IN_WAVES, learn=LEARN)
def prefetch_waves(analysis: Analysis) -> Iterator[Claim]:
    train, waves, loader = STEPS.of(analysis), IN_WAVES.of(analysis), analysis.loader
    if loader is None or not in_waves(analysis):
        return
    source = f"{steps_source(train)}, {waves.waves} waves"
    for claim in _waiting(analysis, loader):
        yield replace(
            claim,
            title=f"One step in {waves.period} waits {short(waves.wave_wait_ms)} ms for data: {waves.period} workers "
            f"make batches in step and cannot keep up, {clip_share(claim.cost_ms, train.mean_ms):.0%} of the mean step",
            key=claim.where[0] if claim.where else None,
            evidence=(
                ms(f"data wait in one step of {waves.period}", waves.wave_wait_ms, source),
                ms("data wait in the others", waves.other_wait_ms, source),
                figure("part of the wait that lies in waves", waves.share, "fraction", source),
                figure(f"distances between waves that are {waves.period} steps", waves.regular, "fraction", source),
                *claim.evidence,
            ),
            caveat="The median step hides this loss, the mean shows it. More prefetching does not help while the "
            f"workers are busy all the time. {claim.caveat}",
        )


@rule("input.first_batch", STEPS, RESTARTED, learn=LEARN)
def first_batch(analysis: Analysis) -> Iterator[Claim]:
    train, (doubt, words) = STEPS.of(analysis), device_doubt(analysis)
    for fact in analysis.machine.epochs or ():
        if fact.persistent and not fact.remade:
            continue
        once = "Make the DataLoader once, before the loop over epochs, and keep" if fact.remade else "Keep"
        workers = f"{fact.num_workers} workers" if fact.num_workers != 1 else "its worker"
        kind = "training" if fact.kind == "train" else "evaluation"
        steps = steps_source(train)
        most = "with ending the old workers and the slower first steps, at most"
        yield Claim(
            title=f"The {kind} loader starts {workers} anew for every epoch, "
            f"{clip_share(fact.lost_ms_per_step, fact.total_ms_per_step):.0%} of all step time",
            steps=train,
            step_ms=fact.total_ms_per_step,
            basis=ALL,
            cost_ms=fact.lost_ms_per_step,
            ceiling_ms=fact.at_most_ms_per_step,
            levels=("high" if fact.restarts >= 3 else "medium", *doubt),
            where=(fact.site,) if fact.site is not None else (),
            evidence=(
                ms(
                    "making an iterator, median",
                    fact.make_ms,
                    f"events.jsonl, {fact.restarts} iterators after the first",
                ),
                Evidence("iterators made during training", fact.restarts, "iterators", "events.jsonl"),
                ms("wait for an epoch's first batch, median", fact.first_wait_ms, steps),
                ms("wait for the other batches, median", fact.usual_wait_ms, steps),
                ms(most, fact.at_most_ms_per_step, f"{steps}, per training step"),
                ms("work for one batch, left out", fact.batch_ms, "worker samples times step time")
                if fact.batch_ms is not None
                else Evidence(
                    "counted of each epoch", "making the iterator", "", "the work for one batch is not known"
                ),
            ),
            fix=f"{once} the workers between epochs: "
            + of_loader(fact.site, analysis.settings, persistent_workers=True),
            caveat="Workers that stay keep their memory between epochs, and their copy of the data set: what the "
            f"script changes in it later does not reach them. Longer epochs make the loss smaller.{words}",
            tries=() if fact.remade else (Try("loader.persistent_workers", "true"),),
            falsified_by="With persistent_workers=True an epoch does not get shorter",
        )


class _Wait(Struct, frozen=True):
    """The loader in the profiled steps of one run. ms per step."""

    overviews: list[Overview]
    steps: int
    mean_ms: float
    lost_ms: float
    device: bool

    @property
    def part(self) -> str:
        return "idle_data" if self.device else "host_data"


def profiled(analysis: Analysis, run: str | None = None) -> list[Overview]:
    """Overviews whose steps are marked; of one run where it is named."""
    return [one for one in overviews(analysis) if one.has_steps and run in (None, one.span.run)]


def idle_share(analysis: Analysis) -> float | None:
    """The share of profiled steps in which a device idles for the loader; None without a trace of a device."""
    wait = _device_wait(analysis)
    return wait.lost_ms / wait.mean_ms if wait is not None else None


def _device_wait(analysis: Analysis) -> _Wait | None:
    return _wait([one for one in profiled(analysis) if one.basis == DEVICE])


def loader_gain(analysis: Analysis, run: str = "") -> Gain | None:
    """What profiled steps with device work save without the loader; None where none were replayed."""
    return replayed(analysis, run, kinds.LOADER)


def _wait(found: list[Overview]) -> _Wait | None:
    with_device = [one for one in found if one.basis == DEVICE]
    wait = _Wait(with_device or found, 0, 0.0, 0.0, bool(with_device))
    steps = [step for one in wait.overviews for step in one.steps]
    wall_ns, lost_ns = sum(step.wall_ns for step in steps), sum(step.parts_ns.get(wait.part, 0) for step in steps)
    count = max(1, len(steps)) * 1e6
    return replace(wait, steps=len(steps), mean_ms=wall_ns / count, lost_ms=lost_ns / count) if wall_ns else None


_WHO = {
    "none": "The training process loads every batch itself",
    "some": "The loader's workers do not keep up",
    None: "The step waits for its batch",
}


def _in_traces(analysis: Analysis) -> Iterator[Claim]:
    """A claim for each run of traces whose loader takes more of the mean profiled step than the floor."""
    loaders = analysis.machine.trace_loaders
    several = len(loaders) > 1
    for loader in loaders:
        wait = _wait(profiled(analysis, loader.run))
        if wait is None or wait.lost_ms < REPORT_FLOOR * wait.mean_ms:
            continue
        gain = loader_gain(analysis, loader.run) if wait.device else None
        place = loader.call or (loader.entries[0] if loader.entries else None)
        what = "the device idles for it" if wait.device else "that takes"
        caveat = "A profiler slows the host more than the device, so the share without one may be smaller. "
        if wait.device:
            caveat += (
                "Device work that is queued while a batch is made is not counted; what else waits behind it may take "
                f"over. {BY_SUBTRACTION if gain is None else ''}"
            )
        shorter = f"; then shorten the work at {shown(loader.entries[0])}" if loader.entries else ""
        tries: tuple[Try, ...] = ()
        rest_ms = wait.mean_ms - wait.lost_ms
        if loader.workers == "some":
            fix = (
                "Raise num_workers as far as there are cores, and shorten the work per item; `stepscope run` samples "
                "the workers and names its lines"
            )
        elif loader.workers == "none" and rest_ms > 0:
            # as many as keep up, by the time of a fetch and of the rest of the step, and one more for jitter
            wanted = math.ceil(loader.fetch_ms * loader.fetches / wait.steps / rest_ms) + 1
            tries = (Try("loader.num_workers", str(wanted)), Try("loader.persistent_workers", "true"))
            fix = (
                f"Load in worker processes: num_workers={wanted} keeps up by these times, with persistent_workers=True "
                f"in the DataLoader{shorter}"
            )
        else:
            fix = f"Load in worker processes that are far enough ahead (num_workers, prefetch_factor){shorter}"
        level = traced_confidence(wait.steps, TRACED_LOADER.steps_for_high)
        yield Claim(
            title=f"{_WHO[loader.workers]}: {what} {short(wait.lost_ms)} of {short(wait.mean_ms)} ms of the step"
            + (f" of {loader.run}" if several and loader.run else ""),
            step_ms=wait.mean_ms,
            cost_ms=wait.lost_ms,
            ceiling_ms=gain.share * wait.mean_ms if gain is not None else 0.0,
            levels=(level if wait.steps >= TRACED_LOADER.steps_for_medium else "low",),
            where=(*loader.entries, *((loader.call,) if loader.call is not None else ())),
            key=Place(loader.run, None, loader_bound.name) if several or place is None else place,
            ranks=tuple(sorted({one.span.rank for one in wait.overviews})),
            evidence=(*_traced_evidence(wait, loader), *(gain.evidence if gain is not None else ())),
            fix=fix,
            caveat=caveat.strip(),
            tries=tries,
            falsified_by=_SAME_BATCH,
        )


def _traced_evidence(wait: _Wait, loader: TraceLoader) -> Iterator[Known]:
    what = "device idle while the host loads" if wait.device else "loading on the training thread"
    steps = f"{wait.steps} profiled step{'s' * (wait.steps != 1)}"
    yield ms(f"{what}, per step", wait.lost_ms, f"{wait.part} of {steps}")
    yield ms("mean profiled step", wait.mean_ms, steps)
    yield ms("one fetch of the loader", loader.fetch_ms, f"{loader.fetches} ranges of the loader")
    if len(wait.overviews) > 1:
        for one in wait.overviews:
            yield ms(f"{what}, {one.span.label}", one.parts[wait.part].mean_ns / 1e6, one.span.trace)
    if loader.workers is not None:
        words = "0" if loader.workers == "none" else "at least 1"
        yield Evidence("num_workers", words, "processes", "the iterator's name in the trace")


# Kinds of file systems whose data lies on other machines, as the kernel calls them.
NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|cifs|smb3|ceph|glusterfs|afs|panfs|wekafs"
    r"|fuse(\..*)?"  # fuse.sshfs, fuse.s3fs, fuse.juicefs: a program answers, mostly over a network
)


def _storage(analysis: Analysis) -> StorageFacts | None:
    """What is noteworthy of reads: bytes that matter, or mapped pages that a disk had to bring; else None."""
    facts = analysis.machine.storage
    if facts is None:
        return None
    rate = max(facts.requested_bytes_per_s or 0.0, facts.device_bytes_per_s or 0.0)
    slow = rate >= STORAGE.bytes_per_s or (facts.major_faults_per_s or 0.0) >= STORAGE.faults_per_s
    return facts if slow else None


def _storage_evidence(analysis: Analysis) -> Iterator[Known]:
    """Where the data lies and whether reading it reaches a device; nothing without telemetry or noteworthy reads."""
    facts = _storage(analysis)
    if facts is None:
        return
    source = f"system.jsonl, {'loader workers' if facts.role == 'loader_worker' else 'the training process'}"
    if facts.mounts:
        top = facts.mounts[0]
        yield Evidence("file system of the data", f"{top.kind} at {top.path}", "", f"system.jsonl, {top.source}")
    asked, read, faults = facts.requested_bytes_per_s, facts.device_bytes_per_s, facts.major_faults_per_s or 0.0
    yield from figures(
        source,
        ("read", None if asked is None else asked / 1e6, "MB/s", 2),
        ("read from the device", None if read is None else read / 1e6, "MB/s", 2),
        ("of it not in the page cache", facts.cold_share, "fraction", 4),
    )
    if facts.blocked_readings >= STORAGE.readings:
        states = f"{source}, state in {facts.blocked_readings} readings"
        yield from figures(states, ("blocked for a disk or network storage", facts.blocked_share, "fraction", 4))
    yield from figures(
        source,
        ("waiting for a block device", facts.io_delay_share, "fraction", 4),
        ("mapped pages read from a disk", faults if faults >= STORAGE.faults_per_s else None, "1/s", 1),
    )


def _storage_advice(analysis: Analysis) -> str:
    """What to do about it, a sentence to add to a fix; empty where reads do not reach a slow device."""
    facts = _storage(analysis)
    if facts is None:
        return ""
    cold = (facts.cold_share or 0.0) >= STORAGE.cold
    far = next((mount for mount in facts.mounts if NETWORK.fullmatch(mount.kind)), None)
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
