"""Cells of a notebook that lie in a run folder: their text, and the names under which the kernel had compiled them.

RUN/notebook holds `cell_N.py` and `cells.json`, which maps names of code to these files. Both are input like any other:
what does not look right is left out, and no name leads out of the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.files import open_regular

FOLDER = "notebook"
INDEX = "cells.json"
MOST_BYTES = 1_000_000  # of the index
MOST_CELLS = 1_000


def cells(run: Path) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The folder with the cells of a run, None where there is none, and (name of the code, file) of cells in it."""
    folder = (run / FOLDER).absolute()
    if not folder.is_dir():
        return None, ()
    try:
        with open_regular(folder / INDEX) as handle:
            named = json.loads(handle.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return folder, ()
    if not isinstance(named, dict):
        return folder, ()
    pairs = [(name, file) for name, file in named.items() if isinstance(file, str) and name.startswith("/")]
    return folder, tuple((name, str(folder / Path(file).name)) for name, file in pairs[:MOST_CELLS])
