"""The guard: one report, one switch per probe, and everything of the user's passes."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import Any

import pytest

from stepscope.record.agent import guard as guard_module
from stepscope.record.agent.guard import Guard


@pytest.fixture
def reports() -> list[tuple[str, str]]:
    return []


def fail(*_: object) -> None:
    raise ValueError("defect")


def test_a_failing_hook_is_reported_once_and_switched_off(reports: list[tuple[str, str]]) -> None:
    calls = []
    guard = Guard(lambda probe, error: reports.append((probe, error)))
    hook = guard.wrap("loader", lambda: (calls.append(1), fail()))
    sibling = guard.wrap("loader", lambda: calls.append(2))
    other = guard.wrap("other", lambda: "works")
    assert [hook(), hook(), sibling()] == [None] * 3
    assert calls == [1]
    assert reports == [("loader", "ValueError: defect")]
    assert guard.is_off("loader")
    assert other() == "works"
    assert Guard(fail).wrap("loader", fail)() is None  # a report that fails is swallowed


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_belongs_to_the_user_passes(interruption: type[BaseException], reports: list[tuple[str, str]]) -> None:
    guard = Guard(lambda probe, error: reports.append((probe, error)))

    def interrupted() -> None:
        raise interruption

    with pytest.raises(interruption):
        guard.wrap("loader", interrupted)()
    assert not guard.is_off("loader")
    assert reports == []


def test_a_hook_that_fails_with_its_callers_frame_at_hand_is_switched_off(reports: list[tuple[str, str]]) -> None:
    def looks() -> None:
        frame = sys._getframe(1)
        raise ValueError(frame.f_lineno)

    guard = Guard(lambda probe, error: reports.append((probe, error)))
    guard.wrap("loader", lambda: looks())()
    assert guard.is_off("loader")


@pytest.mark.parametrize("form", ["function", "any arguments", "bound method"])
def test_what_a_signals_handler_raises_in_a_hook_passes(form: str, reports: list[tuple[str, str]]) -> None:
    class Limit(Exception):
        def over(self, _number: int, _frame: object) -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise self

    handlers = {"function": lambda _number, _frame: fail(), "any arguments": fail, "bound method": Limit().over}
    guard = Guard(lambda probe, error: reports.append((probe, error)))
    hook = guard.wrap("loader", lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handlers[form])
    try:
        with pytest.raises((ValueError, Limit)):
            hook()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not guard.is_off("loader")
    assert reports == []


class TimeIsOver(Exception):
    def __init__(self) -> None:
        super().__init__("time is over")


@pytest.mark.parametrize("kind", [TimeoutError, TimeIsOver])
def test_what_another_thread_raises_in_a_hook_passes(kind: type[Exception], reports: list[tuple[str, str]]) -> None:
    """It strikes a line of ours."""
    guard = Guard(lambda probe, error: reports.append((probe, error)))
    raise_there = ctypes.pythonapi.PyThreadState_SetAsyncExc
    told = (ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind))
    struck: dict[str, Any] = {"raise_there": raise_there, "told": told}
    code = "def hook():\n raise_there(*told)\n for _ in range(10**6): pass"
    exec(compile(code, guard_module.__file__, "exec"), struck)
    with pytest.raises(kind):
        guard.wrap("loader", struck["hook"])()
    assert not guard.is_off("loader")
    assert reports == []
