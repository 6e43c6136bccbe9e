"""The script's own profiler beside ours, in real processes: same ending, same output, same trace as without us."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.record.agent.processes import Outcome
from tests.record.agent.window_harness import CYCLES, read_events, read_steps, recorded, run_script, train

pytestmark = [pytest.mark.torch, pytest.mark.process]


def profile_with(folder: Path, **settings: Any) -> tuple[Outcome, dict[str, Any]]:
    output = folder / "out" / "counts.json"
    output.parent.mkdir(parents=True)
    done = run_script(folder, "profilers.py", str(output), **settings)
    assert output.exists(), done.stderr
    return done, json.loads(output.read_text())


def test_the_scripts_profiler_sees_what_it_would_see_without_us(tmp_path: Path) -> None:
    without, expected = profile_with(tmp_path / "without", recorded=False)
    beside, seen = profile_with(tmp_path / "beside", window=CYCLES)
    run = beside.run
    assert (beside.status, beside.stdout, beside.stderr) == (without.status, without.stdout, without.stderr)
    assert len(expected) == 11
    assert seen == expected
    # and it did meet our windows: some gave way in the middle, others were kept whole before and after
    windows = read_events(run, "window")
    reasons = [window["reason"] for window in windows if window["confidence"] == "low"]
    assert sum("made a profiler of its own" in reason for reason in reasons) >= 3
    assert sum("own profiler opens" in reason for reason in reasons) >= 1
    assert sum(window["confidence"] == "high" for window in windows) >= 5
    adopted = {Path(event["path"]).stem for event in read_events(run, "user_trace")}
    assert adopted == set(expected)
    assert not read_events(run, "probe_error")
    assert read_events(run, "suspended")


def test_a_copy_of_the_scripts_profiler_has_its_own_schedule(tmp_path: Path) -> None:
    import torch

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with recorded(tmp_path / "run", mode="off"):
        profiler = torch.profiler.profile(schedule=schedule)
        assert copy.deepcopy(profiler.schedule) is copy.copy(profiler.schedule) is schedule


def test_training_within_a_profiler_with_stacks_leaves_word_of_it(tmp_path: Path) -> None:
    import torch

    run = tmp_path / "run"
    with recorded(run, mode="off"), torch.profiler.profile(with_stack=True):
        train(2)
    assert read_events(run, "suspended")


def test_no_window_opens_while_the_script_has_a_profiler(tmp_path: Path) -> None:
    import gc

    import torch

    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        forgotten = torch.profiler.profile()  # one that was thrown away is no obstacle
        del forgotten
        gc.collect()
        prof = torch.profiler.profile(schedule=lambda _: torch.profiler.ProfilerAction.NONE)
        prof.start()
        train(8)
        assert not read_events(run, "window")
        prof.stop()
        train(8)
        assert read_events(run, "window")
    assert any("profiler of its own" in event["reason"] for event in read_events(run, "window_skipped"))


def test_steps_under_the_scripts_profiler_are_flagged(tmp_path: Path) -> None:
    import torch

    run = tmp_path / "run"
    with recorded(run, mode="off"):
        train(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            train(2)
        train(2)
    flagged = [bool(step["in_window"]) for step in read_steps(run)]
    # the step under way when the profiler opens or closes is flagged as well
    assert flagged == [False, False, True, True, True, False]


def test_traces_the_script_writes_are_adopted(tmp_path: Path) -> None:
    import torch

    run, traces = tmp_path / "run", tmp_path / "traces"
    with recorded(run, mode="off"):
        train(1)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(traces), use_gzip=True),
        ):
            train(1)
        with torch.autograd.profiler.profile(use_kineto=True) as older:
            train(1)
        older.export_chrome_trace(str(tmp_path / "older.json"))
    paths = [Path(event["path"]) for event in read_events(run, "user_trace")]
    assert paths == [*traces.iterdir(), tmp_path / "older.json"]
    assert paths[0].name.endswith(".gz")
