"""The files of a folder, in the order of their names, to a bounded depth and number."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 10_000
MAX_DEPTH = 8


def files_in(path: Path) -> Iterator[Path]:
    """`path` itself where it is no folder, else the files below it; hidden ones are left out."""
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)
        if depth >= MAX_DEPTH:
            folders.clear()
        for name in sorted((name for name in names if not name.startswith(".")), key=_natural):
            count += 1
            if count > MAX_FILES:
                return
            yield Path(folder) / name


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]
