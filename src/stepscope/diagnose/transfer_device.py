"""Copies that hold a device up: from the host, by what makes each of them wait, and on and between devices."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.device_losses import COPY_IN, DEVICE_COPY, DeviceLosses, Loss

RULE = "transfer.host_to_device"
DEVICE_RULE = "transfer.device_to_device"
LEARN = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
LEARN_COPIES = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_PIN = (Try("loader.pin_memory", "true"),)
_SOURCE = (
    "non_blocking=True from pinned memory returns before the copy is done: do not change the source until then, and do "
    "not use it towards the host without waiting for an event. Pinned memory cannot be swapped out."
)


class _Way(Struct, frozen=True):
    """How copies were made: the detail that holds their time, and what to say. `{}`: ms per step, and the line."""

    detail: str
    title: str
    fix: str
    tries: tuple[Try, ...] = ()


_WAYS = (
    _Way(
        "pageable_ns",
        "Copies from pageable memory hold the device up for {}",
        "pin_memory=True in the DataLoader and .to(device, non_blocking=True){}",
        _PIN,
    ),
    _Way(
        "unpinned_async_ns",
        "non_blocking=True has no effect on copies from pageable memory, which hold the device up for {}",
        "non_blocking=True needs pinned memory{}: pin_memory=True in the DataLoader",
        _PIN,
    ),
    _Way(
        "pinned_blocking_ns",
        "Copies from pinned memory block the host and hold the device up for {}",
        "The memory is pinned but the host waits for the copy: .to(device, non_blocking=True){}",
    ),
    _Way(
        "pinned_async_ns",
        "Nothing hides copies from the host: they hold the device up for {}",
        "Copy the next batch while the device works on this one{}: on a stream of its own, or one step ahead; and copy "
        "less, for example bytes in place of floats",
    ),
    _Way(
        "untold_ns",
        "Copies from the host hold the device up for {}",
        "pin_memory=True in the DataLoader and .to(device, non_blocking=True){}: the trace does not tell whether the "
        "memory is pinned",
        _PIN,
    ),
    _Way(
        "pinning_ns",
        "Pinning memory on the training thread holds the device up for {}",
        "Leave pinning to the DataLoader (pin_memory=True does it on a thread of its own), or copy without pinning{}: "
        "a plain .to(device) is faster than pin_memory() and a copy in turn",
        _PIN,
    ),
)


def host_to_device(analysis: Analysis) -> list[Finding]:
    """One finding when copies from the host, or pinning memory for them, cost more than the floor."""
    return [_host_to_device(analysis, *one) for one in basis.seen(analysis, COPY_IN)]


def _host_to_device(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    at = basis.first_at(loss)
    way = max(_WAYS, key=lambda one: loss.details.get(one.detail, 0.0))
    rate = _rate(loss)
    words = Words(
        title=way.title.format(f"{cost / 1e6:.1f} ms per step{f', at {rate:.1f} GB/s' if rate else ''}{at}"),
        fix=way.fix.format(at),
        caveat=_SOURCE,
        falsified_by="With the same batch kept on the device instead of copied, the mean step does not get shorter",
        learn=LEARN,
        tries=way.tries,
    )
    evidence = _evidence(loss, basis.trace_source(losses))
    return basis.finding(analysis, losses, Claim(RULE, "transfer", loss, cost, cost, words, evidence))


def _rate(loss: Loss) -> float | None:
    """GB/s of the copies while they run; None where sizes are not recorded."""
    size, time = loss.details.get("copied_bytes", 0.0), loss.details.get("copied_ns", 0.0)
    return size / time if size and time else None


def _evidence(loss: Loss, source: str) -> tuple[Evidence, ...]:
    details = loss.details
    found = [
        ms("copies from the host that nothing hid", details.get("exposed_ns", 0.0), source),
        ms("device idle while the host waited for copies", details.get("idle_ns", 0.0), source),
        Evidence("copies from the host per step", round(loss.calls_per_step, 2), "copies", source),
        Evidence("of them from pageable memory", round(details.get("pageable_copies", 0.0), 2), "copies", source),
        Evidence("of them with the host waiting", round(details.get("blocking_copies", 0.0), 2), "copies", source),
    ]
    for detail, text in (
        ("pageable_ns", "lost to copies from pageable memory"),
        ("unpinned_async_ns", "lost to copies from pageable memory with non_blocking=True"),
        ("pinned_blocking_ns", "lost to copies from pinned memory that block"),
        ("pinned_async_ns", "lost to copies from pinned memory that nothing hides"),
        ("untold_ns", "lost to copies from memory of unknown kind"),
        ("pinning_ns", "lost to pinning memory"),
    ):
        if details.get(detail, 0.0) > 0:
            found.append(ms(text, details[detail], source))
    rate = _rate(loss)
    if rate is not None:
        found.append(Evidence("copied per step", round(details["copied_bytes"] / 2**20, 2), "MiB", source))
        found.append(Evidence("rate of these copies", round(rate, 2), "GB/s", source))
    return tuple(found)


def device_to_device(analysis: Analysis) -> list[Finding]:
    """One finding when copies on or between devices, with nothing beside them, cost more than the floor."""
    return [_device_to_device(analysis, *one) for one in basis.seen(analysis, DEVICE_COPY)]


def _device_to_device(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, at = basis.trace_source(losses), basis.first_at(loss)
    between = loss.details.get("between_ns", 0.0) * 2 >= loss.ns_per_step
    top = basis.top_parts(loss, 1)
    of = f", most of it for {top[0]}" if top else ""
    words = Words(
        title=f"Copies {'between devices' if between else 'within the device'} take {cost / 1e6:.1f} ms per step in "
        f"which nothing else runs{of}{at}",
        fix=_between_fix(at) if between else _within_fix(at),
        caveat="Some copies are needed: a kernel may want its input in order, and a result must not change its source.",
        falsified_by="Without these copies the mean step does not get shorter",
        learn=LEARN_COPIES,
    )
    rate = _rate(loss)
    evidence = [
        ms("copies with nothing beside them", loss.ns_per_step, source),
        ms("of it between devices", loss.details.get("between_ns", 0.0), source),
        Evidence("copies per step", round(loss.calls_per_step, 1), "copies", source),
        *basis.parts_evidence(loss, source, "copied for {}"),
    ]
    if rate is not None:
        evidence.append(Evidence("copied per step", round(loss.details["copied_bytes"] / 2**20, 2), "MiB", source))
        evidence.append(Evidence("rate of these copies", round(rate, 2), "GB/s", source))
    claim = Claim(DEVICE_RULE, "transfer", loss, cost, cost, words, tuple(evidence))
    return basis.finding(analysis, losses, claim)


def _between_fix(at: str) -> str:
    return (
        f"Keep what belongs together on one device{at}; where a model is split over devices, split the batch too and "
        "let copies of one part run beside the work on another"
    )


def _within_fix(at: str) -> str:
    return (
        f"Leave out what copies whole tensors{at}: .clone() and .contiguous() without need, torch.cat of tensors that "
        "could be written into one buffer, reading a buffer that could be used in place"
    )
