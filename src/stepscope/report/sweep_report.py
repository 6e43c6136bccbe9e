"""A sweep as JSON, and in words.

`sweep_document` makes the dictionary that `sweep.json` and `views.sweep` of a report hold and that terminal and page
show; `loads` turns a file back into a `Sweep`, because a folder may come from elsewhere: what is shown of it has passed
the types once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular
from stepscope.model.counted import things
from stepscope.model.sweep import FAILED, FINISHED, MAXIMUM, PED_ANOVA, PRUNED, SWEEP_SCHEMA, Sweep
from stepscope.report import words
from stepscope.report.values import json_bytes, plain_rows, plain_value

NAME = "sweep.json"
MAX_BYTES = 64 * 2**20  # of a file that is read
MAX_ROWS = 10_000

Row = Mapping[str, Any]
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
    file = path / NAME if path.is_dir() else path
    try:
        with open_regular(file, follow=True) as handle:
            data = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableInputError(f"{file}: {error.strerror}; name the folder of a sweep") from None
    if len(data) > MAX_BYTES:
        raise UnreadableInputError(f"{file}: larger than any sweep of ours; name another file")
    try:
        return loads(data)
    except UnreadableInputError as error:
        raise UnreadableInputError(f"{file}: {error}") from None


def number(value: Any) -> str:
    """A value of a metric or a parameter in few digits; text as it is."""
    if value is None:
        return words.MISSING
    return str(value) if isinstance(value, (str, int)) else f"{value:.4g}"


def bare(name: str) -> str:
    """A knob as the script knows it: lr of arg:--lr."""
    return name.partition(":")[2].lstrip("-") or name


def heads(document: Row) -> list[str]:
    """The parameters as columns are called: in short, where no two of them are called alike then."""
    names = [str(param["name"]) for param in document["params"]]
    short = [bare(name) for name in names]
    return short if len(set(short)) == len(short) else names


def settings(document: Row, trial: Row) -> str:
    """What a trial was set to: lr=0.0031, batch-size=16."""
    params = trial.get("params") or {}
    return ", ".join(
        f"{bare(param['name'])}={number(params[param['name']])}"
        for param in document["params"]
        if param["name"] in params
    )


def metrics(document: Row) -> list[str]:
    return [str(row["name"]) for row in document["metrics"]]


def counted(document: Row) -> str:
    """12 trials: 9 finished, 2 pruned, 1 failed."""
    states = [trial.get("state") for trial in document["trials"]]
    parts = [f"{states.count(state)} {state}" for state in (FINISHED, PRUNED, FAILED) if state in states]
    made = sum(states.count(state) for state in (FINISHED, PRUNED, FAILED))
    of = "" if made >= document["asked"] else f" of {document['asked']}"
    return f"{made}{of} {'trial' if document['asked'] == 1 else 'trials'}" + (f": {', '.join(parts)}" if parts else "")


def conclusion(document: Row) -> list[str]:
    """The best trial, and the front where there are two metrics."""
    best, names = document.get("best"), metrics(document)
    if best is None:
        return ["No trial finished with its metric, so there is no best one."]
    values = ", ".join(f"{name} {number(value)}" for name, value in zip(names, best["values"], strict=False))
    said = [f"Best by {names[0]}: trial {best['number'] + 1}, {settings(document, best)}: {values}."]
    front = document.get("front") or ()
    if len(front) == 1:
        said.append(f"No trial is better than it in {names[0]} or in {names[1]}.")
    elif front:
        said.append(f"{things(len(front), 'trial')} on the front: of each, no other trial is better in both metrics.")
    return said


def ranking(found: Row) -> str:
    """What the importance of a metric rests on, or why there is none."""
    if found.get("note"):
        return f"What decides {found['metric']}: {found['note']}."
    of = f"{found['trials']} finished trials"
    how = (
        "how differently the best tenth of them lies in a parameter (PED-ANOVA)"
        if found.get("method") == PED_ANOVA
        else "a surface of lines, curves and products of pairs"
    )
    names = [bare(name) for name in found.get("important") or ()]
    said = ", ".join(names) if names else "no parameter for certain"
    return f"What decides {found['metric']}: {said}. From {of}, by {how}."


def protocol(document: Row) -> str:
    """How trials were chosen and judged."""
    ways = [
        f"{row['name']} {'maximised' if row['direction'] == MAXIMUM else 'minimised'}"
        + (f" ({'its best value' if row['of'] == 'best' else 'mean of its last tenth'})" if row["of"] != "last" else "")
        for row in document["metrics"]
    ]
    return f"{counted(document)}; {' and '.join(ways)}; sampler {document['sampler']}, seed {document['seed']}"


def state(document: Row) -> str | None:
    """Said of a sweep that was stopped."""
    return f"The sweep was stopped: {document['stopped']}." if document.get("stopped") else None


def values(document: Row, trial: Row) -> Sequence[float | None]:
    """The values of the metrics in their order, None for each it has not."""
    own = list(trial.get("values") or ())
    return [own[at] if at < len(own) else None for at in range(len(document["metrics"]))]
