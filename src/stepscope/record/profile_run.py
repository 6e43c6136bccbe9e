"""The recording behind `stepscope.profile`: the run under way, or a run folder and an agent for one `with` block.

Everything here is called through a guard: when the folder cannot be written or the agent cannot start, the block runs
unrecorded and `ProfiledRun.problem` says why. Standard library only, Python 3.8.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import sys
import time
from contextlib import ExitStack
from typing import Any

from stepscope.record.agent import core, marks
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.config import WATCH_SHARE, Config, WindowConfig, epoch_offset_ns, watch_asked
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.journal import append_line, masked_command
from stepscope.record.agent.sampler import MARKER
from stepscope.record.agent.window_session import our_call, shared_call, trace_path
from stepscope.schema import RUN_SCHEMA

DEFAULT_PARENT = "stepscope-runs"
MOST_SUFFIXES = 1000
KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


class ProfiledRun:
    """Steps and traces of one `stepscope.profile` block. `folder` is the run folder, None when nothing is recorded.

    `traced`: torch's profiler is used as the caller says, so no window of ours opens. `marked`: the caller tells of
    every step; otherwise steps are found as under `stepscope run`. `sampled`: why a thread of this process takes
    stacks, None where none does.
    """

    # around calls of the profiler this block made: its stacks are for us, so the probes stay in
    torch_call = staticmethod(shared_call)

    def __init__(
        self,
        *,
        traced: bool,
        out: str | None,
        name: str | None,
        watch: bool | None = None,
        marked: bool = True,
        sampled: str | None = None,
    ) -> None:
        self._watch = watch_asked() if watch is None else watch
        self.folder: str | None = None
        self.problem: str | None = None
        self._agent: Agent | None = None
        self._manifest: dict[str, Any] | None = None  # None where another process writes it
        self._host = ""
        self._quietened = False
        self._first_traced: int | None = None
        self._guard = Guard(self._note_problem)
        guarded = self._guard.wrap
        self.step = guarded("step", marks.step)
        self.keep_trace = guarded("trace", self._keep_trace)
        self.torch_acted = guarded("trace", self._torch_acted)
        self.end = guarded("end", self._end)
        guarded("begin", self._begin)(traced, out, name, marked, sampled)

    def _note_problem(self, _part: str, error: str) -> None:
        self.problem = self.problem or error
        if self._agent is not None:
            self._agent.journal.write("probe_error", probe="profile", error=error)

    def _begin(self, traced: bool, out: str | None, name: str | None, marked: bool, sampled: str | None) -> None:
        running = core.current()
        if running is not None:
            self._agent = running
            self.folder = running.config.run
            return
        run, host = claim_folder(out)
        self._host = host
        offset = epoch_offset_ns()
        if sampled is not None:
            append_line(os.path.join(host, MARKER), {"time_ns": time.monotonic_ns() + offset, "reason": sampled})
        if not os.path.exists(os.path.join(host, "manifest.json")):  # the first rank of a host writes it
            self._manifest = _manifest(name, offset, sampled)
            self._save_manifest()
        self.folder = run
        config = Config(
            run=run,
            host_dir=host,
            epoch_offset_ns=offset,
            window=WindowConfig(mode="off" if traced else "auto"),
            watch=WATCH_SHARE if self._watch else 0.0,
        )
        if KINETO_LOG_LEVEL not in os.environ:  # else libkineto writes lines of its own to the script's stderr
            os.environ[KINETO_LOG_LEVEL] = "99"
            self._quietened = True
        self._agent = core.start(config)
        if marked:
            marks.step()  # the first step begins here

    def _torch_acted(self, profiler: Any) -> None:
        """torch's profiler was started or told of a step: note the step its recording begins with."""
        action = getattr(getattr(profiler, "current_action", None), "name", "")
        if not action.startswith("RECORD"):
            self._first_traced = None
        elif self._first_traced is None and self._agent is not None:
            self._first_traced = self._agent.steps.current_step()

    def _keep_trace(self, exports: Exports) -> None:
        """Keep in the rank folder what torch's profiler has recorded; the script's own handler went first."""
        agent = self._agent
        if agent is None or not agent.journal.claim() or agent.journal.folder is None:
            return
        started_ns = agent.clock.now()
        with our_call():
            path = exports.save_as(trace_path(agent.journal.folder))
        first, current = self._first_traced, agent.steps.current_step()
        self._first_traced = None
        agent.journal.write(
            "window",
            time_ns=started_ns,
            step=first,
            trace=os.path.basename(path),
            owner="user",
            first_step=first,
            steps=None if first is None or current is None else max(0, current - first),
            start_ns=None,
            stop_duration_ns=None,
            export_duration_ns=agent.clock.now() - started_ns,
            bytes=os.path.getsize(path),
            confidence="high",
            reason="stepscope.profile was asked for it",
            status="kept",
        )

    def _end(self) -> None:
        """Close the journal and take the agent out again, unless the run is `stepscope run`'s."""
        agent, manifest = self._agent, self._manifest
        self._agent = None
        if not self._host:
            return
        if agent is not None:
            core.stop("end of stepscope.profile")
        if self._quietened:
            os.environ.pop(KINETO_LOG_LEVEL, None)
        if manifest is not None:
            manifest["ended_ns"] = time.monotonic_ns() + manifest["clock"]["epoch_offset_ns"]
            self._save_manifest()

    def _save_manifest(self) -> None:
        path = os.path.join(self._host, "manifest.json")
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(self._manifest, file)
        os.replace(temporary, path)


class Exports:
    """Lets one recording of torch's profiler be exported more than once, which torch refuses: later ones are copies."""

    def __init__(self, profiler: Any) -> None:
        self._original = profiler.export_chrome_trace
        self._saved: str | None = None
        profiler.export_chrome_trace = self.export

    def renew(self) -> None:
        """The profiler has recorded anew."""
        self._saved = None

    def export(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Stands in for the profiler's `export_chrome_trace`."""
        if self._saved is not None and os.path.exists(self._saved):
            _copy(self._saved, path)
            return
        self._original(path, *args, **kwargs)
        self._saved = os.path.abspath(os.fspath(path))

    def save_as(self, path: str) -> str:
        """Export to `path`, by way of a temporary name; the path written to, which ends with .gz for a packed copy."""
        if self._saved is not None and self._saved.endswith(".gz"):
            path += ".gz"
        temporary = path + (".tmp.gz" if path.endswith(".gz") else ".tmp")
        self.export(temporary)
        os.replace(temporary, path)
        if self._saved == temporary:
            self._saved = path
        return path


def _copy(source: str, target: str) -> None:
    with ExitStack() as stack:
        read: Any = gzip.open if source.endswith(".gz") else open
        write: Any = gzip.open if os.fspath(target).endswith(".gz") else open
        shutil.copyfileobj(stack.enter_context(read(source, "rb")), stack.enter_context(write(target, "wb")), 1 << 20)


def claim_folder(out: str | None) -> tuple[str, str]:
    """Make the run folder and its host folder; (RUN, RUN/host-H), absolute. Never one that holds a recording.

    Ranks of one launch on this host share both: they see the same name and only a lone process insists on a new one.
    """
    together = (os.environ.get("WORLD_SIZE") or "1") not in ("", "1")
    label = time.strftime("%Y%m%d-%H%M%S", time.localtime(_parent_start() if together else None))
    script = os.path.splitext(os.path.basename(_main_file() or "python"))[0]
    base = os.path.abspath(out or os.path.join(DEFAULT_PARENT, f"{label}-{_safe(script)}"))
    host_name = "host-" + _safe(platform.node() or "localhost")
    for number in range(1, MOST_SUFFIXES):
        run = base if number == 1 else f"{base}-{number}"
        host = os.path.join(run, host_name)
        if os.path.isdir(run) and os.listdir(run) and not together:
            continue
        try:
            os.makedirs(host, exist_ok=together)
        except FileExistsError:
            continue
        return run, host
    raise OSError(f"{base} and its numbered successors are all taken")


def _parent_start() -> float | None:
    try:
        with open(f"/proc/{os.getppid()}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks // os.sysconf("SC_CLK_TCK")


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80] or "run"


def _main_file() -> str | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path else None


def _manifest(name: str | None, offset_ns: int, sampled: str | None) -> dict[str, Any]:
    script = _main_file()
    return {
        "schema": RUN_SCHEMA,
        "name": name or (os.path.basename(script) if script else "python"),
        "command": masked_command(),
        "cwd": os.getcwd(),
        "host": platform.node(),
        "script": {"kind": "script" if script else "other", "path": script},
        "user_roots": _user_roots(script),
        "started_ns": time.monotonic_ns() + offset_ns,
        "ended_ns": None,
        "clock": {"epoch_offset_ns": offset_ns},
        "options": {"recorded_by": "stepscope.profile"},
        "python": platform.python_version(),
        "hardware": {
            "logical_cores": os.cpu_count(),
            "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "gpus": [],
        },
        "sampler": {
            "source": "none" if sampled is None else "agent",
            "reason": sampled or "recorded from code, nothing runs beside it",
        },
    }


def _user_roots(script: str | None) -> list[str]:
    folder = os.getcwd()
    roots = {folder, os.path.dirname(script)} if script else {folder}
    while folder != os.path.dirname(folder) and not os.path.exists(os.path.join(folder, ".git")):
        folder = os.path.dirname(folder)
    if folder != os.path.dirname(folder):
        roots.add(folder)
    return sorted(roots)
