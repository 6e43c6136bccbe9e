"""`stepscope.compare`: runs, sets of runs, traces and spans against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepscope
from stepscope.analyze.views.select import Selection
from stepscope.api import ReadOptions
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, Comparison
from tests import gpu_traces
from tests.builders import step_rows
from tests.comparison.run_sets import make_run, make_set
from tests.records import some
from tests.run_folders import make_run_folder

UNCACHED = ReadOptions(cache=False)


def compared(a: object, b: object, **options: object) -> Comparison:
    return stepscope.compare(a, b, options=UNCACHED, **options)  # type: ignore[arg-type]


def word(found: Comparison) -> str | None:
    return found.outcome.verdict.word if found.outcome is not None else None


def names(found: Comparison, kind: str) -> dict[str, str]:
    return {change.name: change.status for change in found.changes if change.kind == kind}


def test_sampled_functions_are_compared(tmp_path: Path) -> None:
    def stacks(slow: int) -> str:
        frames = 'process 100:"python train.py";thread (0x1)'
        main = f"{frames};main (/home/user/project/train.py:10)"
        return f"{main};load (/home/user/project/data.py:4) {slow}\n{main};step (/home/user/project/train.py:12) 400\n"

    a = make_run(tmp_path / "a", data_wait_ms=1, stacks_raw=stacks(50), steps=400)
    b = make_run(tmp_path / "b", data_wait_ms=9, stacks_raw=stacks(400), steps=400)
    found = compared(a, b)
    rows = {row.name: row for row in found.changes if row.kind == "function"}
    assert rows["load"].status == "grew"
    assert rows["load"].file == "data.py"
    assert {row.name: row.line for row in found.changes if row.kind == "line"}["load"] == 4


def test_the_environment_is_laid_side_by_side(tmp_path: Path) -> None:
    git = {"root": "/p", "commit": "1" * 40, "branch": "main", "dirty": False}
    a = make_run(tmp_path / "a", manifest={"git": git, "environment": {"OMP_NUM_THREADS": "1"}})
    b = make_run(tmp_path / "b", manifest={"git": {**git, "dirty": True}, "command": ["python", "train.py", "--fast"]})
    found = compared(a, b)
    rows = {row.name: (row.baseline, row.candidate) for row in found.changes if row.kind == "environment"}
    assert rows["uncommitted changes"] == ("no", "yes")
    assert rows["command"] == ("python train.py", "python train.py --fast")
    assert rows["$OMP_NUM_THREADS"] == ("1", None)
    assert "git commit" not in rows


@pytest.mark.parametrize(("wait_ms", "expected"), [(1, NO_DIFFERENCE), (3, SLOWER), (0.2, FASTER)])
def test_sets_of_runs_are_paired_and_judged(tmp_path: Path, wait_ms: float, expected: str) -> None:
    found = compared(make_set(tmp_path / "a"), make_set(tmp_path / "b", data_wait_ms=wait_ms))
    assert word(found) == expected
    effect = some(found.outcome).effects["mean_ms"]
    assert effect.pairs == 4
    assert some(effect.low) <= effect.ratio <= some(effect.high)
    assert names(found, "phase") == ({} if wait_ms == 1 else {"data_wait": "grew" if wait_ms > 1 else "shrank"})


def test_a_run_that_cannot_be_read_is_left_out_of_a_set(tmp_path: Path) -> None:
    make_set(tmp_path / "a", runs=4)
    make_set(tmp_path / "b", runs=3)
    broken = make_run(tmp_path / "b" / "run-9", steps=1)
    for file in broken.glob("*/*"):
        file.write_bytes(b"")
    found = compared(tmp_path / "a", tmp_path / "b")
    assert len(some(found.outcome).pairs) == 3


def test_an_experiment_of_several_programs_says_how_to_name_one(tmp_path: Path) -> None:
    for name in ("001-baseline", "002-workers-2"):
        make_run(tmp_path / "experiment" / "runs" / name)
    with pytest.raises(UsageError, match=r"runs/\*-baseline"):
        compared(tmp_path / "experiment", make_run(tmp_path / "b"))


def test_two_spans_of_one_worker(tmp_path: Path) -> None:
    for number, gemm in ((1, 300), (2, 30)):
        gpu_traces.write(tmp_path / "logs" / f"worker0.170000000000{number}.pt.trace.json", steps=4, gemm_us=gemm)
    found = compared(tmp_path / "logs", tmp_path / "logs", selection=Selection(span=1), against=Selection(span=2))
    assert (found.baseline.label, found.candidate.label) == ("logs span 1", "logs span 2")
    assert names(found, "kernel")["ampere_sgemm_h1688_64x64"] == "shrank"
    assert "span" in found.absent["finding"]
    with pytest.raises(UsageError, match="no such worker or span"):
        compared(tmp_path / "logs", tmp_path / "logs", selection=Selection(span=1), against=Selection(span=7))


def test_a_run_without_profiled_steps_has_no_step_time_in_common_with_a_trace(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    trace = gpu_traces.write(tmp_path / "b" / "worker0.pt.trace.json", steps=4)
    found = compared(run, trace)
    assert found.outcome is None
    assert "slowed by the profiler" in found.absent["step time"]
    assert found.changes  # what was measured of each is still told


def test_a_run_with_a_window_is_compared_with_a_trace_by_its_profiled_steps(tmp_path: Path) -> None:
    trace = gpu_traces.write(tmp_path / "trace-0.pt.trace.json", steps=4)
    start = gpu_traces.BASE_NS + gpu_traces.STEP_US * 1000
    rows = step_rows(4, start_ns=start, data_wait_ms=0.2, forward_ms=0.8, backward_ms=0, optimizer_ms=0, other_ms=0)
    inside = [{**row, "in_window": True} for row in rows]
    outside = step_rows(40, start_ns=start + 10**9, first_step=4)
    run = make_run_folder(tmp_path, name="run", steps=[*inside, *outside], traces={"trace-0.pt.trace.json": trace})
    found = compared(run, trace)
    assert some(found.outcome).effects["mean_ms"].ratio == pytest.approx(1, abs=0.05)
    assert found.baseline.figures["mean_ms"] < 2


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UnreadableInputError):
        compared(run, empty)
    with pytest.raises(UnreadableInputError):
        compared(tmp_path / "missing", run)
    with pytest.raises(UsageError, match="on both sides"):
        compared(run, tmp_path / "empty" / ".." / "a")
    with pytest.raises(UsageError):
        compared([], run)


def test_a_folder_with_traces_of_several_runs_has_no_one_step_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trace = gpu_traces.write(tmp_path / "logs" / name / "worker0.pt.trace.json", steps=4)
    found = compared(tmp_path / "logs", trace)
    assert found.outcome is None
    assert "several runs" in found.absent["step time"]


def test_a_knob_that_was_tried_by_hand_is_named(tmp_path: Path) -> None:
    options = {"knobs": [["loader.num_workers", "2"]], "seed": 1}
    report = {"kind": "knob", "knob": "loader.num_workers", "value": "2", "applied": True, "observed": "2"}
    report |= {"reason": None, "file": None, "line": None}
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", events=[report], manifest={"options": options})
    found = compared(a, b)
    assert [(knob.knob, knob.value) for knob in some(found.outcome).knobs] == [("loader.num_workers", "2")]
    assert names(found, "environment")["knob loader.num_workers"] == "new"
