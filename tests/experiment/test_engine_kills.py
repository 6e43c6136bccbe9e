"""An experiment that is killed at any moment goes on where it was."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.experiment.folder import JOURNAL, fold
from stepscope.experiment.plan import Slot
from stepscope.model.comparison import Flag
from stepscope.model.experiment import Experiment
from tests.experiment.fakes import FakeRunner, Killed, conduct, flag, request

GOOD, SAME = "loader.num_workers=2", "gc=freeze"
MS = {GOOD: 70.0}


def verdicts(found: Experiment) -> dict[str, str]:
    return {tried.candidate.name: tried.outcome.verdict.word for tried in found.tried}


def disturbed(slot: Slot) -> tuple[Flag, ...]:
    """Some runs are spoilt, the same ones in every session."""
    spoilt = (slot.block, slot.candidate, slot.attempt) in {(0, None, 0), (1, 1, 0), (2, 0, 0), (2, 0, 1)}
    return (flag("throttled"),) if spoilt else ()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Experiment, list[Slot]]:
    """The journal of an experiment that nobody disturbed, what came of it, and its runs."""
    folder = tmp_path_factory.mktemp("whole")
    runner = FakeRunner(MS, noise=0.01, flags=disturbed)
    found = conduct(folder, request(GOOD, SAME, "gc=off"), runner).experiment
    return (folder / JOURNAL).read_bytes(), found, runner.slots


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0.0, 1.0), torn=st.booleans())
def test_a_kill_at_any_byte_of_the_journal_loses_the_run_in_progress_at_most(
    tmp_path_factory: pytest.TempPathFactory,
    uninterrupted: tuple[bytes, Experiment, list[Slot]],
    cut: float,
    torn: bool,
) -> None:
    data, whole, slots = uninterrupted
    left = data[: int(cut * len(data))]
    kept = left if torn else left[: left.rfind(b"\n") + 1]
    done = len(fold(kept[: kept.rfind(b"\n") + 1]).made)
    folder = tmp_path_factory.mktemp("killed")
    (folder / JOURNAL).write_bytes(kept)
    runner = FakeRunner(MS, noise=0.01, flags=disturbed)
    found = conduct(folder, request(GOOD, SAME, "gc=off"), runner).experiment
    assert runner.slots == slots[done:]
    assert verdicts(found) == verdicts(whole)
    assert [tried.outcome.effects for tried in found.tried] == [tried.outcome.effects for tried in whole.tried]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.integers(1, 6), max_size=6))
def test_any_number_of_kills_costs_one_run_each(
    tmp_path_factory: pytest.TempPathFactory, uninterrupted: tuple[bytes, Experiment, list[Slot]], kills: list[int]
) -> None:
    _, whole, slots = uninterrupted
    folder = tmp_path_factory.mktemp("killed")
    ended: list[Slot] = []
    started = 0
    for kill_at in [*kills, None]:
        runner = FakeRunner(MS, noise=0.01, flags=disturbed, kill_at=kill_at)
        try:
            found = conduct(folder, request(GOOD, SAME, "gc=off"), runner).experiment
        except Killed:
            ended += runner.slots[:-1]
            started += 1
            continue
        ended += runner.slots
        break
    assert ended == slots
    assert verdicts(found) == verdicts(whole)
    assert started <= len(kills)
    folders = [path.name for path in (folder / "runs").iterdir()]
    assert len(folders) == len(set(folders)) == len(slots)
