"""Compilers: what recompilations, limits of versions, slow compilations, graph breaks and reads of values cost.

Per function the strongest statement is made: it ran into its limit, it is close to it, or a cause compiled it again.
A rule makes a `Loss`: a claim on all time of the run that it says was lost. `settle` hands that time out, strongest
first and once, so that one loss never speaks twice and shares stay within the run. `compiled_run` has the rules and
what is said of a compiler as a whole; here is what is said of causes, and of graph breaks. How a cause is called, and
what to do about it, goes by the words of `tables.compile_reasons`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose.rule import ALL, REPORT_FLOOR, Claim, Known, Thresholds, at, at_place, distinct, ms, shown
from stepscope.model import Evidence, Place
from stepscope.model.compilers import Change, CompilerCause, CompilerFacts, CompilersView, EagerAfterLimit
from stepscope.model.counted import things


class COMPILE(Thresholds):
    """When compiling during training counts. The rates per step of the run-level rules stand in `analyze/compilers`."""

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


TORCH = "torch.compile"
XLA = "torch_xla"
LIMIT_HIT = "compile.limit_hit"
SOURCE_SHOWN = 120  # characters
TEXT_SHOWN = 160  # characters of a compiler's own text
NAME_SHOWN = 80
SHORTEST_MS = 1e-6  # a nanosecond, the unit of clocks: less is no time
AMORTISED = "Compiling is paid once per version: of a longer run it takes a smaller share."
_RESUMED = re.compile(r"(?:torch_dynamo_)?resume_in_(.{1,200})_at_(\d{1,9})$")


class Backend(Struct, frozen=True):
    """A compiler of a run, and the steps that its costs are spread over. `steps` is the number of the main kind.

    `loop_ms` is the wall time of all kinds. It adds what recompiling took between steps, so that time lost is never
    more than time spent, and leaves out what the first versions took in the first steps: that is paid once, and a
    longer run gains by the rest.
    """

    view: CompilersView
    facts: CompilerFacts
    steps: int
    kind: str
    loop_ms: float
    estimated: bool
    source: str

    @property
    def mean_ms(self) -> float:
        return self.loop_ms / self.steps

    def at_most(self, told_ms: float) -> float:
        """The share that compilations of `told_ms` take of the steps after warm-up at most.

        All that these steps take beyond those that do not compile, which is more than a compiler tells of itself, goes
        with compiling. What was paid once, as the first step does for the device, is in no step that one would measure.
        """
        rows = [row for row in self.view.steps if row.backend == self.facts.backend and not row.estimated]
        compile_ms = sum(row.late_compile_ms or 0.0 for row in rows)
        wall_ms = sum(row.late_wall_ms or 0.0 for row in rows)
        if not compile_ms or not wall_ms:
            return 0.0
        most_ms = compile_ms
        if all(row.mean_quiet_ms is not None for row in rows):
            warm_up = COMPILE.few_steps * len(self.facts.ranks)
            quiet_ms = sum((row.mean_quiet_ms or 0.0) * max(0, row.steps - warm_up) for row in rows)
            most_ms = max(compile_ms, wall_ms - quiet_ms)
        return min(1.0, told_ms / compile_ms) * most_ms / wall_ms

    def causes(self, *kinds: str) -> list[CompilerCause]:
        """Those of its own that are of these kinds, in the view's order."""
        return [cause for cause in self.view.causes if cause.backend == self.facts.backend and cause.kind in kinds]

    def confidence(self, items: Sequence[CompilerCause]) -> str:
        """Measured times are exact; rates are not, few steps exaggerate, and an unknown cause is half a finding."""
        doubtful = self.estimated or self.steps < COMPILE.few_steps
        return "low" if any(unclear(cause) for cause in items) else "medium" if doubtful else "high"

    def run_confidence(self, items: Sequence[CompilerCause]) -> str:
        """Of all compilations together: they are timed, but without causes nothing names what changes."""
        level = self.confidence(items[:1])
        return level if items or level != "high" else "medium"

    def loss(
        self,
        rule: str,
        lost_ms: float,
        items: Sequence[CompilerCause],
        *,
        compile_ms: float = 0.0,
        late_ms: float = 0.0,
        **said: Any,
    ) -> Loss:
        """The claim that these causes lost so much, with what else a claim says; its id is stable over runs."""
        usual = {
            "key": items[0].id if items else self.facts.backend,
            "where": places(items),
            "ranks": tuple(sorted({rank for cause in items for rank in cause.ranks})) or self.facts.ranks,
        }
        return Loss(self, rule, Claim(cost_ms=lost_ms, **{**usual, **said}), compile_ms, late_ms)


class Loss(Struct, frozen=True):
    """What a rule says was lost: a claim whose cost is of the whole run.

    `compile_ms` is what of it are compilations that came again, `late_ms` first ones after warm-up: time that no rule
    on the run as a whole may tell again.
    """

    backend: Backend
    rule: str
    claim: Claim
    compile_ms: float
    late_ms: float

    @property
    def spoken(self) -> bool:
        return self.claim.cost_ms > 0 and self.claim.cost_ms >= self.claim.floor * self.backend.loop_ms


def backends(view: CompilersView) -> Iterator[Backend]:
    """The compilers whose costs can be spread over steps: something told how long these take."""
    for facts in view.backends:
        rows = [row for row in view.steps if row.backend == facts.backend and row.steps > 0]
        steps = [row for row in rows if (row.wall_ms or 0.0) >= SHORTEST_MS]
        own = [cause for cause in view.causes if cause.backend == facts.backend]
        again = [cause for cause in own if cause.kind in ("recompile", "limit_hit")]
        between = sum(
            max(0.0, cause.total_ms - cause.in_main_steps_ms)
            for cause in again
            if cause.total_ms is not None and cause.in_main_steps_ms is not None
        )
        if steps:
            main = next((row for row in steps if row.kind == "train"), steps[0])
            wall = sum(row.wall_ms or 0.0 for row in steps)
            estimated = any(row.estimated for row in steps)
            source = "rates of the torch_xla report" if estimated else "wall time of all steps"
            first = [cause for cause in own if cause.kind == "compile"]
            once = sum(cause.in_main_steps_ms or 0.0 for cause in first if cause not in late(first))
            loop_ms = max(wall - once, total_ms(again) - between, SHORTEST_MS) + between
            yield Backend(view, facts, main.steps, main.kind, loop_ms, estimated, source)
        elif (facts.step_estimate_ms or 0.0) >= SHORTEST_MS and facts.marked_steps:
            wall = (facts.step_estimate_ms or 0.0) * facts.marked_steps
            yield Backend(view, facts, facts.marked_steps, "train", wall, True, "rates of the torch_xla report")


def settle(losses: Iterable[Loss]) -> Iterator[tuple[str, Claim]]:
    """(rule, claim) of the losses, in their order. Each gets the time that those before it left."""
    left = 1.0
    for loss in losses:
        backend, lost_ms = loss.backend, loss.claim.cost_ms
        share = max(0.0, min(left, lost_ms / backend.loop_ms))
        if share <= 0 or share < loss.claim.floor:
            continue
        left -= share
        mean = ms(f"mean of all {things(backend.steps, f'{backend.kind} step')}", backend.mean_ms, backend.source)
        claim = replace(
            loss.claim,
            cost_ms=share * backend.mean_ms,
            step_ms=backend.mean_ms,
            ceiling_ms=backend.at_most(loss.compile_ms + loss.late_ms) * backend.mean_ms,
            floor=0.0,  # of its share
            basis=ALL,
            evidence=(mean, *loss.claim.evidence),
        )
        yield loss.rule, claim


def total_ms(items: Iterable[CompilerCause]) -> float:
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


def spot(cause: CompilerCause) -> Place | None:
    """The nearest line of the user's: the cause, else the call, else where the function begins."""
    return cause.place or cause.call or cause.definition


def places(items: Iterable[CompilerCause]) -> tuple[Place, ...]:
    """Lines of causes, each once, in their order; behind them where their functions are called and begin."""
    lines = [*(one.place for one in items), *(one.call for one in items), *(one.definition for one in items)]
    return distinct(replace(place, share=None) for place in lines if place is not None)[: COMPILE.places_shown]


def fact(metric: str, value: object, unit: str, source: str) -> Known:
    """A figure, with the first of its sources where they are many."""
    if value is None:
        return None
    parts = list(dict.fromkeys(source.split("; ")))
    text = "; ".join(parts)
    return Evidence(metric, value, unit, text if len(text) <= SOURCE_SHOWN else f"{parts[0][:SOURCE_SHOWN]} and others")


_TENSOR_SIZE = re.compile(r"(.{1,80}?)\.size\((-?\d{1,3})\)$")
_TRAINING = ".training"  # of a module: evaluation sets it to False
_OF_PARAMETERS = "force_parameter_static_shapes"  # what torch hints at where a parameter changed
_UNKNOWN = "Keep what the compiler names equal over the calls, or move it out of the compiled part{place}"
_BREAK = "Rewrite{place} with what the compiler supports, or move it out of the compiled part"


class CauseWords(Struct, frozen=True):
    """How a cause is called, and what to do about it; empty where nothing special is said.

    In fixes `{what}` is the subject, `{place}` " at train.py:18" or nothing, `{call}` likewise where it is called.
    """

    shown: str  # in views, where nothing says what changed
    subject: str = ""  # what changed, where the compiler names no subject
    fix: str = ""
    reason: str = ""  # why the graph breaks
    break_fix: str = ""


CAUSE_WORDS = msgspec.json.decode(
    Path(__file__).with_name("compile_causes.json").read_bytes(), type=dict[str, CauseWords]
)
_OTHER = CauseWords("")


def what(cause: CompilerCause) -> str:
    if unclear(cause) and not cause.subject:
        return "an unknown cause"
    named = clipped(cause.subject, 80) if cause.subject else CAUSE_WORDS.get(cause.cause, _OTHER).subject
    return named or "something the compiler checks"


def clipped(text: str, limit: int = TEXT_SHOWN) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def because(cause: CompilerCause) -> str:
    """`s.calls changes every step`, `grows every step` or how many times it changed; of a wording nobody knows, it."""
    if unclear(cause):
        text = clipped(cause.text, 80)
        return f"the compiler says: {text}" if text else "this version of torch does not say why"
    if cause.first_step is not None and cause.last_step is not None and cause.step_count >= COMPILE.same_cause:
        span = cause.last_step - cause.first_step + 1
        if cause.count >= COMPILE.same_cause and cause.step_count >= COMPILE.every * span:
            return f"{what(cause)} {'grows' if cause.cause == 'shape' and grows(cause) else 'changes'} every step"
    return f"{what(cause)} changed" + (f" {cause.count} times" if cause.count != 1 else "")


def changes(items: Sequence[Change]) -> str:
    """`8 to 12 (step 2), 12 to 16 (step 3)`; nothing where no value is known."""
    parts = []
    for change in items[: COMPILE.changes_shown]:
        values = " to ".join(clipped(value, 40) for value in (change.old, change.new) if value is not None)
        if values:
            parts.append(f"{values} (step {change.step})" if change.step is not None else values)
    return ", ".join(parts)


def grows(cause: CompilerCause) -> bool:
    """Whether the values only went up: something is accumulated."""
    values = [value for change in cause.changes for value in (change.old, change.new) if value is not None]
    numbers = [int(value) for value in values if value.isdecimal() and len(value) < 19]
    enough = len(numbers) == len(values) and len(cause.changes) >= COMPILE.same_cause
    return enough and numbers == sorted(numbers) and numbers[0] < numbers[-1]


def recompile_fix(cause: CompilerCause) -> str:
    """What removes the cause, with the compiler's own hint where there is one."""
    call, subject, of_model = at_place(cause.call), cause.subject or "", _OF_PARAMETERS in (cause.hint or "")
    size = _TENSOR_SIZE.match(subject)
    arguments = f"({size.group(1)}, {size.group(2)})" if size else ""
    more = ", and so of every other size that changes" if arguments else ""
    dynamic = f"torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic{arguments} before the call{call}{more}"
    if unclear(cause) and not cause.text:
        text = "Record the run with torch 2.9 or newer, or TORCH_LOGS=recompiles, which name the cause; then remove it"
    elif cause.cause == "shape" and grows(cause):
        inside = function_name(cause.function) + at(cause.definition or cause.place)
        text = (
            f"{what(cause)} grows: take what accumulates (a torch.cat or a list) out of the compiled {inside} "
            f"and join it behind the loop; where it must stay, {dynamic}"
        )
    elif cause.cause == "shape" and not of_model:
        text = f"Let the size change without a new version: {dynamic}; or pad to a few fixed sizes"
    else:
        name = subject if subject.isidentifier() else "value"
        special = {
            "grad_mode": subject.endswith(_TRAINING),
            "optimizer": ".param_groups[" in subject,
            f"{cause.cause} of a parameter": of_model,
            "attribute": cause.cause == "type" and subject.startswith("self."),  # no argument of the call
        }
        key = next((key for key, holds in special.items() if holds and key in CAUSE_WORDS), cause.cause)
        template = CAUSE_WORDS.get(key, _OTHER).fix or _UNKNOWN
        text = template.format(what=what(cause), place=at_place(cause.place), call=call, name=name)
    return text + hinted(cause)


def hinted(cause: CompilerCause) -> str:
    return f". The compiler's hint: {clipped(cause.hint, 300)}" if cause.hint else ""


def without(cause: CompilerCause) -> str:
    """The experiment that would prove a finding wrong: `With s.calls kept equal over all calls`."""
    equal = f"what the compiler names{at_place(spot(cause))}" if unclear(cause) else what(cause)
    return f"With {equal} kept equal over all calls"


def cause_losses(backend: Backend) -> Iterator[Loss]:
    """Limits first, then functions close to it, then causes that compiled a function again."""
    functions: dict[object, list[CompilerCause]] = {}
    for cause in backend.causes("recompile", "limit_hit"):
        # a function's code begins in one place; without any name a cause stands alone
        begin = cause.definition
        named = (cause.function, begin.file if begin else None, begin.line if begin else None)
        functions.setdefault(cause.id if named == (None, None, None) else named, []).append(cause)
    for group in functions.values():
        limit = next((cause for cause in group if cause.kind == "limit_hit"), None)
        if limit is not None:
            yield from _limit_loss(backend, limit, group)
    single = []
    for group in functions.values():
        if all(cause.kind == "recompile" for cause in group):
            full = max(group, key=lambda cause: (cause.cache_entries or 0) / cause.limit if cause.limit else 0.0)
            if timed(group) and full.limit and (full.cache_entries or 0) >= COMPILE.close * full.limit:
                yield _close_loss(backend, full, group)
            else:
                single += group
    for rule in ("compile.same_cause", "compile.recompiles"):
        for cause in single:
            if timed([cause]) and (rule == "compile.same_cause") == (cause.count >= COMPILE.same_cause):
                times = "once" if cause.count == 1 else f"{cause.count} times"
                name = f"{function_name(cause.function)}{at(spot(cause))}"
                evaluation = " in evaluation" if cause.kinds == ("eval",) else ""
                title = f"{name} was compiled again {times}{evaluation}: {because(cause)}"
                yield _again(backend, rule, title, [cause], total_ms([cause]))


def _close_loss(backend: Backend, full: CompilerCause, group: list[CompilerCause]) -> Loss:
    lead = max(group, key=lambda cause: (cause.count, cause.total_ms or 0.0))
    title = (
        f"{function_name(lead.function)}{at(spot(lead))} has {full.cache_entries} of {full.limit} compiled "
        f"versions, and runs eagerly beyond: {because(lead)}"
    )
    versions = fact("compiled versions", full.cache_entries, f"of {full.limit}", full.source or TORCH)
    others = [cause for cause in group if cause is not lead]
    return _again(backend, "compile.close_to_limit", title, [lead, *others], total_ms(group), versions)


def _again(backend: Backend, rule: str, title: str, items: list[CompilerCause], lost_ms: float, *first: Known) -> Loss:
    lead = items[0]
    return backend.loss(
        rule,
        lost_ms,
        items,
        compile_ms=lost_ms,
        title=title,
        levels=(backend.confidence([lead]),),
        worst="warning" if rule == "compile.recompiles" else "critical",
        evidence=(*first, *_evidence(backend, items)),
        fix=recompile_fix(lead),
        caveat=AMORTISED,
        falsified_by=f"{without(lead)}, {function_name(lead.function)} is still compiled as often, or the mean step "
        "does not get shorter",
    )


def _limit_loss(backend: Backend, limit: CompilerCause, group: list[CompilerCause]) -> Iterator[Loss]:
    limits = {each.cause: each for each in backend.view.limits}
    kinds = {cause.id: cause.kinds for cause in backend.view.causes}
    eager = limits.get(limit.id)
    excess = _excess_ms(eager)
    if not timed(group) and excess is None:
        return
    # of several limits in the same kind of steps the dearest one counts, or the same steps would count twice
    known = {name: more for name, each in limits.items() if (more := _excess_ms(each)) is not None}
    same_steps = [name for name in known if kinds.get(name, ()) == limit.kinds]
    counted = excess if limit.id == max(same_steps, key=lambda name: known[name], default=None) else 0.0
    # what filled the versions: the recompilations of the limit's own cause, else the most frequent ones
    again = [cause for cause in group if cause.kind == "recompile"]
    same = [cause for cause in again if (cause.cause, cause.subject) == (limit.cause, limit.subject)]
    lead = max(same or (again if unclear(limit) else ()), key=lambda cause: cause.count, default=limit)
    name = function_name(limit.function or lead.function)
    since = f"Since step {limit.first_step}" if limit.first_step is not None else "After its limit"
    versions = f"{limit.limit} compiled versions" if limit.limit else "compiled versions"
    ordered = [lead, *(cause for cause in again if cause is not lead)]
    source = limit.source or TORCH
    evidence = [
        fact("compiled versions at most", limit.limit, "", source),
        fact("step of the limit", limit.first_step, "", source),
    ]
    if eager is not None and excess is not None:
        pair = things(eager.before_steps, "step"), things(eager.after_steps, "step")
        before, after = (f"steps.jsonl, {steps}" for steps in pair)
        evidence.append(ms("median step before the limit, compiling left out", eager.before_ms, before))
        evidence.append(ms("median step after the limit", eager.after_ms, after))
    evidence += (*_evidence(backend, ordered), fact("the compiler's reason", clipped(limit.text) or None, "", source))
    caveat = "is the difference of two medians: other changes at that step count in."
    if excess is None:
        caveat = "was not measured: too few steps that did not compile."
    elif excess and not counted:
        caveat = "is counted with another function that ran into its limit."
    yield backend.loss(
        LIMIT_HIT,
        total_ms(group) + (counted or 0.0),
        ordered,
        floor=0.0,
        compile_ms=total_ms(group),
        key=limit.id,
        title=f"{since}, inputs of {name}{at(spot(lead) or spot(limit))} that match none of its {versions} run "
        f"eagerly: {because(lead)}",
        levels=(backend.confidence([lead]), "medium" if counted else "high"),
        evidence=evidence,
        fix=recompile_fix(lead),
        caveat=f"What running eagerly costs {caveat} {AMORTISED}",
        falsified_by=f"{without(lead)}, {name} still runs into the limit, or the mean step does not get shorter",
    )


def _excess_ms(eager: EagerAfterLimit | None) -> float | None:
    """What the steps after the limit take more, in sum; None where that was not measured."""
    if eager is None or eager.before_ms is None or eager.after_ms is None:
        return None
    more = eager.after_ms - eager.before_ms
    if more <= 0 and eager.before_compiling:
        return None  # what is left of a compiling step holds more than its own work
    return more * eager.after_steps if more >= COMPILE.eager * eager.before_ms else 0.0


def break_losses(backend: Backend) -> Iterator[Loss]:
    """Breaks whose compilations, behind them or failed, cost more than the floor; the others together."""
    small: list[tuple[CompilerCause, list[CompilerCause]]] = []
    compiled = backend.causes("compile", "failure")
    for cause in backend.causes("graph_break"):
        behind = [each for each in compiled if _behind(each, cause)]
        if not cause.step_count or not timed(behind):
            continue
        if total_ms(behind) >= REPORT_FLOOR * backend.loop_ms:
            yield _break_loss(backend, [(cause, behind)])
        else:
            small.append((cause, behind))
    if small:
        yield _break_loss(backend, sorted(small, key=lambda pair: -total_ms(pair[1])))


def _behind(compiled: CompilerCause, broken: CompilerCause) -> bool:
    """Whether this is what failed of the break, or the function that goes on behind it: its name holds the line."""
    resumed, place = _RESUMED.search(compiled.function or ""), broken.place
    if compiled.kind == "failure":
        where = compiled.place
        return place is not None and where is not None and (where.file, where.line) == (place.file, place.line)
    if resumed is None or place is None or int(resumed.group(2)) != place.line:
        return False
    same_file = compiled.definition is None or compiled.definition.file == place.file
    resumes = resumed.group(1).rsplit(".", 1)[-1]
    return same_file and (broken.function is None or resumes == function_name(broken.function))


def _break_loss(backend: Backend, pairs: list[tuple[CompilerCause, list[CompilerCause]]]) -> Loss:
    broken, behind = [cause for cause, _ in pairs], {each.id: each for _, compiled in pairs for each in compiled}
    first = broken[0]
    failed = [each for each in behind.values() if each.kind == "failure"]
    reason = CAUSE_WORDS.get(first.cause, _OTHER).reason or clipped(first.text, 60) or "for a reason that was not told"
    if first.cause == "unsupported_call" and first.operator:
        reason = f"the compiler cannot follow {clipped(first.operator, 60)}"
    breaks = f"The graph of {function_name(first.function)} breaks{at(first.place)}"
    caveat = "compile what follows the break, part of which one whole graph would need too. What the break costs in "
    caveat += "each step (a smaller graph, a way through Python)"
    if failed == list(behind.values()):
        tries = f" {failed[0].count} times" if failed[0].count > 1 else ""
        breaks = f"Compiling {function_name(failed[0].function)} fails{tries}{at(first.place)}"
        caveat = "try; what running eagerly costs in each step"
    goes_on = any(each.count >= COMPILE.same_cause for each in failed)
    if len(pairs) > 1:
        breaks = f"Graphs break at {len(pairs)} lines of the step, {shown(first.place or Place('?', None))} first"
    evidence = []
    for cause, compiled in pairs[: COMPILE.places_shown]:
        where, source = shown(cause.place) if cause.place else "an unknown line", cause.source or TORCH
        evidence.append(fact(f"graph breaks at {where}", cause.count, "", source))
        evidence.append(fact(f"reason at {where}", clipped(cause.text) or None, "", source))
        what_for = "trying to compile it" if compiled[0].kind == "failure" else "compiling what follows"
        evidence.append(ms(f"{what_for}, {where}", total_ms(compiled), compiled[0].source or TORCH))
    fixes = [
        (CAUSE_WORDS.get(one.cause, _OTHER).break_fix or _BREAK).format(place=at_place(one.place)) + hinted(one)
        for one in broken[:3]
    ]
    return backend.loss(
        "compile.graph_break",
        total_ms(behind.values()),
        broken,
        floor=0.0,
        compile_ms=total_ms(each for each in failed if each.count > 1),
        late_ms=total_ms(each for each in late(behind.values()) if each not in failed or each.count == 1),
        key=first.id if len(pairs) == 1 else f"several-{first.id}",
        title=f"{breaks}: {reason}",
        levels=("medium" if goes_on else "low",),
        worst="critical" if goes_on else "warning",
        evidence=evidence,
        fix="; ".join(dict.fromkeys(fixes)) + ("; or call it no more once it has failed" if goes_on else ""),
        caveat=f"The cost is the time to {caveat} was not measured. {'' if goes_on else AMORTISED}".strip(),
        falsified_by="With torch.compile(..., fullgraph=True), which allows no break, the mean step does not get "
        "shorter",
    )


def _evidence(backend: Backend, items: list[CompilerCause]) -> Iterator[Known]:
    for cause in items[: COMPILE.places_shown]:
        if cause.kind != "recompile":
            yield ms("failed compilations", cause.total_ms, cause.source or TORCH)
            continue
        name, source = f"recompilations by {what(cause)}", cause.source or TORCH
        seen = changes(cause.changes)
        yield fact(f"{what(cause)} changed from", seen or None, "", source)
        yield fact(name, cause.count, "", source)
        yield ms(f"time of {name}", cause.total_ms, source)
        yield fact("the compiler's reason", None if seen else clipped(cause.text) or None, "", source)
    yield fact(f"{'training' if backend.kind == 'train' else 'evaluation'} steps", backend.steps, "", backend.source)
