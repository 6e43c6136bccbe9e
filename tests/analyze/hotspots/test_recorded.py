"""Hotspots of real files, computed again here from the definition of the format."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.host.hotspots import NO_FRAME
from stepscope.analyze.host.stack_selection import StackSelection
from stepscope.model.sampled import Hotspots
from stepscope.read.stacks.sampled_files import read_stack_files
from stepscope.tables import build
from tests.analyze.hotspots.test_table import found, library
from tests.analyze.shared_traces import TRACES

PY_SPY = TRACES / "py_spy"
needs_files = pytest.mark.skipif(not PY_SPY.is_dir(), reason=f"the recorded stacks are not at {PY_SPY}")


def recorded(*names: str, **options: Any) -> Hotspots:
    return found(build(read_stack_files([PY_SPY / name for name in names])), **options)


def own_sum(name: str) -> int:
    """All counts of a file, by nothing but the format's last field; a newline in a name ends no record there."""
    lines = (PY_SPY / name).read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    return sum(int(line.rpartition(" ")[2]) for line in lines if re.search(r" \d+$", line))


def recomputed(name: str, component: str) -> Counter[tuple[Any, ...]]:
    """Innermost frame and innermost frame of a library by line of a file without process and thread prefixes."""
    table: Counter[tuple[Any, ...]] = Counter()
    for record in (PY_SPY / name).read_text(encoding="utf-8").splitlines():
        text, _, count = record.rpartition(" ")
        frames = [re.fullmatch(r"(.*) \((.*):(\d+)\)", frame) for frame in text.split(";")] if text else []
        parsed = [(match[1], match[2], int(match[3])) for match in frames if match]
        assert len(parsed) == len(frames)
        inside = [frame for frame in parsed if component in re.sub(r"\.py$", "", frame[1]).split("/")]
        leaf = parsed[-1] if parsed else (NO_FRAME, "", None)
        table[(*leaf, *(inside[-1] if inside else (None, None, None)))] += int(count)
    return table


@needs_files
class TestRecorded:
    @pytest.mark.parametrize("component", ["train", "torch", "data", "nothing"])
    def test_the_table_of_a_file_without_prefixes(self, component: str) -> None:
        result = recorded("plain.txt", library=component)
        assert {(row.name, row.path, row.line, *library(row)): row.samples for row in result.rows} == recomputed(
            "plain.txt", component
        )
        assert result.samples == result.selected_samples == own_sum("plain.txt") == 816
        assert all(row.proportion == row.samples / 816 for row in result.rows)
        counts = [row.samples for row in result.rows]
        assert counts == sorted(counts, reverse=True)

    @pytest.mark.parametrize("name", sorted(path.name for path in PY_SPY.glob("*.txt")))
    def test_every_sample_of_every_file_is_accounted_for(self, name: str) -> None:
        result = recorded(name)
        assert result.samples + result.skipped_samples == own_sum(name)
        assert result.selected_samples + sum(result.left_out.values()) == result.samples
        assert sum(row.samples for row in result.rows) == result.selected_samples

    @pytest.mark.parametrize(
        ("name", "idle"),
        [
            ("databound_active.txt", False),
            ("databound_idle.txt", True),
            ("ddp.txt", False),
            ("ddp_idle.txt", True),
            ("forkserver.txt", False),
            ("gil.txt", None),  # only holders of the lock: no thread that waits was sampled
            ("nolineno.txt", False),
            ("pair1_s_t.txt", False),
            ("pin.txt", True),
            ("plain.txt", False),
            ("s_only.txt", False),
            ("spawn.txt", False),
        ],
    )
    def test_whether_waiting_was_sampled(self, name: str, idle: bool | None) -> None:
        result = recorded(name)
        assert result.idle is idle
        assert any("waiting was not sampled" in text for text in result.warnings) is (idle is False)

    def test_launchers_are_left_out_and_ranks_told_apart(self) -> None:
        result = recorded("ddp_idle.txt")
        assert result.left_out["launchers"] == 3015
        assert {process.rank for process in result.processes} == {0, 1}
        assert any("do not name ranks" in text for text in result.warnings)
        one = recorded("ddp_idle.txt", selection=StackSelection(rank=1, phase="backward"))
        assert {process.rank for process in one.processes} == {1}
        assert 0 < one.selected_samples < result.selected_samples


def test_files_of_a_folder_are_summed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<module> (train.py:1);f (train.py:2) 5\n")
    (tmp_path / "b.txt").write_text("f (train.py:2) 1\n" * 8 + "g (train.py:3) oops\n")
    (tmp_path / "job.log").write_text("epoch 1\nloss 0.5 at last\n")
    result = found(build(read_stack_files([tmp_path])), library="train")
    assert [(row.name, row.samples) for row in result.rows] == [("f", 13)]
    assert result.files == 2
    assert any("1 file(s) beside them hold no sampled stacks" in text for text in result.warnings)


def test_a_record_that_was_cut_off_is_said(tmp_path: Path) -> None:
    file = tmp_path / "cut.txt"
    good = "".join(f"<module> (a.py:1);f (a.py:{line}) 10\n" for line in range(2, 6))
    file.write_text(good + "<module> (a.py:1);g (a.p")
    result = found(build(read_stack_files([file])))
    assert (result.samples, result.skipped_samples) == (40, 0)
    assert any("1 record(s) are cut off" in text for text in result.warnings)
