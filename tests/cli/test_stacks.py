"""`stepscope hotspots` on the command line: paths, old spellings, what stdout holds, what a wrong option says."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard import bundle
from tests.cli.calls import call, json_of
from tests.dashboard.plain_pages import embedded
from tests.dashboard.test_single import INDEX, SCRIPT, STYLE

main = partial(call, "hotspots")

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


flame_main = partial(call, "flamegraph")

MAIN_THREAD = 'process 100:"python train.py --token hunter2";thread (100): MainThread;<module> (train.py:9)'
RAW = f"{MAIN_THREAD};main (train.py:5);step (train.py:3) 60\n{MAIN_THREAD};main (train.py:6) 30\n{MAIN_THREAD} 10\n"
RANKS = "".join(
    f'process 1:"torchrun t.py";process {pid}:"python t.py";thread ({pid}): MainThread;<module> (t.py:9);{leaf} 50\n'
    for pid, leaf in ((2, "fast (t.py:5)"), (3, "slow (t.py:6)"))
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, a cache of its own, and a front end of two lines."""
    made = bundle.Bundle(INDEX, (SCRIPT,), (STYLE,))
    monkeypatch.setattr(bundle, "load", lambda: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(name: str, text: str = RAW) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def page_data(name: str) -> Any:
    (block,) = embedded(Path(name).read_text(encoding="utf-8"))["documents"]["runs/this/pages/flame"]["blocks"]
    return block["document"]


def tree_of(data: Any, key: str) -> Any:
    return next(tree for tree in data["trees"] if tree["key"] == key)


def test_a_file_becomes_a_page_beside_nothing_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flame_main(write("profile.txt")) == 0

    assert capsys.readouterr() == ("", "Wrote profile.flame.html\n")
    assert sorted(path.name for path in here.iterdir()) == ["profile.flame.html", "profile.txt"]
    data = page_data("profile.flame.html")
    assert data["title"] == "profile.txt"
    assert (tree_of(data, "all")["unit"], tree_of(data, "all")["value"][0]) == ("samples", 100)
    assert "hunter2" not in Path("profile.flame.html").read_text()


def test_the_ending_names_the_format() -> None:
    write("profile.txt")

    assert flame_main("profile.txt", "-o", "a.svg") == 0
    assert Path("a.svg").read_text().startswith("<svg ")
    assert flame_main("profile.txt", "-o", "a.speedscope.json") == 0
    assert sum(json.loads(Path("a.speedscope.json").read_text())["profiles"][0]["weights"]) == 100
    assert flame_main("profile.txt", "-o", "a.collapsed") == 0
    assert "<module> (train.py:9);main (train.py:5);step (train.py:3) 60\n" in Path("a.collapsed").read_text()


def test_selections() -> None:
    write("ranks.txt", RANKS)

    assert flame_main("ranks.txt", "--rank", "1", "-o", "one.html") == 0
    names = page_data("one.html")["names"]
    assert "slow" in names
    assert "fast" not in names
    assert flame_main(write("profile.txt"), "--by", "line", "-o", "line.html") == 0
    data = page_data("line.html")
    boxes = [data["frames"][frame] for frame in tree_of(data, "all")["frame"]]
    assert {(data["names"][name], line) for name, _, line, _ in boxes} >= {("main", 5), ("main", 6)}
    assert flame_main("ranks.txt", "--min-share", "60", "-o", "thick.html") == 0
    assert tree_of(page_data("thick.html"), "all")["value"] == [100, 100]
    assert tree_of(page_data("thick.html"), "all")["hidden"] == 100


def test_a_tree_is_chosen_by_its_key() -> None:
    write("ranks.txt", RANKS)

    assert flame_main("ranks.txt", "--tree", "rank:1", "-o", "x.collapsed") == 0
    assert Path("x.collapsed").read_text() == "<module> (t.py:9);slow (t.py:6) 50\n"
    assert flame_main("ranks.txt", "--tree", "rank:1", "-o", "x.html") == 0
    data = page_data("x.html")
    assert data["trees"][data["first"]]["key"] == "rank:1"


def test_a_rank_is_compared_with_the_others() -> None:
    write("ranks.txt", RANKS)

    assert flame_main("ranks.txt", "--rank", "1", "--diff", "others", "-o", "d.html") == 0
    assert page_data("d.html")["sides"] == ["rank 1", "rank 0"]


def test_a_page_stays_below_its_limit_however_long_the_names_are() -> None:
    def name(pid: int, number: int) -> str:
        """240 characters that do not compress."""
        return "".join(hashlib.sha256(f"{pid} {number} {part}".encode()).hexdigest()[:60] for part in range(4))

    text = "".join(
        f'process 1:"torchrun";process {pid}:"python";thread ({pid}): MainThread;<module> (t.py:9);'
        f"{name(pid, number)} (t.py:{number}) 1\n"
        for pid in (2, 3, 4)
        for number in range(8000)
    )

    assert flame_main(write("long.txt", text), "--min-share", "0") == 0
    assert 1_000_000 < Path("long.flame.html").stat().st_size <= 3_000_000
    tree = tree_of(page_data("long.flame.html"), "all")
    assert tree["value"][0] == 24_000
    assert tree["hidden"] > 24_000 - 20_000  # fewer boxes than a tree may have otherwise
    assert tree["hidden"] == 24_000 - (len(tree["value"]) - 2)
