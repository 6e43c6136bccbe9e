"""The device waits for the host to launch: gap by gap before short kernels, or for a long piece of host work.

Gaps before launches are told by one rule alone: of a batch too small for the device, of compiled functions, or of many
short kernels. Those of an optimizer and of zeroing gradients are in `optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.thresholds import LAUNCH as LIMITS
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.device_losses import COMPILED, HOST, LAUNCH, DeviceLosses, Loss

LAUNCH_RULE = "launch.short_kernels"
COMPILED_RULE = "launch.compiled_kernels"
BATCH_RULE = "compute.small_batch"
HOST_RULE = "host.device_idle"
LEARN_LAUNCH = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
LEARN_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
LEARN_IDLE = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
SLOWED = "The profiler slows the host, most of all with Python stacks, and not the device: the real gaps are shorter."
_REPLAY = (Try("compile.mode", "reduce-overhead"),)


def short_kernels(analysis: Analysis) -> list[Finding]:
    """One finding when gaps before launches add up, and kernels are shorter than the host takes to launch them."""
    return [_short_kernels(analysis, *one) for one in _starved(analysis, LAUNCH) if not _has_room(one[0])]


def small_batch(analysis: Analysis) -> list[Finding]:
    """The same where the batch is known and most kernels leave multiprocessors empty."""
    return [_small_batch(analysis, *one) for one in _starved(analysis, LAUNCH) if _has_room(one[0])]


def compiled_kernels(analysis: Analysis) -> list[Finding]:
    """The same inside compiled functions."""
    return [_compiled_kernels(analysis, *one) for one in _starved(analysis, COMPILED)]


def _starved(analysis: Analysis, kind: str) -> Iterator[tuple[DeviceLosses, Loss, float]]:
    for losses, loss, cost in basis.seen(analysis, kind):
        kernel_ns = losses.median_kernel_ns
        if kernel_ns is not None and kernel_ns < _gap_ns(loss) and loss.calls_per_step >= LIMITS.gaps:
            yield losses, loss, cost


def _gap_ns(loss: Loss) -> float:
    return loss.ns_per_step / loss.calls_per_step


def _has_room(losses: DeviceLosses) -> bool:
    share = losses.filling_share
    return losses.batch_size is not None and share is not None and share < LIMITS.filling


def _count(losses: DeviceLosses, loss: Loss) -> str:
    """`772 times for 82 µs, while half of its 694 kernels take under 5.8 µs`."""
    kernel_ns = losses.median_kernel_ns or 0.0
    return (
        f"{loss.calls_per_step:.0f} times for {_gap_ns(loss) / 1e3:.0f} µs, while half of its "
        f"{losses.kernels_per_step:.0f} kernels take under {kernel_ns / 1e3:.1f} µs"
    )


def _longest(loss: Loss) -> str:
    top = basis.top_parts(loss, 1)
    return f", longest for {top[0]}" if top else ""


def _evidence(losses: DeviceLosses, loss: Loss) -> list[Evidence]:
    source = basis.trace_source(losses)
    kernel_ns = losses.median_kernel_ns or 0.0
    return [
        ms("device idle before launches, queue empty", loss.ns_per_step, source),
        Evidence("launches the device waited for, per step", round(loss.calls_per_step, 1), "launches", source),
        Evidence("mean wait before each", round(_gap_ns(loss) / 1e3, 1), "us", source),
        Evidence("median kernel", round(kernel_ns / 1e3, 1), "us", source),
        Evidence("kernels per step", round(losses.kernels_per_step, 1), "kernels", source),
        *basis.parts_evidence(loss, source, "idle time before launches of {}"),
    ]


def _short_kernels(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    words = Words(
        title=f"The device waits for launches, {cost / 1e6:.1f} ms per step{_longest(loss)}: {_count(losses, loss)}"
        f"{basis.first_at(loss)}",
        fix="Launch fewer, larger kernels: torch.compile (mode='reduce-overhead' replays a CUDA graph), fused modules, "
        "a larger batch",
        caveat=f"{SLOWED} CUDA graphs need fixed shapes and addresses; a larger batch makes a step longer, but does "
        "more in it.",
        falsified_by="Replayed as a CUDA graph (or compiled with mode='reduce-overhead'), the mean step does not get "
        "shorter",
        learn=LEARN_LAUNCH,
        tries=_REPLAY,
    )
    claim = Claim(LAUNCH_RULE, "launch", loss, cost, cost, words, tuple(_evidence(losses, loss)), most="medium")
    return basis.finding(analysis, losses, claim)


def _small_batch(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, room = basis.trace_source(losses), 1.0 - (losses.filling_share or 0.0)
    words = Words(
        title=f"A batch of {losses.batch_size} does not fill the device: it waits {cost / 1e6:.1f} ms per step for "
        f"launches, {_count(losses, loss)}{basis.first_at(loss)}",
        fix="Take a larger batch: the same kernels then do more for the same launches. Where the batch has to stay, "
        "launch fewer kernels: torch.compile(mode='reduce-overhead') replays a CUDA graph",
        caveat=f"{SLOWED} A step with a larger batch is no shorter, it does more; the learning rate may have to follow "
        "it, and memory bounds it.",
        falsified_by="With a batch twice as large a step takes twice as long",
        learn=LEARN_IDLE,
        tries=_REPLAY,
    )
    evidence = (
        Evidence("batch, the first dimension of most layers' inputs", losses.batch_size, "samples", source),
        Evidence("time in kernels that leave multiprocessors without a block", round(room, 3), "fraction", source),
        *_loaders_batch(analysis),
        *_evidence(losses, loss),
    )
    return basis.finding(analysis, losses, Claim(BATCH_RULE, "compute", loss, cost, cost, words, evidence, "medium"))


def _loaders_batch(analysis: Analysis) -> list[Evidence]:
    size = analysis.loader.batch_size if analysis.loader is not None else None
    return [] if size is None else [Evidence("batch_size of the DataLoader", size, "samples", "events.jsonl")]


def _compiled_kernels(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    kernels, made = loss.details.get("compiled_kernels", 0.0), loss.details.get("generated_kernels", 0.0)
    gap_ns = _gap_ns(loss)
    how = "none of which a compiler made" if not made else f"{made:.0f} of them made by a compiler"
    words = Words(
        title=f"Compiled functions launch their {kernels:.0f} kernels one by one, {how}: the device waits "
        f"{cost / 1e6:.1f} ms per step, {loss.calls_per_step:.0f} times for {gap_ns / 1e3:.0f} µs{_longest(loss)}"
        f"{basis.first_at(loss)}",
        fix=_compiled_fix(made),
        caveat=f"{SLOWED} CUDA graphs need fixed shapes and addresses, and what cannot be captured, as collectives of "
        "some backends, splits them.",
        falsified_by="With mode='reduce-overhead' the mean step does not get shorter",
        learn=LEARN_COMPILE,
        tries=_REPLAY,
    )
    evidence = _evidence(losses, loss)
    evidence.insert(2, Evidence("kernels launched in compiled functions", round(kernels, 1), "kernels", source))
    evidence.insert(3, Evidence("of them made by a compiler", round(made, 1), "kernels", source))
    if loss.details.get("collectives_ns", 0.0) > 0:
        evidence.append(ms("of it before launches of collectives", loss.details["collectives_ns"], source))
    claim = Claim(COMPILED_RULE, "launch", loss, cost, cost, words, tuple(evidence), most="medium")
    return basis.finding(analysis, losses, claim)


def _compiled_fix(made: float) -> str:
    if made:
        return "Compile with mode='reduce-overhead': it launches all kernels of a function at once, as a CUDA graph"
    return (
        "Compile with backend='inductor', which fuses kernels (the one in use runs PyTorch's own, operator by "
        "operator), and mode='reduce-overhead', which launches all of a function at once, as a CUDA graph"
    )


def device_idle(analysis: Analysis) -> list[Finding]:
    """One finding when the host works for long without launching anything, and the device idles.

    Where stacks of steady steps were sampled, `host.python_on_critical_path` names the lines of the same time.
    """
    if analysis.python is not None:
        return []
    return [_device_idle(analysis, *one) for one in basis.seen(analysis, HOST)]


def _device_idle(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    top = basis.top_parts(loss, 1)
    work = top[0] if top else "host work"
    words = Words(
        title=f"The device idles {cost / 1e6:.1f} ms per step while the host works without launching anything: {work}"
        f"{basis.first_at(loss)}",
        fix=f"Take the work{basis.first_at(loss)} off the training thread: into the DataLoader's workers, onto the "
        "device, once before training, or every N steps only",
        caveat=SLOWED,
        falsified_by="With this work left out, the mean step does not get shorter",
        learn=LEARN_IDLE,
    )
    evidence = (
        ms("device idle in long gaps", loss.ns_per_step, source),
        Evidence("long gaps per step", round(loss.calls_per_step, 2), "gaps", source),
        *basis.parts_evidence(loss, source, "idle time while the host ran {}"),
    )
    return basis.finding(analysis, losses, Claim(HOST_RULE, "host", loss, cost, cost, words, evidence, most="medium"))
