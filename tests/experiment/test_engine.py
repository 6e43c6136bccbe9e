"""The loop without processes: what is run in which order, when it ends, and that any kill costs one run at most."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.experiment.folder import JOURNAL, fold
from stepscope.experiment.plan import FINDINGS, PILOT, Slot
from stepscope.experiment.propose import Proposals
from stepscope.experiment.runner import log_of
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, UNDECIDED, VOID, Candidate, Experiment, Flag
from tests.experiment.fakes import RUN_S, FakeRunner, Killed, conduct, flag, request
from tests.records import replace

GOOD, SAME = "loader.num_workers=2", "gc=freeze"
MS = {GOOD: 70.0}


def verdicts(found: Experiment) -> dict[str, str]:
    return {tried.candidate.name: tried.outcome.verdict.word for tried in found.tried}


def test_a_change_that_helps_and_one_that_does_not(tmp_path: Path) -> None:
    runner = FakeRunner(MS)
    written: list[Experiment] = []
    conclusion = conduct(tmp_path, request(GOOD, SAME), runner, written=written)
    found = conclusion.experiment
    assert verdicts(found) == {GOOD: FASTER, SAME: NO_DIFFERENCE}
    assert (conclusion.signal, found.finished, found.stopped) == (None, True, None)
    assert found.runs == len(runner.slots)
    assert found.wall_s == pytest.approx(RUN_S * len(runner.slots))
    assert found.tried[0].outcome.effects["mean_ms"].ratio == pytest.approx(0.7, rel=0.01)
    # written after every run but the pilot, and at the end
    assert len(written) == len(runner.slots)
    assert [each.finished for each in written] == [False] * (len(written) - 1) + [True]


def test_every_run_is_measured_alike_and_the_pilot_is_not_compared(tmp_path: Path) -> None:
    runner = FakeRunner(MS)
    found = conduct(tmp_path, request(GOOD), runner).experiment
    assert runner.slots[0].phase == PILOT
    pairs = runner.orders[1:]
    limits = found.protocol.warmup_steps, found.protocol.measured_steps
    assert {(order.warmup, order.steps, order.full) for order in pairs} == {(*limits, False)}
    assert all(order.seed == found.protocol.seed + order.slot.block for order in pairs)
    assert runner.orders[0].folder.name not in {Path(run.path).name for run in found.baseline}
    assert all(order.ends is None for order in pairs)


def test_blocks_hold_each_side_once_and_turn_round(tmp_path: Path) -> None:
    runner = FakeRunner(noise=0.05)  # so noisy that nothing is decided
    found = conduct(tmp_path, request(GOOD, SAME, most_pairs=6), runner).experiment
    blocks = [
        [slot.candidate for slot in group]
        for _, group in itertools.groupby(runner.slots[1:], key=lambda slot: slot.block)
    ]
    assert len(blocks) == 6
    assert all(sorted(block, key=str) == [0, 1, None] for block in blocks)
    assert all(second == first[::-1] for first, second in itertools.pairwise(blocks))
    assert all(len(tried.outcome.pairs) == 6 for tried in found.tried)
    assert set(verdicts(found).values()) <= {UNDECIDED, NO_DIFFERENCE}
    for tried in found.tried:
        for baseline, candidate in tried.outcome.pairs:
            assert (baseline.label, candidate.label) == ("baseline", tried.candidate.name)


FAILED = "it ended with status 1: RuntimeError: no"


@pytest.mark.parametrize(
    ("trouble", "runs", "words"),
    [
        ({"flags": lambda slot: (flag("knob_not_applied"),) if slot.label == GOOD else ()}, 1, "knob_not_applied"),
        ({"failures": lambda slot: FAILED if slot.label == GOOD else None}, 1, "RuntimeError: no"),
        ({"flags": lambda slot: (flag("recompiles"),) if slot.label == GOOD else ()}, 3, "recompiles"),
        ({"losses": {GOOD: 3.0}}, 2, "its loss goes another way"),
    ],
)
def test_a_candidate_that_cannot_be_judged_is_void_and_given_up(
    tmp_path: Path, trouble: dict[str, Any], runs: int, words: str
) -> None:
    runner = FakeRunner(**trouble)
    found = conduct(tmp_path, request(GOOD, SAME), runner).experiment
    assert verdicts(found) == {GOOD: VOID, SAME: NO_DIFFERENCE}
    assert Counter(runner.labels)[GOOD] == runs
    assert words in found.tried[0].outcome.verdict.text
    assert found.finished


def test_a_spoilt_run_is_made_again_at_once_and_only_the_good_one_counts(tmp_path: Path) -> None:
    def flags(slot: Slot) -> tuple[Flag, ...]:
        return (flag("throttled"),) if slot.block == 1 and slot.attempt < 2 and slot.candidate is None else ()

    runner = FakeRunner(MS, flags=flags)
    found = conduct(tmp_path, request(GOOD), runner).experiment
    assert verdicts(found) == {GOOD: FASTER}
    spoilt = [number for number, slot in enumerate(runner.slots) if flags(slot)]
    assert len(spoilt) == 2
    assert spoilt[1] == spoilt[0] + 1
    outcome = found.tried[0].outcome
    assert all(not measure.flags for pair in outcome.pairs for measure in pair)
    assert {measure.path for measure in outcome.left_out}.isdisjoint(
        measure.path for pair in outcome.pairs for measure in pair
    )


@pytest.mark.parametrize(
    ("trouble", "most", "words"),
    [
        ({"flags": lambda slot: (flag("other"),) if slot.candidate is None else ()}, 6, "other"),
        ({"failures": lambda slot: "no" if slot.label == "baseline" else None}, 3, "the baseline failed 3 times"),
        (  # it goes on from the pilot's checkpoint
            {"flags": lambda slot: (flag("few_steps"),) if slot.label == "baseline" else ()},
            1,
            "have the command remove that first",
        ),
        (
            {"failures": lambda slot: "no" if (slot.label, slot.block, slot.attempt) == ("baseline", 1, 0) else None},
            10,
            None,  # once: it is run again
        ),
    ],
)
def test_a_baseline_that_is_never_undisturbed_or_always_fails_ends_it(
    tmp_path: Path, trouble: dict[str, Any], most: int, words: str | None
) -> None:
    runner = FakeRunner(MS, **trouble)
    conclusion = conduct(tmp_path, request(GOOD), runner)
    found = conclusion.experiment
    assert found.finished == (words is None)
    assert conclusion.trouble == found.stopped
    assert words is None or words in (found.stopped or "")
    assert Counter(runner.labels)["baseline"] <= most
    if words == "the baseline failed 3 times":  # mended, the same command goes on
        assert verdicts(conduct(tmp_path, request(GOOD), FakeRunner(MS)).experiment) == {GOOD: FASTER}


def test_a_command_that_fails_is_said_with_its_log(tmp_path: Path) -> None:
    runner = FakeRunner(failures=lambda slot: "it ended with status 1: boom")  # noqa: ARG005
    with pytest.raises(UnreadableInputError, match="boom") as caught:
        conduct(tmp_path, request(GOOD), runner)
    assert str(log_of(runner.orders[0].folder)) in str(caught.value)
    assert len(runner.slots) == 1
    # mended, the same command goes on with a pilot of its own
    mended = FakeRunner(MS)
    assert verdicts(conduct(tmp_path, request(GOOD), mended).experiment) == {GOOD: FASTER}
    assert mended.slots[0].phase == PILOT


@pytest.mark.parametrize("budget_runs", [1, 2, 3, 5, 8])
def test_no_run_is_started_that_would_not_end_within_the_budget(tmp_path: Path, budget_runs: int) -> None:
    runner = FakeRunner(noise=0.05)
    budget_s = budget_runs * RUN_S + 1
    found = conduct(tmp_path, request(GOOD, budget_s=budget_s), runner).experiment
    assert len(runner.slots) == budget_runs
    assert runner.now <= budget_s
    assert not found.finished
    assert "budget" in (found.stopped or "")
    outcome = found.tried[0].outcome
    assert outcome.verdict.word == UNDECIDED
    assert outcome.verdict.pairs_needed


@pytest.mark.parametrize("stop_at", [1, 5])
def test_an_interrupt_ends_the_run_in_progress_and_keeps_the_rest(tmp_path: Path, stop_at: int) -> None:
    runner = FakeRunner(MS, stop_at=stop_at)
    conclusion = conduct(tmp_path, request(GOOD), runner)
    assert (conclusion.signal, conclusion.experiment.runs) == (2, stop_at - 1)
    assert "SIGINT" in (conclusion.experiment.stopped or "")
    assert not runner.orders[-1].folder.exists()
    again = FakeRunner(MS)
    assert verdicts(conduct(tmp_path, request(GOOD), again).experiment) == {GOOD: FASTER}
    assert again.slots[0] == runner.slots[-1]


def test_the_knobs_of_findings_are_tried_and_remembered(tmp_path: Path) -> None:
    asked = request(source=FINDINGS)
    seen: list[Path | None] = []

    def propose(pilot: Path | None, named: tuple[Candidate, ...]) -> Proposals:
        seen.append(pilot)
        return Proposals((*named, *request(GOOD).candidates), notes=("said",))

    first = FakeRunner(MS, kill_at=3)
    with pytest.raises(Killed):
        conduct(tmp_path, asked, first, propose=propose)
    assert first.orders[0].full
    found = conduct(tmp_path, asked, FakeRunner(MS), propose=propose).experiment
    assert seen == [first.orders[0].folder]  # asked once, although there were two sessions
    assert verdicts(found) == {GOOD: FASTER}
    assert "said" in found.notes


def test_the_baseline_against_itself_says_the_smallest_effect(tmp_path: Path) -> None:
    found = conduct(tmp_path, request(itself=True, least_pairs=6, most_pairs=6), FakeRunner(noise=0.01)).experiment
    assert found.noise is not None
    assert found.noise.pairs == 6
    assert 0.001 < (found.noise.smallest_effect or 0.0) < 0.05
    assert [tried.outcome.verdict.word for tried in found.tried] != [FASTER]


def test_a_screening_confirms_the_combination_of_what_helps(tmp_path: Path) -> None:
    names = ("loader.num_workers=2", "gc=freeze", "torch.num_threads=1", "matmul_precision=high")
    effect = {"loader.num_workers=2": 0.8, "torch.num_threads=1": 0.9}
    runner = FakeRunner({}, noise=0.004)
    runner.ms = _Combined(effect)
    found = conduct(tmp_path, request(*names, screen=True), runner).experiment
    assert verdicts(found) == {"loader.num_workers=2 + torch.num_threads=1": FASTER}
    ratios = {effect.knob.knob: effect.ratio for effect in found.effects}
    assert ratios["loader.num_workers"] == pytest.approx(0.8, rel=0.02)
    assert ratios["gc"] == pytest.approx(1.0, rel=0.02)
    assert {skipped.name for skipped in found.skipped} >= {"gc=freeze", "matmul_precision=high"}
    screening = [slot for slot in runner.slots if slot.phase == "screen"]
    half = len(screening) // 2
    assert [slot.candidate for slot in screening[half:]] == [slot.candidate for slot in screening[:half]][::-1]


def test_a_screening_that_its_budget_ends_tells_what_its_runs_told(tmp_path: Path) -> None:
    runner = FakeRunner({}, noise=0.004)
    runner.ms = _Combined({"gc=freeze": 0.8})
    asked = request("gc=freeze", "torch.num_threads=1", screen=True, budget_s=6 * RUN_S + 1)
    found = conduct(tmp_path, asked, runner).experiment
    assert not found.finished
    assert (found.runs, found.tried) == (6, ())
    ratios = {effect.knob.knob: effect.ratio for effect in found.effects}
    assert ratios["gc"] == pytest.approx(0.8, rel=0.02)
    assert conduct(tmp_path, replace(asked, budget_s=6000.0), runner).experiment.tried


def test_a_knob_that_is_refused_in_a_screening_is_left_out(tmp_path: Path) -> None:

    class Refusing(FakeRunner):
        def __call__(self, order, started):  # type: ignore[no-untyped-def]
            made = super().__call__(order, started)
            assert made.measure is not None
            knobs = tuple(replace(knob, applied=knob.knob != "gc", reason="not here") for knob in made.measure.knobs)
            refused = any(not knob.applied for knob in knobs)
            flags = (flag("knob_not_applied"),) if refused else ()
            return replace(made, measure=replace(made.measure, knobs=knobs, flags=flags))

    runner = Refusing({}, noise=0.004)
    runner.ms = _Combined({"loader.num_workers=2": 0.8})
    found = conduct(tmp_path, request("loader.num_workers=2", "gc=freeze", screen=True), runner).experiment
    assert verdicts(found) == {"loader.num_workers=2": FASTER}
    assert "not here" in next(skipped.reason for skipped in found.skipped if skipped.name == "gc=freeze")


class _Combined(dict[str, float]):
    """Step times of combinations: the effects of their parts multiplied."""

    def __init__(self, effect: dict[str, float]) -> None:
        self._effect = effect

    def get(self, label: str, default: float) -> float:  # type: ignore[override]
        return default * math.prod(self._effect.get(part, 1.0) for part in label.split(" + "))


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
