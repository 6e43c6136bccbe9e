"""The loop without processes: what is tried, that any kill costs no trial, and what is said of those that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model.sweep import FAILED, FINISHED, RUNNING, Sweep
from stepscope.report import sweep_report
from stepscope.sweep.engine import held
from stepscope.sweep.space import key
from stepscope.sweep.study import JOURNAL
from tests.records import replace, some
from tests.sweep.fakes import FakeRuns, Killed, conduct, request

X, KIND = "arg:--x", "arg:--kind"
ASKED = (f"{X}=0.0..1.0", f"{KIND}=a,b")


def reach(knobs: dict[str, str]) -> tuple[float, ...]:
    return ((float(knobs[X]) - 0.3) ** 2 + (knobs[KIND] == "b"),)


def told(sweep: Sweep) -> list[tuple[object, ...]]:
    return [(trial.number, trial.state, dict(trial.params), trial.values) for trial in sweep.trials]


def test_the_best_trial_is_found_and_written(tmp_path: Path) -> None:
    written: list[Sweep] = []
    runs = FakeRuns(reach)
    conclusion = conduct(tmp_path, request(*ASKED, trials=15), runs, written)
    found = conclusion.sweep
    assert (conclusion.signal, conclusion.trouble, found.finished, found.stopped) == (None, None, True, None)
    assert [trial.number for trial in found.trials] == list(range(15))
    assert found.best == min(range(15), key=lambda at: reach(runs.made[at]))
    assert [trial.values for trial in found.trials] == [reach(knobs) for knobs in runs.made]
    assert [len(each.trials) for each in written] == [0, *range(1, 16), 15]
    assert found.importances[0].rows[0].param == KIND
    again = sweep_report.load(tmp_path)
    assert sweep_report.sweep_document(again) == sweep_report.sweep_document(found)
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert set(document["importance"][0]) == {"param", "importance", "low", "high", "pearson", "spearman"}
    assert document["best"] == document["trials"][found.best or 0]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_killed_in_every_trial_it_makes_the_trials_of_one_that_was_not(tmp_path: Path, sampler: str) -> None:
    params = (f"{X}=0,0.5,1", f"{KIND}=a,b") if sampler == "grid" else ASKED
    asked = request(*params, trials=6, sampler=sampler)
    whole = conduct(tmp_path / "whole", asked, FakeRuns(reach)).sweep
    folder = tmp_path / "killed"
    for number in range(6):
        runs = FakeRuns(reach, kill_at=1 + (number > 0))
        with pytest.raises(Killed):
            conduct(folder, asked, runs)
        with (folder / JOURNAL).open("ab") as journal:  # torn in the middle of a line, with its lock left behind
            journal.write(b'{"op_code":6,"worker')
        os.symlink(folder / JOURNAL, folder / f"{JOURNAL}.lock")
        state = some(held(folder, 6))
        assert (state.key, state.complete) == (key(asked), False)
    found = conduct(folder, asked, FakeRuns(reach)).sweep
    assert told(found) == told(whole)
    assert {trial.state for trial in found.trials} == {FINISHED}
    assert len({tuple(trial.params.values()) for trial in found.trials}) == 6
    complete = some(held(folder, 6))
    assert complete.complete
    more = conduct(folder, replace(asked, trials=7), FakeRuns(reach)).sweep
    assert told(more)[:6] == told(whole)
    assert len(more.trials) == (6 if sampler == "grid" else 7)  # of a grid there are no more


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_killed_between_any_two_lines_of_its_journal_it_makes_the_same_trials(tmp_path: Path, sampler: str) -> None:
    params = (f"{X}=0,0.5,1", f"{KIND}=a,b") if sampler == "grid" else ASKED
    asked = request(*params, trials=3, sampler=sampler)
    whole = conduct(tmp_path / "whole", asked, FakeRuns(reach)).sweep
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    assert len(lines) > 20
    for number in range(len(lines)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / JOURNAL).write_bytes(b"".join(lines[:number]))
        assert told(conduct(folder, asked, FakeRuns(reach)).sweep) == told(whole)


def test_stopped_in_a_trial_it_goes_on_with_the_same_values(tmp_path: Path) -> None:
    asked = request(*ASKED, trials=4)
    first = FakeRuns(reach, stop_at=3)
    stopped = conduct(tmp_path, asked, first)
    assert (stopped.signal, stopped.sweep.finished) == (2, False)
    assert "interrupted by SIGINT" in (stopped.sweep.stopped or "")
    assert [trial.state for trial in stopped.sweep.trials] == [FINISHED, FINISHED, RUNNING]
    second = FakeRuns(reach)
    assert len(conduct(tmp_path, asked, second).sweep.trials) == 4
    assert second.made[0] == first.made[2]
    assert len(second.made) == 2


def test_a_trial_without_the_metric_failed_and_says_why(tmp_path: Path) -> None:
    runs = FakeRuns(lambda knobs: None if knobs[KIND] == "b" else reach(knobs))
    found = conduct(tmp_path, request(*ASKED, trials=8), runs).sweep
    assert found.finished
    lost = [trial for trial in found.trials if trial.state == FAILED]
    assert lost
    assert {trial.reason for trial in lost} == {"it has no metric loss; there are none"}
    assert all(trial.values == () and trial.params[KIND] == "b" for trial in lost)
    assert found.trials[found.best or 0].params[KIND] == "a"


def test_a_command_that_cannot_be_run_ends_the_sweep(tmp_path: Path) -> None:
    runs = FakeRuns(reach, failure="it ended with status 3: no data")
    conclusion = conduct(tmp_path, request(*ASKED, trials=9), runs)
    assert len(runs.made) == 3
    assert some(conclusion.trouble).startswith("the first 3 trials failed: it ended with status 3: no data; a log is ")
    assert conclusion.sweep.best is None


def test_no_trial_is_begun_that_would_end_after_the_budget(tmp_path: Path) -> None:
    runs = FakeRuns(reach, run_s=10.0)
    found = conduct(tmp_path, request(*ASKED, trials=9, budget_s=35.0), runs).sweep
    assert len(runs.made) == 3
    assert (found.finished, found.stopped) == (False, "the budget of 0.583333 min is used up")


def test_two_metrics_have_a_front(tmp_path: Path) -> None:
    asked = request(f"{X}=0..4", metrics=("loss:min", "speed:max"), sampler="grid", trials=9)
    values = {0: (5.0, 1.0), 1: (4.0, 2.0), 2: (4.0, 1.0), 3: (1.0, 0.5), 4: (1.0, 0.5)}
    found = conduct(tmp_path, asked, FakeRuns(lambda knobs: values[int(knobs[X])])).sweep
    at = {int(trial.params[X]): trial.number for trial in found.trials}
    assert sorted(found.front) == sorted((at[1], at[3], at[4]))  # equal ones beat each other in nothing
    assert found.best == min(at[3], at[4])
    assert len(found.importances) == 2


def test_a_sweep_is_never_mixed_with_another(tmp_path: Path) -> None:
    conduct(tmp_path, request(*ASKED, trials=1), FakeRuns(reach))
    with pytest.raises(UnreadableInputError, match="the journal of another sweep"):
        conduct(tmp_path, request(*ASKED, trials=2, seed=5), FakeRuns(reach))
    (tmp_path / JOURNAL).write_bytes(b'{"op_code": 4}\n\xff\xfe\n')
    with pytest.raises(UnreadableInputError, match="not the journal of a sweep") as caught:
        conduct(tmp_path, request(*ASKED, trials=2), FakeRuns(reach))
    assert "\n" not in str(caught.value)
    (tmp_path / "sweep.json").write_bytes(b"[" * 100_000)
    assert held(tmp_path, 1) is None
    with pytest.raises(UnreadableInputError, match="not a sweep of stepscope"):
        sweep_report.load(tmp_path)
