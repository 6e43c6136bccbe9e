"""What devices lost in profiled steps, as the rules on devices see it.

A ceiling is from `gains`: what the steps save when they are played again without the loss, but at least its cost. A
loss is ns of the mean profiled step. In a recorded run its share is carried over to the steady step outside of
windows, which the profiler does not slow down. What one step alone lost, as the first of a recording often does, is no
loss per step: then the median counts.

Rules here are those of a device that waits for the host to launch: gap by gap before short kernels, or for a long piece
of host work. Gaps before launches are told by one rule alone: of a batch too small for the device, of compiled
functions, or of many short kernels; those of an optimizer that updates in many kernels and of gradients set to zero by
rules of their own. And those of host and device that hold each other up: waits of the host, and copies from the host,
on and between devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.diagnose.in_script import of_loader
from stepscope.diagnose.rule import (
    ADVICE,
    ON_DEVICE,
    REPORT_FLOOR,
    Claim,
    Known,
    Need,
    Rule,
    Thresholds,
    advice,
    always,
    at,
    at_place,
    clip_share,
    distinct,
    ms,
    rule,
    traced_confidence,
    traces_source,
    train_steps,
)
from stepscope.model import Analysis, Evidence, Place, Try
from stepscope.model import device_losses as kinds
from stepscope.model.device_losses import DeviceLosses, Loss, LossLine

_FUNCTION = re.compile(r"(?:.*/)?([^/]{1,200})\((\d{1,9})\): (.{1,200})")
_NAME_SHOWN = 60  # characters of a kernel


class DEVICE(Thresholds):
    """When a loss of the devices in profiled steps counts. The limits of a gap stand in `analyze/device_losses`."""

    recurring: float = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
    steps_for_median: int = 3  # of fewer steps the median says nothing else than the mean
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    lines_shown: int = 3


DEVICE_WORK = Need("a profiler trace with device work", lambda a: a.device_losses, traced=always)
TRACED = (ON_DEVICE, DEVICE_WORK)


class ProfiledLoss(Struct, frozen=True):
    """A loss of one kind in the profiled steps of one run, and what a step loses to it as a rule."""

    analysis: Analysis
    losses: DeviceLosses
    loss: Loss
    cost_ns: float
    use_median: bool  # few steps make the mean

    @property
    def cost_ms(self) -> float:
        return self.cost_ns / 1e6

    @property
    def source(self) -> str:
        return traces_source(self.losses.traces)

    @property
    def where(self) -> tuple[Place, ...]:
        lines = [
            replace(line.place, share=min(1.0, line.ns_per_step / self.loss.ns_per_step))
            for line in self.loss.lines[: DEVICE.lines_shown]
            if line.ns_per_step > 0
        ]
        return distinct([*lines, self.loss.held_at] if self.loss.held_at is not None else lines)

    @property
    def at(self) -> str:
        return at(*self.where)

    def names(self, count: int) -> list[str]:
        return [clipped(name) for name in list(self.loss.parts)[:count]]

    @property
    def top(self) -> str:
        return "".join(self.names(1))

    def detail(self, name: str) -> float:
        return self.loss.details.get(name, 0.0)

    def ms(self, metric: str, ns: float | None) -> Known:
        return ms(metric, None if ns is None else ns / 1e6, self.source)

    def figure(self, metric: str, value: object, unit: str) -> Known:
        return Evidence(metric, value, unit, self.source)

    def parts(self, text: str = "{} per step") -> Iterable[Known]:
        for name, ns in list(self.loss.parts.items())[:3]:
            if ns > 0:
                yield self.ms(text.format(clipped(name)), ns)

    def claim(
        self,
        *,
        title: str,
        evidence: Iterable[Known],
        caveat: str,
        cost_ns: float | None = None,
        ceiling_ns: float | None = None,
        most: str = "high",
        what_if: str | None = None,
        **said: Any,
    ) -> Claim:
        """The claim on it, with what else a claim says. `most` bounds the confidence.

        `ceiling_ns` is by subtraction. What it is above the cost is more than the loss itself and comes on top of what
        a replay without the loss saves, unless `what_if` names a replay of all of it.
        """
        analysis, losses, where = self.analysis, self.losses, self.where
        cost_ns = self.cost_ns if cost_ns is None else cost_ns
        ceiling_ns = cost_ns if ceiling_ns is None else ceiling_ns
        share, most_share = clip_share(cost_ns, losses.step_ns), clip_share(ceiling_ns, losses.step_ns)
        step_ms = profiled_step_ms(analysis, losses.step_ns)
        gain = replayed(analysis, losses.run, what_if or self.loss.kind, use_median=self.use_median)
        if gain is None:
            replay_caveat, ceiling = BY_SUBTRACTION if ceiling_ns > 0 else "", max(share, most_share)
        else:
            # never below the cost: of work a replay tells less where the host, slowed by the profiler, was late as well
            beyond = 0.0 if what_if is not None else clip_share(ceiling_ns - cost_ns, losses.step_ns)
            replay_caveat = gain.caveat(share)
            ceiling = max(min(1.0, share + beyond), gain.at_most(losses.step_ns / 1e6 / step_ms, beyond))
        one_step = "" if losses.has_steps else "The trace names no step: its whole length counts as one. "
        steps = f"{losses.steps} step{'s' * (losses.steps != 1)}" if losses.has_steps else "whole length"
        several = len(analysis.device_losses) > 1
        return Claim(
            title=title + (f" of {losses.run}" if several and losses.run else ""),
            cost_ms=share * step_ms,
            step_ms=step_ms,
            ceiling_ms=ceiling * step_ms,
            where=where,
            key=Place(losses.run, None, None) if several else where[0] if where else None,
            ranks=losses.ranks,
            levels=(traced_confidence(losses.steps if losses.has_steps else 0, DEVICE.steps_for_high), most),
            evidence=(
                ms("mean profiled step", losses.step_ns / 1e6, f"{self.source}, {steps}"),
                *evidence,
                *(gain.evidence if gain is not None else ()),
            ),
            caveat=f"{one_step}{caveat} {replay_caveat}".strip(),
            **said,
        )


def profiled_losses(analysis: Analysis, kind: str) -> Iterator[ProfiledLoss]:
    """Of each run the loss of a kind, where what a step loses to it is worth a finding."""
    for losses in analysis.device_losses:
        loss = losses.of(kind)
        if loss is None:
            continue
        use_median = losses.steps >= DEVICE.steps_for_median and loss.median_ns < DEVICE.recurring * loss.ns_per_step
        cost_ns = loss.median_ns if use_median else loss.ns_per_step
        if cost_ns > 0 and cost_ns >= REPORT_FLOOR * losses.step_ns:
            yield ProfiledLoss(analysis, losses, loss, cost_ns, use_median)


def loss_rule(
    name: str, kind: str, *needs: Need[Any], learn: str
) -> Callable[[Callable[[ProfiledLoss], Iterator[Claim]]], Rule]:
    return lambda judge: rule(name, *TRACED, *needs, learn=learn)(
        lambda analysis: [claim for seen in profiled_losses(analysis, kind) for claim in judge(seen)]
    )


def profiled_step_ms(analysis: Analysis, step_ns: float) -> float:
    """The step a share of profiled steps is of: of a recorded run the steady one, of third-party traces their own."""
    train = train_steps(analysis)
    return train.mean_ms if train is not None and analysis.windows else step_ns / 1e6


def clipped(name: str) -> str:
    """A name short enough for a line; of a Python function with the end of its file."""
    match = _FUNCTION.fullmatch(name)
    if match is not None:
        name = f"{match[3]} ({match[1]}:{match[2]})"
    return name if len(name) <= _NAME_SHOWN else f"{name[: _NAME_SHOWN - 1]}…"


class LAUNCH(Thresholds):
    """When the device waits for launches. Kernels count as short when the host takes longer to launch one."""

    gaps: float = 20  # launches per step that the device waited for; fewer are no pattern; chosen, untuned
    filling: float = 0.5  # of the kernels' time with a block for every multiprocessor: below it the device has room
    mostly: float = 0.5  # of an optimizer's launches: the way it updates most of its parameters


BATCH = Need(
    "the batch by shapes of layers' inputs, and the blocks of kernels",
    lambda a: any(one.batch_size is not None and one.filling_share is not None for one in a.device_losses),
)
LEARN_IDLE = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
SLOWED = "The profiler slows the host, most of all with Python stacks, and not the device: the real gaps are shorter."
_CUDA_GRAPH = (Try("compile.mode", "reduce-overhead"),)


class _Gaps(Struct, frozen=True):
    """A device that waits for most of its launches, in words."""

    mean_us: str
    counted: str  # `772 times for 82 µs, while half of its 694 kernels take under 5.8 µs`
    longest: str
    evidence: tuple[Known, ...]


def _gaps(seen: ProfiledLoss) -> _Gaps | None:
    kernel_ns, kernels, calls = seen.losses.median_kernel_ns, seen.losses.kernels_per_step, seen.loss.calls_per_step
    if kernel_ns is None or calls < LAUNCH.gaps or kernel_ns >= seen.loss.ns_per_step / calls:
        return None
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
    return _Gaps(f"{gap_us:.0f} µs", counted, f", longest for {seen.top}" if seen.top else "", evidence)


def _has_room(losses: kinds.DeviceLosses) -> bool:
    share = losses.filling_share
    return losses.batch_size is not None and share is not None and share < LAUNCH.filling


@loss_rule(
    "launch.short_kernels", kinds.LAUNCH, learn="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
)
def short_kernels(seen: ProfiledLoss) -> Iterator[Claim]:
    gaps = _gaps(seen)
    if gaps is None or _has_room(seen.losses):
        return
    yield seen.claim(
        title=f"The device waits for launches, {seen.cost_ms:.1f} ms per step{gaps.longest}: {gaps.counted}{seen.at}",
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


@loss_rule("compute.small_batch", kinds.LAUNCH, BATCH, learn=LEARN_IDLE)
def small_batch(seen: ProfiledLoss) -> Iterator[Claim]:
    gaps = _gaps(seen)
    if gaps is None or not _has_room(seen.losses):
        return
    size = seen.analysis.loader.batch_size if seen.analysis.loader is not None else None
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


@loss_rule(
    "launch.compiled_kernels", kinds.COMPILED, learn="https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
)
def compiled_kernels(seen: ProfiledLoss) -> Iterator[Claim]:
    gaps = _gaps(seen)
    if gaps is None:
        return
    kernels, made = seen.detail("compiled_kernels"), seen.detail("generated_kernels")
    how = "none of which a compiler made" if not made else f"{made:.0f} of them made by a compiler"
    evidence = (
        *gaps.evidence[:2],
        seen.figure("kernels launched in compiled functions", round(kernels, 1), "kernels"),
        seen.figure("of them made by a compiler", round(made, 1), "kernels"),
        *gaps.evidence[2:],
        seen.ms("of it before launches of collectives", max(0.0, seen.detail("collectives_ns")) or None),
    )
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

    Where stacks of steady steps were sampled, `host.python_on_critical_path` tells what of it is not in operators.
    """
    for seen in profiled_losses(analysis, kinds.HOST if analysis.python is None else kinds.OPERATORS):
        yield _device_idle(seen)


def _device_idle(seen: ProfiledLoss) -> Claim:
    return seen.claim(
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


@loss_rule(
    "launch.unfused_optimizer", kinds.OPTIMIZER, learn="https://docs.pytorch.org/docs/stable/optim.html#algorithms"
)
def unfused_optimizer(seen: ProfiledLoss) -> Iterator[Claim]:
    idle_ns, launches = seen.detail("idle_ns"), seen.detail("launches")
    # idle time that stays: one call for all parameters takes as long as one of these calls
    cost_ns = max(0.0, seen.cost_ns - idle_ns / max(1.0, seen.loss.details.get("operator_calls", 1.0)))
    grouped = seen.detail("foreach_launches") >= LAUNCH.mostly * launches
    if not (grouped or launches >= LAUNCH.gaps):
        return
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


@loss_rule(
    "launch.zeroing_gradients",
    kinds.ZERO_GRAD,
    learn="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
)
def zeroing_gradients(seen: ProfiledLoss) -> Iterator[Claim]:
    launches = seen.detail("launches")
    yield seen.claim(
        title=f"Setting gradients to zero takes {launches:.0f} launches and {seen.cost_ms:.1f} ms per step{seen.at}",
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


LEARN_PINNED = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"


@loss_rule(
    "sync.host_waits",
    kinds.SYNC,
    learn="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
)
def host_waits(seen: ProfiledLoss) -> Iterator[Claim]:
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
        fix=advice("sync", call, other).replace("{}", seen.at),
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
    return cost_ns if cost_ns >= REPORT_FLOOR * seen.losses.step_ns else 0.0


@rule("transfer.pinning_off", CUDA, DEVICE_WORK, PINNING, learn=LEARN_PINNED)
def pinning_off(analysis: Analysis) -> Iterator[Claim]:
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
                *(seen.ms(one.evidence, seen.detail(one.detail)) for one in ADVICE.copies if one.detail in _PAGEABLE),
                seen.figure("copies from pageable memory", round(seen.detail("pageable_copies"), 2), "copies"),
                *_rate_evidence(seen),
            ),
            fix="Have the loader pin its batches: "
            + of_loader(loader.site, analysis.settings, loader.via, pin_memory=True)
            + f", and copy with .to(device, non_blocking=True){seen.at}",
            caveat="Pinned memory cannot be swapped out, and a thread of the process copies every batch once more. "
            "What the script itself makes on the host stays pageable.",
            falsified_by="With pin_memory=True the copies still come from pageable memory, or the mean step does not "
            "get shorter",
            tries=_PIN,
        )


@loss_rule("transfer.host_to_device", kinds.COPY_IN, learn=LEARN_PINNED)
def host_to_device(seen: ProfiledLoss) -> Iterator[Claim]:
    """Copies from the host, or pinning memory for them, cost more than the floor; by what makes most of them wait.

    What `pinning_off` tells is left out.
    """
    told_ns = _unpinned_ns(seen)
    cost_ns = seen.cost_ns - told_ns
    left = [one for one in ADVICE.copies if not told_ns or one.detail not in _PAGEABLE]
    kind = max(left, key=lambda one: seen.detail(one.detail))
    rate, held = _rate(seen), seen.loss.held_at
    yield seen.claim(
        title=kind.title.format(f"{cost_ns / 1e6:.1f} ms per step{f', at {rate:.1f} GB/s' if rate else ''}{seen.at}"),
        cost_ns=cost_ns,
        evidence=(
            seen.ms("copies from the host that nothing hid", seen.detail("exposed_ns")),
            seen.ms("device idle while the host waited for copies", seen.detail("idle_ns")),
            seen.figure("copies from the host per step", round(seen.loss.calls_per_step, 2), "copies"),
            seen.figure("of them from pageable memory", round(seen.detail("pageable_copies"), 2), "copies"),
            seen.figure("of them with the host waiting", round(seen.detail("blocking_copies"), 2), "copies"),
            *(seen.ms(one.evidence, seen.detail(one.detail)) for one in ADVICE.copies if seen.detail(one.detail) > 0),
            *_rate_evidence(seen),
        ),
        fix=kind.fix.format(seen.at)
        + (f"; let the device wait for them no sooner than it uses them: it does{at_place(held)}" if held else ""),
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


def _rate_evidence(seen: ProfiledLoss) -> Iterator[Known]:
    rate = _rate(seen)
    if rate is not None:
        yield seen.figure("copied per step", round(seen.detail("copied_bytes") / 2**20, 2), "MiB")
        yield seen.figure("rate of these copies", round(rate, 2), "GB/s")


_NEW = re.compile(r"aten::(zeros|ones|full|empty|eye|arange|linspace|rand|normal|bernoulli|multinomial)")
_DRAWS = re.compile(r"aten::(rand|normal|bernoulli|multinomial)")


def _at_copies(lines: Iterable[LossLine]) -> tuple[LossLine, ...]:
    """Where of the maker the function alone is known, and the copy has a line in it, that line holds both."""
    found: list[LossLine] = []
    for line in sorted(lines, key=lambda one: not one.exact):
        function = (line.place.file, line.place.function)
        same = [one for one in found if one.exact and (one.place.file, one.place.function) == function]
        if line.exact or len(same) != 1:
            found.append(line)
        else:
            found[found.index(same[0])] = replace(same[0], ns_per_step=same[0].ns_per_step + line.ns_per_step)
    return tuple(sorted(found, key=lambda one: -one.ns_per_step))


def made_for_copies(analysis: Analysis) -> Iterator[ProfiledLoss]:
    """Operators of the host that make what is then copied to the device, which idles meanwhile."""
    for seen in profiled_losses(analysis, kinds.MADE):
        yield replace(seen, loss=replace(seen.loss, lines=_at_copies(seen.loss.lines)))


@rule("transfer.made_on_host", *TRACED, learn=LEARN_IDLE)
def made_on_host(analysis: Analysis) -> Iterator[Claim]:
    return map(_made_on_host, made_for_copies(analysis))


def _made_on_host(seen: ProfiledLoss) -> Claim:
    copies_ns, maker = seen.detail("lost_to_copies_ns"), seen.top
    device = CUDA.find(seen.analysis) or "the training's"
    ahead = (
        "make them ahead of the step, in a DataLoader's workers or a thread, in pinned memory, and copy with "
        "non_blocking=True"
    )
    return seen.claim(
        title=f"Tensors are made on the host in the step and then copied: the device waits {seen.cost_ms:.1f} ms per "
        f"step for {maker}{seen.at}",
        evidence=(
            seen.ms("device idle while the host makes the tensors", seen.loss.ns_per_step - copies_ns),
            seen.ms("lost to the copies behind it", copies_ns),
            seen.figure("copies of what was made per step", round(seen.detail("copies"), 2), "copies"),
            *seen.parts("lost to {}"),
            *_rate_evidence(seen),
        ),
        fix=f"Make them on the device{seen.at}: device={device} where the tensor is created; or {ahead}"
        if any(map(_NEW.match, seen.loss.parts))
        else f"Do this work on the device{seen.at}: copy first, then compute; or {ahead}",
        caveat="The device's random numbers are others than the host's with the same seed."
        if any(map(_DRAWS.match, seen.loss.parts))
        else "What is made on the device takes its memory.",
        falsified_by="With tensors made once before training, the mean step does not get shorter",
    )


@loss_rule(
    "transfer.device_to_device",
    kinds.DEVICE_COPY,
    learn="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
def device_to_device(seen: ProfiledLoss) -> Iterator[Claim]:
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
        caveat="Some copies are needed: a kernel may want its input in order, and a result must not change its source.",
        falsified_by="Without these copies the mean step does not get shorter",
    )
