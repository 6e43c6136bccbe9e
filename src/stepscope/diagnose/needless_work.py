"""Work that training does not need: validation, copies of the model, float64, forward work again, gradients of zeros.

Costs are ms of the mean step that the facts speak of. Other rules see the Python around a call for validation or a
copy; `told_places` names what is told here, so that no time is told twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import inf

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.gains import PIPELINE
from stepscope.diagnose.rule import (
    REPORT_FLOOR,
    STEPS,
    Claim,
    Need,
    Thresholds,
    accelerator,
    advice,
    always,
    at,
    bare,
    clip_share,
    device_doubt,
    distinct,
    figure,
    ms,
    rule,
    sampled_confidence,
    shown,
    spot,
    steps_source,
    traced_confidence,
    traces_source,
    train_steps,
)
from stepscope.model import Analysis, Evidence, Place, Site, Try
from stepscope.model.device_losses import GROWN, ExtraCall, ModelCopy, PassFacts, PassLine, WastedWork, WideGradients
from stepscope.model.metrics import RATES
from stepscope.model.trace import OTHER_MAKERS


class PASSES(Thresholds):
    recurring: float = 0.5  # of the profiled steps; a call in fewer is made every few steps already; chosen, untuned
    nearly_all: float = 0.9  # of them, for more than medium confidence; chosen, untuned
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    samples: int = 10  # of copies; fewer are chance
    lines_shown: int = 3


class DOUBLES(Thresholds):
    """What float32 gives in place of float64."""

    saved: float = 0.5  # half of the bytes, and twice as many numbers to an instruction, on CPUs and on every GPU
    most: float = 0.6  # of the same: data that fits a cache in float32 alone gains more; chosen, untuned
    most_slow: float = 0.97  # of GPUs with one unit for float64 to 32 or 64 for float32
    fast_capabilities: tuple[str, ...] = ("6.0", "7.0", "8.0", "9.0", "10.0")  # NVIDIA's, with one unit to two


class RECOMPUTE(Thresholds):
    full: float = 0.7  # of the device's memory: kept activations would hardly fit; chosen, untuned
    most: float = 1.1  # of the time of the work that is done again: keeping random states and hooks; chosen, untuned


class WASTED(Thresholds):
    most: float = 1.1  # of the recorded time, which few profiled steps tell to some percent; chosen, untuned


class UPDATES(Thresholds):
    """What a fused optimizer saves of the update on a CPU, measured on models of seven sizes: Adam and AdamW 55 to
    89 %, Adagrad 49 to 85 %, SGD with momentum 35 to 85 %."""

    floor: float = 0.30  # of the step: as it is made by default, AdamW takes up to 28 % of steps that nobody would mend
    usual: float = 0.5
    most: float = 0.9


def _trained(has: Callable[[PassFacts], bool]) -> Callable[[Analysis], bool]:
    return lambda analysis: any(has(run) for run in _runs(analysis))


TRAINED = Need("a profiler trace of training steps", _trained(lambda run: run.steps > 0), traced=always)
COPYING = Need(
    "sampled stacks of steady steps, or a profiler trace of training steps with Python functions",
    lambda a: a.passes is not None and (a.passes.copies is not None or any(run.functions for run in a.passes.runs)),
)
MODULE_CALLS = Need("calls of modules in the trace", _trained(lambda run: run.modules))
INPUT_TYPES = Need("types of operators' inputs in the trace", _trained(lambda run: run.types))
INPUT_SHAPES = Need("shapes of operators' inputs in the trace", _trained(lambda run: run.shapes))
NODES = Need("numbers of autograd nodes in the trace", _trained(lambda run: run.numbered))
UPDATED = Need(
    "an optimizer on the CPU that could be fused",
    lambda a: [] if accelerator(a) is not None else [site for site in a.sites if _could_be_fused(site)],
    quiet=True,
)
MIB = 1 << 20


def _runs(analysis: Analysis) -> tuple[PassFacts, ...]:
    return analysis.passes.runs if analysis.passes is not None else ()


def _of_run(analysis: Analysis, run: PassFacts, claim: Claim) -> Claim:
    """A claim on the steps of a run, with its mean step as the first evidence."""
    train, several = train_steps(analysis), len(_runs(analysis)) > 1 and bool(run.run)
    steps = ["low"] if train is not None and train.low_confidence and analysis.windows else []
    place = claim.where[0] if claim.where else None
    if several:  # what tells a finding from that of another run with the same code
        place = Place(f"{run.run}|{place.file if place else ''}", place.line if place else None, None)
    return replace(
        claim,
        title=claim.title + (f" of {run.run}" if several else ""),
        step_ms=run.step_ms,
        levels=(traced_confidence(run.steps if run.has_steps else 0, PASSES.steps_for_high), *steps, *claim.levels),
        key=place,
        ranks=run.ranks,
        evidence=(ms("mean step", run.step_ms, _source(run)), *claim.evidence),
    )


def _counts(run: PassFacts, cost_ms: float) -> bool:
    return cost_ms > 0 and cost_ms >= REPORT_FLOOR * run.step_ms


def _places(lines: tuple[PassLine, ...], whole_ms: float) -> tuple[Place, ...]:
    return tuple(
        replace(line.place, share=min(1.0, line.ms_per_step / whole_ms))
        for line in lines[: PASSES.lines_shown]
        if line.ms_per_step > 0 and whole_ms > 0
    )


def _source(run: PassFacts) -> str:
    steps = f"{run.steps} training step{'s' * (run.steps != 1)}" if run.has_steps else "its whole length"
    return f"{traces_source(run.traces)}, {steps}"


def told_places(analysis: Analysis) -> tuple[Place, ...]:
    """Lines whose time the rules here tell, for rules on the host to leave out; without a line the whole function."""
    found: dict[Place, None] = {}
    for _, call in _reported_calls(analysis):
        found[replace(call.place, share=None)] = None
        if call.around is not None:
            found[Place(call.around.file, None, call.around.function)] = None
    for claim in model_copied_in_step.judge(analysis):
        found[replace(claim.where[0], share=None)] = None
    return tuple(found)


def growing(analysis: Analysis) -> dict[Place, float]:
    """The lines at which a tensor grows, as is told here, with their ms of the step."""
    told = (one for run in _runs(analysis) for one in run.wasted if one.kind == GROWN and _counts(run, one.ms_per_step))
    return {line.place: line.ms_per_step for one in told for line in one.lines}


def _reported_calls(analysis: Analysis) -> list[tuple[PassFacts, ExtraCall]]:
    return [
        (run, call)
        for run in _runs(analysis)
        for call in run.extra_calls
        if call.steps_share >= PASSES.recurring and _counts(run, call.ms_per_step)
    ]


@rule(
    "host.evaluation_in_step",
    TRAINED,
    MODULE_CALLS,
    learn="https://pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation",
)
def evaluation_in_step(analysis: Analysis) -> Iterator[Claim]:
    for run, call in _reported_calls(analysis):
        module, place, source = call.module.rsplit("_", 1)[0], shown(call.place), _source(run)
        recorded = call.nodes_per_step >= 1
        function = bare((call.around or call.place).function)
        ceiling = call.at_most_ms_per_step
        if analysis.windows and not run.on_device:  # of a recorded run on the CPU with what depends on the main thread
            ceiling = gains.without_main(analysis, ceiling, behind=PIPELINE.cold_tensors)
        claim = Claim(
            title=f"{module} is called in the step for a result that trains nothing ({place}), "
            f"{clip_share(call.ms_per_step, run.step_ms):.0%} of the step"
            + (", and gradients are recorded for it" if recorded else ""),
            cost_ms=call.ms_per_step,
            ceiling_ms=ceiling,
            levels=("medium",) if not recorded or call.steps_share < PASSES.nearly_all else (),
            where=(replace(call.place, share=1.0),),
            evidence=(
                ms(f"{module} at {place}, per step", call.ms_per_step, call.source),
                ms("with the code around it that trains nothing", call.around_ms_per_step, call.source),
                figure("calls per step that no backward pass reads", call.calls_per_step, "calls", source, 2),
                figure("nodes recorded for a backward pass, per step", call.nodes_per_step, "nodes", source, 1),
                figure("profiled steps with such a call", call.steps_share, "fraction", source, 3),
            ),
            fix=(
                "Put the call under torch.no_grad() or torch.inference_mode(), and make it"
                if recorded
                else "Make the call"
            )
            + f" at {place} every N steps or after an epoch, not in every step",
            caveat="The result then comes less often. What looks the same and has to stay: a call whose result the "
            "next step needs without its gradient, as an action that is chosen or a target from the same network; "
            + ("torch.no_grad() helps there too." if recorded else "then only a smaller batch helps."),
            falsified_by=f"With {function} called every 50 steps the mean step does not get shorter",
        )
        yield _of_run(analysis, run, claim)


@rule(
    "host.model_copied_in_step",
    COPYING,
    learn="https://pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema",
)
def model_copied_in_step(analysis: Analysis) -> Iterator[Claim]:
    """A line copies the model or its state in the steps.

    By samples of the steady steps where there are enough of them, else as profiled: a profiler slows Python most.
    """
    train, sampled = train_steps(analysis), []
    # samples tell host time, of steady steps; what devices hide of it only a trace can tell
    if train is not None and not any(run.on_device and run.functions for run in _runs(analysis)):
        sampled = [
            copy
            for copy in (analysis.passes.copies if analysis.passes is not None else None) or ()
            if copy.ms_per_step >= REPORT_FLOOR * train.mean_ms and copy.samples >= PASSES.samples
        ]
    seen = {spot(copy.place) for copy in sampled}
    for run in _runs(analysis):
        recorded = bool(analysis.windows) and not run.on_device
        for copy in run.copies:
            if _counts(run, copy.ms_per_step) and spot(copy.place) not in seen:
                claim = _copy_claim(analysis, copy, run.step_ms, f"{copy.call} at {shown(copy.place)}, per step")
                yield _of_run(analysis, run, claim if recorded else replace(claim, ceiling_ms=0.0))
    for copy in sampled:
        if train is None:
            break
        doubt, words = device_doubt(analysis)
        mean = ms("mean steady step", train.mean_ms, steps_source(train))
        metric = f"main thread below {copy.call} at {shown(copy.place)}"
        claim = _copy_claim(analysis, copy, train.mean_ms, metric)
        levels, evidence = (sampled_confidence(copy.samples), *doubt), (mean, *claim.evidence)
        yield replace(claim, steps=train, levels=levels, evidence=evidence, caveat=claim.caveat + words)


def _copy_claim(analysis: Analysis, copy: ModelCopy, step_ms: float, metric: str) -> Claim:
    place = shown(copy.place)
    return Claim(
        title=f"The model or its state is copied in the step: {copy.call} at {place} takes "
        f"{clip_share(copy.ms_per_step, step_ms):.0%}",
        cost_ms=copy.ms_per_step,
        ceiling_ms=gains.without_main(analysis, copy.at_most_ms_per_step, behind=PIPELINE.cold_copies),
        where=(replace(copy.place, share=1.0),),
        evidence=(ms(metric, copy.ms_per_step, copy.source),),
        fix=f"At {place}: {advice('copy', copy.call)}",
        caveat="A copy made less often is older; an average over fewer updates differs a little.",
        falsified_by=f"With the line at {place} run every 50 steps the mean step does not get shorter",
    )


@rule("compute.double_precision", TRAINED, INPUT_TYPES)
def double_precision(analysis: Analysis) -> Iterator[Claim]:
    for run in _runs(analysis):
        doubles = run.doubles
        if doubles is None:
            continue
        compute_ms, conversion_ms = doubles.compute_ms_per_step, doubles.conversion_ms_per_step
        cost = conversion_ms + DOUBLES.saved * compute_ms
        # NVIDIA's GPUs that do 32 or 64 operations in float32 for one in float64
        known = [gpu for gpu in run.gpus if gpu.capability]
        named = [gpu for gpu in known if not any(maker in (gpu.name or "") for maker in OTHER_MAKERS)]
        slow = run.on_device and any(gpu.capability not in DOUBLES.fast_capabilities for gpu in named)
        where, source = _places(doubles.lines, cost), _source(run)
        names = ", ".join(list(doubles.parts)[:3])
        gpus = ", ".join(sorted({f"{gpu.name or 'GPU'} ({gpu.capability})" for gpu in run.gpus if gpu.capability}))
        evidence = [
            ms("operators on float64, per step", compute_ms, source),
            ms("conversions from and to float64, per step", conversion_ms, source),
            figure("operators on float64 per step", doubles.operators_per_step, "operators", source, 1),
            figure("conversions per step", doubles.conversions_per_step, "conversions", source, 1),
            *(ms(f"{name} on float64", value, source) for name, value in list(doubles.parts.items())[:3]),
            Evidence("GPU (compute capability)", gpus, "", source) if gpus else None,
        ]
        claim = Claim(
            title=f"Float64 takes {clip_share(conversion_ms + compute_ms, run.step_ms):.0%} of the step{at(*where)}; "
            "in float32 it would take half or less",
            cost_ms=cost,
            ceiling_ms=conversion_ms + (DOUBLES.most_slow if slow else DOUBLES.most) * compute_ms,
            where=where,
            evidence=evidence,
            fix=f"Keep these tensors in float32 ({names}): convert inputs once when they are loaded (NumPy makes "
            "float64), write dtype=torch.float32, and leave out .double() and torch.set_default_dtype(torch.float64)",
            caveat="Some methods need float64: sums of many small numbers, differences of nearly equal ones, "
            "ill-conditioned linear algebra. Compare losses over some hundred steps.",
            falsified_by="With these operators in float32 the mean step does not get shorter",
            learn="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"
            if run.on_device
            else "https://pytorch.org/docs/stable/notes/numerical_accuracy.html",
        )
        yield _of_run(analysis, run, claim)


@rule("compute.recompute", TRAINED, NODES, learn="https://pytorch.org/docs/stable/checkpoint.html")
def recompute(analysis: Analysis) -> Iterator[Claim]:
    for run in _runs(analysis):
        again = run.recompute
        if again is None or (again.memory_share or 0.0) >= RECOMPUTE.full:
            continue
        where, source = _places(again.lines, again.ms_per_step), _source(run)
        known, most = again.memory_share is not None, again.ms_per_step * RECOMPUTE.most
        if analysis.windows and not run.on_device:
            most = gains.without_main(analysis, most, behind=PIPELINE.cold_tensors)
        evidence = [
            ms("forward operators again in the backward pass, per step", again.ms_per_step, again.source),
            figure("such operators per step", again.operators_per_step, "operators", source, 1),
            figure("times per step that something is computed again", again.checkpoints_per_step, "", source, 1),
            figure("peak of the device's memory", again.memory_share, "fraction", source, 3),
        ]
        claim = Claim(
            title="The backward pass computes forward work again, "
            f"{clip_share(again.ms_per_step, run.step_ms):.0%} of the step{at(*where)}: activation checkpointing",
            cost_ms=again.ms_per_step,
            ceiling_ms=most,
            levels=() if known else ("medium",),
            where=where,
            evidence=evidence,
            fix="Where memory allows, keep the activations: checkpoint fewer blocks, or only what is large and quick "
            "to compute (torch.utils.checkpoint.create_selective_checkpoint_contexts)",
            caveat="Kept activations take memory from the forward pass on: it is what checkpointing was paid for. "
            + ("Try with the largest batch." if known else "How much is free was not recorded."),
            falsified_by="Without the checkpoints the mean step does not get shorter, or memory does not suffice",
        )
        yield _of_run(analysis, run, claim)


def _could_be_fused(site: Site) -> bool:
    """Of torch's optimizers; one that gives each parameter a single operator, as plain SGD does, gains nothing."""
    given = site.arguments
    return given.get("fused", "True") != "True" and given.get("momentum", "1") not in ("0", "0.0")


@rule("compute.unfused_optimizer", STEPS, UPDATED, learn="https://docs.pytorch.org/docs/stable/optim.html#algorithms")
def unfused_optimizer(analysis: Analysis) -> Iterator[Claim]:
    train, made = STEPS.of(analysis), UPDATED.of(analysis)
    update_ms = sum(part.ms for part in train.partition if part.category == "optimizer")
    share, name = clip_share(update_ms, train.mean_ms), made[0].what
    if share < UPDATES.floor:
        return
    how = "operation by operation (foreach)" if made[0].arguments.get("foreach") == "True" else "tensor by tensor"
    yield Claim(
        title=f"{name} takes {share:.0%} of the step: it updates {how}, with an operator for each "
        f"part of its formula{at(made[0].place)}",
        steps=train,
        cost_ms=UPDATES.usual * update_ms,
        ceiling_ms=gains.without_main(analysis, UPDATES.most * update_ms, behind=PIPELINE.cold_tensors),
        where=distinct(site.place for site in made if site.place is not None),
        evidence=(
            ms("optimizer's step", update_ms, steps_source(train)),
            Evidence(f"fused of {name}", made[0].arguments["fused"], "", "events.jsonl, its arguments"),
        ),
        fix=f"Create {name} with fused=True, which reads and writes each parameter once",
        caveat="The cost counts half of the update. On a CPU fused=True wants PyTorch 2.4 and gradients that are not "
        "sparse; results differ in the last digits. Hooks of the optimizer's step are in its time.",
        falsified_by="With fused=True the mean step does not get shorter",
        tries=(Try("optimizer.fused", "true"),),
    )


@rule(
    "memory.short_lived_gradients",
    TRAINED,
    INPUT_SHAPES,
    learn="https://pytorch.org/docs/stable/generated/torch.unbind.html",
)
def short_lived_gradients(analysis: Analysis) -> Iterator[Claim]:
    for run in _runs(analysis):
        of_place: dict[object, list[WideGradients]] = {}
        for one in run.wide_gradients:
            of_place.setdefault(one.place or (one.node, one.shape), []).append(one)
        for parts in of_place.values():
            if _counts(run, sum(one.ms_per_step for one in parts)):
                yield _of_run(analysis, run, _gradients(analysis, run, parts))


def _gradients(analysis: Analysis, run: PassFacts, parts: list[WideGradients]) -> Claim:
    top, source = max(parts, key=lambda one: one.ms_per_step), _source(run)
    where = (replace(top.place, share=1.0),) if top.place is not None else ()
    mib = top.bytes_per_call / MIB * top.calls_per_step
    operator = bare((top.forward or top.node.removesuffix("Backward0").lower()).replace("::", "."))
    evidence, shapes = [], f"{source}; recorded shapes"
    for one in parts[: PASSES.lines_shown]:
        size, each = f"{_shape(one)} {one.dtype}", one.bytes_per_call / MIB
        evidence += [
            ms(f"{one.node} and the sums of its results, per step", one.ms_per_step, source),
            figure(f"{one.node} over {size}, per step", one.calls_per_step, "calls", source, 1),
            figure(f"zeros per call for {size}", each, "MiB", shapes, 3),
            figure("zeros per step", one.calls_per_step * each, "MiB", f"calls x bytes; {source}", 1),
            Evidence("calls equal a dimension", one.dimension, "", shapes) if one.dimension else None,
        ]
    loops = [  # around the place: its gradients are a part of what these cost, however each was estimated
        loop.both_passes_ms
        for loop in analysis.loops or ()
        if top.place is not None
        and (line := top.place.line) is not None
        and loop.place.file == top.place.file
        and (loop.place.line == line or (loop.loop_line or line) < line <= (loop.loop_end or 0))
    ]
    return Claim(
        title=f"{top.node} makes {top.calls_per_step:.0f} gradients of {_shape(top)} per step for small parts of it, "
        f"{mib:.0f} MiB in all{at(*where)}",
        cost_ms=min(sum(one.ms_per_step for one in parts), max(loops, default=inf)),
        ceiling_ms=sum(one.at_most_ms_per_step for one in parts),
        where=where,
        evidence=evidence,
        fix=f"Take the parts by one operator: torch.unbind or torch.split in front of the loop in place of {operator} "
        "in it (their backward pass builds the gradient once), or compute on the whole tensor without a loop",
        caveat="The parts' gradients are then held together until all are there, which takes as much as one gradient "
        "of the whole tensor.",
        falsified_by=f"With the parts taken by one operator {top.node} still runs as often, or the mean step does not "
        "get shorter",
    )


def _shape(one: WideGradients | WastedWork) -> str:
    return "x".join(str(size) for size in one.shape)


@rule("compute.wasted_operators", TRAINED, INPUT_SHAPES, learn="https://pytorch.org/docs/stable/sparse.html")
def wasted_operators(analysis: Analysis) -> Iterator[Claim]:
    for run in _runs(analysis):
        for one in run.wasted:
            if one.kind == "unused_gradient" and not _has_one_optimizer(analysis):
                continue
            where, source, cost = _places(one.lines, one.ms_per_step), _source(run), one.ms_per_step
            if one.kind == "history" and where and where[0].line is None:  # several lines call it there
                where = (*_sampled_backward(analysis), *where)
            most = cost * WASTED.most
            train = train_steps(analysis)
            if one.kind == "history" and train is not None:  # the profiled steps may be some with little of it
                most = max(most, sum(part.ms for part in train.partition if part.category == "backward"))
            if one.kind == GROWN and analysis.machine.drift is not None:  # what else the steps have more of may go too
                most = max(most, run.step_ms - analysis.machine.drift.early_ms)
            if analysis.windows and not run.on_device:
                most += _given_back_ms(analysis)
                most = gains.without_main(analysis, most, behind=PIPELINE.cold_tensors)
            claim = Claim(
                title=f"{advice('wasted_title', one.kind).format(_shape(one))}, "
                f"{clip_share(cost, run.step_ms):.0%} of the step{at(*where)}",
                cost_ms=cost,
                ceiling_ms=most,
                levels=("medium",),
                where=where,
                evidence=(
                    ms("operators on it, per step", cost, source),
                    figure(f"calls of {one.operator} or its product, per step", one.calls_per_step, "calls", source, 1),
                    Evidence("the large tensor", _shape(one), "", f"{source}; recorded shapes") if one.shape else None,
                ),
                fix=f"At {shown(where[0]) if where else 'that line'}: {advice('wasted_fix', one.kind)}",
                caveat=advice("wasted_caveat", one.kind),
                falsified_by="With the other form in its place the mean step does not get shorter",
            )
            yield _of_run(analysis, run, claim)


def _given_back_ms(analysis: Analysis) -> float:
    """What giving pages back takes at most: large tensors are freed in no operator, and by whom is not recorded."""
    faults = analysis.machine.page_faults
    return faults.minor_per_step * (faults.ns_returned or 0.0) / 1e6 if faults is not None else 0.0


def _has_one_optimizer(analysis: Analysis) -> bool:
    """Whether one optimizer made all updates of a recorded run: a second one may update between the traced steps."""
    series = analysis.metrics.series if analysis.metrics is not None else ()
    rates = [one.name for one in series if one.name.startswith(RATES)]
    return bool(rates) and not any(re.match(r"[1-9]\d*\.", name.removeprefix(RATES)) for name in rates)


def _sampled_backward(analysis: Analysis) -> tuple[Place, ...]:
    """The user's line that most samples of the backward pass stand at."""
    lines = analysis.stacks.hot_lines if analysis.stacks is not None else ()
    found = (Place(one.file, one.line, one.function) for one in lines if (one.role, one.phase) == ("rank", "backward"))
    return tuple(found)[:1]
