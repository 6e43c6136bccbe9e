"""The table of risks: what may slow down or end a run later, and costs nothing that could be measured yet.

A risk is no finding: it has no cost, no share and no rank among the losses. A rule here is judged as those of
`rules.RULES` are: it names its inputs, and abstains by name without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from stepscope.diagnose import memory
from stepscope.diagnose.rules import ON_DEVICE, Need
from stepscope.model import SEVERITIES, Abstention, Analysis, Finding, Risk


class RiskRule(Struct, frozen=True):
    """`judge` is only called when every need is present, with the findings of the same run."""

    name: str
    needs: tuple[Need, ...]
    judge: Callable[[Analysis, Sequence[Finding]], list[Risk]]


GROWTH_SEEN = Need(
    "ten readings of memory between training steps, or a trace with allocations over three of them",
    lambda a: a.memory_losses is not None and (a.memory_losses.logged or a.memory_losses.traced),
)
PEAKS = Need(
    "readings of the device's memory in the journal, or a trace or snapshot that tells its peak",
    lambda a: a.memory_losses is not None and bool(a.memory_losses.peaks),
)
DEVICE = Need("training on a device", lambda a: ON_DEVICE.present(a) or PEAKS.present(a), quiet=True)

RISKS: tuple[RiskRule, ...] = (
    RiskRule(memory.GROWTH_RULE, (GROWTH_SEEN,), memory.growth),
    RiskRule(memory.NEAR_RULE, (DEVICE, PEAKS), memory.near_limit),
    RiskRule(memory.FRAGMENTED_RULE, (DEVICE, PEAKS), memory.fragmentation),
)


def assess(
    analysis: Analysis, findings: Sequence[Finding], ignored: Mapping[str, str]
) -> tuple[tuple[Risk, ...], tuple[Abstention, ...]]:
    """(risks, the most urgent first; rules that lacked inputs)."""
    found: dict[str, Risk] = {}
    abstained: list[Abstention] = []
    for rule in RISKS:
        if rule.name in ignored:
            continue
        missing = [need for need in rule.needs if not need.present(analysis)]
        if missing:
            needs = " and ".join(need.name for need in missing)
            abstained.append(Abstention(rule.name, needs, quiet=any(need.quiet for need in missing)))
            continue
        for risk in rule.judge(analysis, findings):
            found.setdefault(risk.id, risk)
    ordered = sorted(found.values(), key=lambda risk: SEVERITIES.index(risk.severity))  # else in the order of rules
    return tuple(ordered), tuple(abstained)
