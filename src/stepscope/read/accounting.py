"""RUN/sacct.txt, what `sacct -P` prints: a head with names of fields, then a row for each job and step, `|` between.

Documented in sacct(1), "--parsable2". Which fields there are is the head's word, so that a file made by hand is read.
"""

from __future__ import annotations

from pathlib import Path

from stepscope.files import read_small
from stepscope.read.raw import Losses, Row
from stepscope.read.text import clean
from stepscope.schema import MAX_ACCOUNTING_BYTES

MOST_ROWS = 20_000
_NEEDED = ("State",)
_IDS = ("JobIDRaw", "JobID")


def read_accounting(path: Path, losses: Losses) -> tuple[Row, ...] | None:
    """Rows by the names of the head; None where there is no such file. A row of another width is counted and left out.

    `id` of a row is its `JobIDRaw`, or its `JobID`.
    """
    try:
        data = read_small(path, MAX_ACCOUNTING_BYTES)
    except FileNotFoundError:
        return None
    except OSError:
        losses.add("unreadable_files", path.name)
        return ()
    head, *lines = clean(data.decode("utf-8", "backslashreplace")).splitlines() or [""]
    names = [name.strip() for name in head.split("|")]
    id = next((name for name in _IDS if name in names), None)
    if id is None or not set(_NEEDED) <= set(names):
        losses.add("bad_lines", path.name)
        return ()
    lines = [line for line in lines if line.strip()]
    good = [cells for line in lines[:MOST_ROWS] if len(cells := line.split("|")) == len(names)]
    losses.add("bad_lines", path.name, len(lines) - len(good))
    rows = (dict(zip(names, cells, strict=True)) for cells in good)
    return tuple({**row, "id": row[id]} for row in rows)
