"""The knob of Python's garbage collector: frozen, off, or at another threshold, from the first steady step on.

Before that a script builds what lives as long as it does, and collecting is part of that. `freeze` collects once and
then leaves out what is alive; `off` means that nothing is collected any more, as `gc.disable()` would in the script.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from stepscope.record.agent.knobs.base import KnobBase, Report
from stepscope.record.agent.steady import NOISY_STEPS, is_steady

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.steps import StepRow

_SOONER_OR_LATER = NOISY_STEPS  # steps that never get steady are no reason to wait any longer


class Collector(KnobBase):
    """`gc.freeze`, `gc.disable` or `gc.set_threshold`, between two steps."""

    missed = f"training was over before its steps were steady, or {_SOONER_OR_LATER} of them done"

    def install(self, agent: Agent, value: str, report: Report) -> None:
        self._value, self._report = value, report
        self._walls: list[int] = []
        self._before = (gc.isenabled(), gc.get_threshold())
        self._done = self._over = False

        def at_boundary(row: StepRow | None, _now_ns: int) -> None:
            self._count(row)

        at_boundary.probe_name = self.probe  # type: ignore[attr-defined]
        agent.add_step_listener(at_boundary, every_step=lambda: not self._done)

    def uninstall(self) -> None:
        """The collector as it was."""
        if not self._done:
            return
        self._done = False
        enabled, threshold = self._before
        if self._value == "freeze":
            gc.unfreeze()
        elif self._value == "off" and enabled:
            gc.enable()
        elif self._value != "off":
            gc.set_threshold(*threshold)

    def at_end(self) -> None:
        self._over = True  # a script may go on for some steps until it is told to end
        if self._done and not self._holds():
            self._report(False, _state(), "the script has set the collector otherwise since")

    def _count(self, row: StepRow | None) -> None:
        if self._done or self._over or row is None or row.kind != "train":
            return
        self._walls.append(row.wall_ns)
        if is_steady(self._walls) or len(self._walls) >= _SOONER_OR_LATER:
            self._apply()

    def _apply(self) -> None:
        self._done = True
        self._before = (gc.isenabled(), gc.get_threshold())
        if self._value == "freeze":
            gc.collect()
            gc.freeze()
        elif self._value == "off":
            gc.disable()
        else:
            gc.set_threshold(int(self._value), *gc.get_threshold()[1:])
        holds = self._holds()
        self._report(holds, _state(), None if holds else "Python did not take it")

    def _holds(self) -> bool:
        if self._value == "freeze":
            return gc.get_freeze_count() > 0
        if self._value == "off":
            return not gc.isenabled()
        return gc.isenabled() and gc.get_threshold()[0] == int(self._value)


def _state() -> str:
    """The collector in words: what is read back."""
    first = "on" if gc.isenabled() else "off"
    return f"{first}, threshold {gc.get_threshold()[0]}, {gc.get_freeze_count()} objects frozen"
