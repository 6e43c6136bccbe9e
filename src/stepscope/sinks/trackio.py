"""Trackio: a local project, its runs' values with their times to the microsecond, findings as alerts.

A run is known by its id, which is our run's identity: what it holds already is not written again. Names that Trackio
keeps for itself get the two underscores that it puts before them itself. Nothing is sent to a Space or a bucket.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.errors import UsageError
from stepscope.report.outputs import write_file
from stepscope.sinks import PATIENCE_S, PROJECT, Sent, Target, library, speaking_for
from stepscope.sinks.exported import Exported, missing, moments

BATCH = 10_000  # moments of one transaction
LEVELS = {"critical": "error", "warning": "warn"}  # by severity; all else is "info"
ADVICE = "look at TRACKIO_DIR or --out, at its permissions, and whether another process holds it"
_KEYS = ["name", "time", "step"]


def trackio(run: Exported, target: Target) -> Sent:
    """What the project does not hold of the run yet."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # whatever a bucket or data set of the user's settings would be asked for
    storage, utils = (library(f"trackio.{name}", "trackio") for name in ("sqlite_storage", "utils"))
    folder = Path(target.out or os.environ.get("TRACKIO_DIR") or utils.TRACKIO_DIR).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; name a folder")
    for module in (storage, utils):  # read from the environment when it was first imported
        for name, place in {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media"}.items():
            if hasattr(module, name):
                setattr(module, name, place)
    project, identity = target.project or PROJECT, f"stepscope-{run.identity}"
    with speaking_for("Trackio", ADVICE) as wait:
        database = storage.SQLiteStorage
        database.validate_project_name(project)
        database.init_db(project)
        held = database.get_logs(project, run.name, run_id=identity)
        together = run.together
        names = together["name"].unique().to_list()
        reserved = {name: f"__{name}" for name in names if name in utils.RESERVED_KEYS or name.startswith("__")}
        points = together.with_columns(
            name=pl.col("name").replace(reserved),
            time=pl.from_epoch("time_ns", time_unit="ns").dt.strftime("%Y-%m-%dT%H:%M:%S%.6f+00:00"),
        )
        rows = [(name, row["timestamp"], row["step"]) for row in held for name in row.keys() - {"timestamp", "step"}]
        schema = {"name": pl.String, "time": pl.String, "step": pl.Int64}
        new = missing(points, pl.DataFrame(rows, schema=schema, orient="row"), _KEYS)
        times = dict(new.select("time_ns", "time").unique().iter_rows())
        logged = [(step, times[time_ns], values) for time_ns, step, values in moments(new)]
        for start in range(0, len(logged), BATCH):
            wait(PATIENCE_S)
            part = logged[start : start + BATCH]
            database.bulk_log(
                project=project,
                run=run.name,
                run_id=identity,
                metrics_list=[values for _, _, values in part],
                steps=[step for step, _, _ in part],
                timestamps=[time for _, time, _ in part],
                config=run.config if start == 0 else None,
            )
        wait(0)
        run.findings  # noqa: B018 - made once; the report may take a while and is our own work
        wait(PATIENCE_S)
        _alert(database, project, run, identity)
        wait(0)
        page = utils.project_media_dir(project) / "files" / f"{identity}.html"
        if not new.is_empty() or not page.exists():
            write_file(page, run.page, make_folder=True)
    shown = f"TRACKIO_DIR={shlex.quote(str(folder))} trackio show --project {shlex.quote(project)}"
    return Sent(str(database.get_project_db_path(project)), new.height, (), shown)


def _alert(database: Any, project: str, run: Exported, identity: str) -> None:
    """An alert for each finding and risk, at the end of the run; one that is there already is left."""
    findings = run.findings
    when = pl.Series([run.ended_ns or 0]).cast(pl.Datetime("ns")).dt.strftime("%Y-%m-%dT%H:%M:%S%.6f+00:00")[0]
    step = run.points["step"].max()
    database.bulk_alert(
        project=project,
        run=run.name,
        run_id=identity,
        titles=[row["title"] for row in findings],
        texts=[" ".join(part for part in (row["cost"], row["place"], row["fix"]) if part) for row in findings],
        levels=[LEVELS.get(row["severity"], "info") for row in findings],
        steps=[step] * len(findings),
        timestamps=[when] * len(findings),
        alert_ids=[f"{identity}-{row['id']}" for row in findings],
    )
