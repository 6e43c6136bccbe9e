"""What the DataLoader that feeds training costs, which lines its time goes to, and how many workers would cover it.

The number of workers comes from measured times, not from the machine: making one step's batches takes `load_ms` of
work, the rest of the step `compute_ms`; ceil(load_ms / compute_ms) workers keep up, one more absorbs jitter. The bound
is loading's share of the cores this process may use (affinity and cgroup quota, shared by the ranks of the host): where
loading is two thirds of all CPU work, workers on more than two thirds of the cores would starve the training process.
"""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

import polars as pl

from stepscope.analyze.host.sampled_stacks import hot_lines
from stepscope.analyze.sites import first_int, site_of
from stepscope.engine.host_calls import BUILTIN, ProfiledCalls
from stepscope.engine.journal import event_data, parse_json, place_of
from stepscope.engine.samples import Samples, short
from stepscope.engine.source_lines import Lines
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import BatchContent, HotLine, LoaderFacts, StepFacts
from stepscope.model.run_facts import FileReads
from stepscope.tables.schema import Tables

MAX_LINES = 20
_NO_CORES_KNOWN = 1.0  # without a manifest, promise no more than one core


def loader_facts(
    tables: Tables,
    labelled: LabelledSteps,
    train: StepFacts | None,
    samples: Samples | None,
    cores: float | None,
    lines_of: Lines,
    opened: float | None = None,
) -> LoaderFacts | None:
    """None without training steps whose data wait is known.

    Args:
        cores: mean CPU use of the training process.
        lines_of: the text of the user's lines, where at hand.
        opened: files that the training process opened for one step, by the window.
    """
    if train is None:
        return None
    wait = next((part for part in train.partition if part.category == "data_wait"), None)
    if wait is None:
        return None
    event = feeding_loader(tables, labelled)
    site = site_of(tables, event)
    arguments: dict[str, Any] = dict(site.get("arguments") or {}) if site else {}
    workers = first_int(event.get("num_workers") if event else None, arguments.get("num_workers"))
    in_main = not workers
    rows, role, busy, idle = _loading(samples, in_main)
    lines, entries, library, count = _sampled(rows, role)
    batch = first_int(event.get("batch_size") if event else None, arguments.get("batch_size"))
    compute_ms = max(0.0, train.mean_ms - wait.ms)
    load_ms = wait.ms if in_main else _worker_load_ms(workers, busy, train.mean_ms)
    limit, ranks, threads = cpu_limit(tables), ranks_on_host(tables), _threads(tables)
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
        suggested_workers=suggest_workers(
            load_ms,
            compute_ms,
            limit / ranks,
            compute_cpu_ms=_compute_cpu_ms(train, load_ms, compute_ms, cores, threads, in_main),
            current=workers or 0,
        ),
        entries=tuple(entries[:MAX_LINES]),
        load_ms=load_ms,
        compute_ms=compute_ms,
        cores_used=cores,
        library_function=library,
        samples=count,
        batch=_content(tables, labelled, event),
        threads=threads,
        ranks_on_host=ranks,
        files=None if rows is None else file_reads(rows, lines_of, opened if in_main else None, batch),
    )


def suggest_workers(
    load_ms: float | None, compute_ms: float, cores: float, *, compute_cpu_ms: float | None = None, current: int = 0
) -> int:
    """Workers that keep up with the step, within `cores` (of one rank), at least one.

    Args:
        load_ms: work to make one step's batches; None when not known, then all cores but one are promised.
        compute_ms: the rest of the step.
        compute_cpu_ms: CPU time of the rest on all threads; `compute_ms` when None.
        current: workers there are now and that do not keep up; the answer is more where the cores allow it.
    """
    most = max(1, math.floor(cores))
    if load_ms is None or load_ms <= 0 or compute_ms <= 0:
        return max(1, most - 1)
    cpu_ms = max(compute_ms, compute_cpu_ms or 0.0)
    bound = max(1, min(most, math.ceil(cores * load_ms / (load_ms + cpu_ms))))
    return min(bound, max(math.ceil(load_ms / compute_ms) + 1, current + 1))


def _compute_cpu_ms(
    train: StepFacts, load_ms: float | None, compute_ms: float, cores: float | None, threads: int | None, in_main: bool
) -> float:
    """CPU time of a step without its loading: measured, else from the threads the script asked for."""
    if cores is None:
        return compute_ms * (threads or 1)
    return cores * train.mean_ms - ((load_ms or 0.0) if in_main else 0.0)


def cpu_limit(tables: Tables) -> float:
    """`known_cores`, or one core where nothing tells."""
    return known_cores(tables) or _NO_CORES_KNOWN


def known_cores(tables: Tables) -> float | None:
    """Cores a process of the (smallest) host may use: its affinity, cut by the cgroup's quota."""
    limits = []
    for manifest in tables.manifests:
        hardware = manifest.get("hardware")
        if not isinstance(hardware, dict):
            continue
        affinity, quota, logical = (hardware.get(k) for k in ("affinity", "cgroup_cpu_limit", "logical_cores"))
        known = [float(len(affinity))] if isinstance(affinity, list) and affinity else []
        if not known and isinstance(logical, int) and logical > 0:
            known = [float(logical)]
        if isinstance(quota, int | float) and quota > 0:
            known.append(float(quota))
        if known:
            limits.append(min(known))
    return min(limits) if limits else None


def _threads(tables: Tables) -> int | None:
    """What the script last gave `torch.set_num_threads`."""
    threads = None
    for _, data in event_data(tables, "site"):
        if data.get("what") == "set_num_threads":
            values = [first_int(value) for value in (data.get("arguments") or {}).values()]
            threads = next((value for value in values if value), threads)
    return threads


def ranks_on_host(tables: Tables) -> int:
    """Ranks that share the fullest host."""
    hosts: dict[str, set[int]] = {}
    for rank in tables.ranks:
        hosts.setdefault(rank.host, set()).add(rank.rank)
    return max((len(ranks) for ranks in hosts.values()), default=1)


def feeding_loader(tables: Tables, labelled: LabelledSteps) -> dict[str, Any] | None:
    """The loader that training steps wait for: the longest by the fetches that were looked at in them.

    In recordings without any the one whose iterations the most training steps follow.
    """
    events = [
        {**data, "_process": row["process"], "_time": row["time_ns"]} for row, data in event_data(tables, "loader")
    ]
    if not events:
        return None
    train = labelled.frame.filter(pl.col("kind") == "train")
    votes = _waited_ns(batches(tables, train)) or _followed(events, train)
    best = max(votes, key=lambda key: votes[key])
    return next((event for event in events if event.get("id") == best), None)


def batches(tables: Tables, train: pl.DataFrame) -> list[dict[str, Any]]:
    """The `batch` events whose fetch began in one of these steps."""
    rows = tables.journal.filter((pl.col("kind") == "batch") & pl.col("time_ns").is_not_null()).sort("time_ns")
    steps = train.select("process", "start_ns", "wall_ns").drop_nulls().sort("start_ns")
    if rows.is_empty() or steps.is_empty():
        return []
    inside = rows.join_asof(steps, left_on="time_ns", right_on="start_ns", by="process", check_sortedness=False)
    inside = inside.filter(pl.col("time_ns") < pl.col("start_ns") + pl.col("wall_ns"))
    found = ((row, parse_json(row["data"])) for row in inside.iter_rows(named=True))
    return [{**data, "_ns": row["duration_ns"]} for row, data in found if isinstance(data, dict)]


def _waited_ns(looked: list[dict[str, Any]]) -> dict[Any, int]:
    votes: dict[Any, int] = {}
    for data in looked:
        votes[data.get("id")] = votes.get(data.get("id"), 0) + (data["_ns"] or 0)
    return votes


def _followed(events: list[dict[str, Any]], train: pl.DataFrame) -> dict[Any, int]:
    votes: dict[Any, int] = {}
    for process in {event["_process"] for event in events}:
        own = [event for event in events if event["_process"] == process]
        ends = train.filter(pl.col("process") == process)
        moments = (ends["start_ns"] + ends["wall_ns"]).drop_nulls().sort()
        for index, event in enumerate(own):
            after = own[index + 1]["_time"] if index + 1 < len(own) else None
            steps = (
                moments.filter(moments >= event["_time"])
                if after is None
                else moments.filter((moments >= event["_time"]) & (moments < after))
            )
            votes[event.get("id")] = votes.get(event.get("id"), 0) + len(steps)
    return votes


def _content(tables: Tables, labelled: LabelledSteps, event: dict[str, Any] | None) -> BatchContent | None:
    if event is None:
        return None
    train = labelled.frame.filter(pl.col("kind") == "train")
    names = ("tensors", "bytes", "objects")
    own = [
        [float(data[name]) for name in names]
        for data in batches(tables, train)
        if data.get("id") == event.get("id") and all(isinstance(data.get(name), int) for name in names)
    ]
    if not own:
        return None
    tensors, size, objects = (statistics.median(column) for column in zip(*own, strict=True))
    fetches = train["fetches"].drop_nulls().mean()
    per_step = float(fetches) if isinstance(fetches, float) and fetches > 0 else 1.0
    return BatchContent(tensors, size, objects, batches=len(own), per_step=per_step)


def _loading(samples: Samples | None, in_main: bool) -> tuple[pl.DataFrame | None, str, float | None, float | None]:
    """(stacks of the loading work, role, busy share, idle share); the shares are those of workers."""
    if samples is None:
        return None, "rank", None, None
    if in_main:
        return samples.rank_steps().filter(pl.col("phase") == "data_wait"), "rank", None, None
    everyone = samples.workers()
    parked = pl.col("waiting") & ~pl.col("in_fetch") & pl.col("user_file").is_null()
    total = int(everyone["samples"].sum())
    idle = float(everyone.filter(parked)["samples"].sum()) / total if total else None
    busy = 1.0 - idle if idle is not None else None
    return everyone.filter(~parked).with_columns(phase=pl.lit("data_wait")), "loader_worker", busy, idle


def _sampled(rows: pl.DataFrame | None, role: str) -> tuple[list[HotLine], list[HotLine], str | None, int]:
    """(lines, entries, hottest library function, samples) of the loading work."""
    if rows is None:
        return [], [], None, 0
    inner = "inner"
    if rows["entry_file"].null_count() == rows.height:
        # A line that merely iterates a loader of library code does no work; without a loader it may.
        inner = "user"
        rows = rows.with_columns(pl.when(~pl.col("in_loader")).then(pl.col("user_file")).alias("user_file"))
    library = (
        rows.filter(pl.col("in_loader") & pl.col("entry_file").is_null())
        .group_by("leaf_function")
        .agg(pl.col("samples").sum())
        .drop_nulls()
        .sort("samples", "leaf_function", descending=[True, False])
    )
    return (
        hot_lines(rows, role, None, inner),
        hot_lines(rows, role, None, "entry"),
        str(library[0, 0]) if library.height else None,
        int(rows["samples"].sum()),
    )


def _worker_load_ms(workers: int | None, busy: float | None, mean_ms: float) -> float | None:
    """Work of all workers per step: while one step passes, each is busy for its busy share of it."""
    return workers * busy * mean_ms if workers and busy is not None else None


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


def file_reads(
    loading: pl.DataFrame, lines: Lines, opened_per_step: float | None, batch: int | None
) -> FileReads | None:
    """None without samples of loading.

    Args:
        loading: picked stacks (see `sampled.picks`) of threads that make batches.
        opened_per_step: files the training process opened below its loader, by the window.
        batch: items of a step, None if unknown.
    """
    total = int(loading["samples"].sum()) if loading.height else 0
    if not total:
        return None
    below, leaf = short(pl.col("below_function")), short(pl.col("leaf_function"))
    by_name = (
        below.is_in(_OPENERS)
        | (leaf.is_in(_OPENERS) & pl.col("below_function").is_not_null())
        | pl.col("below_file").fill_null("").str.contains(_FILES)
        | pl.col("leaf_file").fill_null("").str.contains(_FILES)
    ).fill_null(False)
    alone = loading.filter(pl.col("below_function").is_null() & pl.col("user_file").is_not_null())
    texts = [
        (file, line, True)
        for file, line in alone.select("user_file", "user_line").unique().rows()
        if _TEXT.search(lines.text(file, line) or "")
    ]
    named = pl.DataFrame(
        texts, schema={"user_file": pl.String, "user_line": pl.Int64, "by_text": pl.Boolean}, orient="row"
    )
    marked = loading.join(named, on=["user_file", "user_line"], how="left").with_columns(
        reads=by_name | (pl.col("below_function").is_null() & pl.col("by_text").fill_null(False))
    )
    share = int(marked.filter("reads")["samples"].sum()) / total
    known = opened_per_step is not None and bool(batch)
    return FileReads(
        share=share,
        samples=total,
        files_per_item=opened_per_step / batch if known and opened_per_step is not None and batch else None,
    )


def opened_per_step(window: ProfiledCalls | None) -> float | None:
    """Files opened below the loader per step of the window; None where it recorded no Python functions."""
    if window is None or not window.has_functions or not window.step_times_known:
        return None
    among = ((part, (part.what == BUILTIN) & part.in_loader & part.inside) for part in window.parts)
    opens = (part.named(lambda name: _OPEN.search(name) is not None, own).sum() for part, own in among)
    return float(sum(opens)) / window.steps
