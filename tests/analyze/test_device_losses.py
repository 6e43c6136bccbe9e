"""Idle time of devices goes to its cause, each nanosecond once; work that could be less is told by what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.device_losses import (
    ALLOCATOR,
    ATTENTION,
    COMPILED,
    COPY_IN,
    DATA_PARALLEL,
    HOST,
    LAUNCH,
    LAYOUT,
    LINALG,
    MATRIX,
    OPTIMIZER,
    POINTWISE,
    SYNC,
    ZERO_GRAD,
    DeviceLosses,
    Loss,
)
from stepscope.model.views import DEVICE
from tests.analyze import shared_traces
from tests.analyze.device_scenes import (
    A100,
    ADD,
    P100,
    SGEMM,
    TENSOR,
    V100,
    Scene,
    allocations,
    attention,
    batch_copies,
    compiled,
    decompositions,
    host_work,
    pointwise_run,
    products,
    reads_value,
    repeated,
    replicas,
    short_launches,
    updates,
    zeros,
)
from tests.records import some

IDLE = (SYNC, COPY_IN, ALLOCATOR, LAUNCH, COMPILED, HOST)
WHOLE = (OPTIMIZER, ZERO_GRAD, LINALG, DATA_PARALLEL)  # own idle time and work


def idle_ns(found: DeviceLosses) -> float:
    """What all losses together tell of idle time and of copies from and to the host that nothing hides."""
    told = [one.details["idle_ns"] if one.kind in WHOLE else one.ns_per_step for one in found.losses]
    return sum(ns for one, ns in zip(found.losses, told, strict=True) if one.kind in (*IDLE, *WHOLE))


def losses(scene: Scene, *gpus: dict[str, Any]) -> DeviceLosses:
    (found,) = analyze(scene.tables(*gpus)).device_losses
    return found


def loss(scene: Scene, kind: str, *gpus: dict[str, Any]) -> Loss:
    return some(losses(scene, *gpus).of(kind))


def us(ns: float) -> float:
    return ns / 1000


def test_a_wait_costs_the_idle_time_behind_it_and_not_the_work_before() -> None:
    found = loss(repeated(3, 400, reads_value), SYNC)
    # the copy itself, and from its end to the next kernel; of the wait's 195 the device worked 192
    assert us(found.ns_per_step) == pytest.approx(2 + (315 - 212))
    assert us(found.details["waited_ns"]) == pytest.approx(195)
    assert us(found.details["copied_ns"]) == pytest.approx(2)
    assert list(found.parts) == ["aten::item"]
    assert found.calls_per_step == 1
    (line,) = found.lines
    assert line.place.function == "train"
    assert us(line.ns_per_step) == pytest.approx(105)


def test_a_wait_of_the_loader_is_the_loaders() -> None:
    def fill(scene: Scene) -> None:
        scene.kernel(SGEMM, 10, 100)
        scene.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 120, 200)
        scene.call("cudaStreamSynchronize", 130, 180)
        scene.kernel(SGEMM, 330, 60)

    found = losses(repeated(3, 400, fill))
    assert found.of(SYNC) is None
    launches = some(found.of(LAUNCH))
    # before and behind the loader, and from the last kernel to the next step's first
    assert us(launches.ns_per_step) == pytest.approx(10 + 10 + 20, abs=5)


def test_copies_to_the_device_are_no_wait_of_their_own() -> None:
    found = losses(repeated(3, 1000, batch_copies))
    assert found.of(SYNC) is None
    copies = some(found.of(COPY_IN))
    assert us(copies.details["exposed_ns"]) == pytest.approx(300)
    # 2 before the copy begins, and from its end to the next kernel: the host waited as long as that
    assert us(copies.details["idle_ns"]) == pytest.approx(2 + 18)
    assert copies.ns_per_step == pytest.approx(copies.details["exposed_ns"] + copies.details["idle_ns"])
    assert (copies.details["pageable_copies"], copies.details["blocking_copies"]) == (1, 1)
    assert copies.details["copied_bytes"] == 3_000_000
    assert copies.calls_per_step == 1


def test_gaps_before_launches_go_to_the_operators_that_launch() -> None:
    found = losses(repeated(3, 1000, short_launches))
    launches = some(found.of(LAUNCH))
    assert list(launches.parts) == ["aten::add_"]
    assert launches.calls_per_step == pytest.approx(30)
    # 29 gaps of 30 in every step; what lies between the last kernel and the next step's first is launching, too
    assert us(launches.ns_per_step) == pytest.approx(29 * 30 + 10, abs=40)
    assert found.median_kernel_ns == 2000
    assert found.of(HOST) is None


@pytest.mark.parametrize(
    "fill",
    [
        *(reads_value, batch_copies, allocations, host_work, short_launches),
        *(updates, zeros, compiled, decompositions, replicas),
    ],
)
def test_no_idle_time_is_told_twice(fill: Callable[[Scene], None]) -> None:
    scene = repeated(3, 10_000, fill)
    analysis = analyze(scene.tables())
    (found,) = analysis.device_losses
    assert analysis.views is not None
    assert 0 < idle_ns(found) <= _bound(analysis.views.spans[0].overview) + 1


def _bound(overview: Any) -> float:
    """Idle time and copies that nothing hides."""
    parts = [part for name, part in overview.parts.items() if name.startswith("idle_") or name == "exposed_copies"]
    return float(sum(part.mean_ns for part in parts))


@pytest.mark.parametrize("gpu", [V100, A100])
def test_products_on_ordinary_cores_count_where_there_are_tensor_cores(gpu: dict[str, Any]) -> None:
    assert us(loss(repeated(2, 1000, products), MATRIX, gpu).ns_per_step) == pytest.approx(800)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        (SGEMM, P100),
        (SGEMM, {**V100, "name": "AMD Instinct MI250X", "computeMajor": 9}),
        (TENSOR, V100),
        ("volta_dgemm_64x64_nn", V100),
        (ADD, V100),
    ],
)
def test_other_work_counts_for_nothing(name: str, gpu: dict[str, Any]) -> None:
    assert losses(repeated(2, 1000, lambda scene: products(scene, name)), gpu).of(MATRIX) is None


@pytest.mark.parametrize("softmax", ["aten::_softmax", "aten::_softmax_backward_data"])
def test_attention_written_out_is_what_stands_between_its_products(softmax: str) -> None:
    found = loss(repeated(2, 1000, lambda scene: attention(scene, softmax=softmax)), ATTENTION)
    assert us(found.ns_per_step) == pytest.approx(500)
    assert us(found.details["products_ns"]) == pytest.approx(200)
    assert found.details["softmax_calls"] == 1


def test_of_a_run_of_pointwise_kernels_all_but_the_longest_count() -> None:
    found = loss(repeated(2, 1000, pointwise_run), POINTWISE)
    assert us(found.ns_per_step) == pytest.approx(400)
    assert us(found.details["runs_ns"]) == pytest.approx(500)


@shared_traces.needs_traces
@pytest.mark.parametrize("name", shared_traces.files() if shared_traces.PRESENT else [])
def test_idle_losses_of_real_traces_stay_within_the_idle_time(name: str) -> None:
    analysis = shared_traces.analysis_of(name)
    assert analysis.views is not None
    overviews = [span.overview for span in analysis.views.spans if span.overview is not None]
    for found in analysis.device_losses:
        assert [overview.basis for overview in overviews] == [DEVICE]
        told = {one.kind: one.ns_per_step for one in found.losses}
        assert all(ns >= 0 for ns in told.values())
        assert idle_ns(found) <= _bound(overviews[0]) + 1
        assert all(told.get(kind, 0.0) <= found.compute_ns_per_step for kind in (MATRIX, ATTENTION, LAYOUT, POINTWISE))
