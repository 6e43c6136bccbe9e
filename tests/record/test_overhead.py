"""The benchmark of our overhead: pairs become a row, a verdict and a table. No measurement is made."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not here")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("overhead")


def blocks(cost_us: float, noise_us: float = 0.0, count: int = 40) -> list[dict[str, float]]:
    """Rounds of a step of 100 us to which the hooks add a cost; the control differs by the noise, up and down."""
    rounds = []
    for number in range(count):
        drift_ns = 1_000.0 * number
        sign = 1 if number % 2 else -1
        base = 100_000.0 + drift_ns
        rounds.append({"A": base, "B": base + cost_us * 1e3, "C": base + sign * noise_us * 1e3})
    return rounds


@pytest.mark.parametrize(
    ("cost_us", "noise_us", "verdict"),
    [
        (20, 1, "holds"),
        (31, 1, "exceeds the limit"),
        (20, 31, "undecided: A against A spreads wider than the limit"),
    ],
)
def test_hooks_are_judged_by_the_pairs_of_a_round(overhead: Any, cost_us: float, noise_us: float, verdict: str) -> None:
    row = overhead.hooks_row(1, "noop", blocks(cost_us, noise_us))
    assert (row.part, row.unit, row.limit) == ("hooks", "us", 30)
    assert row.effect.median == pytest.approx(cost_us)
    assert row.base_ms == pytest.approx(0.1195)
    assert row.verdict == verdict


def test_too_few_rounds_decide_nothing(overhead: Any) -> None:
    assert overhead.hooks_row(1, "1", blocks(1, count=5)).verdict == "undecided: 5 pairs are too few"


def test_the_table_names_each_step_and_its_limit(overhead: Any) -> None:
    rows = [overhead.hooks_row(2, length, blocks(20, 1)) for length in ("noop", "1")]
    slow = [{"A": 10e6, "B": 10.05e6, "C": 10.001e6}] * 8
    rows.append(overhead.recording_row(1, "10", slow))
    lines = overhead.table(rows, overhead.Plan(), "command", {"processor": "one"}).splitlines()
    assert lines[-3:] == [
        "| hooks | 2 | empty, 120 µs | +20.0 [+20.0, +20.0] µs | +0.0 [-1.0, +1.0] µs | 30 µs | holds |",
        "| hooks | 2 | 0.12 ms | +20.0 [+20.0, +20.0] µs | +0.0 [-1.0, +1.0] µs | 30 µs | holds |",
        "| recording | 1 | 10.00 ms | +0.50 [+0.50, +0.50] % | +0.01 [+0.01, +0.01] % | 1.00 % | holds |",
    ]
    assert "- processor: one" in lines


def test_results_replace_what_stands_between_the_markers(overhead: Any, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n<!-- overhead:begin -->\nold\n<!-- overhead:end -->\nkept\n")
    overhead.put_between_markers(path, "overhead", "new")
    assert path.read_text() == "# Results\n\n<!-- overhead:begin -->\nnew\n<!-- overhead:end -->\nkept\n"
