"""A real job of three ranks, recorded and reduced: by its reduced tables alone the slow rank is named, and its line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stepscope.analyze.ranks import judge
from stepscope.model.ranks import Straggler
from stepscope.tables.reduced import LABELS, load
from tests.integration.harness import PYTHON, SCRIPTS, Recorded, command, line_of, record, step_rows

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = SCRIPTS / "slow_line.py"
SLOW, RANKS = 2, 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = record(tmp_path_factory.mktemp("three") / "run", [*torchrun, str(SCRIPT), "--slow", str(SLOW)])
    assert done.status == 0, done.text
    return done


@pytest.fixture(scope="module")
def run(recorded: Recorded) -> Path:
    reduced = command("reduce", str(recorded.folder))
    assert reduced.returncode == 0, reduced.stderr
    return recorded.folder


def test_torchrun_records_every_rank(recorded: Recorded) -> None:
    ranks = list(range(RANKS))
    assert sorted(path.name for path in recorded.folder.glob("rank-*")) == [f"rank-{rank}" for rank in ranks]
    for rank in ranks:
        assert len(step_rows(recorded.folder / f"rank-{rank}")) in {119, 120}
    run = recorded.report["run"]
    assert (run["ranks"], run["world_size"]) == (ranks, RANKS)
    assert recorded.report["steps"]["ranks"] == ranks


def first_straggler(reduced: Path) -> Straggler:
    return judge(load(reduced)).stragglers[0]


def test_the_reduced_tables_alone_name_rank_and_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "reduced", tmp_path / "copy" / "reduced")
    found = first_straggler(tmp_path / "copy" / "reduced")
    assert (found.kind, found.ranks) == ("rank", (SLOW,))
    assert found.place is not None
    assert (Path(found.place.file).name, found.place.function) == (SCRIPT.name, "augment")
    busy = line_of(SCRIPT, "features = features.sin().cos()")
    assert found.place.line in (busy - 1, busy)
    shown = command("analyze", str(tmp_path / "copy"))
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert f"rank {SLOW} keeps the others waiting" in text
    assert f"{SCRIPT.name}:{found.place.line}" in text


def test_where_both_are_there_the_run_is_read_in_full_and_says_the_same(run: Path) -> None:
    shown = command("analyze", str(run))
    assert shown.returncode == 0, shown.stderr
    assert f"Rank {SLOW} works" in " ".join(shown.stdout.split())
    windows = load(run / "reduced").scan("steps").filter(label=LABELS.index("window")).collect().to_dicts()
    assert {row["rank"] for row in windows} <= {0, 1, 2}
    assert any(row["collective_us"] for row in windows)
