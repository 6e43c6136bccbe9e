"""Ranks that wait for one of them, by its input, its work or its batch: found, kept quiet about, and abstained from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Place
from stepscope.model.trace import SpanRef
from stepscope.model.views import Distributed, Views, WorkerShare
from tests.analyze.scenes import TRAIN
from tests.analyze.test_ranks import rank_rows
from tests.builders import MS, rank_info
from tests.diagnose.rank_scenes import analysis_of, line, loader_sites, of_category, only, two, with_lines
from tests.records import replace


def test_a_rank_with_a_slower_input() -> None:
    item = Place(TRAIN, 30, "__getitem__")
    analysis = two((1, 10, 40, 1, 1), (21, 10, 20, 1, 1), journal=loader_sites())
    finding = only(with_lines(analysis, [line(item, "data_wait", {0: 0.0, 1: 20.0})]), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(20)
    assert finding.share == finding.gain_ceiling == pytest.approx(20 / 53)
    assert finding.ranks == (1,)
    assert "loads its batches 20.0 ms longer" in finding.title
    assert [place.line for place in finding.where] == [30, 75]
    assert finding.confidence == "high"
    assert finding.severity == "critical"


def test_ranks_on_a_device_are_judged_with_less_confidence() -> None:
    ranks = [rank_info(rank, device="cuda") for rank in (0, 1)]
    finding = only(two((0, 30, 20, 1, 1), (0, 10, 40, 1, 1), ranks=ranks), "communication.straggler")
    assert finding.confidence == "medium"
    assert "host" in finding.caveat


def test_sampled_lines_tell_of_work_inside_the_exchange() -> None:
    """The work lies in the phase in which the other rank waits: the steps are alike on both."""
    work, wait = Place(TRAIN, 50, "hook"), Place(TRAIN, 60, "main")
    lines = [line(work, "backward", {0: 20.0, 1: 1.0}), line(wait, "backward", {0: 20.0, 1: 39.0}, waiting=True)]
    analysis = two((0, 10, 40, 1, 1), (0, 10, 40, 1, 1))
    finding = only(with_lines(analysis, lines, straggler=0), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(19)
    assert finding.where[0].line == 50
    assert finding.confidence in ("low", "medium")
    assert of_category(diagnose(with_lines(analysis, lines))) == []


@pytest.mark.parametrize("seed", range(5))
def test_jitter_is_no_straggler(seed: int) -> None:
    """Two healthy ranks, each step a tenth longer or shorter on either: the sum of both waits is not small."""
    draw = np.random.default_rng(seed)
    first, second = rank_rows(0, (1, 20, 30, 1, 1), count=100), rank_rows(1, (1, 20, 30, 1, 1), count=100)
    for one, other in zip(first, second, strict=True):
        for row in (one, other):
            row["forward_ns"] = int(row["forward_ns"] * draw.normal(1, 0.25))
        arrival = max(one["forward_ns"], other["forward_ns"])
        for row in (one, other):
            row["backward_ns"] += arrival - row["forward_ns"]
            row["wall_ns"] = sum(
                row[f"{phase}_ns"] for phase in ("data_wait", "forward", "backward", "optimizer", "other")
            )
    assert of_category(diagnose(analysis_of(first, second))) == []


def test_a_slow_quarter_and_ranks_that_do_not_wait_for_each_other_are_no_straggler() -> None:
    first, second = rank_rows(0, (1, 20, 60, 1, 1)), rank_rows(1, (1, 50, 30, 1, 1))
    for row in second[:11]:
        row["forward_ns"], row["backward_ns"] = 20 * MS, 60 * MS
    assert of_category(diagnose(analysis_of(first, second))) == []
    assert of_category(diagnose(two((0, 30, 20, 1, 1), (0, 10, 20, 1, 1)))) == []


def test_ranks_without_phases_abstain_by_name() -> None:
    rows = [{"rank": rank, "process": f"rank-{rank}", "step": n} for rank in (0, 1) for n in range(40)]
    abstained = {one.rule: one for one in diagnose(analysis_of(rows)).abstained}
    assert "phases" in abstained["communication.straggler"].needs
    assert not abstained["communication.straggler"].quiet
    assert "collectives" in abstained["communication.many_small_collectives"].needs


def unequal(**more: Any) -> Analysis:
    first, second = rank_rows(0, (0, 10, 50, 1, 1), samples=8), rank_rows(1, (0, 30, 30, 1, 1), samples=24)
    return analysis_of(first, second, journal=loader_sites(), **more)


def test_unequal_batches_speak_instead_of_the_straggler() -> None:
    finding = only(unequal(), "communication.unbalanced_work")
    # forward: 30 instead of the mean 20; of the 30 ms of backward as large a part, 10 of 32 ms
    assert finding.cost_ms_per_step == pytest.approx(10 + 30 * 10 / 32)
    assert finding.gain_ceiling == pytest.approx((32 + 30) * (1 - 16 / 24) / 62)
    assert "rank 0: 8, rank 1: 24" in finding.title
    assert finding.where[0].line == 75
    assert finding.confidence == "medium"  # nothing tells how long the transfer takes


def test_the_transfer_does_not_shrink_with_the_batch() -> None:
    ref = SpanRef("rank-1", 1, 1, "rank-1", "trace-0.json")
    share = WorkerShare(ref, 3, 62 * MS, 0, 0, 0, 62 * MS, 5 * MS, 20 * MS)
    views = Views((), (), (), None, None, (), (), Distributed((share,), (), (), 1, 0, ()), {})
    finding = only(replace(unequal(), views=views), "communication.unbalanced_work")
    assert finding.cost_ms_per_step == pytest.approx(10 + 10 * 10 / 32)
    assert finding.confidence == "high"
