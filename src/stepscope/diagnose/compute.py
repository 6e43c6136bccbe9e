"""Device work that could be less: products without tensor cores or off their tiles, attention written out, layouts,
pointwise runs, serial linear algebra. And the GPU that is there but not used.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.diagnose.device import ProfiledLoss, loss_rule
from stepscope.diagnose.rule import STEPS, Claim, Need, Thresholds, accelerator, ms, rule, steps_source
from stepscope.model import Analysis, Evidence, Try
from stepscope.model import device_losses as kinds


class TENSOR_CORES(Thresholds):
    """What mixed precision gives. NVIDIA reports 1.5 to 3 times for whole training steps."""

    gain: float = 2.0  # of products in 16 bits at least: half of the bytes, and from Volta on twice the rate or more
    peak: float = 16.0  # tensor cores by ordinary ones in 32 bits, data sheets of A100 and H100
    peak_volta: float = 8.0  # the same of V100 and T4
    bytes: float = 2.0  # what 16 bits can give all other kernels, which move data


class LAYOUT(Thresholds):
    at_input: float = 0.8  # of the conversions at a step's first convolution: the rest of the model agrees with itself


def gpu_names(analysis: Analysis) -> tuple[str, ...]:
    listed = analysis.run.hardware.get("gpus")
    if not isinstance(listed, list):
        return ()
    return tuple(str(gpu.get("name") or "a GPU") for gpu in listed if isinstance(gpu, dict))


CAPABILITY = Need(
    "the compute capability of the GPU", lambda a: any(gpu.capability for one in a.device_losses for gpu in one.gpus)
)
SHAPES = Need("shapes of operators in the trace", lambda a: any(one.has_shapes for one in a.device_losses))
GPU_THERE = Need("a GPU in the machine", gpu_names, quiet=True)
_AMPERE = 8  # major compute capability from which there are TF32 and bfloat16


@loss_rule("compute.no_tensor_cores", kinds.MATRIX, CAPABILITY, learn="https://docs.pytorch.org/docs/stable/amp.html")
def no_tensor_cores(seen: ProfiledLoss) -> Iterator[Claim]:
    losses, eligible = seen.losses, seen.cost_ns
    cost = eligible * (1 - 1 / TENSOR_CORES.gain)
    newer = all(_major(gpu.capability) >= _AMPERE for gpu in losses.gpus)
    peak = TENSOR_CORES.peak if newer else TENSOR_CORES.peak_volta
    rest = max(0.0, losses.compute_ns_per_step - eligible)
    dtype = "bfloat16" if newer else "float16"
    names = ", ".join(sorted({gpu.name for gpu in losses.gpus if gpu.name})) or "the GPU"
    how = "run on ordinary cores" if seen.detail("tensor_core_ns") else "leave the tensor cores unused"
    # of matrix products PyTorch leaves TF32 off; for convolutions it is on
    products = seen.detail("products_ns") > seen.detail("convolutions_ns")
    what = "mixed precision and TF32 are off" if newer and products else "mixed precision is off"
    yield seen.claim(
        title=f"Matrix products and convolutions {how} for {eligible / 1e6:.1f} ms per step: {what} on {names}"
        f"{seen.at}",
        cost_ns=cost,
        ceiling_ns=eligible * (1 - 1 / peak) + rest * (1 - 1 / TENSOR_CORES.bytes),
        what_if=kinds.matrix(peak),
        evidence=(
            seen.ms("products on ordinary cores, nothing beside them", eligible),
            seen.ms("of it convolutions", seen.detail("convolutions_ns")),
            seen.ms("kernels on tensor cores", seen.detail("tensor_core_ns")),
            seen.ms("of them in TF32, by name", seen.detail("tf32_ns")),
            seen.ms("all computing kernels", losses.compute_ns_per_step),
            seen.figure("such products per step", round(seen.loss.calls_per_step, 1), "kernels"),
            seen.figure(
                "compute capability", ", ".join(sorted({gpu.capability for gpu in losses.gpus if gpu.capability})), ""
            ),
            *seen.parts(),
        ),
        fix="First torch.set_float32_matmul_precision('high') (and torch.backends.cudnn.allow_tf32 = True, if it "
        "was switched off): tensor cores in TF32, with one line. Then, for more, the forward pass and the loss "
        "under torch.autocast('cuda', dtype=torch.bfloat16)"
        if newer
        else "Run the forward pass and the loss under torch.autocast('cuda', dtype=torch.float16) and scale the "
        "loss with torch.amp.GradScaler; sizes should be multiples of 8",
        caveat=f"The cost counts this work as {TENSOR_CORES.gain:.0f} times as fast, which 16 bits give by halving "
        f"the bytes alone; the ceiling counts the peak rate, {peak:.0f} times as high. Results differ in the last "
        "digits; check that the loss still falls as before.",
        falsified_by=f"Under torch.autocast('cuda', dtype=torch.{dtype}) the mean step does not get shorter",
        tries=(*((Try("matmul_precision", "high"),) if newer else ()), Try("amp.dtype", "bf16" if newer else "fp16")),
    )


def _major(capability: str | None) -> int:
    text = (capability or "").partition(".")[0]
    return int(text) if text.isdigit() else 0


@loss_rule(
    "compute.attention_unfused",
    kinds.ATTENTION,
    learn="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
def attention_unfused(seen: ProfiledLoss) -> Iterator[Claim]:
    products, calls = seen.detail("products_ns"), seen.detail("softmax_calls")
    yield seen.claim(
        title=f"Attention is written out: what stands between its two products takes {seen.cost_ms:.1f} ms per "
        f"step, {calls:.0f} times{seen.at}",
        ceiling_ns=seen.cost_ns + products,
        evidence=(
            seen.ms("kernels between the two products", seen.loss.ns_per_step),
            seen.ms("the products themselves", products),
            seen.figure("softmaxes per step", round(calls, 1), "calls"),
            *seen.parts(),
        ),
        fix="Call torch.nn.functional.scaled_dot_product_attention, which fuses all of it (in Hugging Face models "
        "attn_implementation='sdpa')",
        caveat="The fused kernels return no attention weights, and not every mask or head size has one. What the "
        "products gain by it is not in the cost, only in the ceiling.",
        falsified_by="With scaled_dot_product_attention the mean step does not get shorter",
    )


@loss_rule(
    "compute.layout_conversions",
    kinds.LAYOUT,
    learn="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
)
def layout_conversions(seen: ProfiledLoss) -> Iterator[Claim]:
    first, convolutions = seen.detail("first_ns"), seen.detail("convolutions")
    evidence = (
        seen.ms("conversions between layouts, nothing beside them", seen.loss.ns_per_step),
        seen.ms("conversions at the first convolution of a step", first),
        seen.figure("conversions per step", round(seen.loss.calls_per_step, 1), "kernels"),
        seen.figure("convolutions per step", round(convolutions, 1), "calls"),
        *seen.parts(),
    )
    if convolutions > 1 and first >= LAYOUT.at_input * seen.detail("conversions_ns"):
        yield seen.claim(
            title="The input arrives in another memory layout than the model's, and the first convolution converts "
            f"it in every step: {seen.cost_ms:.1f} ms{seen.at}",
            evidence=evidence,
            fix="Make batches in the model's layout: batch.to(device, memory_format=torch.channels_last), or in "
            "the DataLoader's collate_fn, where workers do it",
            caveat="The copy then happens elsewhere: it costs nothing only where workers make it, or the copy to "
            "the device with it.",
            falsified_by="With batches made in channels_last the mean step does not get shorter",
        )
    else:
        yield seen.claim(
            title=f"Convolutions convert their memory layout: {seen.loss.calls_per_step:.0f} conversions take "
            f"{seen.cost_ms:.1f} ms per step{seen.at}",
            evidence=evidence,
            fix="Keep images and the model in the layout the kernels want: "
            "model.to(memory_format=torch.channels_last) and the same for the input batch",
            caveat="An operator without a channels_last version converts back; look for conversions that remain.",
            falsified_by="With model and input in channels_last as many conversions run, or the mean step does not "
            "get shorter",
            tries=(Try("memory_format", "channels_last"),),
        )


@loss_rule(
    "compute.unfused_pointwise",
    kinds.POINTWISE,
    learn="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
)
def unfused_pointwise(seen: ProfiledLoss) -> Iterator[Claim]:
    yield seen.claim(
        title=f"{seen.detail('runs_kernels'):.0f} pointwise kernels per step run one behind the other: "
        f"{seen.cost_ms:.1f} ms per step more than fused ones would{seen.at}",
        ceiling_ns=max(seen.cost_ns, seen.detail("runs_ns")),
        evidence=(
            seen.ms("kernels that fusing would leave out", seen.loss.ns_per_step),
            seen.ms("all kernels of these runs", seen.detail("runs_ns")),
            seen.figure("kernels that fusing would leave out, per step", round(seen.loss.calls_per_step, 1), "kernels"),
            *seen.parts(),
        ),
        fix="Compile the model or the part of it at this line with torch.compile, which fuses such runs",
        caveat="The cost counts all of a run but its longest kernel, as if one kernel took the place of all; some "
        "may not depend on one another and stay apart. The first steps compile.",
        falsified_by="Under torch.compile the mean step does not get shorter",
        tries=(Try("compile", "true"),),
        most="medium",
    )


@rule("compute.cpu_only", STEPS, GPU_THERE, learn="https://docs.pytorch.org/docs/stable/notes/cuda.html")
def cpu_only(analysis: Analysis) -> Iterator[Claim]:
    train, found = STEPS.of(analysis), GPU_THERE.of(analysis)
    if accelerator(analysis) is not None:
        return
    # what feeds the step no GPU does
    wait = sum(part.ms for part in train.partition if part.category in ("data_wait", "before_forward"))
    count = f"{len(found)} GPUs" if len(found) > 1 else "a GPU"
    yield Claim(
        title=f"The model trains on the CPU, although the machine has {count} ({found[0]})",
        steps=train,
        cost_ms=max(0.0, train.mean_ms - wait),
        levels=("low",),
        floor=0.0,
        evidence=(
            Evidence("GPUs of this machine", len(found), "GPUs", "manifest.json, hardware"),
            Evidence("devices trained on", "cpu", "", "rank.json"),
            ms("mean steady step", train.mean_ms, steps_source(train)),
        ),
        fix="Move model and batches to the device: device = 'cuda' if torch.cuda.is_available() else 'cpu'; where it "
        "says False, the installed torch is a CPU build or does not fit the driver (stepscope doctor tells)",
        caveat="The cost is all of the step that is not data wait, which a GPU would do in less time, not in none. A "
        "very small model can be as fast on the CPU.",
        falsified_by="With model and batches on the GPU the mean step does not get shorter",
    )


@loss_rule(
    "compute.sizes_off_tiles",
    kinds.TILES,
    SHAPES,
    learn="https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
)
def sizes_off_tiles(seen: ProfiledLoss) -> Iterator[Claim]:
    unaligned = seen.detail("unaligned_ns")
    yield seen.claim(
        title=f"Matrix products do not fit the tiles of tensor cores: {seen.cost_ms:.1f} ms per step only fill "
        f"them up, longest for {next(iter(seen.loss.parts), '?')}{seen.at}",
        ceiling_ns=seen.cost_ns + unaligned * (1 - 1 / TENSOR_CORES.gain),
        evidence=(
            seen.ms("products that only fill up tiles, nothing beside them", seen.loss.ns_per_step),
            seen.ms("all time of these kernels", seen.detail("kernels_ns")),
            seen.ms("of it in kernels for rows that begin at any element", unaligned),
            seen.ms("all products in 16 bits", seen.detail("products_ns")),
            seen.figure("such products per step", round(seen.loss.calls_per_step, 1), "kernels"),
            *seen.parts("lost at {}"),
        ),
        fix="Choose sizes (hidden and head sizes, vocabulary, tokens per batch) that are multiples of 8, better of "
        "64 or 128: pad an embedding or output layer by rows that are never used, and sequences to few lengths",
        caveat="A lower bound: kernels for rows that begin at any element are slower besides, and the last wave of "
        "tiles seldom fills the device. Sizes are rows x columns x depth of a product; which of them can change is "
        "for you to say.",
        falsified_by="With these sizes padded to the next multiple of 64 the products take as long as before",
        most="medium",
    )


@loss_rule(
    "compute.serial_linalg",
    kinds.LINALG,
    learn="https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cuda.preferred_linalg_library",
)
def serial_linalg(seen: ProfiledLoss) -> Iterator[Claim]:
    launches, matrices = seen.detail("launches"), seen.detail("matrices")
    rows = seen.detail("matrix_rows") / matrices if matrices else 0.0
    sizes = f" for {matrices:.0f} matrices with {rows:.0f} rows" if matrices else ""
    known = (("matrices per step", matrices, "matrices"), ("rows of a matrix", rows, "rows"))
    evidence = (
        seen.ms("linear algebra with nothing beside it", seen.loss.ns_per_step),
        seen.ms("of it the device idles", seen.detail("idle_ns")),
        seen.figure("calls per step", round(seen.loss.calls_per_step, 2), "calls"),
        seen.figure("launches in them per step", round(launches, 1), "launches"),
        *seen.parts(),
        *(seen.figure(metric, round(value, 1), unit) for metric, value, unit in known if matrices),
    )
    yield seen.claim(
        title=f"{seen.top or 'linear algebra'} on the GPU is serial: {seen.cost_ms:.1f} ms per step and "
        f"{launches:.0f} launches{sizes}, and the device mostly waits{seen.at}",
        evidence=evidence,
        fix=f"Do it on the CPU in one batch{seen.at} (x.cpu(), the decomposition, and back), or on the device with "
        "batched products: for small matrices written out (Gram-Schmidt, Cholesky of the Gram matrix for QR), or "
        "torch.backends.cuda.preferred_linalg_library('magma') or 'cusolver', whichever is not in use",
        caveat="The cost is all time of these calls in which nothing else runs; what takes their place takes time "
        "too, and on the CPU a copy each way. Other algorithms have other rounding errors: Cholesky of the Gram "
        "matrix squares the condition number. Large single matrices belong on the GPU.",
        falsified_by="With the same decomposition done on the CPU, copies included, the mean step does not get "
        f"shorter{_alone(seen.top)}",
        tries=(Try("cuda.linalg_library", "magma"), Try("cuda.linalg_library", "cusolver")),
        most="medium",
    )


def _alone(operator: str) -> str:
    """How to time the operator on both devices, as the end of a sentence."""
    name = operator.removeprefix("aten::")
    return f"; what it takes on each alone: stepscope replay RUN --op {name}" if name.isidentifier() else ""
