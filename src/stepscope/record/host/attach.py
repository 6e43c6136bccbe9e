"""`stepscope attach`: sample a job that runs already, for a while, into a run folder.

The job is only read: py-spy looks into its processes without stopping them (unless native frames are asked for), and
nothing is injected, so there are no steps, phases or windows. What is found out beforehand is who trains: processes
with torch, numbered by the `RANK` in their environment.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pwd
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, refuse
from stepscope.record.agent.config import Clock, WindowConfig, epoch_offset_ns
from stepscope.record.agent.masking import mask_argv
from stepscope.record.host.command import find_script
from stepscope.record.host.folder import Manifest, RunFolder, claim_folder, first_manifest
from stepscope.record.host.hardware import Gpus
from stepscope.record.host.jsonlines import JsonLinesTail, write_json
from stepscope.record.host.options import DEFAULT_RATE_HZ, SEGMENT_SECONDS, RecordOptions
from stepscope.record.host.processes import Process, ProcessTree, read_command, read_executable, read_proc, read_stat
from stepscope.record.host.pyspy import (
    FALLBACK_MARKER,
    IN_CONTAINER,
    Rights,
    find_pyspy,
    first_line,
    is_refusal,
    look_into,
    rights,
)
from stepscope.record.host.scheduler import whole_number
from stepscope.record.host.signals import ENDINGS, handled
from stepscope.record.host.telemetry import Telemetry, TelemetryConfig
from stepscope.schema import RANK_SCHEMA

DEFAULT_SECONDS = 30.0
LONGEST_SECONDS = 7 * 24 * 3600.0
_STOP_SECONDS = 4.0  # for the last segment to be written
_MOST_LOOKS = 3  # processes that py-spy is tried on, before it is said that nothing can be sampled
_LAST_LOOK = 11  # of those a `ProcessTree` takes at libraries: one is enough for a process that runs already
_DESCRIBE_SECONDS = 5.0
_MOST_ENVIRONMENT = 1 << 20

Progress = Callable[[float, float], None]  # seconds sampled, seconds in all


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """One call of `stepscope attach`. `out` None means the default name in the working directory."""

    pid: int
    seconds: float = DEFAULT_SECONDS
    rate_hz: float = DEFAULT_RATE_HZ
    out: Path | None = None
    native: bool = False

    def __post_init__(self) -> None:
        refuse(
            {
                f"{self.pid} is no process id; find it with: pgrep -af python": self.pid < 1,
                f"--seconds must lie between 0 and {LONGEST_SECONDS:g}, not {self.seconds:g}": (
                    not 0 < self.seconds <= LONGEST_SECONDS
                ),
            }
        )


@dataclass(frozen=True)
class Attached:
    """What was recorded. `ended` says what ended it: "time", "interrupt" or "job"."""

    run: Path
    seconds: float
    ended: str
    problem: str | None = None


def attach(options: AttachOptions, progress: Progress | None = None) -> Attached:
    """Sample the process and everything below it; returns when the time is over, on Ctrl-C, or when the job has ended.

    Raises `UnreadableInputError` where there is no such Python process, `EnvironmentRefusal` where it may not be read,
    `UsageError` for a folder that is taken; then nothing is left behind.
    """
    program = find_pyspy()
    if program is None:
        raise EnvironmentRefusal("py-spy is not installed, and it is what reads a running process; pip install py-spy")
    tree = look_at_tree(options.pid)
    targets = tree.sampling_order()
    if not targets:
        name = read_stat(tree.root)
        raise UnreadableInputError(
            f"process {tree.root} ({name.comm if name else 'gone'}) is no Python process that could be sampled, nor is "
            "one below it; find the training's with: pgrep -af python"
        )
    said = look_into(program, targets[0])
    if said is not None and all(look_into(program, pid) is not None for pid in targets[1:_MOST_LOOKS]):
        raise refusal(targets[0], said, rights(targets[0]))
    ranks = find_ranks(tree)
    first = tree.members[next(iter(ranks.values()), options.pid)]
    environ, cwd = _environment(first.pid), _cwd(first.pid)
    argv = read_command(options.pid) or [f"process-{options.pid}"]
    script = find_script(first.argv or argv, environ, cwd)
    folder = claim_folder(options.out, script.label, None, now=datetime.datetime.now())
    clock = Clock(epoch_offset_ns())
    manifest = first_manifest(
        folder.host / "manifest.json",
        RecordOptions(command=tuple(argv), rate_hz=options.rate_hz, window=WindowConfig(mode="off")),
        script,
        None,
        environ=environ,
        cwd=cwd,
        epoch_offset_ns=clock.epoch_offset_ns,
        pyspy=program,
    )
    manifest.values["kind"] = "attach"
    manifest.values["attach"] = {"seconds": options.seconds, "native": options.native, "ended": None}
    started_ns = clock.now()
    manifest.started(started_ns, options.pid)
    for rank, pid in ranks.items():
        _write_rank(folder, manifest, rank, tree.members[pid])
    describe = threading.Thread(target=manifest.describe, args=(program,), daemon=True)
    describe.start()
    asked = (options.rate_hz, SEGMENT_SECONDS, program, options.native)
    config = TelemetryConfig(str(folder.host), options.pid, clock.epoch_offset_ns, *asked)
    ended = _sample(config, ranks, options.seconds, progress)
    describe.join(_DESCRIBE_SECONDS)
    ended_ns = clock.now()
    manifest.values["ended_ns"] = ended_ns
    manifest.values["attach"]["ended"] = ended
    manifest.save()
    problem = _check_samples(folder, options.pid)
    return Attached(folder.run, (ended_ns - started_ns) / 1e9, ended, manifest.problem or problem)


def look_at_tree(pid: int) -> ProcessTree:
    """The process and what runs below it now, with all that can be seen of each. Raises `UnreadableInputError`."""
    if not os.path.exists("/proc/self/stat"):
        raise EnvironmentRefusal("attaching needs Linux's /proc; on this system use py-spy record --pid, then hotspots")
    stat = read_stat(pid)
    if stat is None or stat.state in "ZX" or pid == os.getpid():
        raise UnreadableInputError(
            f"there is no process {pid} to attach to; find the training's with: pgrep -af python"
        )
    tree = ProcessTree(pid)
    for process in tree.discover(0):
        process.looks = _LAST_LOOK
        tree.refresh(process, math.inf)
    for process in tree.members.values():
        tree.refresh(process, 0.0)  # roles depend on those of others
    return tree


def find_ranks(tree: ProcessTree) -> dict[int, int]:
    """{rank: pid} of the processes that train, as far as it can be seen from outside.

    They are the outermost ones with torch. Their numbers are `RANK` in their environment; a single one without is 0.
    """
    training: dict[int, int | None] = {}
    for process in tree.members.values():
        if process.torch and process.python and process.role in ("root", "other", "rank"):
            environ = _environment(process.pid)
            tasks = (whole_number(environ.get("SLURM_NTASKS")) or 1) > 1
            # as torchrun, Open MPI, MPICH and SLURM give it
            names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", *(("SLURM_PROCID",) if tasks else ()))
            told = (whole_number(environ.get(name)) for name in names)
            training[process.pid] = next((number for number in told if number is not None), None)
    left_out: set[int] = set()  # children, and processes that started others which may be the ranks
    for pid, number in training.items():
        above = next((up for up, _ in reversed(tree.chain(pid)[:-1]) if up in training), None)
        if above is None or training[above] != number:
            continue
        left_out.add(pid)
        if number is None and tree.members[pid].argv != tree.members[above].argv:
            left_out.add(above)
    alone = sorted(training.keys() - left_out, reverse=True)
    found = {number: pid for pid in alone if (number := training[pid]) is not None}
    if not found and len(alone) == 1:
        return {0: alone[0]}
    return dict(sorted(found.items()))


def _write_rank(folder: RunFolder, manifest: Manifest, rank: int, process: Process) -> None:
    """rank.json of a process that trains, with what can be seen from outside; it gives the rank its name."""
    environ = _environment(process.pid)
    values = {
        "schema": RANK_SCHEMA,
        "rank": rank,
        "local_rank": whole_number(environ.get("LOCAL_RANK")),
        "world_size": whole_number(environ.get("WORLD_SIZE")),
        "attempt": whole_number(environ.get("TORCHELASTIC_RESTART_COUNT")),
        "pid": process.pid,
        "host": folder.host.name.removeprefix("host-"),
        "started_ns": manifest.values["started_ns"],
        "argv": mask_argv(list(process.argv)),
        "main_file": manifest.values["script"]["path"],
        "cwd": str(_cwd(process.pid)),
        "versions": {},
        "device": None,
        "clock": manifest.values["clock"],
    }
    try:
        (folder.run / f"rank-{rank}").mkdir()
        write_json(folder.run / f"rank-{rank}" / "rank.json", values)
    except OSError as error:
        manifest.problem = f"rank {rank} has no name: {error.strerror}"


def _check_samples(folder: RunFolder, pid: int) -> str | None:
    """What must be said of the samples; removes the folder and raises `StepscopeError` where there are none."""
    rows = JsonLinesTail(folder.host / "stacks.jsonl").read()
    messages = [str(row["message"]) for row in rows if row.get("message")]
    if any(row.get("samples") for row in rows):
        return f"not every process could be sampled: {messages[0]}" if messages else None
    given_up = JsonLinesTail(folder.host / FALLBACK_MARKER).read()
    reason = next((str(row.get("reason")) for row in (*given_up, *rows) if row.get("reason")), None)
    for rank in folder.run.glob("rank-*"):
        shutil.rmtree(rank, ignore_errors=True)
    folder.discard()
    if not os.path.exists(f"/proc/{pid}"):
        raise UnreadableInputError(f"process {pid} ended before a sample was taken; attach to one that runs longer")
    message = reason or next(iter(messages), None)
    if message is None:
        raise UnreadableInputError(f"process {pid} gave no sample in that time; sample it longer with --seconds")
    raise refusal(pid, message, rights(pid))


def _sample(config: TelemetryConfig, ranks: Mapping[int, int], seconds: float, progress: Progress | None) -> str:
    """Until the time is over, a signal asks for the end, or the last process has gone; which of them it was."""
    asked, ended = threading.Event(), "time"

    def wait(at_most: float) -> list[str]:
        """As `telemetry.Control.wait`."""
        nonlocal ended
        passed = time.monotonic() - began
        if progress is not None:
            progress(min(passed, seconds), seconds)
        if asked.is_set() or passed >= seconds or not telemetry.living():
            ended = "interrupt" if asked.is_set() else "time" if passed >= seconds else "job"
            return [f"stop {_STOP_SECONDS:g}"]
        asked.wait(max(0.0, min(at_most, seconds - passed)))
        return []

    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(Gpus())
        if threading.current_thread() is threading.main_thread():  # which alone gets signals
            stack.enter_context(handled((signal.SIGINT, *ENDINGS), lambda *_: asked.set()))
        telemetry = Telemetry(config, gpus)
        telemetry.tree.hear({"pid": pid, "folder": f"rank-{rank}"} for rank, pid in ranks.items())
        began = time.monotonic()
        telemetry.run(wait)
    return ended


def _environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it may not be read. Only known names are ever written."""
    parts = read_proc(pid, "environ", _MOST_ENVIRONMENT).split(b"\0")
    pairs = (part.decode("utf-8", "replace").partition("=") for part in parts)
    return {name: value for name, equals, value in pairs if equals}


def _cwd(pid: int) -> Path:
    """The working directory; the root, which is nobody's own code, where it may not be read."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path("/")


_FREE_THREADED = re.compile(r"(?:lib)?python3\.\d+t")
_FROM_INSIDE = "start the training with `stepscope run`, which can sample from inside"


def refusal(pid: int, message: str, asked: Rights) -> StepscopeError:
    """The error for a process that py-spy could not read, by what it said."""
    if not os.path.exists(f"/proc/{pid}"):
        return UnreadableInputError(f"process {pid} ended before it could be sampled; attach to a running one")
    program, said = os.path.basename(read_executable(pid) or ""), first_line(message).rstrip(".")
    what = f"py-spy says {said!r}; upgrade py-spy, or {_FROM_INSIDE}"  # it was let in and did not find what it knows
    if is_refusal(message):
        what = _missing(said, asked)
    elif _FREE_THREADED.fullmatch(program) or re.search(rb"/libpython3\.\d+t\.so", read_proc(pid, "maps")):
        what = "it is a free-threaded Python, which py-spy cannot read; run the training with a build that has the GIL"
    elif program.startswith("pypy"):
        what = "it is PyPy, which py-spy cannot read; run the training with CPython"
    return EnvironmentRefusal(f"process {pid} cannot be sampled: {what}")


def _missing(message: str, asked: Rights) -> str:
    if asked.yama == 3:
        return f"ptrace_scope is 3, so nobody may attach until the machine is restarted; {_FROM_INSIDE}"
    if not asked.capability:
        if asked.owner is not None and asked.owner != asked.user and asked.user != 0:
            try:
                owner: str | int = pwd.getpwuid(asked.owner).pw_name
            except KeyError:
                owner = asked.owner
            return f"it belongs to user {owner}; run this as that user, or with sudo"
        if asked.yama == 2:
            return f"ptrace_scope is 2, so only administrators may attach; run this with sudo, or {_FROM_INSIDE}"
        if asked.yama == 1:
            how = "run this with sudo, or set it to 0 (sudo sysctl kernel.yama.ptrace_scope=0)"
            return f"ptrace_scope is 1, so only its parents may attach; {how}, or {_FROM_INSIDE}"
    return f"{message}; {IN_CONTAINER}, elsewhere run this with sudo"
