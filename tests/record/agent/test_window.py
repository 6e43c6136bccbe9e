"""Windows of this very process: what is recorded, kept, dropped and said."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.record.agent.window_session import apart
from tests.record.agent.window_harness import CYCLES, read_events, read_steps, read_trace, recorded, train

pytestmark = pytest.mark.torch


def windows(run: Path) -> list[dict[str, Any]]:
    return read_events(run, "window")


def test_a_window_is_a_readable_trace_with_stacks_and_shapes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(8)
    (window,) = windows(run)
    assert (window["status"], window["confidence"], window["steps"], window["first_step"]) == ("kept", "high", 4, 3)
    trace = run / "rank-0" / window["trace"]
    assert trace.stat().st_size == window["bytes"]
    events = read_trace(trace)
    assert any(e.get("cat") == "python_function" and "window_harness.py" in e["name"] for e in events)
    linear = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::addmm"]
    assert len(linear) == 4
    assert [4, 8] in linear[0]["args"]["Input Dims"]
    assert not list((run / "rank-0").glob("*.tmp"))


def test_what_a_window_leaves_behind_is_not_in_the_heap_of_the_training_thread(tmp_path: Path) -> None:
    """torch assembles the trace on another thread, which has a heap of its own."""
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(8)
    (window,) = windows(run)
    events = read_trace(run / "rank-0" / window["trace"])
    training = {e["tid"] for e in events if e.get("cat") == "cpu_op"}
    functions = [e["name"] for e in events if e.get("cat") == "python_function" and e["tid"] in training]
    assert any("_start_trace" in name for name in functions)
    assert any("apart" in name for name in functions)
    assert not any("__exit__" in name and "profiler" in name for name in functions)


@pytest.mark.parametrize("of_main_thread", [True, False])
def test_work_apart_raises_what_it_raised_and_is_over_before_a_signal_is(of_main_thread: bool) -> None:
    done: list[int] = []

    def work() -> None:  # the handler runs on the main thread, which waits or has just ended to wait
        thread = threading.main_thread().ident if of_main_thread else threading.get_ident()
        assert thread is not None
        signal.pthread_kill(thread, signal.SIGINT)
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        apart(work)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        apart(lambda: done.append(1 // 0))


def test_no_thread_of_ours_is_left_when_work_apart_is_done() -> None:
    """The script's profiler may start right then, and records what every thread is in."""
    over = threading.Event()
    busy = threading.Thread(target=lambda: all(not over.is_set() for _ in itertools.count()))
    usual = sys.getswitchinterval()
    left = 0
    sys.setswitchinterval(1e-6)
    try:
        busy.start()
        for _ in range(500):
            threads: list[int] = []
            apart(lambda threads=threads: threads.append(threading.get_ident()))
            left += threads[0] in sys._current_frames()
    finally:
        over.set()
        sys.setswitchinterval(usual)
        busy.join()
    assert left == 0


def test_a_profile_function_of_the_script_stays(tmp_path: Path) -> None:
    """torch records Python functions in its place, and takes it out for good."""
    run = tmp_path / "run"
    calls: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        with recorded(run, **CYCLES):
            train(8)
            still = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert still is not None
    (window,) = windows(run)
    assert "sys.setprofile" in window["reason"]
    categories = {event.get("cat") for event in read_trace(run / "rank-0" / window["trace"])}
    assert "cpu_op" in categories
    assert "python_function" not in categories


def test_regions_are_carried_into_the_trace(tmp_path: Path) -> None:
    from stepscope.record.agent.marks import region

    run = tmp_path / "run"

    def mark_region(_index: int) -> None:
        with region("augment"):
            pass

    with recorded(run, **CYCLES):
        train(8, at=mark_region)
    (window,) = windows(run)
    events = read_trace(run / "rank-0" / window["trace"])
    assert sum(e.get("cat") == "user_annotation" and e["name"] == "augment" for e in events) == 4


def test_steps_of_a_window_are_flagged_and_its_closing_is_in_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(8)
    steps = read_steps(run)
    assert [step["step"] for step in steps if step["in_window"]] == [2, 3, 4, 5, 6]
    (window,) = windows(run)
    last = next(step for step in steps if step["step"] == 6)
    following = next(step for step in steps if step["step"] == 7)
    between = following["start_ns"] - (last["start_ns"] + last["wall_ns"])
    assert window["stop_duration_ns"] > 0
    assert between >= window["stop_duration_ns"] + window["export_duration_ns"]


def test_a_repeated_window_needs_time_in_the_budget(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **{**CYCLES, "time_share": 0.0}):
        train(20)
    assert len(windows(run)) == 1
    assert any("of the run's time" in event["reason"] for event in read_events(run, "window_skipped"))


def test_a_trace_over_the_byte_budget_is_deleted_and_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **{**CYCLES, "byte_budget": 1000}):
        train(20)
    (window,) = windows(run)
    assert window["status"] == "dropped"
    assert window["bytes"] > 1000
    assert "byte budget" in window["reason"]
    assert not list((run / "rank-0").glob("trace-*"))
    assert read_events(run, "window_skipped")


def test_a_window_open_at_the_end_is_kept_with_low_confidence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(6)
    (window,) = windows(run)
    assert (window["status"], window["confidence"], window["steps"]) == ("kept", "low", 3)
    assert read_trace(run / "rank-0" / window["trace"])


def test_a_window_without_a_whole_step_is_dropped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(3)
    (window,) = windows(run)
    assert (window["status"], window["trace"]) == ("dropped", None)


def test_evaluation_ends_a_window(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES):
        train(5)
        train(2, backward=False)
    (window,) = windows(run)
    assert (window["status"], window["confidence"], window["steps"]) == ("kept", "low", 2)
    assert "evaluation" in window["reason"]


def test_compilation_inside_a_window_drops_it_and_allows_another(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES) as agent:

        def compile_in_step_4(index: int) -> None:
            if index == 4:
                agent.last_compile_step = agent.steps.current_step()

        train(15, at=compile_in_step_4)
    first, second = windows(run)
    assert (first["status"], second["status"]) == ("dropped", "kept")
    assert "compilation" in first["reason"]


def test_a_stolen_session_is_dropped_and_never_touched_again(tmp_path: Path) -> None:
    import torch.autograd.profiler as low

    run = tmp_path / "run"
    prepare, start = low.profile._prepare_trace, low._run_on_profiler_start
    stop = low._run_on_profiler_stop

    def steal(index: int) -> None:
        if index == 4:  # as code would that holds torch's own functions from before the recorder came
            seen = low.profile._prepare_trace, low._run_on_profiler_start, low._run_on_profiler_stop
            low.profile._prepare_trace, low._run_on_profiler_start, low._run_on_profiler_stop = prepare, start, stop
            with low.profile(use_kineto=True) as prof:
                pass
            assert prof.kineto_results is not None
            low.profile._prepare_trace, low._run_on_profiler_start, low._run_on_profiler_stop = seen

    with recorded(run, **CYCLES):
        train(15, at=steal)
    first, second = windows(run)
    assert first["status"] == "dropped"
    assert "took the session over" in first["reason"]
    assert second["status"] == "kept"


def test_a_boundary_on_another_thread_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, **CYCLES) as agent:
        manager = agent.probes.get("user_profiler").make_room.__self__
        train(4)
        assert manager.is_open
        thread = threading.Thread(target=manager, args=(None, agent.clock.now()))
        thread.start()
        thread.join()
        assert manager.is_open
        train(4)
    assert [window["status"] for window in windows(run)] == ["kept"]


def test_workers_are_not_forked_into_a_recording(tmp_path: Path) -> None:
    import os

    run = tmp_path / "run"

    def fork(index: int) -> None:
        if index == 5:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    with recorded(run, **CYCLES):
        train(8, at=fork)
    (window,) = windows(run)
    assert (window["status"], window["steps"]) == ("kept", 2)
    assert "forked" in window["reason"]


@pytest.mark.parametrize("faulty", ["window", "user_profiler"])
def test_a_fault_of_ours_costs_the_window_and_nothing_else(tmp_path: Path, faulty: str) -> None:
    import torch

    run = tmp_path / "run"
    with recorded(run, faults=faulty, **CYCLES):
        train(5)
        with torch.profiler.profile() as prof:
            torch.ones(3) + 1
        train(12)
    assert any(event.key == "aten::add" for event in prof.key_averages())
    assert any(event["probe"] == faulty for event in read_events(run, "probe_error"))
    assert all(window["status"] == "dropped" for window in windows(run))


def test_off_means_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, mode="off"):
        train(12)
    assert not read_events(run, "window", "window_skipped")
