"""No file of a run folder is waited for, read without end or followed out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from stepscope.api import open_run
from stepscope.dashboard.server import live
from stepscope.errors import EnvironmentRefusal
from stepscope.files import open_regular, read_small
from stepscope.record.host.scheduler import keep_accounting
from stepscope.reduction.run import reduce_run
from stepscope.tables.schema import SCHEMAS
from tests.builders import T0
from tests.run_folders import make_run_folder

STACKS = "train (train.py:3) 9\n"
READING = {"time_ns": T0, "metrics": [["cpu_pct", "%", 40.0, 1, None]]}


def elsewhere(path: Path) -> None:
    """A link to a file of the same content outside of the run folder."""
    other = path.parents[2] / f"other-{path.name}"
    shutil.move(path, other)
    path.symlink_to(other)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


@pytest.mark.parametrize("spoil", [pipe, endless, folder, nested, elsewhere])
def test_a_run_folder_of_files_that_are_none(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Each file in turn: the rest of the run is read, and what could not be is said or left out."""
    whole = make_run_folder(tmp_path, stacks_raw=STACKS, system=[READING], events=[{"kind": "loader"}], name="whole")
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    assert len(names) >= 7
    for number, name in enumerate([*names, "host-a/stacks-0.times.json", "notebook/cells.json"]):
        run = shutil.copytree(whole, tmp_path / f"{spoil.__name__}{number}")
        (run / name).parent.mkdir(exist_ok=True)
        if spoil is not elsewhere or (run / name).exists():
            spoil(run / name)
        live.standing(run)
        keep_accounting(run)  # as `analyze` does before it reads
        opened = open_run(run)
        assert opened.report().schema
        if name == "rank-0/steps.jsonl":
            assert not opened.analysis.steps
            assert any("steps.jsonl" in note.source + note.text for note in opened.analysis.quality.notes)


def test_a_folder_of_a_run_that_leads_out_of_it_is_not_read(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path, name="run")
    other = make_run_folder(tmp_path, name="other", rank=1)
    (run / "rank-1").symlink_to(other / "rank-1")
    assert [rank.rank for rank in open_run(run).tables.ranks] == [0]


def test_nothing_is_written_out_of_a_run_folder(tmp_path: Path) -> None:
    run, kept = make_run_folder(tmp_path), tmp_path / "kept"
    kept.mkdir()
    (kept / "mine").write_text("mine")
    for name in ("tables", "reduced"):
        (run / name).symlink_to(kept)
    assert open_run(run).report().schema
    with pytest.raises(EnvironmentRefusal, match="link"):
        reduce_run(run)
    assert [path.name for path in kept.iterdir()] == ["mine"]
    (run / "tables").unlink()
    (run / "tables").mkdir()
    (run / "tables" / "tables.json.part").symlink_to(kept / "mine")
    pipe(run / "tables" / "nodes.parquet")
    for name in sorted({*SCHEMAS} - {"nodes"}):
        (run / "tables" / f"{name}.parquet").symlink_to(kept / "mine")
    assert open_run(run).report().schema
    assert (kept / "mine").read_text() == "mine"
    assert all(pl.read_parquet(run / "tables" / f"{name}.parquet").columns for name in SCHEMAS)


def test_links_that_the_user_names_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_small(tmp_path / "link", 4, follow=True) == b"text"
    with pytest.raises(OSError, match="link"):
        open_regular(tmp_path / "link")
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_small(tmp_path / "file", 3)
