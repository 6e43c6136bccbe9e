"""An experiment as JSON.

`experiment_document` makes the dictionary that `experiment.json` and `views.experiment` of a report hold and that
terminal and page show; `loads` turns a file back into an `Experiment`, because a run folder may come from elsewhere:
what is shown of it has passed the types once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from stepscope.files import open_regular
from stepscope.model import Report
from stepscope.model.comparison import EXPERIMENT_SCHEMA, Experiment
from stepscope.report import outputs
from stepscope.report.comparison_report import MEAN, measure_document, outcome_document
from stepscope.report.document import bare_report, load_report
from stepscope.report.escape import json_bytes, plain_rows, plain_value

NAME = "experiment.json"
MAX_BYTES = 32 * 1024 * 1024  # of a file that is read; ours are well below one
MAX_ROWS = 200

T = TypeVar("T")
_KEPT = (
    *("schema", "finished", "stopped", "protocol", "skipped", "by_hand", "effects", "noise", "notes"),
    *("repeat", "source", "folder", "cwd", "runs", "wall_s"),
)


def experiment_document(experiment: Experiment) -> dict[str, Any]:
    """The whole of `experiment.json`. A candidate is what `compare --json` makes of one, and what was tried beside it:
    its name, ceiling and finding, what became of its knobs, and what to write into the script."""
    row = {key: plain_value(getattr(experiment, key)) for key in _KEPT}
    return {
        **{key: row[key] for key in ("schema", "finished", "stopped", "protocol")},
        "baseline": {"runs": [measure_document(measure) for measure in experiment.baseline[:MAX_ROWS]]},
        "candidates": [
            {
                "name": plain_value(tried.candidate.name),
                **outcome_document(tried.outcome),
                "ceiling": plain_value(tried.candidate.ceiling),
                "finding": plain_value(tried.candidate.finding),
                "applied": plain_rows(tried.applied, MAX_ROWS),
                "change": plain_value(tried.change),
            }
            for tried in experiment.tried[:MAX_ROWS]
        ],
        **{key: row[key][:MAX_ROWS] for key in ("skipped", "by_hand")},
        "main_effects": row["effects"][:MAX_ROWS],
        "noise": row["noise"],
        "notes": row["notes"][:MAX_ROWS],
        **{key: row[key] for key in ("repeat", "source", "folder", "cwd", "runs", "wall_s")},
    }


def dumps(experiment: Experiment) -> bytes:
    return json_bytes(experiment_document(experiment))


def loads(data: bytes) -> Experiment:
    """Read a document back; keys it does not know are left out. Raises `UnreadableInputError`."""
    try:
        row = msgspec.json.decode(data)
        if not isinstance(row, dict):
            raise UnreadableInputError("not an experiment; name the experiment.json of `stepscope experiment`")
        if row.get("schema") != EXPERIMENT_SCHEMA:
            raise UnreadableInputError(
                f"an experiment of schema {str(row.get('schema'))[:60]!r}, this version reads {EXPERIMENT_SCHEMA}"
            )
        return _experiment(row)
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableInputError(f"not an experiment of stepscope: {error}; make one anew") from None


def load(path: Path) -> Experiment:
    """Read an experiment.json, or the one in a folder; raises `UnreadableInputError`."""
    return load_document(path, NAME, MAX_BYTES, loads)


def load_document(path: Path, name: str, most_bytes: int, read: Callable[[bytes], T]) -> T:
    """What `read` makes of a file, or of the one of this name in a folder; raises `UnreadableInputError`."""
    file = path / name if path.is_dir() else path
    what = name.partition(".")[0]
    try:
        with open_regular(file, follow=True) as handle:
            data = handle.read(most_bytes + 1)
    except OSError as error:
        raise UnreadableInputError(
            f"{file}: {error.strerror}; name the folder of {'an' if what[0] in 'aeiou' else 'a'} {what}"
        ) from None
    if len(data) > most_bytes:
        raise UnreadableInputError(f"{file}: larger than any {what} of ours; name another file")
    try:
        return read(data)
    except UnreadableInputError as error:
        raise UnreadableInputError(f"{file}: {error}") from None


def view(folder: Path) -> dict[str, Any] | None:
    """The experiment that lies in a run folder, ready for its report; None where there is none that can be read."""
    if not (folder / NAME).is_file():
        return None
    try:
        return experiment_document(load(folder / NAME))
    except UnreadableInputError:
        return None


def _experiment(row: dict[str, Any]) -> Experiment:
    """The document in the layout of the records, then converted at once; what an older file lacks is empty."""
    nested = {
        "baseline": [_measure(run) for run in (row.get("baseline") or {}).get("runs") or ()],
        "tried": [_tried(candidate) for candidate in row.get("candidates") or ()],
        "effects": row.get("main_effects") or [],
    }
    return msgspec.convert({"skipped": [], "noise": None, **row, **nested}, Experiment)


def _tried(row: dict[str, Any]) -> dict[str, Any]:
    """A candidate of the document holds in one row what are three records: itself, its outcome, its verdict."""
    decided_by = row.get("decided_by")
    verdict = {
        "text": "",
        **row,
        "word": row["verdict"],
        "figure": None if decided_by == row.get("headline", MEAN) else decided_by,
    }
    outcome = {
        "knobs": [],
        "effects": {},
        "phases": [],
        **row,
        "verdict": verdict,
        "pairs": [(_measure(pair["baseline"]), _measure(pair["candidate"])) for pair in row.get("runs") or ()],
        "left_out": [_measure(run) for run in row.get("left_out") or ()],
    }
    return {"applied": [], "change": [], **row, "candidate": {"knobs": [], **row}, "outcome": outcome}


def _measure(row: dict[str, Any]) -> dict[str, Any]:
    """A run; a loss that was no finite number is null in JSON, and not a number here."""
    return {**row, "losses": [(step, math.nan if value is None else value) for step, value in row.get("losses") or ()]}


def with_experiment(report: Report, experiment: Mapping[str, Any]) -> Report:
    return msgspec.structs.replace(report, views={**report.views, "experiment": dict(experiment)})


def write(experiment: Experiment, report: Report | None, folder: Path, render: outputs.Render) -> tuple[Path, ...]:
    """Write experiment.json, and report.json and report.html with the experiment in them; returns their paths.

    `report` is that of a run of the baseline, None where there is none; `render` makes the page. Raises
    `EnvironmentRefusal` where the folder cannot be written.
    """
    path = folder / NAME
    outputs.write_file(path, dumps(experiment))
    shown = with_experiment(report or _without_run(experiment), experiment_document(experiment))
    return path, *outputs.write(shown, folder, render)


def leave_with(experiment: Experiment, run: Path, render: outputs.Render | None) -> Path | None:
    """Lay experiment.json into the run folder that the candidates came from, and show it in the report that lies there.

    The report itself stays as it was, `render` makes a page of it; one that cannot be read is left alone, as it is
    without `render`. None where nothing can be written.
    """
    try:
        outputs.write_file(run / NAME, dumps(experiment))
        if render is not None:
            report = load_report(run / outputs.JSON_NAME)
            outputs.write(with_experiment(report, experiment_document(experiment)), run, render)
    except EnvironmentRefusal:
        return None
    except UnreadableInputError:
        pass
    return run / NAME


def _without_run(experiment: Experiment) -> Report:
    """The report of no run at all: the command, and nothing measured of it."""
    name = Path(experiment.folder).name if experiment.folder else "experiment"
    return bare_report(name, experiment.protocol.command, experiment.cwd)
