"""What a run drew, on every surface: one sentence, one table, one reason where there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope import api, comparing
from stepscope.dashboard.pages.compare import figures
from stepscope.dashboard.single import renderer
from stepscope.model.machine import Prices
from stepscope.report.comparison_report import comparison_document
from stepscope.report.document import read_report, report_bytes
from tests.builders import MS, T0, step_rows
from tests.dashboard.opened import page
from tests.on_terminal import joined
from tests.run_folders import make_run_folder

SAID = "Energy: 500 J (0.139 Wh), 50 W, 500 mJ a step, 62.5 mJ a sample; processors by RAPL"


def run(folder: Path, prices: Prices, **metrics: float) -> api.Run:
    """Ten seconds in steps of 10 ms, with readings of metrics that grow by so much a second."""
    system: list[dict[str, Any]] = [
        {
            "time_ns": T0 + second * 1000 * MS,
            "metrics": [
                ["load_1m", "processes", 1.0, None, None],
                *([name, "", grows * second, None, "package-0"] for name, grows in metrics.items()),
            ],
        }
        for second in range(12)
    ]
    ended = {"started_ns": T0, "ended_ns": T0 + 10_000 * MS}
    made = make_run_folder(folder, system=system, steps=step_rows(900), manifest=ended)
    return api.open_run(made, options=api.ReadOptions(prices=prices))


def texts(opened: api.Run) -> list[str]:
    return [block["text"] for block in page(opened, "system")["blocks"] if block["kind"] == "text"]


def test_every_surface_says_the_same(tmp_path: Path) -> None:
    opened = run(tmp_path, Prices(kwh=3.6), cpu_energy_uj=5e7)
    cost = "Cost, at your prices: 0.0005 for the run; 0.0005 for 1,000 steps"
    assert f"{SAID} {cost}" in joined(opened.report())
    assert [text for text in texts(opened) if text in (SAID, cost)] == [SAID, cost]
    assert SAID in renderer(opened)(opened.report())
    found = read_report(report_bytes(opened.report())).views["energy"]
    (row,) = opened.table("energy").rows
    assert found["joules"] == row.joules == opened.analysis.energy.joules  # type: ignore[union-attr]
    assert found["domains"][0]["device"] == row.device == "package-0"


def test_a_run_without_any_source_says_why_where_one_looks_for_it(tmp_path: Path) -> None:
    opened = run(tmp_path, Prices())
    (why,) = [text for text in texts(opened) if text.startswith("Energy")]
    assert why.startswith("Energy: not measured: ")
    assert "nergy" not in joined(opened.report())
    assert opened.table("energy").absent
    assert "Energy: not told of the run (" in joined(run(tmp_path / "priced", Prices(kwh=1.0)).report())


def test_a_comparison_is_of_the_energy_of_the_measured_steps(tmp_path: Path) -> None:
    """Three runs of each side; the second draws four fifths of the first."""
    sides = [
        [run(tmp_path / f"{side}{number}", Prices(kwh=3.6), cpu_energy_uj=watts * 1e6) for number in range(3)]
        for side, watts in (("a", 50.0), ("b", 40.0))
    ]
    found = comparing.compare(*sides)
    (measure, *_) = found.baseline.measures
    assert (measure.joules_per_step, measure.joules_per_sample) == pytest.approx((0.5, 0.5 / 8))
    assert measure.cost_per_1000_steps == pytest.approx(500 / 1e6)
    document = comparison_document(found)
    assert document["candidates"][0]["energy"]["word"] == "less"
    found = figures(document, document["candidates"][0])
    rows = {figure["label"]: (figure["baseline"], figure["candidate"], figure["change"]) for figure in found}
    assert rows["energy a sample"] == ("62.5 mJ", "50.0 mJ", "-20 %")
    assert rows["cost of 1,000 steps"] == ("0.0005", "0.0004", "-20 %")
    assert "energy a step" not in rows
