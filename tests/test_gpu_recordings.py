"""What is said of recordings that we made on a GPU: figures beside events, planted costs, and a clean run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.views.select import Selection
from stepscope.api import ReadOptions, Run, open_run
from stepscope.report.table import Choice, of_run

EXPECTED_ROWS = 28  # of figures: durations, rates and tensor cores of ten cases, five shares of the device
HERE = Path(__file__).parent / "gpu_recordings"
GPU = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"


def opened(name: str, folder: Path) -> Run:
    """A recording, with the script as it was then at hand."""
    sources = folder / "gpu"
    sources.mkdir()
    shutil.copyfile(HERE / "cases.py.txt", sources / "cases.py")
    shutil.copytree(HERE / name, folder / name)
    return open_run(folder / name, options=ReadOptions(cache=False, keep=False, source_roots=(sources,)))


def planted(name: str) -> set[int]:
    lines = (HERE / "cases.py.txt").read_text().splitlines()
    return {number for number, text in enumerate(lines, 1) if text.endswith(f"# planted: {name}")}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("item", {"host.per_item_loop", "sync.host_waits"}),
        ("pageable", {"transfer.host_to_device"}),
        ("no_tf32", {"compute.no_tensor_cores"}),
        ("cpu_tensors", {"transfer.made_on_host"}),
        ("empty_cache", {"memory.allocator_in_steps"}),
        ("idle_stream", {"transfer.host_to_device"}),
        ("unfused", {"compute.unfused_pointwise"}),
    ],
)
def test_a_planted_cost_is_found_first_at_its_line(name: str, rules: set[str], tmp_path: Path) -> None:
    first = opened(f"zoo-{name}", tmp_path).diagnosis.findings[0]
    assert first.rule in rules
    assert {place.line for place in first.where if place.file.endswith("cases.py")} & planted(name)


def test_nothing_is_said_of_a_run_that_keeps_the_device_busy(tmp_path: Path) -> None:
    run = opened("zoo-clean", tmp_path)
    assert run.diagnosis.findings == ()
    # its steps take 2.8 ms of the host until as many wait as may, and then what the device takes
    (change,) = run.analysis.metrics.changes
    assert [one.text for one in change.happenings] == [
        "until then the host ran ahead of the device, whose steps took 6.86 ms before and 7.41 ms after"
    ]


def test_device_figures_agree_with_events_and_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    from check import FAIL, judge_gpu, judge_work  # type: ignore[import-not-found]

    run = opened("truth", tmp_path)
    known = json.loads((HERE / "truth" / "truth.json").read_text())

    def table(name: str, group: str | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = of_run(run, name, Selection(group=group), Choice()).rows
        return rows

    tables = {"operators": table("operators", "shapes"), "kernels": table("kernels")}
    rows = [*judge_work(known["cases"], tables), *judge_gpu({"views": {"gpus": table("gpus")}}, known)]
    assert len(rows) == EXPECTED_ROWS
    assert [row for row in rows if row.verdict == FAIL] == []
