"""Replays: unchanged they are the recording, without a loss they are what a step would be by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.device import replay
from stepscope.analyze.device.replay import TENSOR_CORE_RATES
from stepscope.diagnose.compute import TENSOR_CORES
from stepscope.model.device_losses import (
    COLLECTIVES,
    MATRIX,
    POINTWISE,
    SYNC,
    Replay,
    matrix,
)
from tests.analyze import shared_traces
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


@shared_traces.needs_traces
@pytest.mark.parametrize("name", shared_traces.files() if shared_traces.PRESENT else [])
def test_real_traces_replay_as_they_were_recorded(name: str) -> None:
    analysis = shared_traces.analysis_of(name)
    assert [found.run for found in analysis.replays] == [losses.run for losses in analysis.device_losses]
    for found in analysis.replays:
        assert found.left_out == ()
        assert found.residual <= 0.01
        assert found.unchanged_mean_ns == pytest.approx(found.recorded_mean_ns, rel=0.01)
        assert found.unchanged_median_ns == pytest.approx(found.recorded_median_ns, rel=0.01)


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


def test_shorter_kernels_gain_nothing_where_the_host_is_late_and_all_where_it_is_not() -> None:
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
    assert without_us(slow, POINTWISE) == 1000
    assert without_us(quick, POINTWISE) == 480
    for found in (slow, quick):
        what_if = some(found.of(POINTWISE))
        assert what_if.never_late_mean_ns == 480_000


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


def _no_launch(scene: Scene) -> None:
    for number in range(3):
        scene.work(SGEMM, 10 + 300 * number, 250, launch=None)


def _one_graph(scene: Scene) -> None:
    launch = scene.call("cudaGraphLaunch", 5, 20)
    for number in range(5):
        scene.work(ADD, 30 + 100 * number, 100, launch=launch)


def _zero(scene: Scene) -> None:
    launch = scene.call("cudaLaunchKernel", 10, 0)
    for _ in range(3):
        scene.work(SGEMM, 10, 0, launch=launch)
    scene.call("cudaDeviceSynchronize", 10, 0)


def _before_its_launch(scene: Scene) -> None:
    """Clocks of host and device that disagree."""
    scene.work(SGEMM, 10, 200, launch=scene.call("cudaLaunchKernel", 30, 5))
    scene.work(SGEMM, 100, 300, launch=scene.call("cudaLaunchKernel", 500, 5))
    scene.call("cudaDeviceSynchronize", 40, 350)


def _overlapping(scene: Scene) -> None:
    """Two kernels at a time on one stream, as with programmatic dependent launch."""
    launch = scene.call("cudaLaunchKernel", 5, 3)
    for number in range(4):
        scene.work(SGEMM, 10 + 100 * number, 150, launch=launch)


def _wait_in_wait(scene: Scene) -> None:
    ahead(scene, SGEMM, 20, 300, launched=10)
    outer = scene.call("cudaMemcpy", 30, 310)
    scene.call("cudaStreamSynchronize", 40, 290, outer)
    scene.work("Memcpy DtoH (Device -> Pageable)", 330, 5, launch=outer, category="gpu_memcpy")


ODD = {
    "no launch": _no_launch,
    "one graph": _one_graph,
    "no duration": _zero,
    "before its launch": _before_its_launch,
    "overlapping": _overlapping,
    "a wait in a wait": _wait_in_wait,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_odd_traces_replay_as_they_were_recorded(name: str, steps: int) -> None:
    found = replayed(repeated(steps, 1000, ODD[name]))
    assert found.residual <= 0.01
    assert all(0 <= what_if.mean_ns <= found.unchanged_mean_ns for what_if in found.what_ifs)


def test_of_a_large_trace_the_first_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = repeated(6, 1000, products)  # two slices each
    monkeypatch.setattr(replay, "MAX_SLICES", 8)
    assert replayed(scene).steps == 2
    monkeypatch.setattr(replay, "MAX_SLICES", 1)
    assert analyze(scene.tables(V100)).replays == ()


def test_a_replay_that_is_far_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_RESIDUAL", -1.0)
    assert analyze(repeated(3, 1000, products).tables(V100)).replays == ()
