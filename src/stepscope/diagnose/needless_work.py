"""Work that training does not need: validation, copies of the model, float64, forward work again, gradients of zeros.

Other rules see the Python around a call for validation or a copy; `told_places` names what is told here, so that no
time is told twice.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose import pass_basis as basis
from stepscope.diagnose.common import (
    bare,
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.machine import device_doubt
from stepscope.diagnose.pass_basis import Claim, Words
from stepscope.diagnose.thresholds import DOUBLES, PASSES, PIPELINE, RECOMPUTE
from stepscope.model import Analysis, Evidence, Finding, Place, StepFacts
from stepscope.model.device_losses import Doubles, ExtraCall, ModelCopy, PassFacts, Recompute, WideGradients
from stepscope.model.trace import GpuProperties

EVALUATION_RULE = "host.evaluation_in_step"
COPY_RULE = "host.model_copied_in_step"
LEARN_NO_GRAD = "https://pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation"
LEARN_AVERAGE = "https://pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema"

_FIXES = {
    "copy.deepcopy": "copy it every N steps or at the end of an epoch only; to keep the best weights, save them when "
    "the validation says so",
    "AveragedModel.update_parameters": "update the average every N steps (with the decay to the power of N), or pass "
    "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), which updates all parameters in a few calls",
}
_FIX = "read or load the state every N steps only, and update tensors in place by the torch._foreach operators"


def evaluation_in_step(analysis: Analysis) -> list[Finding]:
    """One finding per place that calls the trained model for a result which trains nothing."""
    return [_evaluation(analysis, run, call) for run, call in _reported_calls(analysis)]


def model_copied_in_step(analysis: Analysis) -> list[Finding]:
    """One finding per line that copies the model or its state in the steps.

    By samples of the steady steps where there are enough of them, else as profiled: a profiler slows Python most.
    """
    train = train_steps(analysis)
    sampled = _sampled_copies(analysis, train) if train is not None and _by_samples(analysis) else []
    seen = {_line(copy) for copy in sampled}
    found = [_traced_copy(analysis, run, copy) for run, copy in _traced_copies(analysis) if _line(copy) not in seen]
    return found + [_sampled_copy(analysis, train, copy) for copy in sampled if train is not None]


def _line(copy: ModelCopy) -> tuple[str, int | None]:
    return copy.place.file, copy.place.line


def told_places(analysis: Analysis) -> tuple[Place, ...]:
    """Lines whose time the rules here tell, for rules on the host to leave out; without a line the whole function."""
    found: dict[Place, None] = {}
    for _, call in _reported_calls(analysis):
        found[replace(call.place, share=None)] = None
        if call.around is not None:
            found[Place(call.around.file, None, call.around.function)] = None
    for finding in model_copied_in_step(analysis):
        found[replace(finding.where[0], share=None)] = None
    return tuple(found)


def _reported_calls(analysis: Analysis) -> list[tuple[PassFacts, ExtraCall]]:
    return [
        (run, call)
        for run in basis.runs(analysis)
        for call in run.extra_calls
        if call.steps_share >= PASSES.recurring and basis.worth(run, call.ms_per_step)
    ]


def _by_samples(analysis: Analysis) -> bool:
    """Samples tell host time, of steady steps; what devices hide of it only a trace can tell."""
    sampled = analysis.passes is not None and analysis.passes.copies is not None
    return sampled and not any(run.on_device and run.functions for run in basis.runs(analysis))


def _sampled_copies(analysis: Analysis, train: StepFacts) -> list[ModelCopy]:
    copies = analysis.passes.copies if analysis.passes is not None else None
    return [
        copy
        for copy in copies or ()
        if copy.ms_per_step >= PASSES.floor * train.mean_ms and copy.samples >= PASSES.samples
    ]


def _traced_copies(analysis: Analysis) -> list[tuple[PassFacts, ModelCopy]]:
    runs = basis.runs(analysis)
    return [(run, copy) for run in runs for copy in run.copies if basis.worth(run, copy.ms_per_step)]


def _evaluation(analysis: Analysis, run: PassFacts, call: ExtraCall) -> Finding:
    module = call.module.rsplit("_", 1)[0]
    share = clip_share(call.ms_per_step, run.step_ms)
    place = shown(call.place)
    recorded = call.nodes_per_step >= 1
    function = bare(call.around.function if call.around is not None else call.place.function)
    doubt = ("medium",) if not recorded or call.steps_share < PASSES.nearly_all else ()
    words = Words(
        title=f"{module} is called in the step for a result that trains nothing ({place}), {share:.0%} of the step"
        + (", and gradients are recorded for it" if recorded else ""),
        fix=(
            "Put the call under torch.no_grad() or torch.inference_mode(), and make it" if recorded else "Make the call"
        )
        + f" at {place} every N steps or after an epoch, not in every step",
        caveat="The result then comes less often. What looks the same and has to stay: a call whose result the next "
        "step needs without its gradient, as an action that is chosen or a target from the same network; "
        + ("torch.no_grad() helps there too." if recorded else "then only a smaller batch helps."),
        falsified_by=f"With {function} called every 50 steps the mean step does not get shorter",
        learn=LEARN_NO_GRAD,
    )
    source = basis.source(run)
    evidence = [
        Evidence("mean step", round(run.step_ms, 3), "ms", source),
        basis.ms(f"{module} at {place}, per step", call.ms_per_step, call.source),
        basis.ms("with the code around it that trains nothing", call.around_ms_per_step, call.source),
        Evidence("calls per step that no backward pass reads", round(call.calls_per_step, 2), "calls", source),
        Evidence("nodes recorded for a backward pass, per step", round(call.nodes_per_step, 1), "nodes", source),
        Evidence("profiled steps with such a call", round(call.steps_share, 3), "fraction", source),
    ]
    claim = Claim(
        rule=EVALUATION_RULE,
        category="host",
        cost_ms=call.ms_per_step,
        ceiling_ms=_ceiling_ms(analysis, run, call),
        where=(replace(call.place, share=1.0),),
        evidence=tuple(evidence),
        words=words,
        levels=doubt,
    )
    return basis.finding(analysis, run, claim)


def _ceiling_ms(analysis: Analysis, run: PassFacts, call: ExtraCall) -> float:
    """The step without it; of a recorded run on the CPU with what depends on the main thread."""
    if run.on_device or not analysis.windows:
        return call.at_most_ms_per_step
    return gains.without_main(analysis, call.at_most_ms_per_step, behind=PIPELINE.cold_tensors)


def _copy_words(copy: ModelCopy, share: float, doubt: str = "") -> Words:
    place = shown(copy.place)
    return Words(
        title=f"The model or its state is copied in the step: {copy.call} at {place} takes {share:.0%}",
        fix=f"At {place}: {_FIXES.get(copy.call, _FIX)}",
        caveat=f"A copy made less often is older; an average over fewer updates differs a little.{doubt}",
        falsified_by=f"With the line at {place} run every 50 steps the mean step does not get shorter",
        learn=LEARN_AVERAGE,
    )


def _traced_copy(analysis: Analysis, run: PassFacts, copy: ModelCopy) -> Finding:
    source = basis.source(run)
    evidence = (
        Evidence("mean step", round(run.step_ms, 3), "ms", source),
        basis.ms(f"{copy.call} at {shown(copy.place)}, per step", copy.ms_per_step, copy.source),
    )
    words = _copy_words(copy, clip_share(copy.ms_per_step, run.step_ms))
    where = (replace(copy.place, share=1.0),)
    recorded = bool(analysis.windows) and not run.on_device
    ceiling_ms = max(copy.ms_per_step, _copy_ceiling_ms(analysis, copy)) if recorded else copy.ms_per_step
    claim = Claim(COPY_RULE, "host", copy.ms_per_step, ceiling_ms, where, evidence, words)
    return basis.finding(analysis, run, claim)


def _copy_ceiling_ms(analysis: Analysis, copy: ModelCopy) -> float:
    return gains.without_main(analysis, copy.at_most_ms_per_step, behind=PIPELINE.cold_copies)


def _sampled_copy(analysis: Analysis, train: StepFacts, copy: ModelCopy) -> Finding:
    share = clip_share(copy.ms_per_step, train.mean_ms)
    doubt, doubted = device_doubt(analysis)
    words = _copy_words(copy, share, doubted)
    return Finding(
        id=finding_id(COPY_RULE, copy.place),
        rule=COPY_RULE,
        category="host",
        title=words.title,
        severity=severity(share),
        confidence=lowest([steps_confidence(train), sampled_confidence(copy.samples), *doubt]),
        cost_ms_per_step=min(copy.ms_per_step, train.mean_ms),
        share=share,
        gain_ceiling=max(share, clip_share(_copy_ceiling_ms(analysis, copy), train.mean_ms)),
        where=(replace(copy.place, share=1.0),),
        ranks=train.ranks,
        evidence=(
            Evidence("mean steady step", round(train.mean_ms, 3), "ms", steps_source(train)),
            basis.ms(f"main thread below {copy.call} at {shown(copy.place)}", copy.ms_per_step, copy.source),
        ),
        fix=words.fix,
        caveat=words.caveat,
        learn=words.learn,
        falsified_by=words.falsified_by,
    )


DOUBLE_RULE = "compute.double_precision"
LEARN_CPU = "https://pytorch.org/docs/stable/notes/numerical_accuracy.html"
LEARN_GPU = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"
_OTHER_MAKERS = ("AMD", "Radeon", "Instinct")  # their numbers have the form of a capability and mean something else


def double_precision(analysis: Analysis) -> list[Finding]:
    """One finding per run whose steps would surely be shorter in float32, by more than the floor."""
    found = []
    for run in basis.runs(analysis):
        doubles = run.doubles
        if doubles is not None and basis.worth(run, _cost(doubles)):
            found.append(_finding(analysis, run, doubles))
    return found


def _cost(doubles: Doubles) -> float:
    return doubles.conversion_ms_per_step + DOUBLES.saved * doubles.compute_ms_per_step


def _finding(analysis: Analysis, run: PassFacts, doubles: Doubles) -> Finding:
    cost = _cost(doubles)
    slow = run.on_device and any(slow_in_double(gpu) for gpu in run.gpus)
    most = DOUBLES.most_slow if slow else DOUBLES.most
    ceiling = doubles.conversion_ms_per_step + most * doubles.compute_ms_per_step
    where = basis.places(doubles.lines, cost)
    whole = clip_share(doubles.conversion_ms_per_step + doubles.compute_ms_per_step, run.step_ms)
    source = basis.source(run)
    names = ", ".join(list(doubles.parts)[:3])
    gpus = ", ".join(sorted({f"{gpu.name or 'GPU'} ({gpu.capability})" for gpu in run.gpus if gpu.capability}))
    evidence = [
        Evidence("mean step", round(run.step_ms, 3), "ms", source),
        basis.ms("operators on float64, per step", doubles.compute_ms_per_step, source),
        basis.ms("conversions from and to float64, per step", doubles.conversion_ms_per_step, source),
        Evidence("operators on float64 per step", round(doubles.operators_per_step, 1), "operators", source),
        Evidence("conversions per step", round(doubles.conversions_per_step, 1), "conversions", source),
        *(basis.ms(f"{name} on float64", value, source) for name, value in list(doubles.parts.items())[:3]),
    ]
    if gpus:
        evidence.append(Evidence("GPU (compute capability)", gpus, "", source))
    words = Words(
        title=f"Float64 takes {whole:.0%} of the step{basis.at(where)}; in float32 it would take half or less",
        fix=f"Keep these tensors in float32 ({names}): convert inputs once when they are loaded (NumPy makes float64), "
        "write dtype=torch.float32, and leave out .double() and torch.set_default_dtype(torch.float64)",
        caveat="Some methods need float64: sums of many small numbers, differences of nearly equal ones, "
        "ill-conditioned linear algebra. Compare losses over some hundred steps.",
        falsified_by="With these operators in float32 the mean step does not get shorter",
        learn=LEARN_GPU if run.on_device else LEARN_CPU,
    )
    claim = Claim(DOUBLE_RULE, "compute", cost, ceiling, where, tuple(evidence), words)
    return basis.finding(analysis, run, claim)


def slow_in_double(gpu: GpuProperties) -> bool:
    """Whether it is an NVIDIA GPU that does 32 or 64 operations in float32 for one in float64."""
    if gpu.capability is None or any(maker in (gpu.name or "") for maker in _OTHER_MAKERS):
        return False
    return gpu.capability not in DOUBLES.fast_capabilities


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
