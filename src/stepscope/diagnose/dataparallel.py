"""DataParallel: one process copies the model to all devices, splits the batch and gathers results, in every step."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.model import Analysis, Evidence, Finding
from stepscope.model.device_losses import DATA_PARALLEL, DeviceLosses, Loss

RULE = "communication.data_parallel"
LEARN = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-nn-ddp-instead"


def data_parallel(analysis: Analysis) -> list[Finding]:
    """One finding when what DataParallel does around the model costs more than the floor."""
    return [_data_parallel(analysis, *one) for one in basis.seen(analysis, DATA_PARALLEL)]


def runs(analysis: Analysis) -> frozenset[str]:
    """Runs of which `data_parallel` speaks: their collectives are its own."""
    return frozenset(losses.run for losses, _, _ in basis.seen(analysis, DATA_PARALLEL))


def _data_parallel(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    devices = loss.details.get("devices", 0.0)
    words = Words(
        title=f"DataParallel copies the model to {devices:.0f} devices and splits and gathers batches in every step: "
        f"{cost / 1e6:.1f} ms per step that nothing hides{basis.first_at(loss)}",
        fix="Wrap the model in DistributedDataParallel and start one process for each GPU (torchrun): each keeps its "
        "model, and only gradients are exchanged, during the backward pass",
        caveat="The cost leaves out that one Python process launches for all devices in turn, and that the first "
        "device computes the loss alone. Under DistributedDataParallel the batch size is that of one process.",
        falsified_by="With DistributedDataParallel on the same GPUs and the same total batch the mean step does not "
        "get shorter",
        learn=LEARN,
    )
    evidence = (
        ms("replicating, scattering and gathering with no kernel beside it", loss.ns_per_step, source),
        Evidence("devices", round(devices), "devices", source),
        *basis.parts_evidence(loss, source, "of it in {}"),
    )
    claim = Claim(RULE, "communication", loss, cost, cost, words, evidence)
    return basis.finding(analysis, losses, claim)
