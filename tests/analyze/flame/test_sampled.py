"""Flame graphs of sampled stacks: sums, units, what is left out, differences, and traces beside them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.host.hotspots import StackSelection
from stepscope.analyze.pictures.flame_tree import Limits
from stepscope.analyze.pictures.sampled_flame import FlameOptions, flame_diff, flame_graph, flame_rank_diff
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.model.sampled import FlameGraph
from tests.analyze.flame.scenes import PROJECT, context, frame_at, inclusive, keys, paths, stack, steps, tree, values
from tests.analyze.traces import US, Slices, tables
from tests.builders import MS, T0, rank_info, step_rows

names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=6).map(tuple)
sampled = st.dictionaries(names, st.integers(1, 1000), min_size=1, max_size=30)


@given(sampled, st.just(0.0) | st.floats(0, 0.4), st.integers(1, 12) | st.just(10**6))
@settings(max_examples=120, deadline=None)
def test_every_box_is_worth_what_passes_through_it_and_what_is_cut_away_is_accounted_for(
    own: dict[tuple[str, ...], int], share: float, most: int
) -> None:
    limits = Limits(min_share=share, max_nodes=most)
    graph = flame_graph(
        context([stack(*path, samples=count) for path, count in own.items()]), FlameOptions(limits=limits)
    )

    drawn, whole = values(graph), inclusive({path: float(count) for path, count in own.items()})
    assert tree(graph).unit == "samples"
    assert drawn == whole or share or len(whole) > most
    assert len(drawn) <= most + 1
    assert drawn == {path: whole[path] for path in drawn}
    assert all(path[:-1] in drawn for path in drawn if path)
    gone = [path for path in whole if path not in drawn and path[:-1] in drawn]
    assert tree(graph).hidden == sum(whole[path] for path in gone)
    kept_least = min((value for path, value in drawn.items() if path), default=0)
    assert all(whole[path] < share * whole[()] or whole[path] <= kept_least or len(drawn) > most for path in gone)


@pytest.mark.parametrize("frames", [["again:1"] * 4096, ["ping:1", "pong:2"] * 2048])
def test_a_very_deep_stack_is_drawn(frames: list[str]) -> None:
    graph = flame_graph(context([stack("main", *frames, samples=5), stack("main", samples=5)]))

    drawn = values(graph)
    assert drawn[()] == 10
    assert drawn["main", frames[0].split(":")[0]] == 5
    assert max(map(len, drawn)) <= 1000


def test_values_are_per_step_where_steps_are_known() -> None:
    worker = {"role": "loader_worker", "pid": 77, "phase": None}
    graph = flame_graph(
        context(
            [
                stack("main", "forward", samples=60, phase="forward"),
                stack("main", "poll (selectors.py:4)", samples=40, phase="data_wait", waiting=True),
                stack("_worker_loop (torch/utils/data/_utils/worker.py:3)", "augment", samples=150, **worker),
                stack("main", samples=30, phase="startup", start_ns=T0 - 900 * MS, end_ns=T0 - 100 * MS),
            ],
            steps=steps(),
        )
    )

    assert keys(graph) == ["all", "process:main", "process:workers", "phase:data_wait", "phase:forward", "outside"]
    assert tree(graph).unit == "ms per step"
    assert "mean step" in tree(graph).source
    assert values(graph, "process:main") == pytest.approx(
        {(): 10, ("main",): 10, ("main", "forward"): 6, ("main", "poll"): 4}
    )
    assert values(graph, "process:workers")[()] == pytest.approx(15)  # more than the step: two workers at once
    assert values(graph)["loader workers",] == pytest.approx(15)
    assert values(graph, "phase:forward")[()] == pytest.approx(6)
    assert (tree(graph, "outside").unit, values(graph, "outside")[()]) == ("samples", 30)


def test_what_lies_in_no_steady_step_is_drawn_in_samples() -> None:
    before = {"start_ns": T0 - 900 * MS, "end_ns": T0 - 100 * MS, "phase": "startup"}
    run = context([stack("main", samples=60, phase="forward"), stack("imports", samples=30, **before)], steps=steps())

    graph = flame_graph(run, FlameOptions(selection=StackSelection(phase="startup")))
    assert (tree(graph).unit, values(graph)) == ("samples", {(): 30, ("imports",): 30})


def test_a_run_without_stacks_is_refused_in_one_line() -> None:
    with pytest.raises(UnreadableInputError) as refused:
        flame_graph(context([], steps=step_rows(3)))
    assert "\n" not in str(refused.value)


def test_idle_threads_not_sampled_is_said() -> None:
    segment = {"host": "host-a", "file": "stacks-0.raw", "unit": "samples", "samples": 1, "timed": False}

    def notes(idle: bool | None) -> str:
        return " ".join(flame_graph(context([stack("main")], segments=[{**segment, "idle": idle}])).notes)

    assert "Idle threads were not sampled" in notes(False)
    assert "do not say whether" in notes(None)
    assert "dle threads" not in notes(True)


WHOLE = FlameOptions(limits=Limits(min_share=0, max_nodes=10**6))


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


def traced() -> Slices:
    """A function that spends three quarters of its time in an operator, which starts a kernel."""
    trace = Slices()
    function = trace.add("python_function", f"{PROJECT}/train.py(1): step", 0, 400, self_ns=100 * US)
    operator = trace.add("cpu_op", "aten::mm", 10, 300, self_ns=300 * US, parent=function, frame=function)
    trace.kernel(50, 80, "gemm", below=operator, operator=operator, frame=function)
    return trace


def test_operators_and_device_time_stand_in_the_same_graph() -> None:
    graph = flame_graph(Context(tables(traced(), stacks=[stack("step:2", samples=80), stack("other:9", samples=20)])))

    assert [key for key in keys(graph) if key != "all"] == ["process:main+operators", "gpu", "operators"]
    whole = values(graph, "process:main+operators")
    assert whole[()] == values(graph)[()] == 100
    assert whole["step",] == values(graph)["step",] == 80
    assert whole["step", "aten::mm"] == pytest.approx(60, rel=0.01)
    assert frame_at(graph, ("step", "aten::mm"), "process:main+operators").kind == "operator"
    assert [path[-1] for path in paths(graph, tree(graph, "gpu"))[1:]] == ["step", "aten::mm", "gemm"]
