"""The device waits for the host to launch: gap by gap before short kernels, or for a long piece of host work."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.thresholds import LAUNCH as LIMITS
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.views.device_losses import HOST, LAUNCH, DeviceLosses, Loss

LAUNCH_RULE = "launch.short_kernels"
HOST_RULE = "host.device_idle"
LEARN_LAUNCH = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
LEARN_OPTIMIZER = "https://docs.pytorch.org/docs/stable/optim.html#algorithms"
SLOWED = "The profiler slows the host, most of all with Python stacks, and not the device: the real gaps are shorter."


def short_kernels(analysis: Analysis) -> list[Finding]:
    """One finding when gaps before launches add up, and kernels are shorter than the host takes to launch them."""
    found = []
    for losses, loss, cost in basis.seen(analysis, LAUNCH):
        gap_ns, kernel_ns = loss.ns_per_step / loss.calls_per_step, losses.median_kernel_ns
        if kernel_ns is not None and kernel_ns < gap_ns and loss.calls_per_step >= LIMITS.gaps:
            found.append(_short_kernels(analysis, losses, loss, cost, kernel_ns))
    return found


def _short_kernels(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float, kernel_ns: float) -> Finding:
    gap_ns = loss.ns_per_step / loss.calls_per_step
    source = basis.trace_source(losses)
    words = Words(
        title=f"The device waits for launches, {cost / 1e6:.1f} ms per step: {loss.calls_per_step:.0f} times for "
        f"{gap_ns / 1e3:.0f} µs, while half of its {losses.kernels_per_step:.0f} kernels take under "
        f"{kernel_ns / 1e3:.1f} µs{basis.first_at(loss)}",
        fix=_fix(loss),
        caveat=f"{SLOWED} CUDA graphs need fixed shapes and addresses; a larger batch makes a step longer, but does "
        "more in it.",
        falsified_by="Replayed as a CUDA graph (or compiled with mode='reduce-overhead'), the mean step does not get "
        "shorter",
        learn=LEARN_OPTIMIZER if _optimizer(loss) else LEARN_LAUNCH,
        tries=(Try("compile.mode", "reduce-overhead"),),
    )
    evidence = [
        ms("device idle before launches, queue empty", loss.ns_per_step, source),
        Evidence("launches the device waited for, per step", round(loss.calls_per_step, 1), "launches", source),
        Evidence("mean wait before each", round(gap_ns / 1e3, 1), "us", source),
        Evidence("median kernel", round(kernel_ns / 1e3, 1), "us", source),
        Evidence("kernels per step", round(losses.kernels_per_step, 1), "kernels", source),
        *basis.parts_evidence(loss, source, "idle time before launches of {}"),
    ]
    for key, text in (("optimizer", "the optimizer's step"), ("zero_grad", "zero_grad")):
        if loss.details.get(f"{key}_ns", 0.0) >= LIMITS.part * loss.ns_per_step:
            evidence.append(ms(f"of it in {text}", loss.details[f"{key}_ns"], source))
    claim = Claim(LAUNCH_RULE, "launch", loss, cost, cost, words, tuple(evidence), most="medium")
    return basis.finding(analysis, losses, claim)


def _optimizer(loss: Loss) -> bool:
    return loss.details.get("optimizer_ns", 0.0) >= LIMITS.mostly * loss.ns_per_step


def _fix(loss: Loss) -> str:
    """The part that most of it lies in comes first."""
    found = []
    optimizer, zero = (loss.details.get(key, 0.0) for key in ("optimizer_ns", "zero_grad_ns"))
    if optimizer >= LIMITS.part * loss.ns_per_step:
        found.append(
            (optimizer, "use the optimizer's fused=True or foreach=True, which updates all parameters at once")
        )
    if zero >= LIMITS.part * loss.ns_per_step:
        found.append((zero, "call zero_grad(set_to_none=True), which launches nothing"))
    rest = loss.ns_per_step - optimizer - zero
    found.append(
        (
            rest,
            "launch fewer, larger kernels: torch.compile (mode='reduce-overhead' replays a CUDA graph), fused modules, "
            "a larger batch",
        )
    )
    texts = [text for _, text in sorted(found, key=lambda item: -item[0])]
    joined = "; ".join(texts)
    return joined[0].upper() + joined[1:]


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
    )
    evidence = (
        ms("device idle in long gaps", loss.ns_per_step, source),
        Evidence("long gaps per step", round(loss.calls_per_step, 2), "gaps", source),
        *basis.parts_evidence(loss, source, "idle time while the host ran {}"),
    )
    return basis.finding(analysis, losses, Claim(HOST_RULE, "host", loss, cost, cost, words, evidence, most="medium"))
