"""Where two sources tell the same quantity: that they agree raises nothing, that they disagree is said.

A disagreement beyond what sampling explains stands in every finding that uses one of the two figures, and lowers its
confidence by one level, once however many there are. A quantity with one source is compared with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import communication, compute, host, input, input_extra
from stepscope.diagnose.common import lower, stacks_source, steps_source, train_steps
from stepscope.diagnose.input_trace import profiled
from stepscope.diagnose.rules import DEVICE_WORK, RULES, TRAINED
from stepscope.diagnose.thresholds import AGREEMENT, RANKS
from stepscope.model import Analysis, Disagreement, Finding
from stepscope.model.views import DEVICE, HOST, IDLE_PARTS, Overview

_WAITS = (input.RULE, input_extra.WAVES_RULE)
# Shares of a window that are carried over to the steady step; of those, idle time of the device.
_CARRIED = tuple(rule.name for rule in RULES if {DEVICE_WORK, TRAINED} & set(rule.needs))
_IDLE = tuple(rule.name for rule in RULES if DEVICE_WORK in rule.needs and rule.category != "compute")


class _Conflict(Struct, frozen=True):
    """`rules` are those whose findings use one of the figures; `told`: they have lowered their confidence for it."""

    said: Disagreement
    rules: tuple[str, ...]
    told: bool = False


def weighed(findings: Iterable[Finding], analysis: Analysis) -> tuple[Finding, ...]:
    """`findings` with what speaks against them from another source, and less confidence where something does."""
    conflicts = [conflict for check in _CHECKS for conflict in check(analysis)]
    found = []
    for finding in findings:
        own = [conflict for conflict in conflicts if finding.rule in conflict.rules]
        level = finding.confidence if all(conflict.told for conflict in own) else lower(finding.confidence)
        said = tuple(conflict.said for conflict in own)
        found.append(replace(finding, confidence=level, disagreements=said) if own else finding)
    return tuple(found)


def _data_wait_sampled(analysis: Analysis) -> Iterator[_Conflict]:
    """Measured in every step, and sampled: a sampler that does not stop the process tears some stacks of a wait."""
    train, loader, stacks = train_steps(analysis), analysis.loader, analysis.stacks
    total = sum(stacks.by_phase.values()) if stacks is not None else 0
    if train is None or loader is None or stacks is None or not total:
        return
    sampled = stacks.by_phase.get("data_wait", 0) / total
    if abs(sampled - loader.data_wait_share) > _sampling(loader.data_wait_share, total):
        source = f"{stacks_source(analysis)}, {total} samples"
        yield _Conflict(
            _shares("data wait, part of the step", loader.data_wait_share, steps_source(train), sampled, source),
            _WAITS,
        )


def _data_wait_in_windows(analysis: Analysis) -> Iterator[_Conflict]:
    """The journal's wait, and the loader's part of windows without a device, which hides nothing of it."""
    train, loader = train_steps(analysis), analysis.loader
    windows = _windows(analysis, HOST)
    if train is None or loader is None or not windows:
        return
    shares = [step.parts_ns.get("host_data", 0) / step.wall_ns for one in windows for step in one.steps if step.wall_ns]
    if len(shares) < 2:
        return
    seen = sum(shares) / len(shares)
    if abs(seen - loader.data_wait_share) > max(AGREEMENT.share, AGREEMENT.sigmas * _error(shares)) + _slowing(windows):
        source = f"window, {len(shares)} steps"
        yield _Conflict(
            _shares("data wait, part of the step", loader.data_wait_share, steps_source(train), seen, source), _WAITS
        )


def _slowing(windows: list[Overview]) -> float:
    """The part of a window's steps that is Python: recording it makes it longer, and the other parts smaller."""
    shares = [one.parts["host_python"].share for one in windows if "host_python" in one.parts]
    return max(shares, default=0.0)


def _python_in_windows(analysis: Analysis) -> Iterator[_Conflict]:
    """Sampled Python, and the window's: recording slows Python most, so only a smaller part there contradicts.

    Collections strike few steps, and the window has few: they are left out.
    """
    train, windows, facts, stacks = train_steps(analysis), _windows(analysis, HOST), analysis.python, analysis.stacks
    total = sum(stacks.by_phase.values()) if stacks is not None else 0
    shares = [
        step.parts_ns.get("host_python", 0) / step.wall_ns for one in windows for step in one.steps if step.wall_ns
    ]
    if train is None or not facts or not total or len(shares) < 2:
        return
    pauses = analysis.machine.pauses if analysis.machine is not None else None
    collected = pauses.ms_per_step / train.mean_ms if pauses is not None else 0.0
    sampled = max(0.0, min(1.0, sum(fact.share for fact in facts)) - collected)
    seen = sum(shares) / len(shares)
    if sampled - seen > _sampling(sampled, total) + AGREEMENT.sigmas * _error(shares):
        yield _Conflict(
            _shares(
                "Python on the main thread, part of the step",
                *(sampled, f"{stacks_source(analysis)}, {total} samples", seen, f"window, {len(shares)} steps"),
            ),
            (host.PYTHON_RULE,),
        )


def _idle_by_telemetry(analysis: Analysis) -> Iterator[_Conflict]:
    """The device's idle time in windows, and by the driver's utilization, where every GPU of the host is trained on."""
    windows = _windows(analysis, DEVICE)
    used = analysis.system.get("gpu_util_pct")
    if not windows or not isinstance(used, int | float) or len(compute.gpu_names(analysis)) > len(analysis.run.ranks):
        return
    steps = sum(len(one.steps) for one in windows)
    idle = sum(_idle(one) * len(one.steps) for one in windows) / steps
    by_driver = 1.0 - min(100.0, float(used)) / 100.0
    if abs(idle - by_driver) > AGREEMENT.utilization:
        yield _Conflict(
            _shares(
                "device idle, part of the time",
                *(idle, f"window, {steps} steps", by_driver, "system.jsonl, utilization by the driver"),
            ),
            (*_IDLE, *_WAITS),
        )


def _idle(overview: Overview) -> float:
    return sum(overview.parts[part].share for part in IDLE_PARTS if part in overview.parts)


def _slowed_windows(analysis: Analysis) -> Iterator[_Conflict]:
    """The mean step outside of windows and inside: shares of a window whose steps are slowed are shares of those."""
    train = train_steps(analysis)
    ratios = [window.overhead_ratio for window in analysis.windows if window.overhead_ratio is not None]
    if train is None or not ratios:
        return
    ratio = sum(ratios) / len(ratios)
    if ratio > AGREEMENT.slowed:
        inside = round(ratio * train.mean_ms, 3)
        said = Disagreement(
            *("mean step", "ms", round(train.mean_ms, 3), steps_source(train), inside, "steps.jsonl, in windows")
        )
        yield _Conflict(said, _CARRIED)


def _ranks_wait(analysis: Analysis) -> Iterator[_Conflict]:
    """What one rank works longer is what the others wait longer."""
    ranks = analysis.ranks
    if ranks is None or ranks.excess_ms <= 0:
        return
    agree = ranks.waited_ms / ranks.excess_ms
    if not RANKS.agree <= agree <= 1 / RANKS.agree:
        source = f"steps.jsonl of {len(ranks.ranks)} ranks"
        said = Disagreement(
            "a rank works longer, the others wait longer",
            *("ms", round(ranks.excess_ms, 3), f"{source}, own work", round(ranks.waited_ms, 3)),
            f"{source}, waits",
        )
        yield _Conflict(said, (communication.STRAGGLER_RULE,), told=True)


def _slowest_rank(analysis: Analysis) -> Iterator[_Conflict]:
    """The rank the others wait for, by the steps and by sampled lines."""
    ranks, lines = analysis.ranks, analysis.sampled.rank_lines if analysis.sampled is not None else None
    if ranks is None or lines is None or lines.straggler is None or not communication.persistent(ranks):
        return
    if lines.straggler != ranks.slowest:
        said = Disagreement(
            *("the rank the others wait for", "", ranks.slowest, f"steps.jsonl of {len(ranks.ranks)} ranks"),
            *(lines.straggler, lines.source),
        )
        yield _Conflict(said, (communication.STRAGGLER_RULE, communication.UNBALANCED_RULE))


_CHECKS: tuple[Callable[[Analysis], Iterator[_Conflict]], ...] = (
    _data_wait_sampled,
    _data_wait_in_windows,
    _python_in_windows,
    _idle_by_telemetry,
    _slowed_windows,
    _ranks_wait,
    _slowest_rank,
)


def _windows(analysis: Analysis, basis: str) -> list[Overview]:
    """Profiled steps of a recorded run."""
    if not analysis.windows:
        return []
    return [one for one in profiled(analysis) if one.basis == basis and one.steps]


def _sampling(share: float, samples: int) -> float:
    """By how much a sampled share may be off."""
    return max(AGREEMENT.share, AGREEMENT.sigmas * math.sqrt(share * (1.0 - share) / samples))


def _error(values: list[float]) -> float:
    """The standard error of a mean."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def _shares(quantity: str, value: float, source: str, other: float, other_source: str) -> Disagreement:
    return Disagreement(quantity, "fraction", round(value, 4), source, round(other, 4), other_source)
