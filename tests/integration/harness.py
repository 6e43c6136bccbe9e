"""Starts the real command line in real processes, and reads what it left behind.

`record` runs `python -m stepscope run` around a command and waits; `start` returns the running process, for tests
that send signals. Timeouts are generous: they end a hang, they judge no speed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from stepscope import cli

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = sys.executable
TIMEOUT_S = 150


@dataclass(frozen=True)
class Recorded:
    """One finished call of `stepscope run`."""

    folder: Path
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def report(self) -> dict[str, Any]:
        """report.json of the run."""
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return loaded

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The ranked findings."""
        found: list[dict[str, Any]] = self.report["findings"]
        return found

    @property
    def text(self) -> str:
        """Everything on stderr, escapes and all."""
        return self.stderr.decode(errors="replace")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what an outer recording or a terminal would change, plus `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STEPSCOPE_", "COLUMNS"))}
    # one thread each keeps the tests' processes from fighting over few cores
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", **(extra or {})}


def run_line(out: Path, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The argv of `stepscope run`."""
    return [PYTHON, "-m", "stepscope", "run", "--out", str(out), *options, "--", *command]


def record(
    out: Path,
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Recorded:
    """Run `command` under `stepscope run --out out`; `prefix` goes before it all (a wrapper that limits rights)."""
    done = run_to_end([*prefix, *run_line(out, command, options)], cwd or out.parent, environment(env))
    return Recorded(out, done.returncode, done.stdout, done.stderr)


def plain(command: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """The same command without us."""
    return run_to_end(command, cwd, environment())


def run_to_end(line: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run `line` in a session of its own; a hang ends all of it, so that no test leaves a process behind."""
    process = subprocess.Popen(
        line,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        end_session(process)
        raise
    return subprocess.CompletedProcess(list(line), process.returncode, stdout, stderr)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the process group that `process` leads, and its descendants in other groups."""
    try:
        others = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        others = []
    for kill in (lambda: os.killpg(process.pid, signal.SIGKILL), *(other.kill for other in others)):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            kill()
    process.wait()


@contextlib.contextmanager
def started(out: Path, command: Sequence[str], *, options: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """`stepscope run` in a session of its own, output into files beside `out`; nothing of it outlives the block."""
    with open(f"{out}.stdout", "wb") as stdout, open(f"{out}.stderr", "wb") as stderr:
        process = subprocess.Popen(
            run_line(out, command, options),
            cwd=out.parent,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process)


def finish(process: subprocess.Popen[bytes], out: Path) -> Recorded:
    """Wait for a started process and collect it."""
    status = process.wait(TIMEOUT_S)
    return Recorded(out, status, Path(f"{out}.stdout").read_bytes(), Path(f"{out}.stderr").read_bytes())


def analyze(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`stepscope analyze` of a run folder, in this process."""
    return command("analyze", str(folder), *options)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours that starts nothing, in this process: as a user would see it, without a second of imports."""
    shown = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with (
        mock.patch.dict(os.environ, environment(), clear=True),
        contextlib.redirect_stdout(shown[0]),
        contextlib.redirect_stderr(shown[1]),
    ):
        try:
            cli.main(words)
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    stdout, stderr = (each.buffer.getvalue().decode() for each in shown)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, status, stdout, stderr)


def step_rows(rank_folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a step journal, by column name."""
    try:
        lines = (rank_folder / "steps.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    if not whole:
        return []
    return [dict(zip(whole[0]["columns"], row, strict=False)) for row in whole[1:]]


def wait_for_steps(out: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the journal of rank 0 holds `count` steps."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if len(step_rows(out / "rank-0")) >= count:
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    stderr = Path(f"{out}.stderr").read_text(errors="replace")
    raise AssertionError(f"no {count} steps in {out}; status {process.poll()}; stderr:\n{stderr}")


def line_of(path: Path, fragment: str) -> int:
    """Number of the first line of `path` that holds `fragment`."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if fragment in line:
            return number
    raise AssertionError(f"{fragment!r} is not in {path}")


def lines_of_function(path: Path, name: str) -> range:
    """The lines of function `name` in `path`, by its syntax tree."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    raise AssertionError(f"no function {name} in {path}")
