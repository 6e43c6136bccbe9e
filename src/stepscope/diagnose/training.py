"""The health of what is trained, by its metrics: none of it costs time that could be measured, so all of it is a risk.

A loss that is not finite, gradients that are added up and not divided, a loss that is logged divided once more,
gradients clipped in nearly every update or left out by a GradScaler, modules that return zeros, updates of the wrong
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepscope.diagnose.rule import Fact, Need, Thresholds, at, figure, figures, risk_rule
from stepscope.model import Analysis, Evidence, Finding, Risk
from stepscope.model.metrics import Accumulation, MetricFacts, Watched


class TRAINING(Thresholds):
    losses: int = 5  # a loss that is NaN and recovers within as many is lost on one batch
    same_passes: float = 0.9  # of the updates have as many passes: the last of an epoch may have fewer
    same_ratio: float = 0.1  # off the number of passes, in the median: what is logged may be one of them
    updates: int = 20  # fewer show the start of training alone
    clipped: float = 0.9  # of the updates: clipping is meant for the few that are too large; chosen, untuned
    factor: float = 0.5  # of the gradients left in the median clipped update: a rate twice as high would do as much
    skipped: float = 0.05  # of the updates after the search for a scale; growth alone costs one in 2,000
    scale: float = 1.0  # below it the scale makes gradients smaller: it is no longer for what it is there for
    zeros: float = 0.95  # of a module's outputs: half is usual behind a ReLU; chosen, untuned
    high_ratio: float = 0.1  # update by weight: about 0.001 is usual; a tenth of itself in a step keeps no weight
    low_ratio: float = 1e-6  # as many updates would change a weight by itself; float32 rounds at 6e-8
    values: int = 3  # watched, in the later half of the run
    shown: int = 5  # modules or parameters


def _of(find: Callable[[MetricFacts], Fact | None]) -> Callable[[Analysis], Fact | None]:
    return lambda analysis: None if analysis.metrics is None else find(analysis.metrics)


SERIES = Need("metrics of the run", _of(lambda facts: facts if facts.series else None), quiet=True)
LOSSES = Need("the loss of an update of several passes", _of(lambda facts: facts.accumulation), quiet=True)
CLIPPED = Need("norms that gradients were clipped by", _of(lambda facts: facts.clipping), quiet=True)
SCALED = Need("a GradScaler's scale", _of(lambda facts: facts.scaling), quiet=True)
ZEROS = Need("the share of zeros in what modules return (--watch)", _of(lambda facts: facts.zeros), quiet=True)
RATIOS = Need("sizes of updates (--watch)", _of(lambda facts: facts.update_ratios), quiet=True)
SOURCE = "the table of metrics"
ACCUMULATING = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"


@risk_rule("training.loss_not_finite", SERIES)
def not_finite(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """One risk where a loss or norm is NaN or infinite, and no GradScaler caught it."""
    found = SERIES.of(analysis).non_finite
    if found is None or found.stage == "logged":
        return
    lasting = found.losses_lost > TRAINING.losses
    where = {
        "forward": "the forward pass: a division by zero, the logarithm of zero, an overflow in half precision, a "
        "batch with such values",
        "backward": "the backward pass: the square root or norm of zero, an overflow in half precision",
    }.get(found.stage, "the scaler")
    since = f" from step {found.step} on" if lasting else f" in step {found.step}"
    since = since if found.step is not None else ""
    framework = analysis.run.framework
    hidden = ""
    if framework is not None and framework.package == "transformers":
        hidden = (
            " The Trainer's own log shows the mean of other losses in its place (logging_nan_inf_filter, which also "
            "reads the loss back in every pass)."
        )
    origin = found.origin if found.origin is not None and found.origin.where is not None else None
    seen = None if origin is None else f"{origin.sentence}{at(origin.place)}"
    doubt = "" if found.sure else " No norm was taken: the backward pass of the step before may have made it."
    yield not_finite.risk(
        found.place or "loss",
        title=f"{'Nothing is learned' if lasting else 'An update is lost'}{since}: {found.name} is {found.value}, "
        f"first in {where.partition(':')[0]}{at(found.place)}",
        severity="critical" if lasting else "warning",
        confidence="high" if found.sure else "medium",
        ranks=(found.rank,),
        evidence=(
            Evidence("first step", found.step if found.step is not None else "unknown", "", SOURCE),
            Evidence("shows first in", found.name, "", SOURCE),
            Evidence("made", seen, "", "the alarm of that step") if seen is not None else None,
            figure("losses from there on", found.losses, "values", SOURCE, 0),
            figure("of these not finite", found.losses_lost, "values", SOURCE, 0),
        ),
        fix=f"Look at {where}. torch.autograd.detect_anomaly() around that step names the operator, at about three "
        "times the time"
        + ("; every step since trains nothing: go back to a checkpoint from before" if lasting else ""),
        caveat=f"Where it shows first need not be where it was made.{doubt}{hidden}",
        learn="https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection",
        falsified_by="With the batch of that step left out, the same step is not finite again",
    )


@risk_rule("training.loss_not_divided", LOSSES)
def not_divided(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    for one in _accumulated(analysis):
        by_log = _times_logged(one)
        # by something else than the number of passes, unless what is logged tells
        scaled = one.node.startswith("MulBackward") and not by_log
        if one.divided or scaled:
            continue
        yield not_divided.risk(
            one.place or one.name,
            title=f"The loss is not divided by the {one.passes} backward passes of an update: gradients are "
            f"{one.passes} times those of their mean{at(one.place)}",
            confidence="high" if by_log else "medium",
            evidence=(*_of_passes(one), *_of_log(one)),
            fix=f"loss = loss / {one.passes} before backward, and the learning rate as for one batch of that size",
            caveat="Right where each pass's loss is a sum, or was divided inside. A learning rate that was chosen "
            "with it makes up for it; Adam and its like hardly notice the size of gradients, but a norm they are "
            "clipped by does.",
            learn=ACCUMULATING,
            falsified_by="The gradients of an update equal those of one pass over the whole batch",
        )


@risk_rule("training.logged_loss", LOSSES)
def logged_loss(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """A risk where the script logs its loss after it has divided it for `backward`."""
    for one in _accumulated(analysis):
        if not one.divided or not _times_logged(one):
            continue
        yield logged_loss.risk(
            one.place or one.name,
            title=f"What is logged as {one.logged} is a loss divided by the {one.passes} backward passes of an update: "
            f"the loss is {one.passes} times as high{at(one.place)}",
            severity="info",
            confidence="medium",
            evidence=(*_of_passes(one), *_of_log(one)),
            fix=f"Log the sum of the {one.passes} losses that backward is called on, or one before it is divided",
            caveat="Nothing is wrong with what is trained, but the curve compares with no run of another number of "
            "passes.",
            learn=ACCUMULATING,
            falsified_by="The loss of one pass over the whole batch is what is logged",
        )


def _accumulated(analysis: Analysis) -> Iterator[Accumulation]:
    for one in LOSSES.of(analysis):
        if one.passes >= 2 and one.share >= TRAINING.same_passes and one.updates >= TRAINING.updates:
            yield one


def _times_logged(one: Accumulation) -> bool:
    """Whether the loss of an update is as many times what is logged as there are passes."""
    return one.logged_ratio is not None and abs(one.logged_ratio / one.passes - 1) <= TRAINING.same_ratio


def _of_passes(one: Accumulation) -> Iterator[Evidence | None]:
    yield figure("backward passes of an update", one.passes, "passes", SOURCE)
    yield figure("updates with as many", one.share, "share", SOURCE)
    if one.node:
        yield Evidence("last operator of the loss", one.node, "", "events.jsonl")


def _of_log(one: Accumulation) -> Iterator[Evidence | None]:
    if one.logged_ratio is not None:
        yield figure(
            f"sum of an update's losses by what is logged as {one.logged}", one.logged_ratio, "ratio", SOURCE, 3
        )


@risk_rule("training.clipping", CLIPPED)
def clipping(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    found = CLIPPED.of(analysis)
    if found.updates < TRAINING.updates or found.median_factor is None:
        return
    if found.clipped_share < TRAINING.clipped or found.median_factor > TRAINING.factor:
        return
    yield clipping.risk(
        "norm",
        title=f"Gradients are clipped in {found.clipped_share:.0%} of {found.updates:,} updates, to "
        f"{found.median_factor:.2g} of their norm in the median one: the largest norm allowed, not the gradient, "
        "sets how far an update goes",
        severity="info",
        evidence=(
            figure("updates clipped", found.clipped_share, "share", SOURCE),
            figure("median norm before", found.median_norm, "", SOURCE),
            figure("left of the gradients in the median clipped update", found.median_factor, "share", SOURCE),
        ),
        fix="Allow a larger norm, near the median of what is seen, so that clipping meets outliers alone; lower "
        "the learning rate in turn where the optimizer is SGD",
        caveat="Some recipes normalise gradients this way on purpose; Adam and its like make up for a constant factor.",
        learn="https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
        falsified_by="With twice the norm allowed, the loss goes the same way",
    )


@risk_rule("training.scale_collapse", SCALED)
def scale(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    found = SCALED.of(analysis)
    if found.updates < TRAINING.updates:
        return
    collapsed = found.least is not None and found.least < TRAINING.scale
    often = found.skipped_share > TRAINING.skipped
    if not collapsed and not often:
        return
    fell = f"its scale fell to {found.least:.3g}" if collapsed else ""
    if collapsed and found.collapsed_step is not None:
        fell += f" (below 1 from step {found.collapsed_step})"
    left = f"it left {found.skipped:,} of {found.updates:,} updates out" if often else ""
    yield scale.risk(
        "scaler",
        title=f"GradScaler finds no scale that holds: {' and '.join(part for part in (fell, left) if part)}",
        severity="critical" if collapsed else "warning",
        evidence=(
            figure("updates left out", found.skipped_share, "share", "events.jsonl"),
            *figures(SOURCE, ("least scale", found.least, "", 6), ("last scale", found.last, "", 6)),
        ),
        fix="Train in bfloat16 (no GradScaler) where the device can; else keep what overflows in float32 "
        "(autocast off around it: norms, softmax over long rows, exponentials) and look for NaN in the batches",
        caveat="An update left out costs its whole step and trains nothing.",
        learn="https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
        falsified_by="In bfloat16 or float32, gradients are not finite in as many updates",
    )


def _listed(found: Sequence[Watched]) -> str:
    names = ", ".join(one.name for one in found[: TRAINING.shown])
    return f"{names} and {len(found) - TRAINING.shown} more" if len(found) > TRAINING.shown else names


@risk_rule("training.dead_units", ZEROS)
def dead_units(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    watched = [one for one in ZEROS.of(analysis) if one.count >= TRAINING.values]
    found = sorted((one for one in watched if one.value >= TRAINING.zeros), key=lambda one: (-one.value, one.name))
    if not found:
        return
    yield dead_units.risk(
        found[0].name,
        title=f"{len(found)} of {len(watched)} modules return zeros in {found[-1].value:.0%} of their outputs "
        f"or more, all through the later half of the run: {_listed(found)}",
        evidence=tuple(figure(f"zeros of {one.name}", one.value, "share", SOURCE) for one in found[:5]),
        fix="Lower the learning rate or warm it up, look at how these modules are initialised, or use an "
        "activation with a slope on both sides (GELU, LeakyReLU): what is zero has no gradient, and stays so",
        caveat="Zeros on purpose (dropout, masks, padding, sparse gates) count as well.",
        learn="https://docs.pytorch.org/docs/stable/generated/torch.nn.LeakyReLU.html",
        falsified_by="With a tenth of the learning rate, as many outputs are zero",
    )


@risk_rule("training.update_ratio", RATIOS)
def update_ratio(analysis: Analysis, _findings: Sequence[Finding]) -> Iterator[Risk]:
    """A risk for parameters that change by too much in a step, and one for those that hardly change."""
    # biases and scales of norms start at 0 or are small by nature
    watched = [one for one in RATIOS.of(analysis) if one.count >= TRAINING.values and one.name.endswith("weight")]
    high = sorted((one for one in watched if one.value > TRAINING.high_ratio), key=lambda one: (-one.value, one.name))
    low = sorted((one for one in watched if one.value < TRAINING.low_ratio), key=lambda one: (one.value, one.name))
    for found, words, fix in (
        (high, "change by more than a tenth of themselves", "Lower the learning rate of these, or warm it up longer"),
        (low, "hardly change", "Raise the learning rate of these, or freeze them: no gradient need be computed then"),
    ):
        if found:
            yield update_ratio.risk(
                words,
                title=f"{len(found)} of {len(watched)} weights {words} in an update: {_listed(found)}",
                severity="warning" if found is high else "info",
                confidence="medium",
                evidence=tuple(
                    figure(f"update by weight, {one.name}", one.value, "ratio", SOURCE, 9) for one in found[:5]
                ),
                fix=fix,
                caveat="About 0.001 is usual in the middle of training; it is larger at its start, and falls with "
                "the learning rate.",
                learn="https://docs.pytorch.org/docs/stable/optim.html#per-parameter-options",
                falsified_by="With a rate that brings the ratio near 0.001, the loss goes the same way",
            )


RISKS = (not_finite, not_divided, logged_loss, clipping, scale, dead_units, update_ratio)
