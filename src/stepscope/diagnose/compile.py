"""Recompilations of torch.compile by cause, the limit of versions, slow compilations and graph breaks.

Per function the strongest statement is made: it ran into its limit, it is close to it, or a cause compiled it again.
A rule makes a `Loss`: a claim without its cost, and the time it says was lost. `settle` hands that time out, strongest
first and once, so that one loss never speaks twice and shares stay within the run. `compiled_run` has the rules.
How a cause is called, and what to do about it, goes by the words of `tables.compile_reasons`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.rule import ALL, REPORT_FLOOR, Claim, Thresholds, lowest, ms, shown
from stepscope.model import Evidence, Place
from stepscope.model.compilers import Change, CompilerCause, CompilerFacts, CompilersView, EagerAfterLimit


class Compile(Thresholds, frozen=True):
    """When compiling during training counts. The rates per step of the run-level rules stand in `analyze/compilers`."""

    floor: float = REPORT_FLOOR
    close: float = 0.75  # of the limit of versions: 6 of torch's default 8; chosen, untuned
    same_cause: int = 3  # times: twice may be training and evaluation; chosen, untuned
    explained: float = 0.8  # of the lost time: what is left is no second loss; chosen, untuned
    slow_ms: float = 300_000  # one compilation; torch_xla's debug profiler warns above it
    share_warning: float = 0.20  # of the steps after warm-up; below it `compile.share` is info; chosen, untuned
    every: float = 0.8  # of the steps between first and last: then a cause is said to change "every step"
    eager: float = REPORT_FLOOR  # a median that grew by less is chance
    part: float = 0.2  # of the compilations: a smaller cause is not worth advice; chosen, untuned
    few_steps: int = 10  # fewer recorded steps make every compilation look expensive; torch_xla's own warm-up
    places_shown: int = 5
    changes_shown: int = 3


COMPILE = Compile()
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


class Loss(Struct, frozen=True):
    """What a rule says was lost: a claim without its cost, and the time it is, `lost_ms` of the whole run.

    `floor` is the share below which it is not worth a word. `compile_ms` is what of it are compilations that came
    again, `late_ms` first ones after warm-up: time that no rule on the run as a whole may tell again.
    """

    rule: str
    claim: Claim
    lost_ms: float
    floor: float
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


def fact(metric: str, value: object, unit: str, source: str) -> Evidence:
    """A figure, with the first of its sources where they are many."""
    parts = list(dict.fromkeys(source.split("; ")))
    text = "; ".join(parts)
    return Evidence(metric, value, unit, text if len(text) <= SOURCE_SHOWN else f"{parts[0][:SOURCE_SHOWN]} and others")


def settle(losses: Iterable[tuple[Basis, Loss]]) -> Iterator[tuple[str, Claim]]:
    """(rule, claim) of the losses, in their order. Each gets the time that those before it left."""
    left = 1.0
    for base, loss in losses:
        share = max(0.0, min(left, loss.lost_ms / base.loop_ms)) if base.loop_ms > 0 else 0.0
        if loss.lost_ms <= 0 or share <= 0 or share < loss.floor:
            continue
        left -= share
        mean = ms(f"mean of all {base.steps} {base.kind} steps", base.mean_ms, base.source)
        yield (
            loss.rule,
            replace(
                loss.claim,
                cost_ms=share * base.mean_ms,
                step_ms=base.mean_ms,
                basis=ALL,
                evidence=(mean, *loss.claim.evidence),
            ),
        )


_TENSOR_SIZE = re.compile(r"(.{1,80}?)\.size\((-?\d{1,3})\)$")
TEXT_SHOWN = 160  # characters of a compiler's own text

# What changed, where the compiler names no subject.
_SUBJECTS = {
    "shape": "the size of a tensor",
    "dtype": "the dtype of a tensor",
    "stride": "the memory layout of a tensor",
    "device": "the device of a tensor",
    "requires_grad": "whether a tensor requires gradients",
    "constant": "a constant",
    "float_argument": "a float argument",
    "int_attribute": "an integer attribute",
    "attribute": "an attribute",
    "object": "an object",
    "type": "the type of an argument",
    "length": "the length of a container",
    "keys": "the keys of a dict",
    "grad_mode": "whether gradients are recorded",
    "global_state": "a global setting of torch",
    "tensor_read": "a value read from a tensor",
    "new_function": "a function that is made anew",
}

# What to do; `{what}` is the subject, `{place}` " at train.py:18" or nothing, `{call}` likewise where it is called.
_FIXES = {
    "dtype": "Cast {what} to one dtype before the call{call}",
    "stride": "Give {what} one memory layout: .contiguous() before the call{call}",
    "device": "Keep {what} on one device, moved there before the call{call}",
    "requires_grad": "Call the compiled function with {what} always alike; compile training and evaluation separately",
    "constant": "Keep {what} equal over the calls{place}, pass it as a tensor, or use it outside the compiled part",
    "float_argument": "Pass {what} as a tensor (torch.tensor({name}), made once and filled in place){place}; "
    "a Python float becomes a constant of the compiled version",
    "int_attribute": "Count {what} outside the compiled part, keep it in a tensor{place}, or set "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True",
    "attribute": "Set {what} once before training, or read it outside the compiled part{place}",
    "object": "Create {what} once and pass the same one in every call{place}",
    "type": "Pass the same type in every call{call}",
    "length": "Keep {what} equal over the calls: pad it, or stack it into one tensor{place}",
    "keys": "Keep {what} equal over the calls{place}",
    "grad_mode": "Compile training and evaluation separately: two torch.compile calls, each under its own grad mode",
    "global_state": "Set {what} once before training, not between calls{place}",
    "tensor_read": "Leave the value on the tensor instead of reading it (.item(), int(), bool()){place}: "
    "torch.where or torch.cond, or read it outside the compiled part; "
    "torch._dynamo.config.capture_scalar_outputs = True keeps an .item() in the graph",
    "new_function": "Make the function once, outside the loop, and pass the same one in every call{place}",
}
_UNKNOWN = "Keep what the compiler names equal over the calls, or move it out of the compiled part{place}"

_BREAKS = {
    "item": "Leave the value on the tensor{place}, or read it outside the compiled part; "
    "torch._dynamo.config.capture_scalar_outputs = True keeps an .item() in the graph",
    "print": "Take the print or log call{place} out of the compiled part",
    "data_dependent": "Replace the branch on a tensor's value{place} by torch.where or torch.cond, "
    "or move it out of the compiled part",
    "unsupported_call": "Call it outside the compiled part{place}, or register it as a custom operator "
    "(torch.library.custom_op)",
}
_BREAK = "Rewrite{place} with what the compiler supports, or move it out of the compiled part"


def what(cause: CompilerCause) -> str:
    """What changed."""
    if unclear(cause) and not cause.subject:
        return "an unknown cause"
    return clipped(cause.subject, 80) if cause.subject else _SUBJECTS.get(cause.cause, "something the compiler checks")


def clipped(text: str, limit: int = TEXT_SHOWN) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def how_often(cause: CompilerCause) -> str:
    """`changes every step` or `grows every step`, else how many times it did."""
    if cause.first_step is not None and cause.last_step is not None and cause.count >= COMPILE.same_cause:
        span = cause.last_step - cause.first_step + 1
        if cause.step_count >= COMPILE.same_cause and cause.step_count >= COMPILE.every * span:
            return "grows every step" if cause.cause == "shape" and grows(cause) else "changes every step"
    return f"changed {cause.count} times" if cause.count != 1 else "changed"


def because(cause: CompilerCause) -> str:
    """`s.calls changes every step`; of a wording nobody knows, the wording."""
    if unclear(cause):
        return (
            f"the compiler says: {clipped(cause.text, 80)}" if cause.text else "this version of torch does not say why"
        )
    return f"{what(cause)} {how_often(cause)}"


def changes(items: Sequence[Change]) -> str | None:
    """`8 to 12 (step 2), 12 to 16 (step 3)`."""
    parts = []
    for change in items[: COMPILE.changes_shown]:
        if change.old is None and change.new is None:
            continue
        values = " to ".join(clipped(value, 40) for value in (change.old, change.new) if value is not None)
        parts.append(f"{values} (step {change.step})" if change.step is not None else values)
    return ", ".join(parts) or None


def grows(cause: CompilerCause) -> bool:
    """Whether the values only went up: something is accumulated."""
    values = [value for change in cause.changes for value in (change.old, change.new) if value is not None]
    numbers = [int(value) for value in values if value.isdecimal() and len(value) < 19]
    enough = len(numbers) == len(values) and len(cause.changes) >= COMPILE.same_cause
    return enough and numbers == sorted(numbers) and numbers[0] < numbers[-1]


def recompile_fix(cause: CompilerCause) -> str:
    """What removes the cause, with the compiler's own hint where there is one."""
    place = f" at {shown(cause.place)}" if cause.place else ""
    call = f" at {shown(cause.call)}" if cause.call else ""
    if unclear(cause) and not cause.text:
        text = "Record the run with torch 2.9 or newer, or TORCH_LOGS=recompiles, which name the cause; then remove it"
    elif cause.cause == "shape":
        text = _shape_fix(cause, call)
    else:
        name = cause.subject if cause.subject and cause.subject.isidentifier() else "value"
        text = _FIXES.get(cause.cause, _UNKNOWN).format(what=what(cause), place=place, call=call, name=name)
    return text + hinted(cause)


def _shape_fix(cause: CompilerCause, call: str) -> str:
    match = _TENSOR_SIZE.match(cause.subject or "")
    marked = (
        f"torch._dynamo.mark_dynamic({match.group(1)}, {match.group(2)})" if match else "torch._dynamo.mark_dynamic"
    )
    dynamic = f"{marked} before the call{call}, or torch.compile(..., dynamic=True)"
    if grows(cause):
        begin = cause.definition or cause.place
        inside = f" {function_name(cause.function)}{f' ({shown(begin)})' if begin else ''}"
        return (
            f"{what(cause)} grows: take what accumulates (a torch.cat or a list) out of the compiled{inside} "
            f"and join it behind the loop; where it must stay, {dynamic}"
        )
    return f"Let the size change without a new version: {dynamic}; or pad to a few fixed sizes"


def break_reason(cause: CompilerCause) -> str:
    """Why a graph breaks, in a few words."""
    if cause.cause == "unsupported_call" and cause.operator:
        return f"the compiler cannot follow {clipped(cause.operator, 60)}"
    known = {
        "item": "a tensor's value is read",
        "print": "something is printed",
        "data_dependent": "what to do next depends on a tensor's values",
    }
    return known.get(cause.cause) or clipped(cause.text, 60) or "for a reason that was not told"


def break_fix(cause: CompilerCause) -> str:
    """What removes a graph break."""
    place = f" at {shown(cause.place)}" if cause.place else ""
    return _BREAKS.get(cause.cause, _BREAK).format(place=place) + hinted(cause)


def hinted(cause: CompilerCause) -> str:
    """The compiler's own advice, quoted."""
    return f". The compiler's hint: {clipped(cause.hint, 300)}" if cause.hint else ""


def without(cause: CompilerCause) -> str:
    """The experiment that would prove a finding wrong: `With s.calls kept equal over all calls`."""
    place = spot(cause)
    if unclear(cause):
        return f"With what the compiler names{f' at {shown(place)}' if place else ''} kept equal over all calls"
    return f"With {what(cause)} kept equal over all calls"


LIMIT_RULE = "compile.limit_hit"
CLOSE_RULE = "compile.close_to_limit"
SAME_RULE = "compile.same_cause"
ONCE_RULE = "compile.recompiles"
BREAK_RULE = "compile.graph_break"


def cause_losses(view: CompilersView, base: Basis) -> Iterator[Loss]:
    """Limits first, then functions close to it, then causes that compiled a function again."""
    functions: dict[object, list[CompilerCause]] = {}
    for cause in recompiled(view, TORCH):
        functions.setdefault(_function(cause), []).append(cause)
    rest = []
    for group in functions.values():
        limit = next((cause for cause in group if cause.kind == "limit_hit"), None)
        if limit is not None:
            yield from _limit_loss(view, base, limit, group)
        else:
            rest.append(group)
    single = []
    for group in rest:
        if timed(group) and _close(group):
            yield _close_loss(base, group)
        else:
            single += group
    for rule in (SAME_RULE, ONCE_RULE):
        for cause in single:
            if timed([cause]) and rule == (SAME_RULE if cause.count >= COMPILE.same_cause else ONCE_RULE):
                yield _cause_loss(base, cause, rule)


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


def _limit_loss(view: CompilersView, base: Basis, limit: CompilerCause, group: list[CompilerCause]) -> Iterator[Loss]:
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
    ordered = [lead, *_others(lead, group)]
    claim = Claim(
        title=title,
        cost_ms=0.0,
        key=limit.id,
        levels=(confidence(base, [lead]), "medium" if counted else "high"),
        where=places(ordered),
        ranks=ranks(ordered),
        evidence=(*_limit_evidence(limit, eager), *_evidence(base, ordered), *_reason(limit)),
        fix=recompile_fix(lead),
        caveat=f"{_eager_caveat(excess, counted)} {AMORTISED}",
        falsified_by=f"{without(lead)}, {name} still runs into the limit, or the mean step does not get shorter",
    )
    yield Loss(LIMIT_RULE, claim, total_ms(group) + (counted or 0.0), 0.0, compile_ms=total_ms(group))


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


def _close_loss(base: Basis, group: list[CompilerCause]) -> Loss:
    lead = max(group, key=lambda cause: (cause.count, cause.total_ms or 0.0))
    full = max(group, key=lambda cause: (cause.cache_entries or 0) / (cause.limit or 1))
    title = (
        f"{function_name(lead.function)}{at(spot(lead))} has {full.cache_entries} of {full.limit} compiled versions, "
        f"and runs eagerly beyond: {because(lead)}"
    )
    versions = fact("compiled versions", full.cache_entries, f"of {full.limit}", full.source or TORCH)
    return _again(base, CLOSE_RULE, [lead, *_others(lead, group)], title, versions, total_ms(group))


def _cause_loss(base: Basis, cause: CompilerCause, rule: str) -> Loss:
    times = "once" if cause.count == 1 else f"{cause.count} times"
    evaluation = " in evaluation" if cause.kinds == ("eval",) else ""
    title = f"{function_name(cause.function)}{at(spot(cause))} was compiled again {times}{evaluation}: {because(cause)}"
    return _again(base, rule, [cause], title, None, total_ms([cause]))


def _again(
    base: Basis, rule: str, items: list[CompilerCause], title: str, first: Evidence | None, lost_ms: float
) -> Loss:
    """Compilations that came again, the first of `items` leading; its id is stable over runs of the same code."""
    lead = items[0]
    claim = Claim(
        title=title,
        cost_ms=0.0,
        key=lead.id,
        levels=(confidence(base, [lead]),),
        worst="warning" if rule == ONCE_RULE else "critical",
        where=places(items),
        ranks=ranks(items),
        evidence=(*((first,) if first is not None else ()), *_evidence(base, items)),
        fix=recompile_fix(lead),
        caveat=AMORTISED,
        falsified_by=f"{without(lead)}, {function_name(lead.function)} is still compiled as often, or the mean step "
        "does not get shorter",
    )
    return Loss(rule, claim, lost_ms, COMPILE.floor, compile_ms=lost_ms)


# ------------------------------------------------------------------------------------------------ graph breaks


def break_losses(view: CompilersView, base: Basis) -> Iterator[Loss]:
    """Breaks that cost more than the floor, each; the others of the steps together."""
    small: list[tuple[CompilerCause, list[CompilerCause]]] = []
    compiled = causes(view, TORCH, "compile")
    for cause in causes(view, TORCH, "graph_break"):
        behind = [each for each in compiled if _behind(each, cause)]
        if not cause.step_count or not timed(behind):
            continue
        if total_ms(behind) >= COMPILE.floor * base.loop_ms:
            yield _break_loss([(cause, behind)])
        else:
            small.append((cause, behind))
    if small:
        yield _break_loss(sorted(small, key=lambda pair: -total_ms(pair[1])))


def _behind(compiled: CompilerCause, broken: CompilerCause) -> bool:
    """Whether this is the function that goes on behind the break."""
    resumed, place = resumed_at(compiled.function), broken.place
    if resumed is None or place is None or resumed[1] != place.line:
        return False
    same_file = compiled.definition is None or compiled.definition.file == place.file
    return same_file and (broken.function is None or resumed[0] == function_name(broken.function))


def _break_loss(pairs: list[tuple[CompilerCause, list[CompilerCause]]]) -> Loss:
    broken, behind = [cause for cause, _ in pairs], {each.id: each for _, compiled in pairs for each in compiled}
    first = broken[0]
    reason = break_reason(first)
    if len(pairs) == 1:
        title = f"The graph of {function_name(first.function)} breaks{at(first.place)}: {reason}"
    else:
        title = (
            f"Graphs break at {len(pairs)} lines of the step, {shown(first.place or Place('?', None))} first: {reason}"
        )
    evidence = []
    for cause, compiled in pairs[: COMPILE.places_shown]:
        where = shown(cause.place) if cause.place else "an unknown line"
        evidence.append(fact(f"graph breaks at {where}", cause.count, "", cause.source or TORCH))
        if cause.text:
            evidence.append(fact(f"reason at {where}", clipped(cause.text), "", cause.source or TORCH))
        evidence.append(ms(f"compiling what follows {where}", total_ms(compiled), compiled[0].source or TORCH))
    claim = Claim(
        title=title,
        cost_ms=0.0,
        key=first.id if len(pairs) == 1 else f"several-{first.id}",
        levels=("low",),
        worst="warning",
        where=places(broken),
        ranks=ranks(broken),
        evidence=evidence,
        fix="; ".join(dict.fromkeys(break_fix(cause) for cause in broken[:3])),
        caveat="The cost is the time to compile what follows the break, part of which one whole graph would need "
        "too. What the break costs in each step (a smaller graph, a way through Python) was not measured. "
        f"{AMORTISED}",
        falsified_by="With torch.compile(..., fullgraph=True), which allows no break, the mean step does not get "
        "shorter",
    )
    late_ms = total_ms(late(behind.values()))
    return Loss(BREAK_RULE, claim, total_ms(behind.values()), 0.0, late_ms=late_ms)


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
