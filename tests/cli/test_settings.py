"""Settings of a project: rules that its people know about are not judged, and the report says so with their reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.cli.options import ignored_rules, prices, watch_share
from stepscope.errors import UsageError
from tests.builders import MS, T0, step_rows
from tests.cli.calls import call, json_of
from tests.run_folders import make_run_folder

IGNORE = '"input.loader_bound" = "made on the fly"\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stepscope.toml", "[ignore]\n" + IGNORE),
        ("pyproject.toml", '[project]\nname = "x"\n[tool.stepscope.ignore]\n' + IGNORE),
    ],
)
def test_a_file_of_the_folder_or_above_it_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert ignored_rules(below) == {"input.loader_bound": "made on the fly"}


def test_the_nearest_file_that_speaks_of_stepscope_decides(tmp_path: Path) -> None:
    (tmp_path / "stepscope.toml").write_text("[ignore]\n" + IGNORE)
    below = tmp_path / "project"
    below.mkdir()
    (below / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["stepscope"]\n')
    assert ignored_rules(below) == {"input.loader_bound": "made on the fly"}
    (below / "stepscope.toml").write_text("")
    assert ignored_rules(below) == {}


@pytest.mark.parametrize(
    ("text", "environment", "asked", "share"),
    [
        (None, "", False, 0.0),
        (None, "", True, 0.01),
        (None, "1", False, 0.01),
        ("on = true\npercent = 0.5\n", "", False, 0.005),
        ("percent = 0.5\n", "", False, 0.0),
        ("percent = 0.5\n", "", True, 0.005),
        ("on = true\n", "0", False, 0.0),
        ("on = true\n", "0", True, 0.01),
    ],
)
def test_who_asks_for_monitors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, environment: str, asked: bool, share: float
) -> None:
    if text is not None:
        (tmp_path / "stepscope.toml").write_text("[watch]\n" + text)
    monkeypatch.setenv("STEPSCOPE_WATCH", environment)
    assert watch_share(tmp_path, asked=asked) == pytest.approx(share)


def test_a_broken_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert ignored_rules(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[ignore\n", "no valid TOML"),
        ('[ignore]\n"no.such_rule" = "x"\n', "no rule is called no.such_rule"),
        ('[ignore]\n"input.loader_bound" = ""\n', "say why"),
        ('[ignore]\n"input.loader_bound" = true\n', "say why"),
        ('ignore = "input.loader_bound"\n', "a table of rules and reasons"),
        ("rate = 5\n", "rate: no such setting"),
        ("watch = true\n", "write [watch]"),
        ("[watch]\nevery = 5\n", "write [watch]"),
        ("[watch]\npercent = 2\n", "percent lies between 0 and 1"),
    ],
)
def test_mistakes_are_one_line_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "stepscope.toml").write_text(text)
    with pytest.raises(UsageError, match=r"stepscope\.toml") as raised:
        ignored_rules(tmp_path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_ignored_rule_is_in_the_report_with_its_reason(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = [{"data_wait_ns": 40 * MS, "forward_ns": 5 * MS, "backward_ns": 5 * MS} for _ in range(40)]
    loader = {"kind": "loader", "time_ns": T0, "duration_ns": 1, "step": 0, "num_workers": 0, "batch_size": 8}
    make_run_folder(elsewhere, steps=slow, events=[loader])
    shown = json_of(capfd, "analyze", "run")
    assert "input.loader_bound" in [finding["rule"] for finding in shown["findings"]]
    (elsewhere / "stepscope.toml").write_text("[ignore]\n" + IGNORE)
    report = json_of(capfd, "analyze", "run")
    assert "input.loader_bound" not in [finding["rule"] for finding in report["findings"]]
    assert report["ignored"] == [{"rule": "input.loader_bound", "reason": "made on the fly"}]


def test_prices_of_a_project_and_of_a_command(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    readings = [
        {"time_ns": T0 + second * 1000 * MS, "metrics": [["cpu_energy_uj", "uJ", 5e7 * second, None, "package-0"]]}
        for second in range(12)
    ]
    ended = {"ended_ns": T0 + 10_000 * MS, "started_ns": T0}
    run = make_run_folder(elsewhere, system=readings, steps=step_rows(900), manifest=ended)
    (elsewhere / "stepscope.toml").write_text("[energy]\nprice_kwh = 0.36\nco2_kwh = 100\n")

    def shown(*words: object) -> str:
        assert call("analyze", run, *words) == 0
        return " ".join(capfd.readouterr().out.split())

    report = shown("--json", "r.json")
    assert "Energy: 500 J (0.139 Wh), 50 W, 500 mJ a step, 62.5 mJ a sample; processors by RAPL" in report
    assert "Cost, at your prices: 0.00005, 0.0139 g of CO2 for the run;" in report
    energy = json.loads((elsewhere / "r.json").read_text())["views"]["energy"]
    assert energy["prices"] == {"kwh": 0.36, "gpu_hour": None, "co2_g_per_kwh": 100}
    assert energy["cost"]["cost"] == pytest.approx(500 / 3.6e6 * 0.36)
    assert "Cost, at your prices: 0.0005, 0.0139 g of CO2 for the run; 0.0005" in shown("--price-kwh", "3.6")
    for wrong in ("-1", "nan", "inf"):
        assert call("analyze", run, "--gpu-hour", wrong) == 2
        assert "not a price" in capfd.readouterr().err


@pytest.mark.parametrize(
    "text", ["energy = 3", "[energy]\nkwh = 1", "[energy]\nprice_kwh = -1", "[energy]\ngpu_hour = true"]
)
def test_prices_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "stepscope.toml").write_text(text)
    with pytest.raises(UsageError, match="energy"):
        prices(tmp_path)
