"""Replays: unchanged they are the recording, without a loss what a step would be; and a smaller change never costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.context import Context
from stepscope.analyze.device import replay
from stepscope.analyze.device.device_losses import trace_losses
from stepscope.analyze.device.replay import TENSOR_CORE_RATES, Change, Graph, Replayed
from stepscope.diagnose.compute import TENSOR_CORES
from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.model.device_losses import (
    COLLECTIVES,
    LOADER,
    MATRIX,
    POINTWISE,
    SYNC,
    Replay,
    matrix,
)
from tests.analyze.device_scenes import (
    ADD,
    SGEMM,
    TENSOR,
    V100,
    Scene,
    allocations,
    attention,
    batch_copies,
    conversions,
    host_work,
    pointwise_run,
    products,
    reads_value,
    repeated,
    short_launches,
)
from tests.builders import T0
from tests.records import some

FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
FILLS: dict[str, tuple[float, Callable[[Scene], None]]] = {
    "reads": (400, reads_value),
    "allocations": (1000, allocations),
    "launches": (1000, short_launches),
    "host work": (10_000, host_work),
    "copies": (1000, batch_copies),
    "products": (1000, products),
    "attention": (1000, attention),
    "conversions": (1000, conversions),
    "pointwise": (1000, pointwise_run),
}


def replayed(scene: Scene) -> Replay:
    (found,) = analyze(scene.tables(V100)).replays
    return found


def without_us(found: Replay, kind: str) -> float:
    """The mean interior step without a loss, us."""
    what_if = some(found.of(kind))
    return what_if.mean_ns / 1000


def ahead(scene: Scene, name: str, start: float, length: float, *, launched: float, stream: int = 7) -> None:
    """A kernel that the host launched at `launched` and the device came to at `start`, both from the step's start."""
    operator = scene.op("aten::mm", launched - 2, 4)
    scene.work(name, start, length, launch=scene.call("cudaLaunchKernel", launched, 2, operator), stream=stream)


@pytest.mark.parametrize("name", FILLS)
def test_unchanged_a_replay_is_the_recording(name: str) -> None:
    length, fill = FILLS[name]
    found = replayed(repeated(5, length, fill))
    assert found.steps == 3  # of five the first and the last are left out
    assert found.recorded_mean_ns == found.recorded_median_ns == length * 1000
    assert found.unchanged_mean_ns == found.unchanged_median_ns == length * 1000
    assert found.residual == 0
    assert all(what_if.mean_ns <= found.unchanged_mean_ns for what_if in found.what_ifs)


def test_a_wait_that_another_one_takes_over_gains_little() -> None:
    """The loader of the next step waits for the same kernel."""

    def fill(scene: Scene) -> None:
        ahead(scene, SGEMM, 20, 500, launched=10)
        scene.call("cudaDeviceSynchronize", 30, 495)
        scene.mark(FETCH, 530, 400)
        scene.call("cudaDeviceSynchronize", 540, 5)

    found = replayed(repeated(5, 1000, fill))
    # the host comes to the fetch at 35, whose wait then lasts until the kernel is done
    assert without_us(found, SYNC) == pytest.approx(1000 - 10, abs=10)


def test_fused_kernels_save_their_launches_where_the_host_is_late_and_their_time_where_it_is_not() -> None:
    names = (TENSOR, ADD, ADD, ADD)  # of the run of three all but one go

    def late(scene: Scene) -> None:
        for number, name in enumerate(names):
            scene.kernel(name, 10 + 250 * number, 240, op="aten::mul")

    def early(scene: Scene) -> None:
        behind = 600 * (len(scene.steps) - 1)
        for number, name in enumerate(names):
            ahead(scene, name, 20 + behind + 240 * number, 240, launched=10 + 5 * number)

    slow, quick = replayed(repeated(6, 1000, late)), replayed(repeated(8, 360, early))
    assert quick.recorded_mean_ns == slow.never_late_mean_ns == 960_000
    assert without_us(slow, POINTWISE) == 500
    assert without_us(quick, POINTWISE) == 480
    for found in (slow, quick):
        what_if = some(found.of(POINTWISE))
        assert what_if.never_late_mean_ns == 480_000


def test_values_that_a_loop_reads_one_by_one_go_with_the_loop() -> None:
    def fill(scene: Scene) -> None:
        scene.kernel(SGEMM, 10, 200)
        for number in range(10):
            at = 220 + 50 * number
            item = scene.op("aten::item", at, 30)
            copy = scene.call("cudaMemcpyAsync", at + 2, 10, item)
            scene.work("Memcpy DtoH (Device -> Pinned)", at + 14, 2, launch=copy, op=item, category="gpu_memcpy")
            scene.call("cudaStreamSynchronize", at + 13, 6, item)
        scene.kernel(SGEMM, 720, 280)

    # from the first item's begin to the last one's end
    assert without_us(replayed(repeated(5, 1000, fill)), SYNC) == pytest.approx(1000 - 480, abs=1)


def test_tensor_cores_are_replayed_at_the_rates_the_rule_asks_for() -> None:
    assert set(TENSOR_CORE_RATES) == {TENSOR_CORES.peak, TENSOR_CORES.peak_volta}
    found = replayed(repeated(6, 1000, products))
    kinds = {what_if.kind for what_if in found.what_ifs}
    assert {matrix(TENSOR_CORES.peak), matrix(TENSOR_CORES.peak_volta)} <= kinds
    assert MATRIX not in kinds
    # behind a host that is never late only the device counts: 800 of products, and 150 of the rest
    what_if = some(found.of(matrix(8)))
    assert found.never_late_mean_ns == 950_000
    assert what_if.never_late_mean_ns == 1000 * (800 // 8 + 150 // 2)


def test_a_collective_that_work_hides_costs_nothing() -> None:
    """On a stream of its own, beside a kernel; one that nothing hides costs what the next kernel waits for it."""

    def hidden(scene: Scene) -> None:
        ahead(scene, SGEMM, 20, 900, launched=10)
        ahead(scene, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120, 500, launched=110, stream=20)
        scene.call("cudaDeviceSynchronize", 130, 800)

    def exposed(scene: Scene) -> None:
        ahead(scene, SGEMM, 20, 300, launched=10)
        ahead(scene, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 323, 500, launched=20, stream=20)
        ahead(scene, TENSOR, 826, 100, launched=30)
        scene.call("cudaDeviceSynchronize", 40, 890)

    assert without_us(replayed(repeated(5, 1000, hidden)), COLLECTIVES) == 1000
    # the collective was held back by the product, and the last kernel by the collective: that much is inferred
    assert without_us(replayed(repeated(5, 1000, exposed)), COLLECTIVES) == 500


def test_of_a_large_trace_the_first_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = repeated(6, 1000, products)  # two slices each
    monkeypatch.setattr(replay, "MAX_SLICES", 8)
    assert replayed(scene).steps == 2
    monkeypatch.setattr(replay, "MAX_SLICES", 1)
    assert analyze(scene.tables(V100)).replays == ()


def test_a_replay_that_is_far_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_RESIDUAL", -1.0)
    assert analyze(repeated(3, 1000, products).tables(V100)).replays == ()


STEPS = 8
LAUNCH, LATENCY, RETURN = 6, 8, 3  # us: of the call, from its start to the kernel's, and of a wait that is over
# A line of a program: (what, us, stream). "launch" is a kernel of that length.
Line = tuple[str, int, int]
Program = Sequence[Line]


@dataclass
class Machine:
    """Runs steps and writes them down. Times are us from the start."""

    now: int = 0
    free: dict[int, int] = field(default_factory=dict)  # stream -> when its last kernel ends
    steps: list[tuple[int, int, list[tuple[str, int, int, int, int]]]] = field(default_factory=list)

    def run(self, program: Program) -> None:
        begin, seen = self.now, []
        for what, length, stream in program:
            start = self.now
            if what == "launch":
                kernel = max(start + LATENCY, self.free.get(stream, 0))
                self.free[stream] = kernel + length
                self.now += LAUNCH
                seen.append((what, start, self.now, kernel, stream))
            elif what == "wait":
                self.now = max(self.now, *self.free.values(), 0) + RETURN
                seen.append((what, start, self.now, 0, 0))
            else:
                self.now += length
                seen.append((what, start, self.now, 0, 0))
        self.steps.append((begin, self.now, seen))

    def recorded(self, program: Program) -> Replay:
        lengths = [[length for what, length, _ in program if what == "launch"]] * len(self.steps)
        scene = Scene()
        for (begin, end, seen), kernels in zip(self.steps, lengths, strict=True):
            scene.step(end - begin)
            left = iter(kernels)
            for what, start, finish, kernel, stream in seen:
                if what == "launch":
                    launch = scene.call("cudaLaunchKernel", start - begin, finish - start)
                    scene.work(ADD, kernel - begin, next(left), launch=launch, stream=stream)
                elif what == "wait":
                    scene.call("cudaDeviceSynchronize", start - begin, finish - start)
                elif what == "load":
                    scene.mark(FETCH, start - begin, finish - start)
        (found,) = analyze(scene.tables(V100)).replays
        return found


def recorded(program: Program) -> Replay:
    machine = Machine()
    for _ in range(STEPS):
        machine.run(program)
    return machine.recorded(program)


def without(program: Program, what: str) -> Program:
    return [line for line in program if line[0] != what]


work = st.one_of(
    st.tuples(st.just("launch"), st.integers(20, 400), st.just(7)),
    st.tuples(st.just("python"), st.integers(1, 200), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
)
on_two_streams = st.one_of(work, st.tuples(st.just("launch"), st.integers(20, 400), st.just(8)))
load = st.tuples(st.just("load"), st.integers(20, 1000), st.just(0))


def foretold_us(found: Replay, kind: str) -> float:
    what_if = found.of(kind)
    return (what_if.mean_ns if what_if is not None else found.unchanged_mean_ns) / 1000


def _tolerance(program: Program) -> int:
    """What starting kernels takes an idle device is not known where the device was busy, and a wait returns in time."""
    return LATENCY + RETURN * sum(what == "wait" for what, _, _ in program)


@pytest.mark.parametrize(("what", "kind"), [("load", LOADER), ("wait", SYNC)])
@settings(max_examples=20, deadline=None)
@given(fetch=load, body=st.lists(work, max_size=8), last=st.integers(20, 400))
def test_on_one_stream_the_replay_foretells_the_step(
    what: str, kind: str, fetch: Line, body: list[Line], last: int
) -> None:
    program = [fetch, *body, ("launch", last, 7)]
    truth = recorded(without(program, what)).recorded_mean_ns / 1000
    foretold = foretold_us(recorded(program), kind)
    assert foretold == pytest.approx(truth, abs=_tolerance(program))


@pytest.mark.parametrize(("what", "kind"), [("load", LOADER), ("wait", SYNC)])
@settings(max_examples=20, deadline=None)
@given(fetch=load, body=st.lists(on_two_streams, max_size=8), last=st.integers(20, 400))
def test_on_two_streams_the_replay_never_foretells_a_longer_step(
    what: str, kind: str, fetch: Line, body: list[Line], last: int
) -> None:
    program = [fetch, *body, ("launch", last, 7)]
    truth = recorded(without(program, what)).recorded_mean_ns / 1000
    assert foretold_us(recorded(program), kind) <= truth + _tolerance(program)


LENGTH = 2000  # of a step, us
CALLS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMalloc"),
    *("cudaMemcpy", "cudaEventQuery"),
)
times = st.integers(0, LENGTH - 1)
kernels = st.tuples(times, st.integers(0, 300), st.integers(0, 400), st.sampled_from([7, 8, 20]))
calls = st.tuples(st.sampled_from(CALLS), times, st.integers(0, 500))
moments = st.integers(0, 2 * LENGTH * 1000)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Of two steps in which anything happens at any time: overlaps, waits for nothing, slices before their launch."""
    scene = Scene()
    for _ in range(2):
        scene.step(LENGTH)
        scene.kernel(SGEMM, 10, 50)  # so that each step has device work
        for start, late, length, stream in draw(st.lists(kernels, max_size=8)):
            launch = scene.call("cudaLaunchKernel", start, 5) if late < 290 else None
            scene.work(ADD, start + late - 10, length, launch=launch, stream=stream)
        for name, start, length in draw(st.lists(calls, max_size=4)):
            scene.call(name, start, length)
    return graph_of(scene)


def graph_of(scene: Scene) -> Graph:
    (found,) = trace_losses(Context(scene.tables()).base)
    return some(replay.graph_of(found))


@st.composite
def sets(draw: st.DrawFn) -> Intervals:
    pairs = draw(st.lists(st.tuples(moments, st.integers(1, 500_000)), max_size=6))
    starts = np.asarray([T0 + start for start, _ in pairs], np.int64)
    return intervals.union(starts, starts + np.asarray([length for _, length in pairs], np.int64))


def test_a_wait_that_ends_before_what_it_waits_for_replays_as_recorded() -> None:
    scene = Scene()
    scene.step(LENGTH)
    scene.work(ADD, 10, 12, launch=scene.call("cudaLaunchKernel", 5, 2))
    scene.call("cudaDeviceSynchronize", 10, 11)  # over 1 us before the kernel, by its own clock
    scene.kernel(SGEMM, 100, 50)
    graph = graph_of(scene)
    assert len(graph.wait_begin_ns) == 1
    assert (Replayed(graph, Change()).start_ns == graph.start_ns).all()


@settings(max_examples=80, deadline=None)
@given(graphs(), sets(), st.data())
def test_slices_of_a_chain_come_out_as_one_by_one(graph: Graph, cut: Intervals, data: st.DataObject) -> None:
    flags = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(graph), max_size=len(graph))), bool)
    change = Change(cut, graph.duration_ns // 2, flags)
    one_by_one = Replayed(graph, change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "LEAST_CHAIN", 0)
        graph.__dict__.pop("chains")
        chained = Replayed(graph, change)
    assert chained.start_ns.tolist() == one_by_one.start_ns.tolist()
    assert chained.end_ns.tolist() == one_by_one.end_ns.tolist()
    assert chained.host_ns(graph.wait_finish_ns).tolist() == one_by_one.host_ns(graph.wait_finish_ns).tolist()
