"""Starts the recording launcher as a real process, and small helpers to watch it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.harness import end_session, run_line

PATIENCE_SECONDS = 60.0


def launcher(out: Path, *command: str, max_steps: int = 0) -> list[str]:
    """argv of a launcher that records `command` into `out`, without a report."""
    limit = ["--max-steps", str(max_steps)] if max_steps else []
    return run_line(out, command, ["--quiet", "--no-report", *limit])


def record(out: Path, *command: str, **keywords: Any) -> subprocess.CompletedProcess[bytes]:
    """Record `command` to its end."""
    return subprocess.run(launcher(out, *command), capture_output=True, timeout=PATIENCE_SECONDS, **keywords)


@contextmanager
def started(out: Path, *command: str, max_steps: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process group of its own, as a shell would start it; nothing of it outlives the block."""
    process = subprocess.Popen(
        launcher(out, *command, max_steps=max_steps),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0 if sys.version_info >= (3, 11) else None,
    )
    try:
        yield process
    finally:
        end_session(process)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails the test when it does not come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


def host_dir(out: Path) -> Path:
    (found,) = out.glob("host-*")
    return found


def manifest(out: Path) -> dict[str, Any]:
    value = json.loads((host_dir(out) / "manifest.json").read_text())
    assert isinstance(value, dict)
    return value


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
