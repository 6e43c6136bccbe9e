"""Calls that a knob changes: other arguments, an answer instead, a second try, and nothing at all once it failed."""

from __future__ import annotations

import inspect
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.guard import Guard
from stepscope.record.agent.patches import Patches, bound
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer, Call


class Library:
    """Stands for torch."""

    def __init__(self, width: int, depth: int = 1, *, fused: bool = False) -> None:
        if fused and width > 9:
            raise RuntimeError("too wide to fuse")
        if width < 0:
            raise ValueError("negative width")
        self.made = (width, depth, fused)


@pytest.fixture
def faults() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def patches(faults: list[tuple[str, str]]) -> Any:
    guard = Guard(lambda probe, error: faults.append((probe, error)))
    made = Patches(guard, "knob.k")
    original = Library.__init__
    yield made
    made.remove()
    assert Library.__init__ is original


def fuse(*args: Any, **kwargs: Any) -> Call:
    call = bound(inspect.signature(Library.__init__), args, kwargs)
    call.arguments["fused"] = True
    call.arguments["depth"] = call.arguments.get("depth", 1) + 1
    return Call(call.args, call.kwargs, "token")


def test_arguments_change_wherever_they_were_given(patches: Patches) -> None:
    told: list[tuple[Any, Any]] = []
    assert patches.change(Library, "__init__", fuse, lambda call, result: told.append((call.token, result)))
    assert not patches.change(Library, "no_such_function", fuse)
    assert Library(3).made == (3, 2, True)
    assert Library(3, 5).made == (3, 6, True)
    assert Library(depth=7, width=3, fused=False).made == (3, 8, True)
    assert told == [("token", None)] * 3
    patches.remove()
    assert Library(3).made == (3, 1, False)


def test_what_is_refused_is_done_as_the_script_wants_it(patches: Patches) -> None:
    told: list[str] = []
    after: list[Any] = []
    patches.change(
        Library, "__init__", fuse, lambda call, _: after.append(call), lambda _, error: told.append(str(error))
    )
    assert Library(12).made == (12, 1, False)
    assert told == ["too wide to fuse"]
    assert after == []
    with pytest.raises(ValueError, match="negative width") as caught:
        Library(-1)
    assert told == ["too wide to fuse"]  # the script's own mistake is not the knob's
    assert caught.value.__context__ is None
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    if sys.version_info >= (3, 11):  # before, our frame stays in tracebacks
        assert files == [__file__, __file__]


def test_an_answer_leaves_the_call_out(patches: Patches) -> None:
    torch = SimpleNamespace(calls=[])
    torch.set_count = torch.calls.append
    original = torch.set_count
    patches.change(torch, "set_count", lambda count: Answer("kept") if count > 2 else None)
    assert (torch.set_count(1), torch.set_count(5), torch.calls) == (None, "kept", [1])
    patches.remove()
    assert torch.set_count == original


def test_a_defect_leaves_the_call_alone_and_turns_the_knob_off(patches: Patches, faults: list[tuple[str, str]]) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Call:
        raise KeyError("defect")

    patches.change(Library, "__init__", fuse)
    patches.change(Library, "__init__", broken)
    assert Library(3).made == (3, 1, False)  # off for all wrappers of the knob
    assert Library(3).made == (3, 1, False)
    assert faults == [("knob.k", "KeyError: 'defect'")]
