"""py-spy beside the run: one sampler process per segment of a few seconds, never around the command.

py-spy writes nothing before it ends, so a long recording is cut into segments; a kill loses the current one at most.
Each is started in this process's own session with SIGTERM and SIGHUP ignored, is stopped by SIGINT, and ends by itself
when its time is over or the command is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stepscope.record.agent.masking import mask_argv

FALLBACK_MARKER = "sampler-fallback"
_REFUSED = re.compile(
    r"permission denied|operation not permitted|os error 1\b|os error 13\b|eperm|eacces", re.IGNORECASE
)
_RESULT = re.compile(r"Samples: (\d+) Errors: (\d+)")
# `process PID:"CMDLINE"` as py-spy writes it: unescaped, so it ends where the grammar can go on
_COMMAND = re.compile(r'(?<=:")(.*?)(?="(?:;process \d+:"|;thread \())', re.DOTALL)
_REFUSALS_TO_GIVE_UP = 3  # a child may still be on its way to allow it
_FAILURES_TO_GIVE_UP = 6
_RETRY_SECONDS = 0.4
_LONGEST_RETRY_SECONDS = 5.0
_PROBE_SECONDS = 3.0
_WRITING_SECONDS = 0.02
_DEAD_MAN_FACTOR = 3.0  # a segment whose supervisor was killed still ends by itself


def find_pyspy(environ: Mapping[str, str] | None = None) -> str | None:
    """The sampler to use: `STEPSCOPE_PYSPY`, the tool's own environment, then PATH."""
    environment = os.environ if environ is None else environ
    named = environment.get("STEPSCOPE_PYSPY")
    if named:
        return shutil.which(named)
    own = shutil.which("py-spy", path=os.path.dirname(sys.executable))
    return own or shutil.which("py-spy", path=environment.get("PATH"))


def pyspy_version(program: str) -> str | None:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\d+\.\d+\S*", done.stdout.decode("utf-8", "replace"))
    return match[0] if match else None


@dataclass(frozen=True)
class Look:
    """One try to read a process: `works`, or `refused` for lack of a right, or neither (no Python yet, or unknown)."""

    works: bool
    refused: bool
    message: str


def look_into(program: str, pid: int) -> Look:
    """Have py-spy read `pid` once. `record --subprocesses` hides why it fails; a single dump tells."""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "-p", str(pid)],
            capture_output=True,
            timeout=_PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Look(works=False, refused=False, message=f"py-spy cannot be run: {error}")
    text = done.stderr.decode("utf-8", "replace")
    works = done.returncode == 0
    return Look(works=works, refused=not works and bool(_REFUSED.search(text)), message=_first_line(text))


@dataclass
class _Segment:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    path: Path
    started_ns: int
    deadline: float
    interrupted_ns: int | None = None


class Sampler:
    """Runs segment after segment; `poll` never blocks and is called several times a second.

    `write` takes the lines of stacks.jsonl, `give_up` the reason when attaching is refused for good. `commands` yields
    the argv of every process of the tree, `suspects` the pids that should be readable Python processes.
    """

    def __init__(
        self,
        program: str,
        root: int,
        folder: Path,
        *,
        rate_hz: float,
        segment_seconds: float,
        now_ns: Callable[[], int],
        write: Callable[[Mapping[str, Any]], None],
        give_up: Callable[[str], None],
        commands: Callable[[], Iterable[Sequence[str]]],
        suspects: Callable[[], Iterable[int]],
    ) -> None:
        self._program, self._root, self._folder = program, root, folder
        self._rate_hz, self._segment_seconds = rate_hz, segment_seconds
        self._now_ns, self._write, self._give_up = now_ns, write, give_up
        self._commands, self._suspects = commands, suspects
        self._segment: _Segment | None = None
        self._next_number = 0
        self._next_start = 0.0
        self._failures = self._refusals = 0
        self.active = True

    def poll(self) -> None:
        """Collect a segment that has ended, cut one that is due, start the next."""
        now = time.monotonic()
        segment = self._segment
        if segment is not None:
            if segment.process.poll() is not None:
                self._collect(segment)
            elif now >= segment.deadline and segment.interrupted_ns is None:
                self._interrupt(segment)
        if self._segment is None and self.active and time.monotonic() >= self._next_start:
            self._start()

    def seconds_until_due(self) -> float:
        """When `poll` should be called next; short while a segment is being written, so that the gap stays short."""
        segment, now = self._segment, time.monotonic()
        if segment is None:
            return max(0.0, self._next_start - now) if self.active else _LONGEST_RETRY_SECONDS
        return _WRITING_SECONDS if segment.interrupted_ns is not None else max(0.0, segment.deadline - now)

    def cut(self) -> None:
        """End the current segment now, so that its samples are on disk; the next one follows at once."""
        if self._segment is not None and self._segment.interrupted_ns is None:
            self._interrupt(self._segment)

    def stop(self, timeout: float) -> None:
        """End sampling and wait for the last segment to be written, `timeout` seconds at most."""
        self.active = False
        segment = self._segment
        if segment is None:
            return
        if segment.process.poll() is None:
            self._interrupt(segment)
        try:
            segment.process.wait(timeout)
        except subprocess.TimeoutExpired:
            segment.process.kill()
            segment.process.wait()
        self._collect(segment)

    def _start(self) -> None:
        number = self._next_number
        path = self._folder / f"stacks-{number}.raw"
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the segment
        longest = max(1, round(self._segment_seconds * _DEAD_MAN_FACTOR))
        command = [self._program, "record", "--pid", str(self._root), "--subprocesses", "--idle", "--nonblocking"]
        command += ["--full-filenames", "--threads", "--format", "raw", "--rate", f"{max(1, round(self._rate_hz))}"]
        command += ["--duration", str(longest), "--output", f"{path}.part"]
        started_ns = self._now_ns()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except OSError as error:
            output.close()
            self._refuse(f"py-spy cannot be run: {error.strerror}")
            return
        self._next_number += 1
        deadline = time.monotonic() + self._segment_seconds
        self._segment = _Segment(number, process, output, path, started_ns, deadline)

    def _interrupt(self, segment: _Segment) -> None:
        segment.interrupted_ns = self._now_ns()
        segment.process.send_signal(signal.SIGINT)

    def _collect(self, segment: _Segment) -> None:
        self._segment = None
        segment.output.seek(0)
        text = segment.output.read(65536).decode("utf-8", "replace")
        segment.output.close()
        result = _RESULT.search(text)
        written = result is not None and publish(segment.path, self._commands())
        row: dict[str, Any] = {
            "segment": segment.number,
            "file": segment.path.name,
            "source": "py-spy",
            "pid": self._root,
            "start_ns": segment.started_ns,
            "end_ns": segment.interrupted_ns or self._now_ns(),
            "rate_hz": float(max(1, round(self._rate_hz))),
            "idle": True,
            "blocking": False,
            "samples": int(result[1]) if result else None,
            "errors": int(result[2]) if result else None,
            "status": "ok" if written else "failed",
            "message": None if written else _first_line(text),
        }
        if written:
            self._failures = self._refusals = 0
            self._next_start = 0.0
            self._write(row)
        elif self._failed(text):
            self._write(row)

    def _failed(self, text: str) -> bool:
        """Wait before the next try, longer each time; returns whether the failure is worth a line."""
        self._failures += 1
        self._next_start = time.monotonic() + min(_RETRY_SECONDS * 1.5**self._failures, _LONGEST_RETRY_SECONDS)
        if _REFUSED.search(text):
            self._refuse(_first_line(text))
            return True
        for pid in self._suspects():
            look = look_into(self._program, pid)
            if look.works:
                self._failures = 0  # it came too early, or that process is new
            elif look.refused and pid == self._root:
                self._end(look.message)  # the command itself has allowed it, so trying again is no use
            elif look.refused:
                self._refuse(look.message)
            elif self._failures >= _FAILURES_TO_GIVE_UP:
                self._end(look.message)  # a Python it does not know
            else:
                continue
            return not look.works
        return False

    def _refuse(self, reason: str) -> None:
        self._refusals += 1
        if self._refusals >= _REFUSALS_TO_GIVE_UP:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.active:
            self.active = False
            self._give_up(reason)


def publish(path: Path, commands: Iterable[Sequence[str]]) -> bool:
    """Move `path.part` to `path` with secrets in command lines masked; False when there is no such file.

    `commands` are the argv known from the process tree: masking needs the single arguments, and py-spy joins them.
    """
    part = Path(f"{path}.part")
    try:
        text = part.read_text(encoding="utf-8", errors="surrogateescape")
        masked = mask_raw(text, commands)
        if masked != text:
            part.write_text(masked, encoding="utf-8", errors="surrogateescape")
        os.replace(part, path)
    except OSError:
        return False
    return True


def mask_raw(text: str, commands: Iterable[Sequence[str]]) -> str:
    """py-spy's raw `text` with the values of secret-looking arguments in command lines replaced."""
    known = {" ".join(argv): " ".join(mask_argv(list(argv))) for argv in commands}

    def masked(match: re.Match[str]) -> str:
        command = match[1]
        if command not in known:
            known[command] = " ".join(mask_argv(command.split(" ")))
        return known[command]

    return _COMMAND.sub(masked, text)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.replace("py-spy>", "").splitlines() if line.strip()]
    return lines[0][:300] if lines else "py-spy ended without a word"
