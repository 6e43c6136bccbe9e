"""Start the command, record beside it, and end as it ended.

The command is our child with our own standard streams, in our process group and session, with the signal mask we were
started with. What it is given besides is two environment variables; what it is told of signals is what would have
reached it without us. Telemetry and sampling live in a process of their own (`telemetry`).

Knobs on the launch side: variables of the command's environment, and flags of the script it starts.

Arguments stay a list from here to the process: no shell sees them, so spaces and quotes in a value arrive as given.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stepscope
from stepscope.errors import EnvironmentRefusal
from stepscope.record.agent.config import Clock, epoch_offset_ns
from stepscope.record.agent.journal import LastWord
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX, launched
from stepscope.record.agent.knobs.launched import POSITIONAL_FROM_HERE, is_short_with_number, looks_like_flag
from stepscope.record.host.command import CommandNotStarted, find_script, first_argument, resolve_executable
from stepscope.record.host.folder import (
    Manifest,
    RunFolder,
    claim_folder,
    compress_traces,
    first_manifest,
    own_rank_folders,
    shell_status,
)
from stepscope.record.host.hardware import page_fault_facts
from stepscope.record.host.jsonlines import JsonLinesTail, read_json
from stepscope.record.host.options import FALLBACK_RATE_HZ, SEGMENT_SECONDS, RecordOptions
from stepscope.record.host.processes import ignores, read_stat
from stepscope.record.host.pyspy import FALLBACK_MARKER, allow_tracing, find_pyspy, mark_fallback
from stepscope.record.host.scheduler import detect_scheduler
from stepscope.record.host.signals import ENDINGS, BlockedSignals, StepLimit
from stepscope.record.host.telemetry import LOST as TELEMETRY_LOST
from stepscope.record.host.telemetry import TelemetryConfig
from stepscope.schema import Knob

if TYPE_CHECKING:
    from stepscope.record.host.openmetrics import Endpoint

RECORDER_LOG = "recorder.log"  # what the telemetry process had to complain about; absent when nothing
_POLL_SECONDS = 0.05  # with --max-steps only; otherwise we sleep until a signal comes
_LEISURE_NICENESS = 10  # of what is done beside the command: a tenth of its share of a core where there is no other
_AGAIN_SECONDS = 1.0  # once the limit is reached
_IDLE_SECONDS = 60.0
_STOP_SECONDS = 4.0  # for telemetry to write its last segment
_STOP_MARGIN_SECONDS = 0.5  # beyond what it was given
_QUICK_STOP_SECONDS = 1.2  # after SIGTERM a scheduler leaves little time


@dataclass(frozen=True)
class Outcome:
    """How the command ended. `status` is the shell's; `hurried` means a scheduler wants us gone: skip the report."""

    run: Path
    host_dir: Path
    status: int
    hurried: bool
    problem: str | None = None


def launch(
    options: RecordOptions, *, meanwhile: Callable[[], None] | None = None, endpoint: Endpoint | None = None
) -> Outcome:
    """Run `options.command` and record it; returns when it has ended and everything is on disk.

    `meanwhile` is done beside the command, at a lower priority; nobody waits for it. At `endpoint` the process beside
    the run says how it is.

    Raises `CommandNotStarted` (126, 127), `UsageError` or `EnvironmentRefusal` before anything has started; after that
    nothing of ours is raised.
    """
    try:
        cwd = Path.cwd()
    except OSError:
        raise EnvironmentRefusal("the working directory no longer exists; change to one that does") from None
    options, environment = changed_by_knobs(options, environment_given(), cwd)
    executable = resolve_executable(options.command, environment)
    script = find_script(options.command, environment, cwd)
    now = datetime.datetime.now()
    parent, parent_started = read_stat(os.getppid()), None
    if parent is not None:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - parent.start_ticks / os.sysconf("SC_CLK_TCK")
        parent_started = datetime.datetime.fromtimestamp(round(time.time() - age))
    scheduler = detect_scheduler(environment, now=now, parent_started=parent_started)
    folder = claim_folder(options.out, script.label, scheduler, now=now)
    clock = Clock(epoch_offset_ns())
    pyspy = find_pyspy(environment)
    manifest = first_manifest(
        folder.host / "manifest.json",
        options,
        script,
        scheduler,
        environ=environment,
        cwd=cwd,
        epoch_offset_ns=clock.epoch_offset_ns,
        pyspy=pyspy,
    )
    manifest.save()
    if pyspy is None:
        mark_fallback(folder.host, clock.now(), "py-spy is not installed")
    return _Launch(options, environment, executable, folder, manifest, clock, pyspy, endpoint).run(meanwhile)


@dataclass
class _Launch:
    options: RecordOptions
    environ: dict[str, str]
    executable: str
    folder: RunFolder
    manifest: Manifest
    clock: Clock
    pyspy: str | None
    endpoint: Endpoint | None
    problem: str | None = None

    def __post_init__(self) -> None:
        self.last_word = LastWord(str(self.folder.host))  # now: later there may be no room for it

    def run(self, meanwhile: Callable[[], None] | None) -> Outcome:
        with BlockedSignals() as signals:
            started_ns = self.clock.now()
            child = self._start(signals)
            telemetry = self._start_telemetry(child.pid)
            self.manifest.started(started_ns, child.pid)
            describe = threading.Thread(target=self.manifest.describe, args=(self.pyspy,), daemon=True)
            describe.start()

            def at_leisure(do: Callable[[], None]) -> None:
                with contextlib.suppress(OSError, AttributeError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEISURE_NICENESS)
                with contextlib.suppress(Exception):  # it goes wrong again where it is needed, and is told then
                    do()

            if meanwhile is not None:
                threading.Thread(target=at_leisure, args=(meanwhile,), daemon=True).start()
            self._watch(child, signals, telemetry)
            ended_ns = self.clock.now()
            hurried = signals.hurried()
            self._stop_telemetry(telemetry, _QUICK_STOP_SECONDS if hurried else _STOP_SECONDS)
            if not hurried:
                ranks = own_rank_folders(self.folder.run, self.folder.host)
                compress_traces(ranks)
                told = ((read_json(folder / "rank.json") or {}).get("threads") for folder in ranks)
                # of torch's operators; None where nothing trained, and without the system's counts of faults
                threads = max((each for each in told if isinstance(each, int)), default=None)
                self.manifest.values["page_faults"] = page_fault_facts(threads)
            describe.join(0.2 if hurried else 5.0)
            self.manifest.values["problems"] = [self.problem] if self.problem else []
            given_up = JsonLinesTail(self.folder.host / FALLBACK_MARKER).read()
            if given_up:
                self.manifest.values["sampler"] |= {"source": "agent", "reason": given_up[0].get("reason")}
            self.manifest.ended(ended_ns, child.returncode)
            if self.manifest.problem:
                ending = {name: self.manifest.values[name] for name in ("ended_ns", "exit")}
                problems = [self.manifest.problem, *self.manifest.values["problems"]]
                self.last_word.say({**ending, "problems": [problem[:500] for problem in problems]})
            with contextlib.suppress(OSError):
                log = self.folder.host / RECORDER_LOG
                if log.stat().st_size == 0:
                    log.unlink()
        return Outcome(
            run=self.folder.run,
            host_dir=self.folder.host,
            status=shell_status(child.returncode),
            hurried=signals.hurried(),
            problem=self.problem or self.manifest.problem,
        )

    def _start(self, signals: BlockedSignals) -> subprocess.Popen[bytes]:
        environment = child_environment(
            self.environ,
            {
                "run": str(self.folder.run),
                "host_dir": str(self.folder.host),
                "host": os.uname().nodename,
                "epoch_offset_ns": self.clock.epoch_offset_ns,
                "window": asdict(self.options.window),
                "max_steps": self.options.max_steps,
                "knobs": [[knob.knob, knob.value] for knob in self.options.knobs],
                "seed": self.options.seed,
                "watch": self.options.watch,
                "sampler_hz": int(max(1.0, min(self.options.rate_hz, FALLBACK_RATE_HZ))),
                "faults": self.environ.get("STEPSCOPE_FAULTS"),
            },
        )
        allow = allow_tracing()

        def prepare() -> None:
            """In the child between fork and exec; everything it needs is looked up before the fork."""
            allow()
            if signals.children_were_ignored:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals.original)

        try:
            return subprocess.Popen(
                list(self.options.command),
                executable=self.executable,
                env=environment,
                close_fds=False,  # the command inherits what we inherited
                preexec_fn=prepare,
            )
        except OSError as error:
            self.folder.discard()
            name = self.options.command[0]
            status = 127 if isinstance(error, FileNotFoundError) else 126
            raise CommandNotStarted(f"{name} cannot be started: {error.strerror}", status) from None

    def _start_telemetry(self, root: int) -> subprocess.Popen[bytes] | None:
        host, offset_ns = str(self.folder.host), self.clock.epoch_offset_ns
        config = TelemetryConfig(host, root, offset_ns, self.options.rate_hz, SEGMENT_SECONDS, self.pyspy)
        environment, kept = without_user_code(os.environ), tuple[int, ...]()
        if self.endpoint is not None:
            from stepscope.record.host.openmetrics import TOKEN_VARIABLE

            descriptor = self.endpoint.socket.fileno()
            config = replace(config, metrics_descriptor=descriptor)
            # other users see arguments, but no environment
            environment, kept = {**environment, TOKEN_VARIABLE: self.endpoint.token}, (descriptor,)
        try:
            with (self.folder.host / RECORDER_LOG).open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "stepscope.record.host.telemetry", json.dumps(asdict(config))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd=str(Path(package_folder()).parent),  # `-m` puts the working directory on the path
                    env=environment,
                    start_new_session=True,
                    pass_fds=kept,
                )
        except OSError as error:
            self.problem = f"no telemetry and no stacks were recorded: {error.strerror}"
            mark_fallback(self.folder.host, self.clock.now(), self.problem)
            return None
        finally:
            if self.endpoint is not None:
                self.endpoint.socket.close()

    def _watch(
        self, child: subprocess.Popen[bytes], signals: BlockedSignals, telemetry: subprocess.Popen[bytes] | None
    ) -> None:
        """Until the command has ended: hand signals on, and end it after the steps it was allowed."""
        limit = None
        if self.options.max_steps is not None:
            run, host = self.folder.run, self.folder.host
            limit = StepLimit(host, lambda: own_rank_folders(run, host), lambda: interrupt_as_terminal(child.pid))
        while child.poll() is None:
            soon = _POLL_SECONDS if limit is not None and limit.pending else _AGAIN_SECONDS
            number = signals.wait(child, _IDLE_SECONDS if limit is None else soon)
            if number in ENDINGS:
                _tell(telemetry, "cut")  # what was sampled so far survives, should everything be killed
            if limit is not None:
                limit.look()

    def _stop_telemetry(self, telemetry: subprocess.Popen[bytes] | None, seconds: float) -> None:
        if telemetry is None:
            return
        _tell(telemetry, f"stop {seconds:g}")
        try:
            status = telemetry.wait(seconds + _STOP_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            telemetry.kill()
            status = telemetry.wait()
        if telemetry.stdin is not None:
            with contextlib.suppress(OSError):
                telemetry.stdin.close()
        if status != 0:
            why = f", their process ended early; its words are in {self.folder.host / RECORDER_LOG}"
            if status == TELEMETRY_LOST:
                why = ": the disk took no more of them"
            elif status < 0:
                why = f": their process was killed by signal {-status}"
            self.problem = f"telemetry and stacks are incomplete{why}"


def environment_given() -> dict[str, str]:
    """Our environment without the locale that Python itself puts in where there is none (PEP 538)."""
    environment = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            given = file.read()
    except OSError:
        return environment
    if environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8") and not re.search(rb"(^|\0)LC_CTYPE=", given):
        del environment["LC_CTYPE"]
    return environment


def child_environment(environ: Mapping[str, str], configuration: Mapping[str, Any]) -> dict[str, str]:
    """The user's environment and what brings the agent into Python children."""
    bootstrap = os.path.join(package_folder(), "record", "agent", "bootstrap")
    given = environ.get("PYTHONPATH")
    others = [part for part in given.split(os.pathsep) if part != bootstrap] if given else []
    return {
        "KINETO_LOG_LEVEL": "99",  # or torch's profiler writes to the user's stderr
        **environ,
        "PYTHONPATH": os.pathsep.join([bootstrap, *others]),
        "STEPSCOPE_RECORD": json.dumps(configuration),
    }


def without_user_code(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python does not import the `sitecustomize` that the user has on PYTHONPATH."""
    first = os.path.join(package_folder(), "record", "host", "without_user_code")
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (first, environ.get("PYTHONPATH"))))}


def package_folder() -> str:
    return os.path.dirname(os.path.abspath(stepscope.__file__))


def interrupt_as_terminal(root: int) -> None:
    """SIGINT to the command and those of its descendants that share its process group, once each; SIGTERM to one
    that ignores SIGINT.

    Never to the group itself: it is ours too, and a shell, make or a test runner may be in it.
    """
    import psutil

    try:
        group, below = os.getpgid(root), psutil.Process(root).children(recursive=True)
    except (psutil.Error, OSError):
        return  # it has ended
    for pid in (root, *sorted(process.pid for process in below)):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) == group:
                os.kill(pid, signal.SIGTERM if ignores(pid, signal.SIGINT) else signal.SIGINT)


def _tell(telemetry: subprocess.Popen[bytes] | None, command: str) -> None:
    if telemetry is not None and telemetry.stdin is not None:
        with contextlib.suppress(OSError):  # it has died; its log says why
            telemetry.stdin.write(command.encode() + b"\n")
            telemetry.stdin.flush()


ALLOCATOR, HOST_ALLOCATOR = "allocator.conf", "host.allocator"


def changed_by_knobs(
    options: RecordOptions, environ: Mapping[str, str], cwd: Path
) -> tuple[RecordOptions, dict[str, str]]:
    """`options` with the command its knobs ask for, and the environment to start it in, seed included."""
    environment = dict(environ)
    if options.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(options.seed))  # read when Python starts, too early for the agent
    values = {knob.knob: knob.value for knob in options.knobs}
    if HOST_ALLOCATOR in values:
        environment |= launched.host_allocator_variables(values[HOST_ALLOCATOR], environment.get("LD_PRELOAD"))
    environment.update((knob.knob, knob.value) for knob in with_prefix(options.knobs, ENVIRONMENT_PREFIX))
    if ALLOCATOR in values:
        environment |= launched.allocator_variables(values[ALLOCATOR])
    return replace(options, command=with_arguments(options.command, options.knobs, environment, cwd)), environment


def with_arguments(
    command: tuple[str, ...], knobs: Sequence[Knob], environ: Mapping[str, str], cwd: Path
) -> tuple[str, ...]:
    """`command` with the flags of its script that `knobs` set."""
    arguments = with_prefix(knobs, ARGUMENT_PREFIX)
    start = first_argument(command, environ, cwd) if arguments else len(command)
    words = command[start:]
    for knob in arguments:
        words = with_argument(words, knob.knob, knob.value)
    return (*command[:start], *words)


def with_argument(words: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """The arguments of a script with `flag` set to `value`: replaced wherever it is given, else appended.

    An empty `value` is a flag that takes none. A `flag` without dashes is the left side of a `name=value` argument.
    Words after a lone `--` are left alone.
    """
    end = words.index(POSITIONAL_FROM_HERE) if POSITIONAL_FROM_HERE in words else len(words)
    before, after = list(words[:end]), words[end:]
    changed: list[str] = []
    found = False
    while before:
        word = before.pop(0)
        joined, apart = word.startswith(flag + "="), word == flag and flag.startswith("-")
        if not joined and not apart and not is_short_with_number(word, flag):
            changed.append(word)
            continue
        found = True
        if apart and value and before and not looks_like_flag(before[0]):
            before.pop(0)  # the old value
        changed += _written(flag, value, joined=joined)
    if not found:
        changed += _written(flag, value, joined=False)
    return (*changed, *after)


def _written(flag: str, value: str, *, joined: bool) -> list[str]:
    if not flag.startswith("-"):
        return [f"{flag}={value}"]
    if not value:
        return [flag]
    # A value that looks like a flag is taken for one when it stands alone.
    return [f"{flag}={value}"] if joined or looks_like_flag(value) else [flag, value]


def with_prefix(knobs: Sequence[Knob], prefix: str) -> list[Knob]:
    """Those of one kind, their names without the prefix."""
    return [Knob(knob.knob[len(prefix) :], knob.value) for knob in knobs if knob.knob.startswith(prefix)]
