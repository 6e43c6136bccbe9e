"""Copies from the host that the device does not hide, and what it idles because the host waits for them."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.views.device_losses import COPY_IN, DeviceLosses, Loss

RULE = "transfer.host_to_device"
LEARN = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"


def host_to_device(analysis: Analysis) -> list[Finding]:
    """One finding when copies from the host cost more than the floor."""
    return [_host_to_device(analysis, *one) for one in basis.seen(analysis, COPY_IN)]


def _host_to_device(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    pageable = loss.details.get("pageable_copies", 0.0)
    kind = "from pageable memory " if pageable else ""
    at = basis.first_at(loss)
    words = Words(
        title=f"Copies from the host {kind}hold the device up for {cost / 1e6:.1f} ms per step{at}",
        fix=_fix(loss, at),
        caveat="non_blocking=True from pinned memory returns before the copy is done: do not change the source until "
        "then, and do not use it towards the host without waiting for an event. Pinned memory cannot be swapped out.",
        falsified_by="With the same batch kept on the device instead of copied, the mean step does not get shorter",
        learn=LEARN,
        tries=(Try("loader.pin_memory", "true"),) if pageable else (),
    )
    return basis.finding(analysis, losses, Claim(RULE, "transfer", loss, cost, cost, words, _evidence(loss, source)))


def _fix(loss: Loss, at: str) -> str:
    if loss.details.get("pageable_copies", 0.0):
        return f"pin_memory=True in the DataLoader and .to(device, non_blocking=True){at}"
    if loss.details.get("blocking_copies", 0.0):
        return f"The memory is pinned but the host waits for the copy: .to(device, non_blocking=True){at}"
    return (
        f"Copy the next batch while the device works on this one{at}: on a stream of its own, or one step ahead; and "
        "copy less, for example bytes in place of floats"
    )


def _evidence(loss: Loss, source: str) -> tuple[Evidence, ...]:
    details = loss.details
    found = [
        ms("copies from the host that nothing hid", details.get("exposed_ns", 0.0), source),
        ms("device idle while the host waited for copies", details.get("idle_ns", 0.0), source),
        Evidence("copies from the host per step", round(loss.calls_per_step, 2), "copies", source),
        Evidence("of them from pageable memory", round(details.get("pageable_copies", 0.0), 2), "copies", source),
        Evidence("of them with the host waiting", round(details.get("blocking_copies", 0.0), 2), "copies", source),
    ]
    size, time = details.get("copied_bytes", 0.0), details.get("copied_ns", 0.0)
    if size and time:
        found.append(Evidence("copied per step", round(size / 2**20, 2), "MiB", source))
        found.append(Evidence("rate of these copies", round(size / time, 2), "GB/s", source))
    return tuple(found)
