"""The experiment in report.html: drawn with a text beside it, escaped, no request; and where it is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.api import open_run
from stepscope.dashboard.pages import experiments
from stepscope.model import Report
from stepscope.model.comparison import Experiment
from stepscope.report import experiment_report
from stepscope.report.document import build, load_report, read_report, report_bytes
from stepscope.report.experiment_report import experiment_document, load
from tests.dashboard.plain_pages import Page
from tests.dashboard.plain_pages import page_of as page_of_report
from tests.report.fabricate import analysis, diagnosis
from tests.report.fabricate_experiment import experiment, screening, self_test
from tests.report.test_terminal import words_of
from tests.run_folders import make_run_folder


@pytest.fixture
def report(folder: Path) -> Report:
    return build(analysis(folder), diagnosis(folder))


def page_of(report: Report, **changes: Any) -> Page:
    return Page(page_of_report(experiment_report.with_experiment(report, experiment_document(experiment(**changes)))))


def test_the_experiment_comes_first_and_the_report_stays_whole(report: Report) -> None:
    plain, page = Page(page_of_report(report)), page_of(report)
    headings = words_of(page.text)

    assert headings.index("makes training faster") < headings.index("Waiting for the loader")
    assert page.tags.count("article") == plain.tags.count("article") == 3
    for part in (
        "loader.num_workers=2 + persistent_workers=true makes training faster: 38 %",
        "train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)",
        "no difference > 1.8 %",
        "faster -38 % -40 % -36 % -57 % 3",
        "data wait -21.2 ms 21.6 ms 0.40 ms -22.0 ms -20.4 ms",
        "000-baseline 61.6 ms 001-candidate 38.2 ms",
        "in the script train.py:77: DataLoader(",
        "loader.num_workers 2 yes 2",
        "compile=true was not applied: no model was called",
        "other processes took 0.4 cores",
        "'loader.workers' is no knob",
        "stepscope experiment --from findings -- python train.py --lr 0.1",
    ):
        assert part in headings, part


def test_main_effects_and_noise_have_their_tables(report: Report) -> None:
    def tables_of(found: Experiment) -> str:
        shown = experiment_report.with_experiment(report, experiment_document(found))
        return words_of(Page(page_of_report(shown)).text)

    effects, noise = tables_of(screening()), tables_of(self_test())

    assert "-34 % -36 % -32 % -57 % 8" in effects
    assert "this machine shows effects from 2.3 % on" in noise
    assert "governor powersave" in noise


def test_without_a_run_of_the_baseline_the_page_holds_the_experiment(tmp_path: Path) -> None:
    experiment_report.write(experiment(), None, tmp_path, experiments.render)
    page = Page((tmp_path / "report.html").read_text())

    assert page.open == []
    assert "makes training faster" in words_of(page.text)


def test_an_experiment_in_a_run_folder_is_in_its_report(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "run", steps=[{"wall_ns": 10_000_000} for _ in range(20)])
    before = open_run(run).report().views
    experiment_report.leave_with(experiment(), run, experiments.render)
    after = open_run(run).report().views
    (run / "experiment.json").write_text('{"schema": "stepscope.experiment/1"}')

    assert "experiment" not in before
    assert after["experiment"] == experiment_document(experiment())
    assert "experiment" not in open_run(run).report().views, "what cannot be read is not shown"


def test_it_is_left_with_the_run_of_its_findings(tmp_path: Path) -> None:
    assert experiment_report.leave_with(experiment(), tmp_path, experiments.render) == tmp_path / "experiment.json"
    assert experiment_document(load(tmp_path)) == experiment_document(experiment())
    assert experiment_report.leave_with(experiment(), tmp_path / "gone", experiments.render) is None
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.json"], "there was no report to show it in"


def test_the_report_of_that_run_shows_it_at_once(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(report_bytes(report))
    experiment_report.leave_with(experiment(), tmp_path, experiments.render)
    again = load_report(tmp_path / "report.json")

    assert again.views.pop("experiment")["runs"] == 19
    assert again == read_report(report_bytes(report))
    assert "makes training faster" in (tmp_path / "report.html").read_text()
