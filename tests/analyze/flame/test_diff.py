"""Differences of flame graphs: of runs and of ranks, per step or scaled, and what must not be compared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.flame_tree import Limits
from stepscope.analyze.pictures.sampled_flame import FlameOptions, flame_diff, flame_rank_diff
from stepscope.errors import UsageError
from stepscope.model.sampled import FlameGraph
from tests.analyze.flame.trees import context, inclusive, stack, steps, tree, values
from tests.builders import rank_info

WHOLE = FlameOptions(limits=Limits(min_share=0, max_nodes=10**6))
names = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple)
sampled = st.dictionaries(names, st.integers(1, 1000), min_size=1, max_size=20)


def run_of(own: dict[tuple[str, ...], int], **tables: Any) -> Context:
    return context([stack(*path, samples=count, phase="forward") for path, count in own.items()], **tables)


def both(graph: FlameGraph, key: str = "all") -> dict[tuple[str, ...], tuple[float, float]]:
    this, other = values(graph, key), values(graph, key, base=True)
    return {path: (value, other[path]) for path, value in this.items()}


@given(sampled, sampled)
@settings(max_examples=40, deadline=None)
def test_every_box_holds_both_sides(one: dict[tuple[str, ...], int], two: dict[tuple[str, ...], int]) -> None:
    graph = flame_diff(run_of(one), run_of(two), WHOLE)

    scale = sum(one.values()) / sum(two.values())
    left, right = inclusive({p: float(v) for p, v in one.items()}), inclusive({p: v * scale for p, v in two.items()})
    assert both(graph) == {
        path: (pytest.approx(left.get(path, 0)), pytest.approx(right.get(path, 0))) for path in {*left, *right}
    }


def test_runs_with_steps_are_compared_per_step() -> None:
    fast = run_of({("main", "read"): 50, ("main", "train"): 50}, steps=steps(wall_ms=10))
    slow = run_of({("main", "read"): 50, ("main", "train"): 30, ("main", "log"): 20}, steps=steps(wall_ms=20))

    graph = flame_diff(fast, slow)
    assert tree(graph).unit == "ms per step"
    assert both(graph) == {
        (): (pytest.approx(10), pytest.approx(20)),
        ("main",): (pytest.approx(10), pytest.approx(20)),
        ("main", "read"): (pytest.approx(5), pytest.approx(10)),
        ("main", "train"): (pytest.approx(5), pytest.approx(6)),
        ("main", "log"): (0, pytest.approx(4)),
    }


def test_where_one_side_knows_no_steps_the_other_is_scaled_to_the_same_total() -> None:
    graph = flame_diff(run_of({("main", "a"): 30, ("main", "b"): 10}, steps=steps()), run_of({("main", "a"): 8}))

    assert tree(graph).unit == "samples"
    assert "same total" in tree(graph).source
    assert both(graph) == {(): (40, 40), ("main",): (40, 40), ("main", "a"): (30, 40), ("main", "b"): (10, 0)}


def test_other_units_and_other_modes_are_refused_in_one_line() -> None:
    def run(unit: str = "samples", idle: bool | None = True) -> Context:
        segment = {"host": "host-a", "file": "stacks-0.raw", "unit": unit, "idle": idle, "timed": False}
        return context([stack("main", samples=5)], segments=[segment])

    with pytest.raises(UsageError, match="one side counts samples, the other us"):
        flame_diff(run(), run("us"))
    with pytest.raises(UsageError, match="only the first side sampled idle threads"):
        flame_diff(run(), run(idle=False))
    assert any("not known of both sides" in note for note in flame_diff(run(), run(idle=None)).notes)
    assert not any("not known" in note for note in flame_diff(run(), run()).notes)


def ranks(walls: tuple[int, ...], leaf: dict[int, str]) -> Context:
    rows = [
        stack("main", leaf.get(rank, "work"), samples=100, rank=rank, process=f"rank-{rank}", pid=50 + rank,
              phase="forward")
        for rank in range(len(walls))
    ]  # fmt: skip
    return context(
        rows,
        steps=[row for rank, wall in enumerate(walls) for row in steps(rank, wall_ms=wall)],
        ranks=[rank_info(rank) for rank in range(len(walls))],
    )


def test_a_rank_alone_has_no_others() -> None:
    with pytest.raises(UsageError, match="--rank 0 --diff others"):
        flame_rank_diff(ranks((10,), {}), 0)
    with pytest.raises(UsageError, match="ranks with samples: 0, 1"):
        flame_rank_diff(ranks((10, 10), {}), 7)
