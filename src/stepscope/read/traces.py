"""Traces that others recorded: which files there are, and which rank each is of.

A rank comes from the trace's own metadata, else from the file's name or its folder's, else it is the next free number.
Files of one worker (the same name but for its time, as tensorboard_trace_handler writes one per profiled span) belong
to one rank; any other two files never do, and what had to be guessed is counted in the losses.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular
from stepscope.read.kineto import is_trace, rank_and_size, read_metadata
from stepscope.read.raw import Losses, RawRank, RawRun, TraceRef
from stepscope.read.streams import GZIP, ByteStream, Limits, common_folder, files_in, name_below, natural, read_head

MAX_FILES = 100_000
_SUFFIXES = (".json", ".json.gz")
_HEAD_BYTES = 2**20
_TAIL_BYTES = 2**16
_MAX_SCANNED_BYTES = 64 * 2**20  # of a packed file whose rank only its end can tell
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_ENTRY = re.compile(rb'\{[^{}]{0,400}"ph"\s*:')
_SPAN = re.compile(r"\.\d{6,}(?=\.pt\.trace\.json|\.json)")
_NAMED_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|trainer|gpu|process|proc)[-_=. ]?(\d{1,7})(?!\d)", re.IGNORECASE)
# As tensorboard_trace_handler names a trace: by host and process. In names of a script's own a number may be a step's.
_OF_WORKER = re.compile(
    r"(?P<host>.+?)(?<!step)(?<!iter)(?<!iteration)(?<!epoch)(?<!rank)(?<!worker)_\d+(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?",
    re.IGNORECASE,
)
# where things stand in a run folder of ours or in a report, which are no traces
_PLACES = ("report.json", "experiment.json", "manifest.json", "rank.json")


class _Found(Struct, frozen=True):
    path: Path
    top: Path  # the given path it was found under
    rank: int | None
    world_size: int | None
    certain: bool  # the metadata said so


def read_traces(paths: Sequence[Path]) -> RawRun:
    """The traces in and under `paths` as a run without hosts, steps or journal; a rank's in the order of their names.

    Counts `foreign_files` (JSON in a folder that is no trace), `unreadable_files`, `duplicate_ranks` (a file that names
    a rank another worker has; it gets the next free one), `guessed_ranks` and `missing_ranks`. Raises
    UnreadableInputError for a given path that does not exist, and where there is no trace.
    """
    losses = Losses()
    found: list[_Found] = []
    for path in paths:
        if not path.exists():
            raise UnreadableInputError(f"{path}: no such file or folder; give traces of torch.profiler")
        looked = (_look(file, path, losses) for file in _candidates(path))
        found.extend(trace for trace in looked if trace is not None)
    if not found:
        raise UnreadableInputError(
            f"{paths[0]}: no trace in it; give files of torch.profiler, of sampled stacks or of torch_xla"
        )
    kept: dict[str, _Found] = {}
    for trace in sorted(found, key=lambda trace: natural(str(trace.path))):
        kept.setdefault(os.path.realpath(trace.path).removesuffix(".gz"), trace)
    ranks = _by_rank(list(kept.values()), common_folder(paths), losses)
    parents = [str(ref.path.parent) for rank in ranks for ref in rank.traces]
    return RawRun(folder=Path(os.path.commonpath(parents)), hosts=(), ranks=ranks, losses=losses)


def holds_traces(folders: Sequence[Path]) -> bool:
    """Whether there is a trace in one of the folders; looks no further than to the first."""
    return any(_look(file, folder, Losses()) is not None for folder in folders for file in _candidates(folder))


def host_of_name(name: str) -> str | None:
    """The host that a trace's name tells, where it is one of tensorboard_trace_handler's."""
    match = _OF_WORKER.fullmatch(name)
    return match["host"] if match else None


def _candidates(path: Path) -> Iterator[Path]:
    return (file for file in files_in(path, MAX_FILES, _SUFFIXES) if file == path or file.name not in _PLACES)


def _look(path: Path, top: Path, losses: Losses) -> _Found | None:
    """What the beginning of a file tells; None for one that is no trace, unless it was named itself."""
    named = path == top
    label = path.name if named else str(path.relative_to(top))
    try:
        if named and not path.is_file():
            raise UnreadableInputError(f"{path}: no file and no folder; give traces of torch.profiler")
        head = read_head(path, _HEAD_BYTES)
        if not is_trace(head):
            if not named:
                losses.add("foreign_files", label)
                return None
            return _Found(path, top, None, None, False)
        listed = _LIST.search(head)
        if not named and listed is None and not _ENTRY.search(head):
            losses.add("foreign_files", label)
            return None
        rank, size = rank_and_size(read_metadata(head[: listed.end()], b"") if listed else {})
        if rank is None:
            rank, size = rank_and_size(read_metadata(b"", _tail(path, head)))
    except OSError as error:
        if named:
            raise UnreadableInputError(f"{path}: {error.strerror or error}; check its permissions") from error
        losses.add("unreadable_files", label)
        return None
    certain = rank is not None
    return _Found(path, top, rank if certain else _rank_of_name(path, top), size, certain)


def _tail(path: Path, head: bytes) -> bytes:
    """The last bytes of a file after unpacking; of a large packed one none, as that would mean to read it all."""
    size = path.stat().st_size
    with open_regular(path, follow=True) as file:
        packed = file.read(2) == GZIP
        if not head or (size > _MAX_SCANNED_BYTES and packed):
            return b""
        if not packed:
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    last: deque[bytes] = deque()
    length = 0
    for piece in ByteStream(path, Limits()):
        last.append(piece)
        length += len(piece)
        while length - len(last[0]) >= _TAIL_BYTES:
            length -= len(last.popleft())
    return b"".join(last)[-_TAIL_BYTES:]


def _rank_of_name(path: Path, top: Path) -> int | None:
    """A number behind `rank`, `worker` or the like in the file's name, or in a folder's below the given one."""
    below = path.relative_to(top).parts if path != top else (path.name,)
    matches = (_NAMED_RANK.search(name) for name in reversed(below))
    return next((int(match[1]) for match in matches if match), None)


def _by_rank(found: list[_Found], root: Path, losses: Losses) -> tuple[RawRank, ...]:
    workers: dict[tuple[str, str], list[_Found]] = {}
    for trace in found:
        key = (str(trace.path.parent), _SPAN.sub("", trace.path.name.removesuffix(".gz")))
        if any(other.certain and trace.certain and other.rank != trace.rank for other in workers.get(key, ())):
            key = (key[0], str(trace.path))  # the same name but for its time, of another rank
        workers.setdefault(key, []).append(trace)
    ranks: dict[int, list[_Found]] = {}
    later: list[list[_Found]] = []
    for traces in sorted(workers.values(), key=lambda traces: not any(trace.certain for trace in traces)):
        rank = next((trace.rank for trace in traces if trace.rank is not None), None)
        if rank is None or rank in ranks:
            kind = "guessed_ranks" if rank is None else "duplicate_ranks"
            if rank is not None or len(workers) > 1:
                losses.add(kind, traces[0].path.name)
            later.append(traces)
        else:
            ranks[rank] = traces
    free = 0
    for traces in later:
        while free in ranks:
            free += 1
        ranks[free] = traces
    size = max(trace.world_size or 0 for trace in found)
    losses.add("missing_ranks", found[0].top.name, max(size, max(ranks) + 1 if len(ranks) > 1 else 0) - len(ranks))
    return tuple(
        RawRank(name=f"rank-{number}", rank=number, traces=tuple(_reference(trace, root) for trace in traces))
        for number, traces in sorted(ranks.items())
    )


def _reference(trace: _Found, root: Path) -> TraceRef:
    folder = name_below(root, trace.path.parent)
    name = trace.path.name.removesuffix(".gz")
    return TraceRef(trace.path, name, "user", "" if folder == "." else folder, trace.rank)
