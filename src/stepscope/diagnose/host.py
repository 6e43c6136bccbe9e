"""What the training thread does besides torch: loops that call it once per item, Python between operators, file I/O.

And steps that grow slower over the run, which is mostly Python that handles more and more.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.common import (
    bare,
    clip_share,
    finding_id,
    lowest,
    sampled_confidence,
    severity,
    shown,
    stacks_source,
    steps_confidence,
    steps_source,
    train_steps,
)
from stepscope.diagnose.machine import asked_for, device_doubt
from stepscope.diagnose.needless_work import told_places
from stepscope.diagnose.ranks import small_lines
from stepscope.diagnose.thresholds import CAUSES, CONFIDENCE, DRIFT, IO, LOOP, PYTHON
from stepscope.model import Analysis, Evidence, Finding, Interval, IoFacts, LoopFacts, Place, PythonFacts, StepFacts
from stepscope.model.machine import DriftFacts

LOOP_RULE = "host.per_item_loop"
PYTHON_RULE = "host.python_on_critical_path"
DRIFT_RULE = "host.step_drift"
LEARN_LOOP = "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
LEARN_PYTHON = "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html"

# What to write instead, by what the loop calls.
_HINTS = {
    "cross_entropy": "by one call: F.cross_entropy(logits.flatten(0, 1), targets.flatten()) is the mean over all items",
    "nll_loss": "by one call on the flattened tensors",
    "item": "by keeping the values in one tensor and one .tolist() behind the loop",
    "linear": "by one call: a linear layer takes any number of leading dimensions",
    "matmul": "by one torch.matmul or torch.einsum on the stacked operands",
    "cat": "by collecting the parts in a list and one torch.cat behind the loop",
    "stack": "by collecting the parts in a list and one torch.stack behind the loop",
    "add_": "by the torch._foreach operators or an optimizer with foreach=True, which update all tensors in one call",
    "mul_": "by the torch._foreach operators or an optimizer with foreach=True, which update all tensors in one call",
}


def per_item_loop(analysis: Analysis) -> list[Finding]:
    """One finding per Python loop whose operators and backward nodes cost more than the floor."""
    train = train_steps(analysis)
    if train is None:
        return []
    # A loop over collectives is a loss of communication, and told there; so are passes of the model that train nothing.
    told = (*small_lines(analysis), *told_places(analysis))
    loops = [loop for loop in reported_loops(analysis) if not _told(told, loop.place, None)]
    made = [(loop, _loop_finding(analysis, train, loop)) for loop in loops]
    linked = []
    for loop, finding in made:
        inner = tuple(other.id for each, other in made if each.nested_in == loop.place and each is not loop)
        linked.append(replace(finding, explains=inner))
    return linked


def _told(told: Iterable[Place], place: Place, call: Place | None) -> bool:
    """Whether another rule tells of this line, or of the whole function it stands in."""
    for other in told:
        if other.line is not None:
            if (other.file, other.line) == (place.file, place.line):
                return True
        elif any(
            one is not None and (other.file, bare(other.function)) == (one.file, bare(one.function))
            for one in (place, call)
        ):
            return True
    return False


def reported_loops(analysis: Analysis) -> list[LoopFacts]:
    """Loops that run torch operators and cost more than the floor; Python inside them is theirs."""
    train = train_steps(analysis)
    if train is None:
        return []
    return [
        loop
        for loop in analysis.loops or ()
        if loop.operators_per_call >= LOOP.operators_per_call and _cost(loop) >= LOOP.floor * train.mean_ms
    ]


def python_on_critical_path(analysis: Analysis) -> list[Finding]:
    """One finding per call of the user's whose Python time on the main thread costs more than the floor.

    A call is a function with all it calls, as far as it trains nothing: its helpers and libraries are part of the loss.
    """
    train = train_steps(analysis)
    if train is None:
        return []
    explained = _holding_loops(analysis)
    told = told_places(analysis)
    collected = _collected(analysis)
    functions: dict[tuple[str, str], list[PythonFacts]] = {}
    for fact in analysis.python or ():
        loop = fact.inside_loop
        if _told(told, fact.place, fact.call):
            continue
        if loop is None or (loop.file, loop.line) not in explained:
            line = (fact.place.file, fact.place.line)
            struck_ms = min(fact.ms_per_step, collected.get(line, 0.0))
            if struck_ms:  # the garbage collector's time at this line is the collector's
                collected[line] -= struck_ms
            blamed = fact.call or fact.place
            functions.setdefault((blamed.file, bare(blamed.function)), []).append(
                replace(fact, ms_per_step=fact.ms_per_step - struck_ms)
            )
    found = []
    for facts in functions.values():
        cost, samples = sum(fact.ms_per_step for fact in facts), sum(fact.samples for fact in facts)
        if cost >= PYTHON.floor * train.mean_ms and samples >= PYTHON.samples:
            found.append(_python_finding(analysis, train, facts, cost, samples))
    return found


def _holding_loops(analysis: Analysis) -> set[tuple[str, int | None]]:
    """The lines of reported loops whose cost holds the Python in their iterations, so that it is told with them."""
    inside: dict[tuple[str, int | None], float] = {}
    for fact in analysis.python or ():
        if fact.inside_loop is not None:
            line = (fact.inside_loop.file, fact.inside_loop.line)
            inside[line] = inside.get(line, 0.0) + fact.ms_per_step
    costs = {(loop.place.file, loop.place.line): _cost(loop) for loop in reported_loops(analysis)}
    return {line for line, ms in costs.items() if ms >= inside.get(line, 0.0) * CAUSES.part}


def _collected(analysis: Analysis) -> dict[tuple[str, int | None], float]:
    """ms per step of garbage collections that struck at each of the user's lines."""
    pauses = analysis.machine.pauses if analysis.machine is not None else None
    return {(line.place.file, line.place.line): line.ms_per_step for line in pauses.lines} if pauses else {}


def step_drift(analysis: Analysis) -> list[Finding]:
    """One finding when steady steps grow slower all through the run, by more than the floor on average."""
    train, machine = train_steps(analysis), analysis.machine
    drift = machine.drift if machine is not None else None
    if train is None or drift is None or not drift.rising or drift.lost_ms_per_step < DRIFT.floor * train.mean_ms:
        return []
    share = clip_share(drift.lost_ms_per_step, train.mean_ms)
    grown = sum(max(0.0, ms) for ms in drift.phases.values())
    phase = max(drift.phases, key=lambda name: drift.phases[name], default=None)
    named = phase is not None and grown > 0 and drift.phases[phase] >= DRIFT.phase * grown
    where = tuple(line.place for line in drift.lines)
    places = {(place.file, place.line) for place in where}
    same = [
        finding.id
        for finding in python_on_critical_path(analysis)
        if any((place.file, place.line) in places for place in finding.where)
    ]
    doubt, words = device_doubt(analysis)
    return [
        Finding(
            id=finding_id(DRIFT_RULE, where[0] if where else None),
            rule=DRIFT_RULE,
            category="host",
            title=f"Steps grow slower over the run, from {drift.early_ms:.3g} to {drift.late_ms:.3g} ms"
            + (f", most of it in {phase}" if named else ""),
            severity=severity(share),
            confidence=lowest([steps_confidence(train), "medium", *doubt]),
            cost_ms_per_step=drift.lost_ms_per_step,
            share=share,
            gain_ceiling=max(share, clip_share(gains.without_main(analysis, drift.lost_ms_per_step), train.mean_ms)),
            where=where,
            ranks=train.ranks,
            evidence=_drift_evidence(train, drift),
            fix="Find what each step has more of than the one before: lists and caches that are never emptied, losses "
            "kept with their graph (use .detach() or .item()), metrics over the whole history, hooks added again",
            caveat="In a longer run the loss grows further. Inputs that grow (longer sequences late in an epoch) and a "
            f"machine that heats up or fills look the same.{words}",
            learn=LEARN_PYTHON,
            falsified_by="In a run that starts from the last state the first steps are as slow as the last ones were",
            explains=tuple(same),
        )
    ]


def _drift_evidence(train: StepFacts, drift: DriftFacts) -> tuple[Evidence, ...]:
    source = f"{steps_source(train)}, {drift.steps} steady steps"
    medians = ", ".join(f"{value:.4g}" for value in drift.medians_ms)
    found = [
        Evidence("level at the start", round(drift.early_ms, 3), "ms", source),
        Evidence("level at the end", round(drift.late_ms, 3), "ms", source),
        Evidence(f"medians of {drift.parts} parts of the run", medians, "ms", source),
    ]
    for phase, ms in sorted(drift.phases.items(), key=lambda item: -item[1]):
        if ms > 0:
            found.append(Evidence(f"growth of {phase}, first part to last", round(ms, 3), "ms", source))
    for line in drift.lines:
        metric = f"main thread at {shown(line.place)}, last third"
        early = f"{line.early_ms_per_step:.3g} ms in the first third; {line.samples} samples"
        found.append(Evidence(metric, round(line.late_ms_per_step, 3), "ms", early))
    return tuple(found)


def _cost(loop: LoopFacts) -> float:
    return loop.ms_per_step + (loop.backward_ms_per_step or 0.0)


def _ceiling(loop: LoopFacts) -> float:
    forward = max(loop.ms_per_step, loop.at_most_ms_per_step or 0.0)
    return forward + max(loop.backward_ms_per_step or 0.0, loop.backward_at_most_ms_per_step or 0.0)


def _expected(loop: LoopFacts, train: StepFacts) -> Interval | None:
    """What one call over all items gains, None where the loop's operators were not timed.

    At worst it takes what the operators of all items took together while they were recorded, and the backward pass
    stays as it is; at best it takes what a single item takes.
    """
    operators, per_loop = loop.operators_ms_per_step, loop.calls_per_invocation
    if operators is None or per_loop < 2:
        return None
    high = clip_share(_cost(loop) * (1.0 - 1.0 / per_loop), train.mean_ms)
    return Interval(low=min(high, clip_share(loop.ms_per_step - operators, train.mean_ms)), high=high)


def _loop_finding(analysis: Analysis, train: StepFacts, loop: LoopFacts) -> Finding:
    cost = min(_cost(loop), train.mean_ms)
    share = clip_share(cost, train.mean_ms)
    size = f" ({loop.dimension})" if loop.dimension else ""
    start = Place(loop.place.file, loop.loop_line or loop.place.line, loop.place.function)
    return Finding(
        id=finding_id(LOOP_RULE, loop.place),
        rule=LOOP_RULE,
        category="host",
        title=f"A Python loop ({shown(start)}) calls {loop.callee} {loop.calls_per_step:g} times per step{size}",
        severity=severity(share),
        confidence=lowest([steps_confidence(train), _loop_confidence(loop)]),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=clip_share(max(cost, gains.without_main(analysis, _ceiling(loop))), train.mean_ms),
        expected_gain=_expected(loop, train),
        where=_loop_places(loop),
        ranks=train.ranks,
        evidence=_loop_evidence(loop),
        fix=_loop_fix(loop),
        caveat="One call over all items holds the results of all of them at once: memory grows by the items' size. "
        "Sums in another order differ in the last digits.",
        learn=LEARN_LOOP,
        falsified_by=f"With the loop replaced by one call, {loop.callee} still runs {loop.calls_per_step:g} times per "
        "step, or the mean step does not get shorter",
    )


def _loop_places(loop: LoopFacts) -> tuple[Place, ...]:
    """The line that makes the calls, then the line of the `for`."""
    places = [replace(loop.place, share=1.0)]
    if loop.loop_line is not None and loop.loop_line != loop.place.line:
        places.append(Place(loop.place.file, loop.loop_line, loop.place.function))
    return tuple(places)


def _loop_fix(loop: LoopFacts) -> str:
    hint = _HINTS.get(loop.callee.removeprefix("aten::"))
    if hint is None:
        hint = (
            "by operators on the whole tensor (broadcasting, einsum, torch.vmap)"
            if loop.dimension
            else "by operators on all items at once: one tensor that holds them, or the torch._foreach operators"
        )
    over = f" over {loop.dimension.split(' = ', 1)[1]}" if loop.dimension else ""
    return f"Replace the loop{over} {hint}"


def _loop_confidence(loop: LoopFacts) -> str:
    """The window counts calls exactly; how well it times them depends on its steps, or on samples that agree."""
    if loop.low_confidence:
        return "low" if loop.samples < CONFIDENCE.few_samples else "medium"
    return "high" if loop.window_steps >= LOOP.steps_for_high and loop.exact_line else "medium"


def _loop_evidence(loop: LoopFacts) -> tuple[Evidence, ...]:
    source = loop.source
    found = [
        Evidence(f"calls of {loop.callee} per step", round(loop.calls_per_step, 2), "calls", source),
        Evidence("loop per step, forward", round(loop.ms_per_step, 3), "ms", loop.time_source or source),
    ]
    if loop.backward_ms_per_step is not None:
        matched = f"{source}; matched by sequence number, scaled to the steady step"
        found.append(Evidence("loop per step, backward", round(loop.backward_ms_per_step, 3), "ms", matched))
        at_most = loop.backward_at_most_ms_per_step
        if at_most is not None and at_most > loop.backward_ms_per_step:
            found.append(Evidence("loop per step, backward, at most", round(at_most, 3), "ms", matched))
    if loop.dimension:
        found.append(Evidence("calls equal a dimension", loop.dimension, "", f"{source}; recorded shapes"))
    found.append(Evidence("operators per call", round(loop.operators_per_call, 1), "operators", source))
    if loop.backward_node is not None and loop.backward_calls_per_step is not None:
        found.append(
            Evidence(f"{loop.backward_node} per step", round(loop.backward_calls_per_step, 2), "calls", source)
        )
    return tuple(found)


def _python_finding(
    analysis: Analysis, train: StepFacts, facts: list[PythonFacts], cost: float, samples: int
) -> Finding:
    facts = sorted(facts, key=lambda fact: -fact.ms_per_step)
    top = facts[0]
    share = clip_share(cost, train.mean_ms)
    name = bare((top.call or top.place).function)
    waits = (top.waiting_share or 0.0) >= PYTHON.waiting
    known = all(fact.python_fraction is not None or fact.library_leaf is not None for fact in facts)
    unknown = sum(fact.unknown_ms_per_step for fact in facts) / cost
    told = "low" if unknown >= PYTHON.unknown else "high" if known and unknown < PYTHON.doubtful else "medium"
    levels = [steps_confidence(train), sampled_confidence(samples), told]
    accelerator = [device for device in analysis.devices if device != "cpu"]
    caveat = "Moving the work off the step changes when it happens, not whether; check that nothing reads it earlier."
    if accelerator:
        levels.append("low")
        caveat += f" The {accelerator[0]} may be working meanwhile: then the gain is smaller, down to nothing."
    return Finding(
        id=finding_id(PYTHON_RULE, top.call or Place(top.place.file, None, top.place.function)),
        rule=PYTHON_RULE,
        category="host",
        title=_python_title(top, f"{name} ({shown(top.place)})", share, waits),
        severity=severity(share),
        confidence=lowest(levels),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=clip_share(max(cost, _python_ceiling(analysis, facts, cost)), train.mean_ms),
        where=(*_python_places(facts, cost), *([top.entry] if top.entry is not None else [])),
        ranks=train.ranks,
        evidence=_python_evidence(analysis, train, facts),
        fix=_python_fix(top, waits),
        caveat=caveat,
        learn=LEARN_PYTHON,
        falsified_by=f"With the work of {name} left out, the mean step does not get shorter",
    )


def _python_title(top: PythonFacts, place: str, share: float, waits: bool) -> str:
    reached = f", reached from {shown(top.entry)}" if top.entry is not None else ""
    if waits:
        return f"The main thread sleeps or waits in {place} for {share:.0%} of the step{reached}"
    if top.entry is not None:
        return f"A library's own Python on the critical path: {place} takes {share:.0%} of the step{reached}"
    return f"Python work on the critical path: {place} takes {share:.0%} of the step"


def _python_ceiling(analysis: Analysis, facts: list[PythonFacts], cost: float) -> float:
    """ms: the whole call where Python is a notable part of it, else the Python in it; and collections it may cause."""
    top = facts[0]
    pauses = analysis.machine.pauses if analysis.machine is not None else None
    own_ms = others_ms = 0.0
    if pauses is not None:
        # what allocates calls for collections, and automatic ones strike anywhere
        here = {(fact.place.file, fact.place.line) for fact in facts}
        own_ms = sum(line.ms_per_step for line in pauses.lines if (line.place.file, line.place.line) in here)
        if asked_for(analysis, pauses) is None:
            others_ms = sum(line.ms_per_step for line in pauses.lines) - own_ms
    most = cost * top.sampling + own_ms
    if top.call_ms_per_step and cost >= PYTHON.of_call * top.call_ms_per_step:
        most = max(most, top.call_at_most_ms_per_step or 0.0)
    most += others_ms
    return gains.without_main(analysis, most)


def _python_places(facts: list[PythonFacts], cost: float) -> tuple[Place, ...]:
    """The lines with most of the cost; a line in several phases or loops is one."""
    ms: dict[Place, float] = {}
    for fact in facts:
        ms[fact.place] = ms.get(fact.place, 0.0) + fact.ms_per_step
    lines = sorted(ms.items(), key=lambda item: (-item[1], item[0].file, item[0].line or 0))
    return tuple(replace(place, share=one / cost) for place, one in lines[: PYTHON.lines_shown])


def _python_fix(top: PythonFacts, waits: bool) -> str:
    place = shown(top.place)
    if top.entry is not None:
        return (
            f"{shown(top.entry)} only leads there. Switch off or make rarer what asks for {bare(top.place.function)} "
            "(logging, callbacks, progress, checks) in the library's own options, or give a step more work: a larger "
            "batch pays it less often"
        )
    if waits:
        return f"Take the wait at {place} out of the step, or do it in another thread while the step computes"
    below = f" (most of it in {bare(top.library_leaf)})" if top.library_leaf else ""
    return (
        f"Take the work at {place}{below} out of the step: do it on tensors, once before training, every N steps only, "
        "or in the DataLoader's workers"
    )


def _python_evidence(analysis: Analysis, train: StepFacts, facts: Iterable[PythonFacts]) -> tuple[Evidence, ...]:
    found = [Evidence("mean steady step", round(train.mean_ms, 3), "ms", steps_source(train))]
    facts = list(facts)
    unknown = sum(fact.unknown_ms_per_step for fact in facts)
    if unknown > 0:
        source = f"{stacks_source(analysis)}, in functions that no profiler window saw"
        found.append(Evidence("of it not told from torch operators", round(unknown, 3), "ms", source))
    call, whole = facts[0].call, facts[0].call_ms_per_step
    if call is not None and whole:
        source = f"{stacks_source(analysis)}, with torch operators and libraries in it"
        found.append(Evidence(f"all that runs in {bare(call.function)}", round(whole, 3), "ms", source))
    for fact in list(facts)[: PYTHON.lines_shown]:
        source = f"{stacks_source(analysis)}, {fact.samples} samples in {fact.phase}"
        found.append(Evidence(f"main thread at {shown(fact.place)}", round(fact.ms_per_step, 3), "ms", source))
        if fact.python_fraction is not None:
            found.append(
                Evidence(
                    f"time of {bare(fact.library_leaf or fact.place.function)} outside torch operators",
                    round(fact.python_fraction, 4),
                    "fraction",
                    fact.source,
                )
            )
    return tuple(found)


IO_RULE = "io.blocking_in_step"
LEARN_IO = "https://pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html"
_IO_SAVES = ("torch.save", "save", "save_checkpoint", "save_pretrained", "save_file")
_IO_READS = (
    "read",
    "readline",
    "readlines",
    "readinto",
    "read_text",
    "read_bytes",
    "loadtxt",
    "read_csv",
    "read_parquet",
)


def blocking_in_step(analysis: Analysis) -> list[Finding]:
    """One finding per line whose I/O inside training steps costs more than the floor."""
    train = train_steps(analysis)
    if train is None:
        return []
    facts: dict[tuple[str, object], list[IoFacts]] = {}
    for fact in analysis.io or ():
        facts.setdefault(_scope(fact), []).append(fact)
    found = []
    for group in facts.values():
        cost = sum(fact.ms_per_step for fact in group)
        enough = any(fact.measured for fact in group) or sum(fact.count for fact in group) >= IO.samples
        if enough and cost >= IO.floor * train.mean_ms:
            found.append(_io_finding(analysis, train, sorted(group, key=lambda fact: -fact.ms_per_step), cost))
    return found


def _scope(fact: IoFacts) -> tuple[str, object]:
    """Lines of one call, else of one function, are one finding: open, write and close are one habit."""
    place = fact.call or fact.place
    return place.file, bare(place.function) if place.function else place.line


def _io_finding(analysis: Analysis, train: StepFacts, facts: list[IoFacts], cost: float) -> Finding:
    top = facts[0]
    cost = min(cost, train.mean_ms)
    share = clip_share(cost, train.mean_ms)
    measured = "high" if top.measured else sampled_confidence(sum(fact.count for fact in facts))
    return Finding(
        id=finding_id(IO_RULE, top.place),
        rule=IO_RULE,
        category="io",
        title=f"Every step waits for file I/O: {top.operation} ({shown(top.place)}) takes {share:.0%} of the step"
        + (f", reached from {shown(top.entry)}" if top.entry is not None else ""),
        severity=severity(share),
        confidence=lowest([steps_confidence(train), measured]),
        cost_ms_per_step=cost,
        share=share,
        gain_ceiling=clip_share(max(cost, _io_ceiling(analysis, facts, cost)), train.mean_ms),
        where=(
            *(replace(fact.place, share=fact.ms_per_step / cost if cost else None) for fact in facts),
            *([top.entry] if top.entry is not None else []),
        ),
        ranks=train.ranks,
        evidence=_io_evidence(analysis, facts),
        fix=_io_fix(top),
        caveat="What is written later or in the background is lost when the process dies before it is written.",
        learn=LEARN_IO if top.operation in _IO_SAVES else "",
        falsified_by=f"With the {top.operation} at {shown(top.place)} left out, the mean step does not get shorter",
    )


def _io_ceiling(analysis: Analysis, facts: list[IoFacts], cost: float) -> float:
    """ms: with the whole call where I/O is a notable part of it; what it computes to write goes as well."""
    top = facts[0]
    most = cost
    if top.call_ms_per_step and cost >= IO.of_call * top.call_ms_per_step:
        most = max(most, top.call_at_most_ms_per_step or 0.0)
    return gains.without_main(analysis, most)


def _io_fix(top: IoFacts) -> str:
    place = shown(top.place)
    if top.entry is not None:
        return (
            f"{shown(top.entry)} only leads there. Let the library do {top.operation} every N steps only: its options "
            "for checkpoints, loggers and progress say how often"
        )
    if top.operation in _IO_SAVES:
        return (
            f"Save less often at {place} (every N steps or minutes), or copy the tensors and write them in a "
            "background thread (torch.distributed.checkpoint.async_save does both)"
        )
    if top.operation in _IO_READS or top.operation == "open":
        return f"Read at {place} before training, or in the DataLoader's workers"
    return (
        f"Collect what {place} writes and write it every N steps without flushing each time, or in a background thread"
    )


def _io_evidence(analysis: Analysis, facts: list[IoFacts]) -> tuple[Evidence, ...]:
    found = []
    for fact in facts:
        source = fact.source if fact.measured else f"{stacks_source(analysis)}, {fact.source}"
        found.append(
            Evidence(f"{fact.operation} at {shown(fact.place)} per step", round(fact.ms_per_step, 3), "ms", source)
        )
        if fact.calls_per_step is not None:
            found.append(
                Evidence(f"calls of {fact.operation} per step", round(fact.calls_per_step, 3), "calls", fact.source)
            )
    return tuple(found)
