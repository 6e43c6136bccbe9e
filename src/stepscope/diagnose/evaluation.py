"""The model used inside the step for what does not train it: validation and metrics, and copies of the model.

Other rules see the Python around such a call; `told_places` names what is told here, so that no time is told twice.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.diagnose import pass_basis as basis
from stepscope.diagnose import pipeline
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
from stepscope.diagnose.pass_basis import Claim, Words
from stepscope.diagnose.system import device_doubt
from stepscope.diagnose.thresholds import PASSES, PIPELINE
from stepscope.model import Analysis, Evidence, Finding, Place, StepFacts
from stepscope.model.device_losses import ExtraCall, ModelCopy, PassFacts

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
    return pipeline.without_main(analysis, call.at_most_ms_per_step, behind=PIPELINE.cold_tensors)


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
    return pipeline.without_main(analysis, copy.at_most_ms_per_step, behind=PIPELINE.cold_copies)


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
