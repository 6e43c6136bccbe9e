"""Several ranks' steps side by side: who works longest, and whether the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.machine import RanksFacts
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import some

DDP = "DistributedDataParallel"


def rank_rows(rank: int, phases: Sequence[float], count: int = 40, **more: Any) -> list[dict[str, Any]]:
    """Steps of one rank; `phases` in ms: data wait, forward, backward, optimizer, other."""
    names = ("data_wait_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms")
    columns: dict[str, Any] = {
        "rank": rank,
        "process": f"rank-{rank}",
        "first_batch": False,
        **dict(zip(names, phases, strict=True)),
        **more,
    }
    return step_rows(count, **columns)


def sites(ranks: int) -> list[dict[str, Any]]:
    return [
        {"kind": "site", "what": DDP, "rank": rank, "process": f"rank-{rank}", "file": TRAIN, "line": 20}
        for rank in range(ranks)
    ]


def facts(*ranks: Sequence[dict[str, Any]], ddp: bool = True, **more: Any) -> RanksFacts | None:
    journal = sites(len(ranks)) if ddp else []
    return analyze(make_tables(steps=[row for rows in ranks for row in rows], journal=journal, **more)).ranks


def test_the_nth_training_steps_stand_side_by_side_whatever_their_numbers() -> None:
    """One rank evaluates in between: its step numbers run ahead."""
    first = rank_rows(0, (0, 10, 20, 1, 1))
    second = rank_rows(1, (0, 20, 10, 1, 1))
    for number, row in enumerate(second):
        row["step"] = number * 2
    evaluation = [{**row, "step": row["step"] + 1, "kind": "eval"} for row in second]
    found = some(facts(first, sorted(second + evaluation, key=lambda row: row["step"])))
    assert found.steps == 39  # the first is warm-up
    assert found.excess_ms == pytest.approx(10)


def test_only_steps_that_are_steady_everywhere_count() -> None:
    first, second = rank_rows(0, (0, 10, 20, 1, 1)), rank_rows(1, (0, 20, 10, 1, 1))
    for number in range(10, 14):
        second[number]["in_window"] = True
        second[number]["forward_ns"] += 500 * MS
        second[number]["wall_ns"] += 500 * MS
    found = some(facts(first, second))
    assert found.steps == 35
    assert found.excess_ms == pytest.approx(10)


def test_what_is_sampled_in_torch_distributed_is_an_exchange() -> None:
    reduce = [f"main ({TRAIN}:30)", f"all_reduce ({TORCH}/distributed/distributed_c10d.py:3000)"]
    stacks = [stack(reduce, 40), stack([f"main ({TRAIN}:31)"], 60, phase="forward")]
    ranks = rank_rows(0, (0, 10, 20, 1, 9)), rank_rows(1, (0, 10, 20, 1, 9))
    found = some(facts(*ranks, ddp=False, stacks=stacks))
    assert set(found.exchange) == {"before_forward", "other"}  # samples do not tell the two apart
    assert "torch.distributed" in found.exchange_source
    found = some(facts(*ranks, ddp=False))
    assert found.exchange == ("backward", "optimizer", "other")
    assert found.exchange_source.startswith("assumed")


def test_nothing_is_said_of_one_rank_of_few_steps_or_without_phases() -> None:
    assert facts(rank_rows(0, (0, 10, 20, 1, 1))) is None
    assert facts(rank_rows(0, (0, 10, 20, 1, 1), count=6), rank_rows(1, (0, 10, 20, 1, 1), count=6)) is None
    bare = [
        {"rank": rank, "process": f"rank-{rank}", "step": n, "start_ns": T0 + n} for rank in (0, 1) for n in range(40)
    ]
    assert facts(bare) is None
