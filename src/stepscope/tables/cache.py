"""Traces that were taken in before: a folder of Parquet files for each, found again by the content of its file.

An entry is made beside its final place and moved there in one step, so two processes may make the same one, and what
is not whole is never seen. An entry that cannot be read is made again. A folder that cannot be written to is no
error: the tables are then made in a temporary folder, for this once.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import polars as pl
from msgspec import Struct

from stepscope import __version__
from stepscope.cached import DIGEST_BYTES, INDEX, LAYOUT, key_of
from stepscope.errors import UnreadableInputError
from stepscope.read.formats import Limits, open_trace
from stepscope.read.trace import TraceSource
from stepscope.tables import stored
from stepscope.tables.ingest import ingest
from stepscope.tables.stored import Stored, TraceIndex

_NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_making: dict[Path, threading.Event] = {}  # entries that this process makes beside its work
_KEPT_BYTES = 20 * 2**30  # of all entries; the ones used longest ago go first


class Entry(Struct, frozen=True):
    """The folder of a trace's tables; `content` is what was just made, and may not be there yet, None where it was
    found."""

    folder: Path
    content: Stored | None = None


def fetch(
    path: Path, root: Path, limits: Limits | None = None, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The folder of `path`'s tables in `root`, made if need be; raises UnreadableInputError and OSError.

    `progress` gets the bytes of the file taken in so far, and its size.
    """
    entry = root / key_of(path)
    if _is_there(entry):
        return entry
    part = _new_part(root)
    try:
        ingest(_opened(path, limits, progress), part, schema=LAYOUT, version=__version__)
        _move(part, entry)
        prune(root)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return entry


def obtain(
    path: Path,
    root: Path | None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Entry:
    """As `fetch`, with what had to be made in memory; without a `root` nothing is written.

    The entry is made while the caller goes on. If it cannot be, the next one who asks makes it again.
    """
    if root is None:
        source = _opened(path, limits, progress)
        return Entry(path, ingest(source, None, schema=LAYOUT, version=__version__))
    entry = root / key_of(path)
    if _is_there(entry):
        return Entry(entry)
    part = _new_part(root)

    made = _making[entry] = threading.Event()

    def settle(whole: bool) -> None:
        try:
            if whole:
                _move(part, entry)
                prune(root)
        except OSError:
            pass  # the cache is no place to write to any more
        finally:
            shutil.rmtree(part, ignore_errors=True)
            made.set()

    try:
        source = _opened(path, limits, progress)
        return Entry(entry, ingest(source, part, schema=LAYOUT, version=__version__, settle=settle))
    except BaseException:
        settle(whole=False)
        raise


def _is_there(entry: Path) -> bool:
    made = _making.pop(entry, None)
    if made is not None:
        made.wait()
    if index_of(entry) is None:
        return False
    _touch(entry)
    return True


def _new_part(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="part-", dir=root))


def _opened(path: Path, limits: Limits | None, progress: Callable[[int, int], None] | None) -> TraceSource:
    return open_trace(path, limits=limits or Limits(), progress=progress)


def index_of(entry: Path) -> TraceIndex | None:
    """The index of an entry that is whole and of this version, else None."""
    try:
        index = msgspec.json.decode((entry / INDEX).read_bytes(), type=TraceIndex)
        if (index.schema, index.version) != (LAYOUT, __version__):
            return None
        return index if stored.rows(entry, index) == index.slices else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, pl.exceptions.PolarsError):
        return None


def read(entry: Entry) -> Stored:
    """The tables of an entry; raises UnreadableInputError, OSError or PolarsError where it is damaged."""
    if entry.content is not None:
        return entry.content
    index = index_of(entry.folder)
    if index is None:
        raise UnreadableInputError(f"{entry.folder}: tables of a trace that are not whole; delete the folder")
    return stored.read(entry.folder, index)


def drop(entry: Path) -> None:
    """Forget an entry that turned out to be damaged."""
    shutil.rmtree(entry, ignore_errors=True)


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
                drop(path)
    except OSError:
        return  # another process may be at it


def writable(root: Path) -> bool:
    """Whether entries can be made in `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return True
    except OSError:
        return False


def _touch(entry: Path) -> None:
    try:
        os.utime(entry / INDEX)
    except OSError:
        return  # a read-only cache


def _move(part: Path, entry: Path) -> None:
    try:
        part.replace(entry)
    except OSError:
        # Something stands there: the same entry, made by another process just now, or a damaged one.
        if index_of(entry) is not None:
            return
        drop(entry)
        part.replace(entry)
