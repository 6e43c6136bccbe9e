"""Recompilations of torch.compile by cause, the limit of versions, slow compilations and graph breaks.

Per function the strongest statement is made: it ran into its limit, it is close to it, or a cause compiled it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from stepscope.diagnose.common import lowest, shown
from stepscope.diagnose.compile_basis import (
    AMORTISED,
    TORCH,
    Basis,
    Claim,
    at,
    causes,
    confidence,
    fact,
    function_name,
    late,
    ms,
    places,
    ranks,
    recompiled,
    resumed_at,
    spot,
    timed,
    total_ms,
    unclear,
)
from stepscope.diagnose.compile_words import (
    because,
    break_fix,
    break_reason,
    changes,
    clipped,
    recompile_fix,
    what,
    without,
)
from stepscope.diagnose.thresholds import COMPILE
from stepscope.model import Evidence, Finding, Place
from stepscope.model.compilers import CompilerCause, CompilersView, EagerAfterLimit

LIMIT_RULE = "compile.limit_hit"
CLOSE_RULE = "compile.close_to_limit"
SAME_RULE = "compile.same_cause"
ONCE_RULE = "compile.recompiles"
BREAK_RULE = "compile.graph_break"
LEARN = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html"
LEARN_BREAKS = (
    "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.fullgraph_true.html"
)


def cause_claims(view: CompilersView, base: Basis) -> Iterator[Claim]:
    """Limits first, then functions close to it, then causes that compiled a function again."""
    functions: dict[object, list[CompilerCause]] = {}
    for cause in recompiled(view, TORCH):
        functions.setdefault(_function(cause), []).append(cause)
    rest = []
    for group in functions.values():
        limit = next((cause for cause in group if cause.kind == "limit_hit"), None)
        if limit is not None:
            yield from _limit_claim(view, base, limit, group)
        else:
            rest.append(group)
    single = []
    for group in rest:
        if timed(group) and _close(group):
            yield _close_claim(base, group)
        else:
            single += group
    for rule in (SAME_RULE, ONCE_RULE):
        for cause in single:
            if timed([cause]) and rule == (SAME_RULE if cause.count >= COMPILE.same_cause else ONCE_RULE):
                yield _cause_claim(base, cause, rule)


def _function(cause: CompilerCause) -> object:
    """The compiled function: its code begins in one place. Without any name a cause stands alone."""
    if cause.function is None and cause.definition is None:
        return cause.id
    begin = cause.definition
    return (cause.function, begin.file if begin else None, begin.line if begin else None)


def _close(group: Iterable[CompilerCause]) -> bool:
    return any(
        cause.cache_entries is not None and cause.limit and cause.cache_entries >= COMPILE.close * cause.limit
        for cause in group
    )


# --------------------------------------------------------------------------------------------------- the limit


def _limit_claim(view: CompilersView, base: Basis, limit: CompilerCause, group: list[CompilerCause]) -> Iterator[Claim]:
    eager = next((each for each in view.limits if each.cause == limit.id), None)
    excess = _excess_ms(eager)
    counted = excess if limit.id in _counted_limits(view) else 0.0
    if not timed(group) and excess is None:
        return
    lead = _lead(limit, group)
    name, place = function_name(limit.function or lead.function), spot(lead) or spot(limit)
    since = f"Since step {limit.first_step}" if limit.first_step is not None else "After its limit"
    versions = f"{limit.limit} compiled versions" if limit.limit else "compiled versions"
    title = f"{since}, inputs of {name}{at(place)} that match none of its {versions} run eagerly: {because(lead)}"
    finding = _draft(base, LIMIT_RULE, limit.id, [lead, *_others(lead, group)], title)
    yield Claim(
        replace(
            finding,
            confidence=lowest([finding.confidence, "medium" if counted else "high"]),
            evidence=(*_limit_evidence(limit, eager), *_evidence(base, [lead, *_others(lead, group)]), *_reason(limit)),
            fix=recompile_fix(lead),
            caveat=f"{_eager_caveat(excess, counted)} {AMORTISED}",
            falsified_by=f"{without(lead)}, {name} still runs into the limit, or the mean step does not get shorter",
        ),
        total_ms(group) + (counted or 0.0),
        0.0,
        compile_ms=total_ms(group),
    )


def _lead(limit: CompilerCause, group: list[CompilerCause]) -> CompilerCause:
    """What filled the versions: the recompilations of the limit's own cause, else the most frequent ones."""
    same = [cause for cause in group if cause is not limit and _same(cause, limit)]
    others = [cause for cause in group if cause.kind == "recompile"]
    if same:
        return max(same, key=lambda cause: cause.count)
    if unclear(limit) and others:
        return max(others, key=lambda cause: cause.count)
    return limit


def _same(cause: CompilerCause, limit: CompilerCause) -> bool:
    return cause.kind == "recompile" and (cause.cause, cause.subject) == (limit.cause, limit.subject)


def _others(lead: CompilerCause, group: list[CompilerCause]) -> list[CompilerCause]:
    return [cause for cause in group if cause is not lead and cause.kind == "recompile"]


def _excess_ms(eager: EagerAfterLimit | None) -> float | None:
    """What the steps after the limit take more, in sum; None where that was not measured."""
    if eager is None or eager.before_ms is None or eager.after_ms is None:
        return None
    more = eager.after_ms - eager.before_ms
    if more <= 0 and eager.before_compiling:
        return None  # what is left of a compiling step holds more than its own work
    return more * eager.after_steps if more >= COMPILE.eager * eager.before_ms else 0.0


def _counted_limits(view: CompilersView) -> set[str]:
    """Limits whose eager steps count: of several in the same kind of steps one, or the same steps would count twice."""
    kinds = {cause.id: cause.kinds for cause in view.causes}
    largest: dict[tuple[str, ...], tuple[float, str]] = {}
    for each in view.limits:
        kind, excess = kinds.get(each.cause, ()), _excess_ms(each)
        if excess is not None and excess > largest.get(kind, (-1.0, ""))[0]:
            largest[kind] = (excess, each.cause)
    return {cause for _, cause in largest.values()}


def _eager_caveat(excess: float | None, counted: float | None) -> str:
    if excess is None:
        return "What running eagerly costs was not measured: too few steps that did not compile."
    if excess and not counted:
        return "What running eagerly costs is counted with another function that ran into its limit."
    return "What running eagerly costs is the difference of two medians: other changes at that step count in."


def _limit_evidence(limit: CompilerCause, eager: EagerAfterLimit | None) -> Iterator[Evidence]:
    if limit.limit is not None:
        yield fact("compiled versions at most", limit.limit, "", limit.source or TORCH)
    if limit.first_step is not None:
        yield fact("step of the limit", limit.first_step, "", limit.source or TORCH)
    if eager is not None and _excess_ms(eager) is not None:
        before, after = f"steps.jsonl, {eager.before_steps} steps", f"steps.jsonl, {eager.after_steps} steps"
        yield ms("median step before the limit, compiling left out", eager.before_ms or 0.0, before)
        yield ms("median step after the limit", eager.after_ms or 0.0, after)


def _reason(limit: CompilerCause) -> Iterator[Evidence]:
    if limit.text:
        yield fact("the compiler's reason", clipped(limit.text), "", limit.source or TORCH)


# ------------------------------------------------------------------------------------------- below the limit


def _close_claim(base: Basis, group: list[CompilerCause]) -> Claim:
    lead = max(group, key=lambda cause: (cause.count, cause.total_ms or 0.0))
    full = max(group, key=lambda cause: (cause.cache_entries or 0) / (cause.limit or 1))
    name = function_name(lead.function)
    title = (
        f"{name}{at(spot(lead))} has {full.cache_entries} of {full.limit} compiled versions, and runs eagerly beyond: "
        f"{because(lead)}"
    )
    ordered = [lead, *_others(lead, group)]
    finding = _draft(base, CLOSE_RULE, lead.id, ordered, title)
    versions = fact("compiled versions", full.cache_entries, f"of {full.limit}", full.source or TORCH)
    return Claim(
        replace(
            finding,
            evidence=(versions, *_evidence(base, ordered)),
            fix=recompile_fix(lead),
            caveat=AMORTISED,
            falsified_by=f"{without(lead)}, {name} is still compiled as often, or the mean step does not get shorter",
        ),
        total_ms(group),
        COMPILE.floor,
        compile_ms=total_ms(group),
    )


def _cause_claim(base: Basis, cause: CompilerCause, rule: str) -> Claim:
    name = function_name(cause.function)
    times = "once" if cause.count == 1 else f"{cause.count} times"
    evaluation = " in evaluation" if cause.kinds == ("eval",) else ""
    title = f"{name}{at(spot(cause))} was compiled again {times}{evaluation}: {because(cause)}"
    finding = _draft(base, rule, cause.id, [cause], title)
    return Claim(
        replace(
            finding,
            evidence=tuple(_evidence(base, [cause])),
            fix=recompile_fix(cause),
            caveat=AMORTISED,
            falsified_by=f"{without(cause)}, {name} is still compiled as often, or the mean step does not get shorter",
        ),
        total_ms([cause]),
        COMPILE.floor,
        worst="critical" if rule == SAME_RULE else "warning",
        compile_ms=total_ms([cause]),
    )


# ------------------------------------------------------------------------------------------------ graph breaks


def break_claims(view: CompilersView, base: Basis) -> Iterator[Claim]:
    """Breaks that cost more than the floor, each; the others of the steps together."""
    small: list[tuple[CompilerCause, list[CompilerCause]]] = []
    compiled = causes(view, TORCH, "compile")
    for cause in causes(view, TORCH, "graph_break"):
        behind = [each for each in compiled if _behind(each, cause)]
        if not cause.step_count or not timed(behind):
            continue
        if total_ms(behind) >= COMPILE.floor * base.loop_ms:
            yield _break_claim(base, [(cause, behind)])
        else:
            small.append((cause, behind))
    if small:
        yield _break_claim(base, sorted(small, key=lambda pair: -total_ms(pair[1])))


def _behind(compiled: CompilerCause, broken: CompilerCause) -> bool:
    """Whether this is the function that goes on behind the break."""
    resumed, place = resumed_at(compiled.function), broken.place
    if resumed is None or place is None or resumed[1] != place.line:
        return False
    same_file = compiled.definition is None or compiled.definition.file == place.file
    return same_file and (broken.function is None or resumed[0] == function_name(broken.function))


def _break_claim(base: Basis, pairs: list[tuple[CompilerCause, list[CompilerCause]]]) -> Claim:
    broken, behind = [cause for cause, _ in pairs], {each.id: each for _, compiled in pairs for each in compiled}
    first = broken[0]
    reason = break_reason(first)
    if len(pairs) == 1:
        title = f"The graph of {function_name(first.function)} breaks{at(first.place)}: {reason}"
    else:
        title = (
            f"Graphs break at {len(pairs)} lines of the step, {shown(first.place or Place('?', None))} first: {reason}"
        )
    key = first.id if len(pairs) == 1 else f"several-{first.id}"
    finding = _draft(base, BREAK_RULE, key, broken, title)
    evidence = []
    for cause, compiled in pairs[: COMPILE.places_shown]:
        where = shown(cause.place) if cause.place else "an unknown line"
        evidence.append(fact(f"graph breaks at {where}", cause.count, "", cause.source or TORCH))
        if cause.text:
            evidence.append(fact(f"reason at {where}", clipped(cause.text), "", cause.source or TORCH))
        evidence.append(ms(f"compiling what follows {where}", total_ms(compiled), compiled[0].source or TORCH))
    return Claim(
        replace(
            finding,
            confidence="low",
            evidence=tuple(evidence),
            fix="; ".join(dict.fromkeys(break_fix(cause) for cause in broken[:3])),
            caveat="The cost is the time to compile what follows the break, part of which one whole graph would need "
            "too. What the break costs in each step (a smaller graph, a way through Python) was not measured. "
            f"{AMORTISED}",
            learn=LEARN_BREAKS,
            falsified_by="With torch.compile(..., fullgraph=True), which allows no break, the mean step does not get "
            "shorter",
        ),
        total_ms(behind.values()),
        0.0,
        worst="warning",
        late_ms=total_ms(late(behind.values())),
    )


# ------------------------------------------------------------------------------------------------------ common


def _evidence(base: Basis, items: list[CompilerCause]) -> Iterator[Evidence]:
    """How often and how long each cause compiled, and what changed."""
    for cause in items[: COMPILE.places_shown]:
        if cause.kind != "recompile":
            if cause.total_ms is not None:
                yield ms("failed compilations", cause.total_ms, cause.source or TORCH)
            continue
        name, source = f"recompilations by {what(cause)}", cause.source or TORCH
        seen = changes(cause.changes)
        if seen:
            yield fact(f"{what(cause)} changed from", seen, "", source)
        yield fact(name, cause.count, "", source)
        if cause.total_ms is not None:
            yield ms(f"time of {name}", cause.total_ms, source)
        if not seen and cause.text:
            yield fact("the compiler's reason", clipped(cause.text), "", source)
    yield fact(f"{'training' if base.kind == 'train' else 'evaluation'} steps", base.steps, "", base.source)


def _draft(base: Basis, rule: str, key: str, items: list[CompilerCause], title: str) -> Finding:
    """A finding without figures; its id holds the cause's, which is stable over runs of the same code."""
    return Finding(
        id=f"{rule}-{key}",
        rule=rule,
        category="compile",
        title=title,
        severity="info",
        confidence=confidence(base, items[:1]),
        cost_ms_per_step=0.0,
        share=0.0,
        gain_ceiling=0.0,
        where=places(items),
        ranks=ranks(items),
        evidence=(),
        fix="",
        falsified_by="",
        learn=LEARN,
    )
