"""A whole run: played, and kept as what a recorder would have seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ranks_simulated.host_clocks import TrueClock, clocks
from ranks_simulated.play import PHASES, Player, Tape
from ranks_simulated.scenario import Floats, Layout, Scenario
from ranks_simulated.work import EPOCH_STEPS, WARMUP, Happening, Work, evaluation
from stepscope.tables.reduced import LABELS


@dataclass
class Run:
    """Arrays of steps have the shape (steps, ranks), in true microseconds since the run began.

    wall_us: of each world, the mean of its ranks, shape (worlds, steps).
    windowed: step of a window -> what was recorded of it.
    """

    scenario: Scenario
    layout: Layout
    work: Work
    start: Floats
    phases: dict[str, np.ndarray]
    gc: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    waited: Floats  # (ranks,): sum over steps
    computed: Floats
    wall_us: Floats
    windowed: dict[int, Tape] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    clocks: list[TrueClock] = field(default_factory=list)

    @property
    def steady(self) -> np.ndarray:
        return self.labels == 0

    def window_spans(self) -> list[tuple[int, float, float]]:
        """(first step, begin, end) of each window, the mean of the ranks'."""
        count = self.scenario.window_steps
        starts = self.start.mean(axis=1)
        return [(first, float(starts[first]), float(starts[first + count])) for first in self.scenario.window_starts()]


def play(scenario: Scenario) -> Run:
    layout = Layout(scenario)
    work = Work(scenario, layout)
    worlds, ranks, steps = 1 + len(work.plants), scenario.ranks, scenario.steps
    player = Player(scenario, layout, worlds)
    windows = {first + number for first in scenario.window_starts() for number in range(scenario.window_steps)}
    run = Run(
        scenario=scenario,
        layout=layout,
        work=work,
        start=np.zeros((steps + 1, ranks)),
        phases={phase: np.zeros((steps, ranks), np.uint32) for phase in PHASES},
        gc=np.zeros((steps, ranks), np.uint32),
        tokens=np.zeros((steps, ranks), np.uint32),
        labels=_labels(steps, windows),
        waited=np.zeros(ranks),
        computed=np.zeros(ranks),
        wall_us=np.zeros((worlds, steps)),
    )
    for block in work.blocks():
        for row in range(len(block.evaluation)):
            step = block.first + row
            tape = Tape() if step in windows else None
            before = player.host
            player.step(block, row, tape)
            run.wall_us[:, step] = (player.host - before).mean(axis=(1, 2, 3))
            run.start[step + 1] = player.host[0].ravel()
            for phase, values in player.phases.items():
                run.phases[phase][step] = np.rint(values.ravel())
            run.waited += player.waited.ravel()
            run.computed += player.computed.ravel()
            if tape is not None:
                tape.computed = player.computed.ravel().copy()
                run.windowed[step] = tape
        rows = slice(block.first, block.first + len(block.evaluation))
        run.gc[rows], run.tokens[rows] = np.rint(block.gc[:, 0]), block.tokens
        run.happenings += block.happenings
    middles = [(begin + end) / 2 for _, begin, end in run.window_spans()]
    run.clocks = clocks(scenario, float(run.start[-1].mean()), middles)
    return run


def _labels(steps: int, windows: set[int]) -> np.ndarray:
    step = np.arange(steps)
    labels = np.zeros(steps, np.uint8)
    labels[step % EPOCH_STEPS == 0] = LABELS.index("first_batch")
    labels[: sum(factor > 2 for factor in WARMUP)] = LABELS.index("warmup")
    labels[sorted(windows)] = LABELS.index("window")
    labels[evaluation(step)] = LABELS.index("eval")
    return labels
