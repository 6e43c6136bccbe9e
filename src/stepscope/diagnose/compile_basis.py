"""What the rules on compilers share: the steps their costs are spread over, and claims on lost time.

A rule makes a `Claim`: a finding without figures, and the time it says was lost. `settle` turns claims into findings,
strongest first; time is handed out once, so that one loss never speaks twice and shares stay within the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.common import ALL, lowest, severity, shown
from stepscope.diagnose.thresholds import COMPILE
from stepscope.model import SEVERITIES, Evidence, Finding, Place
from stepscope.model.compilers import CompilerCause, CompilerFacts, CompilersView

TORCH = "torch.compile"
XLA = "torch_xla"
SOURCE_SHOWN = 120  # characters
NAME_SHOWN = 80
SHORTEST_MS = 1e-6  # a nanosecond, the unit of clocks: less is no time
AMORTISED = "Compiling is paid once per version: of a longer run it takes a smaller share."
_RESUMED = re.compile(r"(?:torch_dynamo_)?resume_in_(.{1,200})_at_(\d{1,9})$")


class Basis(Struct, frozen=True):
    """The steps of a backend. `steps` is the number of the main kind.

    `loop_ms` is the wall time of all kinds. It adds what recompiling took between steps, so that time lost is never
    more than time spent, and leaves out what the first versions took in the first steps: that is paid once, and a
    longer run gains by the rest.
    """

    steps: int
    kind: str
    loop_ms: float
    estimated: bool
    source: str

    @property
    def mean_ms(self) -> float:
        """The run's mean step: its wall time by the steps of the main kind."""
        return self.loop_ms / self.steps


class Claim(Struct, frozen=True):
    """A finding to be. `lost_ms` is of the whole run, `floor` the share below which it is not worth a word.

    `compile_ms` is what of it are compilations that came again, `late_ms` first ones after warm-up: time that no rule
    on the run as a whole may tell again. `worst` bounds the severity.
    """

    finding: Finding
    lost_ms: float
    floor: float
    worst: str = "critical"
    compile_ms: float = 0.0
    late_ms: float = 0.0

    def spoken(self, base: Basis) -> bool:
        """Whether it is worth a finding."""
        return self.lost_ms > 0 and self.lost_ms >= self.floor * base.loop_ms


def basis(view: CompilersView, facts: CompilerFacts) -> Basis | None:
    """What costs of `facts.backend` are spread over; None where nothing told how long steps take."""
    rows = [row for row in view.steps if row.backend == facts.backend and row.steps > 0]
    timed = [row for row in rows if (row.wall_ms or 0.0) >= SHORTEST_MS]
    between = sum(
        max(0.0, cause.total_ms - cause.in_main_steps_ms)
        for cause in recompiled(view, facts.backend)
        if cause.total_ms is not None and cause.in_main_steps_ms is not None
    )
    if timed:
        main = next((row for row in timed if row.kind == "train"), timed[0])
        wall = sum(row.wall_ms or 0.0 for row in timed)
        estimated = any(row.estimated for row in timed)
        source = "rates of the torch_xla report" if estimated else "wall time of all steps"
        first = causes(view, facts.backend, "compile")
        once = sum(cause.in_main_steps_ms or 0.0 for cause in first if cause not in late(first))
        lost = total_ms(recompiled(view, facts.backend))
        return Basis(main.steps, main.kind, max(wall - once, lost - between, SHORTEST_MS) + between, estimated, source)
    if (facts.step_estimate_ms or 0.0) >= SHORTEST_MS and facts.marked_steps:
        wall = (facts.step_estimate_ms or 0.0) * facts.marked_steps
        return Basis(facts.marked_steps, "train", wall, True, "rates of the torch_xla report")
    return None


def causes(view: CompilersView, backend: str, *kinds: str) -> list[CompilerCause]:
    """Causes of these kinds, in the view's order."""
    return [cause for cause in view.causes if cause.backend == backend and cause.kind in kinds]


def recompiled(view: CompilersView, backend: str) -> list[CompilerCause]:
    """What a cure would save: every version of a function but its first."""
    return causes(view, backend, "recompile", "limit_hit")


def total_ms(items: Iterable[CompilerCause]) -> float:
    """Their time; what was not timed adds nothing."""
    return sum(cause.total_ms or 0.0 for cause in items)


def unclear(cause: CompilerCause) -> bool:
    """Whether nobody knows why it compiled again: not told, or in words that are new."""
    return cause.cause in ("unknown", "unexplained") or (not cause.cause and cause.kind in ("recompile", "limit_hit"))


def late(items: Iterable[CompilerCause]) -> list[CompilerCause]:
    """Those that began after warm-up, or may have."""
    return [cause for cause in items if cause.first_step is None or cause.first_step >= COMPILE.few_steps]


def timed(items: Iterable[CompilerCause]) -> bool:
    """Whether any of them was timed: without, there is no cost and no finding."""
    return any(cause.total_ms is not None for cause in items)


def function_name(name: str | None) -> str:
    """`forward`, also of the part of it that goes on behind a graph break."""
    match = _RESUMED.search(name or "")
    whole = match.group(1) if match else name or "a function"
    return whole.rsplit(".", 1)[-1][:NAME_SHOWN]


def resumed_at(name: str | None) -> tuple[str, int] | None:
    """Of the function behind a graph break: the function it goes on with, and the line of the break."""
    match = _RESUMED.search(name or "")
    return (match.group(1).rsplit(".", 1)[-1], int(match.group(2))) if match else None


def spot(cause: CompilerCause) -> Place | None:
    """The nearest line of the user's: the cause, else the call, else where the function begins."""
    return cause.place or cause.call or cause.definition


def places(items: Iterable[CompilerCause]) -> tuple[Place, ...]:
    """Lines of causes, each once, in their order; behind them where their functions are called and begin."""
    items = list(items)
    found: dict[tuple[str, int | None], Place] = {}
    for pick in ("place", "call", "definition"):
        for cause in items:
            place: Place | None = getattr(cause, pick)
            if place is not None:
                found.setdefault((place.file, place.line), replace(place, share=None))
    return tuple(found.values())[: COMPILE.places_shown]


def at(place: Place | None) -> str:
    """` (train.py:18)`, or nothing."""
    return f" ({shown(place)})" if place else ""


def ranks(items: Iterable[CompilerCause]) -> tuple[int, ...]:
    """All ranks of these causes."""
    return tuple(sorted({rank for cause in items for rank in cause.ranks}))


def confidence(base: Basis, items: Iterable[CompilerCause]) -> str:
    """Measured times are exact; rates are not, few steps exaggerate, and an unknown cause is half a finding."""
    levels = ["high"]
    if base.estimated:
        levels.append("medium")
    if base.steps < COMPILE.few_steps:
        levels.append("medium")
    if any(unclear(cause) for cause in items):
        levels.append("low")
    return lowest(levels)


def ms(metric: str, value: float, source: str) -> Evidence:
    """A time."""
    return fact(metric, round(value, 3), "ms", source)


def fact(metric: str, value: object, unit: str, source: str) -> Evidence:
    """A figure, with the first of its sources where they are many."""
    parts = list(dict.fromkeys(source.split("; ")))
    text = "; ".join(parts)
    return Evidence(metric, value, unit, text if len(text) <= SOURCE_SHOWN else f"{parts[0][:SOURCE_SHOWN]} and others")


def settle(claims: Iterable[tuple[Basis, Claim]]) -> tuple[Finding, ...]:
    """Findings of the claims, in their order. A claim gets the time that those before it left."""
    left, found = 1.0, []
    for base, claim in claims:
        share = max(0.0, min(left, claim.lost_ms / base.loop_ms)) if base.loop_ms > 0 else 0.0
        if claim.lost_ms <= 0 or share <= 0 or share < claim.floor:
            continue
        left -= share
        level = severity(share)
        if SEVERITIES.index(level) < SEVERITIES.index(claim.worst):
            level = claim.worst
        found.append(
            replace(
                claim.finding,
                severity=level,
                cost_ms_per_step=share * base.mean_ms,
                share=share,
                gain_ceiling=share,
                basis=ALL,
                step_ms=base.mean_ms,
                evidence=(
                    ms(f"mean of all {base.steps} {base.kind} steps", base.mean_ms, base.source),
                    *claim.finding.evidence,
                ),
            )
        )
    return tuple(found)
