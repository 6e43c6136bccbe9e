"""The run folder: its name, who may write into it, and proof that it can be written before anything starts.

Each launcher owns exactly one `host-H` inside it, taken with one atomic `mkdir`, so that the hosts of a job share a
run folder and two runs never mix.
"""

from __future__ import annotations

import datetime
import errno
import json
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.record.host.scheduler import Scheduler

DEFAULT_PARENT = "stepscope-runs"
_MOST_SUFFIXES = 1000


@dataclass(frozen=True)
class RunFolder:
    """`run` is shared by all hosts, `host` is this launcher's own. Both are absolute."""

    run: Path
    host: Path

    def discard(self) -> None:
        """Remove what was claimed for a command that never started; other hosts' folders stay."""
        shutil.rmtree(self.host, ignore_errors=True)
        for folder in (self.run, self.run.parent if self.run.parent.name == DEFAULT_PARENT else None):
            if folder is not None:
                try:
                    folder.rmdir()
                except OSError:
                    return  # not empty: someone else's


def claim_folder(
    out: Path | None, script: str, scheduler: Scheduler | None, *, now: datetime.datetime, host: str | None = None
) -> RunFolder:
    """Create and claim the folder of a run.

    `out` is taken as it is; without it the name is made of the scheduler's label or the time, and of `script`.
    Raises `UsageError` when `out` holds another recording, `EnvironmentRefusal` when nothing can be written there.
    """
    host_name = "host-" + safe_name(host or socket.gethostname() or "localhost")
    if scheduler is not None and scheduler.local_index:
        host_name += f".{scheduler.local_index + 1}"
    if out is not None:
        return _claim_named(out.absolute(), host_name, scheduler)
    label = scheduler.label if scheduler is not None else f"{now:%Y%m%d-%H%M%S}"
    base = Path.cwd() / DEFAULT_PARENT / f"{safe_name(label)}-{safe_name(script)}"
    for attempt in range(1, _MOST_SUFFIXES):
        run = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        if scheduler is None and run.exists():
            continue
        claimed = _make_host_folder(run, host_name)
        if claimed is not None:
            return claimed
    raise EnvironmentRefusal(f"{base} and its numbered successors are all taken; name a folder with --out")


def _claim_named(run: Path, host_name: str, scheduler: Scheduler | None) -> RunFolder:
    if run.exists() and not run.is_dir():
        raise UsageError(f"--out {run} is a file; name a folder that does not exist yet")
    if run.is_dir() and any(run.iterdir()) and not _same_job(run, scheduler):
        raise UsageError(f"--out {run} is not empty; name a new folder, or remove it first")
    claimed = _make_host_folder(run, host_name)
    if claimed is None:
        raise UsageError(f"--out {run} already holds a recording of this host; name a new folder, or remove it first")
    return claimed


def _same_job(run: Path, scheduler: Scheduler | None) -> bool:
    """Whether all there is in `run` comes from other members of this very job step."""
    if scheduler is None or scheduler.identity is None:
        return False
    hosts = [path for path in run.iterdir() if path.name.startswith("host-")]
    return bool(hosts) and all(_identity(path) in (None, scheduler.identity) for path in hosts)


def _identity(host_folder: Path) -> tuple[str, ...] | None:
    try:
        manifest = json.loads((host_folder / "manifest.json").read_text(encoding="utf-8"))
        found = manifest["scheduler"]["identity"]
        return tuple(str(part) for part in found)
    except FileNotFoundError:
        return None  # another host has just claimed it and not written yet
    except (OSError, ValueError, LookupError, TypeError):
        return ()


def _make_host_folder(run: Path, host_name: str) -> RunFolder | None:
    """`RUN/host-H` when it could be made by us, None when it was there."""
    folder = RunFolder(run=run, host=run / host_name)
    try:
        run.mkdir(parents=True, exist_ok=True)
        folder.host.mkdir()
        probe = folder.host / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except FileExistsError:
        return None
    except OSError as error:
        folder.discard()
        reason = errno.errorcode.get(error.errno or 0, "error")
        raise EnvironmentRefusal(
            f"cannot write the run folder {run} ({error.strerror or reason}); name a writable one with --out"
        ) from None
    return folder


def safe_name(text: str) -> str:
    """`text` reduced to what is a plain file name everywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80] or "run"
