"""What a knob is: the base class, which reports what became of it, and the set of those in force in a process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Callable, Sequence

from stepscope.errors import UsageError
from stepscope.record.agent.knobs import check, entry, masked
from stepscope.record.agent.patches import Patches
from stepscope.record.agent.segments import StepRow
from stepscope.schema import Knob

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent

NO_DEVICE = "no CUDA device is in use"
# A script that makes a loader per epoch at ever other places must not fill the journal.
REPORTS_PER_KNOB = 50


class KnobBase:
    """A knob. Every method runs behind the guard; one that raises makes the set `uninstall` the knob.

    Knobs are installed right after torch was imported, before the probes and before the script's own code goes on.
    `_patches` are its wrappers, on its switch of the guard, and `_handles` its hooks in torch.
    """

    family = ""  # knobs of one family share their wrappers, and a switch: when one fails, all have
    missed = "the script never came to what this knob changes"

    def __init__(self, agent: Agent, name: str, value: str, parts: dict[Any, Any]) -> None:
        self.name = name  # the full one, such as env:OMP_NUM_THREADS
        self.value = value
        self.probe = "knob." + (self.family or name)  # the guard's switch for everything of this knob
        self.agent = agent
        self._parts = parts
        self._patches = Patches(agent.guard, self.probe)
        self._handles: list[Any] = []
        self._reports: set[tuple[Any, ...]] = set()

    def install(self) -> None:
        """Apply the knob, or wait for what it applies to. `value` is one that the table accepts."""

    def uninstall(self) -> None:
        """Take out what was put into torch, at the end or after a failure, that of `install` too. Repeatable."""
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def at_first_step(self) -> None:
        """On the training thread, after the first training step was cut; by then the script is set up."""

    def at_end(self) -> None:
        """When the steps allowed are over or the process ends, on the thread of either: a last look."""

    def in_loader_worker(self) -> None:
        """In a forked worker of a loader, before its first batch. Nothing can be reported from there."""

    @property
    def reported(self) -> bool:
        """Whether anything has been reported yet."""
        return bool(self._reports)

    def report(
        self,
        applied: bool,
        observed: str | None = None,
        reason: str | None = None,
        place: Sequence[Any] | None = None,
    ) -> None:
        """Tell what became of the knob, once per distinct answer.

        `observed` is read back from torch, the loader or the process, never the wish; `reason` says why the knob was
        not applied; `place` starts with (file, line) of the user's line that the knob stands for. Without a place a
        knob that has been reported as failed stays so.
        """
        file, line = (place[0], place[1]) if place is not None else (None, None)
        row: dict[str, Any] = {"applied": applied, "observed": observed, "reason": reason, "file": file, "line": line}
        key = tuple(row.values())
        if key not in self._reports and len(self._reports) < REPORTS_PER_KNOB:
            self._reports.add(key)
            self.agent.journal.write("knob", knob=self.name, value=masked(self.name, self.value), **row)

    def shared(self, make: Callable[[KnobBase], Any]) -> Any:
        """What several knobs of a process share: made for the first that asks."""
        if make not in self._parts:
            self._parts[make] = make(self)
        return self._parts[make]

    def existing(self, make: Callable[[KnobBase], Any]) -> Any:
        """The same where it was made already, else None."""
        return self._parts.get(make)

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook` on the knob's switch of the guard."""
        return self.agent.guard.wrap(self.probe, hook)


def attach(agent: Agent) -> KnobSet:
    """Install the knobs of the agent's configuration, in the order given."""
    knobs = KnobSet(agent)
    knobs.install_all(agent.config.knobs)
    return knobs


class KnobSet:
    """The knobs in force in this process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._knobs: list[KnobBase] = []
        self._first_step_seen = False
        self._ended = False

    def install_all(self, knobs: Sequence[Knob]) -> None:
        """Install each; what cannot be is reported as not applied."""
        agent = self._agent
        parts: dict[Any, Any] = {}
        for knob in knobs:
            unknown = KnobBase(agent, knob.knob, knob.value, parts)
            try:
                check(knob)
            except UsageError as error:
                unknown.report(False, reason=str(error))
                continue
            kind = agent.guard.wrap(unknown.probe, load, inject=False)(knob.knob)
            if kind is None:
                self._say_failed(unknown)
                continue
            made = kind(agent, knob.knob, knob.value, parts)
            self._knobs.append(made)
            self._call(made, made.install)
        agent.add_step_listener(self._at_boundary, "knobs", lambda: not self._first_step_seen)
        agent.add_end_hook(self.end, "knobs")

    def in_loader_worker(self) -> None:
        """Called in a forked loader worker, before the guard is stopped there."""
        for knob in self._knobs:
            self._agent.guard.wrap(knob.probe, knob.in_loader_worker, inject=False)()

    def end(self) -> None:
        """Last looks, and a word on every knob that never had its occasion. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._tell_first_step()
        for knob in self._knobs:
            self._call(knob, knob.at_end)
            if not knob.reported:
                knob.report(False, reason=knob.missed)

    def uninstall_all(self) -> None:
        """Leave torch as it was found, the newest knob first."""
        self.end()
        for knob in reversed(self._knobs):
            self._take_out(knob)
        self._knobs.clear()

    def _at_boundary(self, row: StepRow | None, _now_ns: int) -> None:
        if row is not None and row.kind == "train":
            self._tell_first_step()

    def _tell_first_step(self) -> None:
        if not self._first_step_seen:
            self._first_step_seen = True
            for knob in self._knobs:
                self._call(knob, knob.at_first_step)

    def _call(self, knob: KnobBase, method: Callable[[], None]) -> None:
        """`method`, guarded; when the knob has failed, here or before in a hook of its own, it is said once."""
        self._agent.guard.wrap(knob.probe, method)()
        if self._agent.guard.is_off(knob.probe):
            self._say_failed(knob)
            self._take_out(knob)

    def _take_out(self, knob: KnobBase) -> None:
        # A switch of its own: a knob that failed is off, and its wrappers must leave torch all the same.
        self._agent.guard.wrap(knob.probe + ".uninstall", knob.uninstall, inject=False)()

    def _say_failed(self, knob: KnobBase) -> None:
        error = self._agent.faults.get(knob.probe)
        knob.report(False, reason="it failed in this process" + (f": {error}" if error else ""))


def load(name: str) -> type[KnobBase]:
    """The class of a knob, by a name of the table."""
    found = entry(name)
    assert found is not None
    return getattr(import_module(__package__ + "." + found.module), found.class_name)  # type: ignore[no-any-return]
