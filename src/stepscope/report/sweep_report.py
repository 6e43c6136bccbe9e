"""A sweep as JSON.

`sweep_document` makes the dictionary that `sweep.json` and `views.sweep` of a report hold and that terminal and page
show; `loads` turns a file back into a `Sweep`, because a folder may come from elsewhere: what is shown of it has passed
the types once more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.model.sweep import SWEEP_SCHEMA, Sweep
from stepscope.report import words
from stepscope.report.escape import json_bytes, plain_rows, plain_value
from stepscope.report.experiment_report import load_document

NAME = "sweep.json"
MAX_BYTES = 64 * 2**20  # of a file that is read
MAX_ROWS = 10_000

_KEPT = ("key", "command", "cwd", "params", "sampler", "seed", "asked", "front", "repeat", "folder")


def sweep_document(sweep: Sweep) -> dict[str, Any]:
    """The whole of `sweep.json`. `best` is the best trial by the first metric, and `importance` is of that metric."""
    trials = plain_rows(sweep.trials, MAX_ROWS)
    first = sweep.importances[0] if sweep.importances else None
    kept = {key: plain_value(getattr(sweep, key)) for key in _KEPT}
    return {
        "schema": SWEEP_SCHEMA,
        "finished": sweep.finished,
        "stopped": plain_value(sweep.stopped),
        "metrics": plain_rows(sweep.objectives, MAX_ROWS),
        "trials": trials,
        "best": next((trial for trial in trials if trial["number"] == sweep.best), None),
        "importance": plain_rows(first.rows, MAX_ROWS) if first is not None else [],
        "importance_note": plain_value(first.note) if first is not None else None,
        "important": list(first.important) if first is not None else [],
        "importances": plain_rows(sweep.importances, MAX_ROWS),
        **kept,
    }


def dumps(sweep: Sweep) -> bytes:
    return json_bytes(sweep_document(sweep))


def loads(data: bytes) -> Sweep:
    """Read a document back; keys it does not know are left out. Raises `UnreadableInputError`."""
    try:
        row = msgspec.json.decode(data)
        if not isinstance(row, dict) or row.get("schema") != SWEEP_SCHEMA:
            raise UnreadableInputError("not a sweep of this version; name the sweep.json of `stepscope sweep`")
        best = (row.get("best") or {}).get("number")
        found = msgspec.convert({**row, "objectives": row.get("metrics"), "best": best}, Sweep)
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableInputError(f"not a sweep of stepscope: {error}; make one anew") from None
    if not found.objectives or not found.params:
        raise UnreadableInputError("not a sweep of stepscope: no metric or no parameter; make one anew")
    return found


def load(path: Path) -> Sweep:
    """Read a sweep.json, or the one in a folder; raises `UnreadableInputError`."""
    return load_document(path, NAME, MAX_BYTES, loads)


def number(value: Any) -> str:
    """A value of a metric or a parameter in few digits; text as it is."""
    if value is None:
        return words.MISSING
    return str(value) if isinstance(value, (str, int)) else f"{value:.4g}"


def bare(name: str) -> str:
    """A knob as the script knows it: lr of arg:--lr."""
    return name.partition(":")[2].lstrip("-") or name
