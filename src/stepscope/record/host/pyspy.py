"""py-spy beside the run: one sampler per Python process and segment of a few seconds, never around the command.

py-spy writes nothing before it ends, so a long recording is cut into segments; a kill loses the current one at most.
Each writes a Chrome trace, which alone tells when it met a stack; it is converted here to raw stacks and their times.
Samplers run in our own session with SIGTERM and SIGHUP ignored, are stopped by SIGINT, and end by themselves when
their time is over or their process is gone. We find the children, not py-spy: its `--subprocesses` reads all of /proc
ten times a second, which alone cost 1.8 % of a core on a machine with 75 processes, more than 20 samples a second do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stepscope.record.agent.journal import append_line
from stepscope.record.agent.masking import mask_argv
from stepscope.record.host.hardware import ROOT, read_text
from stepscope.record.host.pyspy_stacks import (
    Counted,
    ThreadHistory,
    UnreadableTraceError,
    count,
    read_trace,
    remove,
    write_segment,
)

FALLBACK_MARKER = "sampler-fallback"
_REFUSED = re.compile(
    r"permission denied|operation not permitted|os error 1\b|os error 13\b|eperm|eacces", re.IGNORECASE
)
# A sampled process costs about 1 % of a core at 20 Hz. With more loader workers than this, the first stand for all.
MOST_SAMPLED = 24
_REFUSALS_TO_GIVE_UP = 3  # a child may still be on its way to allow it
_FAILURES_TO_GIVE_UP = 6
_RETRY_SECONDS = 0.4
_LONGEST_RETRY_SECONDS = 5.0
_PROBE_SECONDS = 3.0
_WRITING_SECONDS = 0.02
_LOOK_SECONDS = 1.0  # between looks at a sampled process's threads
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
    match = re.search(r"\d+\.\d+\S*", output_of([program, "--version"], _PROBE_SECONDS) or "")
    return match[0] if match else None


def output_of(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> str | None:
    """What a program prints; None where it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, env=environ, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def mark_fallback(host_dir: Path, time_ns: int, reason: str) -> None:
    """Have the agents take stacks from inside."""
    append_line(str(host_dir / FALLBACK_MARKER), {"time_ns": time_ns, "reason": reason})


def look_into(program: str, pid: int) -> str | None:
    """Have py-spy read `pid` once: what it says where that does not work. `record` hides why it fails; a dump tells."""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "-p", str(pid)],
            capture_output=True,
            timeout=_PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy cannot be run: {error}"
    return done.stderr.decode("utf-8", "replace") or "?" if done.returncode else None


IN_CONTAINER = "in a container add --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
_CAP_SYS_PTRACE = 19
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True)
class Rights:
    """Who asks for what. `owner` is the user id of the process, None where it cannot be seen."""

    owner: int | None
    user: int
    capability: bool | None  # CAP_SYS_PTRACE
    yama: int | None  # of kernel.yama.ptrace_scope: 1 parents, 2 administrators, 3 nobody; None: no such restriction


def rights(pid: int, root: Path = ROOT) -> Rights:
    """What stands in the way of looking into a process, as this one sees it."""
    yama = read_text(root / "proc/sys/kernel/yama/ptrace_scope")
    owner = re.search(r"^Uid:\s*(\d+)", read_text(root / f"proc/{pid}/status") or "", re.MULTILINE)
    effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return Rights(
        owner=int(owner[1]) if owner else None,
        user=os.geteuid(),
        capability=bool(int(effective[1], 16) >> _CAP_SYS_PTRACE & 1) if effective else None,
        yama=int(yama) if yama is not None and yama.isdecimal() else None,
    )


def allow_tracing() -> Callable[[], None]:
    """What to call in a child between fork and exec, so that py-spy, its sibling, may look into it.

    Everything it needs is looked up before the fork. Without Yama the kernel refuses the request and nothing is lost.
    The permission outlives exec, not another fork.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    zero = ctypes.c_ulong(0)

    def allow() -> None:
        if prctl is not None:
            prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, zero, zero, zero)

    return allow


@dataclass
class _Segment:
    number: int
    started_ns: int
    deadline: float
    spies: list[Spy]
    interrupted_ns: int | None = None


Chain = Sequence[tuple[int, Sequence[str]]]  # (pid, argv) of a process's ancestors below the root, then its own


@dataclass
class Sampler:
    """Runs segment after segment; `poll` never blocks and is called several times a second.

    `targets` yields the processes to sample, most important first, and `chain` their ancestry for the raw file.
    `write` takes the lines of stacks.jsonl, `give_up` the reason when nothing can be sampled here. `native` frames cost
    a pause of the process for every sample.
    """

    program: str
    root: int
    folder: Path
    rate_hz: float
    segment_seconds: float
    now_ns: Callable[[], int]
    write: Callable[[Mapping[str, Any]], None]
    give_up: Callable[[str], None]
    targets: Callable[[], Sequence[int]]
    chain: Callable[[int], Chain]
    native: bool = False
    active: bool = True

    def __post_init__(self) -> None:
        self.rate_hz = max(1, round(self.rate_hz))
        self._segment: _Segment | None = None
        self._next_number = 0
        self._not_before: dict[int, float] = {}  # pid -> monotonic seconds of the next try
        self._failures: dict[int, int] = {}
        self._refusals = 0
        self._succeeded = False
        self._looked = 0.0  # monotonic seconds

    def poll(self) -> None:
        """Notice samplers that have ended, start those for new processes, close a segment that is due."""
        segment, ended = self._segment, False
        if segment is not None:
            if time.monotonic() >= segment.deadline:
                self.cut()
            for spy in segment.spies:
                if spy.text is None and spy.collect(self.now_ns):
                    self._judge(spy)
            ended = segment.interrupted_ns is not None and all(spy.text is not None for spy in segment.spies)
        if ended:
            self._segment = None
        if self.active and (self._segment is None or self._segment.interrupted_ns is None):
            self._start_missing()
        if ended and segment is not None:
            self._close(segment)  # the next one samples meanwhile
        self._look(_LOOK_SECONDS)

    def seconds_until_due(self) -> float:
        """When `poll` should be called next; short while a segment is being written, so that the gap stays short."""
        segment = self._segment
        if segment is None:
            return _RETRY_SECONDS
        return _WRITING_SECONDS if segment.interrupted_ns is not None else max(0.0, segment.deadline - time.monotonic())

    def cut(self) -> None:
        """End the current segment now, so that its samples are on disk; the next one follows at once."""
        segment = self._segment
        if segment is None or segment.interrupted_ns is not None:
            return
        self._look(0.0)
        segment.interrupted_ns = self.now_ns()
        for spy in segment.spies:
            if spy.process.poll() is None:
                spy.process.send_signal(signal.SIGINT)

    def stop(self, timeout: float) -> None:
        """End sampling and wait for the last segment to be written, `timeout` seconds at most."""
        self.active = False
        segment, deadline = self._segment, time.monotonic() + timeout
        if segment is None:
            return
        self.cut()
        for spy in segment.spies:
            try:
                spy.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                spy.process.kill()
                spy.process.wait()
            spy.collect(self.now_ns)
        self._segment = None
        self._close(segment)

    def _start_missing(self) -> None:
        now = time.monotonic()
        watched = {spy.pid for spy in self._segment.spies if spy.text is None} if self._segment else set()
        for pid in list(self.targets())[:MOST_SAMPLED]:
            due = self.active and pid not in watched and now >= self._not_before.get(pid, 0.0)
            if due and os.path.exists(f"/proc/{pid}"):
                if self._segment is None:
                    self._segment = _Segment(self._next_number, self.now_ns(), now + self.segment_seconds, [])
                    self._next_number += 1
                self._start(pid, self._segment)

    def _start(self, pid: int, segment: _Segment) -> None:
        path = self.folder / f"stacks-{segment.number}.{len(segment.spies)}.part"
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the sampler
        longest = max(1, round(self.segment_seconds * _DEAD_MAN_FACTOR))
        stopped = "--native" if self.native else "--nonblocking"  # native frames are unwound of a process at rest only
        command = f"record --pid {pid} --idle {stopped} --full-filenames --threads --format chrometrace".split()
        command += f"--rate {self.rate_hz} --duration {longest} --output".split()
        spawned_ns = self.now_ns()
        try:
            process = subprocess.Popen(
                [self.program, *command, str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        except OSError as error:
            output.close()
            self._end(f"py-spy cannot be run: {error.strerror}")
            return
        segment.spies.append(Spy(pid, process, output, path, spawned_ns))
        segment.spies[-1].look(spawned_ns)

    def _look(self, pause_seconds: float) -> None:
        now = time.monotonic()
        if self._segment is None or now < self._looked + pause_seconds:
            return
        self._looked, now_ns = now, self.now_ns()
        for spy in self._segment.spies:
            if spy.text is None:
                spy.look(now_ns)

    def _close(self, segment: _Segment) -> None:
        path = self.folder / f"stacks-{segment.number}.raw"
        wall_minus_run_ns = time.time_ns() - self.now_ns()
        parts: list[Counted] = []
        messages: list[str] = []  # of those that failed
        errors = 0
        for spy in segment.spies:
            if spy.counts is None:
                message = first_line(spy.text or "")
                messages += [message] if is_refusal(message) else []
                continue
            try:
                parts.append(spy.convert(self.rate_hz, wall_minus_run_ns, process_prefix(self.chain(spy.pid))))
            except UnreadableTraceError as error:
                messages.append(str(error))
                continue
            errors += spy.counts[1]
        written, times = write_segment(path, parts) if parts else (False, None)
        # When the last sampler stopped: it takes one more sample after it was told to.
        told_ns = segment.interrupted_ns or self.now_ns()
        end_ns = max([told_ns, *(part.start_ns + part.last_us * 1000 for part in parts)])
        for spy in segment.spies:
            remove(spy.path)
        if not written and not messages:
            return  # too early, or the process had just ended
        self.write(
            {
                "segment": segment.number, "file": path.name, "source": "py-spy", "pid": self.root,
                "start_ns": segment.started_ns, "end_ns": end_ns,
                "rate_hz": float(self.rate_hz), "idle": True, "blocking": self.native,
                "samples": sum(sum(part.counts) for part in parts) if written else None,
                "errors": errors if written else None,
                "status": "ok" if written else "failed", "message": messages[0] if messages else None,
                **({"times": times} if times is not None else {}),
            }
        )  # fmt: skip

    def _judge(self, spy: Spy) -> None:
        if spy.counts is not None:
            self._succeeded = True
            self._failures.pop(spy.pid, None)
            return
        tries = self._failures[spy.pid] = self._failures.get(spy.pid, 0) + 1
        self._not_before[spy.pid] = time.monotonic() + min(_RETRY_SECONDS * 1.5**tries, _LONGEST_RETRY_SECONDS)
        if self._succeeded or not os.path.exists(f"/proc/{spy.pid}"):
            return
        refused = is_refusal(spy.text or "")
        self._refusals += refused
        # The command itself has allowed it, so trying again is no use; a child may still be on its way to allow it.
        final = refused and (spy.pid == self.root or self._refusals >= _REFUSALS_TO_GIVE_UP)
        if final or tries >= _FAILURES_TO_GIVE_UP:
            self._end(first_line(spy.text or ""))

    def _end(self, reason: str) -> None:
        if self.active:
            self.active = False
            self.cut()
            self.give_up(reason)


def is_refusal(message: str) -> bool:
    return bool(_REFUSED.search(message))


def process_prefix(chain: Chain) -> str:
    """`process PID:"CMDLINE";` per process, secrets masked, without the line breaks that would split a record."""
    texts = [(pid, " ".join(mask_argv(list(argv))).replace("\n", " ")) for pid, argv in chain]
    return "".join(f'process {pid}:"{text}";' for pid, text in texts)


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.replace("py-spy>", "").splitlines() if line.strip()]
    return lines[0][:300] if lines else "py-spy ended without a word"


_RESULT = re.compile(r"Samples: (\d+) Errors: (\d+)")
# From the call that starts py-spy until its clock starts: measured 0.3 to 2 ms; and what it takes to write its file.
_LOADING_NS = 1_500_000
_WRITING_NS_PER_BYTE = 5


@dataclass
class Spy:
    """The child process; `output` is what it says, `path` what it writes. Moments are on the run's clock."""

    pid: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    path: Path
    spawned_ns: int
    text: str | None = None  # what it said, once it has ended
    ended_ns: int = 0

    def __post_init__(self) -> None:
        self._seen_ns: dict[int, int] = {}  # thread -> when it was last there
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Note the threads there are; nothing where the process is gone."""
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{self.pid}/task")
            self._looked_ns = now_ns
            self._seen_ns.update((int(name), now_ns) for name in names if name.isdecimal())

    def collect(self, now_ns: Callable[[], int]) -> bool:
        """Whether it has ended; fetches its words the first time."""
        if self.text is None and self.process.poll() is not None:
            self.ended_ns = now_ns()
            self.output.seek(0)
            self.text = self.output.read(65536).decode("utf-8", "replace")
            self.output.close()
        return self.text is not None

    @property
    def counts(self) -> tuple[int, int] | None:
        """(samples, errors) as it reported them, None when it failed."""
        result = _RESULT.search(self.text or "")
        return (int(result[1]), int(result[2])) if result and self.path.exists() else None

    def start_ns(self, last_us: int, wall_minus_run_ns: int) -> int:
        """When its clock started, on the run's clock, by that clock's last reading: 2 ms off at most on a free core.

        A busy machine may have held it up while it loaded; then its file, written right after that last reading, is
        late as well. The file system's own clock is believed only between the two moments we have seen ourselves.
        """
        with contextlib.suppress(OSError):
            file = self.path.stat()
            written_ns = file.st_mtime_ns - wall_minus_run_ns - file.st_size * _WRITING_NS_PER_BYTE
            latest = self.ended_ns - last_us * 1000
            return min(max(self.spawned_ns + _LOADING_NS, written_ns - last_us * 1000), max(latest, self.spawned_ns))
        return self.spawned_ns + _LOADING_NS

    def convert(self, rate_hz: float, wall_minus_run_ns: int, prefix: str) -> Counted:
        """What it has sampled; `prefix` names its process. Raises `UnreadableTraceError`."""
        trace = read_trace(self.path)
        start_ns = self.start_ns(trace.last_us, wall_minus_run_ns)
        # Whether threads can be told by the numbers that the process has for them; not in another pid namespace.
        known = any(thread.tid in self._seen_ns for thread in trace.threads)

        def last_seen_us(thread: ThreadHistory) -> int | None:
            met_ns = start_ns + thread.starts_us[0] * 1000
            if thread.tid is None or not known or self._looked_ns is None or met_ns > self._looked_ns:
                return None
            seen_ns = self._seen_ns.get(thread.tid, met_ns)
            return None if seen_ns == self._looked_ns else (seen_ns - start_ns) // 1000  # None: it lives on

        samples = self.counts[0] if self.counts else 0
        return count(trace, samples, rate_hz=rate_hz, last_seen_us=last_seen_us, prefix=prefix, start_ns=start_ns)
