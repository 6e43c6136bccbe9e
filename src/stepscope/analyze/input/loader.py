"""What the DataLoader that feeds training costs, which lines its time goes to, and how many workers would cover it.

The number of workers comes from measured times, not from the machine: making one step's batches takes `load_ms` of
work, the rest of the step `compute_ms`; ceil(load_ms / compute_ms) workers keep up, one more absorbs jitter. The bound
is loading's share of the cores this process may use (affinity and cgroup quota, shared by the ranks of the host): where
loading is two thirds of all CPU work, workers on more than two thirds of the cores would starve the training process.

Below: what starting workers again for every epoch costs, and waits that come in waves. An iterator of a DataLoader with
workers that do not persist starts its processes anew. Making it, and what the first batch takes longer than the work
for one batch explains, is time that persistent workers do not need.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.host.main_thread import lines_with
from stepscope.analyze.host.sampled_stacks import hot_lines
from stepscope.analyze.machine.readings import manifest_objects
from stepscope.analyze.sites import first_int, site_of, threads_set
from stepscope.engine.attribution import heaviest_lines, origins, place
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.host_calls import BUILTIN, ProfiledCalls
from stepscope.engine.journal import event_data, events_in_steps, mean, place_of
from stepscope.engine.samples import LOADER_FILE, Samples, short
from stepscope.engine.scene import LOADER_RANGE
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import INSTALLED
from stepscope.model import BatchContent, HotLine, LoaderFacts, Place, StepFacts
from stepscope.model.machine import EpochFacts, TraceLoader, WaveFacts
from stepscope.model.run_facts import FileReads
from stepscope.read.raw import Frame
from stepscope.read.text import string
from stepscope.tables.arrays import NONE, Int64, Numbers, climb, flags, unique
from stepscope.tables.phases import last_part
from stepscope.tables.schema import Tables

MAX_LINES = 20
MAX_PARTS = 5
LONGEST_WAY = 100  # functions that only lead to others: more are no composition, and each is looked for in all paths
OWN_LINE = 0.1  # of the loading: a line of the user's whose parts are worth telling
ANEW, FEW_ANEW = 0.5, 3  # of the steady steps, which are without an epoch's first batch where there are others
_NO_CORES_KNOWN = 1.0  # without a manifest, promise no more than one core


def loader_facts(
    context: Context, train: StepFacts | None, cores: float | None, opened: float | None
) -> LoaderFacts | None:
    """None without training steps whose data wait is known.

    Args:
        cores: mean CPU use of the training process.
        opened: files that the training process opened for one step, by the window.
    """
    tables, labelled = context.tables, context.labelled
    wait = next((part for part in train.partition if part.category == "data_wait"), None) if train else None
    if train is None or wait is None:
        return None
    event, steady = feeding_loader(tables, labelled), labelled.steady("train")
    firsts = steady.filter("first_batch").height
    site = site_of(tables, event)
    arguments: dict[str, Any] = dict(site.get("arguments") or {}) if site else {}
    workers, batch = (
        first_int(event.get(name) if event else None, arguments.get(name)) for name in ("num_workers", "batch_size")
    )
    in_main = not workers
    rows, idle = _loading(context.sampled, in_main)
    busy = None if idle is None else 1.0 - idle
    lines, entries = _sampled(rows, "rank" if in_main else "loader_worker")
    compute_ms = max(0.0, train.mean_ms - wait.ms)
    load_ms = wait.ms if in_main else None if busy is None else (workers or 0) * busy * train.mean_ms
    limit, ranks = known_cores(tables) or _NO_CORES_KNOWN, ranks_on_host(tables)
    threads, _ = threads_set(tables) or (None, None)
    if cores is None:  # CPU time of a step without its loading, by the threads that the script asked for
        compute_cpu_ms = compute_ms * (threads or 1)
    else:
        compute_cpu_ms = cores * train.mean_ms - ((load_ms or 0.0) if in_main else 0.0)
    return LoaderFacts(
        num_workers=workers,
        batch_size=batch,
        site=place_of(site),
        arguments=arguments,
        data_wait_ms=wait.ms,
        data_wait_share=wait.share,
        in_main_process=in_main,
        lines=tuple(lines[:MAX_LINES]),
        workers_busy_share=busy,
        workers_idle_share=idle,
        cpu_limit=limit,
        suggested_workers=suggest_workers(load_ms, compute_ms, limit / ranks, compute_cpu_ms, workers or 0),
        entries=tuple(entries[:MAX_LINES]),
        load_ms=load_ms,
        compute_ms=compute_ms,
        cores_used=cores,
        library=_library_parts(context, rows, next((line for line in lines if line.share >= OWN_LINE), None)),
        via=string(site.get("via")) if site else None,
        samples=int(rows["samples"].sum()) if rows is not None else 0,
        batch=_content(tables, labelled, event),
        threads=threads,
        ranks_on_host=ranks,
        iterable=event is not None and event.get("iterable") is True,
        files=None if rows is None else _file_reads(rows, context.lines, opened if in_main else None, batch),
        anew=firsts >= FEW_ANEW and firsts > ANEW * steady.height and (event or {}).get("length") != 1,
    )


def suggest_workers(load_ms: float | None, compute_ms: float, cores: float, compute_cpu_ms: float, current: int) -> int:
    """Workers that keep up with the step, within `cores` (of one rank), at least one.

    Args:
        load_ms: work to make one step's batches; None when not known, then all cores but one are promised.
        compute_ms: the rest of the step.
        compute_cpu_ms: CPU time of the rest on all threads.
        current: workers there are now and that do not keep up; the answer is more where the cores allow it.
    """
    most = max(1, math.floor(cores))
    if load_ms is None or load_ms <= 0 or compute_ms <= 0:
        return max(1, most - 1)
    cpu_ms = max(compute_ms, compute_cpu_ms)
    bound = max(1, min(most, math.ceil(cores * load_ms / (load_ms + cpu_ms))))
    return min(bound, max(math.ceil(load_ms / compute_ms) + 1, current + 1))


def known_cores(tables: Tables) -> float | None:
    """Cores a process of the (smallest) host may use: its affinity, cut by the cgroup's quota."""
    limits = []
    for hardware in manifest_objects(tables, "hardware"):
        affinity, quota, logical = (hardware.get(k) for k in ("affinity", "cgroup_cpu_limit", "logical_cores"))
        known = [len(affinity)] if isinstance(affinity, list) and affinity else [logical]
        limits.append([float(one) for one in (*known, quota) if isinstance(one, int | float) and one > 0])
    return min((min(known) for known in limits if known), default=None)


def ranks_on_host(tables: Tables) -> int:
    """Ranks that share the fullest host."""
    hosts: dict[str, set[int]] = {}
    for rank in tables.ranks:
        hosts.setdefault(rank.host, set()).add(rank.rank)
    return max((len(ranks) for ranks in hosts.values()), default=1)


def feeding_loader(tables: Tables, labelled: LabelledSteps) -> dict[str, Any] | None:
    """The loader that training steps wait for: the longest by the fetches that were looked at in them.

    In recordings without any the first that was iterated.
    """
    events = list(_loader_events(tables))
    if not events:
        return None
    train = labelled.frame.filter(pl.col("kind") == "train").drop_nulls(["start_ns", "wall_ns"])
    votes: Counter[Any] = Counter()
    for row, data, _ in events_in_steps(tables, "batch", train, at_end=True):
        votes[data.get("id")] += row["duration_ns"]
    best = max(votes, key=lambda key: votes[key], default=events[0]["id"])
    return next((event for event in events if event["id"] == best), None)


def _content(tables: Tables, labelled: LabelledSteps, event: dict[str, Any] | None) -> BatchContent | None:
    if event is None:
        return None
    train = labelled.frame.filter(pl.col("kind") == "train").drop_nulls(["start_ns", "wall_ns"])
    names = ("tensors", "bytes", "objects")
    own = [
        [float(data[name]) for name in names]
        for _, data, _ in events_in_steps(tables, "batch", train, at_end=True)
        if data.get("id") == event.get("id") and all(isinstance(data.get(name), int) for name in names)
    ]
    if not own:
        return None
    tensors, size, objects = (statistics.median(column) for column in zip(*own, strict=True))
    return BatchContent(tensors, size, objects, batches=len(own), per_step=mean(train["fetches"].drop_nulls()) or 1.0)


def _loading(samples: Samples | None, in_main: bool) -> tuple[pl.DataFrame | None, float | None]:
    """(stacks of the loading work, the share of their time that workers have nothing to do)."""
    if samples is None:
        return None, None
    if in_main:
        return samples.rank_steps().filter(pl.col("phase") == "data_wait"), None
    everyone = samples.workers()
    parked = pl.col("waiting") & ~pl.col("in_fetch") & pl.col("user_file").is_null()
    total = int(everyone["samples"].sum())
    idle = float(everyone.filter(parked)["samples"].sum()) / total if total else None
    return everyone.filter(~parked).with_columns(phase=pl.lit("data_wait")), idle


def _sampled(rows: pl.DataFrame | None, role: str) -> tuple[list[HotLine], list[HotLine]]:
    """(lines, entries) of the loading work."""
    if rows is None:
        return [], []
    inner = "inner"
    if rows["entry_file"].null_count() == rows.height:
        # A line that merely iterates a loader of library code does no work; without a loader it may.
        inner = "user"
        rows = rows.with_columns(pl.when(~pl.col("in_loader")).then(pl.col("user_file")).alias("user_file"))
    lines, entries = (hot_lines(rows, role, None, prefix) for prefix in (inner, "entry"))
    return lines, entries


_CORRIDORS = (
    LOADER_FILE,
    *(f"torch/{file}.py" for file in ("nn/modules/module", "nn/modules/container", "utils/_contextlib")),
)
_COMPOSES = ("compose", "sequential", "pipeline")
# Of the samples in one function: it only leads there, or with less where a part of them calls it again; untuned.
_ONE_WAY, _MOSTLY, _AGAIN = 0.97, 0.8, 0.1


def _only_leads(frame: Frame) -> bool:
    """Whether it only leads to the parts: the loader, a module's call, compositions of transforms, comprehensions."""
    name = frame.function.lower()
    through = any(file in frame.file for file in _CORRIDORS) or any(word in name for word in _COMPOSES)
    return through or last_part(name).startswith("<")


def _library_parts(context: Context, loading: pl.DataFrame | None, hot: HotLine | None) -> tuple[Place, ...]:
    """Functions of a library that the loading's time parts into, below the line `hot` or else below the loader.

    Shares are of all samples of loading. Nothing where most of them are of the line itself.
    """
    tree = context.calls
    if loading is None or not len(tree) or not loading["samples"].sum():
        return ()
    users = UserPaths(tree, context.code)
    total = np.zeros(len(tree), np.int64)
    np.add.at(total, rows_of(loading["node"]), loading["samples"].to_numpy())
    loaded = int(total.sum())
    for level in tree.levels[:0:-1]:
        np.add.at(total, tree.parent[level], total[level])
    if hot is None:
        first = users.marked(lambda frame: LOADER_FILE in frame.file)
    else:
        of_line = [
            file == hot.file and frame.line == hot.line for file, frame in zip(users.files, tree.frames, strict=True)
        ]
        first = tree.by_node(np.array(of_line, bool))
    here = np.flatnonzero((tree.outermost(first) == users.nodes) & (total > 0))
    seen = ~users.marked(_only_leads)
    seen[here] = True
    functions: Numbers[tuple[str, str]] = Numbers()
    function = tree.by_node(np.array([functions[frame.file, frame.function] for frame in tree.frames], np.int64))
    above, moved = at(tree.innermost(seen), tree.parent, NONE), False
    for _ in range(LONGEST_WAY):
        below = np.flatnonzero(seen & np.isin(above, here) & (total > 0))
        of_function = np.bincount(function[below], weights=total[below], minlength=len(functions))
        passing, most = int(total[here].sum()), of_function.max(initial=0)
        if not most:
            break
        largest = function == of_function.argmax()
        if most < _ONE_WAY * passing:
            again = total[largest & (tree.outermost(largest) != users.nodes)].max(initial=0)
            if most < _MOSTLY * passing or again < _AGAIN * most:
                break
        here, moved = below[largest[below]], True
        inner = largest & seen
        inner[here] = False
        if inner.any():  # a composition that calls itself for the next part
            seen[inner] = False
            above = at(tree.innermost(seen), tree.parent, NONE)
    else:
        return ()
    itself = passing - int(of_function.sum())
    if itself > of_function.max(initial=0):  # what it calls is the smaller part
        of_function = np.bincount(function[here], weights=total[here], minlength=len(functions))
        if not moved:
            return ()
    own = {frame.file for file, frame in zip(users.files, tree.frames, strict=True) if file is not None}
    parts = [
        Place(INSTALLED.sub("", file), None, name, float(samples) / loaded)
        for (file, name), samples in zip(functions, of_function, strict=True)
        if samples > 0 and file not in own
    ]
    return tuple(sorted(parts, key=lambda part: -(part.share or 0.0))[:MAX_PARTS])


# Files of libraries in which everything is about bringing a file in. Decoding what was read is not: PIL opens and reads
# a picture's header in `open`, and decodes it elsewhere.
_FILES = (
    r"(^|/)(pathlib(/\w+)?|genericpath|posixpath|ntpath|os|io|_pyio|codecs|glob|zipfile(/__init__)?|tarfile|shutil|"
    r"torch/serialization|numpy/lib/(_?npyio\w*|_?format\w*)|h5py/_hl/\w+|safetensors/\w+|lmdb/\w+|fsspec/.+|s3fs/.+)\.py$"
)
_OPENERS = ("open", "imread", "read_image", "read_file", "read_bytes", "read_text", "loadtxt", "load_file", "safe_open")
_TEXT = re.compile(
    r"\b(open|imread|read_image|read_file|loadtxt|fromfile|memmap|listdir|scandir|stat|exists|isfile|getsize)\(|"
    r"\bnp\.load\(|\.(read|read_bytes|read_text|readline|readlines)\("
)
_OPEN = re.compile(r"^<built-in (function|method) (open|io_open|open_code)\b|^<built-in function (open|io_open)>")


def _file_reads(
    loading: pl.DataFrame, lines: Lines, opened_per_step: float | None, batch: int | None
) -> FileReads | None:
    """None without samples of loading.

    Args:
        loading: stacks of threads that make batches.
        opened_per_step: files the training process opened below its loader, by the window.
        batch: items of a step, None if unknown.
    """
    total = int(loading["samples"].sum())
    if not total:
        return None
    below, leaf = short(pl.col("below_function")), short(pl.col("leaf_function"))
    alone = pl.col("below_function").is_null()
    by_name = (
        below.is_in(_OPENERS)
        | (leaf.is_in(_OPENERS) & ~alone)
        | pl.col("below_file").fill_null("").str.contains(_FILES)
        | pl.col("leaf_file").fill_null("").str.contains(_FILES)
    ).fill_null(False)
    opening = lines_with(loading.filter(alone & pl.col("user_file").is_not_null()), lines, _TEXT)
    by_text = loading.filter(alone & ~by_name).join(opening, on=["user_file", "user_line"], how="semi")
    return FileReads(
        share=(int(loading.filter(by_name)["samples"].sum()) + int(by_text["samples"].sum())) / total,
        samples=total,
        files_per_item=opened_per_step / batch if opened_per_step is not None and batch else None,
    )


def opened_per_step(window: ProfiledCalls | None) -> float | None:
    """Files opened below the loader per step of the window; None where it recorded no Python functions."""
    if window is None or not window.has_functions or not window.step_times_known:
        return None
    opened = 0
    for part in window.parts:
        below = (part.what == BUILTIN) & part.in_loader & part.inside
        opened += int(part.named(lambda name: _OPEN.search(name) is not None, below).sum())
    return opened / window.steps


MIN_WAVES = 5  # fewer may stand in a row by chance
ENDING = 1.5  # of the time to start workers: ending them took 1.3 times as long where it was measured
FIRST_STEPS = 8  # of an epoch, at most: while workers start they take cores and memory from the steps; untuned
FASTER = 0.25


class _Iterator(NamedTuple):
    """An iterator that was made of a loader, and what lies around it in its process."""

    loader: int | None
    process: str
    event: dict[str, Any]
    made_ns: int | None  # to make it
    during: bool  # after the first training step of its process, and before the end of the last
    between_ns: float  # two steps for it: making it and, before that, ending the old workers
    steps: pl.DataFrame  # that come after it, up to the next iterator of any loader of the process


def _iterators(events: Sequence[dict[str, Any]], frame: pl.DataFrame) -> list[_Iterator]:
    """Of `events` in order of time. `frame`: steps with times, by process and start."""
    by_process = {process: own for (process,), own in frame.partition_by("process", as_dict=True).items()}
    found = []
    for event in events:
        time, made, process = event["_time"], float(event["_ns"] or 0), event["_process"]
        steps = by_process.get(process, frame.clear())
        later = min(
            (one["_time"] for one in events if one["_process"] == process and one["_time"] > time), default=None
        )
        starts, train = steps["start_ns"], steps.filter(pl.col("kind") == "train")
        first = int(starts.search_sorted(time, side="left"))
        last = steps.height if later is None else int(starts.search_sorted(later, side="left"))
        during = train.height > 0 and train["start_ns"][0] < time < train["start_ns"][-1] + train["wall_ns"][-1]
        # ending the old ones is counted up to a time that goes by how long starting them took: the rest is other work
        gap = float(time - starts[first - 1] - steps["wall_ns"][first - 1]) if first else 0.0
        between = made + min(ENDING * made, max(0.0, gap))
        found.append(_Iterator(event["id"], process, event, event["_ns"], during, between, steps[first:last]))
    return found


def epoch_facts(tables: Tables, labelled: LabelledSteps, loader: LoaderFacts | None) -> tuple[EpochFacts, ...] | None:
    """One per loader with workers that was iterated again during training, or made again; None where there is none."""
    events = [event for event in _loader_events(tables) if event["_time"] is not None]
    frame = labelled.frame.filter(pl.col("start_ns").is_not_null())
    train = frame.filter(pl.col("kind") == "train")
    if train.is_empty() or not events:
        return None
    frame = frame.sort("process", "start_ns").with_columns(pl.col("first_batch", "in_window").fill_null(False))
    iterators, feeding = _iterators(events, frame), feeding_loader(tables, labelled)
    wall_ns = float(train["wall_ns"].sum()) + sum(one.between_ns for one in iterators if one.during)
    found = []
    for own in _by_loader(iterators):
        numbers = {one.loader for one in own}
        workers, firsts_of = own[0].event.get("num_workers"), {one.process: one for one in reversed(own)}
        again = [one for one in own if one.during and one.made_ns is not None and firsts_of[one.process] is not one]
        if not isinstance(workers, int) or workers < 1 or not again:
            continue
        batch_ms = loader.load_ms if loader is not None and feeding is not None and feeding["id"] in numbers else None
        fed = pl.concat([one.steps for one in again])
        firsts = [one.steps["data_wait_ns"][0] for one in again if one.steps.height and one.steps["first_batch"][0]]
        firsts = [ns for ns in firsts if ns is not None]
        rest = fed.filter(~pl.col("first_batch"))["data_wait_ns"].drop_nulls().to_numpy()
        usual_ns = float(np.median(rest)) if len(rest) else 0.0
        made_ns = [one.made_ns or 0 for one in again]
        waited_ns = 0.0
        if batch_ms is not None:
            waited_ns = sum(max(0.0, ns - usual_ns - batch_ms * 1e6) for ns in firsts)
        at_most_ns = sum(one.between_ns for one in again) + max(waited_ns, _slower([one.steps for one in again]))
        site = site_of(tables, own[0].event)
        arguments = (site or {}).get("arguments") or {}
        fact = EpochFacts(
            site=place_of(site),
            num_workers=workers,
            persistent=str(arguments.get("persistent_workers", False)) == "True" if site else None,
            kind=next((kind for kind, _ in Counter(fed["kind"]).most_common(1)), "train"),
            remade=len(numbers) > 1,
            restarts=len(again),
            make_ms=float(np.median(made_ns)) / 1e6,
            first_wait_ms=float(np.median(firsts)) / 1e6 if firsts else 0.0,
            usual_wait_ms=usual_ns / 1e6,
            batch_ms=batch_ms,
            lost_ms_per_step=(float(sum(made_ns)) + waited_ns) / train.height / 1e6,
            at_most_ms_per_step=at_most_ns / train.height / 1e6,
            total_ms_per_step=wall_ns / train.height / 1e6,
        )
        found.append(fact)
    return tuple(found) or None


def _by_loader(iterators: Sequence[_Iterator]) -> list[list[_Iterator]]:
    """Those of one loader together, and those of loaders that were iterated once, alike and over the same data set."""
    times, found = Counter(one.loader for one in iterators), dict[tuple[Any, ...], list[_Iterator]]()
    for one in (one for one in iterators if one.loader is not None):
        alike = tuple(one.event.get(name) for name in ("dataset", "num_workers", "batch_size", "length"))
        found.setdefault((one.loader,) if times[one.loader] > 1 or alike[0] is None else alike, []).append(one)
    return sorted(found.values(), key=lambda own: own[0].loader or 0)


def _slower(fed: list[pl.DataFrame]) -> float:
    """ns by which the first steps of these epochs took longer than the faster quarter of the second halves, at most.

    The quarter, since what a fork leaves behind (pages to copy, cold caches) may last for all of a short epoch.
    """
    epochs = [steps.filter(~pl.col("in_window"))["wall_ns"].to_numpy() for steps in fed]
    epochs = [wall for wall in epochs if len(wall) > 1]
    if not epochs:
        return 0.0
    level = float(np.quantile(np.concatenate([wall[len(wall) // 2 :] for wall in epochs]), FASTER))
    firsts = np.concatenate([wall[:FIRST_STEPS] for wall in epochs])
    return max(0.0, float(firsts.sum()) - level * len(firsts))


def periodic_waits(tables: Tables, labelled: LabelledSteps) -> WaveFacts | None:
    """Of the first rank. None with fewer than two workers, or too few steps for `MIN_WAVES` waves."""
    event = feeding_loader(tables, labelled)
    period = event.get("num_workers") if event else None
    if not isinstance(period, int) or period < 2:
        return None
    steady = labelled.steady().filter(pl.col("data_wait_ns").is_not_null()).sort("process", "step")
    if steady.is_empty():
        return None
    own = steady.filter(pl.col("process") == steady["process"][0])
    count = own.height // period
    if count < MIN_WAVES:
        return None
    wait, step = own["data_wait_ns"].to_numpy(), own["step"].to_numpy()
    order = np.argsort(-wait, kind="stable")
    highest, others = np.sort(order[:count]), order[count:]
    total = float(wait.sum())
    distances = [int(step[after] - step[before]) for before, after in pairwise(highest)]
    return WaveFacts(
        period=period,
        waves=count,
        share=float(wait[highest].sum()) / total if total > 0 else 0.0,
        regular=sum(distance == period for distance in distances) / len(distances),
        wave_wait_ms=float(np.median(wait[highest])) / 1e6,
        other_wait_ms=float(np.median(wait[others])) / 1e6,
    )


def _loader_events(tables: Tables) -> Iterator[dict[str, Any]]:
    for row, data in event_data(tables, "loader"):
        number = data.get("id") if isinstance(data.get("id"), int) else None
        own = {"id": number, "_process": row["process"], "_time": row["time_ns"], "_ns": row["duration_ns"]}
        yield {**data, **own}


SINGLE, MULTI = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
MAX_ENTRIES = 5


def trace_loaders(base: Base) -> tuple[TraceLoader, ...]:
    """One per run of traces in which a loader's range was recorded."""
    runs: dict[str, list[tuple[Span, Int64]]] = {}
    for span in base.spans:
        # in these the training thread is in its loader
        rows = np.flatnonzero(span.names.like(LOADER_RANGE) & ~span.on_device)
        if len(rows):
            runs.setdefault(span.ref.run, []).append((span, rows))
    found = []
    for run, parts in sorted(runs.items()):
        names: set[str] = set()
        calls: Counter[Place] = Counter()
        entries: Counter[Place] = Counter()  # ns of the user's functions inside the ranges
        for span, rows in parts:
            names.update(span.names.values[code] for code in unique(span.names.codes[rows]))
            for caller in heaviest_lines([(base, span, rows, span.duration_ns[rows])], 1):
                calls[caller.place] += len(rows)
            user, inside = origins(base, span).user, flags(len(span), rows)
            candidates = np.flatnonzero((user >= 0) & span.is_function)
            met = climb(span.parent, span.parent[candidates], inside | (user >= 0))
            entered = (met >= 0) & inside[met]  # below another function of the user's it is part of that one
            for index in unique(user[candidates[entered]]):
                own = candidates[entered & (user[candidates] == index)]
                entries[place(base, int(index))[0]] += int(span.duration_ns[own].sum())
        fetches = sum(len(rows) for _, rows in parts)
        total = sum(int(span.duration_ns[rows].sum()) for span, rows in parts)
        single, multi = (any(kind in name for name in names) for kind in (SINGLE, MULTI))
        longest = sorted(entries, key=lambda where: (-entries[where], where.file, where.line or 0))[:MAX_ENTRIES]
        loader = TraceLoader(
            run=run,
            # neither, or both: a training and an evaluation loader
            workers=None if single == multi else "none" if single else "some",
            call=max(calls, key=lambda where: (calls[where], where.file), default=None),
            entries=tuple(
                Place(where.file, where.line, where.function, min(1.0, entries[where] / total) if total else None)
                for where in longest
            ),
            fetches=fetches,
            fetch_ms=total / fetches / 1e6,
        )
        found.append(loader)
    return tuple(found)
