"""Rules on whole operations of a device: what each says, when it keeps quiet, and that no time is told twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Finding
from tests.analyze.device_scenes import (
    ADD,
    SGEMM,
    TENSOR,
    V100,
    Scene,
    compiled,
    copies_within,
    decompositions,
    odd_sizes,
    repeated,
    replicas,
    updates,
    zeros,
)
from tests.analyze.traces import US
from tests.diagnose.judged import values
from tests.records import replace

Fill = Callable[[Scene], Any]


def analysis(fill: Fill, length: float = 1000) -> Analysis:
    return analyze(repeated(4, length, fill).tables(V100))


def findings(fill: Fill, length: float = 1000) -> dict[str, Finding]:
    return {one.rule: one for one in diagnose(analysis(fill, length)).findings}


def test_an_optimizer_that_launches_for_every_parameter_is_told_to_fuse() -> None:
    found = findings(updates)
    finding = found["launch.unfused_optimizer"]
    assert "parameter by parameter, with 30 kernels" in finding.title
    assert "fused=True" in finding.fix
    assert [(item.knob, item.value) for item in finding.try_] == [("optimizer.fused", "true")]
    # 29 gaps of 30 and those around them, of which one call in 30 stays
    assert finding.cost_ms_per_step == pytest.approx(0.9 * 29 / 30, abs=0.04)
    assert "launch.short_kernels" not in found


@pytest.mark.parametrize(
    "how",
    [
        {"op": "aten::_fused_adam_"},
        {"optimizer": "Shampoo"},
        {"optimizer": "RMSprop", "op": "aten::_foreach_add_"},
        {"name": "triton_for_fused_0"},
    ],
    ids=["fused", "own class", "grouped without a fused version", "compiled"],
)
def test_an_optimizer_that_cannot_be_improved_is_no_finding(how: dict[str, str]) -> None:
    found = findings(lambda scene: updates(scene, **how))
    assert "launch.unfused_optimizer" not in found
    assert "launch.short_kernels" in found  # the device does wait


def test_kernels_that_a_fused_update_leaves_out_are_lost_too() -> None:
    """Of operations that take 50, 100 and 150 the shortest goes, and of 60 before the first kernel what calls take."""

    def fill(scene: Scene) -> None:
        scene.mark("Optimizer.step#SGD.step", 0, 60)
        at = 70.0
        for number in range(30):
            length = (5.0, 10.0, 15.0)[number % 3]
            operator = scene.op(("aten::mul_", "aten::add_", "aten::addcmul_")[number % 3], number, 0.8)
            call = scene.call("cudaLaunchKernel", number + 0.1, 0.5, operator)
            scene.work(ADD, at, length, launch=call, op=operator)
            at += length

    finding = findings(fill, 400)["launch.unfused_optimizer"]
    assert finding.cost_ms_per_step == pytest.approx(0.050 + 0.060 * 29 / 30)


def test_a_wait_for_work_that_had_not_begun_is_not_the_hosts() -> None:
    """Something that no trace shows holds the device up: a kernel launched long before the wait begins after it."""

    def fill(scene: Scene, launched: float) -> None:
        late = scene.call("cudaLaunchKernel", launched, 5)
        item = scene.op("aten::item", 50, 7000)
        copy = scene.call("cudaMemcpyAsync", 60, 6980, item)
        scene.work(ADD, 7020, 5, launch=late)
        scene.work("Memcpy DtoH (Device -> Pageable)", 7026, 2, launch=copy, op=item, category="gpu_memcpy", bytes=4)
        scene.call("cudaStreamSynchronize", 7041, 8, item)
        scene.kernel(SGEMM, 7080, 2900)

    assert "sync.host_waits" not in findings(lambda scene: fill(scene, 5), 10_000)
    assert "sync.host_waits" in findings(lambda scene: fill(scene, 7015), 10_000)


def test_sizes_that_do_not_fill_tiles_are_told() -> None:
    finding = findings(odd_sizes)["compute.sizes_off_tiles"]
    assert "130 x 64 x 64" in finding.title
    # 130 rows take two tiles of 128: 126 of 256 are filled up
    assert finding.cost_ms_per_step == pytest.approx(0.8 * 126 / 256)
    assert "multiples of 8" in finding.fix


@pytest.mark.parametrize(
    "how",
    [{"shapes": "[[128, 64], [64, 64]]"}, {"kind": "float"}, {"shapes": "[[130, 64], [63, 64]]"}, {"shapes": "{"}],
    ids=["fits", "32 bits", "no product", "damaged"],
)
def test_other_sizes_are_no_finding(how: dict[str, str]) -> None:
    assert "compute.sizes_off_tiles" not in findings(lambda scene: odd_sizes(scene, **how))


def test_one_device_is_no_data_parallel() -> None:
    assert "communication.data_parallel" not in findings(lambda scene: replicas(scene, device=0))


def exchanges(scene: Scene) -> None:
    """A step of 1000 with an all_reduce of 400."""
    scene.kernel(SGEMM, 10, 500)
    scene.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 510, 400, op="nccl:all_reduce")


def broadcasts(scene: Scene, device: int) -> None:
    """A step of 1000 in which replicate broadcasts for 400; on one device it is someone else's broadcast."""
    scene.python("torch/nn/parallel/data_parallel.py(174): forward", 0, 990)
    frame = scene.python("torch/nn/parallel/replicate.py(80): replicate", 5, 395)
    scene.kernel("ncclKernel_Broadcast_RING_LL_Sum_int8_t", 100, 400, op="Broadcast", below=frame)
    scene.kernel(TENSOR, 500, 450, device=device)


def test_collectives_of_data_parallel_are_not_told_as_exposed() -> None:
    both, one = findings(lambda scene: broadcasts(scene, 1)), findings(lambda scene: broadcasts(scene, 0))
    assert "communication.data_parallel" in both
    assert "communication.exposed" not in both
    assert "communication.data_parallel" not in one
    assert "communication.exposed" in one


def test_many_synchronised_norms_stand_with_exposed_communication() -> None:
    made = analysis(exchanges)
    assert "SyncBatchNorm" not in _exposed(made).fix
    losses = tuple(replace(one, sync_batch_norms_per_step=53.0) for one in made.device_losses)
    finding = _exposed(replace(made, device_losses=losses))
    assert "53 SyncBatchNorm layers" in finding.fix
    assert values(finding)["SyncBatchNorm layers per step"] == 53.0


def _exposed(made: Analysis) -> Finding:
    return next(one for one in diagnose(made).findings if one.rule == "communication.exposed")


@pytest.mark.parametrize("fill", [updates, zeros, compiled, decompositions, replicas, copies_within])
def test_no_time_is_told_twice(fill: Fill) -> None:
    """What the losses of a step sum to is no more than the step."""
    made = analysis(fill)
    (losses,) = made.device_losses
    assert sum(loss.ns_per_step for loss in losses.losses) <= 1000 * US
