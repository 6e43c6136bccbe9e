"""The probe of torch.compile on a Dynamo made of a few lines: what is told, and that nothing of ours stays behind."""

from __future__ import annotations

import logging
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from stepscope.record.agent.probes import compiles
from stepscope.record.agent.probes.compiles import ENTRIES_LIMIT, LOGGER, CompilesProbe

from .fake_agent import FakeAgent
from .fake_dynamo import FakeDynamo

BACKEND = "torch.compile"
CALLER = [("/home/user/train.py", 52, "main")]
RESUMED = "torch_dynamo_resume_in_forward_at_"


def installed(agent: Any) -> CompilesProbe:
    probe = CompilesProbe(agent)
    probe.install()
    return probe


def watched(
    monkeypatch: pytest.MonkeyPatch, faults: str | None = None, **options: bool
) -> tuple[FakeDynamo, FakeAgent, CompilesProbe]:
    """A Dynamo that is loaded, and the probe in it."""
    dynamo, agent = FakeDynamo(monkeypatch, **options), FakeAgent(faults)
    dynamo.load()
    return dynamo, agent, installed(agent)


def test_the_first_compilation_has_its_step_even_when_dynamo_is_loaded_late(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent = FakeDynamo(monkeypatch), FakeAgent()
    probe = installed(agent)
    agent.step = 4
    dynamo.load()
    probe.arm()  # torch.compile has returned
    before_ns = time.time_ns()
    dynamo.compile_frame("0/0")
    agent.boundary()
    dynamo.compile_frame("0/1", recompile_reason="0/0: s.calls == 0")
    agent.boundary()
    agent.boundary()
    first, second = agent.of("compile")
    assert (first["step"], first["step_source"], first["graph"], first["backend"]) == (4, "context", "0/0", BACKEND)
    assert (second["step"], second["recompile_reason"]) == (5, "0/0: s.calls == 0")
    assert before_ns - 10**9 < first["time_ns"] < time.time_ns() + 10**9
    assert first["duration_ns"] == 1_000_000
    assert first["call_function"] == "test_the_first_compilation_has_its_step_even_when_dynamo_is_loaded_late"
    assert agent.last_compile_step == 5
    assert agent.errors == []


def test_dynamo_loaded_by_something_else_is_found_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent = FakeDynamo(monkeypatch), FakeAgent()
    installed(agent)
    dynamo.load()
    dynamo.compile_frame("0/0")  # torch._dynamo.optimize, before any boundary
    agent.boundary()
    dynamo.compile_frame("1/0")
    agent.boundary()
    assert [(event["graph"], event["step"]) for event in agent.of("compile")] == [("0/0", None), ("1/0", 1)]


def test_uninstall_leaves_dynamo_as_it_was_and_others_hooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent = FakeDynamo(monkeypatch), FakeAgent()
    dynamo.load()
    logger = logging.getLogger(LOGGER)
    theirs, entries = (lambda: "theirs"), dynamo.utils._compilation_metrics
    dynamo.utils.register_hook_for_recompile_user_context(theirs)
    probe = installed(agent)
    assert (len(dynamo.utils.hooks), len(logger.filters), logger.level) == (2, 1, logging.DEBUG)
    dynamo.compile_frame("0/0")
    probe.uninstall()
    assert [event["graph"] for event in agent.of("compile")] == ["0/0"]  # nothing is lost
    assert dynamo.utils.hooks == [theirs]
    assert (logger.filters, logger.level) == ([], logging.NOTSET)
    assert dynamo.utils._compilation_metrics is entries
    dynamo.compile_frame("0/1")  # while the user's profiler records
    agent.boundary()
    probe.install()
    agent.boundary()
    assert [event["graph"] for event in agent.of("compile")] == ["0/0", "0/1"]
    assert len(dynamo.utils.hooks) == 2


def test_hooks_that_somebody_reset_are_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, _ = watched(monkeypatch)
    dynamo.reset_hooks()
    dynamo.utils._compilation_metrics.clear()
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)  # as set_logs does
    agent.boundary()
    dynamo.compile_frame("0/0", break_at="line 3")
    agent.boundary()
    assert [(event["graph"], event["step"]) for event in agent.of("compile")] == [("0/0", 1)]
    assert len(agent.of("graph_break")) == 1


def test_an_older_dynamo_keeps_more_entries_while_we_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, probe = watched(monkeypatch, hooked=False)
    for number in range(100):
        dynamo.compile_frame(f"{number}/0")
    agent.boundary()
    assert len(agent.of("compile")) == 100
    assert {(event["step"], event["step_source"]) for event in agent.of("compile")} == {(None, None)}
    for number in range(ENTRIES_LIMIT + 1):
        dynamo.compile_frame(f"{number}/1")
    agent.boundary()
    assert len(agent.of("compile")) == 100 + ENTRIES_LIMIT
    assert len(agent.of("compile_unknown")) == 1  # one was dropped unread
    probe.uninstall()
    assert dynamo.utils._compilation_metrics.maxlen == 64


def test_without_metrics_frames_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, probe = watched(monkeypatch, hooked=False, metrics=False)
    agent.boundary()
    dynamo.utils.counters["frames"]["total"] = 3
    agent.boundary()
    agent.boundary()
    probe.uninstall()
    assert [(event["count"], event["step"]) for event in agent.of("compile")] == [(3, 1)]
    assert agent.of("compile")[0]["source"].startswith("counters, torch ")
    assert agent.last_compile_step == 1


def test_the_hook_gives_a_text_whatever_happens_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, _ = watched(monkeypatch, faults="compiles")
    dynamo.compile_frame("0/0", break_at="line 3")
    agent.boundary()
    dynamo.compile_frame("0/1")
    assert [type(key) for hook in dynamo.utils.hooks for key in (hook(),)] == [str]
    assert len(agent.errors) == 1
    assert agent.of("compile") == []


def test_an_entry_of_an_unknown_kind_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, _ = watched(monkeypatch)
    for _ in range(20):
        dynamo.utils._compilation_metrics.append(object())
        agent.boundary()
    assert agent.of("compile") == []
    assert 1 <= len(agent.of("compile_unknown")) < 20
    assert "object" in agent.of("compile_unknown")[0]["what"]
    assert agent.errors == []


def test_a_frame_given_up_is_one_graph_break_whoever_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, _ = watched(monkeypatch)
    given_up: dict[str, Any] = {"fail_type": "Unsupported", "has_guarded_code": False, "fail_reason": "no"}
    given_up["fail_user_frame_lineno"] = 9
    monkeypatch.setattr("stepscope.record.agent.probes.compiles.current_graph", lambda: "0/0")
    dynamo.compile_frame("0/0", break_at="line 9", **given_up)
    dynamo.compile_frame("1/0", **given_up)
    agent.boundary()
    told = [(event["graph"], event.get("line"), event["reason"]) for event in agent.of("graph_break")]
    assert told == [("0/0", None, "Graph break in user code: line 9"), ("1/0", 9, "no")]


def written(monkeypatch: pytest.MonkeyPatch, graph: str = "0/1", **fields: Any) -> dict[str, Any]:
    """The event of an entry with these fields."""
    dynamo, agent, _ = watched(monkeypatch)
    dynamo.compile_frame(graph, **fields)
    agent.boundary()
    return agent.of("compile")[0]


def test_an_entry_of_another_shape_gives_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    known = written(monkeypatch)
    # torch 2.6 has no id there
    event = written(monkeypatch, "None", co_firstlineno="three", is_forward=None, co_name=None, has_guarded_code=1)
    assert set(event) == set(known)
    assert event["restarts"] == []
    unknown = ("graph", "def_line", "is_forward", "direction", "function", "guarded", "fail_type", "runtime")
    assert {event[name] for name in unknown} == {None}


def test_a_compiled_update_is_told_to_the_cutter_before_the_next_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo, agent, _ = watched(monkeypatch)
    dynamo.compile_frame("0/0", "wrapper", co_filename="/lib/torch/optim/optimizer.py")
    dynamo.compile_frame("1/0", "step", co_filename="/lib/torch/optim/adam.py")
    assert len(agent.updates_compiled) == 1
    agent.boundary()
    assert len(agent.updates_compiled) == 1


def test_texts_are_bounded_and_secrets_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    event = written(
        monkeypatch,
        recompile_reason="x" * 9_000,
        fail_reason="token == 'hf_abcdefghijklmnopqrstuvwxyz'",
        restart_reasons={f"reason {n}\nmore" for n in range(9)},
    )
    assert len(event["recompile_reason"]) == compiles.TEXT_LIMIT
    assert event["fail_reason"] == "token == '***'"
    assert event["restarts"] == [f"reason {n}" for n in range(5)]


@pytest.mark.parametrize(
    ("function", "places", "called_by"),
    [
        ("forward", CALLER, (52, "main")),
        (None, CALLER, (52, "main")),
        ("forward", [], (None, None)),
        # after the break in line 18, and after the one in line 20 of what followed
        (RESUMED + "18", [("m.py", 18, "Net.forward"), *CALLER], (52, "main")),
        (RESUMED + "20", [("m.py", 20, f"Net.{RESUMED}18"), ("m.py", 18, "Net.forward"), *CALLER], (52, "main")),
        (RESUMED + "18", CALLER, (52, "main")),
        # another function, called by what followed
        ("helper", [("m.py", 20, f"Net.{RESUMED}18"), *CALLER], (20, "Net.forward")),
    ],
)
def test_the_calling_line_is_the_one_that_called_the_users_function(
    monkeypatch: pytest.MonkeyPatch, function: str | None, places: list[Any], called_by: tuple[int | None, str | None]
) -> None:
    monkeypatch.setattr(compiles, "user_places", lambda _skip, _most: places)
    event = written(monkeypatch, co_name=function)
    assert (event["call_line"], event["call_function"]) == called_by


def test_the_start_is_on_our_clock_and_survives_a_wall_clock_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    close = written(monkeypatch, start_time_us=now // 1_000 - 5_000_000)
    assert abs(close["time_ns"] - (now - 5_000_000_000)) < 1_000_000_000
    for shifted in ({"start_time_us": now // 1_000 + 10**12}, {"start_time_us": None}):
        assert abs(written(monkeypatch, **shifted)["time_ns"] - now) < 10**10
    assert written(monkeypatch, duration_us=None, start_time_us=2, end_time_us=5)["duration_ns"] == 3_000
    assert written(monkeypatch, duration_us=None)["duration_ns"] is None


def test_the_limit_has_another_name_in_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModuleType("torch._dynamo.config")
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    for name, limit in (("unrelated", None), ("cache_size_limit", 8), ("recompile_limit", 4)):
        setattr(config, name, limit)
        assert written(monkeypatch)["limit"] == limit


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.INFO])
@pytest.mark.parametrize("parent_level", [logging.DEBUG, logging.WARNING])
def test_the_user_sees_of_the_logger_what_they_would_see_without_us(
    monkeypatch: pytest.MonkeyPatch, level: int, parent_level: int
) -> None:
    def lines(watched: bool) -> list[str]:
        with monkeypatch.context() as patch:
            dynamo, agent, handler = FakeDynamo(patch), FakeAgent(), Kept()
            logger, parent = logging.getLogger(LOGGER), logging.getLogger("torch._dynamo")
            parent.addHandler(handler)
            patch.setattr(parent, "level", parent_level)
            patch.setattr(parent, "propagate", False)
            logger.setLevel(level)
            dynamo.load()
            probe = installed(agent) if watched else None
            for _ in range(3):
                dynamo.compile_frame("0/0", break_at="line 3")
                agent.boundary()
            logger.setLevel(logging.DEBUG)  # the user turns it on, and off again
            dynamo.compile_frame("0/1", break_at="line 3")
            agent.boundary()
            dynamo.compile_frame("0/2", break_at="line 3")
            logger.setLevel(logging.WARNING)
            dynamo.compile_frame("0/3", break_at="line 3")
            agent.boundary()
            if probe is not None:
                probe.uninstall()
                assert len(agent.of("graph_break")) == 6
            assert logger.level == logging.WARNING
            parent.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
            return handler.lines

    assert lines(watched=True) == lines(watched=False)
