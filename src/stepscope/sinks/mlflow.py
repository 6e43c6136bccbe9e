"""MLflow: a run in the user's tracking server or database, completed where it was begun, and never with a point twice.

A run is known by a tag with our run's identity. MLflow's metrics hold milliseconds; of values that are alike in name,
step and value within one, which its store would take for one, the later get the milliseconds that follow. Stores of SQL
have no infinity: MLflow keeps the largest double in its place, and NaN as NaN. Names may hold letters, digits and
`_-.: /`; others are mapped, and the artifact `names.json` says how.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from stepscope.errors import EnvironmentRefusal
from stepscope.report.escape import one_line
from stepscope.sinks import PATIENCE_S, PROJECT, Sent, Target, library, speaking_for
from stepscope.sinks.exported import PAGE, Exported, missing

BATCH = 1_000  # metrics of one call, the most that MLflow takes
MAX_KEY = 250  # characters
MAX_PARAMS = 100  # of one call
SHOWN = 60  # characters of a name
RETRIES = 2  # of a server that does not answer; MLflow's own seven take four minutes
TAG, DONE = "stepscope.run", "stepscope.complete"
FOLDER = "stepscope"  # of artifacts
DATABASE = "mlflow.db"  # MLflow's own default
ADVICE = "look at MLFLOW_TRACKING_URI or --out, at its permissions, and whether another process holds it"
LARGEST = 1.7976931348623157e308  # stands for infinity in stores of SQL
_ODD = re.compile(r"[^/\w.\- :]")
_KEYS = ["name", "time_ms", "step"]


def mlflow(run: Exported, target: Target) -> Sent:
    """What the run of MLflow does not hold yet."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine but by the user's settings
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
    tracking = library("mlflow.tracking", "mlflow")
    entities = library("mlflow.entities", "mlflow")
    library("sqlalchemy", "mlflow")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    uri, beside = _address(target.out)
    with speaking_for("MLflow", ADVICE) as wait:
        client = tracking.MlflowClient(tracking_uri=uri)
        identity = _run(client, run, target.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT, beside)
        points, renamed = _points(run.together)
        new = missing(points, _there(client, identity, wait), _KEYS)
        for start in range(0, new.height, BATCH):
            wait(PATIENCE_S)
            part = new.select("name", "value", "time_ms", "step").slice(start, BATCH)
            client.log_batch(identity, metrics=[entities.Metric(*row) for row in part.iter_rows()])
        if new.height or DONE not in client.get_run(identity).data.tags:
            wait(0)
            run.page  # noqa: B018 - made once, with the report; this may take a while and is our own
            wait(PATIENCE_S)
            _describe(client, entities, identity, run, renamed)
    return Sent(f"{uri} (run {identity})", new.height, tuple(_remarks(new, renamed)))


def _address(out: str | None) -> tuple[str | None, Path | None]:
    """The tracking URI, None for the user's own; and the folder for artifacts of a database that is a file."""
    if out is None:
        known = os.environ.get("MLFLOW_TRACKING_URI")
        if known:
            return known, None
        out = DATABASE
    if "://" in out:
        return out, None
    path = Path(out).absolute()
    if path.is_dir() or not path.suffix:
        path = path / DATABASE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentRefusal(f"{path.parent}: {error.strerror}; name another place with --out") from None
    return f"sqlite:///{path}", path.parent


def _run(client: Any, run: Exported, experiment: str, beside: Path | None) -> str:
    """The id of the run of MLflow that holds this one; a new one where there is none."""
    found = client.get_experiment_by_name(experiment)
    if found is None:
        place = {"artifact_location": (beside / "mlartifacts").as_uri()} if beside is not None else {}
        known = client.create_experiment(experiment, **place)
    else:
        known = found.experiment_id
    runs = client.search_runs([known], filter_string=f"tags.`{TAG}` = '{run.identity}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    started_ms = (run.started_ns or 0) // 10**6
    made = client.create_run(known, start_time=started_ms or None, tags={TAG: run.identity}, run_name=run.name)
    return str(made.info.run_id)


def _points(points: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, str]]:
    """The points under names that MLflow takes, each alone in its millisecond; and how names were mapped."""
    names = points["name"].unique(maintain_order=True).to_list()
    mapped = _mapped(names)
    told = points.with_columns(
        name=pl.col("name").replace(mapped),
        time_ms=pl.col("time_ns") // 10**6,
        value=pl.col("value").clip(-LARGEST, LARGEST),  # keeps NaN
    )
    alike = ["name", "step", "value"]
    nth = pl.int_range(pl.len()).over(alike)
    moved = told.sort("time_ms", maintain_order=True).with_columns(
        time_ms=(pl.col("time_ms") - nth).cum_max().over(alike) + nth
    )
    return moved, {name: new for name, new in mapped.items() if name != new}


def _mapped(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    plain = {name: _plain(name) for name in names}
    taken = {name for name, new in plain.items() if name == new}
    for name, new in plain.items():
        if name != new and (new in taken or len(new) > MAX_KEY):
            new = f"{new[: MAX_KEY - 10]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        taken.add(new)
        found[name] = new
    return found


def _plain(name: str) -> str:
    new = _ODD.sub("_", name)
    if posixpath.normpath(new) == new and not new.startswith(("/", "..")) and new != ".":
        return new
    return "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in new.split("/"))


def _there(client: Any, identity: str, wait: Callable[[float], None]) -> pl.DataFrame:
    rows = []
    for name in client.get_run(identity).data.metrics:
        wait(PATIENCE_S)
        rows += [(each.key, each.timestamp, each.step) for each in client.get_metric_history(identity, name)]
    return pl.DataFrame(rows, schema={"name": pl.String, "time_ms": pl.Int64, "step": pl.Int64}, orient="row")


def _describe(client: Any, entities: Any, identity: str, run: Exported, renamed: dict[str, str]) -> None:
    known = client.get_run(identity).data.params  # one that was written once cannot be changed
    params = {_plain(name): value for name, value in _flat(run.config) if _plain(name) not in known}
    rows = [entities.Param(name, value) for name, value in params.items()]
    for start in range(0, len(rows), MAX_PARAMS):
        client.log_batch(identity, params=rows[start : start + MAX_PARAMS])
    figures = {f"stepscope.{name}": f"{value:g}" for name, value in run.summary.items()}
    tags = {_plain(name): value for name, value in figures.items()} | {"mlflow.note.content": run.notes}
    for name, value in tags.items():
        client.set_tag(identity, name, value)
    findings = run.findings
    columns = {key: [row[key] for row in findings] for key in (findings[0] if findings else ())}
    table = {"columns": list(columns), "data": [list(row.values()) for row in findings]}
    client.log_text(identity, msgspec.json.encode(table).decode(), f"{FOLDER}/findings.json")
    client.log_text(identity, run.page.decode(), f"{FOLDER}/{PAGE}")
    if renamed:
        client.log_text(identity, msgspec.json.encode(renamed).decode(), f"{FOLDER}/names.json")
    client.set_tag(identity, DONE, "true")
    if not run.goes_on:
        status = "FINISHED" if not run.status else "FAILED"
        client.set_terminated(identity, status=status, end_time=(run.ended_ns or 0) // 10**6 or None)


def _flat(config: dict[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"[:MAX_KEY], value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _remarks(new: pl.DataFrame, renamed: dict[str, str]) -> Iterable[str]:
    if renamed:
        name, mapped = next(iter(renamed.items()))
        more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
        said = f"{one_line(name, SHOWN)} is {one_line(mapped, SHOWN)}"
        yield f"MLflow takes no such names: {said}{more}; {FOLDER}/names.json has them all"
    endless = new.filter(pl.col("value").abs() == LARGEST).height
    if endless:
        yield f"{endless} infinite values stand as {LARGEST:g}: its store knows none"
