"""What `stepscope experiment` shows while it runs, on stderr: one line for each run that ended, with the estimate so
far; on a terminal also the run in progress, how many are to come and the time they take."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from stepscope.comparison.verdicts import percent
from stepscope.report import outputs, words
from stepscope.report.escape import one_line, plain

if TYPE_CHECKING:
    from rich.status import Status

    from stepscope.experiment.journal import Made
    from stepscope.experiment.plan import Slot
    from stepscope.model.comparison import Outcome
    from stepscope.model.experiment import Experiment


class Progress:
    """The listener of an engine that prints. `quiet` prints nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._stack = ExitStack()
        self._status: Status | None = None
        self._total = ""
        self._pairs: dict[str, int] = {}  # of each candidate, as of the run before

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            self._status = self._stack.enter_context(outputs.console(sys.stderr).status("experiment …"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the line of the run in progress away; what comes after is a report."""
        self._stack.close()
        self._status = None

    def begin(self, folder: Path, *, resumed: bool) -> None:
        """Say where the experiment lies, and whether it goes on."""
        self.note(f"{'going on with the unfinished experiment' if resumed else 'experiment'} in {folder}")

    def note(self, text: str) -> None:
        """One line of ours."""
        if not self._quiet:
            print(f"stepscope: {one_line(text)}", file=sys.stderr, flush=True)

    def starting(self, slot: Slot, number: int, left: int | None, left_s: float | None) -> None:
        """Show the run that starts, on a terminal."""
        self._total = f"{number}" if left is None else f"{number} of about {number + max(left, 1) - 1}"
        if self._status is None:
            return
        time = "" if left_s is None else f", about {_minutes(left_s)} left"
        self._status.update(f"run {self._total}{time}: {plain(slot.label, 60)} …")

    def finished(self, made: Made, experiment: Experiment | None) -> None:
        """One line for the run: its step time or what went wrong, and the estimates that its pairs have changed."""
        name = plain(made.slot.label, 60)
        parts = [f"run {self._total}, {name}: {_step(made)} ({words.seconds(made.wall_s)})"]
        changed = []
        for tried in experiment.tried if experiment is not None else ():
            pairs = len(tried.outcome.pairs)
            if self._pairs.get(tried.candidate.name, 0) != pairs:
                changed.append(f"{plain(tried.candidate.name, 60)} {_estimate(tried.outcome)}")
            self._pairs[tried.candidate.name] = pairs
        if changed:
            parts.append(f"block {made.slot.block + 1}: {', '.join(changed)}")
        self.note("; ".join(parts))


def _step(made: Made) -> str:
    if made.failure is not None:
        return made.failure
    if made.measure is None:
        return "no steps"
    withheld = [flag for flag in made.measure.flags if flag.withholds]
    said = f"{words.milliseconds(made.measure.mean_ms)} a step"
    return f"{said}, left out: {withheld[0].text}" if withheld else said


def _estimate(outcome: Outcome) -> str:
    """ "-27 % ± 4 %" of the headline; the verdict's words where there is no effect."""
    effect = outcome.effects.get(outcome.headline)
    if effect is None:
        return outcome.verdict.text
    change = f"{percent(effect.ratio - 1, sign=True)} %"
    if effect.low is None or effect.high is None:
        return f"{change} so far"
    return f"{change} ± {percent((effect.high - effect.low) / 2)} %"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
