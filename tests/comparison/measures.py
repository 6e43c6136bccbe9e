"""Measures and pairs of them, for tests."""

from __future__ import annotations

from typing import Any

from stepscope.model.comparison import Flag, Measure, PhaseTime


def measure(mean_ms: float = 100.0, label: str = "run", **others: Any) -> Measure:
    """A run of 300 steps; a fifth of the mean is spent on waiting for data."""
    given = {
        "label": label,
        "path": label,
        "steps": 300,
        "dropped": 5,
        "mean_ms": mean_ms,
        "median_ms": mean_ms * 0.98,
        "p95_ms": mean_ms * 1.1,
        "samples_per_step": 32.0,
        "samples_per_second": 32e3 / mean_ms if mean_ms else None,
        "fixed_cost_s": 2.0,
        "phases": (PhaseTime("data_wait", mean_ms * 0.2), PhaseTime("forward", mean_ms * 0.8)),
    }
    return Measure(**(given | others))


def pairs(
    ratios: list[float], baseline: dict[str, Any] | None = None, **candidate: Any
) -> list[tuple[Measure, Measure]]:
    """One pair for each ratio of mean steps."""
    return [
        (measure(100.0, f"A{n}", **(baseline or {})), measure(100.0 * ratio, f"B{n}", **candidate))
        for n, ratio in enumerate(ratios)
    ]


def flag(name: str, *, withholds: bool, text: str = "something happened") -> Flag:
    return Flag(name, text, "a test", withholds)
