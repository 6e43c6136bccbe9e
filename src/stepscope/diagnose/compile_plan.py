"""All findings on compilers at once, because one loss may be told by one rule alone.

Order is strength: operators without lowering, the limit of versions, causes, a slow compilation, transfers, the run as
a whole, executions; graph breaks last, whose cost is known in part only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stepscope.diagnose import compile, compile_run, transfers
from stepscope.diagnose.compile_basis import TORCH, Basis, Claim, basis, settle
from stepscope.model import Analysis, Finding
from stepscope.model.compilers import CompilerFacts, CompilersView


def of_rule(name: str) -> Callable[[Analysis], list[Finding]]:
    """The judge of rule `name`: its part of all findings."""

    def judge(analysis: Analysis) -> list[Finding]:
        return [finding for finding in findings(analysis) if finding.rule == name]

    return judge


def findings(analysis: Analysis) -> tuple[Finding, ...]:
    """What all rules on compilers find in a run."""
    view = analysis.compilers
    return settle(_claims(view)) if view is not None else ()


def _claims(view: CompilersView) -> Iterator[tuple[Basis, Claim]]:
    for facts in view.backends:
        base = basis(view, facts)
        if base is not None:
            yield from ((base, claim) for claim in _of_backend(view, facts, base))


def _of_backend(view: CompilersView, facts: CompilerFacts, base: Basis) -> list[Claim]:
    told = list(transfers.unlowered_claims(view, facts, base))
    if facts.backend == TORCH:
        told += compile.cause_claims(view, base)
    told += compile_run.slow_claims(view, facts, base)
    told += transfers.transfer_claims(view, facts, base)
    breaks = list(compile.break_claims(view, base)) if facts.backend == TORCH else []
    spoken = [claim for claim in [*told, *breaks] if claim.spoken(base)]
    again, late = sum(claim.compile_ms for claim in spoken), sum(claim.late_ms for claim in spoken)
    told += compile_run.run_claims(view, facts, base, again, late)
    told += transfers.execution_claims(view, facts)
    return told + breaks
