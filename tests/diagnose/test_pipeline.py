"""Replays of a step without one loss: bounded by what surely runs beside it, raised where cores are short."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import gains
from stepscope.diagnose.gains import PIPELINE
from stepscope.model import Analysis
from stepscope.model.device_losses import DeviceLosses
from stepscope.model.ranks import Pipeline
from tests.analyze.scenes import loader_tables
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import MS, make_tables, step_rows
from tests.records import blank, replace


def one_rank(**more: Any) -> Analysis:
    """Steps of 100 ms whose main thread has a core at any time, with more than it needs; `more` is of the pipeline."""
    analysis = analyze(make_tables(steps=step_rows(40, data_wait_ms=10, forward_ms=90, backward_ms=0)))
    assert analysis.pipeline is not None
    quiet: dict[str, Any] = {"mean_ms": 100.0, "cores": 8.0, "contended_ms": 0.0}
    return replace(analysis, pipeline=replace(analysis.pipeline, **{**quiet, **more}))


def ranks(*phases: tuple[float, ...]) -> Analysis:
    rows = [row for rank, each in enumerate(phases) for row in rank_rows(rank, each)]
    return analyze(make_tables(steps=rows, journal=sites(len(phases))))


def test_nothing_beside_the_main_thread_leaves_the_whole_loss() -> None:
    assert gains.without_main(one_rank(), 30.0) == pytest.approx(30 + PIPELINE.cold_ms)
    assert gains.without_main(one_rank(), 300.0) == pytest.approx(100)


def test_workers_that_need_as_long_bound_the_gain() -> None:
    analysis = one_rank(workers=2, workers_ms=160.0)  # 80 ms for a batch
    assert gains.without_main(analysis, 10.0) == pytest.approx(10 + PIPELINE.cold_ms)
    assert gains.without_main(analysis, 60.0) == pytest.approx(100 - PIPELINE.certain * 80)


def test_caches_are_only_filled_again_where_the_loss_shares_them() -> None:
    short = replace(one_rank(mean_ms=2.0), devices=("cpu",))
    assert gains.without_main(short, 1.0) == pytest.approx(1 + PIPELINE.cold)
    assert gains.without_main(replace(short, devices=("cuda",)), 1.0) == pytest.approx(1)


def test_behind_work_on_tensors_the_rest_loads_its_own_again() -> None:
    """A part of the shorter of both: a short call displaces little, and a short rest has little to load."""
    analysis, cold = one_rank(), PIPELINE.cold_tensors
    assert gains.without_main(analysis, 60.0, behind=cold) == pytest.approx(60 + cold * 40)
    assert gains.without_main(analysis, 10.0, behind=cold) == pytest.approx(10 + cold * 10)
    assert gains.without_main(analysis, 0.1, behind=cold) == pytest.approx(0.1 + PIPELINE.cold_ms)
    assert gains.without_main(replace(analysis, devices=("cuda",)), 60.0, behind=cold) == pytest.approx(60)


@pytest.mark.parametrize("more", [{"cores": 2.0}, {"contended_ms": None}, {"contended_ms": 5.0}])
def test_no_bound_where_cores_may_be_short(more: dict[str, Any]) -> None:
    assert gains.without_main(one_rank(workers=2, workers_ms=160.0, **more), 60.0) >= 60


def test_less_work_leaves_cores_to_the_rest() -> None:
    """20 ms of waiting for a core, of which the part outside the loss may go with it."""
    assert gains.without_main(one_rank(contended_ms=20.0), 40.0) == pytest.approx(40 + 20 * 0.6, abs=0.5)


def test_the_device_works_off_what_it_was_given() -> None:
    losses = blank(DeviceLosses, has_steps=True, compute_ns_per_step=70e6)
    analysis = replace(one_rank(), device_losses=(losses,))
    assert gains.without_main(analysis, 50.0) == pytest.approx(100 - PIPELINE.certain * 70)


def test_the_wait_counts_as_in_the_worst_quarter_of_the_run() -> None:
    rows = step_rows(80, data_wait_ms=20, forward_ms=80, backward_ms=0, optimizer_ms=0, other_ms=0)
    for row in rows[60:]:
        row["data_wait_ns"] += 30 * MS
        row["forward_ns"] -= 30 * MS
    analysis = analyze(make_tables(steps=rows))
    found = analysis.pipeline
    assert found is not None
    assert found.wait_ms == pytest.approx(27.5, abs=1)
    assert found.wait_at_most_ms is not None
    assert found.wait_at_most_ms == pytest.approx(50, abs=2)
    assert gains.without_wait(analysis) == pytest.approx(found.wait_at_most_ms + PIPELINE.cold_ms)


def test_the_rank_that_waits_longest_for_data_makes_the_step() -> None:
    analysis = ranks((0, 20, 40, 0, 0), (30, 20, 10, 0, 0))
    assert gains.without_wait(analysis) == pytest.approx(30, abs=0.5)


def test_input_is_gained_until_the_next_rank_is_the_slowest() -> None:
    """Rank 1 loads 30 ms, but rank 0 computes 20 ms longer than it: 10 ms are left to gain."""
    analysis = ranks((0, 40, 20, 0, 0), (30, 20, 10, 0, 0))
    assert gains.without_wait(analysis) == pytest.approx(10)


def test_the_lead_of_all_slow_ranks_ends_at_the_next() -> None:
    analysis = ranks((0, 10, 40, 0, 0), (0, 30, 20, 0, 0), (0, 33, 17, 0, 0), (0, 12, 38, 0, 0))
    assert analysis.ranks is not None
    assert analysis.ranks.slow == (1, 2)
    assert gains.without_lead(analysis, analysis.ranks) == pytest.approx(33 - 12)


def test_a_slower_rank_that_is_not_as_slow_ends_the_lead() -> None:
    analysis = ranks((0, 10, 40, 0, 0), (0, 18, 32, 0, 0), (0, 33, 17, 0, 0), (0, 10, 40, 0, 0))
    assert analysis.ranks is not None
    assert analysis.ranks.slow == (2,)
    assert gains.lead_ms(analysis.ranks) == pytest.approx(15)


def test_loader_work_and_cores_come_from_the_run() -> None:
    found = analyze(loader_tables(workers=2, busy=80, affinity=8)).pipeline
    assert found is not None
    assert found.workers == 2
    assert found.workers_ms == pytest.approx(2 * 0.8 * 100)
    assert found.cores == 8


def test_without_training_steps_there_is_no_pipeline() -> None:
    analysis = analyze(make_tables())
    assert analysis.pipeline is None
    assert gains.without_main(analysis, 5.0) == 5.0
    assert gains.without_wait(analysis) is None


def test_a_pipeline_without_a_loader() -> None:
    found = analyze(make_tables(steps=step_rows(40))).pipeline
    assert isinstance(found, Pipeline)
    assert found.workers is None
