"""Which call of the user's a sampled stack could be spared with, and what that is in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import Calls, removable_calls
from stepscope.analyze.host.sampled_time import sampled_time as prepare_time
from stepscope.analyze.step_times import step_facts as step_facts
from stepscope.model import Place
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.builders import make_tables, step_rows

MODULE = f"Module._call_impl ({TORCH}/nn/modules/module.py:1790)"
MAIN = f"<module> ({TRAIN}:90)"


def main(line: int) -> str:
    return f"main ({TRAIN}:{line})"


TRAINING: list[dict[str, Any]] = [
    stack([MAIN, main(40), MODULE, f"Net.forward ({TRAIN}:12)", f"linear ({TORCH}/nn/functional.py:1)"], 100),
    stack([MAIN, main(41), f"Tensor.backward ({TORCH}/_tensor.py:600)"], 200, phase="backward"),
    stack([MAIN, main(42), f"Optimizer.step ({TORCH}/optim/sgd.py:5)"], 50, phase="optimizer"),
]
DESCRIBE: list[dict[str, Any]] = [
    stack([MAIN, main(50), f"describe ({TRAIN}:20)"], 20),
    stack([MAIN, main(50), f"describe ({TRAIN}:21)", f"describe.<locals>.<listcomp> ({TRAIN}:21)"], 40),
    stack([MAIN, main(50), f"describe ({TRAIN}:22)", "dumps (/usr/lib/python3.11/json/__init__.py:231)"], 60),
    stack([MAIN, main(50), f"describe ({TRAIN}:23)", f"norm ({TORCH}/functional.py:9)"], 30),
]


def tables(stacks: Sequence[dict[str, Any]], **phases: float) -> Tables:
    """Steps of 100 ms by default: 20 forward, 40 backward, 10 optimizer, 30 other."""
    times: dict[str, Any] = {
        "data_wait_ms": 0,
        "forward_ms": 20,
        "backward_ms": 40,
        "optimizer_ms": 10,
        "other_ms": 30,
        **phases,
    }
    return make_tables(steps=step_rows(40, **times), stacks=stacks)


def calls_of(made: Tables) -> Calls:
    context = Context(made)
    train = next(fact for fact in step_facts(context.labelled) if fact.kind == "train")
    found = removable_calls(context.sampled, prepare_time(context.sampled, train, context.tables.quality))
    assert found is not None
    return found


def test_a_call_holds_what_it_calls_wherever_that_is_written() -> None:
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    number = calls.number(Place(TRAIN, 22, "describe"))
    assert number is not None
    assert calls.place(number) == Place(TRAIN, None, "describe")
    assert int(calls.rows.filter(pl.col("call") == number)["samples"].sum()) == 150
    inner = calls.number(Place(TRAIN, 21, "describe.<locals>.<listcomp>"))
    assert inner == number


def test_the_journal_times_what_samples_only_divide() -> None:
    """150 of 500 samples, but all that is sampled beside training stands in a part of 50 ms with 250 samples."""
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    share = calls.share(calls.number(Place(TRAIN, 22, "describe")), calls.time.rows["row"])
    assert share is not None
    assert share.ms == pytest.approx(50 * 150 / 250)
    assert share.ms < share.at_most_ms < 50
    assert share.samples == 150


def test_a_place_no_sample_saw_has_no_call() -> None:
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    assert calls.number(Place("/home/user/project/other.py", 1, "other")) is None
    assert calls.share(None, calls.time.rows["row"]) is None


def test_what_one_rank_alone_does_may_gain_as_much_as_it_takes_there() -> None:
    """The other rank waits for it: the mean over ranks is half of what can be gained."""
    both = [{**row, "rank": rank, "process": f"rank-{rank}"} for rank in (0, 1) for row in TRAINING]
    alone = stack([MAIN, main(50), f"log ({TRAIN}:33)"], 150, rank=0, process="rank-0")
    waits = stack(
        [MAIN, main(51), f"barrier ({TORCH}/distributed/distributed_c10d.py:9)"], 150, rank=1, process="rank-1"
    )
    steps = [row for rank in (0, 1) for row in step_rows(40, rank=rank, process=f"rank-{rank}", forward_ms=20)]
    calls = calls_of(make_tables(steps=steps, stacks=[*both, alone, waits]))
    share = calls.share(calls.number(Place(TRAIN, 33, "log")), calls.time.rows["row"])
    assert share is not None
    assert share.at_most_ms >= 2 * share.ms * 0.99
