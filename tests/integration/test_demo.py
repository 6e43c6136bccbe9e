"""What `make demo` must show: the loader comes first, with its share and the data set's line; workers change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import call
from tests.integration.harness import EXAMPLES, SCRIPTS, Recorded, lines_of_function, record
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


def test_terminal_report_quotes_the_line(demo: Recorded) -> None:
    place = demo.findings[0]["where"][0]
    code = TRAIN.read_text().splitlines()[place["line"] - 1].strip()
    assert code[:40] in demo.text
    assert f"train.py:{place['line']}" in demo.text
    assert demo.stdout.startswith(b"epoch 1:")
    assert b"stepscope" not in demo.stdout


def test_the_report_fits_a_screen(demo: Recorded) -> None:
    assert len(demo.text.splitlines()) <= 50, demo.text


def cost_of(rule: str, run: Recorded) -> float:
    """ms per step of the findings of a rule."""
    return sum(finding["cost_ms_per_step"] for finding in run.findings if finding["rule"] == rule)


def test_workers_change_the_report(demo: Recorded, demo_with_workers: Recorded, pictures: Path, tmp_path: Path) -> None:
    assert demo_with_workers.status == 0, demo_with_workers.text
    loader = demo_with_workers.report["views"]["loader"]
    assert loader["num_workers"] == 2
    assert loader["in_main_process"] is False
    rule, pair = demo.findings[0]["rule"], (demo, demo_with_workers)
    if cost_of(rule, pair[1]) >= cost_of(rule, pair[0]):
        # Recorded at different times, beside other tests, which weigh more on one of them: once more, back to back.
        lines = [train_line(pictures), train_line(pictures, "--workers", "2")]
        pair = record(tmp_path / "without", lines[0]), record(tmp_path / "with", lines[1])
    assert cost_of(rule, pair[1]) < cost_of(rule, pair[0])
    roles = {process["role"] for process in demo_with_workers.report["views"]["processes"]}
    assert "loader_worker" in roles


def test_without_permission_to_attach_the_line_is_still_named(pictures: Path, tmp_path: Path) -> None:
    recorded = record(
        tmp_path / "run",
        train_line(pictures),  # long enough for the slower sampler to meet the line beside other tests
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


def test_an_option_decides_the_workers(demo: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libcst")
    before = TRAIN.read_bytes()
    assert call("fix", demo.folder, "--finding", demo.findings[0]["id"], "--apply") == 1
    assert "the option --workers of the command line decides it" in capfd.readouterr().err
    assert TRAIN.read_bytes() == before
