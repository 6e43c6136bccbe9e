"""What devices lost in profiled steps, as the rules on devices see it.

A ceiling is from `gains`: what the steps save when they are played again without the loss, but at least its cost. A
loss is ns of the mean profiled step. In a recorded run its share is carried over to the steady step outside of
windows, which the profiler does not slow down. What one step alone lost, as the first of a recording often does, is no
loss per step: then the median counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.diagnose.rule import (
    ON_DEVICE,
    REPORT_FLOOR,
    Claim,
    Need,
    Thresholds,
    always,
    at,
    clip_share,
    ms,
    traced_confidence,
    traces_source,
    train_steps,
)
from stepscope.model import Analysis, Evidence, Place, Try
from stepscope.model.device_losses import DeviceLosses, Loss

_FUNCTION = re.compile(r"(?:.*/)?([^/]{1,200})\((\d{1,9})\): (.{1,200})")
_NAME_SHOWN = 60  # characters of a kernel


class DeviceLimits(Thresholds, frozen=True):
    """When a loss of the devices in profiled steps counts. The limits of a gap stand in `analyze/device_losses`."""

    floor: float = REPORT_FLOOR
    recurring: float = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
    steps_for_median: int = 3  # of fewer steps the median says nothing else than the mean
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    lines_shown: int = 3


DEVICE = DeviceLimits()
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
        """The cost in ms of the mean profiled step."""
        return self.cost_ns / 1e6

    @property
    def source(self) -> str:
        """Which traces the figures come from."""
        return traces_source(self.losses.traces)

    @property
    def where(self) -> tuple[Place, ...]:
        """The lines of the loss with their part of it."""
        return tuple(
            replace(line.place, share=min(1.0, line.ns_per_step / self.loss.ns_per_step))
            for line in self.loss.lines[: DEVICE.lines_shown]
            if line.ns_per_step > 0
        )

    @property
    def at(self) -> str:
        """` (train.py:29)` of the first line, or nothing."""
        return at(self.where)

    def names(self, count: int) -> list[str]:
        """Names of what takes most of it."""
        return [clipped(name) for name in list(self.loss.parts)[:count]]

    @property
    def top(self) -> str:
        """The name of what takes most of it, or nothing."""
        return "".join(self.names(1))

    def detail(self, name: str) -> float:
        """One of its details; 0 where it has none of the name."""
        return self.loss.details.get(name, 0.0)

    def ms(self, metric: str, ns: float) -> Evidence:
        """A time per step."""
        return ms(metric, ns / 1e6, self.source)

    def figure(self, metric: str, value: object, unit: str) -> Evidence:
        """Another figure of the traces."""
        return Evidence(metric, value, unit, self.source)

    def parts(self, text: str = "{} per step") -> Iterable[Evidence]:
        """What takes most of it, with its time."""
        for name, ns in list(self.loss.parts.items())[:3]:
            if ns > 0:
                yield self.ms(text.format(clipped(name)), ns)

    def claim(
        self,
        *,
        title: str,
        evidence: Iterable[Evidence],
        fix: str,
        caveat: str,
        falsified_by: str,
        tries: tuple[Try, ...] = (),
        cost_ns: float | None = None,
        ceiling_ns: float | None = None,
        most: str = "high",
        what_if: str | None = None,
    ) -> Claim:
        """The claim on it. `most` bounds the confidence.

        `ceiling_ns` is by subtraction. What it is above the cost is more than the loss itself and comes on top of what
        a replay without the loss saves, unless `what_if` names a replay of all of it.
        """
        analysis, losses, where = self.analysis, self.losses, self.where
        cost_ns = self.cost_ns if cost_ns is None else cost_ns
        ceiling_ns = cost_ns if ceiling_ns is None else ceiling_ns
        share, most_share = clip_share(cost_ns, losses.step_ns), clip_share(ceiling_ns, losses.step_ns)
        gain = replayed(analysis, losses.run, what_if or self.loss.kind, use_median=self.use_median)
        if gain is None:
            replay_caveat, ceiling = BY_SUBTRACTION if ceiling_ns > 0 else "", max(share, most_share)
        else:
            # never below the cost: of work a replay tells less where the host, slowed by the profiler, was late as well
            beyond = 0.0 if what_if is not None else clip_share(ceiling_ns - cost_ns, losses.step_ns)
            replay_caveat, ceiling = gain.caveat(share), min(1.0, max(share, gain.share) + beyond)
        one_step = "" if losses.has_steps else "The trace names no step: its whole length counts as one. "
        steps = f"{losses.steps} step{'s' * (losses.steps != 1)}" if losses.has_steps else "whole length"
        several = len(analysis.device_losses) > 1
        step_ms = profiled_step_ms(analysis, losses.step_ns)
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
            fix=fix,
            caveat=f"{one_step}{caveat} {replay_caveat}".strip(),
            falsified_by=falsified_by,
            tries=tries,
        )


def profiled_losses(analysis: Analysis, kind: str) -> Iterator[ProfiledLoss]:
    """Of each run the loss of a kind, where what a step loses to it is worth a finding."""
    for losses in analysis.device_losses:
        loss = losses.of(kind)
        if loss is None:
            continue
        use_median = losses.steps >= DEVICE.steps_for_median and loss.median_ns < DEVICE.recurring * loss.ns_per_step
        cost_ns = loss.median_ns if use_median else loss.ns_per_step
        if cost_ns > 0 and cost_ns >= DEVICE.floor * losses.step_ns:
            yield ProfiledLoss(analysis, losses, loss, cost_ns, use_median)


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
