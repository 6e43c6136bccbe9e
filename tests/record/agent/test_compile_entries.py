"""Entries of Dynamo's compilation metrics as fields of events, whatever a version of torch leaves out."""

from __future__ import annotations

import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.probes import compiles
from stepscope.record.agent.probes.compiles import Call

CALLER = [("/home/user/train.py", 52, "main")]


def test_entries_are_told_apart_by_identity_while_the_list_rolls() -> None:
    entries: deque[Any] = deque([SimpleNamespace(number=n) for n in range(3)], maxlen=3)
    last = entries[-1]
    entries.extend([SimpleNamespace(number=3), SimpleNamespace(number=4)])
    fresh, seen = compiles.new_entries(entries, last)
    assert ([entry.number for entry in fresh], seen) == ([3, 4], True)
    entries.extend([SimpleNamespace(number=5), SimpleNamespace(number=6), SimpleNamespace(number=7)])
    fresh, seen = compiles.new_entries(entries, last)
    assert ([entry.number for entry in fresh], seen) == ([5, 6, 7], False)
    assert compiles.new_entries(deque(), last) == ([], False)


def test_an_entry_of_another_shape_gives_nulls() -> None:
    fields = compiles.entry_fields(SimpleNamespace(compile_id="0/1", co_firstlineno="three", is_forward=None))
    assert fields.pop("graph") == "0/1"
    assert fields.pop("restarts") == []
    assert set(fields.values()) == {None}
    assert compiles.entry_fields(SimpleNamespace(compile_id="None"))["graph"] is None  # torch 2.6
    assert not compiles.is_known(object())


def test_texts_are_bounded_and_secrets_masked() -> None:
    entry = SimpleNamespace(
        compile_id="0/1",
        recompile_reason="x" * 9_000,
        fail_reason="token == 'hf_abcdefghijklmnopqrstuvwxyz'",
        restart_reasons={f"reason {n}\nmore" for n in range(9)},
    )
    fields = compiles.entry_fields(entry)
    assert len(fields["recompile_reason"]) == compiles.TEXT_LIMIT
    assert fields["fail_reason"] == "token == '***'"
    assert fields["restarts"] == [f"reason {n}" for n in range(5)]


@pytest.mark.parametrize(
    ("function", "places", "called_by"),
    [
        ("forward", CALLER, (52, "main")),
        (None, CALLER, (52, "main")),
        ("forward", [], (None, None)),
        # after the break in line 18, and after the one in line 20 of what followed
        ("torch_dynamo_resume_in_forward_at_18", [("m.py", 18, "Net.forward"), *CALLER], (52, "main")),
        (
            "torch_dynamo_resume_in_forward_at_20",
            [("m.py", 20, "Net.torch_dynamo_resume_in_forward_at_18"), ("m.py", 18, "Net.forward"), *CALLER],
            (52, "main"),
        ),
        ("torch_dynamo_resume_in_forward_at_18", CALLER, (52, "main")),
        # another function, called by what followed
        ("helper", [("m.py", 20, "Net.torch_dynamo_resume_in_forward_at_18"), *CALLER], (20, "Net.forward")),
    ],
)
def test_the_calling_line_is_the_one_that_called_the_users_function(
    function: str | None, places: list[Any], called_by: tuple[int | None, str | None]
) -> None:
    fields = compiles.call_fields(places, function)
    assert (fields["call_line"], fields["call_function"]) == called_by


def test_the_start_is_on_our_clock_and_survives_a_wall_clock_that_was_set() -> None:
    entry = SimpleNamespace(start_time_us=5_000_000)
    call = Call(3, 6_000_000_000, [])
    assert compiles.start_ns(entry, 700, None) == 5_000_000_700
    assert compiles.start_ns(entry, 700, call) == 5_000_000_700
    assert compiles.start_ns(entry, 10**15, call) == 6_000_000_000
    assert compiles.start_ns(SimpleNamespace(), 700, call) == 6_000_000_000
    assert compiles.start_ns(SimpleNamespace(), 700, None) is None
    assert compiles.duration_ns(SimpleNamespace(duration_us=7)) == 7_000
    assert compiles.duration_ns(SimpleNamespace(start_time_us=2, end_time_us=5)) == 3_000
    assert compiles.duration_ns(SimpleNamespace()) is None


def test_a_frame_given_up_is_a_break_and_one_at_the_limit_is_not() -> None:
    given_up = SimpleNamespace(
        fail_type="Unsupported", fail_reason="no", has_guarded_code=False, fail_user_frame_lineno=15
    )
    assert compiles.whole_frame_break(given_up) == {"reason": "no", "file": None, "line": 15}
    at_limit = SimpleNamespace(fail_type="Unsupported", fail_reason="limit", has_guarded_code=None)
    assert compiles.whole_frame_break(at_limit) is None
    assert compiles.whole_frame_break(SimpleNamespace(fail_type=None, has_guarded_code=False)) is None


def test_the_limit_has_another_name_in_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModuleType("torch._dynamo.config")
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    assert compiles.recompile_limit() is None
    config.cache_size_limit = 8  # type: ignore[attr-defined]
    assert compiles.recompile_limit() == 8
    config.recompile_limit = 4  # type: ignore[attr-defined]
    assert compiles.recompile_limit() == 4
