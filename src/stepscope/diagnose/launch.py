"""The device waits for the host to launch: gap by gap before short kernels, or for a long piece of host work.

Gaps before launches are told by one rule alone: of a batch too small for the device, of compiled functions, or of many
short kernels; those of an optimizer that updates in many kernels and of gradients set to zero by rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from stepscope.diagnose.device import DEVICE, TRACED, ProfiledLoss, profiled_losses
from stepscope.diagnose.rule import Claim, Need, Thresholds, rule
from stepscope.model import Analysis, Evidence, Try
from stepscope.model import device_losses as kinds


class Launch(Thresholds, frozen=True):
    """When the device waits for launches. Kernels count as short when the host takes longer to launch one."""

    gaps: float = 20  # launches per step that the device waited for; fewer are no pattern; chosen, untuned
    filling: float = 0.5  # of the kernels' time with a block for every multiprocessor: below it the device has room
    mostly: float = 0.5  # of an optimizer's launches: the way it updates most of its parameters


LAUNCH = Launch()

BATCH = Need(
    "the batch by shapes of layers' inputs, and the blocks of kernels",
    lambda a: any(one.batch_size is not None and one.filling_share is not None for one in a.device_losses),
)
LEARN_LAUNCH = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
LEARN_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
LEARN_IDLE = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
LEARN_OPTIMIZER = "https://docs.pytorch.org/docs/stable/optim.html#algorithms"
LEARN_ZERO = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"
SLOWED = "The profiler slows the host, most of all with Python stacks, and not the device: the real gaps are shorter."
_CUDA_GRAPH = (Try("compile.mode", "reduce-overhead"),)


class _Gaps(Struct, frozen=True):
    """A device that waits for most of its launches, in words."""

    mean_us: str
    counted: str  # `772 times for 82 µs, while half of its 694 kernels take under 5.8 µs`
    longest: str
    evidence: tuple[Evidence, ...]


def _gaps_before_launches(analysis: Analysis, kind: str) -> Iterator[tuple[ProfiledLoss, _Gaps]]:
    """Losses with many gaps, where kernels are shorter than the host takes to launch them."""
    for seen in profiled_losses(analysis, kind):
        kernel_ns, kernels, calls = seen.losses.median_kernel_ns, seen.losses.kernels_per_step, seen.loss.calls_per_step
        if kernel_ns is None or calls < LAUNCH.gaps or kernel_ns >= seen.loss.ns_per_step / calls:
            continue
        gap_us = seen.loss.ns_per_step / calls / 1e3
        evidence = (
            seen.ms("device idle before launches, queue empty", seen.loss.ns_per_step),
            seen.figure("launches the device waited for, per step", round(calls, 1), "launches"),
            seen.figure("mean wait before each", round(gap_us, 1), "us"),
            seen.figure("median kernel", round(kernel_ns / 1e3, 1), "us"),
            seen.figure("kernels per step", round(kernels, 1), "kernels"),
            *seen.parts("idle time before launches of {}"),
        )
        counted = (
            f"{calls:.0f} times for {gap_us:.0f} µs, while half of its {kernels:.0f} kernels take under "
            f"{kernel_ns / 1e3:.1f} µs"
        )
        yield seen, _Gaps(f"{gap_us:.0f} µs", counted, f", longest for {seen.top}" if seen.top else "", evidence)


def _has_room(losses: kinds.DeviceLosses) -> bool:
    share = losses.filling_share
    return losses.batch_size is not None and share is not None and share < LAUNCH.filling


@rule("launch.short_kernels", *TRACED, learn=LEARN_LAUNCH)
def short_kernels(analysis: Analysis) -> Iterator[Claim]:
    """Gaps before launches add up, and kernels are shorter than the host takes to launch them."""
    for seen, gaps in _gaps_before_launches(analysis, kinds.LAUNCH):
        if not _has_room(seen.losses):
            yield seen.claim(
                title=f"The device waits for launches, {seen.cost_ms:.1f} ms per step{gaps.longest}: {gaps.counted}"
                f"{seen.at}",
                evidence=gaps.evidence,
                fix="Launch fewer, larger kernels: torch.compile (mode='reduce-overhead' replays a CUDA graph), fused "
                "modules, a larger batch",
                caveat=f"{SLOWED} CUDA graphs need fixed shapes and addresses; a larger batch makes a step longer, but "
                "does more in it.",
                falsified_by="Replayed as a CUDA graph (or compiled with mode='reduce-overhead'), the mean step does "
                "not get shorter",
                tries=_CUDA_GRAPH,
                most="medium",
            )


@rule("compute.small_batch", *TRACED, BATCH, learn=LEARN_IDLE)
def small_batch(analysis: Analysis) -> Iterator[Claim]:
    """The same where the batch is known and most kernels leave multiprocessors empty."""
    size = analysis.loader.batch_size if analysis.loader is not None else None
    for seen, gaps in _gaps_before_launches(analysis, kinds.LAUNCH):
        if not _has_room(seen.losses):
            continue
        room, batch = 1.0 - (seen.losses.filling_share or 0.0), seen.losses.batch_size
        yield seen.claim(
            title=f"A batch of {batch} does not fill the device: it waits {seen.cost_ms:.1f} ms per step for launches, "
            f"{gaps.counted}{seen.at}",
            evidence=(
                seen.figure("batch, the first dimension of most layers' inputs", batch, "samples"),
                seen.figure("time in kernels that leave multiprocessors without a block", round(room, 3), "fraction"),
                *([] if size is None else [Evidence("batch_size of the DataLoader", size, "samples", "events.jsonl")]),
                *gaps.evidence,
            ),
            fix="Take a larger batch: the same kernels then do more for the same launches. Where the batch has to "
            "stay, launch fewer kernels: torch.compile(mode='reduce-overhead') replays a CUDA graph",
            caveat=f"{SLOWED} A step with a larger batch is no shorter, it does more; the learning rate may have to "
            "follow it, and memory bounds it.",
            falsified_by="With a batch twice as large a step takes twice as long",
            tries=_CUDA_GRAPH,
            most="medium",
        )


@rule("launch.compiled_kernels", *TRACED, learn=LEARN_COMPILE)
def compiled_kernels(analysis: Analysis) -> Iterator[Claim]:
    """The same inside compiled functions."""
    for seen, gaps in _gaps_before_launches(analysis, kinds.COMPILED):
        kernels, made = seen.detail("compiled_kernels"), seen.detail("generated_kernels")
        how = "none of which a compiler made" if not made else f"{made:.0f} of them made by a compiler"
        evidence = [
            *gaps.evidence[:2],
            seen.figure("kernels launched in compiled functions", round(kernels, 1), "kernels"),
            seen.figure("of them made by a compiler", round(made, 1), "kernels"),
            *gaps.evidence[2:],
        ]
        if seen.detail("collectives_ns") > 0:
            evidence.append(seen.ms("of it before launches of collectives", seen.detail("collectives_ns")))
        yield seen.claim(
            title=f"Compiled functions launch their {kernels:.0f} kernels one by one, {how}: the device waits "
            f"{seen.cost_ms:.1f} ms per step, {seen.loss.calls_per_step:.0f} times for {gaps.mean_us}{gaps.longest}"
            f"{seen.at}",
            evidence=evidence,
            fix="Compile with mode='reduce-overhead': it launches all kernels of a function at once, as a CUDA graph"
            if made
            else "Compile with backend='inductor', which fuses kernels (the one in use runs PyTorch's own, operator by "
            "operator), and mode='reduce-overhead', which launches all of a function at once, as a CUDA graph",
            caveat=f"{SLOWED} CUDA graphs need fixed shapes and addresses, and what cannot be captured, as collectives "
            "of some backends, splits them.",
            falsified_by="With mode='reduce-overhead' the mean step does not get shorter",
            tries=_CUDA_GRAPH,
            most="medium",
        )


@rule("host.device_idle", *TRACED, learn=LEARN_IDLE)
def device_idle(analysis: Analysis) -> Iterator[Claim]:
    """The host works for long without launching anything, and the device idles.

    Where stacks of steady steps were sampled, `host.python_on_critical_path` names the lines of the same time.
    """
    if analysis.python is not None:
        return
    for seen in profiled_losses(analysis, kinds.HOST):
        yield seen.claim(
            title=f"The device idles {seen.cost_ms:.1f} ms per step while the host works without launching anything: "
            f"{seen.top or 'host work'}{seen.at}",
            evidence=(
                seen.ms("device idle in long gaps", seen.loss.ns_per_step),
                seen.figure("long gaps per step", round(seen.loss.calls_per_step, 2), "gaps"),
                *seen.parts("idle time while the host ran {}"),
            ),
            fix=f"Take the work{seen.at} off the training thread: into the DataLoader's workers, onto the device, once "
            "before training, or every N steps only",
            caveat=SLOWED,
            falsified_by="With this work left out, the mean step does not get shorter",
            most="medium",
        )


@rule("launch.unfused_optimizer", *TRACED, learn=LEARN_OPTIMIZER)
def unfused_optimizer(analysis: Analysis) -> Iterator[Claim]:
    """An update in many kernels costs more than the floor over one in few."""
    for seen in profiled_losses(analysis, kinds.OPTIMIZER):
        idle_ns, launches = seen.detail("idle_ns"), seen.detail("launches")
        # idle time that stays: one call for all parameters takes as long as one of these calls
        cost_ns = max(0.0, seen.cost_ns - idle_ns / max(1.0, seen.loss.details.get("operator_calls", 1.0)))
        grouped = seen.detail("foreach_launches") >= LAUNCH.mostly * launches
        if cost_ns < DEVICE.floor * seen.losses.step_ns or not (grouped or launches >= LAUNCH.gaps):
            continue
        how = "operation by operation (foreach)" if grouped else "parameter by parameter"
        fusable = seen.detail("fusable_launches") >= LAUNCH.mostly * launches
        knob = "fused" if fusable else "foreach"
        yield seen.claim(
            title=f"The optimizer updates {how}, with {launches:.0f} kernels per step: {cost_ns / 1e6:.1f} ms per step "
            f"more than with {knob}=True{seen.at}",
            cost_ns=cost_ns,
            ceiling_ns=idle_ns + seen.detail("kernels_ns"),
            evidence=(
                seen.ms("device idle in the optimizer's step, queue empty", idle_ns),
                seen.ms("all kernels of the optimizer", seen.detail("kernels_ns")),
                seen.figure("launches of the optimizer per step", round(launches, 1), "launches"),
                seen.figure("of them for groups (foreach)", round(seen.detail("foreach_launches"), 1), "launches"),
                seen.figure("operators of the optimizer per step", round(seen.detail("operator_calls"), 1), "calls"),
                *seen.parts("lost at {}"),
            ),
            fix=f"Create the optimizer with {knob}=True, which updates all parameters "
            f"{'in a few kernels' if fusable else 'at once, operation by operation'}",
            caveat=f"{SLOWED} fused=True wants floating-point parameters on a device; foreach=True takes memory for "
            "another copy of the parameters. Results differ in the last digits.",
            falsified_by=f"With {knob}=True the mean step does not get shorter",
            tries=(Try(f"optimizer.{knob}", "true"),),
            most="medium",
        )


@rule("launch.zeroing_gradients", *TRACED, learn=LEARN_ZERO)
def zeroing_gradients(analysis: Analysis) -> Iterator[Claim]:
    """Setting gradients to zero costs more than the floor."""
    for seen in profiled_losses(analysis, kinds.ZERO_GRAD):
        launches = seen.detail("launches")
        yield seen.claim(
            title=f"Setting gradients to zero takes {launches:.0f} launches and {seen.cost_ms:.1f} ms per step"
            f"{seen.at}",
            evidence=(
                seen.ms("device idle while gradients are set to zero", seen.detail("idle_ns")),
                seen.ms("kernels and fills that set them to zero", seen.detail("kernels_ns")),
                seen.figure("launches for it per step", round(launches, 1), "launches"),
                *seen.parts("lost at {}"),
            ),
            fix="Call zero_grad(set_to_none=True), the default since PyTorch 2.0: it launches nothing, and the "
            "backward pass then writes gradients in place of adding to zeros",
            caveat=f"{SLOWED} Gradients are None until the next backward pass: code that reads or changes them in "
            "between has to know. Optimizers leave parameters with None out, where a gradient of zero still decays "
            "weights.",
            falsified_by="With set_to_none=True the mean step does not get shorter",
            tries=(Try("zero_grad.set_to_none", "true"),),
            most="medium",
        )
