"""Optimizers that launch kernels for each parameter, or each operation; gradients that kernels set to zero."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.launch import SLOWED
from stepscope.diagnose.thresholds import DEVICE
from stepscope.diagnose.thresholds import LAUNCH as LIMITS
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.device_losses import OPTIMIZER, ZERO_GRAD, DeviceLosses, Loss

OPTIMIZER_RULE = "launch.unfused_optimizer"
ZERO_RULE = "launch.zeroing_gradients"
LEARN_OPTIMIZER = "https://docs.pytorch.org/docs/stable/optim.html#algorithms"
LEARN_ZERO = "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html"


def unfused_optimizer(analysis: Analysis) -> list[Finding]:
    """One finding when an update in many kernels costs more than the floor over one in few."""
    found = []
    for losses, loss, lost in basis.seen(analysis, OPTIMIZER):
        cost = max(0.0, lost - _kept_ns(loss))
        if cost >= DEVICE.floor * losses.step_ns and (_grouped(loss) or loss.details["launches"] >= LIMITS.gaps):
            found.append(_unfused_optimizer(analysis, losses, loss, cost))
    return found


def _kept_ns(loss: Loss) -> float:
    """Idle time that stays: one call for all parameters takes as long as one of these calls."""
    return loss.details.get("idle_ns", 0.0) / max(1.0, loss.details.get("operator_calls", 1.0))


def _grouped(loss: Loss) -> bool:
    return loss.details.get("foreach_launches", 0.0) >= LIMITS.mostly * loss.details.get("launches", 0.0)


def _unfused_optimizer(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, at = basis.trace_source(losses), basis.first_at(loss)
    launches, kernels_ns = loss.details["launches"], loss.details.get("kernels_ns", 0.0)
    grouped = _grouped(loss)
    fusable = loss.details.get("fusable_launches", 0.0) >= LIMITS.mostly * launches
    how = "operation by operation (foreach)" if grouped else "parameter by parameter"
    knob = "fused" if fusable else "foreach"
    words = Words(
        title=f"The optimizer updates {how}, with {launches:.0f} kernels per step: {cost / 1e6:.1f} ms per step more "
        f"than with {knob}=True{at}",
        fix=f"Create the optimizer with {knob}=True, which updates all parameters "
        f"{'in a few kernels' if fusable else 'at once, operation by operation'}",
        caveat=f"{SLOWED} fused=True wants floating-point parameters on a device; foreach=True takes memory for "
        "another copy of the parameters. Results differ in the last digits.",
        falsified_by=f"With {knob}=True the mean step does not get shorter",
        learn=LEARN_OPTIMIZER,
        tries=(Try(f"optimizer.{knob}", "true"),),
    )
    ceiling = loss.details.get("idle_ns", 0.0) + kernels_ns
    evidence = (
        ms("device idle in the optimizer's step, queue empty", loss.details.get("idle_ns", 0.0), source),
        ms("all kernels of the optimizer", kernels_ns, source),
        Evidence("launches of the optimizer per step", round(launches, 1), "launches", source),
        Evidence("of them for groups (foreach)", round(loss.details["foreach_launches"], 1), "launches", source),
        Evidence("operators of the optimizer per step", round(loss.details["operator_calls"], 1), "calls", source),
        *basis.parts_evidence(loss, source, "lost at {}"),
    )
    claim = Claim(OPTIMIZER_RULE, "launch", loss, cost, ceiling, words, evidence, most="medium")
    return basis.finding(analysis, losses, claim)


def zeroing_gradients(analysis: Analysis) -> list[Finding]:
    """One finding when setting gradients to zero costs more than the floor."""
    return [_zeroing_gradients(analysis, *one) for one in basis.seen(analysis, ZERO_GRAD)]


def _zeroing_gradients(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, at = basis.trace_source(losses), basis.first_at(loss)
    launches = loss.details.get("launches", 0.0)
    words = Words(
        title=f"Setting gradients to zero takes {launches:.0f} launches and {cost / 1e6:.1f} ms per step{at}",
        fix="Call zero_grad(set_to_none=True), the default since PyTorch 2.0: it launches nothing, and the backward "
        "pass then writes gradients in place of adding to zeros",
        caveat=f"{SLOWED} Gradients are None until the next backward pass: code that reads or changes them in between "
        "has to know. Optimizers leave parameters with None out, where a gradient of zero still decays weights.",
        falsified_by="With set_to_none=True the mean step does not get shorter",
        learn=LEARN_ZERO,
        tries=(Try("zero_grad.set_to_none", "true"),),
    )
    evidence = (
        ms("device idle while gradients are set to zero", loss.details.get("idle_ns", 0.0), source),
        ms("kernels and fills that set them to zero", loss.details.get("kernels_ns", 0.0), source),
        Evidence("launches for it per step", round(launches, 1), "launches", source),
        *basis.parts_evidence(loss, source, "lost at {}"),
    )
    return basis.finding(analysis, losses, Claim(ZERO_RULE, "launch", loss, cost, cost, words, evidence, most="medium"))
