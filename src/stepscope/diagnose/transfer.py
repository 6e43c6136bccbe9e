"""The host and the device hold each other up: waits of the host, and copies from the host, on and between devices."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from stepscope.diagnose.device import DEVICE, DEVICE_WORK, TRACED, ProfiledLoss, clipped, profiled_losses
from stepscope.diagnose.in_script import of_loader
from stepscope.diagnose.rule import Claim, Need, rule
from stepscope.model import Analysis, Evidence, Try
from stepscope.model import device_losses as kinds

LEARN_SYNC = (
    "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization"
)
LEARN_PINNED = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
LEARN_COPIES = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"

# What to write instead, by the operator that waits. `{}`: the line.
_READ = (
    "Read the value every N steps only{}: add it up in a tensor on the device (detach it first) and call .item() on "
    "the sum"
)
_BRANCH = "Keep the condition on the device{}: torch.where or a factor of 0 or 1 in place of a Python branch"
_SIZE = "Keep sizes independent of the data{}: torch.where or a mask multiplied in, in place of an index"
_COPY = (
    "Copy to the host into pinned memory with non_blocking=True{}, record an event, and read the result a step later"
)
_FIXES = {
    **dict.fromkeys(("aten::item", "aten::_local_scalar_dense"), _READ),
    **dict.fromkeys(("aten::is_nonzero", "aten::equal", "aten::allclose"), _BRANCH),
    **dict.fromkeys(
        ("aten::nonzero", "aten::masked_select", "aten::unique", "aten::_unique2", "aten::unique_consecutive"), _SIZE
    ),
    **dict.fromkeys(("aten::copy_", "aten::to", "aten::_to_copy", "aten::cpu"), _COPY),
}


@rule("sync.host_waits", *TRACED, learn=LEARN_SYNC)
def host_waits(analysis: Analysis) -> Iterator[Claim]:
    """Waits of the host leave the device idle for more than the floor."""
    for seen in profiled_losses(analysis, kinds.SYNC):
        call, copied_ns = next(iter(seen.loss.parts), "a synchronising call"), seen.detail("copied_ns")
        other = f"Take {clipped(call)}{{}} out of the step, or do it every N steps only"
        yield seen.claim(
            title=f"The host waits for the device, which then idles {seen.cost_ms:.1f} ms per step: {clipped(call)}"
            f"{seen.at}",
            evidence=(
                seen.ms("device idle because the host waited", seen.loss.ns_per_step - copied_ns),
                seen.ms("copies to the host that nothing hid", copied_ns),
                seen.ms("all time of these waits, the device busy or not", seen.detail("waited_ns")),
                seen.figure("waits with idle device per step", round(seen.loss.calls_per_step, 2), "calls"),
                *seen.parts("idle time by {}"),
            ),
            fix=_FIXES.get(call, other).replace("{}", seen.at),
            caveat="Counted is the time in which the device idles under a wait, and behind it as far as the host would "
            "have been ahead without it; waits while the device works cost nothing. Where the value decides what runs "
            "next, the wait has to stay.",
            falsified_by="With these calls left out, the mean step does not get shorter",
        )


_PIN = (Try("loader.pin_memory", "true"),)
_PAGEABLE = ("pageable_ns", "unpinned_async_ns")
CUDA = Need(
    "training on a CUDA device", lambda a: next((one for one in a.devices if one.startswith("cuda")), None), quiet=True
)
PINNING = Need("the construction of the DataLoader, which says whether it pins memory", lambda a: _pins(a) is not None)


class _KindOfCopy(Struct, frozen=True):
    """How copies were made: the detail that holds their time, and what to say. `{}`: ms per step, and the line."""

    detail: str
    evidence: str
    title: str
    fix: str
    tries: tuple[Try, ...] = ()


_KINDS_OF_COPY = (
    _KindOfCopy(
        "pageable_ns",
        "lost to copies from pageable memory",
        "Copies from pageable memory hold the device up for {}",
        "pin_memory=True in the DataLoader and .to(device, non_blocking=True){}",
        _PIN,
    ),
    _KindOfCopy(
        "unpinned_async_ns",
        "lost to copies from pageable memory with non_blocking=True",
        "non_blocking=True has no effect on copies from pageable memory, which hold the device up for {}",
        "non_blocking=True needs pinned memory{}: pin_memory=True in the DataLoader",
        _PIN,
    ),
    _KindOfCopy(
        "pinned_blocking_ns",
        "lost to copies from pinned memory that block",
        "Copies from pinned memory block the host and hold the device up for {}",
        "The memory is pinned but the host waits for the copy: .to(device, non_blocking=True){}",
    ),
    _KindOfCopy(
        "pinned_async_ns",
        "lost to copies from pinned memory that nothing hides",
        "Nothing hides copies from the host: they hold the device up for {}",
        "Copy the next batch while the device works on this one{}: on a stream of its own, or one step ahead; and copy "
        "less, for example bytes in place of floats",
    ),
    _KindOfCopy(
        "untold_ns",
        "lost to copies from memory of unknown kind",
        "Copies from the host hold the device up for {}",
        "pin_memory=True in the DataLoader and .to(device, non_blocking=True){}: the trace does not tell whether the "
        "memory is pinned",
        _PIN,
    ),
    _KindOfCopy(
        "pinning_ns",
        "lost to pinning memory",
        "Pinning memory on the training thread holds the device up for {}",
        "Leave pinning to the DataLoader (pin_memory=True does it on a thread of its own), or copy without pinning{}: "
        "a plain .to(device) is faster than pin_memory() and a copy in turn",
        _PIN,
    ),
)


def _pins(analysis: Analysis) -> bool | None:
    """Whether the DataLoader pins its batches, by default not; None where its construction was not seen."""
    loader = analysis.loader
    if loader is None or loader.site is None:
        return None
    return {"True": True, "False": False}.get(str(loader.arguments.get("pin_memory", False)))


def _unpinned_ns(seen: ProfiledLoss) -> float:
    """What of a loss by copies `pinning_off` tells: those from pageable memory, of a loader that does not pin."""
    if _pins(seen.analysis) is not False or not CUDA.present(seen.analysis):
        return 0.0
    part = sum(seen.detail(name) for name in _PAGEABLE) / seen.loss.ns_per_step
    cost_ns = min(1.0, part) * seen.cost_ns
    return cost_ns if cost_ns >= DEVICE.floor * seen.losses.step_ns else 0.0


@rule("transfer.pinning_off", CUDA, DEVICE_WORK, PINNING, learn=LEARN_PINNED)
def pinning_off(analysis: Analysis) -> Iterator[Claim]:
    """The DataLoader does not pin its batches, and copying them to a CUDA device costs more than the floor."""
    loader = analysis.loader
    for seen in profiled_losses(analysis, kinds.COPY_IN):
        cost_ns = _unpinned_ns(seen)
        if not cost_ns or loader is None:
            continue
        yield seen.claim(
            title=f"pin_memory is off while {CUDA.of(analysis)} is fed: copies from pageable memory hold it up for "
            f"{cost_ns / 1e6:.1f} ms per step{seen.at}",
            cost_ns=cost_ns,
            evidence=(
                Evidence("pin_memory", "False", "", "events.jsonl, the loader's own setting or PyTorch's default"),
                *(seen.ms(one.evidence, seen.detail(one.detail)) for one in _KINDS_OF_COPY if one.detail in _PAGEABLE),
                seen.figure("copies from pageable memory", round(seen.detail("pageable_copies"), 2), "copies"),
                *_rate_evidence(seen),
            ),
            fix=f"Have the loader pin its batches: {of_loader(loader.site, analysis.settings, pin_memory=True)}, and "
            f"copy with .to(device, non_blocking=True){seen.at}",
            caveat="Pinned memory cannot be swapped out, and a thread of the process copies every batch once more. "
            "What the script itself makes on the host stays pageable.",
            falsified_by="With pin_memory=True the copies still come from pageable memory, or the mean step does not "
            "get shorter",
            tries=_PIN,
        )


@rule("transfer.host_to_device", *TRACED, learn=LEARN_PINNED)
def host_to_device(analysis: Analysis) -> Iterator[Claim]:
    """Copies from the host, or pinning memory for them, cost more than the floor; by what makes most of them wait.

    What `pinning_off` tells is left out.
    """
    for seen in profiled_losses(analysis, kinds.COPY_IN):
        told_ns = _unpinned_ns(seen)
        cost_ns = seen.cost_ns - told_ns
        if cost_ns < DEVICE.floor * seen.losses.step_ns:
            continue
        left = [one for one in _KINDS_OF_COPY if not told_ns or one.detail not in _PAGEABLE]
        kind = max(left, key=lambda one: seen.detail(one.detail))
        rate = _rate(seen)
        yield seen.claim(
            title=kind.title.format(
                f"{cost_ns / 1e6:.1f} ms per step{f', at {rate:.1f} GB/s' if rate else ''}{seen.at}"
            ),
            cost_ns=cost_ns,
            evidence=(
                seen.ms("copies from the host that nothing hid", seen.detail("exposed_ns")),
                seen.ms("device idle while the host waited for copies", seen.detail("idle_ns")),
                seen.figure("copies from the host per step", round(seen.loss.calls_per_step, 2), "copies"),
                seen.figure("of them from pageable memory", round(seen.detail("pageable_copies"), 2), "copies"),
                seen.figure("of them with the host waiting", round(seen.detail("blocking_copies"), 2), "copies"),
                *(
                    seen.ms(one.evidence, seen.detail(one.detail))
                    for one in _KINDS_OF_COPY
                    if seen.detail(one.detail) > 0
                ),
                *_rate_evidence(seen),
            ),
            fix=kind.fix.format(seen.at),
            caveat="non_blocking=True from pinned memory returns before the copy is done: do not change the source "
            "until then, and do not use it towards the host without waiting for an event. Pinned memory cannot be "
            "swapped out.",
            falsified_by="With the same batch kept on the device instead of copied, the mean step does not get shorter",
            tries=kind.tries,
        )


def _rate(seen: ProfiledLoss) -> float | None:
    """GB/s of the copies while they run; None where sizes are not recorded."""
    size, time = seen.detail("copied_bytes"), seen.detail("copied_ns")
    return size / time if size and time else None


def _rate_evidence(seen: ProfiledLoss) -> Iterator[Evidence]:
    rate = _rate(seen)
    if rate is not None:
        yield seen.figure("copied per step", round(seen.detail("copied_bytes") / 2**20, 2), "MiB")
        yield seen.figure("rate of these copies", round(rate, 2), "GB/s")


@rule("transfer.device_to_device", *TRACED, learn=LEARN_COPIES)
def device_to_device(analysis: Analysis) -> Iterator[Claim]:
    """Copies on or between devices, with nothing beside them, cost more than the floor."""
    for seen in profiled_losses(analysis, kinds.DEVICE_COPY):
        between = seen.detail("between_ns") * 2 >= seen.loss.ns_per_step
        of = f", most of it for {seen.top}" if seen.top else ""
        yield seen.claim(
            title=f"Copies {'between devices' if between else 'within the device'} take {seen.cost_ms:.1f} ms per step "
            f"in which nothing else runs{of}{seen.at}",
            evidence=(
                seen.ms("copies with nothing beside them", seen.loss.ns_per_step),
                seen.ms("of it between devices", seen.detail("between_ns")),
                seen.figure("copies per step", round(seen.loss.calls_per_step, 1), "copies"),
                *seen.parts("copied for {}"),
                *_rate_evidence(seen),
            ),
            fix=f"Keep what belongs together on one device{seen.at}; where a model is split over devices, split the "
            "batch too and let copies of one part run beside the work on another"
            if between
            else f"Leave out what copies whole tensors{seen.at}: .clone() and .contiguous() without need, torch.cat of "
            "tensors that could be written into one buffer, reading a buffer that could be used in place",
            caveat="Some copies are needed: a kernel may want its input in order, and a result must not change its "
            "source.",
            falsified_by="Without these copies the mean step does not get shorter",
        )
