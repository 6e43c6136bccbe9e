"""Device work that could be less: products without tensor cores, attention written out, layouts, pointwise runs.

And sizes that do not fit the tiles of tensor cores, linear algebra that a GPU does matrix by matrix or on the host too,
and the GPU that is there but not used.
"""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.common import finding_id, severity, steps_source, train_steps
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.thresholds import DEVICE, TENSOR_CORES
from stepscope.diagnose.thresholds import LAYOUT as LAYOUT_LIMITS
from stepscope.model import Analysis, Evidence, Finding, StepFacts, Try
from stepscope.model.device_losses import (
    ATTENTION,
    LAYOUT,
    LINALG,
    MATRIX,
    POINTWISE,
    TILES,
    DeviceLosses,
    Loss,
    matrix,
)

MATRIX_RULE = "compute.no_tensor_cores"
ATTENTION_RULE = "compute.attention_unfused"
LAYOUT_RULE = "compute.layout_conversions"
POINTWISE_RULE = "compute.unfused_pointwise"
CPU_RULE = "compute.cpu_only"
LEARN_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
LEARN_ATTENTION = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html"
LEARN_LAYOUT = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
LEARN_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
LEARN_CUDA = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_AMPERE = 8  # major compute capability from which there are TF32 and bfloat16


def no_tensor_cores(analysis: Analysis) -> list[Finding]:
    """One finding when products and convolutions run on ordinary cores for more than the floor."""
    return [
        _no_tensor_cores(analysis, losses, loss, time)
        for losses, loss, time in basis.seen(analysis, MATRIX)
        if _gained(time) >= DEVICE.floor * losses.step_ns
    ]


def _gained(time_ns: float) -> float:
    """What 16 bits would take off products that now take `time_ns`."""
    return time_ns * (1 - 1 / TENSOR_CORES.gain)


def _no_tensor_cores(analysis: Analysis, losses: DeviceLosses, loss: Loss, eligible: float) -> Finding:
    cost = _gained(eligible)
    source = basis.trace_source(losses)
    newer = all(_major(gpu.capability) >= _AMPERE for gpu in losses.gpus)
    peak = TENSOR_CORES.peak if newer else TENSOR_CORES.peak_volta
    rest = max(0.0, losses.compute_ns_per_step - eligible)
    ceiling = eligible * (1 - 1 / peak) + rest * (1 - 1 / TENSOR_CORES.bytes)
    dtype = "bfloat16" if newer else "float16"
    names = ", ".join(sorted({gpu.name for gpu in losses.gpus if gpu.name})) or "the GPU"
    used = loss.details.get("tensor_core_ns", 0.0)
    how = "run on ordinary cores" if used else "leave the tensor cores unused"
    what = "mixed precision and TF32 are off" if newer and _mostly_products(loss) else "mixed precision is off"
    words = Words(
        title=f"Matrix products and convolutions {how} for {eligible / 1e6:.1f} ms per step: {what} on {names}"
        f"{basis.first_at(loss)}",
        fix=_precision_fix(newer),
        caveat=f"The cost counts this work as {TENSOR_CORES.gain:.0f} times as fast, which 16 bits give by halving the "
        f"bytes alone; the ceiling counts the peak rate, {peak:.0f} times as high. Results differ in the last digits; "
        "check that the loss still falls as before.",
        falsified_by=f"Under torch.autocast('cuda', dtype=torch.{dtype}) the mean step does not get shorter",
        learn=LEARN_AMP,
        tries=(*((Try("matmul_precision", "high"),) if newer else ()), Try("amp.dtype", "bf16" if newer else "fp16")),
    )
    evidence = (
        ms("products on ordinary cores, nothing beside them", eligible, source),
        ms("of it convolutions", loss.details.get("convolutions_ns", 0.0), source),
        ms("kernels on tensor cores", used, source),
        ms("of them in TF32, by name", loss.details.get("tf32_ns", 0.0), source),
        ms("all computing kernels", losses.compute_ns_per_step, source),
        Evidence("such products per step", round(loss.calls_per_step, 1), "kernels", source),
        Evidence("compute capability", _capabilities(losses), "", source),
        *basis.parts_evidence(loss, source),
    )
    claim = Claim(MATRIX_RULE, "compute", loss, cost, ceiling, words, evidence, what_if=matrix(peak))
    return basis.finding(analysis, losses, claim)


def _mostly_products(loss: Loss) -> bool:
    """Matrix products, for which PyTorch leaves TF32 off; for convolutions it is on."""
    return loss.details.get("products_ns", 0.0) > loss.details.get("convolutions_ns", 0.0)


def _precision_fix(newer: bool) -> str:
    if newer:
        return (
            "First torch.set_float32_matmul_precision('high') (and torch.backends.cudnn.allow_tf32 = True, if it was "
            "switched off): tensor cores in TF32, with one line. Then, for more, the forward pass and the loss under "
            "torch.autocast('cuda', dtype=torch.bfloat16)"
        )
    return (
        "Run the forward pass and the loss under torch.autocast('cuda', dtype=torch.float16) and scale the loss with "
        "torch.amp.GradScaler; sizes should be multiples of 8"
    )


def _major(capability: str | None) -> int:
    text = (capability or "").partition(".")[0]
    return int(text) if text.isdigit() else 0


def _capabilities(losses: DeviceLosses) -> str:
    return ", ".join(sorted({gpu.capability for gpu in losses.gpus if gpu.capability}))


def attention_unfused(analysis: Analysis) -> list[Finding]:
    """One finding when what stands between the products of an attention costs more than the floor."""
    return [_attention_unfused(analysis, *one) for one in basis.seen(analysis, ATTENTION)]


def _attention_unfused(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    products = loss.details.get("products_ns", 0.0)
    calls = loss.details.get("softmax_calls", 0.0)
    words = Words(
        title=f"Attention is written out: what stands between its two products takes {cost / 1e6:.1f} ms per step, "
        f"{calls:.0f} times{basis.first_at(loss)}",
        fix="Call torch.nn.functional.scaled_dot_product_attention, which fuses all of it (in Hugging Face models "
        "attn_implementation='sdpa')",
        caveat="The fused kernels return no attention weights, and not every mask or head size has one. What the "
        "products gain by it is not in the cost, only in the ceiling.",
        falsified_by="With scaled_dot_product_attention the mean step does not get shorter",
        learn=LEARN_ATTENTION,
    )
    evidence = (
        ms("kernels between the two products", loss.ns_per_step, source),
        ms("the products themselves", products, source),
        Evidence("softmaxes per step", round(calls, 1), "calls", source),
        *basis.parts_evidence(loss, source),
    )
    claim = Claim(ATTENTION_RULE, "compute", loss, cost, cost + products, words, evidence)
    return basis.finding(analysis, losses, claim)


def layout_conversions(analysis: Analysis) -> list[Finding]:
    """One finding when conversions between memory layouts around convolutions cost more than the floor."""
    return [_layout_conversions(analysis, *one) for one in basis.seen(analysis, LAYOUT)]


def _layout_conversions(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    first, all_ns = loss.details.get("first_ns", 0.0), loss.details.get("conversions_ns", 0.0)
    convolutions = loss.details.get("convolutions", 0.0)
    at_input = convolutions > 1 and first >= LAYOUT_LIMITS.at_input * all_ns
    evidence = (
        ms("conversions between layouts, nothing beside them", loss.ns_per_step, source),
        ms("conversions at the first convolution of a step", first, source),
        Evidence("conversions per step", round(loss.calls_per_step, 1), "kernels", source),
        Evidence("convolutions per step", round(convolutions, 1), "calls", source),
        *basis.parts_evidence(loss, source),
    )
    words = (_input_layout if at_input else _layout_of_all)(loss, cost)
    return basis.finding(analysis, losses, Claim(LAYOUT_RULE, "compute", loss, cost, cost, words, evidence))


def _layout_of_all(loss: Loss, cost: float) -> Words:
    return Words(
        title=f"Convolutions convert their memory layout: {loss.calls_per_step:.0f} conversions take "
        f"{cost / 1e6:.1f} ms per step{basis.first_at(loss)}",
        fix="Keep images and the model in the layout the kernels want: model.to(memory_format=torch.channels_last) and "
        "the same for the input batch",
        caveat="An operator without a channels_last version converts back; look for conversions that remain.",
        falsified_by="With model and input in channels_last as many conversions run, or the mean step does not get "
        "shorter",
        learn=LEARN_LAYOUT,
        tries=(Try("memory_format", "channels_last"),),
    )


def _input_layout(loss: Loss, cost: float) -> Words:
    return Words(
        title=f"The input arrives in another memory layout than the model's, and the first convolution converts it in "
        f"every step: {cost / 1e6:.1f} ms{basis.first_at(loss)}",
        fix="Make batches in the model's layout: batch.to(device, memory_format=torch.channels_last), or in the "
        "DataLoader's collate_fn, where workers do it",
        caveat="The copy then happens elsewhere: it costs nothing only where workers make it, or the copy to the "
        "device with it.",
        falsified_by="With batches made in channels_last the mean step does not get shorter",
        learn=LEARN_LAYOUT,
    )


def unfused_pointwise(analysis: Analysis) -> list[Finding]:
    """One finding when runs of pointwise kernels cost more than the floor over what one kernel for each would."""
    return [_unfused_pointwise(analysis, *one) for one in basis.seen(analysis, POINTWISE)]


def _unfused_pointwise(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    runs_ns = loss.details.get("runs_ns", 0.0)
    words = Words(
        title=f"{loss.details.get('runs_kernels', 0.0):.0f} pointwise kernels per step run one behind the other: "
        f"{cost / 1e6:.1f} ms per step more than fused ones would{basis.first_at(loss)}",
        fix="Compile the model or the part of it at this line with torch.compile, which fuses such runs",
        caveat="The cost counts all of a run but its longest kernel, as if one kernel took the place of all; some may "
        "not depend on one another and stay apart. The first steps compile.",
        falsified_by="Under torch.compile the mean step does not get shorter",
        learn=LEARN_COMPILE,
        tries=(Try("compile", "true"),),
    )
    evidence = (
        ms("kernels that fusing would leave out", loss.ns_per_step, source),
        ms("all kernels of these runs", runs_ns, source),
        Evidence("kernels that fusing would leave out, per step", round(loss.calls_per_step, 1), "kernels", source),
        *basis.parts_evidence(loss, source),
    )
    claim = Claim(POINTWISE_RULE, "compute", loss, cost, max(cost, runs_ns), words, evidence, most="medium")
    return basis.finding(analysis, losses, claim)


def cpu_only(analysis: Analysis) -> list[Finding]:
    """One finding when the machine has a GPU and every rank trains on the CPU."""
    train, found = train_steps(analysis), gpu_names(analysis)
    if train is None or not found or any(device != "cpu" for device in analysis.devices):
        return []
    before = ("data_wait", "before_forward")  # what feeds the step, which no GPU does
    wait = sum(part.ms for part in train.partition if part.category in before)
    share = max(0.0, 1.0 - wait / train.mean_ms)
    return [_cpu_finding(train, found, share)]


def gpu_names(analysis: Analysis) -> tuple[str, ...]:
    """Names of the GPUs that the recording host saw."""
    listed = analysis.run.hardware.get("gpus")
    if not isinstance(listed, list):
        return ()
    return tuple(str(gpu.get("name") or "a GPU") for gpu in listed if isinstance(gpu, dict))


def _cpu_finding(train: StepFacts, found: tuple[str, ...], share: float) -> Finding:
    count = f"{len(found)} GPUs" if len(found) > 1 else "a GPU"
    return Finding(
        id=finding_id(CPU_RULE, None),
        rule=CPU_RULE,
        category="compute",
        title=f"The model trains on the CPU, although the machine has {count} ({found[0]})",
        severity=severity(share),
        confidence="low",
        cost_ms_per_step=share * train.mean_ms,
        share=share,
        gain_ceiling=share,
        where=(),
        ranks=train.ranks,
        evidence=(
            Evidence("GPUs of this machine", len(found), "GPUs", "manifest.json, hardware"),
            Evidence("devices trained on", "cpu", "", "rank.json"),
            Evidence("mean steady step", round(train.mean_ms, 3), "ms", steps_source(train)),
        ),
        fix="Move model and batches to the device: device = 'cuda' if torch.cuda.is_available() else 'cpu'; where it "
        "says False, the installed torch is a CPU build or does not fit the driver (stepscope doctor tells)",
        caveat="The cost is all of the step that is not data wait, which a GPU would do in less time, not in none. A "
        "very small model can be as fast on the CPU.",
        learn=LEARN_CUDA,
        falsified_by="With model and batches on the GPU the mean step does not get shorter",
    )


LINALG_RULE = "compute.serial_linalg"
LEARN_LINALG = "https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cuda.preferred_linalg_library"


def serial_linalg(analysis: Analysis) -> list[Finding]:
    """One finding when calls of linear algebra that leave the device mostly empty cost more than the floor."""
    return [_serial_linalg(analysis, *one) for one in basis.seen(analysis, LINALG)]


def _serial_linalg(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, at = basis.trace_source(losses), basis.first_at(loss)
    operator = next(iter(loss.parts), "linear algebra")
    launches, matrices = loss.details.get("launches", 0.0), loss.details.get("matrices", 0.0)
    rows = loss.details.get("matrix_rows", 0.0) / matrices if matrices else 0.0
    sizes = f" for {matrices:.0f} matrices with {rows:.0f} rows" if matrices else ""
    words = Words(
        title=f"{basis.clipped(operator)} on the GPU is serial: {cost / 1e6:.1f} ms per step and {launches:.0f} "
        f"launches{sizes}, and the device mostly waits{at}",
        fix=f"Do it on the CPU in one batch{at} (x.cpu(), the decomposition, and back), or on the device with "
        "batched products: for small matrices written out (Gram-Schmidt, Cholesky of the Gram matrix for QR), or "
        "torch.backends.cuda.preferred_linalg_library('magma') or 'cusolver', whichever is not in use",
        caveat="The cost is all time of these calls in which nothing else runs; what takes their place takes time "
        "too, and on the CPU a copy each way. Other algorithms have other rounding errors: Cholesky of the Gram matrix "
        "squares the condition number. Large single matrices belong on the GPU.",
        falsified_by="With the same decomposition done on the CPU, copies included, the mean step does not get shorter",
        learn=LEARN_LINALG,
        tries=(Try("cuda.linalg_library", "magma"), Try("cuda.linalg_library", "cusolver")),
    )
    evidence = [
        ms("linear algebra with nothing beside it", loss.ns_per_step, source),
        ms("of it the device idles", loss.details.get("idle_ns", 0.0), source),
        Evidence("calls per step", round(loss.calls_per_step, 2), "calls", source),
        Evidence("launches in them per step", round(launches, 1), "launches", source),
        *basis.parts_evidence(loss, source),
    ]
    if matrices:
        evidence.append(Evidence("matrices per step", round(matrices, 1), "matrices", source))
        evidence.append(Evidence("rows of a matrix", round(rows, 1), "rows", source))
    claim = Claim(LINALG_RULE, "compute", loss, cost, cost, words, tuple(evidence), most="medium")
    return basis.finding(analysis, losses, claim)


TILES_RULE = "compute.sizes_off_tiles"
LEARN_TILES = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"


def sizes_off_tiles(analysis: Analysis) -> list[Finding]:
    """One finding when filling up tiles costs more than the floor."""
    return [_sizes_off_tiles(analysis, *one) for one in basis.seen(analysis, TILES)]


def _sizes_off_tiles(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    kernels, unaligned = loss.details.get("kernels_ns", 0.0), loss.details.get("unaligned_ns", 0.0)
    top = next(iter(loss.parts), "?")
    words = Words(
        title=f"Matrix products do not fit the tiles of tensor cores: {cost / 1e6:.1f} ms per step only fill them up, "
        f"longest for {top}{basis.first_at(loss)}",
        fix="Choose sizes (hidden and head sizes, vocabulary, tokens per batch) that are multiples of 8, better of 64 "
        "or 128: pad an embedding or output layer by rows that are never used, and sequences to few lengths",
        caveat="A lower bound: kernels for rows that begin at any element are slower besides, and the last wave of "
        "tiles seldom fills the device. Sizes are rows x columns x depth of a product; which of them can change is "
        "for you to say.",
        falsified_by="With these sizes padded to the next multiple of 64 the products take as long as before",
        learn=LEARN_TILES,
    )
    evidence = (
        ms("products that only fill up tiles, nothing beside them", loss.ns_per_step, source),
        ms("all time of these kernels", kernels, source),
        ms("of it in kernels for rows that begin at any element", unaligned, source),
        ms("all products in 16 bits", loss.details.get("products_ns", 0.0), source),
        Evidence("such products per step", round(loss.calls_per_step, 1), "kernels", source),
        *basis.parts_evidence(loss, source, "lost at {}"),
    )
    ceiling = cost + unaligned * (1 - 1 / TENSOR_CORES.gain)
    return basis.finding(
        analysis, losses, Claim(TILES_RULE, "compute", loss, cost, ceiling, words, evidence, most="medium")
    )
