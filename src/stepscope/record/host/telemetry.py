"""The process beside the run: telemetry at 1 Hz, the process tree, and the sampler's segments.

Started as `python -m stepscope.record.host.telemetry CONFIG` in a session of its own, so that neither Ctrl-C nor the
end of the terminal reaches it. Its standard input is a pipe from the launcher: `cut` ends the current segment, `stop N`
finishes within N seconds, and the end of the pipe means that the launcher is gone, even by SIGKILL. It keeps its normal
priority: py-spy inherits it, and a sampler that waits for a free core would mostly see a training that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepscope.record.agent.config import Clock
from stepscope.record.agent.masking import mask_argv, mask_text
from stepscope.record.host.hardware import Gpus, Metric, affinity, find_cgroups
from stepscope.record.host.jsonlines import JsonLines, JsonLinesTail
from stepscope.record.host.meters import CoresMeter, ProcessMeter, Rapl, StorageLooks, SystemClock, machine_metrics
from stepscope.record.host.processes import Process, ProcessTree, read_stat
from stepscope.record.host.pyspy import Sampler, mark_fallback

_TICK_SECONDS = 0.25  # a process that lives shorter may go unseen
_YOUNG_NS = 1_500_000_000
_READ_SECONDS = 1.0
_FIRST_READ_SECONDS = 0.2
_ORPHAN_STOP_SECONDS = 2.0
_MOST_METERED = 256  # processes with metrics of their own; the rest are only listed
_COMMAND_LENGTH = 2000
LOST = 74  # our exit status when lines could not be written: EX_IOERR of sysexits.h
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class TelemetryConfig:
    """What the launcher tells its telemetry process, as JSON on the command line."""

    host_dir: str
    root_pid: int
    epoch_offset_ns: int
    rate_hz: float
    segment_seconds: float
    pyspy: str | None
    native: bool = False
    metrics_descriptor: int | None = None  # of a socket that listens; the token is in our environment


# Who says when telemetry ends: `cut`, `orphan` or `stop N`, waited for as many seconds at most.
Commands = Callable[[float], list[str]]


class Control:
    """Commands from the launcher, one per line, without ever blocking longer than asked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = b""

    def wait(self, seconds: float) -> list[str]:
        """Commands that arrived within `seconds`; the end of the pipe reads as `orphan`."""
        readable, _, _ = select.select([self._descriptor], [], [], max(0.0, seconds))
        if not readable:
            return []
        data = os.read(self._descriptor, 4096)
        if not data:
            return ["orphan"]
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [line.decode("ascii", "replace").strip() for line in lines]


class Telemetry:
    """Owns processes.jsonl, system.jsonl and stacks.jsonl of one host."""

    def __init__(self, config: TelemetryConfig, gpus: Gpus) -> None:
        self._config, self._gpus, self._rapl = config, gpus, Rapl()
        self._now = Clock(config.epoch_offset_ns).now
        folder = Path(config.host_dir)
        self._processes = JsonLines(folder / "processes.jsonl")
        self._system = JsonLines(folder / "system.jsonl")
        self._stacks = JsonLines(folder / "stacks.jsonl")
        self._agents = JsonLinesTail(folder / "agents.jsonl")
        self.tree = ProcessTree(config.root_pid, b'"host_dir": ' + json.dumps(config.host_dir).encode())
        self._meters: dict[int, ProcessMeter] = {}
        self._cgroups, self._cpus = find_cgroups(), affinity()
        self._cores, self._storage = CoresMeter(self._cpus), StorageLooks(str(folder.parent))
        self._clock = SystemClock()
        self._serve: Callable[[list[Metric]], None] | None = None
        if config.metrics_descriptor is not None:
            from stepscope.record.host import openmetrics

            token = os.environ.get(openmetrics.TOKEN_VARIABLE, "")
            self._serve = openmetrics.start(config.metrics_descriptor, token, folder)
        self._boot_ns = self._now() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._sampler = None if config.pyspy is None else Sampler(
            config.pyspy, config.root_pid, folder, config.rate_hz, config.segment_seconds,
            now_ns=self._now, write=self._stacks.append, targets=self.tree.sampling_order, chain=self.tree.chain,
            give_up=lambda reason: mark_fallback(folder, self._now(), reason), native=config.native,
        )  # fmt: skip

    def living(self) -> int:
        """How many processes of the tree were there when last looked at."""
        return sum(process.alive for process in self.tree.members.values())

    @property
    def dropped(self) -> int:
        return sum(log.dropped for log in (self._processes, self._system, self._stacks))

    def run(self, commands: Commands) -> None:
        self._read_energy()
        next_read = time.monotonic() + _FIRST_READ_SECONDS
        self._tick()
        while True:
            due = _TICK_SECONDS if self._sampler is None else self._sampler.seconds_until_due()
            for command in commands(min(_TICK_SECONDS, next_read - time.monotonic(), due)):
                if command == "cut" and self._sampler is not None:
                    self._sampler.cut()
                elif command == "orphan":
                    return self._finish(_ORPHAN_STOP_SECONDS)
                elif command.startswith("stop "):
                    return self._finish(float(command.removeprefix("stop ")))
            self._tick()
            if time.monotonic() >= next_read:
                self._read()
                next_read = max(next_read + _READ_SECONDS, time.monotonic() + _READ_SECONDS / 2)

    def _tick(self) -> None:
        self.tree.hear(self._agents.read())
        now = self._now()
        for process in self.tree.discover(now):
            self.tree.refresh(process, 0.0)
            self._write_process(process, now)
        for process in self.tree.members.values():
            # a child that was met between fork and exec is another program a moment later
            if process.alive and now - process.first_seen_ns < _YOUNG_NS and self.tree.refresh(process, 0.0):
                self._write_process(process, now)
        if self._sampler is not None:
            self._sampler.poll()

    def _energy(self, now: int) -> list[Metric]:
        """The counters of energy, each with the time at which it was read: asking a driver may take milliseconds."""

        def since() -> int:
            return self._now() - now

        return self._gpus.energy(since) + self._rapl.metrics(since)

    def _read_energy(self) -> None:
        """The counters alone, at both ends of the run."""
        now = self._now()
        metrics = self._energy(now)
        if metrics:
            self._system.append({"time_ns": now, "metrics": metrics})

    def _read(self) -> None:
        """One row of system.jsonl, and every process whose description has changed."""
        now = self._now()
        metrics = self._energy(now) + machine_metrics(self._cgroups, self._cpus) + self._gpus.metrics()
        metrics += self._cores.metrics(time.monotonic_ns()) + self._clock.metrics()
        loading: list[int] = []
        for process in self.tree.members.values():
            if not process.alive:
                continue
            stat = read_stat(process.pid)
            if stat is None or stat.state in "ZX" or stat.start_ticks != process.start_ticks:
                process.alive = False
                self._meters.pop(process.pid, None)
                self._processes.append({"pid": process.pid, "ended_ns": now})
                continue
            process.comm = stat.comm
            if self.tree.refresh(process, (now - process.first_seen_ns) / 1e9):
                self._write_process(process, now)
            if process.pid not in self._meters and len(self._meters) < _MOST_METERED:
                self._meters[process.pid] = ProcessMeter(process.pid)
            if process.pid in self._meters:
                metrics += self._meters[process.pid].metrics(stat, time.monotonic_ns(), process.role)
            if process.role in ("rank", "loader_worker"):
                loading.append(process.pid)
        metrics += self._storage.metrics(loading)
        self._system.append({"time_ns": now, "metrics": metrics})
        if self._serve is not None:
            with contextlib.suppress(Exception):  # who asks is told what was before; the recording goes on
                self._serve(metrics)

    def _write_process(self, process: Process, now: int) -> None:
        start_ns = self._boot_ns + process.start_ticks * 1_000_000_000 // _TICKS_PER_SECOND
        self._processes.append(
            {
                "time_ns": now,
                "pid": process.pid,
                "ppid": process.ppid,
                "start_ns": start_ns,
                "comm": mask_text(process.comm),
                "executable": process.executable,
                "command": " ".join(mask_argv(list(process.argv)))[:_COMMAND_LENGTH],
                "python": bool(process.python),
                "torch": process.torch,
                "role": process.role,
            }
        )

    def _finish(self, seconds: float) -> None:
        self._read_energy()
        self.tree.hear(self._agents.read())
        if self._sampler is not None:
            self._sampler.stop(seconds)
        self._read()
        for log in (self._processes, self._system, self._stacks):
            log.close()


def main(arguments: list[str]) -> int:
    """Run until told to stop; the argument is a `TelemetryConfig` as JSON."""
    # The launcher blocks signals while it waits; this process and py-spy must not inherit that. SIGTERM and SIGHUP are
    # ignored because a scheduler sends them to every process of a job, and ours must outlive the command to finish.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    config = TelemetryConfig(**json.loads(arguments[0]))
    with Gpus() as gpus:
        telemetry = Telemetry(config, gpus)
        telemetry.run(Control(sys.stdin.fileno()).wait)
    return LOST if telemetry.dropped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
