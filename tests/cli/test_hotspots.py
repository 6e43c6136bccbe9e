"""`stepscope hotspots` on the command line: paths, old spellings, what stdout holds, what a wrong option says."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import call, json_of

main = partial(call, "hotspots")
pytestmark = pytest.mark.usefixtures("elsewhere")

PROFILE = """\
process 10:"python train.py";thread (10): MainThread;<module> (train.py:9);step (pkg/flow/n.py:3);gemm (torch/a.py:7) 40
process 10:"python train.py";thread (10): MainThread;<module> (train.py:9);step (pkg/flow/n.py:4);gemm (torch/a.py:7) 20
process 10:"python train.py";thread (10): MainThread;<module> (train.py:9) 15
process 10:"python train.py";thread (10): MainThread 5
process 10:"python train.py";thread (11): Feeder;_bootstrap (threading.py:1);Condition.wait (threading.py:3) 70
process 10:"python train.py";process 12:"python train.py";thread (12): MainThread;_worker_loop \
(torch/utils/data/_utils/worker.py:3);load (data.py:2) 30
"""
SUM = 40 + 20 + 15 + 5 + 70 + 30


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.txt"
    path.write_text(PROFILE)
    return str(path)


def counts(document: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["name"], row["samples"]) for row in document["rows"]]


def failure(capfd: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    assert main(*arguments) == code
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    return err


class TestOutput:
    def test_terminal(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(profile) == 0
        out, err = capfd.readouterr()
        assert "110 samples" in out
        assert "left out: 70 parked threads" in out
        assert "2 processes are summed (1 rank, 1 loader worker)" in out
        assert "train.py" in out
        assert "python train.py" not in out  # command lines of processes may hold secrets
        assert err == ""

    def test_stdout_holds_the_json_alone(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        document = json_of(capfd, "hotspots", profile)
        assert document["samples"] + document["skipped_samples"] == SUM
        assert sum(row["samples"] for row in document["rows"]) == document["selected_samples"] == 110
        assert counts(document)[0] == ("gemm", 40)

    def test_stdout_holds_the_csv_alone(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert main(profile, "--csv", "-", "--library", "flow") == 0
        rows = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
        assert rows[0]["proportion (n)"] == "36.36% (40)"
        assert rows[0]["library_function_name"] == "step"

    def test_rows(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert len(json_of(capfd, "hotspots", profile, "--rows", "2")["rows"]) == 2
        assert len(json_of(capfd, "hotspots", profile, "--rows", "all")["rows"]) == 5
        assert main(profile, "--rows", "1") == 0
        assert "1 of 5 rows" in capfd.readouterr().out


class TestSelection:
    @pytest.mark.parametrize(
        ("arguments", "rows"),
        [
            (("--process", "workers"), [("load", 30)]),
            (("--process", "main", "--by", "file"), [("gemm", 60), ("<module>", 15), ("(no Python frame)", 5)]),
            (
                ("--rank", "0", "--by", "function", "--process", "main"),
                [("gemm", 60), ("<module>", 15), ("(no Python frame)", 5)],
            ),
        ],
    )
    def test_filters(
        self, profile: str, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], rows: list[tuple[str, int]]
    ) -> None:
        assert counts(json_of(capfd, "hotspots", profile, *arguments)) == rows

    def test_call_paths(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        merged = json_of(capfd, "hotspots", profile, "--library", "train", "--aggregate-leaf-paths")
        paths = json_of(capfd, "hotspots", profile, "--library", "train", "--no-aggregate-leaf-paths")
        assert counts(merged)[0] == ("gemm", 60)
        assert counts(paths)[:2] == [("gemm", 40), ("load", 30)]
        assert len(paths["rows"]) == len(merged["rows"]) + 1


class TestOldSpellings:
    def test_they_mean_the_same(self, profile: str, capfd: pytest.CaptureFixture[str]) -> None:
        old = json_of(capfd, "hotspots", "--file", profile, "--library-name", "train", "--num-rows", "2")
        assert old == json_of(capfd, "hotspots", profile, "--library", "train", "--rows", "2")
        assert len(old["rows"]) == 2
