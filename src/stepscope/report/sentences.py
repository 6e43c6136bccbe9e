"""Sentences that more than one surface says, so that terminal and page never disagree. Plain text, not escaped."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from stepscope.model import Report
from stepscope.report import words


def ended(status: int | None) -> str | None:
    """How the command ended, where it did not end well. `status` is the shell's."""
    if not status:
        return None
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"the command ended with status {status}"
    return f"the command was ended by {name} (status {status})"


def warnings(report: Report) -> list[str]:
    """What a reader has to know before the first figure."""
    texts = [ended(report.run.get("exit_status"))]
    if report.steps and report.steps.get("low_confidence"):
        texts.append("few steady steps: take every figure below as a rough one")
    texts += [note["text"] for note in report.quality.get("notes", ()) if note["level"] == "warning"]
    return [text for text in texts if text]


def step_kind(steps: Mapping[str, Any]) -> str:
    """Statistics of a kind of step that is not the headline's."""
    return (
        f"{words.term(steps['kind'])}: {words.count(steps['count'])} steps, "
        f"{words.milliseconds(steps['mean_ms'])} a step "
        f"(median {words.number(steps['median_ms'])}, p95 {words.number(steps['p95_ms'])})"
    )


def of_ranks(steps: Mapping[str, Any]) -> str:
    """How many ranks the figures are means of, where they are several."""
    ranks = steps.get("ranks") or ()
    return f" of {len(ranks)} ranks" if len(ranks) > 1 else ""


def fixed_costs(costs: Mapping[str, Any]) -> str | None:
    """What the run paid once, or None where nothing was measured."""
    if costs.get("total_s") is None:
        return None
    # warm-up includes the first step
    warmup = ("first_step_s", "first step") if costs.get("warmup_s") is None else ("warmup_s", "warm-up")
    shown = (("before_first_step_s", "before the first step"), warmup, ("windows_s", "profiler windows"))
    parts = [f"{label} {words.seconds(costs[key])}" for key, label in shown if costs.get(key)]
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"Paid once: {words.seconds(costs['total_s'])}{detail}"


def healthy(floor_share: float | None) -> str:
    """What to say where no rule found a loss; `floor_share` is the smallest loss that would have been named."""
    limit = f" above {words.percent(floor_share)} of the step" if floor_share is not None else ""
    return f"Nothing worth fixing{limit}."


def cost(finding: Mapping[str, Any]) -> str:
    """What a finding costs."""
    return f"{words.milliseconds(finding['cost_ms_per_step'])} a step, {words.percent(finding['share'])}"


def gain(finding: Mapping[str, Any]) -> str:
    """The prediction where there is one, and the ceiling."""
    ceiling, expected = words.percent(finding["gain_ceiling"]), finding["expected_gain"]
    if not expected:
        return f"{ceiling} of the step at most"
    low, high = words.percent(expected["low"]), words.percent(expected["high"])
    return f"{low} to {high} of the step expected, {ceiling} at most"
