"""Where an experiment is written: experiment.json, and the report of a run of its baseline with the experiment in it.

The page in the experiment's folder begins with what was tried and goes on with the full report of the baseline. Where
the candidates came from a recorded run, that run is given a copy of experiment.json: its own report then shows it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from stepscope.model import Report
from stepscope.model.experiment import Experiment
from stepscope.report import jsonfile, outputs
from stepscope.report.experiment_document import NAME, document, dumps


def with_experiment(report: Report, experiment: Mapping[str, Any]) -> Report:
    """`report` with the experiment among its views."""
    return msgspec.structs.replace(report, views={**report.views, "experiment": dict(experiment)})


def write(experiment: Experiment, report: Report | None, folder: Path, render: outputs.Render) -> tuple[Path, ...]:
    """Write experiment.json, and report.json and report.html with the experiment in them; returns their paths.

    `report` is that of a run of the baseline, None where there is none; `render` makes the page. Raises
    `EnvironmentRefusal` where the folder cannot be written.
    """
    path = folder / NAME
    outputs.write_file(path, dumps(experiment))
    shown = with_experiment(report or _without_run(experiment), document(experiment))
    return path, *outputs.write(shown, folder, render)


def leave_with(experiment: Experiment, run: Path, render: outputs.Render | None) -> Path | None:
    """Lay experiment.json into the run folder that the candidates came from, and show it in the report that lies there.

    The report itself stays as it was, `render` makes a page of it; one that cannot be read is left alone, as it is
    without `render`. None where nothing can be written.
    """
    try:
        outputs.write_file(run / NAME, dumps(experiment))
        if render is not None:
            report = jsonfile.load(run / outputs.JSON_NAME)
            outputs.write(with_experiment(report, document(experiment)), run, render)
    except EnvironmentRefusal:
        return None
    except UnreadableInputError:
        pass
    return run / NAME


def _without_run(experiment: Experiment) -> Report:
    """The report of no run at all: the command, and nothing measured of it."""
    return Report(
        run={
            "name": Path(experiment.folder).name if experiment.folder else "experiment",
            "command": list(experiment.protocol.command),
            "cwd": experiment.cwd,
        },
        quality={"counts": {}, "reading": None, "traces": [], "notes": []},
        steps=None,
        findings=(),
        abstained=(),
        ignored=(),
        views={},
    )
