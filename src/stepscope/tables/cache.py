"""Traces taken in, or found in the cache, and the tables `events`, `links`, `memory` and `traces` of all of them.

The cache holds a folder of Parquet files for each trace, found again by the content of its file. An entry is made
beside its final place and moved there in one step, so what is not whole is never seen. One that cannot be read is made
again; where the cache cannot be written to, a temporary folder serves. Several traces are taken in side by side, in
processes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl
from msgspec import Struct

from stepscope.errors import UnreadableInputError
from stepscope.files import DIGEST_BYTES, INDEX, key_of
from stepscope.read.kineto import KinetoTrace, TraceAhead
from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables.ingest import StepRange, ingest, is_large, step_range
from stepscope.tables.journal import Steps
from stepscope.tables.trace_entry import TREE, ReadTrace, StoredTrace, index_of, joined, load, read
from stepscope.workers import Ended, main_is_guarded, started, usable_cores

_NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_making: dict[Path, threading.Event] = {}  # entries that this process makes beside its work
_KEPT_BYTES = 20 * 2**30  # of all entries; the ones used longest ago go first
# A process costs about half a second; less than this is quicker without.
_WORTH_BYTES = 8 * 10**6

Progress = Callable[[str, int, int], None]
Tell = Callable[[int, int], None]  # of one trace: bytes done so far, and its size


class BuildOptions(Struct, frozen=True):
    """What `tables.build` may use.

    `cache` is where the tables of traces stay (`default_folder()` is the user's); without it, or where it cannot
    be written to, they are made anew each time. `workers` processes take in several traces side by side; by default
    one per core where that is safe. `progress` gets a trace's name, the bytes of it done so far, and its size.
    `steps` keeps the slices of the steps from the first to the last given, both included, and what encloses them.
    """

    cache: Path | None = None
    workers: int | None = None
    progress: Progress | None = None
    steps: Steps | None = None


Entry = Path | StoredTrace  # the folder of a trace's tables, or what was just made, whose folder may not be there yet


def fetch(path: Path, root: Path, progress: Tell | None = None, steps: Steps | None = None) -> Path:
    """The folder of `path`'s tables in `root`, made if need be; raises UnreadableInputError and OSError.

    Of a large trace whose `steps` are asked for, only what is near them is kept; other traces are kept whole.
    """
    if steps is not None and is_large(path):
        entry = root / key_of(path, f" steps {steps[0]}:{steps[1]}")
        if _is_there(entry):
            return entry
        half = None if progress is None else lambda done, size: progress(done // 2, size)
        other = None if progress is None else lambda done, size: progress((size + done) // 2, size)
        near = step_range(path, steps, half)
        # else its annotations do not tell where the steps lie
        if near is not None and _make(KinetoTrace(path, progress=other), entry, near, steps):
            return entry
    entry = root / key_of(path)
    if not _is_there(entry):
        _make(KinetoTrace(path, progress=progress), entry)
    return entry


def _make(source: KinetoTrace, entry: Path, near: StepRange | None = None, steps: Steps = (0, 0)) -> bool:
    """Make an entry, of a trace or of what is `near` some of its steps; False where these do not all lie in it."""
    part = _new_part(entry.parent)
    try:
        marks = ingest(source, part, only=near).marks
        if near is not None and not near.holds(marks, steps, source.summary().base_ns):
            return False
        _move(part, entry)
        prune(entry.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def obtain(path: Path, root: Path | None, progress: Tell | None) -> Entry:
    """As `fetch`, with what had to be made in memory; without a `root` nothing is written.

    The entry is made while the caller goes on. If it cannot be, the next one who asks makes it again. Where a process
    reads the trace already and can, it comes from there.
    """
    ahead, entry, part = started(path), path, None
    if root is not None:
        entry = root / key_of(path)
        if _is_there(entry):
            if ahead is not None:
                ahead.stop()
            return entry
        part = _new_part(root)
        _making[entry] = threading.Event()

    def settle(whole: bool) -> None:
        if part is None:
            return
        try:
            if whole:
                _move(part, entry)
                prune(entry.parent)
        except OSError:
            pass  # the cache is no place to write to any more
        finally:
            shutil.rmtree(part, ignore_errors=True)
            made.set()

    made = _making.get(entry, threading.Event())
    try:
        if ahead is not None:
            with suppress(Ended):
                return ingest(TraceAhead(path, ahead, progress), part, settle)
        return ingest(KinetoTrace(path, progress=progress), part, settle)
    except BaseException:
        settle(whole=False)
        raise


def _is_there(entry: Path) -> bool:
    made = _making.pop(entry, None)
    if made is not None:
        made.wait()
    if index_of(entry) is None:
        return False
    with suppress(OSError):  # a read-only cache
        os.utime(entry / INDEX)
    return True


def _new_part(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="part-", dir=root))


def prune(root: Path, kept_bytes: int = _KEPT_BYTES) -> None:
    """Remove the entries used longest ago until what is left has at most `kept_bytes`."""
    try:
        # The folder may be one of the user's own: nothing that is not named like an entry is touched.
        named = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
        entries = [(path / INDEX, path) for path in named if (path / INDEX).is_file()]
        by_age = sorted(((index.stat().st_mtime, path) for index, path in entries), reverse=True)
        total = 0
        for _, path in by_age:
            total += sum(file.stat().st_size for file in path.iterdir())
            if total > kept_bytes:
                shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return  # another process may be at it


def _move(part: Path, entry: Path) -> None:
    try:
        part.replace(entry)
    except OSError:
        # Something stands there: the same entry, made by another process just now, or a damaged one.
        if index_of(entry) is not None:
            return
        shutil.rmtree(entry, ignore_errors=True)
        part.replace(entry)


@contextmanager
def cache_folder(options: BuildOptions) -> Iterator[Path]:
    """The cache, or a folder that is gone afterwards where there is none or it cannot be written to."""
    usable = options.cache
    if usable is not None:
        try:
            usable.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=usable).close()
        except OSError:
            usable = None
    if usable is not None:
        yield usable
        return
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        yield Path(folder)


def collect(wanted: Sequence[tuple[Path, Steps | None]], folder: Path, options: BuildOptions) -> list[Entry | str]:
    """For each trace its tables, or why there are none; of some only the steps beside it are wanted."""
    workers = _workers([path for path, _ in wanted], options)
    if workers < 2:
        return [_obtained(path, folder, steps, options) for path, steps in wanted]
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    found: list[Entry | str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(_obtained, path, folder, steps) for path, steps in wanted]
        for (path, steps), future in zip(wanted, pending, strict=True):
            try:
                found.append(future.result())
            except BrokenProcessPool:
                # A process was killed, mostly for the memory of several at once: what is left goes one by one.
                found.append(_obtained(path, folder, steps, options))
            if options.progress is not None and path.exists():
                options.progress(path.name, _size(path), _size(path))
    return found


def _obtained(path: Path, folder: Path, steps: Steps | None, options: BuildOptions | None = None) -> Entry | str:
    """Without `options` in a process of its own, which hands no tables over."""
    progress = None if options is None else options.progress
    tell = None if progress is None else lambda done, size: progress(path.name, done, size)
    try:
        if options is None or options.steps is not None:
            # Of some steps few slices are kept in the end, so all of them had better not be in memory at once.
            return fetch(path, folder, tell, steps)
        return obtain(path, folder if folder == options.cache else None, tell)
    except (OSError, UnreadableInputError) as error:
        return str(error)


def _workers(paths: Sequence[Path], options: BuildOptions) -> int:
    if options.workers is not None:
        return min(options.workers, len(paths))
    if len(paths) < 2 or not main_is_guarded() or sum(map(_size, paths)) < _WORTH_BYTES:
        return 1
    return min(len(paths), usable_cores())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_DAMAGED = (OSError, UnreadableInputError, pl.exceptions.PolarsError)


class EventsTable(Struct, frozen=True):
    """What the traces of a run hold. `counts` are those of all `read` ones, `unreadable` is "process/trace" -> why."""

    events: pl.DataFrame
    links: pl.DataFrame
    memory: pl.DataFrame
    traces: pl.DataFrame
    read: tuple[ReadTrace, ...]
    counts: Counter[str]
    unreadable: dict[str, str]


def events_table(ranks: Sequence[RawRank], options: BuildOptions) -> EventsTable:
    """All slices of all traces; ids count on from one trace to the next. A trace that cannot be read is named."""
    frames: dict[str, list[pl.DataFrame]] = {name: [] for name in (TREE, "events", "links", "memory", "traces")}
    read, unreadable = _read_all(ranks, options, frames)
    counts = sum((trace.counts for trace in read), Counter({"unreadable_traces": len(unreadable)}))
    # what the traces were read into is gone by now, or it would stand beside what is made of it
    return EventsTable(**joined(frames), read=read, counts=counts, unreadable=unreadable)


def _read_all(
    ranks: Sequence[RawRank], options: BuildOptions, frames: dict[str, list[pl.DataFrame]]
) -> tuple[tuple[ReadTrace, ...], dict[str, str]]:
    # steps of a journal are no steps of the trace
    wanted = [(rank, ref, None if rank.steps else options.steps) for rank in ranks for ref in rank.traces]
    read: list[ReadTrace] = []
    unreadable: dict[str, str] = {}
    rows = 0
    with cache_folder(options) as root:
        found = collect([(ref.path, steps) for _, ref, steps in wanted], root, options)
        for (rank, ref, steps), entry in zip(wanted, found, strict=True):
            try:
                if isinstance(entry, str):
                    raise UnreadableInputError(entry)
                trace, loaded = _loaded(entry, rank, ref, rows, root, steps, options)
            except _DAMAGED as error:
                unreadable[f"{rank.name}/{ref.name}"] = str(error)
                continue
            read.append(trace)
            for name, parts in loaded.items():
                frames[name] += parts
            rows += sum(part.height for part in loaded["events"])
    return tuple(read), unreadable


def _loaded(
    entry: Entry, rank: RawRank, ref: TraceRef, first_id: int, root: Path, steps: Steps | None, options: BuildOptions
) -> tuple[ReadTrace, dict[str, list[pl.DataFrame]]]:
    """The rows of a trace; an entry that turns out damaged is made once more, and raises what it raises then."""
    try:
        stored = read(entry) if isinstance(entry, Path) else entry
        return load(stored, rank, ref, first_id, options.steps)
    except _DAMAGED:
        if isinstance(entry, Path):  # else nothing was read from a folder
            shutil.rmtree(entry, ignore_errors=True)
    return load(read(fetch(ref.path, root, steps=steps)), rank, ref, first_id, options.steps)
