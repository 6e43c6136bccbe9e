"""Compiling as a whole: too often per step, in storms, after a quiet time, or too much of the run; one slow compile.

Of a backend at most one of these speaks, and only for time that no cause explains.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from stepscope.diagnose.common import shown
from stepscope.diagnose.compile_basis import (
    AMORTISED,
    TORCH,
    XLA,
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
    spot,
    timed,
    total_ms,
    unclear,
)
from stepscope.diagnose.compile_words import because, clipped, grows, recompile_fix, what
from stepscope.diagnose.thresholds import COMPILE
from stepscope.model import Finding
from stepscope.model.compilers import CompilerCause, CompilerFacts, CompilersView, CompileStorm

FREQUENT_RULE = "compile.too_frequent"
STORM_RULE = "compile.storm"
LATE_RULE = "compile.late"
SHARE_RULE = "compile.share"
SLOW_RULE = "compile.slow"
LEARN = {
    TORCH: "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html",
    XLA: "https://docs.pytorch.org/xla/release/r2.8/perf/recompilation.html",
}
_READS = ("read_value", "item")


def slow_claims(view: CompilersView, facts: CompilerFacts, base: Basis) -> Iterator[Claim]:
    """One compilation above the bound: a first one, since those that came again are told by their cause."""
    slow = [each for each in causes(view, facts.backend, "compile") if (each.longest_ms or 0.0) > COMPILE.slow_ms]
    if slow:
        for cause in slow:
            yield _slow_claim(facts, base, cause, cause.longest_ms or 0.0)
        return
    again = max((each.longest_ms or 0.0 for each in recompiled(view, facts.backend)), default=0.0)
    if facts.longest_ms is not None and facts.longest_ms > max(COMPILE.slow_ms, again):
        yield _slow_claim(facts, base, None, facts.longest_ms)


def _slow_claim(facts: CompilerFacts, base: Basis, cause: CompilerCause | None, longest_ms: float) -> Claim:
    name = (
        f"{function_name(cause.function)}{at(spot(cause))}"
        if cause and cause.function
        else f"A graph of {facts.backend}"
    )
    finding = _draft(facts, base, SLOW_RULE, cause.id if cause else facts.backend, [cause] if cause else [])
    return Claim(
        replace(
            finding,
            title=f"{name} took {longest_ms / 1000:.0f} s to compile",
            evidence=(ms("longest compilation", longest_ms, cause.source if cause and cause.source else facts.source),),
            fix=_slow_fix(facts.backend),
            caveat=f"A cache helps from the second start on. {AMORTISED}",
            falsified_by="With the compiler's cache warm, a second run starts no faster",
        ),
        longest_ms,
        COMPILE.floor,
        late_ms=longest_ms if cause is None or late([cause]) else 0.0,
    )


def _slow_fix(backend: str) -> str:
    if backend == XLA:
        return (
            "Keep compiled graphs between runs (torch_xla.runtime.initialize_cache), and make the graph smaller: "
            "a Python loop over equal layers is unrolled, torch_xla.experimental.scan is not"
        )
    return (
        "Keep compiled code between runs (TORCHINDUCTOR_CACHE_DIR on a lasting disk), compile the repeated block "
        "instead of the whole model, and leave mode='max-autotune' out while trying"
    )


def run_claims(
    view: CompilersView, facts: CompilerFacts, base: Basis, explained_ms: float, late_ms: float
) -> Iterator[Claim]:
    """The strongest of the rules on all compilations whose loss is left unexplained.

    `explained_ms` is compile time other findings claim; `late_ms` what those claim of first compilations after warm-up.
    """
    storm = next((each for each in view.storms if each.backend == facts.backend), None)
    saveable = saveable_ms(view, facts)
    held = _held(view, facts, storm)
    for rule, title in held:
        after = rule in (LATE_RULE, SHARE_RULE)
        lost, known = (_late(view, facts, storm), explained_ms + late_ms) if after else (saveable, explained_ms)
        if lost is None or lost <= 0 or known >= COMPILE.explained * lost:
            continue
        left = lost - known
        if left < COMPILE.floor * base.loop_ms:
            continue
        others = [text for name, text in held if name != rule]
        worst = "critical"
        if rule == SHARE_RULE:
            worst = "warning" if left > COMPILE.share_warning * base.loop_ms else "info"
        yield Claim(_run_finding(view, facts, base, rule, title, others), left, COMPILE.floor, worst)
        return


def saveable_ms(view: CompilersView, facts: CompilerFacts) -> float | None:
    """Compile time that fixed inputs would save: all but the first version of each function.

    Where nothing tells a first from a later one, the longest is taken to be the one that stays.
    """
    again = recompiled(view, facts.backend)
    if facts.recompiles is not None and (timed(again) or not again):
        return total_ms(again)
    if facts.compile_ms is None:
        return None
    longest = facts.longest_ms if facts.longest_ms is not None else facts.compile_ms / max(1, facts.compiles)
    return max(0.0, facts.compile_ms - longest)


def _late(view: CompilersView, facts: CompilerFacts, storm: CompileStorm | None) -> float | None:
    if storm is not None and storm.late_ms is not None:
        return storm.late_ms
    known = [
        row.late_compile_ms for row in view.steps if row.backend == facts.backend and row.late_compile_ms is not None
    ]
    return sum(known) if known else None


def _held(view: CompilersView, facts: CompilerFacts, storm: CompileStorm | None) -> list[tuple[str, str]]:
    """(rule, what it says) of those that hold, strongest first."""
    held = []
    kind = f"{storm.kind} steps" if storm is not None and storm.kind not in (None, "train") else "steps"
    if storm is not None and storm.whole_run:
        held.append((FREQUENT_RULE, _article(view, facts, storm)))
    if storm is not None and storm.windows:
        since = f", first at step {storm.first_window_step}" if storm.first_window_step is not None else ""
        held.append(
            (
                STORM_RULE,
                f"Compiling goes on after warm-up: in {storm.windows} {kind} at least 3 of the last 10 had "
                f"compiled{since}",
            )
        )
    if storm is not None and storm.late_step is not None:
        held.append(
            (
                LATE_RULE,
                f"Step {storm.late_step} compiled after {storm.quiet_before or 'many'} {kind} without a compilation",
            )
        )
    if _late(view, facts, storm):
        share = storm.late_share if storm is not None else None
        much = f"{share:.0%} of the steps after warm-up" if share is not None else "time after warm-up"
        held.append((SHARE_RULE, f"Compiling took {much}"))
    return held


def _article(view: CompilersView, facts: CompilerFacts, storm: CompileStorm) -> str:
    """The line that users of torch_xla know."""
    known = (each for each in view.warnings if each.backend == facts.backend and each.rule == "too_frequent")
    line = next((each for each in known if each.metric == "CompileTime"), None)
    if line is not None:
        return clipped(line.text.removeprefix("pt-xla-profiler: "))
    return f"CompileTime too frequent: {storm.compiles} counts during {storm.steps} steps"


def _run_finding(
    view: CompilersView, facts: CompilerFacts, base: Basis, rule: str, title: str, others: list[str]
) -> Finding:
    again = recompiled(view, facts.backend) or causes(view, facts.backend, "compile")
    lead = sorted(again, key=lambda cause: (-(cause.total_ms or 0.0), -cause.count))
    finding = _draft(facts, base, rule, facts.backend, lead)
    evidence = [fact("compilations", facts.compiles, f"in {base.steps} {base.kind} steps", facts.source)]
    if facts.compile_ms is not None:
        evidence.append(ms("time of all compilations", facts.compile_ms, facts.source))
    if facts.longest_ms is not None:
        evidence.append(ms("longest compilation", facts.longest_ms, facts.source))
    evidence += [fact("also", text, "", facts.source) for text in others]
    for cause in lead[: COMPILE.places_shown]:
        if cause.cause and cause.count:
            place = spot(cause)
            where = f" at {shown(place)}" if place else ""
            evidence.append(
                fact(f"{_cause_words(cause)}{where}", cause.count, "compilations", cause.source or facts.source)
            )
    evidence.append(ms("mean step, compiling included", base.mean_ms, base.source))
    return replace(
        finding,
        title=title,
        evidence=tuple(evidence),
        fix=_run_fix(facts, lead),
        caveat=_run_caveat(facts, base, rule),
        falsified_by="With inputs of the same shapes and values in every step it compiles as often, or the mean step "
        "does not get shorter",
    )


def _cause_words(cause: CompilerCause) -> str:
    named = {
        "user_sync": "compiled at the step's own sync",
        "loader_sync": "compiled at the parallel loader's sync",
        "read_value": "compiled because a tensor's value was read",
        "dynamo": "compiled a graph of torch.compile",
        "unknown": f"the compiler says: {clipped(cause.text, 60)}" if cause.text else "cause unknown",
    }
    return named.get(cause.cause) or because(cause)


def _run_fix(facts: CompilerFacts, lead: list[CompilerCause]) -> str:
    if facts.backend != XLA:
        known = next((cause for cause in lead if cause.kind != "compile" and not unclear(cause)), None)
        if known is not None:
            return recompile_fix(known)
        return (
            "Find what differs between the calls: record a run with `stepscope run`, or set TORCH_LOGS=recompiles; "
            "then keep it equal, or torch.compile(..., dynamic=True) where it is a size"
        )
    growing = next((cause for cause in lead if grows(cause)), None)
    first = f"{what(growing)} grows: join it behind the loop. " if growing else ""
    often = COMPILE.part * sum(cause.count for cause in lead)
    reads = next((each.place for each in lead if each.cause in _READS and each.place and each.count > often), None)
    read = f" Read values (.item(), print) every N steps only, not at {shown(reads)} in each." if reads else ""
    return (
        f"{first}Give every step the same graph: pad inputs to fixed sizes, do not grow a tensor from step to step "
        f"(torch.cat, append and stack behind the loop, on the host), and keep Python branches equal.{read}"
    )


def _run_caveat(facts: CompilerFacts, base: Basis, rule: str) -> str:
    goes_on = rule in (FREQUENT_RULE, STORM_RULE)
    parts = ["Padding computes on values that are thrown away." if goes_on else AMORTISED]
    if facts.recompiles is None:
        parts.append("Nothing tells first compilations from later ones here: the longest is taken to be needed.")
    if base.estimated:
        parts.append("The length of a step is estimated from rates of the report.")
    return " ".join(parts)


def _draft(facts: CompilerFacts, base: Basis, rule: str, key: str, items: list[CompilerCause]) -> Finding:
    level = confidence(base, items[:1])
    if not items and level == "high":
        level = "medium"  # timed, but nothing names what changes
    return Finding(
        id=f"{rule}-{key}",
        rule=rule,
        category="compile",
        title="",
        severity="info",
        confidence=level,
        cost_ms_per_step=0.0,
        share=0.0,
        gain_ceiling=0.0,
        where=places(items),
        ranks=ranks(items) or facts.ranks,
        evidence=(),
        fix="",
        falsified_by="",
        learn=LEARN.get(facts.backend, ""),
    )
