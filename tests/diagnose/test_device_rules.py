"""The rules on devices: each speaks of its loss with its line, and keeps quiet where the loss is hidden or rare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import CATEGORIES, Analysis, Diagnosis, Finding, WindowFacts
from tests.analyze import device_scenes
from tests.builders import make_tables, rank_info, run_facts, step_rows
from tests.records import replace

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
