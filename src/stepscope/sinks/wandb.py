"""W&B: an offline run, which `wandb sync` uploads when the user says so; or curves beside those of a run of theirs.

Everything lies below `stepscope/`, over an axis of its own, so that nothing of a run that is resumed is touched: W&B's
own step only grows, and would drop the values of whoever writes to it next. `_timestamp` is the original time, in
seconds as a double. Values are as they are, NaN and infinities too.

A run is made in a hidden folder and moved to its place, so that what `wandb sync` sees is whole.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.files import decoded_small
from stepscope.report.outputs import write_file
from stepscope.sinks import AGAIN_S, PATIENCE_S, PROJECT, Sent, Target, library, speaking_for
from stepscope.sinks.exported import PAGE, Exported, moments

PREFIX = "stepscope/"
AXIS = f"{PREFIX}step"
ABOUT = "stepscope.json"  # in a run's folder: that it is whole, and whose values it holds
MAX_ABOUT = 10_000  # bytes
ADVICE = "look at its settings (WANDB_…), the folder's permissions and the disk"
ONLINE_S = 600.0  # for the beginning and the end of a run that may be online: at the end all of it is sent
# Variables that name a run of the user's, and would win over the id that is given here
OF_THE_TRAINING = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
# What W&B would record of this process, which is not the training; a version that lacks a setting does without it.
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "program": "",
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def wandb(run: Exported, target: Target) -> Sent:
    """The run as an offline one, or added to the run that is to be resumed: online where the user's W&B is."""
    for name in OF_THE_TRAINING:
        os.environ.pop(name, None)
    tool = library("wandb", "wandb")
    identity = target.resume or f"stepscope-{run.identity}"
    if not identity.replace("-", "").replace("_", "").isalnum() or len(identity) > 64:
        raise UsageError(f"--resume {identity}: no id of a run; it is the last part of the run's address")
    if target.resume and run.goes_on:
        raise UsageError(f"--resume {identity}: {run.name} goes on, and W&B would drop what it logs; wait for its end")
    with speaking_for("W&B", ADVICE) as wait:
        theirs = tool.setup().settings
        base = Path(target.out or os.environ.get("WANDB_DIR") or theirs.root_dir or ".").absolute() / "wandb"
        told = (
            (path, decoded_small(path, MAX_ABOUT, dict[str, str])) for path in base.glob(f"*run-*-{identity}/{ABOUT}")
        )
        known = [path.parent for path, about in told if about is not None and about.get("run") == run.identity]
        if known and not target.force:
            again = f"{known[0].name} holds it already; --force writes it anew"
            return Sent(str(known[0]), 0, (again,), _sync(known[0], target.resume))
        wait(0)
        run.page  # noqa: B018 - made once, with the report; this may take a while and is our own
        staging = base / f".{identity}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            made, count, remarks = _write(tool, run, target, identity, staging, wait)
            for old in known:
                shutil.rmtree(old)
            final = base / made.name
            made.rename(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return Sent(str(final), count, remarks, _sync(final, target.resume) if final.name.startswith("offline-") else None)


def _write(
    tool: Any, run: Exported, target: Target, identity: str, staging: Path, wait: Callable[[float], None]
) -> tuple[Path, int, tuple[str, ...]]:
    """The folder of the run that was made, its number of values, and what to say of it."""
    fields = tool.Settings.model_fields
    chosen = {name: value for name, value in _SETTINGS.items() if name in fields}
    project = target.project or os.environ.get("WANDB_PROJECT") or tool.setup().settings.project
    if target.resume:
        about = {"resume": "must", "project": project, "mode": os.environ.get("WANDB_MODE")}
    else:
        about = {"mode": "offline", "project": project or PROJECT, "name": run.name, "notes": run.notes}
        about["config"] = run.config
    status, made = run.status or 0, None
    patience_s = ONLINE_S if target.resume else PATIENCE_S
    wait(patience_s)
    try:
        made = tool.init(dir=str(staging), id=identity, settings=tool.Settings(**chosen), **about)
        folder = Path(made.dir).parent
        if not folder.is_relative_to(staging):
            raise EnvironmentRefusal(f"W&B wrote to {folder}: is it disabled here (WANDB_MODE)? {ADVICE}")
        added = _fill(tool, made, run, wait, resumed=target.resume is not None)
        wait(patience_s)
        made.finish(exit_code=status)
    except BaseException:
        _leave(tool, made if target.resume else None, status)
        raise
    write_file(folder / ABOUT, msgspec.json.encode({"run": run.identity}))
    return folder, added or 0, (() if added is not None else (f"the run {identity} holds these values already",))


def _leave(tool: Any, theirs: Any, status: int) -> None:
    """End what W&B has begun: its exit would wait for a process that may be gone or not answer. `theirs`: a run that
    was resumed, which keeps its state."""
    with contextlib.suppress(Exception):
        if theirs is not None:
            theirs.finish(exit_code=status)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-"):
                child.kill()
                child.wait(AGAIN_S)
    with contextlib.suppress(Exception, SystemExit):
        tool.teardown()


def _fill(tool: Any, made: Any, run: Exported, wait: Callable[[float], None], *, resumed: bool) -> int | None:
    """Puts the run's values and what the report says of it into a run of W&B.

    Returns the number of values; None where the run held them.
    """
    config = made.config.get("stepscope") if resumed else None
    if isinstance(config, dict) and config.get("identity") == run.identity:
        return None
    made.define_metric(AXIS, hidden=True)
    made.define_metric(f"{PREFIX}*", step_metric=AXIS)
    findings = run.findings
    if findings:
        rows = [list(finding.values()) for finding in findings]
        table = tool.Table(columns=list(findings[0]), data=rows)
        made.log({f"{PREFIX}findings_table": table, "_timestamp": (run.ended_ns or 0) / 1e9})
    made.summary.update({PREFIX + name: value for name, value in run.summary.items()})
    page = Path(made.dir) / (PREFIX if resumed else "") / PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_bytes(run.page)
    made.save(str(page), base_path=made.dir, policy="end" if resumed else "now")
    points = run.together  # behind what may fail: of a run that is online nothing can be taken back
    for time_ns, step, values in moments(points):
        # what a script logs as "step" is not the axis
        row = {PREFIX + name if PREFIX + name != AXIS else f"{AXIS} (logged)": value for name, value in values.items()}
        wait(PATIENCE_S)
        made.log(row | {AXIS: step, "_timestamp": time_ns / 1e9})
    if resumed:  # at last: it says that all is there
        made.config.update({"stepscope": run.config}, allow_val_change=True)
    return points.height


def _sync(folder: Path, resumed: str | None) -> str:
    return shlex.join(["wandb", "sync", *(["--id", resumed] if resumed else []), str(folder)])
