"""What a knob is: the base class, the report of what became of it, and the set of those in force in a process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Sequence

from stepscope.errors import UsageError
from stepscope.record.agent.knobs import check, entry, masked
from stepscope.schema import Knob

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.steps import StepRow

NO_DEVICE = "no CUDA device is in use"
# A script that makes a loader per epoch at ever other places must not fill the journal.
REPORTS_PER_KNOB = 50


class Report:
    """Tells what became of one knob: `report(applied, observed=, reason=, place=)`, written once per distinct answer.

    `observed` is read back from torch, the loader or the process, never the wish; `reason` says why the knob was not
    applied; `place` starts with (file, line) of the user's line that the knob stands for. Without a place a knob that
    has been reported as failed stays so.
    """

    def __init__(self, agent: Agent, name: str, value: str) -> None:
        self._agent = agent
        self._name = name
        self._value = masked(name, value)
        self._written: set[tuple[Any, ...]] = set()

    @property
    def made(self) -> bool:
        """Whether anything has been reported yet."""
        return bool(self._written)

    def __call__(
        self,
        applied: bool,
        observed: str | None = None,
        reason: str | None = None,
        place: Sequence[Any] | None = None,
    ) -> None:
        file, line = (place[0], place[1]) if place is not None else (None, None)
        row = (applied, observed, reason, file, line)
        if row in self._written or len(self._written) >= REPORTS_PER_KNOB:
            return
        self._written.add(row)
        self._agent.events.write(
            "knob",
            knob=self._name,
            value=self._value,
            applied=applied,
            observed=observed,
            reason=reason,
            file=file,
            line=line,
        )


class KnobBase:
    """A knob. Every method runs behind the guard; one that raises makes the set `uninstall` the knob.

    Knobs are installed right after torch was imported, before the probes and before the script's own code goes on.
    """

    name = ""  # set to the knob's full name, such as env:OMP_NUM_THREADS
    family = ""  # knobs of one family share their wrappers, and a switch: when one fails, all have
    missed = "the script never came to what this knob changes"

    @property
    def probe(self) -> str:
        """The name of the guard's switch for everything of this knob."""
        return "knob." + (self.family or self.name)

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """Apply the knob, or wait for what it applies to. `value` is one that the table accepts."""
        raise NotImplementedError

    def uninstall(self) -> None:
        """Take out what was put into torch, at the end or after a failure. May be called again."""

    def at_first_step(self) -> None:
        """On the training thread, after the first training step was cut; by then the script is set up."""

    def at_end(self) -> None:
        """When the steps allowed are over or the process ends, on the thread of either: a last look."""

    def in_loader_worker(self) -> None:
        """In a forked worker of a loader, before its first batch. Nothing can be reported from there."""


def attach(agent: Agent) -> KnobSet:
    """Install the knobs of the agent's configuration, in the order given."""
    knobs = KnobSet(agent)
    knobs.install_all(agent.config.knobs)
    return knobs


class KnobSet:
    """The knobs in force in this process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._knobs: list[tuple[KnobBase, Report]] = []
        self._first_step_seen = False
        self._ended = False

    def install_all(self, knobs: Sequence[Knob]) -> None:
        """Install each; what cannot be is reported as not applied."""
        agent = self._agent
        for knob in knobs:
            report = Report(agent, knob.knob, knob.value)
            found = entry(knob.knob)
            try:
                check(knob)
            except UsageError as error:
                report(False, reason=str(error))
                continue
            made = agent.guard.wrap(
                "knob." + knob.knob, lambda found=found: load(found.module, found.class_name), inject=False
            )()
            if made is None:
                self._say_failed("knob." + knob.knob, report)
                continue
            made.name = knob.knob
            self._knobs.append((made, report))
            self._call(made, report, made.install, agent, knob.value, report)

        def at_boundary(row: StepRow | None, _now_ns: int) -> None:
            if row is not None and row.kind == "train":
                self._tell_first_step()

        at_boundary.probe_name = "knobs"  # type: ignore[attr-defined]
        agent.add_step_listener(at_boundary, every_step=lambda: not self._first_step_seen)
        agent.add_end_hook(self.end, "knobs")

    def in_loader_worker(self) -> None:
        """Called in a forked loader worker, before the guard is stopped there."""
        for knob, _ in self._knobs:
            self._agent.guard.wrap(knob.probe, knob.in_loader_worker, inject=False)()

    def end(self) -> None:
        """Last looks, and a word on every knob that never had its occasion. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._tell_first_step()
        for knob, report in self._knobs:
            self._call(knob, report, knob.at_end)
            if not report.made:
                report(False, reason=knob.missed)

    def uninstall_all(self) -> None:
        """Leave torch as it was found, the newest knob first."""
        self.end()
        for knob, _ in reversed(self._knobs):
            # A switch of its own: a knob that failed is off, and its wrappers must leave torch all the same.
            self._agent.guard.wrap(knob.probe + ".uninstall", knob.uninstall, inject=False)()
        self._knobs.clear()

    def _tell_first_step(self) -> None:
        if not self._first_step_seen:
            self._first_step_seen = True
            for knob, report in self._knobs:
                self._call(knob, report, knob.at_first_step)

    def _call(self, knob: KnobBase, report: Report, method: Any, *arguments: Any) -> None:
        """`method`, guarded; when the knob has failed, here or before in a hook of its own, it is said once."""
        guard = self._agent.guard
        guard.wrap(knob.probe, method)(*arguments)
        if guard.is_off(knob.probe):
            self._say_failed(knob.probe, report)
            guard.wrap(knob.probe + ".uninstall", knob.uninstall, inject=False)()

    def _say_failed(self, probe: str, report: Report) -> None:
        error = self._agent.fault(probe)
        report(False, reason="it failed in this process" + (f": {error}" if error else ""))


def load(module: str, class_name: str) -> KnobBase:
    """A new knob of a class of this package."""
    return getattr(import_module(__package__ + "." + module), class_name)()  # type: ignore[no-any-return]
