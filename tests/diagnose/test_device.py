"""The rules on devices: each speaks of its loss with its line, and keeps quiet where the loss is hidden or rare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.model import CATEGORIES, Analysis, Diagnosis, Finding, Place, WindowFacts
from stepscope.model.device_losses import ALLOCATOR, LOADER, SYNC, Replay, WhatIf
from tests.analyze import device_scenes, shared_traces
from tests.analyze.device_scenes import (
    ADD,
    BETWEEN,
    FILE,
    PAGEABLE_IN,
    PINNED_IN,
    SGEMM,
    TENSOR,
    V100,
    Scene,
    batch_copies,
    compiled,
    copies_within,
    decompositions,
    odd_sizes,
    pointwise_run,
    reads_value,
    repeated,
    replicas,
    updates,
    zeros,
)
from tests.analyze.scenes import loader_tables
from tests.analyze.traces import US
from tests.builders import make_tables, rank_info, run_facts, step_rows
from tests.diagnose.judged import values
from tests.records import blank, replace

OURS = (
    *("sync.host_waits", "memory.allocator_in_steps", "launch.short_kernels", "host.device_idle"),
    *("transfer.host_to_device", "compute.no_tensor_cores", "compute.attention_unfused"),
    *("compute.layout_conversions", "compute.unfused_pointwise", "compute.cpu_only"),
    *("transfer.device_to_device", "launch.unfused_optimizer", "launch.zeroing_gradients", "launch.compiled_kernels"),
    *("compute.small_batch", "compute.sizes_off_tiles", "compute.serial_linalg", "communication.data_parallel"),
)
SCENES: dict[str, tuple[float, Callable[[device_scenes.Scene], None]]] = {
    "sync.host_waits": (400, device_scenes.reads_value),
    "memory.allocator_in_steps": (1000, device_scenes.allocations),
    "launch.short_kernels": (1000, device_scenes.short_launches),
    "host.device_idle": (10_000, device_scenes.host_work),
    "transfer.host_to_device": (1000, device_scenes.batch_copies),
    "compute.no_tensor_cores": (1000, device_scenes.products),
    "compute.attention_unfused": (1000, device_scenes.attention),
    "compute.layout_conversions": (1000, device_scenes.conversions),
    "compute.unfused_pointwise": (1000, device_scenes.pointwise_run),
    "transfer.device_to_device": (1000, device_scenes.copies_within),
    "launch.unfused_optimizer": (1000, device_scenes.updates),
    "launch.zeroing_gradients": (1000, device_scenes.zeros),
    "launch.compiled_kernels": (1000, device_scenes.compiled),
    "compute.small_batch": (1000, device_scenes.small_batch),
    "compute.sizes_off_tiles": (1000, device_scenes.odd_sizes),
    "compute.serial_linalg": (1000, device_scenes.decompositions),
    "communication.data_parallel": (1000, device_scenes.replicas),
}


def scene(rule: str, steps: int = 4) -> device_scenes.Scene:
    length, fill = SCENES[rule]
    return device_scenes.repeated(steps, length, fill)


def found(analysis: Analysis) -> dict[str, Finding]:
    """Findings of the rules on devices by rule."""
    return {finding.rule: finding for finding in diagnose(analysis).findings if finding.rule in OURS}


def only(rule: str, **more: Any) -> Finding:
    findings = found(analyze(scene(rule).tables(device_scenes.V100, **more)))
    assert rule in findings
    return findings[rule]


def needs(diagnosis: Diagnosis) -> dict[str, tuple[str, bool]]:
    return {item.rule: (item.needs, item.quiet) for item in diagnosis.abstained if item.rule in OURS}


@pytest.mark.parametrize("rule", SCENES)
def test_a_rule_speaks_of_its_loss(rule: str) -> None:
    finding = only(rule)
    assert finding.category == rule.partition(".")[0]
    assert finding.category in CATEGORIES
    assert 0 < finding.share <= finding.gain_ceiling <= 1
    assert finding.cost_ms_per_step == pytest.approx(finding.share * SCENES[rule][0] / 1000)
    assert (finding.where[0].file, finding.where[0].function) == ("/home/user/project/train.py", "train")
    assert finding.fix
    assert finding.caveat
    assert finding.falsified_by
    assert len(finding.evidence) >= 3
    assert all("worker0/span1" in item.source for item in finding.evidence)


@pytest.mark.parametrize("rule", SCENES)
def test_a_loss_below_the_floor_is_no_finding(rule: str) -> None:
    length, fill = SCENES[rule]

    def diluted(scene: device_scenes.Scene) -> None:
        fill(scene)
        scene.kernel(device_scenes.TENSOR, length, 40 * length, launched=length - 900 if length > 1000 else 5)

    assert rule not in found(analyze(device_scenes.repeated(4, 41 * length, diluted).tables(device_scenes.V100)))


@pytest.mark.parametrize("rule", SCENES)
def test_what_one_step_of_many_loses_is_no_loss_per_step(rule: str) -> None:
    length, fill = SCENES[rule]
    made = device_scenes.repeated(1, length, fill)
    for _ in range(5):
        made.step(length)
        made.kernel(device_scenes.TENSOR, 5, length - 10)
    assert rule not in found(analyze(made.tables(device_scenes.V100)))


@pytest.mark.parametrize("rule", SCENES)
def test_few_steps_mean_less_confidence(rule: str) -> None:
    many, one = only(rule), found(analyze(scene(rule, steps=1).tables(device_scenes.V100)))[rule]
    assert one.confidence == "medium"
    assert many.confidence in ("medium", "high")


def test_without_a_device_the_rules_abstain_in_silence() -> None:
    said = needs(diagnose(analyze(make_tables(steps=step_rows(20)))))
    assert set(said) == set(OURS)
    assert all(quiet for _, quiet in said.values())


def test_a_run_on_a_device_without_a_trace_is_told_what_is_missing() -> None:
    said = needs(diagnose(analyze(make_tables(steps=step_rows(20), ranks=[rank_info(device="cuda")]))))
    assert {rule for rule, (_, quiet) in said.items() if not quiet} == set(SCENES)
    assert said["sync.host_waits"][0] == "a profiler trace with device work"


def test_in_a_recorded_run_the_share_is_of_the_steady_step() -> None:
    made = scene("sync.host_waits")
    outside = [{**row, "step": 100 + number, "in_window": False} for number, row in enumerate(step_rows(20))]
    made.steps += [{**row, "start_ns": row["start_ns"] + 10**10} for row in outside]
    analysis = analyze(made.tables(device_scenes.V100))
    window = WindowFacts(0, "worker0.pt.trace.json", "stepscope", 4, False, "", None, None, None, None)
    finding = found(replace(analysis, windows=(window,)))["sync.host_waits"]
    assert finding.cost_ms_per_step == pytest.approx(finding.share * 10)
    assert finding.share == pytest.approx(105 / 400, abs=0.01)


def test_values_read_from_a_gpu_are_told_once() -> None:
    read = {"step": 1, "kind": "transfer", "backend": "cuda", "count": 9, "duration_ns": 10**9}
    made = scene("sync.host_waits").tables(device_scenes.V100, compiles=[{**read, "direction": "device_to_host"}])
    rules = [finding.rule for finding in diagnose(analyze(made)).findings]
    assert "sync.host_waits" in rules
    assert "transfer.device_to_host" not in rules


def test_the_allocator_needs_named_steps() -> None:
    made = scene("memory.allocator_in_steps")
    made.steps.clear()
    diagnosis = diagnose(analyze(made.tables(device_scenes.V100)))
    assert "memory.allocator_in_steps" not in {finding.rule for finding in diagnosis.findings}
    assert needs(diagnosis)["memory.allocator_in_steps"] == ("steps named in the trace", False)


def test_without_named_steps_confidence_is_low_and_says_why() -> None:
    made = scene("launch.short_kernels")
    made.steps.clear()
    finding = found(analyze(made.tables(device_scenes.V100)))["launch.short_kernels"]
    assert finding.confidence == "low"
    assert finding.caveat.startswith("The trace names no step")


def test_host_work_that_sampled_stacks_explain_is_not_told_again() -> None:
    analysis = analyze(scene("host.device_idle").tables(device_scenes.V100))
    assert "host.device_idle" in found(analysis)
    assert "host.device_idle" not in found(replace(analysis, python=()))


def test_without_the_compute_capability_nothing_is_said_of_tensor_cores() -> None:
    diagnosis = diagnose(analyze(scene("compute.no_tensor_cores").tables()))
    assert needs(diagnosis)["compute.no_tensor_cores"] == ("the compute capability of the GPU", False)


def test_tf32_comes_before_mixed_precision_where_the_device_has_it() -> None:
    finding = found(analyze(scene("compute.no_tensor_cores").tables(device_scenes.A100)))["compute.no_tensor_cores"]
    assert "TF32 are off" in finding.title
    assert [item.knob for item in finding.try_] == ["matmul_precision", "amp.dtype"]
    assert finding.fix.index("set_float32_matmul_precision") < finding.fix.index("autocast")
    older = found(analyze(scene("compute.no_tensor_cores").tables(device_scenes.V100)))["compute.no_tensor_cores"]
    assert "TF32" not in older.title
    assert [item.knob for item in older.try_] == ["amp.dtype"]


def test_conversions_of_the_input_alone_are_told_so() -> None:
    finding = found(
        analyze(device_scenes.repeated(4, 1000, device_scenes.converted_inputs).tables(device_scenes.A100))
    )["compute.layout_conversions"]
    assert finding.title.startswith("The input arrives in another memory layout")
    assert finding.cost_ms_per_step == pytest.approx(0.3)
    assert finding.try_ == ()
    everywhere = only("compute.layout_conversions")
    assert everywhere.title.startswith("Convolutions convert")
    assert [item.knob for item in everywhere.try_] == ["memory_format"]


def test_the_ceiling_of_attention_holds_its_products() -> None:
    finding = only("compute.attention_unfused")
    assert finding.share == pytest.approx(0.5)
    assert finding.gain_ceiling == pytest.approx(0.7)


def unused(*gpus: dict[str, Any], device: str = "cpu") -> Analysis:
    hardware = {**run_facts().hardware, "gpus": list(gpus)}
    tables = make_tables(steps=step_rows(40), run={"hardware": hardware}, ranks=[rank_info(device=device)])
    return analyze(tables)


def test_a_gpu_that_nobody_uses_is_told() -> None:
    finding = found(unused(*({"index": index, "name": "NVIDIA A100"} for index in (0, 1))))["compute.cpu_only"]
    assert "2 GPUs (NVIDIA A100)" in finding.title
    assert finding.share == pytest.approx(0.9)  # all but the data wait
    assert finding.confidence == "low"


def test_a_gpu_in_use_or_none_at_all_is_no_finding() -> None:
    assert "compute.cpu_only" not in found(unused({"index": 0, "name": "NVIDIA A100"}, device="cuda"))
    assert "compute.cpu_only" not in found(unused())


def test_a_product_beside_others_is_still_one() -> None:
    """Exclusive time: of two products on two streams neither hides the other."""

    def fill(scene: device_scenes.Scene) -> None:
        scene.kernel(device_scenes.SGEMM, 10, 800)
        op = scene.op("aten::mm", 6, 2)
        scene.work(device_scenes.SGEMM, 10, 800, launch=scene.call("cudaLaunchKernel", 6, 1, op), op=op, stream=8)

    finding = found(analyze(device_scenes.repeated(4, 1000, fill).tables(device_scenes.V100)))[
        "compute.no_tensor_cores"
    ]
    assert finding.cost_ms_per_step == pytest.approx(0.4)


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


PINNING_OFF = "transfer.pinning_off"


def copy_findings(fill: Fill) -> dict[str, Finding]:
    return {one.rule: one for one in diagnose(analyze(repeated(4, 1000, fill).tables(V100))).findings}


def pinned_by_hand(scene: Scene) -> None:
    scene.op("aten::pin_memory", 5, 300)
    scene.kernel(SGEMM, 320, 600)


@pytest.mark.parametrize(
    ("fill", "title", "fix", "knobs"),
    [
        (batch_copies, "Copies from pageable memory", "pin_memory=True", ["loader.pin_memory"]),
        (
            lambda scene: batch_copies(scene, PAGEABLE_IN, wait=False),
            "non_blocking=True has no effect",
            "pin_memory=True",
            ["loader.pin_memory"],
        ),
        (lambda scene: batch_copies(scene, PINNED_IN), "Copies from pinned memory block", "non_blocking=True", []),
        (
            lambda scene: batch_copies(scene, PINNED_IN, wait=False),
            "Nothing hides copies",
            "Copy the next batch while",
            [],
        ),
        (
            lambda scene: batch_copies(scene, "Memcpy HtoD (Host -> Device)"),
            "Copies from the host",
            "does not tell whether",
            ["loader.pin_memory"],
        ),
        (pinned_by_hand, "Pinning memory on the training thread", "thread of its own", ["loader.pin_memory"]),
    ],
    ids=["pageable", "non_blocking without pinning", "pinned but blocking", "pinned, not hidden", "untold", "pinning"],
)
def test_each_way_to_copy_from_the_host_is_told_apart(fill: Fill, title: str, fix: str, knobs: list[str]) -> None:
    found = copy_findings(fill)
    finding = found["transfer.host_to_device"]
    assert finding.title.startswith(title)
    assert "at 10.0 GB/s" in finding.title or fill is pinned_by_hand
    assert fix in finding.fix
    assert [item.knob for item in finding.try_] == knobs
    assert 0.27 <= finding.share <= 0.33
    assert "sync.host_waits" not in found


def fed(fill: Fill, device: str = "cuda:0", **arguments: str) -> Diagnosis:
    """A run on the device whose DataLoader was constructed with these arguments."""
    loader = analyze(loader_tables()).loader
    assert loader is not None
    analysis = analyze(repeated(4, 1000, fill).tables(V100))
    loader = replace(loader, site=Place(FILE, 7), arguments=arguments)
    return diagnose(replace(analysis, devices=(device,), loader=loader))


def copies_in(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {one.rule: one for one in diagnosis.findings if one.rule in (PINNING_OFF, "transfer.host_to_device")}


@pytest.mark.parametrize("arguments", [{}, {"pin_memory": "False"}], ids=["by default", "by the script"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_loader_that_does_not_pin_is_told_once(arguments: dict[str, str], wait: bool) -> None:
    found = copies_in(fed(lambda scene: batch_copies(scene, wait=wait), **arguments))
    assert list(found) == [PINNING_OFF]
    assert found[PINNING_OFF].share == pytest.approx(
        copy_findings(batch_copies)["transfer.host_to_device"].share, abs=0.01
    )
    assert "pin_memory=True" in found[PINNING_OFF].fix
    assert [item.knob for item in found[PINNING_OFF].try_] == ["loader.pin_memory"]


def test_what_pinning_would_not_change_is_told_beside_it() -> None:
    def fill(scene: Scene) -> None:
        to = scene.op("aten::to", 5, 312)
        call = scene.call("cudaMemcpyAsync", 10, 302, to)
        scene.work(PAGEABLE_IN, 12, 300, launch=call, op=to, category="gpu_memcpy", bytes=3_000_000)
        scene.call("cudaStreamSynchronize", 313, 3, to)
        scene.op("aten::pin_memory", 320, 340)
        scene.kernel(SGEMM, 680, 250, launched=670)

    both = copies_in(fed(fill))
    alone = copy_findings(fill)["transfer.host_to_device"]
    assert sorted(both) == ["transfer.host_to_device", PINNING_OFF]
    assert both["transfer.host_to_device"].title.startswith("Pinning memory on the training thread")
    assert sum(one.share for one in both.values()) == pytest.approx(alone.share)


def test_a_loader_that_pins_leaves_copies_to_the_other_rule() -> None:
    assert list(copies_in(fed(batch_copies, pin_memory="True"))) == ["transfer.host_to_device"]
    assert not copies_in(fed(lambda scene: scene.kernel(SGEMM, 10, 900)))


def test_it_abstains_where_pinning_is_not_known_or_no_cuda_device_is_fed() -> None:
    def missing(diagnosis: Diagnosis) -> tuple[str, bool]:
        return next((one.needs, one.quiet) for one in diagnosis.abstained if one.rule == PINNING_OFF)

    needs, quiet = missing(fed(batch_copies, pin_memory="on_gpu"))
    assert "says whether it pins" in needs
    assert not quiet
    assert missing(fed(batch_copies, device="cpu")) == ("training on a CUDA device", True)
    assert list(copies_in(fed(batch_copies, device="xpu:0"))) == ["transfer.host_to_device"]


def test_copies_on_a_device_are_told_by_where_they_go() -> None:
    within = copy_findings(copies_within)["transfer.device_to_device"]
    assert within.title.startswith("Copies within the device take 0.3 ms")
    assert "aten::clone" in within.title
    between = copy_findings(lambda scene: copies_within(scene, BETWEEN))["transfer.device_to_device"]
    assert between.title.startswith("Copies between devices")
    assert between.fix != within.fix


def test_a_copy_on_a_device_beside_work_costs_nothing() -> None:
    def fill(scene: Scene) -> None:
        copies_within(scene)
        scene.work(SGEMM, 505, 400, launch=scene.call("cudaLaunchKernel", 1, 1), stream=8)

    assert "transfer.device_to_device" not in copy_findings(fill)


MS = 1e6
PAIR = "kineto_tb_plugin/resnet50_num_workers_"


def replay_only(replay_analysis: Analysis, rule: str) -> Finding:
    (finding,) = [one for one in diagnose(replay_analysis).findings if one.rule == rule]
    return finding


def made(what_if: WhatIf) -> Replay:
    """Of steps of 100 ms, of 80 where the host is never late."""
    steps = dict.fromkeys(("recorded_mean_ns", "recorded_median_ns", "unchanged_mean_ns", "unchanged_median_ns"), 1e8)
    never_late = dict.fromkeys(("never_late_mean_ns", "never_late_median_ns"), 8e7)
    known = {"run": "", "traces": ("worker0/span1",), "steps": 3, "unexplained_ns": 0.0, "what_ifs": (what_if,)}
    return blank(Replay, **{**steps, **never_late, **known})


@pytest.fixture
def replay_analysis() -> Analysis:
    return analyze(repeated(6, 400, reads_value).tables(V100))


def test_the_ceiling_is_what_the_replay_saves(replay_analysis: Analysis) -> None:
    finding = replay_only(replay_analysis, "sync.host_waits")
    assert finding.share == pytest.approx(105 / 400)
    assert finding.gain_ceiling == pytest.approx(115 / 400)  # then the device is the limit, with 285
    assert values(finding)["replayed step without these waits"] == 0.285
    assert values(finding)["the same steps as recorded"] == 0.4
    assert BY_SUBTRACTION not in finding.caveat


def test_without_a_replay_the_ceiling_is_by_subtraction_and_says_so(replay_analysis: Analysis) -> None:
    finding = replay_only(replace(replay_analysis, replays=()), "sync.host_waits")
    assert finding.gain_ceiling == finding.share == pytest.approx(105 / 400)
    assert BY_SUBTRACTION in finding.caveat
    assert not [metric for metric in values(finding) if "replayed" in metric]


def test_no_ceiling_is_below_the_cost(replay_analysis: Analysis) -> None:
    kept = made(WhatIf(SYNC, 100 * MS, 100 * MS, None, None))
    finding = replay_only(replace(replay_analysis, replays=(kept,)), "sync.host_waits")
    assert finding.gain_ceiling == finding.share


def test_work_behind_a_late_host_is_told_to_be() -> None:
    """Kernels that are launched right before they start: as recorded, shorter ones gain nothing."""
    finding = replay_only(analyze(repeated(6, 1000, pointwise_run).tables(V100)), "compute.unfused_pointwise")
    assert "The recorded host was late as well: with it 0% of the step would be saved" in finding.caveat
    assert finding.gain_ceiling >= finding.share == pytest.approx(0.4)


def test_a_loss_of_few_steps_counts_by_the_median(replay_analysis: Analysis) -> None:
    one = made(WhatIf(ALLOCATOR, 70 * MS, 100 * MS, None, None))
    found = replace(replay_analysis, replays=(one,))
    mean, median = (replayed(found, "", ALLOCATOR, use_median=each) for each in (False, True))
    assert mean is not None
    assert median is not None
    assert mean.share == pytest.approx(0.3)
    assert median.share == 0


def test_idle_time_that_no_trace_explains_is_told(replay_analysis: Analysis) -> None:
    sound = replay_only(replay_analysis, "sync.host_waits").caveat
    odd = replace(
        replay_analysis, replays=tuple(replace(one, unexplained_ns=0.2 * 400_000) for one in replay_analysis.replays)
    )
    assert "For 20% of the step the device idles" in replay_only(odd, "sync.host_waits").caveat
    assert "the device idles with work launched" not in sound


def interior_median_ns(replay_analysis: Analysis) -> float:
    (found,) = replay_analysis.replays
    return found.recorded_median_ns


@shared_traces.needs_traces
def test_the_loaders_ceiling_bounds_what_four_workers_gained() -> None:
    none, four = (shared_traces.run_of(f"{PAIR}{workers}") for workers in (0, 4))
    measured = 1 - interior_median_ns(four.analysis) / interior_median_ns(none.analysis)
    first = none.diagnosis.findings[0]
    assert first.rule == "input.loader_bound"
    assert measured <= first.gain_ceiling <= measured + 0.15
    (found,) = none.analysis.replays
    what_if = found.of(LOADER)
    assert what_if is not None
    assert measured <= 1 - what_if.median_ns / found.unchanged_median_ns <= measured + 0.15
    assert values(first)["replayed step without the loader"] == pytest.approx(what_if.mean_ns / MS, abs=0.001)
    assert four.diagnosis.findings[0].rule != "input.loader_bound"
