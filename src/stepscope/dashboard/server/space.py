"""What runs take of a disk, and giving it back: what we wrote into their folders, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from stepscope.dashboard.server import live
from stepscope.dashboard.server.catalog import EXPERIMENT_FILES, EXPERIMENT_RUNS, TRACE, Place, standing
from stepscope.report import words

BLOCK = 512  # bytes of `st_blocks`, whatever the file system
# What lies in folders of ours; a script may have been given the same folder for its checkpoints.
_OURS = re.compile(
    r"(host|rank)-.+|notebook|tables|job\.json|\.reported-by-\d+|report\.(json|html)|"
    r"(experiment|sweep)\.(json|jsonl)|runs|lock|study\.log"
)


class Freed(Struct, frozen=True):
    """What a run takes, and what of its folder stays.

    Attributes:
        bytes: on the disk; files with several names count once.
        others: entries of the folder that are not ours.
        why: the reason why it stays as a whole; None where it goes.
    """

    bytes: int = 0
    others: tuple[str, ...] = ()
    why: str | None = None


def look(place: Place) -> Freed:
    """What deleting a run would free. Links are not followed."""
    if place.kind == TRACE:
        return Freed(why="stepscope did not record it")
    if standing(place).state == live.RUNNING:
        return Freed(why="it goes on")
    if place.path.is_symlink():
        return Freed(why="it is a link")
    above = place.path.parent
    if above.name == EXPERIMENT_RUNS and any((above.parent / name).exists() for name in (*EXPERIMENT_FILES, "lock")):
        return Freed(why="it belongs to an experiment, which goes as a whole")
    own, others = _entries(place.path)
    return Freed(_bytes(own), tuple(entry.name for entry in others))


def delete(place: Place) -> str | None:
    """Delete what `look` counted; what went wrong in a line, None where nothing did."""
    problems: list[str] = []

    def failed(_function: object, path: str, error: tuple[object, BaseException, object]) -> None:
        problems.append(f"{path}: {getattr(error[1], 'strerror', None) or error[1]}")

    for entry in _entries(place.path)[0]:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, onerror=failed)
        else:
            try:
                os.unlink(entry.path)
            except OSError as error:
                problems.append(f"{entry.path}: {error.strerror}")
    with contextlib.suppress(OSError):  # what is not ours keeps it
        place.path.rmdir()
    if not problems:
        return None
    return problems[0] + (f" (and {words.things(len(problems) - 1, 'more such file')})" if problems[1:] else "")


def _entries(folder: Path) -> tuple[Sequence[os.DirEntry[str]], Sequence[os.DirEntry[str]]]:
    """What of a folder is ours, and what is not."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return (), ()
    own = [entry for entry in entries if _OURS.fullmatch(entry.name)]
    return own, [entry for entry in entries if entry not in own]


def _bytes(entries: Sequence[os.DirEntry[str]]) -> int:
    seen: dict[tuple[int, int], int] = {}
    waiting = list(entries)
    while waiting:
        entry = waiting.pop()
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            seen[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
            if entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as inner:
                    waiting += inner
    return sum(seen.values())
