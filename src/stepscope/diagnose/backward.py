"""What the backward pass does beyond gradients that are needed: forward work again, and whole tensors of zeros."""

from __future__ import annotations

import math

from msgspec.structs import replace

from stepscope.diagnose import pass_basis as basis
from stepscope.diagnose.common import bare, clip_share
from stepscope.diagnose.pass_basis import Claim, Words
from stepscope.diagnose.thresholds import PASSES, RECOMPUTE
from stepscope.model import Analysis, Evidence, Finding, Place
from stepscope.model.device_losses import PassFacts, Recompute, WideGradients

RECOMPUTE_RULE = "compute.recompute"
GRADIENTS_RULE = "memory.short_lived_gradients"
LEARN_CHECKPOINT = "https://pytorch.org/docs/stable/checkpoint.html"
LEARN_UNBIND = "https://pytorch.org/docs/stable/generated/torch.unbind.html"
MIB = 1 << 20


def recompute(analysis: Analysis) -> list[Finding]:
    """One finding per run that computes much of its forward pass twice although its memory is not full."""
    return [
        _recompute(analysis, run, again)
        for run in basis.runs(analysis)
        if (again := run.recompute) is not None
        and basis.worth(run, again.ms_per_step)
        and (again.memory_share is None or again.memory_share < RECOMPUTE.full)
    ]


def _recompute(analysis: Analysis, run: PassFacts, again: Recompute) -> Finding:
    where = basis.places(again.lines, again.ms_per_step)
    share = clip_share(again.ms_per_step, run.step_ms)
    source = basis.source(run)
    evidence = [
        Evidence("mean step", round(run.step_ms, 3), "ms", source),
        basis.ms("forward operators again in the backward pass, per step", again.ms_per_step, again.source),
        Evidence("such operators per step", round(again.operators_per_step, 1), "operators", source),
        Evidence("times per step that something is computed again", round(again.checkpoints_per_step, 1), "", source),
    ]
    if again.memory_share is not None:
        evidence.append(Evidence("peak of the device's memory", round(again.memory_share, 3), "fraction", source))
    words = Words(
        title=f"The backward pass computes forward work again, {share:.0%} of the step{basis.at(where)}: activation "
        "checkpointing",
        fix="Where memory allows, keep the activations: checkpoint fewer blocks, or only what is large and quick to "
        "compute (torch.utils.checkpoint.create_selective_checkpoint_contexts)",
        caveat="Kept activations take memory from the forward pass on: it is what checkpointing was paid for. "
        + ("Try with the largest batch." if again.memory_share is not None else "How much is free was not recorded."),
        falsified_by="Without the checkpoints the mean step does not get shorter, or memory does not suffice",
        learn=LEARN_CHECKPOINT,
    )
    claim = Claim(
        RECOMPUTE_RULE,
        "compute",
        again.ms_per_step,
        again.ms_per_step * RECOMPUTE.most,
        where,
        tuple(evidence),
        words,
        () if again.memory_share is not None else ("medium",),
    )
    return basis.finding(analysis, run, claim)


def short_lived_gradients(analysis: Analysis) -> list[Finding]:
    """One finding per place whose small parts of a tensor each get a gradient of the whole tensor's size."""
    found = []
    for run in basis.runs(analysis):
        of_place: dict[object, list[WideGradients]] = {}
        for one in run.wide_gradients:
            of_place.setdefault(one.place or (one.node, one.shape), []).append(one)
        for parts in of_place.values():
            if basis.worth(run, sum(one.ms_per_step for one in parts)):
                found.append(_gradients(analysis, run, parts))
    return found


def _loop_ms(analysis: Analysis, place: Place | None) -> float:
    """What the loop around a place costs: its gradients are a part of that, however each was estimated."""
    around = [
        loop.ms_per_step + (loop.backward_ms_per_step or 0.0)
        for loop in analysis.loops or ()
        if place is not None
        and place.line is not None
        and loop.place.file == place.file
        and (loop.place.line == place.line or (loop.loop_line or place.line) < place.line <= (loop.loop_end or 0))
    ]
    return max(around, default=math.inf)


def _gradients(analysis: Analysis, run: PassFacts, parts: list[WideGradients]) -> Finding:
    top = max(parts, key=lambda one: one.ms_per_step)
    cost = min(sum(one.ms_per_step for one in parts), _loop_ms(analysis, top.place))
    where = (replace(top.place, share=1.0),) if top.place is not None else ()
    shape = "x".join(str(size) for size in top.shape)
    mib = top.bytes_per_call / MIB
    source = basis.source(run)
    operator = bare((top.forward or top.node.removesuffix("Backward0").lower()).replace("::", "."))
    evidence = [Evidence("mean step", round(run.step_ms, 3), "ms", source)]
    for one in parts[: PASSES.lines_shown]:
        size = f"{'x'.join(map(str, one.shape))} {one.dtype}"
        evidence += [
            basis.ms(f"{one.node} and the sums of its results, per step", one.ms_per_step, source),
            Evidence(f"{one.node} over {size}, per step", round(one.calls_per_step, 1), "calls", source),
            Evidence(
                f"zeros per call for {size}", round(one.bytes_per_call / MIB, 3), "MiB", f"{source}; recorded shapes"
            ),
            Evidence(
                "zeros per step",
                round(one.calls_per_step * one.bytes_per_call / MIB, 1),
                "MiB",
                f"calls x bytes; {source}",
            ),
        ]
        if one.dimension:
            evidence.append(Evidence("calls equal a dimension", one.dimension, "", f"{source}; recorded shapes"))
    words = Words(
        title=f"{top.node} makes {top.calls_per_step:.0f} gradients of {shape} per step for small parts of it, "
        f"{mib * top.calls_per_step:.0f} MiB in all{basis.at(where)}",
        fix=f"Take the parts by one operator: torch.unbind or torch.split in front of the loop in place of {operator} "
        "in it (their backward pass builds the gradient once), or compute on the whole tensor without a loop",
        caveat="The parts' gradients are then held together until all are there, which takes as much as one gradient "
        "of the whole tensor.",
        falsified_by=f"With the parts taken by one operator {top.node} still runs as often, or the mean step does not "
        "get shorter",
        learn=LEARN_UNBIND,
    )
    most = sum(one.at_most_ms_per_step for one in parts)
    claim = Claim(GRADIENTS_RULE, "memory", cost, most, where, tuple(evidence), words)
    return basis.finding(analysis, run, claim)
