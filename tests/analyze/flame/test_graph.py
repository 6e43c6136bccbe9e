"""Flame graphs of sampled stacks: what every tree must add up to, units, kinds of frames, and what is left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.host.stack_selection import StackSelection
from stepscope.analyze.pictures.flame_tree import Limits
from stepscope.analyze.pictures.sampled_flame import FlameOptions, flame_graph
from stepscope.errors import UnreadableInputError
from tests.analyze.flame.trees import context, inclusive, keys, stack, steps, tree, values
from tests.builders import MS, T0, step_rows

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


def test_parked_threads_and_launchers_are_left_out_and_said() -> None:
    stacks = [
        stack("main", samples=10),
        stack("feed", samples=300, main_thread=False, thread_name="QueueFeederThread", waiting=True),
        stack("agent", samples=50, role="launcher", pid=7, rank=None, process=None),
    ]

    graph = flame_graph(context(stacks))
    assert values(graph) == {(): 10, ("main",): 10}
    note = next(note for note in graph.notes if "left out" in note)
    assert "300 of parked threads" in note
    assert "50 of launchers" in note
    parked = flame_graph(context(stacks), FlameOptions(selection=StackSelection(parked=True)))
    assert values(parked)[()] == 310


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
