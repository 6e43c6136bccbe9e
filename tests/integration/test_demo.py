"""What `make demo` must show: the loader comes first, with its share and the data set's line; workers change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import EXAMPLES, SCRIPTS, Recorded, analyze, lines_of_function, record
from tests.recordings import train_line

pytestmark = [pytest.mark.process, pytest.mark.torch]

TRAIN = EXAMPLES / "cifar_png" / "train.py"


def is_dataset_line(place: dict[str, Any]) -> bool:
    return Path(place["file"]).resolve() == TRAIN and place["line"] in lines_of_function(TRAIN, "__getitem__")


def test_first_finding_is_the_loader(demo: Recorded) -> None:
    assert demo.status == 0, demo.text
    first = demo.findings[0]
    assert first["rule"] == "input.loader_bound"
    assert first["category"] == "input"
    assert is_dataset_line(first["where"][0]), first["where"]
    assert first["evidence"]
    assert first["cost_ms_per_step"] > 0


def test_its_share_is_the_largest_part_of_the_step(demo: Recorded) -> None:
    steps = demo.report["steps"]
    parts = {part["category"]: part["share"] for part in steps["partition"]}
    assert sum(parts.values()) == pytest.approx(1, abs=1e-6)
    assert sum(part["ms"] for part in steps["partition"]) == pytest.approx(steps["mean_ms"], rel=1e-6)
    assert demo.findings[0]["share"] > 0.4
    assert max(parts, key=lambda name: parts[name]) in {"input", "data_wait"}


def test_terminal_report_quotes_the_line(demo: Recorded) -> None:
    place = demo.findings[0]["where"][0]
    code = TRAIN.read_text().splitlines()[place["line"] - 1].strip()
    assert code[:40] in demo.text
    assert f"train.py:{place['line']}" in demo.text
    assert demo.stdout.startswith(b"epoch 1:")
    assert b"stepscope" not in demo.stdout


def test_the_report_fits_a_screen(demo: Recorded) -> None:
    assert len(demo.text.splitlines()) <= 50, demo.text


def test_recommended_workers_respect_the_cores_we_may_use(demo: Recorded) -> None:
    loader = demo.report["views"]["loader"]
    assert loader["num_workers"] == 0
    assert loader["in_main_process"] is True
    assert 1 <= loader["suggested_workers"] <= max(1, loader["cpu_limit"])


def test_steps_have_signal_throughput_and_fixed_cost(demo: Recorded) -> None:
    steps = demo.report["steps"]
    assert steps["kind"] == "train"
    assert steps["signal"] in {"optimizer", "loader"}
    assert steps["samples_per_second"] == pytest.approx(64 * steps["per_second"], rel=0.01)
    assert steps["fixed_cost_s"] > 0
    assert "first_batch" in "".join(steps["excluded"])


def test_run_folder_holds_every_documented_part(demo: Recorded) -> None:
    host = next(demo.folder.glob("host-*"))
    for name in ("manifest.json", "agents.jsonl", "processes.jsonl", "system.jsonl"):
        assert (host / name).stat().st_size > 0, name
    for name in ("rank.json", "steps.jsonl", "events.jsonl"):
        assert (demo.folder / "rank-0" / name).stat().st_size > 0, name
    manifest = json.loads((host / "manifest.json").read_text())
    assert manifest["exit"]["shell_status"] == 0
    assert manifest["ended_ns"] > manifest["started_ns"]


def test_a_window_was_recorded_and_kept_out_of_the_statistics(demo: Recorded) -> None:
    windows = demo.report["views"]["windows"]
    assert windows, demo.report["quality"]
    assert windows[0]["owner"] == "stepscope"
    assert windows[0]["steps"] >= 1
    assert list((demo.folder / "rank-0").glob("trace-*.json*"))


def test_analyze_shows_the_same_report_again(demo: Recorded, tmp_path: Path) -> None:
    shown = analyze(demo.folder, "--json", str(tmp_path / "again.json"))
    assert shown.returncode == 0, shown.stderr
    again = json.loads((tmp_path / "again.json").read_text())
    assert [finding["id"] for finding in again["findings"]] == [finding["id"] for finding in demo.findings]
    assert again["steps"] == demo.report["steps"]
    assert "train.py" in shown.stdout


def test_analyze_to_stdout_is_json_alone(demo: Recorded) -> None:
    shown = analyze(demo.folder, "--json", "-")
    assert json.loads(shown.stdout)["schema"] == "stepscope.report/1"


def test_page_is_one_file_without_network(demo: Recorded) -> None:
    page = (demo.folder / "report.html").read_text()
    assert "input.loader_bound" in page or demo.findings[0]["title"] in page
    assert 'src="http' not in page
    assert len(page) < 3_000_000


def test_workers_change_the_report(demo: Recorded, demo_with_workers: Recorded) -> None:
    assert demo_with_workers.status == 0, demo_with_workers.text
    loader = demo_with_workers.report["views"]["loader"]
    assert loader["num_workers"] == 2
    assert loader["in_main_process"] is False
    without = demo.findings[0]
    with_workers = [finding for finding in demo_with_workers.findings if finding["rule"] == without["rule"]]
    assert all(finding["cost_ms_per_step"] < without["cost_ms_per_step"] for finding in with_workers)
    roles = {process["role"] for process in demo_with_workers.report["views"]["processes"]}
    assert "loader_worker" in roles


def test_without_permission_to_attach_the_line_is_still_named(pictures: Path, tmp_path: Path) -> None:
    recorded = record(
        tmp_path / "run",
        train_line(pictures, "--epochs", "8"),
        options=["--no-window"],
        env={"PYTHONPATH": str(SCRIPTS / "undumpable")},
        prefix=[train_line(pictures)[0], str(SCRIPTS / "unprivileged.py")],
    )
    assert recorded.status == 0, recorded.text
    report = recorded.report
    assert report["findings"][0]["rule"] == "input.loader_bound"
    assert is_dataset_line(report["findings"][0]["where"][0]), report["findings"][0]["where"]
    assert report["views"]["stacks"]["source"] == "agent"
    notes = " ".join(note["text"] for note in report["quality"]["notes"])
    assert "py-spy" in notes
