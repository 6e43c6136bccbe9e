"""The probes: what the agent wraps or hooks inside torch, one small file each, and the table that names them.

A probe can be taken out again exactly as it went in: while the user's own profiler records stacks, all of them leave
(`ProbeSet.suspend`), so that no frame of ours appears in the user's trace.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    from stepscope.record.agent.core import Agent

    class Probe(Protocol):
        """Something installed in torch. `name` is what the guard and the fault injection know it by."""

        name: str

        def install(self, agent: Agent) -> None:
            """Put the hooks in. May be called again after `uninstall`."""

        def uninstall(self) -> None:
            """Take every hook out and restore the originals."""


# (module under this package, class). Installed in this order, taken out in reverse. A new probe is a new line here.
PROBES: tuple[tuple[str, str], ...] = (
    ("side_events", "PtracerProbe"),
    ("sites", "SitesProbe"),
    ("loader", "LoaderProbe"),
    ("training", "AutogradProbe"),
    ("training", "OptimizerProbe"),
    ("training", "ScalerProbe"),
    ("training", "ModuleForwardProbe"),
    ("user_profiler", "ProfilerStepProbe"),
    ("xla", "XlaProbe"),
    ("side_events", "CollectorProbe"),
    ("side_events", "SavesProbe"),
    ("side_events", "ChildrenProbe"),
    ("compiles", "CompilesProbe"),
    ("side_events", "NvtxProbe"),
    ("frameworks", "FrameworkSeamsProbe"),
    ("user_profiler", "UserProfilerProbe"),
)

# Stays in while the others are suspended: it is the one that notices the end of the user's profiler.
PERMANENT = frozenset(["user_profiler", "ptracer"])


class ProbeSet:
    """All probes of an agent, installed, suspended and resumed together."""

    def __init__(self, agent: Agent, table: tuple[tuple[str, str], ...] = PROBES) -> None:
        self._agent = agent
        self._table = table
        self._probes: list[Probe] = []
        self._reason: str | None = None

    @property
    def suspended(self) -> bool:
        """Whether the probes are out because the user's profiler records stacks."""
        return self._reason is not None

    def get(self, name: str) -> Probe | None:
        """The installed probe called `name`, or None."""
        return next((probe for probe in self._probes if probe.name == name), None)

    def install_all(self) -> None:
        """Install every probe of the table; one that fails is reported and left out."""
        for module, class_name in self._table:
            probe = self._guarded(module, lambda module=module, class_name=class_name: self._load(module, class_name))
            if probe is not None:
                self._probes.append(probe)
                self._guarded(probe.name, lambda probe=probe: self._install(probe))

    def add(self, probe: Probe) -> None:
        """Take in a probe that is installed already, so that it is suspended and resumed with the others."""
        self._probes.append(probe)

    def suspend(self, reason: str) -> None:
        """Take all probes out (except the permanent ones) and close the step that cannot be followed any further."""
        if self._reason is not None:
            return
        self._reason = reason
        self._agent.events.write("suspended", reason=reason)
        self._agent.steps.interrupt(self._agent.clock.now())
        for probe in reversed(self._probes):
            if probe.name not in PERMANENT:
                self._take_out(probe)

    def resume(self) -> None:
        """Put the probes back in; steps are cut again from the next boundary on."""
        if self._reason is None:
            return
        self._reason = None
        for probe in self._probes:
            if probe.name not in PERMANENT:
                self._guarded(probe.name, lambda probe=probe: self._install(probe))

    def uninstall_all(self) -> None:
        """Leave torch as it was found."""
        for probe in reversed(self._probes):
            self._take_out(probe)
        self._probes.clear()

    def _take_out(self, probe: Probe) -> None:
        # A switch of its own: a probe that failed is off, and its wrappers must leave torch all the same.
        self._guarded(probe.name + ".uninstall", probe.uninstall)

    def _install(self, probe: Probe) -> None:
        probe.install(self._agent)

    def _load(self, module: str, class_name: str) -> Probe:
        return getattr(import_module(__name__ + "." + module), class_name)()  # type: ignore[no-any-return]

    def _guarded(self, name: str, action):  # type: ignore[no-untyped-def]
        return self._agent.guard.wrap(name, action, inject=False)()
