"""Ranks against each other: the lines that differ, the straggler and those who wait for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import tables
from stepscope.analyze import Context
from stepscope.analyze.host.hotspots import idle_sampled
from stepscope.analyze.host.sampled_time import sampled_loop
from stepscope.analyze.ranks import durations as rank_facts
from stepscope.engine.call_tree import UserPaths
from stepscope.model import Place
from stepscope.model.sampled import RankLines
from stepscope.read.sampled_files import read_stack_files
from tests.builders import make_tables, step_rows
from tests.records import some

SAMPLERS = Path(__file__).resolve().parents[4] / "shared" / "traces" / "py_spy"
needs_samples = pytest.mark.skipif(not SAMPLERS.is_dir(), reason=f"the real samples are not at {SAMPLERS}")
TRAIN = "/home/user/project/train.py"
DDP = "DistributedDataParallel.forward (torch/nn/parallel/distributed.py:1700)"
CALL = "Module._call_impl (torch/nn/modules/module.py:1790)"
ENGINE = ["Tensor.backward (torch/_tensor.py:623)", "_engine_run_backward (torch/autograd/graph.py:979)"]
NEXT = "_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725)"
PATHS: dict[str, tuple[str, list[str]]] = {
    "forward": ("forward", [f"train ({TRAIN}:11)", CALL, DDP, f"Net.forward ({TRAIN}:5)", "linear (torch/nn/l.py:1)"]),
    "alone": ("forward", [f"train ({TRAIN}:11)", CALL, f"Net.forward ({TRAIN}:5)", "linear (torch/nn/l.py:1)"]),
    "backward": ("backward", [f"train ({TRAIN}:12)", *ENGINE]),
    "loss": ("other", [f"train ({TRAIN}:14)", "metric (/home/user/project/metrics.py:3)"]),
    "loader": ("data_wait", [f"train ({TRAIN}:10)", NEXT, "select (selectors.py:415)"]),
    "barrier": ("other", [f"train ({TRAIN}:20)", "all_reduce (torch/distributed/distributed_c10d.py:2800)"]),
}
Counts = Mapping[str, int]


def stacks_of(ranks: Sequence[Counts], **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "process": f"rank-{rank}",
            "pid": 100 + rank,
            "phase": PATHS[name][0],
            "frames": PATHS[name][1],
            "samples": samples,
            **more,
        }
        for rank, counts in enumerate(ranks)
        for name, samples in counts.items()
        if samples
    ]


def facts_of(
    ranks: Sequence[Counts], *, steps: bool = False, idle: bool | None = True, order: random.Random | None = None
) -> tuple[RankLines | None, str]:
    rows = stacks_of(ranks) if steps else stacks_of(ranks, start_ns=None, end_ns=None)
    if order is not None:
        order.shuffle(rows)
    known = [
        step
        for rank in range(len(ranks) if steps else 0)
        for step in step_rows(500, rank=rank, process=f"rank-{rank}", first_batch=False)
    ]
    context = Context(make_tables(steps=known, stacks=rows))
    users = UserPaths(context.calls, context.code)
    return rank_facts.rank_lines(context, sampled_loop(context, users), users, idle)


FAST = {"forward": 200, "backward": 700, "loss": 100}
SLOW = {"forward": 200, "backward": 300, "loss": 500}


def test_the_straggler_and_the_line_at_which_the_others_wait() -> None:
    found = some(facts_of([FAST, SLOW])[0])
    assert found.unit == "share of samples"
    assert found.straggler == 1
    assert found.waiters == (0,)
    assert found.straggler_place == Place("/home/user/project/metrics.py", 3, "metric")
    assert found.waiter_place == Place(TRAIN, 12, "train")
    assert found.verdict == (
        "rank 1 spends 50 % of its loop at metrics.py:3; "
        "rank 0 waits for it at train.py:12 in backward: 70 % of its loop, rank 1 30 %"
    )
    assert [(line.place.line, line.most, line.waiting) for line in found.lines] == [(3, 1, False), (12, 0, True)]
    assert found.lines[0].by_rank == {0: pytest.approx(0.1), 1: pytest.approx(0.5)}
    assert found.lines[1].leaf == "torch/autograd/graph.py:_engine_run_backward"


def test_a_thousand_ranks() -> None:
    found = some(facts_of([SLOW if rank == 617 else FAST for rank in range(1000)])[0])
    assert found.straggler == 617
    assert len(found.waiters) == 999
    assert "all 999 others wait for it" in found.verdict
    assert found.lines[0].most == 617
    assert len(found.lines[0].by_rank) == 1000


def test_without_an_exchange_nobody_waits() -> None:
    ranks = [{**counts, "forward": 0, "alone": counts["forward"]} for counts in (FAST, SLOW)]
    for found, said in (
        (some(facts_of(ranks)[0]), "nothing in the samples shows that the ranks exchange gradients"),
        (some(facts_of([FAST, SLOW], idle=False)[0]), "waiting was not sampled"),
    ):
        assert (found.straggler, found.waiters) == (None, ())
        assert said in found.verdict
        assert found.lines  # they differ all the same


COUNTS = st.fixed_dictionaries(
    {"forward": st.integers(20, 2000), "backward": st.integers(20, 2000), "loss": st.integers(0, 2000)}
)


@settings(max_examples=30, deadline=None)
@given(counts=COUNTS, ranks=st.integers(2, 5))
def test_equal_ranks_have_no_straggler(counts: Counts, ranks: int) -> None:
    found, _ = facts_of([counts] * ranks)
    if sum(counts.values()) < rank_facts.MIN_SAMPLES:
        assert found is None
        return
    assert found is not None
    assert found.straggler is None
    assert found.lines == ()
    assert found.verdict == "no line tells the ranks apart"


@settings(max_examples=30, deadline=None)
@given(ranks=st.lists(COUNTS, min_size=2, max_size=5), order=st.randoms(use_true_random=False))
def test_order_of_rows_changes_nothing(ranks: list[Counts], order: random.Random) -> None:
    found, why = facts_of(ranks)
    assert facts_of(ranks, order=order) == (found, why)
    if found is None:
        return
    for line in found.lines:
        assert line.spread == pytest.approx(max(line.by_rank.values()) - min(line.by_rank.values()))
        assert line.by_rank[line.most] == max(line.by_rank.values())
        assert line.spread >= rank_facts.MIN_SPREAD
    assert found.straggler not in found.waiters
    assert (found.straggler is None) == (found.waiters == ())


@needs_samples
def test_two_real_ranks_of_which_one_sleeps() -> None:
    context = Context(tables.build(read_stack_files([SAMPLERS / "ddp_idle.txt"])))
    users = UserPaths(context.calls, context.code)
    idle = idle_sampled(context.tables)
    found, _ = rank_facts.rank_lines(context, sampled_loop(context, users), users, idle)
    assert idle is True
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.straggler == 1
    assert found.waiters == (0,)
    first, second = found.lines
    assert (found.straggler_place, found.waiter_place) == (first.place, second.place)
    assert (first.place.line, first.most, first.waiting) == (9, 1, False)
    assert (second.place.line, second.most, second.waiting, second.phase) == (10, 0, True, "backward")
    assert found.verdict.startswith("rank 1 spends 44 % of its loop at ddp.py:9; rank 0 waits for it at ddp.py:10")
