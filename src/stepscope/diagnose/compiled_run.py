"""What compilers take of the run as a whole, what compiled steps read from the device, and all rules on compilers.

Of compiling (too often per step, in storms, after a quiet time, too much of the run, one slow compile) at most one rule
of a backend speaks, and only for time that no cause explains. Transfers, operators that run on the host instead, and
executions that take too long follow. The rules stand at the end: one loss is told by one rule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stepscope.diagnose import compile
from stepscope.diagnose.compile import (
    AMORTISED,
    COMPILE,
    TORCH,
    XLA,
    Backend,
    Loss,
    because,
    clipped,
    fact,
    function_name,
    grows,
    late,
    places,
    recompile_fix,
    settle,
    spot,
    timed,
    total_ms,
    unclear,
    what,
)
from stepscope.diagnose.rule import REPORT_FLOOR, Claim, Need, Rule, Thresholds, advice, at, at_place, ms, rule, shown
from stepscope.model import Analysis
from stepscope.model.compilers import CompilerCause, CompilerFacts, CompilerMetric
from stepscope.model.counted import things


class TRANSFERS(Thresholds):
    """When values read from the device count. They are ranked by their time: many cheap ones are no finding."""

    per_step: float = 0.5  # over the whole run; torch_xla's debug profiler warns above it
    late_per_step: float = 1.0  # after warm-up: one logged loss per step is usual; chosen, untuned
    warmup_steps: int = 10  # torch_xla's own, of compilations


class UNLOWERED(Thresholds):
    """When operators that run on the host count. Any that the steps keep using: what they cost is only partly timed."""

    per_step: float = 0.1  # calls; below it an operator belongs to the preparations; chosen, untuned
    operators_shown: int = 5


class EXECUTION(Thresholds):
    slow_ms: float = 30_000  # torch_xla's debug profiler warns above it


LEARN_TORCH = (
    "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html"
)
GPU = "cuda"  # backend of the copies to the host that a trace holds
READ_ITEM = "aten::_local_scalar_dense"
_READS = ("read_value", "item")
_FROM_DEVICE = ("TransferFromDeviceTime", "TransferFromServerTime")
_EXECUTE = ("ExecuteTime", "ExecuteReplicatedTime", "ExecuteChainedTime")
_DATA_DEPENDENT = "data_dependent_shape"
_LEARN = {XLA: "https://docs.pytorch.org/xla/release/r2.8/perf/recompilation.html"}


def slow_losses(backend: Backend) -> Iterator[Loss]:
    """One compilation above the bound: a first one, since those that came again are told by their cause."""
    facts = backend.facts
    slow = [one for one in backend.causes("compile") if (one.longest_ms or 0.0) > COMPILE.slow_ms]
    told = [([one], one.longest_ms or 0.0, one.source) for one in slow]
    again = max((one.longest_ms or 0.0 for one in backend.causes("recompile", "limit_hit")), default=0.0)
    if not slow and facts.longest_ms is not None and facts.longest_ms > max(COMPILE.slow_ms, again):
        told.append(([], facts.longest_ms, ""))
    for items, longest_ms, source in told:
        cause = items[0] if items else None
        name = f"A graph of {facts.backend}"
        if cause is not None and cause.function:
            name = f"{function_name(cause.function)}{at(spot(cause))}"
        yield backend.loss(
            "compile.slow",
            longest_ms,
            items,
            late_ms=longest_ms if not items or late(items) else 0.0,
            title=f"{name} took {longest_ms / 1000:.0f} s to compile",
            levels=(backend.run_confidence(items),),
            evidence=(ms("longest compilation", longest_ms, source or facts.source),),
            fix=advice("slow_compile", facts.backend),
            caveat=f"A cache helps from the second start on. {AMORTISED}",
            falsified_by="With the compiler's cache warm, a second run starts no faster",
            learn=_LEARN.get(facts.backend, LEARN_TORCH),
        )


def run_losses(backend: Backend, explained_ms: float, late_ms: float) -> Iterator[Loss]:
    """The strongest of the rules on all compilations whose loss is left unexplained.

    `explained_ms` is compile time other findings claim; `late_ms` what those claim of first compilations after warm-up.
    """
    held = _held(backend)
    after_warm_up, saveable = _late_ms(backend), saveable_ms(backend)
    for name, title in held:
        lost, known = saveable, explained_ms
        if name in ("compile.late", "compile.share"):
            lost, known = after_warm_up, explained_ms + late_ms
        if not lost or known >= COMPILE.explained * lost or lost - known < REPORT_FLOOR * backend.loop_ms:
            continue
        yield _run_loss(backend, name, title, lost - known, [text for other, text in held if other != name])
        return


def saveable_ms(backend: Backend) -> float | None:
    """Compile time that fixed inputs would save: all but the first version of each function.

    Where nothing tells a first from a later one, the longest is taken to be the one that stays.
    """
    facts, again = backend.facts, backend.causes("recompile", "limit_hit")
    if facts.recompiles is not None and (timed(again) or not again):
        return total_ms(again)
    if facts.compile_ms is None:
        return None
    longest = facts.longest_ms if facts.longest_ms is not None else facts.compile_ms / max(1, facts.compiles)
    return max(0.0, facts.compile_ms - longest)


def _late_ms(backend: Backend) -> float | None:
    view, name = backend.view, backend.facts.backend
    known = [row.late_compile_ms for row in view.steps if row.backend == name and row.late_compile_ms is not None]
    storm = next((one.late_ms for one in view.storms if one.backend == name), None)
    return storm if storm is not None else sum(known) if known else None


def _held(backend: Backend) -> list[tuple[str, str]]:
    """(rule, what it says) of those that hold, strongest first."""
    view, name = backend.view, backend.facts.backend
    storm = next((one for one in view.storms if one.backend == name), None)
    held = []
    if storm is not None:
        kind = f"{storm.kind} steps" if storm.kind not in (None, "train") else "steps"
        if storm.whole_run:
            known = [one for one in view.warnings if one.backend == name and one.rule == "too_frequent"]
            text = next((one.text for one in known if one.metric == "CompileTime"), None)  # as users of torch_xla know
            counted = f"CompileTime too frequent: {storm.compiles} counts during {storm.steps} steps"
            said = clipped(text.removeprefix("pt-xla-profiler: ")) if text is not None else counted
            held.append(("compile.too_frequent", said))
        if storm.windows:
            since = f", first at step {storm.first_window_step}" if storm.first_window_step is not None else ""
            often = f"in {storm.windows} {kind} at least 3 of the last 10 had compiled{since}"
            held.append(("compile.storm", f"Compiling goes on after warm-up: {often}"))
        if storm.late_step is not None:
            quiet = f"{storm.quiet_before or 'many'} {kind}"
            held.append(("compile.late", f"Step {storm.late_step} compiled after {quiet} without a compilation"))
    if _late_ms(backend):
        share = storm.late_share if storm is not None else None
        much = f"{share:.0%} of the steps after warm-up" if share is not None else "time after warm-up"
        held.append(("compile.share", f"Compiling took {much}"))
    return held


def _run_loss(backend: Backend, name: str, title: str, left_ms: float, others: list[str]) -> Loss:
    facts = backend.facts
    again = backend.causes("recompile", "limit_hit") or backend.causes("compile")
    lead = sorted(again, key=lambda cause: (-(cause.total_ms or 0.0), -cause.count))
    worst = "critical"
    if name == "compile.share":
        worst = "warning" if left_ms > COMPILE.share_warning * backend.loop_ms else "info"
    evidence = [
        fact("compilations", facts.compiles, f"in {things(backend.steps, f'{backend.kind} step')}", facts.source),
        ms("time of all compilations", facts.compile_ms, facts.source),
        ms("longest compilation", facts.longest_ms, facts.source),
        *(fact("also", text, "", facts.source) for text in others),
    ]
    for cause in lead[: COMPILE.places_shown]:
        if cause.cause and cause.count:
            known = advice("compile_caused_by", cause.cause) or because(cause)
            if cause.cause == "unknown" and cause.text:
                known = f"the compiler says: {clipped(cause.text, 60)}"
            source = cause.source or facts.source
            evidence.append(fact(f"{known}{at_place(spot(cause))}", cause.count, "compilations", source))
    evidence.append(ms("mean step, compiling included", backend.mean_ms, backend.source))
    goes_on = name in ("compile.too_frequent", "compile.storm")
    caveat = ["Padding computes on values that are thrown away." if goes_on else AMORTISED]
    if facts.recompiles is None:
        caveat.append("Nothing tells first compilations from later ones here: the longest is taken to be needed.")
    if backend.estimated:
        caveat.append("The length of a step is estimated from rates of the report.")
    return backend.loss(
        name,
        left_ms,
        lead,
        key=facts.backend,
        title=title,
        levels=(backend.run_confidence(lead),),
        worst=worst,
        evidence=evidence,
        fix=_run_fix(facts, lead),
        caveat=" ".join(caveat),
        falsified_by="With inputs of the same shapes and values in every step it compiles as often, or the mean step "
        "does not get shorter",
        learn=_LEARN.get(facts.backend, LEARN_TORCH),
    )


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


def reads(backend: Backend) -> tuple[float | None, int, float, int, str]:
    """(ms, number) of transfers from the device, the same of those that operators on the host need, and the source.

    Their time is that of the causes where these have one, else of the report's metric.
    """
    facts, found = backend.facts, backend.causes("transfer")
    metrics = [one for one in backend.view.metrics if one.name in _FROM_DEVICE and one.unit == "ms"]
    metrics = metrics if facts.backend == XLA else []
    spent, source = None, facts.source
    if timed(found):
        spent = total_ms(found)
    elif metrics:
        spent, source = sum(one.total for one in metrics), f"metric {metrics[0].name}, {facts.source}"
    count = facts.transfers if facts.transfers is not None else sum(cause.count for cause in found)
    count = max(count, sum(one.samples or 0 for one in metrics))
    # what operators on the host need: one transfer per call, as far as reading values leaves any
    calls = sum(cause.count for cause in unlowered(backend))
    items = sum(cause.count for cause in found if cause.operator == READ_ITEM)
    forced = max(0, count - items) if items <= count else round(count * calls / (calls + items))
    forced = min(count, forced) if calls else 0
    return spent, count, (spent or 0.0) * forced / count if count else 0.0, forced, source


def transfer_losses(backend: Backend) -> Iterator[Loss]:
    """Values that the script reads in the steps; ranked by time, so that cheap ones are no finding.

    Of GPUs `sync.host_waits` speaks: there the time of a read is mostly the device's own work, and no loss.
    """
    facts = backend.facts
    if facts.backend == GPU:
        return
    spent, count, fallback_ms, fallback_count, source = reads(backend)
    own, rate = (spent or 0.0) - fallback_ms, (count - fallback_count) / backend.steps
    # in steps after warm-up, among those in which anything happened
    late_steps = [point.transfers for point in backend.view.points if point.step >= TRANSFERS.warmup_steps]
    late_rate = sum(late_steps) / len(late_steps) if late_steps else 0.0
    if spent is None or not (rate > TRANSFERS.per_step or late_rate > TRANSFERS.late_per_step):
        return
    items = sorted(backend.causes("transfer"), key=lambda each: (-(each.total_ms or 0.0), -each.count))
    lines = [cause for cause in items if cause.place is not None]
    where = at_place(lines[0].place) if lines else ""
    by_item = any(cause.operator == READ_ITEM or cause.cause == "item" for cause in items)
    how = ".item(), .tolist(), print or bool() of a tensor" if by_item or not items else "reading a tensor's value"
    after_warm_up = round(late_rate, 2) if late_steps else None
    evidence = (
        fact("transfers from the device per step", round(rate, 2), "transfers", facts.source),
        ms("time of these transfers", own, source),
        fact("transfers per step after warm-up, of steps with any event", after_warm_up, "transfers", facts.source),
        *(
            fact(f"transfers{at_place(cause.place)}", cause.count, "transfers", cause.source or facts.source)
            for cause in lines[:3]
        ),
        ms("mean step", backend.mean_ms, backend.source),
    )
    step_closure = "or read it in torch_xla's step closure (xm.add_step_closure)"
    yield backend.loss(
        "transfer.device_to_host",
        own,
        items,
        key=(lines or items)[0].id if items else facts.backend,
        where=places(lines),
        title=f"Every step waits for values from the device: {rate:.1f} transfers per step{where}",
        levels=(backend.confidence([]), *(() if lines else ("medium",))),
        evidence=evidence,
        fix=f"Read values only every N steps ({how}){where}: add them up in a tensor on the device and read that, "
        f"{step_closure if facts.backend == XLA else 'or copy it non_blocking'}",
        caveat="A transfer also waits for the computation it needs, and the first one for its compilation: that part "
        "stays when the values are read later.",
        falsified_by="With values read every 100 steps only, the mean step does not get shorter",
    )


def unlowered(backend: Backend) -> list[CompilerCause]:
    found = [cause for cause in backend.causes("fallback") if cause.operator != READ_ITEM]
    return found if sum(cause.count for cause in found) >= UNLOWERED.per_step * backend.steps else []


def unlowered_losses(backend: Backend) -> Iterator[Loss]:
    found = sorted(unlowered(backend), key=lambda cause: (-cause.count, cause.operator or ""))
    for dependent in (False, True):
        group = [cause for cause in found if (cause.cause == _DATA_DEPENDENT) is dependent]
        if group:
            yield _unlowered_loss(backend, group, found, dependent=dependent)


def _compile_ms(backend: Backend, found: list[CompilerCause]) -> float:
    """Compile time that these operators caused: graphs cut at their line, and where no line is known, at any.

    Never more than what a run without them would save.
    """
    at_most = saveable_ms(backend) or 0.0
    lines = {(cause.place.file, cause.place.line) for cause in found if cause.place}
    named = [cause for cause in backend.causes("compile", "recompile") if cause.cause not in ("", "unknown")]
    every = sum(cause.count for cause in named)
    if not every:
        return at_most
    cut = [
        cause
        for cause in named
        if cause.cause == "read_value"
        and (not lines or cause.place is None or (cause.place.file, cause.place.line) in lines)
    ]
    if timed(named):
        return min(at_most, total_ms(cut))
    # a log names causes, a report beside it their time
    return at_most * min(1.0, sum(cause.count for cause in cut) / max(1, every - 1))


def _unlowered_loss(
    backend: Backend, group: list[CompilerCause], found: list[CompilerCause], *, dependent: bool
) -> Loss:
    """Of what all of them cost, the part of a group is that of its calls."""
    facts, shown_at_most = backend.facts, UNLOWERED.operators_shown
    part = sum(cause.count for cause in group) / max(1, sum(cause.count for cause in found))
    spent, _, fallback_ms, _, read_from = reads(backend)
    transfers_ms, compiled_ms = fallback_ms * part, _compile_ms(backend, found) * part
    operators = list(dict.fromkeys(clipped(cause.operator or "an operator", 60) for cause in group))
    more = f" and {len(operators) - shown_at_most} more" if len(operators) > shown_at_most else ""
    names = ", ".join(operators[:shown_at_most]) + more
    often = f"{sum(cause.count for cause in group)} times in {backend.steps} steps"
    said = [one for one in backend.view.warnings if one.backend == facts.backend and one.rule == "not_lowered"]
    calls = [(f"calls of {one.operator or 'an operator'} on the host", one) for one in group[:shown_at_most]]
    evidence = (
        *(fact(metric, one.count, "calls", one.source or facts.source) for metric, one in calls),
        ms("their transfers from the device", None if spent is None else transfers_ms, read_from),
        ms("compiling the graphs they cut", compiled_ms, facts.source),
        *(fact("as torch_xla words it", clipped(one.text), "", one.source or facts.source) for one in said[:1]),
    )
    # the operators' own lines, else those of the graphs that were cut
    cut = backend.causes("transfer", "compile", "recompile")
    cut = [cause for cause in cut if cause.cause in ("read_value", "unlowered") and cause.place]
    return backend.loss(
        "compile.unlowered",
        transfers_ms + compiled_ms,
        group,
        floor=0.0,
        compile_ms=compiled_ms,
        title=f"Results of data-dependent size cut the graph: {names}, {often}"
        if dependent
        else f"Op(s) not lowered: {names} run on the host, {often}",
        levels=(backend.confidence([]), *(("medium",) if spent is None else ())),
        where=places(group if any(cause.place for cause in group) else cut),
        evidence=evidence,
        fix="Keep every size fixed: torch.where or a mask multiplied in instead of nonzero, masked_select, unique and "
        "x[mask]; pad to the largest size; or do this part on the host before the step. A lowering would not help: the "
        "size depends on the data"
        if dependent
        else f"Write {names} with operators that have a lowering, or take it out of the step; where it must stay, ask "
        "for the lowering in an issue of pytorch/xla",
        caveat="Compilations and transfers from the device are counted; the work on the host, transfers to the device "
        "and the smaller graphs were not timed.",
        learn="https://docs.pytorch.org/xla/release/r2.8/learn/dynamic_shape.html"
        if dependent
        else "https://docs.pytorch.org/xla/release/r2.8/contribute/op_lowering.html",
        falsified_by=f"With {names} replaced or left out, as many values are transferred, or the mean step does not "
        "get shorter",
    )


def execution_losses(backend: Backend) -> Iterator[Loss]:
    """An execution of a graph above the bound. What can be saved of it is not known, so confidence is low."""
    metrics = [one for one in backend.view.metrics if one.name in _EXECUTE and one.unit == "ms"]
    slow = [one for one in metrics if _longest(one) > EXECUTION.slow_ms]
    if backend.facts.backend != XLA or not slow:
        return
    top = max(slow, key=_longest)
    same = [one for one in slow if one.name == top.name]
    spent, source = sum(one.total for one in same), f"metric {top.name}, {backend.facts.source}"
    yield backend.loss(
        "compute.execution_slow",
        spent,
        (),
        key=top.name,
        title=f"{top.name} too slow: the longest execution of a graph took {_longest(top) / 1000:.0f} s",
        levels=("low",),
        evidence=(
            ms("longest execution among the last samples", _longest(top), source),
            ms("time of all executions", spent, source),
            fact("executions", sum(one.samples or 0 for one in same), "executions", source),
        ),
        fix="Make the graph of one execution smaller: call torch_xla.sync once per step, not per several; then profile "
        "one step (torch_xla.debug.profiler) for operators that are slow on the device",
        caveat="The cost is the time of all executions, most of which is the step's own computation.",
        falsified_by="With a sync after every step, the longest execution is as long",
    )


def _longest(metric: CompilerMetric) -> float:
    """The highest percentile: the longest of the last samples, where there are fewer than a hundred."""
    return max((value for _, value in metric.percentiles), default=0.0)


def _losses(backend: Backend) -> list[Loss]:
    of_torch = backend.facts.backend == TORCH
    told = [
        *unlowered_losses(backend),
        *(compile.cause_losses(backend) if of_torch else ()),
        *slow_losses(backend),
        *transfer_losses(backend),
    ]
    breaks = list(compile.break_losses(backend)) if of_torch else []
    spoken = [loss for loss in [*told, *breaks] if loss.spoken]
    again, first = sum(loss.compile_ms for loss in spoken), sum(loss.late_ms for loss in spoken)
    return [*told, *run_losses(backend, again, first), *execution_losses(backend), *breaks]


def _rule(name: str, *needs: Need[bool], learn: str = "") -> Rule:
    @rule(name, *needs, learn=learn)
    def judge(analysis: Analysis) -> Iterator[Claim]:
        if analysis.compilers is not None:
            losses = [loss for backend in compile.backends(analysis.compilers) for loss in _losses(backend)]
            yield from (claim for told, claim in settle(losses) if told == name)

    return judge


def _any_backend(has: Callable[[CompilerFacts], bool]) -> Callable[[Analysis], bool]:
    return lambda analysis: analysis.compilers is not None and any(has(one) for one in analysis.compilers.backends)


COMPILED = Need("compilation events of torch.compile or torch_xla", lambda a: a.compilers is not None, quiet=True)
TORCH_COMPILE = Need(
    "compilation events of torch.compile", _any_backend(lambda facts: facts.backend == TORCH), quiet=True
)
TORCH_XLA = Need("events or a report of torch_xla", _any_backend(lambda facts: facts.backend == XLA), quiet=True)
TRANSFERRED = Need("transfers from the device", _any_backend(lambda facts: facts.transfers is not None), quiet=True)
STEP_TIMES = Need(
    "training steps, or rates of a torch_xla report",
    lambda a: a.compilers is not None and any(compile.backends(a.compilers)),
)
COMPILE_TIMES = Need("durations of compilations", _any_backend(lambda facts: facts.compile_ms is not None))
AGAIN = Need(
    "recompilations told from first compilations",
    _any_backend(lambda facts: facts.backend == TORCH and facts.recompiles is not None),
)
BREAKS = Need("graph breaks", _any_backend(lambda facts: facts.graph_breaks is not None))

_TORCH_TIMES = (TORCH_COMPILE, STEP_TIMES, COMPILE_TIMES)
# rule: what it needs, and where to read on
_RULES: dict[str, tuple[tuple[Need[bool], ...], str]] = {
    **dict.fromkeys(
        (compile.LIMIT_HIT, "compile.close_to_limit", "compile.same_cause", "compile.recompiles"),
        ((*_TORCH_TIMES, AGAIN), LEARN_TORCH),
    ),
    **dict.fromkeys(
        ("compile.too_frequent", "compile.storm", "compile.late", "compile.share", "compile.slow"),
        ((COMPILED, STEP_TIMES, COMPILE_TIMES), ""),
    ),
    "compile.graph_break": (
        (*_TORCH_TIMES, BREAKS),
        "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.fullgraph_true.html",
    ),
    "compile.unlowered": ((TORCH_XLA, STEP_TIMES), ""),
    "transfer.device_to_host": (
        (TRANSFERRED, STEP_TIMES),
        "https://docs.pytorch.org/xla/master/learn/xla-advanced.html",
    ),
    "compute.execution_slow": (
        (TORCH_XLA, STEP_TIMES),
        "https://docs.pytorch.org/xla/release/r2.7/learn/troubleshoot.html",
    ),
}
ON_COMPILERS = tuple(_rule(name, *needs, learn=learn) for name, (needs, learn) in _RULES.items())
