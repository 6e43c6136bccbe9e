"""The host waits for the device, so that the device runs dry; and calls that get or give back device memory."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.model import Analysis, Evidence, Finding
from stepscope.model.device_losses import ALLOCATOR, SYNC, DeviceLosses, Loss

SYNC_RULE = "sync.host_waits"
ALLOCATOR_RULE = "memory.allocator_in_steps"
LEARN_SYNC = (
    "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization"
)
LEARN_ALLOCATOR = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)

# What to write instead, by the operator that waits.
_READS = ("aten::item", "aten::_local_scalar_dense")
_BRANCHES = ("aten::is_nonzero", "aten::equal", "aten::allclose")
_SIZES = ("aten::nonzero", "aten::masked_select", "aten::unique", "aten::_unique2", "aten::unique_consecutive")
_COPIES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::cpu")


def host_waits(analysis: Analysis) -> list[Finding]:
    """One finding when waits of the host leave the device idle for more than the floor."""
    return [_host_waits(analysis, *one) for one in basis.seen(analysis, SYNC)]


def _host_waits(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    top = next(iter(loss.parts), "a synchronising call")
    words = Words(
        title=f"The host waits for the device, which then idles {cost / 1e6:.1f} ms per step: "
        f"{basis.clipped(top)}{basis.first_at(loss)}",
        fix=_fix(top, basis.first_at(loss)),
        caveat="Counted is the time in which the device idles under a wait, and behind it as far as the host would "
        "have been ahead without it; waits while the device works cost nothing. Where the value decides what runs "
        "next, the wait has to stay.",
        falsified_by="With these calls left out, the mean step does not get shorter",
        learn=LEARN_SYNC,
    )
    evidence = (
        ms("device idle because the host waited", loss.ns_per_step - loss.details.get("copied_ns", 0.0), source),
        ms("copies to the host that nothing hid", loss.details.get("copied_ns", 0.0), source),
        ms("all time of these waits, the device busy or not", loss.details.get("waited_ns", 0.0), source),
        Evidence("waits with idle device per step", round(loss.calls_per_step, 2), "calls", source),
        *basis.parts_evidence(loss, source, "idle time by {}"),
    )
    return basis.finding(analysis, losses, Claim(SYNC_RULE, "sync", loss, cost, cost, words, evidence))


def _fix(top: str, at: str) -> str:
    if top in _READS:
        return (
            f"Read the value every N steps only{at}: add it up in a tensor on the device (detach it first) and call "
            ".item() on the sum"
        )
    if top in _BRANCHES:
        return f"Keep the condition on the device{at}: torch.where or a factor of 0 or 1 in place of a Python branch"
    if top in _SIZES:
        return f"Keep sizes independent of the data{at}: torch.where or a mask multiplied in, in place of an index"
    if top in _COPIES:
        return (
            f"Copy to the host into pinned memory with non_blocking=True{at}, record an event, and read the result a "
            "step later"
        )
    return f"Take {basis.clipped(top)}{at} out of the step, or do it every N steps only"


def allocator_in_steps(analysis: Analysis) -> list[Finding]:
    """One finding when steady steps get or give back device memory and the device idles meanwhile."""
    return [_allocator_in_steps(analysis, *one) for one in basis.seen(analysis, ALLOCATOR) if one[0].has_steps]


def _allocator_in_steps(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    calls = " and ".join(basis.top_parts(loss, 2)) or "calls of the allocator"
    words = Words(
        title=f"{calls} inside the steps leave the device idle for {cost / 1e6:.1f} ms per step: the caching allocator "
        f"does not find a block{basis.first_at(loss)}",
        fix=_allocator_fix(losses, loss),
        caveat="The first steps of a process always get memory this way: later ones should not.",
        falsified_by="With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True as many such calls run inside the steps, "
        "or the mean step does not get shorter",
        learn=LEARN_ALLOCATOR,
    )
    evidence = (
        ms("device idle in calls of the allocator", loss.ns_per_step, source),
        Evidence("such calls per step", round(loss.calls_per_step, 2), "calls", source),
        *basis.parts_evidence(loss, source, "idle time in {}"),
    )
    return basis.finding(analysis, losses, Claim(ALLOCATOR_RULE, "memory", loss, cost, cost, words, evidence))


def _allocator_fix(losses: DeviceLosses, loss: Loss) -> str:
    sizes = [gpu.memory_bytes for gpu in losses.gpus if gpu.memory_bytes]
    room = f" of its {min(sizes) / 2**30:.0f} GiB" if sizes else ""
    freed = any("free" in name.lower() for name in loss.parts)
    retried = " Freeing inside steps means it gave blocks back to fit a new one: it is at its limit" if freed else ""
    return (
        f"Leave the allocator more room{room}: a smaller peak, no torch.cuda.empty_cache() in the loop, inputs of few "
        f"different sizes (pad to buckets), and PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.{retried}"
    )
