"""A made-up experiment: one candidate that wins, one without a difference, one undecided, one void."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.dashboard import terminal
from stepscope.dashboard.pages import experiments
from stepscope.model import comparison
from stepscope.report import experiment_report
from tests.records import replace

KEPT = experiment_report.loads(Path(__file__).with_name("golden_experiment.json").read_bytes())
REPEAT, BY_HAND = KEPT.repeat, KEPT.by_hand[0]
EQUAL, UNDECIDED, VOID, FASTER = KEPT.tried
(WORKERS, PERSISTENT), (THREADS,) = FASTER.candidate.knobs, EQUAL.candidate.knobs


def measure(label: str, mean_ms: float, **changes: Any) -> comparison.Measure:
    """A run whose step waits for data and computes."""
    wait = max(0.4, mean_ms - 40.0)
    found = comparison.Measure(
        label=label,
        path=f"/somewhere/runs/{label}",
        steps=120,
        dropped=8,
        mean_ms=mean_ms,
        median_ms=mean_ms - 1,
        p95_ms=mean_ms * 1.3,
        samples_per_step=64.0,
        samples_per_second=64_000.0 / mean_ms,
        fixed_cost_s=2.5,
        phases=(comparison.PhaseTime("data_wait", wait), comparison.PhaseTime("forward", mean_ms - wait)),
        losses=((0, 2.3), (1, float("nan"))),
        started_ns=1_000,
    )
    return replace(found, **changes)


def experiment(**changes: Any) -> comparison.Experiment:
    """All of them in one experiment, whose files lie in /home/me/project."""
    return replace(KEPT, **{"by_hand": (), **changes})


def screening() -> comparison.Experiment:
    """Two knobs in a design, one of which matters."""
    effects = (
        comparison.MainEffect(WORKERS, 0.66, 0.64, 0.68, 8, with_knobs=(PERSISTENT,), ceiling=0.57),
        comparison.MainEffect(THREADS, 1.01, 0.98, 1.04, 8),
    )
    return experiment(effects=effects, tried=(FASTER,))


def self_test() -> comparison.Experiment:
    """The baseline against itself."""
    return experiment(
        tried=(),
        skipped=(),
        noise=comparison.Noise(
            0.023, 6, (("seeds", "all of them 0"),), (("governor", "powersave: the clock follows the load"),)
        ),
    )


def shown(found: comparison.Experiment, *, width: int = 100, encoding: str = "utf-8", page: str | None = None) -> str:
    """What a terminal of that width shows of it."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    document = experiment_report.experiment_document(found)
    terminal.show_search(document, experiments.screen(document), console, page=page or "")
    stream.flush()
    return raw.getvalue().decode(encoding)
