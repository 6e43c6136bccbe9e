"""Processes that the script starts: each with its number, its command and the line that started it.

The loader's own workers are left out: `loader` tells of them. What `os.fork` and `os.system` start has no number here;
the telemetry, which sees the process, is matched with it by its time.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.frames import Place, place_fields, user_place
from stepscope.record.agent.masking import mask_argv
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent

    _Token = tuple[int, str, str, Any]  # time, how, command, the object that stands for the process

EVENTS_PER_PLACE = 100  # a line that starts a process in every step is written so many times, then no more
PLACES_LIMIT = 200
COMMAND_LENGTH = 300


class ChildrenProbe:
    """Writes a `child` event for each process that is started."""

    name = "children"

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._written: dict[Place | None, int] = {}
        self._starting = threading.local()  # `inside`: a process is being started that will be written with its number
        self._asks_forks = False

    def install(self, agent: Agent) -> None:
        """Wrap what starts processes, and be told of forks."""
        self._agent = agent
        self._patches.install(self._wrap_all)
        if not self._asks_forks and hasattr(os, "register_at_fork"):
            # `os.fork` is not wrapped: Python warns there, and the warning names the line that called.
            os.register_at_fork(before=agent.guard.wrap(self.name, self._before_fork))
            self._asks_forks = True

    def uninstall(self) -> None:
        """Restore the originals."""
        self._patches.remove()

    def _wrap_all(self) -> None:
        pair = self._agent.guard.pair
        around = self._patches.around
        around(subprocess.Popen, "__init__", pair(self.name, self._before_program, self._after))
        around(multiprocessing.process.BaseProcess, "start", pair(self.name, self._before_process, self._after))
        for name in ("posix_spawn", "posix_spawnp"):
            around(os, name, pair(self.name, self._before_spawn, self._after))
        around(os, "system", pair(self.name, self._before_system))

    # The number of the process is known afterwards: by the object that stands for it, or by what the call returns ----

    def _before_program(self, popen: Any, args: Any = (), *_args: Any, **_kwargs: Any) -> _Token | None:
        return self._begin("subprocess.Popen", _command(args), popen)

    def _before_process(self, process: Any) -> _Token | None:
        if self._agent.making_loader:
            return None
        target = getattr(process, "_target", None)
        name = getattr(target, "__qualname__", None) or type(process).__qualname__
        return self._begin("multiprocessing.Process", str(name), process)

    def _before_spawn(self, path: Any, argv: Any = (), *_args: Any, **_kwargs: Any) -> _Token | None:
        return self._begin("os.posix_spawn", _command(argv or path), None)

    def _before_system(self, command: Any = "", *_args: Any, **_kwargs: Any) -> None:
        self._write(self._agent.clock.now(), "os.system", _command(command), None)  # it waits for the command's end

    def _begin(self, how: str, command: str, started: Any) -> _Token | None:
        if getattr(self._starting, "inside", False):
            return None  # Popen may call os.posix_spawn
        self._starting.inside = True
        return self._agent.clock.now(), how, command, started

    def _after(self, token: _Token | None, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        self._starting.inside = False
        time_ns, how, command, started = token
        pid = result if started is None else getattr(started, "pid", None)
        if error is None and isinstance(pid, int):
            self._write(time_ns, how, command, pid)

    def _before_fork(self) -> None:
        if not (self._agent.making_loader or getattr(self._starting, "inside", False)) and self._patches.enabled:
            self._write(self._agent.clock.now(), "os.fork", None, None)

    def _write(self, time_ns: int, how: str, command: str | None, pid: int | None) -> None:
        place = user_place()
        count = self._written.get(place, 0)
        if count >= EVENTS_PER_PLACE or (count == 0 and len(self._written) >= PLACES_LIMIT):
            return
        self._written[place] = count + 1
        self._agent.events.write("child", time_ns, pid=pid, how=how, command=command, **place_fields(place))


def _command(args: Any) -> str:
    """What is started, secrets masked: a text for a shell, a path, or the arguments of a program.

    Anything else than a list or a tuple of them is left alone: an iterator can be read only once, and not by us.
    """
    parts = args if isinstance(args, (list, tuple)) else [args]
    known = [os.fsdecode(part) if isinstance(part, (str, bytes, os.PathLike)) else "?" for part in parts]
    return " ".join(mask_argv(known))[:COMMAND_LENGTH]
