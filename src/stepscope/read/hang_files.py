"""Which of the given files and folders hold dumps of flight recorders or reports of RAS, and all of them read together.

Dumps have no ending of their own (`nccl_trace_rank_3`), so a file is known by its first bytes. One dump is kept of a
rank; what was odd about the files is said, and never keeps the others from being read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.read.hang_recording import (
    Dump,
    DumpReader,
    GroupName,
    HangRecording,
    RasReport,
    is_flight_recorder,
    is_ras_report,
    read_ras_report,
)
from stepscope.read.streams import files_in, read_head
from stepscope.read.traces import holds_traces
from stepscope.schema import RUN_PART
from stepscope.workers import main_is_guarded, usable_cores

MAX_FILES = 100_000
MAX_CALLS = 40_000_000  # of all dumps together: some 50 bytes each
MAX_SAID = 20  # problems
_WORTH_BYTES = 32 * 2**20  # read in half a second; a process more costs as much
_NUMBERED = {"groups": "group", "kinds": "kind", "signatures": "signature", "stacks": "stack"}  # lists, and columns
_OTHERS = re.compile(
    r"\.(?:pt\.trace\.json(?:\.gz)?|raw|parquet|html|csv|py|txt|log|jsonl|toml|ya?ml|times\.json)$|\.tfevents\."
)
_SAMPLED = re.compile(r"\.raw$|\.speedscope\.json$|\.tfevents\.")
_OF_A_RUN = ("tables", "reduced", "notebook", "runs")  # folders in a run folder of ours
_IN_PARTS = re.compile(r"rank[-_]?\d+$|(?:trace|flight|fr)[-_]|ras", re.IGNORECASE)
_OWN = ("report.json", "experiment.json", "manifest.json", "rank.json", "last-word.json")


def hang_files_in(paths: Iterable[Path]) -> Iterator[Path]:
    """Dumps and reports among files and in folders; of run folders of ours that lie in one, none."""
    return (file for path in paths for file in _files(path) if is_hang_file(file))


def read_hangs(paths: Sequence[Path]) -> tuple[HangRecording | None, tuple[Path, ...]]:
    """What flight recorders and RAS left in `paths`, None where nothing, and the other paths.

    A folder is among the others where it holds no dump and no report, or traces, stacks or event files beside them.
    Raises UnreadableInputError where none of the dumps can be read.
    """
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        own = list(hang_files_in((path,)))
        found += own
        if not own or _holds_others(path):
            others.append(path)
    return (read_hang_files(found) if found else None), tuple(others)


def hang_files_of_run(folder: Path) -> list[Path]:
    """Dumps and reports in a run folder of ours: right in it, in folders that are not ours, and in those of ranks."""
    children = sorted(folder.iterdir())
    files = [child for child in children if child.is_file() and child.name not in _OWN]
    for child in children:
        if not child.is_dir() or child.is_symlink() or child.name in _OF_A_RUN:
            continue
        if RUN_PART.fullmatch(child.name):
            files += [file for file in child.iterdir() if _IN_PARTS.search(file.name) and file.name not in _OWN]
        else:
            files += files_in(child, MAX_FILES)
    return [file for file in files[:MAX_FILES] if not _OTHERS.search(file.name) and is_hang_file(file)]


def is_hang_file(path: Path) -> bool:
    """Whether a file is a dump or a report; False for what cannot be opened or is no regular file."""
    try:
        head = read_head(path)
    except OSError:
        return False
    return is_flight_recorder(head) or is_ras_report(head)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in files_in(path, MAX_FILES):
        if not _OTHERS.search(file.name) and file.name not in _OWN:
            yield file


def _holds_others(path: Path) -> bool:
    """Whether a folder with dumps in it holds traces, sampled stacks or event files as well."""
    if not path.is_dir():
        return False
    return any(_SAMPLED.search(file.name) for file in files_in(path, MAX_FILES)) or holds_traces([path])


def read_hang_files(files: Iterable[Path]) -> HangRecording:
    """All of them together, each once; what cannot be read is said. Raises UnreadableInputError where nothing can."""
    each = list({os.path.realpath(file): file for file in files}.values())
    workers = _workers(each)
    if workers < 2:
        found = _read(each)
    else:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        edges = [len(each) * number // workers for number in range(workers + 1)]
        batches = [each[start:end] for start, end in pairwise(edges)]
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                found = _joined(list(pool.map(_read, batches)))
        except BrokenProcessPool:  # one was killed, mostly for the memory of several at once
            found = _read(each)
    if not found.dumps and not found.ras:
        raise UnreadableInputError(found.problems[0])
    problems = _Problems(found.problems)
    dumps = _numbered(found, problems)
    ras = tuple(sorted(found.ras, key=lambda report: report.timestamp))
    return replace(found, dumps=tuple(dumps), ras=ras, problems=problems.all())


def _workers(files: Sequence[Path]) -> int:
    if len(files) < 2 or not main_is_guarded():
        return 1
    size = 0
    for file in files:
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return min(len(files), usable_cores()) if size >= _WORTH_BYTES else 1


def _read(files: Sequence[Path]) -> HangRecording:
    """Files one after another, as they are: several dumps of a rank are all there, and every problem is said."""
    reader, problems = DumpReader(), list[str]()
    dumps: list[Dump] = []
    reports: list[RasReport] = []
    calls = 0
    for file in files:
        try:
            if is_ras_report(read_head(file)):
                report, lost = read_ras_report(file)
                reports.append(report)
            elif calls < MAX_CALLS:
                dump, lost = reader.read(file)
                dumps.append(dump)
                calls += len(dump.calls.group)
            else:
                problems.append(f"{file.name}: left unread, as more than {MAX_CALLS:,} calls were read before")
                continue
        except UnreadableInputError as error:
            problems.append(str(error))
            continue
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
            continue
        if lost:
            problems.append(f"{file.name}: {lost:,} records could not be read")
    return HangRecording(
        dumps=tuple(dumps),
        groups=tuple(reader.groups),
        kinds=tuple(reader.kinds),
        signatures=tuple(reader.signatures),
        stacks=tuple(reader.stacks),
        ras=tuple(reports),
        problems=tuple(problems),
    )


def _joined(parts: Sequence[HangRecording]) -> HangRecording:
    """What was read side by side, as if it had been read in one go: numbers of groups and the like are made one."""
    lists: dict[str, dict[Any, int]] = {name: {} for name in _NUMBERED}
    dumps: list[Dump] = []
    calls = 0
    problems = [text for part in parts for text in part.problems]
    for part in parts:
        codes = {
            column: np.array([*(lists[name].setdefault(one, len(lists[name])) for one in getattr(part, name)), -1])
            for name, column in _NUMBERED.items()
        }
        for dump in part.dumps:
            if calls >= MAX_CALLS:
                problems.append(f"{dump.file}: left out, as more than {MAX_CALLS:,} calls were read before")
                continue
            calls += len(dump.calls.group)
            same = {column: code[getattr(dump.calls, column)].astype(np.int32) for column, code in codes.items()}
            dumps.append(replace(dump, calls=replace(dump.calls, **same)))
    return HangRecording(
        tuple(dumps),
        **{name: tuple(numbers) for name, numbers in lists.items()},
        ras=tuple(report for part in parts for report in part.ras),
        problems=tuple(problems),
    )


class _Problems:
    """The first of what was odd, and how much more there was."""

    def __init__(self, known: Iterable[str]) -> None:
        self.said: list[str] = []
        self._more = 0
        for text in known:
            self.add(text)

    def add(self, text: str) -> None:
        if len(self.said) < MAX_SAID:
            self.said.append(text)
        else:
            self._more += 1

    def all(self) -> tuple[str, ...]:
        return (*self.said, f"and {self._more:,} more such files") if self._more else tuple(self.said)


def _numbered(found: HangRecording, problems: _Problems) -> list[Dump]:
    """One dump for each rank, by number: of two of one rank the later one, else the one with stacks."""
    kept: dict[int, Dump] = {}
    later: list[Dump] = []
    for dump in (_honest(dump, found.groups, problems) for dump in found.dumps):
        if dump is None:
            continue
        if dump.rank < 0:
            later.append(dump)
            continue
        other = kept.get(dump.rank)
        if other is not None:
            first, second = _worth(other), _worth(dump)
            if first[0] != second[0]:
                newer = dump if second > first else other
                problems.add(
                    f"rank {dump.rank} has two dumps of different moments: {newer.file} is taken, the later one"
                )
            if second < first:
                continue
        kept[dump.rank] = dump
    free = iter(range(len(found.dumps) + len(kept)))
    for dump in later:
        rank = next(number for number in free if number not in kept)
        problems.add(f"{dump.file}: its name tells no rank; taken for rank {rank}")
        kept[rank] = replace(dump, rank=rank)
    return [kept[rank] for rank in sorted(kept)]


def _worth(dump: Dump) -> tuple[int, bool, int]:
    """What decides between two dumps of a rank: its last moment, whether it has stacks, how much it holds."""
    calls = dump.calls
    last = int(calls.created_ns.max()) if len(calls.created_ns) else 0
    return last, bool((calls.stack >= 0).any()), len(calls.group)


def _honest(dump: Dump, groups: Sequence[GroupName], problems: _Problems) -> Dump | None:
    """The dump where its groups hold the rank that the file's name tells; with the one rank that is in all of them."""
    told = [groups[group].ranks for group in np.unique(dump.calls.group)]
    members = [set(ranks) for ranks in told if ranks is not None]
    if not members or dump.rank < 0 or all(dump.rank in ranks for ranks in members):
        return dump
    common = set.intersection(*members)
    if len(common) == 1:
        rank = common.pop()
        problems.add(
            f"{dump.file}: its groups are those of rank {rank}, not of rank {dump.rank}; taken for rank {rank}"
        )
        return replace(dump, rank=rank)
    problems.add(f"{dump.file}: its groups do not hold rank {dump.rank}, which its name tells; left out")
    return None
