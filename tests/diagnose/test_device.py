"""The rules on devices: each speaks of its loss with its line and in its words, and keeps quiet where it is hidden or
rare; ceilings are from replays where there are any."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.model import CATEGORIES, Analysis, Diagnosis, Finding, Place, WindowFacts
from stepscope.model.device_losses import ALLOCATOR, LOADER, SYNC, Replay, WhatIf
from tests.analyze import device_scenes as scenes
from tests.analyze import shared_traces
from tests.analyze.device_scenes import A100, ADD, FILE, PAGEABLE_IN, PINNED_IN, SGEMM, TENSOR, V100, Scene
from tests.analyze.scenes import loader_tables
from tests.analyze.traces import US
from tests.builders import make_tables, rank_info, run_facts, step_rows
from tests.diagnose.judged import values
from tests.records import blank, replace, some

Fill = Callable[[Scene], Any]
SCENES: dict[str, tuple[float, Fill]] = {
    "sync.host_waits": (400, scenes.reads_value),
    "memory.allocator_in_steps": (1000, scenes.allocations),
    "launch.short_kernels": (1000, scenes.short_launches),
    "host.device_idle": (10_000, scenes.host_work),
    "transfer.host_to_device": (1000, scenes.batch_copies),
    "transfer.made_on_host": (10_000, scenes.made_tensors),
    "compute.no_tensor_cores": (1000, scenes.products),
    "compute.attention_unfused": (1000, scenes.attention),
    "compute.layout_conversions": (1000, scenes.conversions),
    "compute.unfused_pointwise": (1000, scenes.pointwise_run),
    "transfer.device_to_device": (1000, scenes.copies_within),
    "launch.unfused_optimizer": (1000, scenes.updates),
    "launch.zeroing_gradients": (1000, scenes.zeros),
    "launch.compiled_kernels": (1000, scenes.compiled),
    "compute.small_batch": (1000, scenes.small_batch),
    "compute.sizes_off_tiles": (1000, scenes.odd_sizes),
    "compute.serial_linalg": (1000, scenes.decompositions),
    "communication.data_parallel": (1000, scenes.replicas),
}
OURS = {*SCENES, "compute.cpu_only"}
PINNING_OFF = "transfer.pinning_off"


def scene(rule: str, steps: int = 4) -> Scene:
    length, fill = SCENES[rule]
    return scenes.repeated(steps, length, fill)


def analysis_of(fill: Fill, length: float = 1000, *, gpu: dict[str, Any] = V100, steps: int = 4) -> Analysis:
    return analyze(scenes.repeated(steps, length, fill).tables(gpu))


def found(given: Analysis | Scene) -> dict[str, Finding]:
    """Findings by rule."""
    analysis = analyze(given.tables(V100)) if isinstance(given, Scene) else given
    return {finding.rule: finding for finding in diagnose(analysis).findings}


def needs(diagnosis: Diagnosis, rules: Collection[str] = OURS) -> dict[str, tuple[str, bool]]:
    return {item.rule: (item.needs, item.quiet) for item in diagnosis.abstained if item.rule in rules}


@pytest.mark.parametrize("rule", SCENES)
def test_a_rule_speaks_of_its_loss(rule: str) -> None:
    finding, one = found(scene(rule))[rule], found(scene(rule, steps=1))[rule]
    assert finding.category == rule.partition(".")[0]
    assert finding.category in CATEGORIES
    assert 0 < finding.share <= finding.gain_ceiling <= 1
    assert finding.cost_ms_per_step == pytest.approx(finding.share * SCENES[rule][0] / 1000)
    assert (finding.where[0].file, finding.where[0].function) == (FILE, "train")
    assert all((finding.fix, finding.caveat, finding.falsified_by))
    assert len(finding.evidence) >= 3
    assert all("worker0/span1" in item.source for item in finding.evidence)
    assert (one.confidence, finding.confidence in ("medium", "high")) == ("medium", True)  # few steps mean less


@pytest.mark.parametrize("rule", SCENES)
def test_a_loss_below_the_floor_or_of_one_step_of_many_is_no_finding(rule: str) -> None:
    length, fill = SCENES[rule]

    def diluted(scene: Scene) -> None:
        fill(scene)
        scene.kernel(TENSOR, length, 40 * length, launched=length - 900 if length > 1000 else 5)

    assert rule not in found(scenes.repeated(4, 41 * length, diluted))
    made = scenes.repeated(1, length, fill)
    for _ in range(5):
        made.step(length)
        made.kernel(TENSOR, 5, length - 10)
    assert rule not in found(made)


def fused_kernels(scene: Scene) -> None:
    """Of operations that take 50, 100 and 150 the shortest goes, and of 60 before the first kernel what calls take."""
    scene.mark("Optimizer.step#SGD.step", 0, 60)
    at = 70.0
    for number in range(30):
        length = (5.0, 10.0, 15.0)[number % 3]
        operator = scene.op(("aten::mul_", "aten::add_", "aten::addcmul_")[number % 3], number, 0.8)
        scene.work(ADD, at, length, launch=scene.call("cudaLaunchKernel", number + 0.1, 0.5, operator), op=operator)
        at += length


def two_streams(scene: Scene) -> None:
    """Exclusive time: of two products on two streams neither hides the other."""
    scene.kernel(SGEMM, 10, 800)
    op = scene.op("aten::mm", 6, 2)
    scene.work(SGEMM, 10, 800, launch=scene.call("cudaLaunchKernel", 6, 1, op), op=op, stream=8)


def awaited(launched: float, scene: Scene) -> None:
    """Something that no trace shows holds the device up: a kernel launched long before the wait begins after it."""
    late = scene.call("cudaLaunchKernel", launched, 5)
    item = scene.op("aten::item", 50, 7000)
    copy = scene.call("cudaMemcpyAsync", 60, 6980, item)
    scene.work(ADD, 7020, 5, launch=late)
    scene.work("Memcpy DtoH (Device -> Pageable)", 7026, 2, launch=copy, op=item, category="gpu_memcpy", bytes=4)
    scene.call("cudaStreamSynchronize", 7041, 8, item)
    scene.kernel(SGEMM, 7080, 2900)


def pinned_by_hand(scene: Scene) -> None:
    scene.op("aten::pin_memory", 5, 300)
    scene.kernel(SGEMM, 320, 600)


def exchanges(scene: Scene) -> None:
    """A step of 1000 with an all_reduce of 400."""
    scene.kernel(SGEMM, 10, 500)
    scene.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 510, 400, op="nccl:all_reduce")


def broadcasts(device: int, scene: Scene) -> None:
    """A step of 1000 in which replicate broadcasts for 400; on one device it is someone else's broadcast."""
    scene.python("torch/nn/parallel/data_parallel.py(174): forward", 0, 990)
    frame = scene.python("torch/nn/parallel/replicate.py(80): replicate", 5, 395)
    scene.kernel("ncclKernel_Broadcast_RING_LL_Sum_int8_t", 100, 400, op="Broadcast", below=frame)
    scene.kernel(TENSOR, 500, 450, device=device)


def beside_work(scene: Scene) -> None:
    scenes.copies_within(scene)
    scene.work(SGEMM, 505, 400, launch=scene.call("cudaLaunchKernel", 1, 1), stream=8)


TENSORS, LAYOUT, COPIES = "compute.no_tensor_cores", "compute.layout_conversions", "transfer.host_to_device"
OPTIMIZER, TILES, ON_DEVICE = "launch.unfused_optimizer", "compute.sizes_off_tiles", "transfer.device_to_device"
ALLOCATING = "memory.allocator_in_steps"
copies = partial(partial, scenes.batch_copies)
PIN = ["loader.pin_memory"]


@pytest.mark.parametrize(
    ("rule", "fill", "title", "fix", "knobs", "cost_ms"),
    [
        # of 30 gaps and those around them one call in 30 stays
        (
            OPTIMIZER,
            scenes.updates,
            "parameter by parameter, with 30",
            "fused=True",
            ["optimizer.fused"],
            0.9 * 29 / 30,
        ),
        (OPTIMIZER, fused_kernels, "", "", ["optimizer.fused"], 0.050 + 0.060 * 29 / 30),
        (TENSORS, scenes.products, "mixed precision is off on Tesla V100", "GradScaler", ["amp.dtype"], None),
        (TENSORS, two_streams, "", "", ["amp.dtype"], 0.4),
        (LAYOUT, scenes.converted_inputs, "The input arrives in another memory layout", "Make batches in", [], 0.3),
        (LAYOUT, scenes.conversions, "Convolutions convert", "", ["memory_format"], None),
        # 130 rows take two tiles of 128: 126 of 256 are filled up
        (TILES, scenes.odd_sizes, "130 x 64 x 64", "multiples of 8", [], 0.8 * 126 / 256),
        (COPIES, copies(), "Copies from pageable memory", "pin_memory=True", PIN, 0.3),
        (COPIES, copies(wait=False), "non_blocking=True has no effect", "pin_memory=True", PIN, 0.3),
        (COPIES, copies(name=PINNED_IN), "Copies from pinned memory block", "non_blocking=True", [], 0.3),
        (COPIES, copies(name=PINNED_IN, wait=False), "Nothing hides copies", "Copy the next batch while", [], 0.3),
        (COPIES, copies(name="Memcpy HtoD (Host -> Device)"), "Copies from the host", "not tell whether", PIN, 0.3),
        (COPIES, pinned_by_hand, "Pinning memory on the training thread", "thread of its own", PIN, 0.3),
        (ALLOCATING, scenes.gives_back, "torch.cuda.empty_cache() in the steps", "empty_cache() out of", [], 0.3),
        (
            ALLOCATING,
            partial(scenes.gives_back, call="cuMemUnmap", again="cuMemMap"),
            "by cuMemUnmap and cuMemMap",
            "empty_cache() out of",
            [],
            0.3,
        ),
        (
            ALLOCATING,
            partial(scenes.gives_back, below="aten::empty"),
            "does not find a block",
            "it is at its limit",
            ["allocator.conf"],
            0.3,
        ),
        (ON_DEVICE, scenes.copies_within, "Copies within the device take 0.3 ms", "Leave out what copies", [], 0.3),
        (ON_DEVICE, partial(scenes.copies_within, name=scenes.BETWEEN), "Copies between devices", "Keep what", [], 0.3),
    ],
)
def test_the_words_go_by_what_is_seen(
    rule: str, fill: Fill, title: str, fix: str, knobs: list[str], cost_ms: float | None
) -> None:
    seen = found(analysis_of(fill, 400 if fill is fused_kernels else 1000))
    finding = seen[rule]
    assert title in finding.title
    assert fix in finding.fix
    assert [item.knob for item in finding.try_] == knobs
    assert cost_ms is None or finding.cost_ms_per_step == pytest.approx(cost_ms, abs=0.04)
    if rule in (COPIES, ALLOCATING):
        assert "at 10.0 GB/s" in finding.title or fill is pinned_by_hand or rule == ALLOCATING
        assert "sync.host_waits" not in seen
    if rule == OPTIMIZER:
        assert "launch.short_kernels" not in seen


@pytest.mark.parametrize(("begins", "stream", "told"), [(410, 9, True), (330, 9, False), (410, 7, False)])
def test_where_the_device_waits_for_a_copy_on_a_stream_of_its_own(begins: float, stream: int, told: bool) -> None:
    """Not where the next kernel began before the copy ended, or the copy lies on the stream of the kernels."""

    def fill(scene: Scene) -> None:
        to = scene.op("aten::to", 5, 20)
        call = scene.call("cudaMemcpyAsync", 10, 5, to)
        scene.work(PINNED_IN, 30, 370, launch=call, op=to, category="gpu_memcpy", bytes=3_000_000, stream=stream)
        scene.call("cudaStreamWaitEvent", 42, 5, scene.python("torch/cuda/streams.py(65): wait_stream", 40, 10))
        scene.kernel(SGEMM, begins, 500, launched=begins - 60)

    source = f"{chr(10) * 9}def train(stream, other):\n    stream.wait_stream(other)\n"
    finding = found(analyze(scenes.repeated(4, 1000, fill).tables(V100), {FILE: source}))[COPIES]
    assert (Place(FILE, 11, "train") in finding.where) is told
    assert ("sooner" in finding.fix) is told


@pytest.mark.parametrize(
    ("rule", "fill", "length"),
    [
        *(
            (
                OPTIMIZER,
                partial(scenes.updates, **how),
                1000,
            )  # fused, of another class, grouped without a fused version
            for how in ({"op": "aten::_fused_adam_"}, {"optimizer": "Shampoo"}, {"name": "triton_for_fused_0"})
        ),
        (OPTIMIZER, partial(scenes.updates, optimizer="RMSprop", op="aten::_foreach_add_"), 1000),
        *(
            (TILES, partial(scenes.odd_sizes, **how), 1000)  # that fit, of 32 bits, of no product, damaged
            for how in ({"shapes": "[[128, 64], [64, 64]]"}, {"kind": "float"}, {"shapes": "{"})
        ),
        (TILES, partial(scenes.odd_sizes, shapes="[[130, 64], [63, 64]]"), 1000),
        ("communication.data_parallel", partial(scenes.replicas, device=0), 1000),
        ("sync.host_waits", partial(awaited, 5), 10_000),
        (ON_DEVICE, beside_work, 1000),
    ],
)
def test_what_cannot_be_improved_or_costs_nothing_is_no_finding(rule: str, fill: Fill, length: float) -> None:
    seen = found(analysis_of(fill, length))
    assert rule not in seen
    assert rule != OPTIMIZER or "launch.short_kernels" in seen  # the device does wait


def test_a_wait_for_work_that_was_launched_just_before_is_the_hosts() -> None:
    assert "sync.host_waits" in found(analysis_of(partial(awaited, 7015), 10_000))


def test_without_a_device_the_rules_abstain_in_silence_and_on_one_by_what_is_missing() -> None:
    said = needs(diagnose(analyze(make_tables(steps=step_rows(20)))))
    assert set(said) == OURS
    assert all(quiet for _, quiet in said.values())
    said = needs(diagnose(analyze(make_tables(steps=step_rows(20), ranks=[rank_info(device="cuda")]))))
    assert {rule for rule, (_, quiet) in said.items() if not quiet} == set(SCENES)
    assert said["sync.host_waits"][0] == "a profiler trace with device work"
    without = diagnose(analyze(scene(TENSORS).tables()))
    assert needs(without)[TENSORS] == ("the compute capability of the GPU", False)


def test_the_thread_that_updates_parameters_trains_whatever_autograds_thread_takes() -> None:
    def fill(scene: Scene) -> None:
        scenes.reads_value(scene)
        scene.mark("Optimizer.step#SGD.step", 390, 5)
        scene.slices.add("cpu_op", "autograd::engine::evaluate_function: X", scene.at + 220, 800, track="1/2")

    assert "sync.host_waits" in found(analysis_of(fill, 1100))


def test_a_profiler_that_slows_the_rest_of_the_step_makes_a_loss_no_smaller_a_part_of_it() -> None:
    made = scene("sync.host_waits")
    made.steps += [
        {**row, "in_window": False}
        for row in step_rows(20, first_step=100, start_ns=made.steps[0]["start_ns"] + 10**10)
    ]
    for row in made.steps[4:]:
        row["wall_ns"] = 200 * US  # profiled it takes 400
    window = WindowFacts(0, "worker0.pt.trace.json", "stepscope", 4, False, "", None, None, None, None)
    finding = found(replace(analyze(made.tables(V100)), windows=(window,)))["sync.host_waits"]
    assert finding.share == pytest.approx(105 / 400, abs=0.01)
    assert finding.gain_ceiling == pytest.approx(115 / 200, abs=0.01)


def test_values_read_from_a_gpu_are_told_once() -> None:
    read = {"step": 1, "kind": "transfer", "backend": "cuda", "count": 9, "duration_ns": 10**9}
    rules = found(analyze(scene("sync.host_waits").tables(V100, compiles=[{**read, "direction": "device_to_host"}])))
    assert "sync.host_waits" in rules
    assert "transfer.device_to_host" not in rules


def test_without_named_steps_one_rule_abstains_and_the_others_doubt() -> None:
    made = scene("memory.allocator_in_steps")
    made.steps.clear()
    diagnosis = diagnose(analyze(made.tables(V100)))
    assert "memory.allocator_in_steps" not in {finding.rule for finding in diagnosis.findings}
    assert needs(diagnosis)["memory.allocator_in_steps"] == ("steps named in the trace", False)
    made = scene("launch.short_kernels")
    made.steps.clear()
    finding = found(made)["launch.short_kernels"]
    assert finding.confidence == "low"
    assert finding.caveat.startswith("The trace names no step")


def test_of_host_work_beside_sampled_stacks_operators_alone_are_told() -> None:
    """Samples tell of Python, and nothing of the operators below it."""

    def python(scene: Scene) -> None:
        scene.kernel(SGEMM, 10, 1000)
        scene.python("random.py(3): shuffle", 1100, 6000)
        scene.kernel(SGEMM, 7150, 2800)

    for fill, told in ((scenes.host_work, True), (python, False)):
        analysis = analysis_of(fill, 10_000)
        assert "host.device_idle" in found(analysis)
        assert ("host.device_idle" in found(replace(analysis, python=()))) is told


def test_a_device_that_waits_for_one_operator_does_not_wait_for_launches() -> None:
    """The operator is shorter than a gap must be whose cause is not known."""

    def work(scene: Scene) -> None:
        scenes.short_launches(scene)
        scene.op("aten::sort", 1000, 850)
        scene.kernel(SGEMM, 1900, 90)

    told = found(analysis_of(work, 2000))
    assert told["host.device_idle"].cost_ms_per_step == pytest.approx(0.9, rel=0.1)
    assert told["launch.short_kernels"].cost_ms_per_step < 1.0  # the gaps between short kernels alone


@pytest.mark.parametrize(
    ("fill", "fix"),
    [
        (partial(scenes.made_tensors, count=20, length=180), "device=cuda where"),
        (partial(scenes.made_tensors, name="aten::stack"), "copy first"),
    ],
)
def test_what_is_made_on_the_host_and_copied_is_one_loss_with_its_copies(fill: Fill, fix: str) -> None:
    analysis = analysis_of(fill, 10_000)
    for given in (analysis, replace(analysis, python=())):
        told = found(given)
        assert not {"transfer.host_to_device", "host.device_idle", "launch.short_kernels"} & set(told)
        finding = told["transfer.made_on_host"]
        assert fix in finding.fix
        assert values(finding)["copies of what was made per step"] == 2
        assert 4.5 < finding.cost_ms_per_step < 5  # the operators and both copies


def test_a_batch_that_takes_longer_to_copy_than_to_make_is_told_as_copies() -> None:
    told = found(analysis_of(partial(scenes.made_tensors, length=300), 10_000))
    assert "transfer.host_to_device" in told
    assert "transfer.made_on_host" not in told


def test_tf32_comes_before_mixed_precision_where_the_device_has_it() -> None:
    finding = found(analyze(scene(TENSORS).tables(A100)))[TENSORS]
    assert "TF32 are off" in finding.title
    assert [item.knob for item in finding.try_] == ["matmul_precision", "amp.dtype"]
    assert finding.fix.index("set_float32_matmul_precision") < finding.fix.index("autocast")


def test_the_ceiling_of_attention_holds_its_products() -> None:
    finding = found(scene("compute.attention_unfused"))["compute.attention_unfused"]
    assert (finding.share, finding.gain_ceiling) == (pytest.approx(0.5), pytest.approx(0.7))


@pytest.mark.parametrize(("gpus", "device", "told"), [(2, "cpu", True), (2, "cuda", False), (0, "cpu", False)])
def test_a_gpu_that_nobody_uses_is_told(gpus: int, device: str, told: bool) -> None:
    hardware = {**run_facts().hardware, "gpus": [{"index": index, "name": "NVIDIA A100"} for index in range(gpus)]}
    tables = make_tables(steps=step_rows(40), run={"hardware": hardware}, ranks=[rank_info(device=device)])
    seen = found(analyze(tables))
    assert ("compute.cpu_only" in seen) is told
    if told:
        finding = seen["compute.cpu_only"]
        assert "2 GPUs (NVIDIA A100)" in finding.title
        assert (finding.share, finding.confidence) == (pytest.approx(0.9), "low")  # all but the data wait


def test_collectives_of_data_parallel_are_not_told_as_exposed() -> None:
    both, one = (found(analysis_of(partial(broadcasts, device))) for device in (1, 0))
    rules = ("communication.data_parallel", "communication.exposed")
    assert [[rule in seen for rule in rules] for seen in (both, one)] == [[True, False], [False, True]]


def test_many_synchronised_norms_stand_with_exposed_communication() -> None:
    made = analysis_of(exchanges)
    assert "SyncBatchNorm" not in found(made)["communication.exposed"].fix
    losses = tuple(replace(one, sync_batch_norms_per_step=53.0) for one in made.device_losses)
    finding = found(replace(made, device_losses=losses))["communication.exposed"]
    assert "53 SyncBatchNorm layers" in finding.fix
    assert values(finding)["SyncBatchNorm layers per step"] == 53.0


@pytest.mark.parametrize("rule", [OPTIMIZER, "launch.zeroing_gradients", "launch.compiled_kernels", ON_DEVICE])
def test_no_time_is_told_twice(rule: str) -> None:
    """What the losses of a step sum to is no more than the step."""
    (losses,) = analysis_of(SCENES[rule][1]).device_losses
    assert sum(loss.ns_per_step for loss in losses.losses) <= 1000 * US


def fed(fill: Fill, device: str = "cuda:0", **arguments: str) -> Diagnosis:
    """A run on the device whose DataLoader was constructed with these arguments."""
    loader = replace(some(analyze(loader_tables()).loader), site=Place(FILE, 7), arguments=arguments)
    return diagnose(replace(analysis_of(fill), devices=(device,), loader=loader))


def copies_in(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {one.rule: one for one in diagnosis.findings if one.rule in (PINNING_OFF, COPIES)}


@pytest.mark.parametrize("arguments", [{}, {"pin_memory": "False"}], ids=["by default", "by the script"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_loader_that_does_not_pin_is_told_once(arguments: dict[str, str], wait: bool) -> None:
    told = copies_in(fed(copies(wait=wait), **arguments))
    assert list(told) == [PINNING_OFF]
    assert told[PINNING_OFF].share == pytest.approx(found(analysis_of(copies()))[COPIES].share, abs=0.01)
    assert "pin_memory=True" in told[PINNING_OFF].fix
    assert [item.knob for item in told[PINNING_OFF].try_] == PIN


def test_what_pinning_would_not_change_is_told_beside_it() -> None:
    def fill(scene: Scene) -> None:
        to = scene.op("aten::to", 5, 312)
        call = scene.call("cudaMemcpyAsync", 10, 302, to)
        scene.work(PAGEABLE_IN, 12, 300, launch=call, op=to, category="gpu_memcpy", bytes=3_000_000)
        scene.call("cudaStreamSynchronize", 313, 3, to)
        scene.op("aten::pin_memory", 320, 340)
        scene.kernel(SGEMM, 680, 250, launched=670)

    both, alone = copies_in(fed(fill)), found(analysis_of(fill))[COPIES]
    assert sorted(both) == [COPIES, PINNING_OFF]
    assert both[COPIES].title.startswith("Pinning memory on the training thread")
    assert sum(one.share for one in both.values()) == pytest.approx(alone.share)


def test_where_the_loader_pins_or_that_is_not_known_the_other_rule_speaks() -> None:
    assert list(copies_in(fed(copies(), pin_memory="True"))) == [COPIES]
    assert not copies_in(fed(lambda scene: scene.kernel(SGEMM, 10, 900)))
    words, quiet = needs(fed(copies(), pin_memory="on_gpu"), [PINNING_OFF])[PINNING_OFF]
    assert ("says whether it pins" in words, quiet) == (True, False)
    assert needs(fed(copies(), device="cpu"), [PINNING_OFF])[PINNING_OFF] == ("training on a CUDA device", True)
    assert list(copies_in(fed(copies(), device="xpu:0"))) == [COPIES]


@pytest.fixture
def reading() -> Analysis:
    return analysis_of(scenes.reads_value, 400, steps=6)


def with_replay(analysis: Analysis, what_if: WhatIf) -> Analysis:
    """Of steps of 100 ms, of 80 where the host is never late."""
    steps = dict.fromkeys(("recorded_mean_ns", "recorded_median_ns", "unchanged_mean_ns", "unchanged_median_ns"), 1e8)
    never_late = dict.fromkeys(("never_late_mean_ns", "never_late_median_ns"), 8e7)
    known = {"run": "", "traces": ("worker0/span1",), "steps": 3, "unexplained_ns": 0.0, "what_ifs": (what_if,)}
    return replace(analysis, replays=(blank(Replay, **{**steps, **never_late, **known}),))


def test_the_ceiling_is_what_the_replay_saves_else_by_subtraction(reading: Analysis) -> None:
    finding = found(reading)["sync.host_waits"]
    assert finding.share == pytest.approx(105 / 400)
    assert finding.gain_ceiling == pytest.approx(115 / 400)  # then the device is the limit, with 285
    assert values(finding)["replayed step without these waits"] == 0.285
    assert values(finding)["the same steps as recorded"] == 0.4
    assert BY_SUBTRACTION not in finding.caveat
    finding = found(replace(reading, replays=()))["sync.host_waits"]
    assert finding.gain_ceiling == finding.share == pytest.approx(105 / 400)
    assert BY_SUBTRACTION in finding.caveat
    assert not [metric for metric in values(finding) if "replayed" in metric]


def test_no_ceiling_is_below_the_cost(reading: Analysis) -> None:
    finding = found(with_replay(reading, WhatIf(SYNC, 1e8, 1e8, None, None)))["sync.host_waits"]
    assert finding.gain_ceiling == finding.share


def test_work_behind_a_late_host_is_told_to_be() -> None:
    """Kernels that are launched right before they start: as recorded, shorter ones gain nothing."""
    finding = found(analysis_of(scenes.products, steps=6))["compute.no_tensor_cores"]
    assert "The recorded host was late as well: with it 0% of the step would be saved" in finding.caveat
    assert finding.gain_ceiling >= finding.share == pytest.approx(0.4)


def test_a_loss_of_few_steps_counts_by_the_median(reading: Analysis) -> None:
    one = with_replay(reading, WhatIf(ALLOCATOR, 7e7, 1e8, None, None))
    mean, median = (some(replayed(one, "", ALLOCATOR, use_median=each)).share for each in (False, True))
    assert (mean, median) == (pytest.approx(0.3), 0)


def test_idle_time_that_no_trace_explains_is_told(reading: Analysis) -> None:
    (one,) = reading.replays
    known = {name: getattr(one, name) for name in Replay.__annotations__}
    odd = replace(reading, replays=(Replay(**known | {"unexplained_ns": 0.2 * 400_000}),))
    assert "For 20% of the step the device idles" in found(odd)["sync.host_waits"].caveat
    assert "the device idles with work launched" not in found(reading)["sync.host_waits"].caveat


@shared_traces.needs_traces
def test_the_loaders_ceiling_bounds_what_four_workers_gained() -> None:
    none, four = (shared_traces.run_of(f"kineto_tb_plugin/resnet50_num_workers_{workers}") for workers in (0, 4))
    (before,), (after,) = none.analysis.replays, four.analysis.replays
    measured = 1 - after.recorded_median_ns / before.recorded_median_ns
    first, what_if = none.diagnosis.findings[0], some(before.of(LOADER))
    assert first.rule == "input.loader_bound"
    assert measured <= first.gain_ceiling <= measured + 0.15
    assert measured <= 1 - what_if.median_ns / before.unchanged_median_ns <= measured + 0.15
    assert values(first)["replayed step without the loader"] == pytest.approx(what_if.mean_ns / 1e6, abs=0.001)
    assert four.diagnosis.findings[0].rule != "input.loader_bound"
