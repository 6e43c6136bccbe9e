"""Real loops of real frameworks: what a recording says of them is what they counted and timed of themselves.

Every test goes over all loops; one recording of each serves all. Needs the environment of `make frameworks`.
"""

from __future__ import annotations

import pytest

from tests.frameworks.catalogue import ALL, PYTHON, Loop, interpreter, missing
from tests.frameworks.compared import Compared, compare

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(400)]

PHASE_LIMIT = 5  # points of the time taken by hand


@pytest.fixture(scope="module")
def absent() -> set[str]:
    if not interpreter().is_file():
        pytest.skip(f"no environment with the frameworks: `make frameworks` makes it, or {PYTHON} names a Python")
    return missing(interpreter())


@pytest.fixture(scope="module", params=ALL, ids=lambda loop: loop.name)
def compared(request: pytest.FixtureRequest, absent: set[str], tmp_path_factory: pytest.TempPathFactory) -> Compared:
    loop: Loop = request.param
    lacking = absent.intersection(("torch", *loop.needs))
    if lacking:
        pytest.skip(f"{interpreter()} has no {', '.join(sorted(lacking))}")
    return compare(loop, interpreter(), tmp_path_factory.mktemp(loop.name))


def test_recording_changes_nothing(compared: Compared) -> None:
    assert not compared.changes, compared.recorded.stderr[-2000:]


def test_every_trained_step_is_a_step_and_nothing_else_is(compared: Compared) -> None:
    assert len(compared.steps("train")) == compared.truth["steps"]


def test_every_evaluation_step_is_a_step_and_nothing_else_is(compared: Compared) -> None:
    if compared.truth["evaluated"] is None:
        pytest.skip("evaluation without a loader has no steps")
    assert len(compared.steps("eval")) == len(compared.truth["evaluated"])


def test_a_step_has_the_samples_of_all_its_batches(compared: Compared) -> None:
    trained, evaluated = compared.samples
    if compared.truth["samples"] is None:
        assert set(trained) <= {None}  # without a loader nobody knows them, and nobody says so
        pytest.skip("without a loader samples are not known")
    assert trained == compared.truth["samples"]
    assert evaluated == (compared.truth["evaluated"] or [])


def test_phases_are_those_timed_by_hand(compared: Compared) -> None:
    assert compared.worst_points <= PHASE_LIMIT, compared.points


def test_the_step_is_as_long_as_timed_by_hand(compared: Compared) -> None:
    assert compared.step_ratio == pytest.approx(1, abs=0.1)


def test_the_number_of_the_framework_is_ours(compared: Compared) -> None:
    if compared.framework_step is None:
        pytest.skip("no number of a framework is recorded")
    assert compared.framework_step == compared.truth["framework_step"]


def test_the_loss_of_each_step_is_the_scripts(compared: Compared) -> None:
    losses = compared.truth["losses"]
    if all(loss is None for loss in losses):
        pytest.skip("no backward pass tells a loss")
    assert compared.by_step("train/loss") == [pytest.approx(loss, rel=1e-6) for loss in losses]


def test_learning_rates_are_the_scripts_bit_for_bit(compared: Compared) -> None:
    if not compared.truth["rates"]:
        pytest.skip("the optimizer is none of torch's")
    assert compared.by_step("train/lr/0", holds=True) == compared.truth["rates"]


def test_norms_are_those_that_clipping_returned_and_left(compared: Compared) -> None:
    norms = compared.truth["norms"]
    if not norms:
        pytest.skip("nothing is clipped")
    before, after = ([norm[which] for norm in norms] for which in (0, 1))
    assert compared.by_step("train/grad_norm") == pytest.approx(before, rel=1e-6)
    assert compared.by_step("train/grad_norm_clipped") == pytest.approx(after, rel=1e-5)


def test_a_loss_has_the_time_at_which_the_script_had_it(compared: Compared) -> None:
    told = compared.values("train/loss")["time_ns"].to_list()
    if not told:
        pytest.skip("no backward pass tells a loss")
    late_ms = sorted((at - had) / 1e6 for at, had in zip(told, compared.truth["told_ns"], strict=True))
    assert abs(late_ms[len(late_ms) // 2]) <= 5
