"""What compilers take of the run as a whole, what compiled steps read from the device, and all claims on compilers.

Of compiling (too often per step, in storms, after a quiet time, too much of the run, one slow compile) at most one rule
of a backend speaks, and only for time that no cause explains. Transfers, operators that run on the host instead, and
executions that take too long follow. The rules stand at the end: one loss is told by one rule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from stepscope.diagnose import compile
from stepscope.diagnose.compile import (
    AMORTISED,
    BREAK_RULE,
    CLOSE_RULE,
    COMPILE,
    LIMIT_RULE,
    ONCE_RULE,
    SAME_RULE,
    TORCH,
    XLA,
    Basis,
    Loss,
    at,
    basis,
    because,
    causes,
    clipped,
    confidence,
    fact,
    function_name,
    grows,
    late,
    places,
    ranks,
    recompile_fix,
    recompiled,
    settle,
    spot,
    timed,
    total_ms,
    unclear,
    what,
)
from stepscope.diagnose.rule import REPORT_FLOOR, Claim, Need, Rule, Thresholds, ms, rule, shown
from stepscope.model import Analysis, Evidence
from stepscope.model.compilers import CompilerCause, CompilerFacts, CompilerMetric, CompilersView, CompileStorm


class Transfers(Thresholds, frozen=True):
    """When values read from the device count. They are ranked by their time: many cheap ones are no finding."""

    floor: float = REPORT_FLOOR
    per_step: float = 0.5  # over the whole run; torch_xla's debug profiler warns above it
    late_per_step: float = 1.0  # after warm-up: one logged loss per step is usual; chosen, untuned
    warmup_steps: int = 10  # torch_xla's own, of compilations


class Unlowered(Thresholds, frozen=True):
    """When operators that run on the host count. Any that the steps keep using: what they cost is only partly timed."""

    per_step: float = 0.1  # calls; below it an operator belongs to the preparations; chosen, untuned
    operators_shown: int = 5


class Execution(Thresholds, frozen=True):
    """When one execution of a compiled graph takes too long."""

    floor: float = REPORT_FLOOR
    slow_ms: float = 30_000  # torch_xla's debug profiler warns above it


TRANSFERS = Transfers()
UNLOWERED = Unlowered()
EXECUTION = Execution()

FREQUENT_RULE = "compile.too_frequent"
STORM_RULE = "compile.storm"
LATE_RULE = "compile.late"
SHARE_RULE = "compile.share"
SLOW_RULE = "compile.slow"
LEARN_TORCH = (
    "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html"
)
LEARN_XLA = "https://docs.pytorch.org/xla/release/r2.8/perf/recompilation.html"
_READS = ("read_value", "item")


def slow_losses(view: CompilersView, facts: CompilerFacts, base: Basis) -> Iterator[Loss]:
    """One compilation above the bound: a first one, since those that came again are told by their cause."""
    slow = [each for each in causes(view, facts.backend, "compile") if (each.longest_ms or 0.0) > COMPILE.slow_ms]
    if slow:
        for cause in slow:
            yield _slow_loss(facts, base, cause, cause.longest_ms or 0.0)
        return
    again = max((each.longest_ms or 0.0 for each in recompiled(view, facts.backend)), default=0.0)
    if facts.longest_ms is not None and facts.longest_ms > max(COMPILE.slow_ms, again):
        yield _slow_loss(facts, base, None, facts.longest_ms)


def _slow_loss(facts: CompilerFacts, base: Basis, cause: CompilerCause | None, longest_ms: float) -> Loss:
    name = (
        f"{function_name(cause.function)}{at(spot(cause))}"
        if cause and cause.function
        else f"A graph of {facts.backend}"
    )
    items = [cause] if cause else []
    claim = Claim(
        title=f"{name} took {longest_ms / 1000:.0f} s to compile",
        cost_ms=0.0,
        key=cause.id if cause else facts.backend,
        levels=(_run_confidence(base, items),),
        where=places(items),
        ranks=ranks(items) or facts.ranks,
        evidence=(ms("longest compilation", longest_ms, cause.source if cause and cause.source else facts.source),),
        fix=_slow_fix(facts.backend),
        caveat=f"A cache helps from the second start on. {AMORTISED}",
        falsified_by="With the compiler's cache warm, a second run starts no faster",
        learn=_learn(facts),
    )
    late_ms = longest_ms if cause is None or late([cause]) else 0.0
    return Loss(SLOW_RULE, claim, longest_ms, COMPILE.floor, late_ms=late_ms)


def _run_confidence(base: Basis, items: list[CompilerCause]) -> str:
    level = confidence(base, items[:1])
    return level if items or level != "high" else "medium"  # timed, but nothing names what changes


def _learn(facts: CompilerFacts) -> str:
    return LEARN_XLA if facts.backend == XLA else LEARN_TORCH


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


def run_losses(
    view: CompilersView, facts: CompilerFacts, base: Basis, explained_ms: float, late_ms: float
) -> Iterator[Loss]:
    """The strongest of the rules on all compilations whose loss is left unexplained.

    `explained_ms` is compile time other findings claim; `late_ms` what those claim of first compilations after warm-up.
    """
    storm = next((each for each in view.storms if each.backend == facts.backend), None)
    saveable = saveable_ms(view, facts)
    held = _held(view, facts, storm)
    for name, title in held:
        after = name in (LATE_RULE, SHARE_RULE)
        lost, known = (_late(view, facts, storm), explained_ms + late_ms) if after else (saveable, explained_ms)
        if lost is None or lost <= 0 or known >= COMPILE.explained * lost:
            continue
        left = lost - known
        if left < COMPILE.floor * base.loop_ms:
            continue
        others = [text for other, text in held if other != name]
        worst = "critical"
        if name == SHARE_RULE:
            worst = "warning" if left > COMPILE.share_warning * base.loop_ms else "info"
        yield Loss(name, _run_claim(view, facts, base, name, title, others, worst), left, COMPILE.floor)
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


def _run_claim(
    view: CompilersView, facts: CompilerFacts, base: Basis, name: str, title: str, others: list[str], worst: str
) -> Claim:
    again = recompiled(view, facts.backend) or causes(view, facts.backend, "compile")
    lead = sorted(again, key=lambda cause: (-(cause.total_ms or 0.0), -cause.count))
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
    return Claim(
        title=title,
        cost_ms=0.0,
        key=facts.backend,
        levels=(_run_confidence(base, lead),),
        worst=worst,
        where=places(lead),
        ranks=ranks(lead) or facts.ranks,
        evidence=evidence,
        fix=_run_fix(facts, lead),
        caveat=_run_caveat(facts, base, name),
        falsified_by="With inputs of the same shapes and values in every step it compiles as often, or the mean step "
        "does not get shorter",
        learn=_learn(facts),
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


def _run_caveat(facts: CompilerFacts, base: Basis, name: str) -> str:
    goes_on = name in (FREQUENT_RULE, STORM_RULE)
    parts = ["Padding computes on values that are thrown away." if goes_on else AMORTISED]
    if facts.recompiles is None:
        parts.append("Nothing tells first compilations from later ones here: the longest is taken to be needed.")
    if base.estimated:
        parts.append("The length of a step is estimated from rates of the report.")
    return " ".join(parts)


TRANSFER_RULE = "transfer.device_to_host"
UNLOWERED_RULE = "compile.unlowered"
EXECUTION_RULE = "compute.execution_slow"
LEARN_TRANSFERS = "https://docs.pytorch.org/xla/master/learn/xla-advanced.html"
LEARN_LOWERING = "https://docs.pytorch.org/xla/release/r2.8/contribute/op_lowering.html"
LEARN_SHAPES = "https://docs.pytorch.org/xla/release/r2.8/learn/dynamic_shape.html"
LEARN_BREAKS = (
    "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.fullgraph_true.html"
)
LEARN_EXECUTION = "https://docs.pytorch.org/xla/release/r2.7/learn/troubleshoot.html"
GPU = "cuda"  # backend of the copies to the host that a trace holds
READ_ITEM = "aten::_local_scalar_dense"
_FROM_DEVICE = ("TransferFromDeviceTime", "TransferFromServerTime")
_EXECUTE = ("ExecuteTime", "ExecuteReplicatedTime", "ExecuteChainedTime")
_DATA_DEPENDENT = "data_dependent_shape"


class Reads(Struct, frozen=True):
    """Device-to-host transfers of a backend. `fallback_ms` and `fallback_count` are what operators on the host need."""

    ms: float | None
    count: int
    late_per_step: float | None
    fallback_ms: float
    fallback_count: int
    source: str


def reads(view: CompilersView, facts: CompilerFacts, base: Basis) -> Reads:
    """Their time: of the causes where these have one, else of the report's metric."""
    found = causes(view, facts.backend, "transfer")
    metrics = [each for each in view.metrics if each.name in _FROM_DEVICE and each.unit == "ms"]
    spent: float | None = None
    source = facts.source
    if any(cause.total_ms is not None for cause in found):
        spent = total_ms(found)
    elif metrics and facts.backend == XLA:
        spent, source = sum(each.total for each in metrics), f"metric {metrics[0].name}, {facts.source}"
    count = facts.transfers if facts.transfers is not None else sum(cause.count for cause in found)
    if facts.backend == XLA:
        count = max(count, sum(each.samples or 0 for each in metrics))
    forced = min(count, _forced(view, facts, base, count))
    part = forced / count if count else 0.0
    return Reads(spent, count, _late_per_step(view), (spent or 0.0) * part, forced, source)


def _forced(view: CompilersView, facts: CompilerFacts, base: Basis, count: int) -> int:
    """Transfers that operators on the host need: one per call, as far as reading values leaves any."""
    calls = sum(cause.count for cause in unlowered(view, facts, base))
    items = sum(cause.count for cause in causes(view, facts.backend, "transfer") if cause.operator == READ_ITEM)
    if not calls:
        return 0
    return max(0, count - items) if items <= count else round(count * calls / (calls + items))


def _late_per_step(view: CompilersView) -> float | None:
    """In steps after warm-up, among those in which anything happened; None where none is known."""
    late = [point.transfers for point in view.points if point.step >= TRANSFERS.warmup_steps]
    return sum(late) / len(late) if late else None


# --------------------------------------------------------------------------------------------------- transfers


def transfer_losses(view: CompilersView, facts: CompilerFacts, base: Basis) -> Iterator[Loss]:
    """Values that the script reads in the steps; ranked by time, so that cheap ones are no finding.

    Of GPUs `sync.host_waits` speaks: there the time of a read is mostly the device's own work, and no loss.
    """
    if facts.backend == GPU:
        return
    seen = reads(view, facts, base)
    own, count = (seen.ms or 0.0) - seen.fallback_ms, seen.count - seen.fallback_count
    rate = count / base.steps
    often = rate > TRANSFERS.per_step or (seen.late_per_step or 0.0) > TRANSFERS.late_per_step
    if seen.ms is None or not often:
        return
    items = sorted(causes(view, facts.backend, "transfer"), key=lambda each: (-(each.total_ms or 0.0), -each.count))
    lines = [cause for cause in items if cause.place is not None]
    first = lines[0].place if lines else None
    by_item = any(cause.operator == READ_ITEM or cause.cause == "item" for cause in items)
    how = ".item(), .tolist(), print or bool() of a tensor" if by_item or not items else "reading a tensor's value"
    evidence = [
        fact("transfers from the device per step", round(rate, 2), "transfers", facts.source),
        ms("time of these transfers", own, seen.source),
    ]
    if seen.late_per_step is not None:
        text = "transfers per step after warm-up, of steps with any event"
        evidence.append(fact(text, round(seen.late_per_step, 2), "transfers", facts.source))
    for cause in lines[:3]:
        line = f"transfers at {shown(cause.place)}" if cause.place is not None else ""
        evidence.append(fact(line, cause.count, "transfers", cause.source or facts.source))
    evidence.append(ms("mean step", base.mean_ms, base.source))
    where = f" at {shown(first)}" if first else ""
    later = (
        "or read it in torch_xla's step closure (xm.add_step_closure)"
        if facts.backend == XLA
        else "or copy it non_blocking"
    )
    claim = Claim(
        title=f"Every step waits for values from the device: {rate:.1f} transfers per step{where}",
        cost_ms=0.0,
        key=lines[0].id if lines else (items[0].id if items else facts.backend),
        levels=(confidence(base, []), *(() if lines else ("medium",))),
        where=places(lines),
        ranks=ranks(items) or facts.ranks,
        evidence=evidence,
        fix=f"Read values only every N steps ({how}){where}: add them up in a tensor on the device and read that, "
        f"{later}",
        caveat="A transfer also waits for the computation it needs, and the first one for its compilation: that part "
        "stays when the values are read later.",
        falsified_by="With values read every 100 steps only, the mean step does not get shorter",
    )
    yield Loss(TRANSFER_RULE, claim, own, TRANSFERS.floor)


# --------------------------------------------------------------------------------------------------- operators


def unlowered(view: CompilersView, facts: CompilerFacts, base: Basis) -> list[CompilerCause]:
    """Operators without lowering that the steps keep using."""
    found = [cause for cause in causes(view, facts.backend, "fallback") if cause.operator != READ_ITEM]
    calls = sum(cause.count for cause in found)
    return found if calls >= UNLOWERED.per_step * base.steps else []


def unlowered_losses(view: CompilersView, facts: CompilerFacts, base: Basis) -> Iterator[Loss]:
    """Operators that lack a lowering, and those whose results have no fixed size."""
    found = unlowered(view, facts, base)
    calls = sum(cause.count for cause in found)
    if not calls:
        return
    seen = reads(view, facts, base)
    compiled = _compile_ms(view, facts, found)
    for dependent in (False, True):
        group = [cause for cause in found if (cause.cause == _DATA_DEPENDENT) is dependent]
        group.sort(key=lambda cause: (-cause.count, cause.operator or ""))
        part = sum(cause.count for cause in group) / calls
        if group:
            yield _unlowered_loss(view, facts, base, group, seen, compiled * part, part)


def _compile_ms(view: CompilersView, facts: CompilerFacts, found: list[CompilerCause]) -> float:
    """Compile time that these operators caused: graphs cut at their line, and where no line is known, at any.

    Never more than what a run without them would save.
    """
    at_most = saveable_ms(view, facts) or 0.0
    lines = {(cause.place.file, cause.place.line) for cause in found if cause.place}
    compiled = causes(view, facts.backend, "compile", "recompile")
    named = [cause for cause in compiled if cause.cause not in ("", "unknown")]
    if named and sum(cause.count for cause in named) > 0:
        cut = [cause for cause in named if cause.cause == "read_value" and _fits(cause, lines)]
        if all(cause.total_ms is None for cause in named):  # a log names causes, a report beside it their time
            every = sum(cause.count for cause in named)
            counted = sum(cause.count for cause in cut)
            return at_most if counted >= every - 1 else at_most * counted / max(1, every - 1)
        return min(at_most, total_ms(cut))
    return at_most


def _fits(cause: CompilerCause, lines: set[tuple[str, int | None]]) -> bool:
    return not lines or cause.place is None or (cause.place.file, cause.place.line) in lines


def _unlowered_loss(
    view: CompilersView,
    facts: CompilerFacts,
    base: Basis,
    group: list[CompilerCause],
    seen: Reads,
    compiled_ms: float,
    part: float,
) -> Loss:
    names = _names(group)
    calls = sum(cause.count for cause in group)
    dependent = group[0].cause == _DATA_DEPENDENT
    evidence = [
        fact(
            f"calls of {cause.operator or 'an operator'} on the host",
            cause.count,
            "calls",
            cause.source or facts.source,
        )
        for cause in group[: UNLOWERED.operators_shown]
    ]
    if seen.ms is not None:
        evidence.append(ms("their transfers from the device", seen.fallback_ms * part, seen.source))
    evidence.append(ms("compiling the graphs they cut", compiled_ms, facts.source))
    evidence += _lines(view, facts)
    claim = Claim(
        title=f"Results of data-dependent size cut the graph: {names}, {calls} times in {base.steps} steps"
        if dependent
        else f"Op(s) not lowered: {names} run on the host, {calls} times in {base.steps} steps",
        cost_ms=0.0,
        key=group[0].id,
        levels=(confidence(base, []), *(("medium",) if seen.ms is None else ())),
        where=places(_placed(view, facts, group)),
        ranks=ranks(group) or facts.ranks,
        evidence=evidence,
        fix="Keep every size fixed: torch.where or a mask multiplied in instead of nonzero, masked_select, unique and "
        "x[mask]; pad to the largest size; or do this part on the host before the step. A lowering would not help: the "
        "size depends on the data"
        if dependent
        else f"Write {names} with operators that have a lowering, or take it out of the step; where it must stay, ask "
        "for the lowering in an issue of pytorch/xla",
        caveat="Compilations and transfers from the device are counted; the work on the host, transfers to the device "
        "and the smaller graphs were not timed.",
        learn=LEARN_SHAPES if dependent else LEARN_LOWERING,
        falsified_by=f"With {names} replaced or left out, as many values are transferred, or the mean step does not "
        "get shorter",
    )
    lost_ms = seen.fallback_ms * part + compiled_ms
    return Loss(UNLOWERED_RULE, claim, lost_ms, 0.0, compile_ms=compiled_ms)


def _placed(view: CompilersView, facts: CompilerFacts, group: list[CompilerCause]) -> list[CompilerCause]:
    """The operators' own lines, else those of the graphs that were cut."""
    if any(cause.place for cause in group):
        return group
    cut = causes(view, facts.backend, "transfer", "compile", "recompile")
    return [cause for cause in cut if cause.cause in ("read_value", "unlowered") and cause.place]


def _names(group: Iterable[CompilerCause]) -> str:
    names = list(dict.fromkeys(clipped(cause.operator or "an operator", 60) for cause in group))
    more = f" and {len(names) - UNLOWERED.operators_shown} more" if len(names) > UNLOWERED.operators_shown else ""
    return ", ".join(names[: UNLOWERED.operators_shown]) + more


def _lines(view: CompilersView, facts: CompilerFacts) -> list[Evidence]:
    """The debug profiler's own lines on these operators."""
    said = [each for each in view.warnings if each.backend == facts.backend and each.rule == "not_lowered"]
    return [fact("as torch_xla words it", clipped(each.text), "", each.source or facts.source) for each in said[:1]]


# -------------------------------------------------------------------------------------------------- executions


def execution_losses(view: CompilersView, facts: CompilerFacts) -> Iterator[Loss]:
    """An execution of a graph above the bound. What can be saved of it is not known, so confidence is low."""
    if facts.backend != XLA:
        return
    slow = [
        each
        for each in view.metrics
        if each.name in _EXECUTE and each.unit == "ms" and _longest(each) > EXECUTION.slow_ms
    ]
    if not slow:
        return
    top = max(slow, key=_longest)
    spent = sum(each.total for each in slow if each.name == top.name)
    samples = sum(each.samples or 0 for each in slow if each.name == top.name)
    source = f"metric {top.name}, {facts.source}"
    claim = Claim(
        title=f"{top.name} too slow: the longest execution of a graph took {_longest(top) / 1000:.0f} s",
        cost_ms=0.0,
        key=top.name,
        levels=("low",),
        ranks=facts.ranks,
        evidence=(
            ms("longest execution among the last samples", _longest(top), source),
            ms("time of all executions", spent, source),
            fact("executions", samples, "executions", source),
        ),
        fix="Make the graph of one execution smaller: call torch_xla.sync once per step, not per several; then profile "
        "one step (torch_xla.debug.profiler) for operators that are slow on the device",
        caveat="The cost is the time of all executions, most of which is the step's own computation.",
        falsified_by="With a sync after every step, the longest execution is as long",
    )
    yield Loss(EXECUTION_RULE, claim, spent, EXECUTION.floor)


def _longest(metric: CompilerMetric) -> float:
    """The highest percentile: the longest of the last samples, where there are fewer than a hundred."""
    return max((value for _, value in metric.percentiles), default=0.0)


# ------------------------------------------------------------------------------------------------------ the rules


def _losses(view: CompilersView) -> Iterator[tuple[Basis, Loss]]:
    for facts in view.backends:
        base = basis(view, facts)
        if base is not None:
            yield from ((base, loss) for loss in _of_backend(view, facts, base))


def _of_backend(view: CompilersView, facts: CompilerFacts, base: Basis) -> list[Loss]:
    told = list(unlowered_losses(view, facts, base))
    if facts.backend == TORCH:
        told += compile.cause_losses(view, base)
    told += slow_losses(view, facts, base)
    told += transfer_losses(view, facts, base)
    breaks = list(compile.break_losses(view, base)) if facts.backend == TORCH else []
    spoken = [loss for loss in [*told, *breaks] if loss.spoken(base)]
    again, late = sum(loss.compile_ms for loss in spoken), sum(loss.late_ms for loss in spoken)
    told += run_losses(view, facts, base, again, late)
    told += execution_losses(view, facts)
    return told + breaks


def _rule(name: str, *needs: Need[bool], learn: str = "") -> Rule:
    """A rule whose claims are its part of all that are made on compilers."""

    @rule(name, *needs, learn=learn)
    def judge(analysis: Analysis) -> Iterator[Claim]:
        if analysis.compilers is not None:
            yield from (claim for told, claim in settle(_losses(analysis.compilers)) if told == name)

    return judge


def _any_backend(has: Callable[[CompilerFacts], bool]) -> Callable[[Analysis], bool]:
    return lambda analysis: analysis.compilers is not None and any(has(one) for one in analysis.compilers.backends)


def _has_basis(analysis: Analysis) -> bool:
    view = analysis.compilers
    return view is not None and any(basis(view, facts) is not None for facts in view.backends)


COMPILED = Need("compilation events of torch.compile or torch_xla", lambda a: a.compilers is not None, quiet=True)
TORCH_COMPILE = Need(
    "compilation events of torch.compile", _any_backend(lambda facts: facts.backend == TORCH), quiet=True
)
TORCH_XLA = Need("events or a report of torch_xla", _any_backend(lambda facts: facts.backend == XLA), quiet=True)
TRANSFERRED = Need("transfers from the device", _any_backend(lambda facts: facts.transfers is not None), quiet=True)
STEP_TIMES = Need("training steps, or rates of a torch_xla report", _has_basis)
COMPILE_TIMES = Need("durations of compilations", _any_backend(lambda facts: facts.compile_ms is not None))
AGAIN = Need(
    "recompilations told from first compilations",
    _any_backend(lambda facts: facts.backend == TORCH and facts.recompiles is not None),
)
BREAKS = Need("graph breaks", _any_backend(lambda facts: facts.graph_breaks is not None))
_CAUSES = (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, AGAIN)
_RUN = (COMPILED, STEP_TIMES, COMPILE_TIMES)

limit_hit = _rule(LIMIT_RULE, *_CAUSES, learn=LEARN_TORCH)
close_to_limit = _rule(CLOSE_RULE, *_CAUSES, learn=LEARN_TORCH)
same_cause = _rule(SAME_RULE, *_CAUSES, learn=LEARN_TORCH)
recompiles = _rule(ONCE_RULE, *_CAUSES, learn=LEARN_TORCH)
too_frequent = _rule(FREQUENT_RULE, *_RUN)
storm = _rule(STORM_RULE, *_RUN)
late_compilations = _rule(LATE_RULE, *_RUN)
share = _rule(SHARE_RULE, *_RUN)
slow = _rule(SLOW_RULE, *_RUN)
graph_break = _rule(BREAK_RULE, TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES, BREAKS, learn=LEARN_BREAKS)
unlowered_operators = _rule(UNLOWERED_RULE, TORCH_XLA, STEP_TIMES)
device_to_host = _rule(TRANSFER_RULE, TRANSFERRED, STEP_TIMES, learn=LEARN_TRANSFERS)
slow_executions = _rule(EXECUTION_RULE, TORCH_XLA, STEP_TIMES, learn=LEARN_EXECUTION)
