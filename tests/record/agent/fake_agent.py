"""An agent whose events are kept in memory; and as much of one as a part of it works with, without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepscope.read.run_folder import read_series
from stepscope.record.agent import marks
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.config import Config
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.metrics import as_json
from stepscope.record.agent.probes import PROBES
from stepscope.record.agent.segments import StepRow


class Captured:
    """A real agent, not installed: `seen` are the events it writes."""

    def __init__(self, folder: Path, faults: str | None = None) -> None:
        self.agent = Agent(Config(run=str(folder), host_dir=str(folder), faults=faults), PROBES)
        self.seen: list[dict[str, Any]] = []
        self.agent.journal.write_event = self.seen.append  # type: ignore[method-assign]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.seen if event["kind"] == kind]

    def curves(self) -> list[tuple[str, str, list[float | str], dict[str, Any]]]:
        """Stretches of metrics: source, name, values (what is not finite as a word), and what is known of all."""
        read = [one for event in self.of("metrics") for one in read_series(event)]
        return [(one.source, one.name, [*map(as_json, one.values.tolist())], one.about) for one in read if one]

    def finish(self) -> None:
        self.agent.finish("test")

    def kept(self) -> dict[tuple[str, str], list[Any]]:
        """Values of metrics by source and name, once all are written."""
        self.finish()
        found: dict[tuple[str, str], list[Any]] = {}
        for source, name, values, _about in self.curves():
            found.setdefault((source, name), []).extend(values)
        return found


class WithProbe(Captured):
    """An agent with one probe alone, which `make` makes, installed as the agent does it."""

    def __init__(self, folder: Path, make: Callable[[Agent], Any], faults: str | None = None) -> None:
        super().__init__(folder, faults)
        self.probe = make(self.agent)
        marks.activate(self.agent)
        self.agent.guard.wrap(self.probe.name, self.probe.install, inject=False)()

    def leave(self) -> None:
        self.probe.uninstall()
        self.agent.guard.stop()
        marks.deactivate()


class FakeAgent:
    """`boundary` cuts a step, `of(kind)` are the events written; `now` is its clock where it was set."""

    def __init__(self, faults: str | None = None, device: bool = False) -> None:
        self.errors: list[str] = []
        self.guard = Guard(lambda probe, error: self.errors.append(f"{probe}: {error}"), faults)
        self.now: int | None = None
        self.clock = SimpleNamespace(now=lambda: time.time_ns() if self.now is None else self.now)
        self.device = SimpleNamespace(in_use=device)
        self.own_profiler_active = self.user_profiler_active = False
        self.memory_question: str | None = None
        self.training_thread: int | None = None
        self.step: int | None = 0
        self.updates_compiled: list[int] = []
        self.steps = SimpleNamespace(current_step=lambda: self.step, optimizer_compiled=self.updates_compiled.append)
        self.written: list[dict[str, Any]] = []
        self.journal = SimpleNamespace(write=self._write)
        self.last_compile_step: int | None = None
        self.hooks: list[Callable[..., Any]] = []
        self.after_compile: list[Callable[[], Any]] = []

    def add_boundary_hook(self, hook: Callable[..., Any], probe: str) -> None:
        self.hooks.append(self.guard.wrap(probe, hook))

    def add_finish_hook(self, hook: Callable[[], Any], probe: str) -> None:
        """No test of these parts ends a recording."""

    @property
    def reports(self) -> list[tuple[bool, str | None, str | None]]:
        """What became of knobs: applied, observed, and why not."""
        return [(event["applied"], event["observed"], event["reason"]) for event in self.of("knob")]

    def boundary(self) -> None:
        for hook in self.hooks:
            hook(row(self.step or 0, 17), 18)
        self.step = None if self.step is None else self.step + 1

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.written if event["kind"] == kind]

    def _write(self, kind: str, time_ns: int | None = None, duration_ns: int | None = None, **fields: Any) -> None:
        self.written.append(dict(fields, kind=kind, time_ns=time_ns, duration_ns=duration_ns))


def row(step: int, start_ns: int, wall_ns: int = 100, kind: str = "train") -> StepRow:
    """A step of one batch of eight."""
    return StepRow(step, kind, 0, start_ns, wall_ns, 1, 1, 1, 1, 1, None, 8, 1, 0, 0, "loader")
