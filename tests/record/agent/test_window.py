"""Windows of this very process: what is recorded, kept, dropped and said."""

from __future__ import annotations

import _thread
import cProfile
import itertools
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.record.agent import marks
from stepscope.record.agent import window as window_module
from stepscope.record.agent.step_readings import held_bytes
from stepscope.record.agent.window import CALL_BYTES, CALL_JSON_BYTES
from stepscope.record.agent.window_session import Session, apart, quiet_allocator
from tests.record.agent.window_harness import CYCLES, read_events, read_steps, read_trace, recorded, train

pytestmark = pytest.mark.torch


def windows(run: Path) -> list[dict[str, Any]]:
    return read_events(run, "window")


def test_a_window_is_a_readable_trace_and_its_steps_are_flagged(tmp_path: Path) -> None:
    """torch assembles the trace on another thread, which has a heap of its own: nothing stays in the training's."""
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

    training = {e["tid"] for e in events if e.get("cat") == "cpu_op"}
    functions = [e["name"] for e in events if e.get("cat") == "python_function" and e["tid"] in training]
    assert any("_start_trace" in name for name in functions)
    assert any("apart" in name for name in functions)
    assert not any("__exit__" in name and "profiler" in name for name in functions)

    steps = {step["step"]: step for step in read_steps(run)}
    assert [number for number, step in steps.items() if step["in_window"]] == [2, 3, 4, 5, 6]
    between = steps[7]["start_ns"] - (steps[6]["start_ns"] + steps[6]["wall_ns"])
    assert window["stop_duration_ns"] > 0
    assert between >= window["stop_duration_ns"] + window["export_duration_ns"]


def test_where_memory_grows_one_more_window_holds_allocations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's CPU allocator would say on stderr that it does not know blocks from before the window."""
    level = quiet_allocator()
    before = level.value if level is not None else None
    with recorded(tmp_path / "run", time_share=1e6) as agent:
        train(40)
        agent.memory_question = "memory of the process grows"
        train(40)
        train(40)
    for stream in capfd.readouterr():
        assert "unknown size" not in stream
    told = windows(tmp_path / "run")
    asked = [window for window in told if "with allocations: memory of the process grows" in window["reason"]]
    assert len(asked) == (0 if level is None else 1)
    for window in told:
        held = any(
            event.get("name") == "[memory]" for event in read_trace(tmp_path / "run" / "rank-0" / window["trace"])
        )
        assert held == (window in asked)
    assert level is None or level.value == before


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


def test_work_is_done_where_a_thread_ends_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread has raised may strike any line."""
    start, done = _thread.start_new_thread, list[int]()
    monkeypatch.setattr("_thread.start_new_thread", lambda _run, args: start(lambda _ending: sys.exit(), args))
    apart(lambda: done.append(1))
    assert done == [1]


def test_work_is_done_here_where_a_limit_of_memory_is_near() -> None:
    """The C library ends the process where a thread has none left for its own data."""
    done, before = list[int](), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**29, before[1]))
    try:
        apart(lambda: done.append(threading.get_ident()))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert done == [threading.get_ident()]


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


def test_where_torch_could_not_record_functions_a_window_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads `self` of every frame of `nn.Module.__call__`, and ends the process where there is none."""
    import torch

    original = torch.nn.Module.__call__
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *args: original(*args))
    with recorded(tmp_path / "run", **CYCLES):
        train(8)
    (window,) = windows(tmp_path / "run")
    assert "nn.Module.__call__" in window["reason"]
    assert window["status"] == "kept"


def test_a_window_ends_whatever_the_script_has_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that went on would end the process with its library."""
    with recorded(tmp_path / "run", **CYCLES):
        train(3)
        for name in ("sys.getprofile", "sys.setprofile", "threading.get_ident", "threading.Thread.start"):
            monkeypatch.setattr(name, lambda *_: 1 / 0)
        train(5)
        monkeypatch.undo()
    assert [window["status"] for window in windows(tmp_path / "run")] == ["kept"]


@pytest.mark.parametrize("other", [False, True], ids=["function", "cProfile"])
def test_a_profile_function_that_the_script_puts_in_during_a_window_stays(tmp_path: Path, other: bool) -> None:
    profiler = cProfile.Profile()
    calls: list[str] = []
    try:
        with recorded(tmp_path / "run", **CYCLES):
            train(3)
            profiler.enable() if other else sys.setprofile(lambda _frame, event, _argument: calls.append(event))
            put_in = sys.getprofile()
            train(5)
            still = sys.getprofile()
    finally:
        profiler.disable()
        sys.setprofile(None)
    assert windows(tmp_path / "run")
    assert still is put_in


def test_a_warning_shown_once_is_not_shown_again_after_a_window(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        filters = list(warnings.filters)
        with recorded(tmp_path / "run", **CYCLES):
            for _ in range(8):
                warnings.warn("of the script", stacklevel=1)
                train(1)
        assert list(warnings.filters) == filters
    assert windows(tmp_path / "run")
    assert [str(warning.message) for warning in shown] == ["of the script"]


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_memory_that_is_near_opens_no_window(tmp_path: Path, kind: int) -> None:
    """torch ends the process where one of the profiler's threads gets no memory."""
    before = resource.getrlimit(kind)
    taken = psutil.Process().memory_info()
    with recorded(tmp_path / "run", **CYCLES):
        resource.setrlimit(kind, ((taken.vms if kind == resource.RLIMIT_AS else taken.data) + 2**29, before[1]))
        try:
            train(8)
        finally:
            resource.setrlimit(kind, before)
    assert not windows(tmp_path / "run")
    (skipped,) = read_events(tmp_path / "run", "window_skipped")
    assert "leaves less than" in skipped["reason"]


def test_regions_are_carried_into_the_trace(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def mark_region(_index: int) -> None:
        with marks.region("augment"):
            pass

    with recorded(run, **CYCLES):
        train(8, at=mark_region)
    events = read_trace(run / "rank-0" / windows(run)[0]["trace"])
    assert sum(e.get("cat") == "user_annotation" and e["name"] == "augment" for e in events) == 4


def fork(index: int) -> None:
    if index == 5:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("settings", "steps", "evaluated", "at", "outcome", "words"),
    [
        ({}, 6, 0, None, ("kept", "low", 3), "the process ended"),
        ({}, 3, 0, None, ("dropped", "low", 0), "ended"),
        ({}, 5, 2, None, ("kept", "low", 2), "evaluation"),
        ({}, 8, 0, fork, ("kept", "low", 2), "forked"),  # workers are not forked into a recording
        ({"time_share": 0.0}, 20, 0, None, ("kept", "high", 4), "as scheduled"),  # a second one needs time
        ({"byte_budget": 1000}, 20, 0, None, ("dropped", "high", 4), "byte budget"),
    ],
)
def test_how_a_window_ends_and_what_becomes_of_it(
    tmp_path: Path, settings: Any, steps: int, evaluated: int, at: Any, outcome: tuple[str, str, int], words: str
) -> None:
    run = tmp_path / "run"
    with recorded(run, **{**CYCLES, **settings}):
        train(steps, at=at)
        train(evaluated, backward=False)
    window = windows(run)[0]
    assert (window["status"], window["confidence"], window["steps"]) == outcome
    assert words in window["reason"]
    assert len(windows(run)) == (2 if "byte_budget" in settings else 1)
    kept = window["status"] == "kept"
    assert [path.name for path in (run / "rank-0").glob("trace-*")] == ([window["trace"]] if kept else [])
    assert not kept or read_trace(run / "rank-0" / window["trace"])
    reasons = " ".join(event["reason"] for event in read_events(run, "window_skipped"))
    assert ("of the run's time" in reasons) == ("time_share" in settings)
    assert bool(reasons) == (bool(settings) or not kept)
    assert "byte_budget" not in settings or window["bytes"] > 1000


CALLS_GAIN = 200_000 * CALL_BYTES  # 66 MB of trace a step, where the time says that it was calls


@pytest.mark.parametrize(
    ("gained", "slower_s", "budget", "kept"),
    [
        (CALLS_GAIN, 0.1, 200_000_000, ("high", 3)),  # calls of Python functions: a fourth step would not fit
        (CALLS_GAIN, 0.1, 20_000_000, ("low", 1)),
        (CALLS_GAIN, 0.1, 60_000_000, ("low", 2)),  # the first may have been slow for a reason of its own
        (CALLS_GAIN, 0.0, 60_000_000, ("high", 8)),  # the memory was the training's, or operators'
        (0, 0.1, 1_000_000, ("high", 8)),  # steps are slow, but nothing is held
        (75_000_000, 0.0, 200_000_000, ("high", 3)),  # operators
        (200_000_000, 0.0, 200_000_000, ("low", 1)),
    ],
)
def test_a_window_ends_before_its_trace_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gained: int, slower_s: float, budget: int, kept: tuple[str, int]
) -> None:
    run, held = tmp_path / "run", [0]
    monkeypatch.setattr(window_module, "held_bytes", lambda: held[0])

    def record(_index: int) -> None:
        if agent.own_profiler_active:
            held[0] += gained
            until_ns = time.thread_time_ns() + int(1e9 * slower_s)
            while time.thread_time_ns() < until_ns:
                sum(range(100_000))

    with recorded(run, mode="schedule", wait=4, warmup=0, active=8, repeat=1, byte_budget=budget) as agent:
        train(16, at=record)
    (window,) = windows(run)
    assert (window["status"], window["confidence"], window["steps"]) == ("kept", *kept)
    assert (f"after {kept[1]} of 8 steps: more of them would take" in window["reason"]) == (kept[1] < 8)


def test_the_first_trace_may_take_some_times_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that it is dropped, and one step is recorded without Python functions, whatever the share of time."""
    monkeypatch.setattr(window_module, "held_bytes", lambda: 0)
    with recorded(tmp_path / "run", **CYCLES):
        train(8)
    size = windows(tmp_path / "run")[0]["bytes"]
    with recorded(tmp_path / "kept", **{**CYCLES, "byte_budget": size // 2}):
        train(30)
    with recorded(tmp_path / "dropped", **{**CYCLES, "byte_budget": size // 4, "time_share": 0.0}):
        train(30)
    (first,) = windows(tmp_path / "kept")
    assert (first["status"], first["confidence"]) == ("kept", "high")
    (skipped,) = read_events(tmp_path / "kept", "window_skipped")
    assert "byte budget is used up" in skipped["reason"]
    first, second = windows(tmp_path / "dropped")
    assert (first["status"], second["status"], second["confidence"], second["steps"]) == ("dropped", "kept", "low", 1)
    assert "without Python functions: with them the trace took too many bytes" in second["reason"]
    events = read_trace(tmp_path / "dropped" / "rank-0" / second["trace"])
    assert {"cpu_op", "python_function"} & {event.get("cat") for event in events} == {"cpu_op"}


def test_what_a_call_of_a_python_function_holds_and_takes(tmp_path: Path) -> None:
    """From what the process holds follows how large a trace will be."""
    calls, before = 100_000, held_bytes()
    session = Session(memory=False, device=None, stacks=True)
    session.start()
    sum(number for number in range(calls))
    gained = held_bytes() - before
    session.stop()
    assert 0.8 < gained / (calls * CALL_BYTES) < 2
    assert 0.7 < session.export(str(tmp_path / "trace.json")) / (calls * CALL_JSON_BYTES) < 1.5


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
