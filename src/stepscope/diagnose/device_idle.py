"""The device runs dry: it waits for launches, for the host that waits or works, for copies, or for memory.

Gaps before launches are told by one rule alone: of a batch too small for the device, of compiled functions, or of many
short kernels. Launches of an optimizer and of zeroing gradients, synchronising calls, calls that get or give back
device memory, and copies from the host, on a device and between devices have rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.thresholds import DEVICE
from stepscope.diagnose.thresholds import LAUNCH as LIMITS
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.device_losses import (
    ALLOCATOR,
    COMPILED,
    COPY_IN,
    DEVICE_COPY,
    HOST,
    LAUNCH,
    OPTIMIZER,
    SYNC,
    ZERO_GRAD,
    DeviceLosses,
    Loss,
)

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


TO_DEVICE_RULE = "transfer.host_to_device"
ON_DEVICE_RULE = "transfer.device_to_device"
LEARN_TRANSFERS = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
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
        learn=LEARN_TRANSFERS,
        tries=way.tries,
    )
    evidence = _transfer_evidence(loss, basis.trace_source(losses))
    return basis.finding(analysis, losses, Claim(TO_DEVICE_RULE, "transfer", loss, cost, cost, words, evidence))


def _rate(loss: Loss) -> float | None:
    """GB/s of the copies while they run; None where sizes are not recorded."""
    size, time = loss.details.get("copied_bytes", 0.0), loss.details.get("copied_ns", 0.0)
    return size / time if size and time else None


def _transfer_evidence(loss: Loss, source: str) -> tuple[Evidence, ...]:
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
    claim = Claim(ON_DEVICE_RULE, "transfer", loss, cost, cost, words, tuple(evidence))
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
