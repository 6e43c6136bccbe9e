"""What the training thread does besides torch: loops that call it once per item, Python between operators, file I/O.

And steps that grow slower over the run, which is mostly Python that handles more and more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from stepscope.diagnose import gains
from stepscope.diagnose.communication import small_lines
from stepscope.diagnose.gains import PIPELINE
from stepscope.diagnose.machine import asked_for
from stepscope.diagnose.needless_work import growing, told_places
from stepscope.diagnose.rule import (
    ALL,
    CAUSES,
    CONFIDENCE,
    ON_DEVICE,
    REPORT_FLOOR,
    SEVERITY,
    STEPS,
    Claim,
    Known,
    Need,
    Thresholds,
    advice,
    always,
    at,
    bare,
    clip_share,
    device_doubt,
    figure,
    figures,
    ms,
    rule,
    sampled_confidence,
    shown,
    spot,
    stacks_source,
    steps_source,
)
from stepscope.model import Analysis, Evidence, Interval, IoFacts, LoopFacts, Place, PythonFacts, StepFacts
from stepscope.model.counted import short, things
from stepscope.model.machine import CpuFacts
from stepscope.model.metrics import ANOMALY, HOOKS


class LOOP(Thresholds):
    operators_per_call: float = 1.0  # below it the iterations run no torch operator: plain Python, another rule
    plain: float = 0.9  # of a call's time outside operators: what runs some small ones spends half of it there
    steps_for_high: int = 3  # window steps from which a mean over them is no accident


class PYTHON(Thresholds):
    samples: int = 10  # fewer samples on a function are chance
    waiting: float = 0.5  # mostly parked: it sleeps or waits rather than computes
    lines_shown: int = 3
    beside: float = 0.5  # of the steps' time in another thread's Python: then it takes turns with the main one
    of_call: float = 0.2  # of all that runs in the call: with less the call is not about Python; chosen, untuned
    unknown: float = 0.5  # of the cost: with more of it not told from operators nobody knows that it is Python
    doubtful: float = 0.2  # of the cost: with less the answer is the same either way; chosen, untuned
    # Of the step, at a line of the loop that leads to training: less is the way into torch, some 10 us a call, which
    # is 5 % of a step of 0.2 ms and cannot be left out; chosen, untuned.
    way_in: float = SEVERITY.warning


class ANOMALIES(Thresholds):
    # Of the backward pass: looking for NaN in every gradient, three operators beside one or two for a node
    checks: float = 0.5


class EVALUATION(Thresholds):
    # Of the loop: evaluation is meant. A fifth of the data evaluated after each epoch takes some 7 % where a model
    # computes, and 17 % where batches are waited for; that is usual, and nobody's mistake.
    floor: float = 0.20
    times_for_high: int = 3  # between training steps: once or twice may be the start of a run alone


class IO(Thresholds):
    samples: int = 10
    of_call: float = 0.2  # as for Python; chosen, untuned


class DRIFT(Thresholds):
    """When steps that grow slower count. How a drift is told from noise stands in `analyze/host/sampled_stacks.py`."""

    phase: float = 0.5  # a phase with more than half of the growth is named


LOGGED = Need(
    "a logging tool in the sampled stacks",
    lambda a: [one for one in a.logging or () if one.tool != ANOMALY],
    quiet=True,
)
DETECTING = Need(
    "anomaly detection in the sampled stacks",
    lambda a: [one for one in a.logging or () if one.tool == ANOMALY],
    quiet=True,
)
STACKS = Need("sampled stacks of steady steps", lambda a: a.python is not None)
WINDOW = Need("a profiler window with complete steps and Python stacks", lambda a: a.loops is not None, traced=always)
PYTHON_TOLD = Need(
    "a profiler window, to tell Python from operators at lines that call no library in Python",
    # else by the samples with a line of the user's on top, where the sampler shows nothing of what it calls
    lambda a: (
        a.loops is not None
        or sum(
            line.share
            for line in (a.stacks.hot_lines if a.stacks is not None else ())
            if line.role == "rank" and line.phase != "data_wait" and line.library_leaf is None
        )
        < REPORT_FLOOR
    ),
)
IO_SEEN = Need(
    "sampled stacks or a profiler window with Python stacks",
    lambda a: a.io is not None,
    traced=lambda a: a.stacks is None,
)
EVALUATED = Need("evaluation between training steps", lambda a: a.machine.evaluation, quiet=True)
MANY_STEPS = Need("60 steady training steps", lambda a: a.machine.drift)
LEARN = "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
BESIDE = "beside"  # the key of what another thread does
ONE_AFTER_ANOTHER = (
    " Iterations of which each takes what the one before it gave, as in a rollout or a generated sequence, cannot be "
    "one call: larger batches or fewer of them help there."
)
JOINING = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")  # what they grow may be collected in a list
CARRIED = (
    "Each call takes `{}` of the one before it, so no one call can replace them. Use torch's form of the recurrence "
    "where there is one (nn.LSTM for nn.LSTMCell, torch.cumsum for a running sum); else let each call work on more at "
    "once (sequences, samples or environments side by side), make fewer of them, or put torch.compile around the loop"
)


@rule("host.per_item_loop", STEPS, WINDOW, learn=LEARN)
def per_item_loop(analysis: Analysis) -> Iterator[Claim]:
    train = STEPS.of(analysis)
    # A loop over collectives is a loss of communication, and told there; so are passes of the model that train nothing.
    told = (*small_lines(analysis), *told_places(analysis))
    loops = [loop for loop in reported_loops(analysis) if not _told(told, loop.place, None)]
    made = [(loop, _loop_claim(analysis, train, loop)) for loop in loops]
    for loop, claim in made:
        inner = [other for each, other in made if each.nested_in == loop.place and each is not loop]
        yield replace(claim, explains=tuple(per_item_loop.id_of(other) for other in inner))


def _told(told: Iterable[Place], place: Place, call: Place | None) -> bool:
    """Whether another rule tells of this line, or of the whole function it stands in."""
    functions = {(one.file, bare(one.function)) for one in (place, call) if one is not None}
    return any(
        spot(other) == spot(place) if other.line is not None else (other.file, bare(other.function)) in functions
        for other in told
    )


def reported_loops(analysis: Analysis) -> list[LoopFacts]:
    """Loops that run torch operators and cost more than the floor; Python inside them is theirs.

    But for those that mostly call Python without an operator, as an environment that is simulated: that is the loss.
    """
    least, plain = REPORT_FLOOR * STEPS.of(analysis).mean_ms, defaultdict[object, float](float)
    for fact in analysis.python or ():
        if fact.inside_loop is not None and fact.call is not None and (fact.python_fraction or 0.0) >= LOOP.plain:
            plain[spot(fact.inside_loop)] += fact.ms_per_step
    return [
        loop
        for loop in analysis.loops or ()
        if loop.operators_per_call >= LOOP.operators_per_call
        and loop.both_passes_ms >= max(least, plain[spot(loop.place)] / CAUSES.part)
    ]


def _loop_claim(analysis: Analysis, train: StepFacts, loop: LoopFacts) -> Claim:
    cost, source, calls = loop.both_passes_ms, loop.source, f"{round(loop.calls_per_step, 1):g}"
    callee = loop.callee.removeprefix("aten::")
    carried = loop.carried if callee not in JOINING else None
    forward = max(loop.ms_per_step, loop.at_most_ms_per_step or 0.0)
    backward = max(loop.backward_ms_per_step or 0.0, loop.backward_at_most_ms_per_step or 0.0)
    size = f" ({loop.dimension})" if loop.dimension else ""
    start = Place(loop.place.file, loop.loop_line or loop.place.line, loop.place.function)
    by = "by operators on all items at once: one tensor that holds them, the torch._foreach operators, or for updates "
    by += "of parameters an optimizer of torch.optim with fused=True"
    if loop.dimension:
        by = "by operators on the whole tensor (broadcasting, einsum, torch.vmap)"
    over = f" over {loop.dimension.split(' = ', 1)[1]}" if loop.dimension else ""
    # At worst one call over all items takes what the operators of all items took together while they were recorded, and
    # the backward pass stays as it is; at best it takes what a single item takes.
    gain, operators = None, loop.operators_ms_per_step
    if operators is not None and loop.calls_per_invocation >= 2 and carried is None:
        high = clip_share(cost * (1.0 - 1.0 / loop.calls_per_invocation), train.mean_ms)
        gain = Interval(low=min(high, clip_share(loop.ms_per_step - operators, train.mean_ms)), high=high)
    # the window counts calls exactly; how well it times them depends on its steps, or on samples that agree; without a
    # dimension that is looped over, nobody knows that an iteration does not need the one before it
    level = "high" if loop.window_steps >= LOOP.steps_for_high and loop.exact_line and loop.dimension else "medium"
    if carried is not None:  # what it takes is known, not whether the training can do without
        level = "low"
    elif loop.low_confidence:
        level = "low" if loop.samples < CONFIDENCE.few_samples else "medium"
    matched = f"{source}; matched by sequence number, scaled to the steady step"
    own_backward = loop.backward_ms_per_step
    most_backward = backward if own_backward is not None and backward > own_backward else None
    backward_calls = loop.backward_calls_per_step if loop.backward_node is not None else None
    evidence = (
        figure(f"calls of {loop.callee} per step", loop.calls_per_step, "calls", source, 2),
        ms("loop per step, forward", loop.ms_per_step, loop.time_source or source),
        ms("loop per step, backward", own_backward, matched),
        ms("loop per step, backward, at most", most_backward, matched),
        Evidence("calls equal a dimension", loop.dimension, "", f"{source}; recorded shapes")
        if loop.dimension
        else None,
        figure("operators per call", loop.operators_per_call, "operators", source, 1),
        Evidence("taken from the iteration before", carried, "", "syntax of the source") if carried else None,
        figure(f"{loop.backward_node} per step", backward_calls, "calls", source, 2),
    )
    return Claim(
        title=f"A Python loop ({shown(start)}) calls {loop.callee} {calls} times per step{size}"
        + (", one after the other" if carried else ""),
        steps=train,
        cost_ms=cost,
        ceiling_ms=gains.without_main(analysis, forward + backward, launches=True),
        expected_gain=gain,
        levels=(level,),
        # the line that makes the calls, then the line of the `for`
        where=(replace(loop.place, share=1.0), *((start,) if start.line != loop.place.line else ())),
        evidence=evidence,
        fix=CARRIED.format(carried) if carried else f"Replace the loop{over} {advice('loop', callee, by)}",
        caveat="What is computed side by side is held at once: memory grows by the items' size. With environments or "
        "samples side by side the batch is another one, which may train differently."
        if carried
        else "One call over all items holds the results of all of them at once: memory grows by the items' size. "
        "Sums in another order differ in the last digits." + ("" if loop.dimension else ONE_AFTER_ANOTHER),
        falsified_by=f"With fewer calls of {loop.callee} for as many items the mean step does not get shorter"
        if carried
        else f"With the loop replaced by one call, {loop.callee} still runs {calls} times per "
        "step, or the mean step does not get shorter",
    )


@rule("host.python_on_critical_path", STEPS, STACKS, helps=(PYTHON_TOLD,), learn=LEARN)
def python_on_critical_path(analysis: Analysis) -> Iterator[Claim]:
    """A call of the user's whose Python time on the main thread costs more than the floor.

    A call is a function with all it calls, as far as it trains nothing: its helpers and libraries are part of the loss.
    """
    train, pauses = STEPS.of(analysis), analysis.machine.pauses
    told = (*told_places(analysis), *growing(analysis))
    inside: dict[object, float] = defaultdict(float)
    for fact in analysis.python or ():
        if fact.inside_loop is not None:
            inside[spot(fact.inside_loop)] += fact.ms_per_step
    # reported loops whose cost holds the Python in their iterations, so that it is told with them
    loops = {spot(loop.place): loop.both_passes_ms for loop in reported_loops(analysis)}
    explained = {line for line, cost in loops.items() if cost >= inside[line] * CAUSES.part}
    collected = {spot(line.place): line.ms_per_step for line in pauses.lines} if pauses is not None else {}
    for claim in logging.judge(analysis) if LOGGED.present(analysis) else ():  # told by the tool's name
        for place in claim.where:
            collected[spot(place)] = collected.get(spot(place), 0.0) + claim.cost_ms
    functions: dict[tuple[str, str], list[PythonFacts]] = {}
    for fact in analysis.python or ():
        if _told(told, fact.place, fact.call) or (fact.inside_loop is not None and spot(fact.inside_loop) in explained):
            continue
        if fact.call is None and fact.entry is None and fact.share < PYTHON.way_in:
            continue
        line = spot(fact.place)
        struck_ms = min(fact.ms_per_step, collected.get(line, 0.0))
        if struck_ms:  # the garbage collector's time at this line is the collector's, a logging tool's is its own
            collected[line] -= struck_ms
        blamed = fact.call or fact.place
        functions.setdefault((blamed.file, bare(blamed.function)), []).append(
            replace(fact, ms_per_step=fact.ms_per_step - struck_ms)
        )
    for facts in functions.values():
        cost, samples = sum(fact.ms_per_step for fact in facts), sum(fact.samples for fact in facts)
        if cost >= REPORT_FLOOR * train.mean_ms and samples >= PYTHON.samples:
            yield _python_claim(analysis, train, sorted(facts, key=lambda fact: -fact.ms_per_step), cost, samples)
    yield from _beside(analysis, train)


def asleep_share(analysis: Analysis, cpu: CpuFacts) -> float:
    """Of the time, in which a main thread neither had nor wanted a core; while a window is closed it waits for us."""
    windows_ms = sum((one.stop_ms or 0.0) + (one.export_ms or 0.0) for one in analysis.windows)
    ours = windows_ms / max(1, len(analysis.run.ranks)) / max(1.0, cpu.seconds * 1e3)
    return max(0.0, 1.0 - (cpu.main_cpu_share or 0.0) - cpu.run_delay_share - ours)


def _beside(analysis: Analysis, train: StepFacts) -> Iterator[Claim]:
    """Python that another thread of the script runs for most of the time in which the main thread sleeps.

    What the main thread is known to sleep for, threads of torch that compute and our windows are no part.
    """
    place, cpu = analysis.machine.beside, analysis.machine.cpu
    if place is None or cpu is None or cpu.main_cpu_share is None or (place.share or 0.0) < PYTHON.beside:
        return
    if len(analysis.run.ranks) > 1 or ON_DEVICE.present(analysis):  # it may sleep for a rank or a device
        return
    asleep = asleep_share(analysis, cpu)
    used = cpu.pool.used_cores if cpu.pool is not None else 0.0  # what sleeps or waits itself keeps nobody waiting
    computing = min(used, ((cpu.threads or 1) - 1) * cpu.main_cpu_share)
    cost = min(asleep - computing, used - computing) * train.mean_ms - cpu.waits_ms_per_step
    source = f"system.jsonl, {cpu.readings} readings"
    yield Claim(
        title=f"The main thread sleeps for {clip_share(cost, train.mean_ms):.0%} of the step while another thread of "
        f"the script runs Python: {bare(place.function)} ({shown(place)})",
        steps=train,
        cost_ms=cost,
        ceiling_ms=cost + cpu.run_delay_share * train.mean_ms,  # the other thread may have its core as well
        levels=("medium",),
        where=(replace(place, share=None),),
        key=BESIDE,
        evidence=(
            figure("main thread on a core", cpu.main_cpu_share, "fraction", source),
            figure("main thread ready, without a core", cpu.run_delay_share, "fraction", source),
            figure("other threads in the user's code", place.share, "fraction", stacks_source(analysis)),
        ),
        fix=f"One thread at a time runs Python: take the work at {shown(place)} out of the training process "
        "(multiprocessing, a DataLoader worker), or do it in few calls of NumPy or torch, during which others run",
        caveat="Where the main thread waits for that thread's results or for a lock, the same line keeps it waiting.",
        falsified_by=f"Without the thread at {shown(place)} the mean step does not get shorter",
    )


def _python_claim(analysis: Analysis, train: StepFacts, facts: list[PythonFacts], cost: float, samples: int) -> Claim:
    top = facts[0]
    name = bare((top.call or top.place).function)
    known = all(fact.python_fraction is not None or fact.library_leaf is not None for fact in facts)
    unknown = sum(fact.unknown_ms_per_step for fact in facts) / cost
    sure = "low" if unknown >= PYTHON.unknown else "high" if known and unknown < PYTHON.doubtful else "medium"
    doubt, words = device_doubt(analysis)
    work = "Python work" if unknown < PYTHON.unknown else "Work"
    title, fix = _python_words(top, work, clip_share(cost, train.mean_ms))
    of_place: dict[Place, float] = defaultdict(float)  # a line in several phases or loops is one
    for fact in facts:
        of_place[fact.place] += fact.ms_per_step
    lines = sorted(of_place.items(), key=lambda item: (-item[1], item[0].file, item[0].line or 0))
    return Claim(
        title=title,
        steps=train,
        cost_ms=cost,
        ceiling_ms=_python_ceiling(analysis, facts, cost),
        levels=(sampled_confidence(samples), sure, *doubt),
        where=(
            *(replace(place, share=one / cost) for place, one in lines[: PYTHON.lines_shown]),
            *((top.entry,) if top.entry is not None else ()),
        ),
        key=top.call or Place(top.place.file, None, top.place.function),
        evidence=_python_evidence(analysis, train, facts),
        fix=fix,
        caveat="Moving the work off the step changes when it happens, not whether; check that nothing reads it earlier."
        + words,
        falsified_by=f"With the work of {name} left out, the mean step does not get shorter",
    )


def _python_words(top: PythonFacts, work: str, share: float) -> tuple[str, str]:
    """(title, fix)."""
    line, takes = shown(top.place), f"{share:.0%} of the step"
    place = f"{bare((top.call or top.place).function)} ({line})"
    entry = shown(top.entry) if top.entry is not None else ""
    reached = f", reached from {entry}" if entry else ""
    waits = (top.waiting_share or 0.0) >= PYTHON.waiting
    if waits:
        title = f"The main thread sleeps or waits in {place} for {takes}{reached}"
    elif entry:
        title = f"A library's own Python on the critical path: {place} takes {takes}{reached}"
    else:
        title = f"{work} on the critical path: {place} takes {takes}"
    if entry:
        name = bare(top.place.function)
        if top.phase in ("forward", "backward") or name in ("forward", "__call__"):
            less = f"{name} is part of the model's own passes, Python around small operators. Give a step more work"
        else:
            less = (
                f"Switch off or make rarer what asks for {name} (logging, callbacks, progress, checks) in the "
                "library's own options, or give a step more work"
            )
        return title, f"{entry} only leads there. {less}: a larger batch pays it less often"
    if waits:
        return title, f"Take the wait at {line} out of the step, or do it in another thread while the step computes"
    below = f" (most of it in {bare(top.library_leaf)})" if top.library_leaf else ""
    return title, (
        f"Take the work at {line}{below} out of the step: do it on tensors, once before training, every N steps only, "
        "or in the DataLoader's workers"
    )


def _python_ceiling(analysis: Analysis, facts: list[PythonFacts], cost: float) -> float:
    """ms: the whole call where Python is a notable part of it, else the Python in it; and collections it may cause."""
    top, pauses = facts[0], analysis.machine.pauses
    own_ms = others_ms = 0.0
    if pauses is not None:
        # what allocates calls for collections, and automatic ones strike anywhere
        here = {spot(fact.place) for fact in facts}
        own_ms = sum(line.ms_per_step for line in pauses.lines if spot(line.place) in here)
        if asked_for(analysis, pauses) is None:
            others_ms = sum(line.ms_per_step for line in pauses.lines) - own_ms
    most = cost * top.sampling + own_ms
    if top.call_ms_per_step and cost >= PYTHON.of_call * top.call_ms_per_step:
        most = max(most, top.call_at_most_ms_per_step or 0.0)
    return gains.without_main(analysis, most + others_ms)


def _python_evidence(analysis: Analysis, train: StepFacts, facts: list[PythonFacts]) -> Iterator[Known]:
    stacks = stacks_source(analysis)
    yield ms("mean steady step", train.mean_ms, steps_source(train))
    unknown = sum(fact.unknown_ms_per_step for fact in facts)
    if unknown > 0:
        yield ms("of it not told from torch operators", unknown, f"{stacks}, in functions that no profiler window saw")
    call, whole = facts[0].call, facts[0].call_ms_per_step
    if call is not None and whole:
        source = f"{stacks}, with torch operators and libraries in it"
        yield ms(f"all that runs in {bare(call.function)}", whole, source)
    for fact in facts[: PYTHON.lines_shown]:
        source = f"{stacks}, {things(fact.samples, 'sample')} in {fact.phase}"
        yield ms(f"main thread at {shown(fact.place)}", fact.ms_per_step, source)
        if fact.python_fraction is not None:
            name = bare(fact.library_leaf or fact.place.function)
            yield figure(f"time of {name} outside torch operators", fact.python_fraction, "fraction", fact.source)


@rule("host.logging", STEPS, LOGGED, learn="https://docs.wandb.ai/guides/track/limits/")
def logging(analysis: Analysis) -> Iterator[Claim]:
    train = STEPS.of(analysis)
    for one in LOGGED.of(analysis):
        if one.samples < PYTHON.samples:
            continue
        waits = (one.waiting_share or 0.0) >= PYTHON.waiting
        doubt, words = device_doubt(analysis)
        source = f"{stacks_source(analysis)}, {things(one.samples, 'sample')}"
        behind = PIPELINE.cold_tensors if one.tool == HOOKS else 0.0
        yield Claim(
            title=f"Logging with {one.tool} takes {clip_share(one.ms_per_step, train.mean_ms):.0%} of the step"
            f"{', mostly waiting' if waits else ''}: {bare(one.function)}{at(one.place)}",
            steps=train,
            cost_ms=one.ms_per_step,
            ceiling_ms=gains.without_main(analysis, one.at_most_ms_per_step, behind=behind),
            levels=(sampled_confidence(one.samples), *doubt),
            where=(one.place,) if one.place is not None else (),
            key=f"{one.tool.replace(' ', '-')}-{shown(one.place)}" if one.place is not None else one.tool,
            evidence=(
                ms(f"main thread in {bare(one.function)}", one.ms_per_step, source),
                figure("of it the thread waits", one.waiting_share, "share", source, 3),
            ),
            fix=f"{at(one.place).strip(' ()') or 'There'}: "
            + advice("logging", one.tool, "log every N steps only, and many values in one call"),
            caveat=f"What is logged less often is seen less often.{words}",
            falsified_by=f"With {one.tool} switched off, the mean step does not get shorter",
        )


@rule(
    "host.anomaly_detection", STEPS, DETECTING, learn="https://pytorch.org/docs/stable/autograd.html#anomaly-detection"
)
def anomaly_detection(analysis: Analysis) -> Iterator[Claim]:
    train, found = STEPS.of(analysis), DETECTING.of(analysis)
    cost, samples = sum(one.ms_per_step for one in found), sum(one.samples for one in found)
    if samples < PYTHON.samples:
        return
    where = tuple(one.place for one in found[: PYTHON.lines_shown] if one.place is not None)
    doubt, words = device_doubt(analysis)
    backward = sum(part.ms for part in train.partition if part.category == "backward")
    most = sum(one.at_most_ms_per_step for one in found) + ANOMALIES.checks * backward
    source = f"{stacks_source(analysis)}, {things(samples, 'sample')}"
    yield Claim(
        title=f"Torch's anomaly detection is on: it keeps the Python stack of every operator, "
        f"{clip_share(cost, train.mean_ms):.0%} of the step{at(*where)}",
        steps=train,
        cost_ms=cost,
        ceiling_ms=gains.without_main(analysis, most, behind=PIPELINE.cold_tensors),
        levels=(sampled_confidence(samples), *doubt),
        where=where,
        key="stacks",
        evidence=(
            ms("main thread in torch.fx.traceback.format_stack", cost, source),
            ms("backward pass, in which every gradient is looked at as well", backward, steps_source(train)),
        ),
        fix="Leave out torch.autograd.set_detect_anomaly(True) or detect_anomaly() where no NaN is being looked for: "
        "put it around one bad step alone",
        caveat="The cost counts the stacks alone, the ceiling half of the backward pass besides. Without it a NaN in "
        f"the backward pass raises no error.{words}",
        falsified_by="With torch.autograd.set_detect_anomaly(False) the mean step does not get shorter",
    )


@rule(
    "host.evaluation_between_steps",
    STEPS,
    EVALUATED,
    learn="https://pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
)
def evaluation_between_steps(analysis: Analysis) -> Iterator[Claim]:
    facts, (doubt, words) = EVALUATED.of(analysis), device_doubt(analysis)
    place = analysis.settings.place if analysis.settings is not None else None
    where = facts.places or ((place,) if place is not None else ())
    steps, apart = steps_source(STEPS.of(analysis)), facts.steps is not None
    source = steps if apart else f"{steps}, as {stacks_source(analysis)} divides the steps it lies in"
    share = clip_share(facts.lost_ms_per_step, facts.total_ms_per_step)
    yield Claim(
        title=f"Evaluation between training steps takes {share:.0%} of the loop: {things(facts.times, 'time')}, "
        f"{short(facts.each_ms)} ms each{at(*where)}",
        steps=STEPS.of(analysis),
        step_ms=facts.total_ms_per_step,
        basis=ALL,
        floor=EVALUATION.floor,
        cost_ms=facts.lost_ms_per_step,
        levels=(
            "high" if facts.times >= EVALUATION.times_for_high else "medium",
            *(() if apart else (sampled_confidence(facts.samples), *doubt)),
        ),
        where=where,
        evidence=(
            ms("evaluation, per training step", facts.lost_ms_per_step, source),
            ms("a training step with it, mean of all", facts.total_ms_per_step, steps),
            figure("evaluations between training steps", facts.times, "evaluations", steps),
            figure("batches of it", facts.steps, "batches", steps),
        ),
        fix=f"{at(*where).strip(' ()') or 'There'}: evaluate less often, or on fewer batches between epochs and on "
        "all of them at the end; under torch.inference_mode(), with larger batches than training has, and without "
        "reading every batch's result on the host (sum on the device, one .item() at the end)",
        caveat="What is evaluated less often is noticed later, early stopping too. What looks the same and has to "
        "stay: passes that make labels or features for training."
        + ("" if where else " No line was sampled that calls it and not training as well.")
        + ("" if apart else words),
        falsified_by="With evaluation every second time the run does not get shorter",
    )


_SAVES = ("torch.save", "save", "save_checkpoint", "save_pretrained", "save_file")
_READS = (
    *("open", "read", "readline", "readlines", "readinto", "read_text", "read_bytes"),
    *("loadtxt", "read_csv", "read_parquet"),
)


@rule("io.blocking_in_step", STEPS, IO_SEEN)
def blocking_in_step(analysis: Analysis) -> Iterator[Claim]:
    """I/O at a line inside training steps costs more than the floor.

    Lines of one call, else of one function, are one finding: open, write and close are one habit.
    """
    train = STEPS.of(analysis)
    groups: dict[tuple[str, object], list[IoFacts]] = {}
    for fact in analysis.io or ():
        place = fact.call or fact.place
        groups.setdefault((place.file, bare(place.function) if place.function else place.line), []).append(fact)
    for facts in groups.values():
        count = sum(fact.count for fact in facts)
        cost = min(sum(fact.ms_per_step for fact in facts), train.mean_ms)
        enough = any(fact.measured for fact in facts) or count >= IO.samples
        if not enough:
            continue
        facts.sort(key=lambda fact: -fact.ms_per_step)
        top = facts[0]
        most = cost
        # the whole call where I/O is a notable part of it: what it computes to write goes as well
        if top.call_ms_per_step and cost >= IO.of_call * top.call_ms_per_step:
            most = max(most, top.call_at_most_ms_per_step or 0.0)
        evidence: list[Known] = []
        places: dict[Place, float] = {}
        for fact in facts:
            places[fact.place] = places.get(fact.place, 0.0) + fact.ms_per_step
            source = fact.source if fact.measured else f"{stacks_source(analysis)}, {fact.source}"
            evidence.append(ms(f"{fact.operation} at {shown(fact.place)} per step", fact.ms_per_step, source))
            evidence += figures(fact.source, (f"calls of {fact.operation} per step", fact.calls_per_step, "calls", 3))
        often = "Every step waits" if sum(fact.calls_per_step or 1.0 for fact in facts) >= 1 else "Some steps wait"
        reached = f", reached from {shown(top.entry)}" if top.entry is not None else ""
        yield Claim(
            title=f"{often} for file I/O: {top.operation} ({shown(top.place)}) takes "
            f"{clip_share(cost, train.mean_ms):.0%} of the step{reached}",
            steps=train,
            cost_ms=cost,
            ceiling_ms=gains.without_main(analysis, most),
            levels=("high" if top.measured else sampled_confidence(count),),
            where=(
                *(replace(place, share=ms_there / cost if cost else None) for place, ms_there in places.items()),
                *((top.entry,) if top.entry is not None else ()),
            ),
            evidence=evidence,
            fix=_io_fix(top),
            caveat="What is written later or in the background is lost when the process dies before it is written.",
            learn="https://pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html"
            if top.operation in _SAVES
            else "https://docs.python.org/3/library/logging.handlers.html#logging.handlers.QueueHandler",
            falsified_by=f"With the {top.operation} at {shown(top.place)} left out, the mean step does not get shorter",
        )


def _io_fix(top: IoFacts) -> str:
    place = shown(top.place)
    if top.entry is not None:
        return (
            f"{shown(top.entry)} only leads there. Let the library do {top.operation} every N steps only: its options "
            "for checkpoints, loggers and progress say how often"
        )
    if top.operation in _SAVES:
        return (
            f"Save less often at {place} (every N steps or minutes), or copy the tensors and write them in a "
            "background thread (torch.distributed.checkpoint.async_save does both)"
        )
    if top.operation in _READS:
        return f"Read at {place} before training, or in the DataLoader's workers"
    return (
        f"Collect what {place} writes and write it every N steps without flushing each time, or in a background thread"
    )


@rule("host.step_drift", STEPS, MANY_STEPS, learn=LEARN)
def step_drift(analysis: Analysis) -> Iterator[Claim]:
    train, drift = STEPS.of(analysis), MANY_STEPS.of(analysis)
    lost_ms = drift.lost_ms_per_step
    lines = {spot(line.place) for line in drift.lines}
    known_ms = sum(grown_ms for place, grown_ms in growing(analysis).items() if spot(place) in lines)
    if not drift.rising or known_ms >= CAUSES.part * lost_ms:  # what grows there is told by itself
        return
    grown = sum(max(0.0, growth) for growth in drift.phases.values())
    phase = max(drift.phases, key=lambda name: drift.phases[name], default=None)
    named = phase is not None and grown > 0 and drift.phases[phase] >= DRIFT.phase * grown
    doubt, words = device_doubt(analysis)
    source = f"{steps_source(train)}, {things(drift.steps, 'steady step')}"
    medians = ", ".join(f"{value:.4g}" for value in drift.medians_ms)
    phases = sorted(drift.phases.items(), key=lambda item: -item[1])
    yield Claim(
        title=f"Steps grow slower over the run, from {short(drift.early_ms)} to {short(drift.late_ms)} ms"
        + (f", most of it in {phase}" if named else ""),
        steps=train,
        cost_ms=lost_ms,
        # long steps beside the growth may be of it: they have more to do as well
        ceiling_ms=gains.without_main(analysis, max(lost_ms, train.mean_ms - drift.early_ms)),
        levels=("medium", *doubt),
        where=tuple(line.place for line in drift.lines),
        evidence=(
            ms("level at the start", drift.early_ms, source),
            ms("level at the end", drift.late_ms, source),
            Evidence(f"medians of {drift.parts} parts of the run", medians, "ms", source),
            *(ms(f"growth of {phase}, first part to last", growth, source) for phase, growth in phases if growth > 0),
            *(
                ms(
                    f"main thread at {shown(line.place)}, last third",
                    line.late_ms_per_step,
                    f"{short(line.early_ms_per_step)} ms in the first third; {things(line.samples, 'sample')}",
                )
                for line in drift.lines
            ),
        ),
        fix="Find what each step has more of than the one before: lists and caches that are never emptied, losses "
        "kept with their graph (use .detach() or .item()), metrics over the whole history, hooks added again",
        caveat="In a longer run the loss grows further. Inputs that grow (longer sequences late in an epoch) and a "
        f"machine that heats up or fills look the same.{words}",
        falsified_by="In a run that starts from the last state the first steps are as slow as the last ones were",
        explains=tuple(
            python_on_critical_path.id_of(claim)
            for claim in python_on_critical_path.judge(analysis)
            if any(spot(place) in lines for place in claim.where)
        ),
    )
