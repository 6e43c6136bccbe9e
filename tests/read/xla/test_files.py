"""Which files are torch_xla's, and which of them are one run."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read.xla_files import is_xla_file, read_xla_files
from tests.read.xla.texts import READ, SYNC, analysis, counts, events, read, recorded, report, section, table

LOG = section(0, report(1, 1, 0)) + section(1, report(2, 2, 0))
DEBUG = analysis("Compilation", READ) + analysis("Execution", SYNC) + table((3, "f (/a/b.py:3)"))


@pytest.mark.parametrize(
    "text",
    [
        report(15, compiles=1),
        LOG,
        DEBUG,
        "loss 2\r 3%|pt-xla-profiler: CompileTime too frequent: 12 counts during 11 steps\n",
        "x\n" * 200_000 + report(3, 1),
        report(3, 1) + "x\n" * 200_000,
        "Counter: MarkStep\n  Value: 15\n",
    ],
)
def test_files_of_torch_xla_are_known(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.name"
    path.write_text(text)
    assert is_xla_file(path)
    packed = tmp_path / "any.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert is_xla_file(packed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 2.5\nMetric: accuracy\nValue: 3\n",
        "thread (0x7F);main (train.py:3);forward (model.py:9) 12\n",
        "a;b;c 12\n",
        '{"traceEvents": [{"ph": "X", "name": "pt-xla-profiler: x", "args": {"t": "Compilation Analysis: y"}}]}',
        '{"kind":"xla_warning","text":"pt-xla-profiler: CompileTime too frequent"}\n',
        "if line.startswith('pt-xla-profiler: '):\n    pass\n",
        "\0\1\2 pt-xla-profiler: binary",
        "Metric: loss\n  Value: 3\nCounter: epochs\n  Value: 2\n",
    ],
)
def test_other_files_are_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    assert not is_xla_file(path)
    with pytest.raises(UnreadableInputError, match="no report or debug log"):
        read_xla_files([path])


def test_a_folder_is_read_as_one_run_and_the_rest_of_it_counted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "metrics.txt").write_text(LOG)
    (tmp_path / "sub" / "debug.log.gz").write_bytes(gzip.compress(DEBUG.encode()))
    (tmp_path / "notes.md").write_text("# nothing")
    run = read_xla_files([tmp_path])
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert events(run, "xla_executions")
    assert dict(run.losses.counts) == {"foreign_files": 1}
    again = read_xla_files([tmp_path, tmp_path / "metrics.txt"])
    assert counts(again, "compile", "step") == {0: 1, 1: 1}


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=report(15, compiles=16), b__txt=report(20, compiles=2))
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=LOG, b__txt=LOG)
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=DEBUG, b__txt=DEBUG)


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="no such file"):
        read_xla_files([tmp_path / "none.txt"])
    with pytest.raises(UnreadableInputError, match="no report or debug log"):
        read_xla_files([tmp_path])


def test_a_packed_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = "".join(f"step {os.urandom(8).hex()}\n" for _ in range(30_000))
    packed = gzip.compress((LOG + noise + report(2, 2, 5)).encode())
    (tmp_path / "log.gz").write_bytes(packed[: len(packed) * 3 // 4])
    run = read_xla_files([tmp_path / "log.gz"])
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert run.losses.counts["cut_off_files"] == 1


def test_very_long_lines_are_passed_over(tmp_path: Path) -> None:
    run = read(tmp_path, out__txt="[" * 3_000_000 + "\n" + report(5, 2) + "Metric: " + "(" * 200_000)
    assert counts(run, "compile", "step") == {None: 2}
    assert run.losses.counts["bad_lines"] >= 1


def test_the_recorded_runs_together_are_refused() -> None:
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read_xla_files([recorded("good.stdout.txt").parent])
    for one, other in (("good", "bad"), ("good", "item"), ("bad", "fallback"), ("item", "fallback"), ("bad", "item")):
        with pytest.raises(UnreadableInputError, match="one run at a time"):
            read_xla_files([recorded(f"{one}.step14.metrics.txt"), recorded(f"{other}.step14.metrics.txt")])


@pytest.mark.parametrize("name", ["good", "bad", "item", "fallback"])
def test_all_recorded_files_of_a_run_are_one(name: str) -> None:
    paths = [path for path in sorted(recorded("").glob(f"{name}.*")) if is_xla_file(path)]
    others = [path.name for path in sorted(recorded("").glob(f"{name}.*")) if path not in paths]
    assert others == [f"{name}.stderr.txt", f"{name}.steps.json"]
    run = read_xla_files(paths)
    assert [rank.name for rank in run.ranks] == ["rank-0"]
    assert run.losses.counts == {}
