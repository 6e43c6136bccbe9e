"""The guard: one report, one switch per probe, and everything of the user's passes."""

from __future__ import annotations

import pytest

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
