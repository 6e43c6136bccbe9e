"""Findings weighed as a whole: causes, sources that disagree, poor traces, time that nobody explained.

Which finding explains which: the same time often shows in several findings, and only its cause is worth fixing.

A explains B when most of the time that B counts is counted by A as well, and A is the cause. That is said of two
findings only where all of this holds:

- What A measures contains what B measures (`_SHOWS_IN`): a loop's time holds its launches, waits and collections;
  Python between operators holds the gaps before launches and nothing of an operator; what a rank takes longer is what
  the others wait. Of two findings on the user's code the one that calls the other holds it.
- They share the code: lines that hold most of B's cost are lines of A, inside A's loop, or called from there in the
  samples; of a compiled function, anywhere in it. A few losses meet elsewhere, by phase or resource (`_meeting`).
- They share a rank, and A costs enough to hold most of B.

Links never form a circle: each is left out that would close one. Where A explains B and B explains C, the link from A
to C is left out. With a cause gone what it explains is gone as well, so its ceiling is no lower than theirs. The order
of findings is that of their cost, whatever explains what.

Where two sources tell the same quantity and disagree, that is said, and what stands on them is less sure; so is what
stands on traces of which much was lost or not linked. What of the step nobody explained is named, so that silence is
earned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import communication, compute, device, host, input, machine, memory, ranks
from stepscope.diagnose.compile import LIMIT_HIT
from stepscope.diagnose.device import DEVICE_WORK
from stepscope.diagnose.input import idle_share, profiled
from stepscope.diagnose.needless_work import TRAINED
from stepscope.diagnose.ranks import RANKS
from stepscope.diagnose.rule import (
    CAUSES,
    ON_DEVICE,
    SEVERITY,
    Rule,
    Thresholds,
    accelerator,
    bare,
    clip_share,
    lower,
    overviews,
    spot,
    stacks_source,
    steps_source,
    train_steps,
)
from stepscope.diagnose.rules import RULES
from stepscope.model import Analysis, Disagreement, Finding, Place, StepFacts, Unexplained, UnexplainedPart
from stepscope.model.counted import things
from stepscope.model.machine import CpuFacts
from stepscope.model.views import DEVICE, HOST, IDLE_PARTS, Overview


class TRACE(Thresholds):
    """When a trace is too poor to be believed as it stands."""

    lost: float = 0.01  # of its events: a loss that could hide a whole kind of operator
    linked: float = 0.9  # of the device time launched in it; sound traces reach 0.99


class AGREEMENT(Thresholds):
    sigmas: float = 4.0  # standard errors of a sampled share: a handful of comparisons, so chance speaks in no run
    share: float = 0.10  # of the step at least: less changes neither the order of findings nor the advice
    slowed: float = 1.5  # a window's step by the steady one: profilers with stacks add a third; chosen, untuned
    utilization: float = 0.20  # NVML counts a sixth of a second to a second as busy where any kernel ran in it


class SILENCE(Thresholds):
    """When "nothing worth fixing" may be said."""

    # of the step that nobody explained: from there on a finding of the same size would have been a warning. Healthy
    # runs left 0 to 4 %: our own sampling, the scheduler, readings that begin and end within a step
    unexplained: float = SEVERITY.warning


_EFFECTS = ("sync", "launch", "transfer", "compute", "memory", machine.garbage_collection.name)
_SHOWS_IN: Mapping[str, tuple[str, ...]] = {  # of a rule, else of its category: rules and categories
    "host": ("host", "io", *_EFFECTS, "communication"),
    # the rest of a line's time is its operators' and the collector's
    host.python_on_critical_path.name: ("launch", "communication"),
    host.step_drift.name: (),  # of a line's time only what grew
    device.device_idle.name: ("communication",),
    "io": ("sync", "transfer", "launch", "communication"),
    # what a device idles for the loader no other rule counts
    "input": (machine.garbage_collection.name, "communication"),
    LIMIT_HIT: ("launch", compute.unfused_pointwise.name),  # what runs eagerly since
    **dict.fromkeys(("sync", "launch", "transfer", "compute", "memory"), ("communication",)),
}
_CODE = ("host", "io")
_LOADERS = (input.loader_bound.name, input.prefetch_waves.name)
_IN_EXPOSED = (
    *(ranks.straggler.name, ranks.unbalanced_work.name),
    *(communication.many_small_collectives.name, communication.gloo_on_gpu.name),
)

Line = tuple[str, int]


class _Code(Struct, frozen=True):
    """What a finding is about: lines, ranges of lines, and (file, function) where a whole function is meant."""

    lines: frozenset[Line]
    ranges: tuple[tuple[str, int, int], ...]
    below: frozenset[Line]
    functions: frozenset[tuple[str, str]]

    def holds(self, place: Place) -> bool:
        if (place.file, bare(place.function)) in self.functions:
            return True
        return place.line is not None and ((place.file, place.line) in self.lines or self.calls(place))

    def calls(self, place: Place) -> bool:
        """Whether the place is inside its loop, or runs below its lines."""
        if place.line is None:
            return False
        inside = any(file == place.file and first < place.line <= last for file, first, last in self.ranges)
        return inside or (place.file, place.line) in self.below


def explained(findings: Sequence[Finding], analysis: Analysis) -> tuple[Finding, ...]:
    """`findings`, in their order, with what each explains; links that rules gave are kept where they hold."""
    known = {finding.id: finding for finding in findings}
    codes = {finding.id: _code(finding, analysis) for finding in findings}
    links: dict[str, list[str]] = {finding.id: [] for finding in findings}
    for cause in sorted(findings, key=_order):
        for symptom in findings:
            # the second also keeps a finding from explaining itself
            if _explains(cause, symptom, codes, analysis) and not _reaches(links, symptom.id, cause.id):
                links[cause.id].append(symptom.id)
    found = []
    for finding in findings:
        direct = [
            name
            for name in links[finding.id]
            if not any(_reaches(links, other, name) for other in links[finding.id] if other != name)
        ]
        direct.sort(key=lambda name: (-known[name].cost_ms_per_step, name))
        # with a cause gone what it explains is gone: no less can be gained
        ceiling = max(
            finding.gain_ceiling, *(known[name].gain_ceiling for name in known if _reaches(links, finding.id, name))
        )
        found.append(replace(finding, explains=tuple(direct), gain_ceiling=ceiling))
    return tuple(found)


def _explains(cause: Finding, symptom: Finding, codes: Mapping[str, _Code], analysis: Analysis) -> bool:
    waits = symptom.category == "communication"
    others = waits and cause.category == "communication"  # one rank keeps the others waiting: they need share none
    if cause.ranks and symptom.ranks and not others and not set(cause.ranks) & set(symptom.ranks):
        return False
    # what one rank loses is less in the mean of all ranks
    at_most = cause.cost_ms_per_step * (max(1, len(cause.ranks)) if waits else 1)
    if at_most < CAUSES.part * symptom.cost_ms_per_step:
        return False
    if symptom.id in cause.explains or _meeting(cause, symptom, analysis):
        return True
    shows_in = _of_rule(cause)
    if symptom.rule == host.step_drift.name or not ({symptom.rule, symptom.category} & set(shows_in)):
        return False
    code = codes[cause.id]
    if symptom.category not in _CODE or symptom.rule == device.device_idle.name:
        return _part(symptom, code) >= CAUSES.part
    # both are of the user's code: who calls is the cause
    lead = symptom.where[0] if symptom.where else None
    return lead is not None and code.calls(lead) and not codes[symptom.id].calls(cause.where[0])


def _meeting(cause: Finding, symptom: Finding, analysis: Analysis) -> bool:
    """Losses that meet in a phase or a resource, and not at a line."""
    pair = (cause.rule, symptom.rule)
    if symptom.rule == host.step_drift.name and cause.rule in _LOADERS:
        drift = analysis.machine.drift
        waits = drift.phases.get("data_wait", 0.0) if drift is not None else 0.0
        grown = sum(max(0.0, ms) for ms in drift.phases.values()) if drift is not None else 0.0
        return grown > 0 and waits >= CAUSES.part * grown  # the loader's finding counts all of that phase
    at_a_line = (
        (host.python_on_critical_path.name, host.step_drift.name),
        (device.made_on_host.name, memory.page_faults.name),
    )
    if pair in at_a_line:
        return bool({spot(place) for place in cause.where} & {spot(place) for place in symptom.where})
    if pair == (machine.threads_beyond_cores.name, machine.cpu_throttled.name):
        return True  # both count the main thread's wait for a core
    return symptom.rule == communication.exposed.name and cause.rule in _IN_EXPOSED


def _of_rule(finding: Finding) -> tuple[str, ...]:
    return _SHOWS_IN.get(finding.rule, _SHOWS_IN.get(finding.category, ()))


def _order(finding: Finding) -> tuple[int, float, str]:
    """Whose links come first, where two findings could explain each other: growth that holds most of a line's cost is
    the better name for it than the line, and what shows in more places is nearer to the cause.
    """
    first = -1 if finding.rule == host.step_drift.name else 0
    return first or len(_EFFECTS) + 3 - len(_of_rule(finding)), -finding.cost_ms_per_step, finding.id


def _part(symptom: Finding, code: _Code) -> float:
    """The part of its cost that lies in the code: of lines with a share their sum, else all or nothing of the first."""
    shares = [(place, place.share) for place in symptom.where if place.share is not None]
    if shares:
        return min(1.0, sum(share for place, share in shares if code.holds(place)))
    return 1.0 if symptom.where and code.holds(symptom.where[0]) else 0.0


def _code(finding: Finding, analysis: Analysis) -> _Code:
    lines = frozenset((place.file, place.line) for place in finding.where if place.line is not None)
    whole = finding.rule == LIMIT_HIT
    functions = frozenset((place.file, bare(place.function)) for place in finding.where if whole and place.function)
    ranges = tuple(
        # from the `for` to the last line of each loop that has one of the lines as its own
        (loop.place.file, loop.loop_line, max(loop.loop_line, loop.place.line or 0, loop.loop_end or 0))
        for loop in analysis.loops or ()
        if loop.loop_line is not None and (loop.place.file, loop.place.line or 0) in lines
    )
    return _Code(lines, ranges, frozenset(_below(lines, analysis)), functions)


def _below(lines: frozenset[Line], analysis: Analysis) -> Iterator[Line]:
    """Lines that run below one of these for most of their samples."""
    for pair in analysis.sampled.callers if analysis.sampled is not None else ():
        caller, callee = pair.caller, pair.callee
        called = caller.line is not None and callee.line is not None and (caller.file, caller.line) in lines
        if called and callee.line is not None and (callee.file, callee.line) not in lines:
            yield callee.file, callee.line
    for fact in analysis.python or ():
        loop, line = fact.inside_loop, fact.place.line
        if loop is not None and loop.line is not None and line is not None and (loop.file, loop.line) in lines:
            yield fact.place.file, line


def _reaches(links: Mapping[str, Sequence[str]], start: str, goal: str) -> bool:
    """Whether `goal` is `start` or explained by it, over any number of links."""
    seen, left = {start}, [start]
    while left:
        name = left.pop()
        if name == goal:
            return True
        new = [other for other in links[name] if other not in seen]
        seen.update(new)
        left += new
    return False


# Shares of a window that are carried over to the steady step; of those, idle time of the device.
_CARRIED = tuple(rule.name for rule in RULES if {DEVICE_WORK, TRAINED} & set(rule.needs))
_IDLE = tuple(rule.name for rule in RULES if DEVICE_WORK in rule.needs and rule.category != "compute")


class _Conflict(Struct, frozen=True):
    """`rules` use one of the figures; `told`: they have lowered their confidence for it."""

    rules: tuple[str, ...]
    said: Disagreement
    told: bool = False


def weighed(findings: Iterable[Finding], analysis: Analysis) -> tuple[Finding, ...]:
    """`findings` with what speaks against them from another source, and less confidence where something does."""
    conflicts = [conflict for check in _CHECKS for conflict in check(analysis)]
    found = []
    for finding in findings:
        own = [conflict for conflict in conflicts if finding.rule in conflict.rules]
        level = finding.confidence if all(conflict.told for conflict in own) else lower(finding.confidence)
        said = tuple(conflict.said for conflict in own)
        found.append(replace(finding, confidence=level, disagreements=said) if own else finding)
    return tuple(found)


def _of_shares(
    rules: tuple[str, ...], quantity: str, value: float, source: str, other: float, other_source: str
) -> _Conflict:
    return _Conflict(rules, Disagreement(quantity, "fraction", round(value, 4), source, round(other, 4), other_source))


def _waits(analysis: Analysis) -> Iterator[_Conflict]:
    """The wait for data: measured in every step, sampled, and in windows without a device, which hides nothing of it.

    A sampler that does not stop the process tears some stacks of a wait.
    """
    train, loader, total = train_steps(analysis), analysis.loader, _samples(analysis)
    if train is None or loader is None:
        return
    measured, figure = loader.data_wait_share, "data wait, part of the step"
    if analysis.stacks is not None and total:
        sampled = analysis.stacks.by_phase.get("data_wait", 0) / total
        if abs(sampled - measured) > _sampling(measured, total):
            source = f"{stacks_source(analysis)}, {things(total, 'sample')}"
            yield _of_shares(_LOADERS, figure, measured, steps_source(train), sampled, source)
    windows = _windows(analysis, HOST)
    shares = _shares(windows, "host_data")
    if len(shares) >= 2:
        # recording Python makes a window's steps longer, and the other parts smaller
        slowing = max((one.parts["host_python"].share for one in windows if "host_python" in one.parts), default=0.0)
        if abs(fmean(shares) - measured) > max(AGREEMENT.share, AGREEMENT.sigmas * _error(shares)) + slowing:
            source = f"window, {things(len(shares), 'step')}"
            yield _of_shares(_LOADERS, figure, measured, steps_source(train), fmean(shares), source)


def _python_in_windows(analysis: Analysis) -> Iterator[_Conflict]:
    """Sampled Python, and the window's: recording slows Python most, so only a smaller part there contradicts.

    Collections strike few steps, and the window has few: they are left out.
    """
    train, facts, total = train_steps(analysis), analysis.python, _samples(analysis)
    shares = _shares(_windows(analysis, HOST), "host_python")
    if train is None or not facts or not total or len(shares) < 2:
        return
    pauses = analysis.machine.pauses
    collected = pauses.ms_per_step / train.mean_ms if pauses is not None else 0.0
    sampled = max(0.0, min(1.0, sum(fact.share for fact in facts)) - collected)
    if sampled - fmean(shares) > _sampling(sampled, total) + AGREEMENT.sigmas * _error(shares):
        source, window = (
            f"{stacks_source(analysis)}, {things(total, 'sample')}",
            f"window, {things(len(shares), 'step')}",
        )
        python, figure = (host.python_on_critical_path.name,), "Python on the main thread, part of the step"
        yield _of_shares(python, figure, sampled, source, fmean(shares), window)


def _idle_by_telemetry(analysis: Analysis) -> Iterator[_Conflict]:
    """The device's idle time in windows, and by the driver's utilization, where every GPU of the host is trained on."""
    windows = _windows(analysis, DEVICE)
    used = analysis.system.get("gpu_util_pct")
    if not windows or not isinstance(used, int | float) or len(compute.gpu_names(analysis)) > len(analysis.run.ranks):
        return
    steps = sum(len(one.steps) for one in windows)
    idle = sum(one.parts[part].share * len(one.steps) for one in windows for part in IDLE_PARTS if part in one.parts)
    idle, by_driver = idle / steps, 1.0 - min(100.0, float(used)) / 100.0
    if abs(idle - by_driver) > AGREEMENT.utilization:
        source, driver = f"window, {things(steps, 'step')}", "system.jsonl, utilization by the driver"
        yield _of_shares((*_IDLE, *_LOADERS), "device idle, part of the time", idle, source, by_driver, driver)


def _slowed_windows(analysis: Analysis) -> Iterator[_Conflict]:
    """The mean step outside of windows and inside: shares of a window whose steps are slowed are shares of those."""
    train = train_steps(analysis)
    ratios = [window.overhead_ratio for window in analysis.windows if window.overhead_ratio is not None]
    if train is not None and ratios and fmean(ratios) > AGREEMENT.slowed:
        outside, inside = round(train.mean_ms, 3), round(fmean(ratios) * train.mean_ms, 3)
        source = steps_source(train)
        yield _Conflict(_CARRIED, Disagreement("mean step", "ms", outside, source, inside, "steps.jsonl, in windows"))


def _slow_rank(analysis: Analysis) -> Iterator[_Conflict]:
    """What one rank works longer is what the others wait longer; and which rank it is, by steps and sampled lines."""
    facts, lines = analysis.ranks, analysis.sampled.rank_lines if analysis.sampled is not None else None
    if facts is None:
        return
    source, late = f"steps.jsonl of {things(len(facts.ranks), 'rank')}", ranks.straggler.name
    if facts.excess_ms > 0 and not RANKS.agree <= facts.waited_ms / facts.excess_ms <= 1 / RANKS.agree:
        quantity = "a rank works longer, the others wait longer"
        works = (round(facts.excess_ms, 3), f"{source}, own work")
        waits = (round(facts.waited_ms, 3), f"{source}, waits")
        yield _Conflict((late,), Disagreement(quantity, "ms", *works, *waits), told=True)
    if lines is not None and lines.straggler not in (None, facts.slowest) and ranks.persistent(facts):
        quantity = "the rank the others wait for"
        said = Disagreement(quantity, "", facts.slowest, source, lines.straggler, lines.source)
        yield _Conflict((late, ranks.unbalanced_work.name), said)


_CHECKS: tuple[Callable[[Analysis], Iterator[_Conflict]], ...] = (
    *(_waits, _python_in_windows, _idle_by_telemetry),
    *(_slowed_windows, _slow_rank),
)


def _windows(analysis: Analysis, basis: str) -> list[Overview]:
    return [one for one in profiled(analysis) if one.basis == basis and one.steps] if analysis.windows else []


def _shares(windows: list[Overview], part: str) -> list[float]:
    return [step.parts_ns.get(part, 0) / step.wall_ns for one in windows for step in one.steps if step.wall_ns]


def _samples(analysis: Analysis) -> int:
    return sum(analysis.stacks.by_phase.values()) if analysis.stacks is not None else 0


def _sampling(share: float, samples: int) -> float:
    """By how much a sampled share may be off."""
    return max(AGREEMENT.share, AGREEMENT.sigmas * math.sqrt(share * (1.0 - share) / samples))


def _error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def tempered(finding: Finding, rule: Rule, analysis: Analysis) -> Finding:
    """`finding` with its confidence one level lower for each thing that is wrong with the traces, and a caveat."""
    reading, compilers = analysis.reading, analysis.compilers
    # the loader's rules count a wait of the journal only as far as windows saw the device idle
    by_idle = rule.name in _LOADERS and accelerator(analysis) is not None and idle_share(analysis) is not None
    traced = by_idle or rule.traced(analysis)
    # a compiler's spans in traces may be all that tells of it
    backends = compilers.backends if compilers is not None and rule.category == "compile" else ()
    if reading is None or not (traced or any(facts.source.startswith("trace:") for facts in backends)):
        return finding
    said = []
    all_events = reading.events + reading.lost
    if all_events and reading.lost / all_events > TRACE.lost:
        said.append(f"{reading.lost / all_events:.0%} of the trace's events could not be read.")
    if traced and reading.link_rate is not None and reading.link_rate < TRACE.linked:
        said.append(f"Only {reading.link_rate:.0%} of the device time could be linked to operators.")
    caveat = " ".join([*said, finding.caveat]).strip()
    return replace(finding, confidence=lower(finding.confidence, len(said)), caveat=caveat) if said else finding


_CORES = tuple(rule.name for rule in RULES if machine.CPU in rule.needs)  # that tell the main thread's wait for a core
_BESIDE = f"{host.python_on_critical_path.name}-{host.BESIDE}"
_UNKNOWN = ("idle_unknown", "host_unknown")  # of a trace: what no slice tells
NO_CORE = "waiting for a processor core"
ASLEEP = "asleep, but not waiting for data, files, communication or threads that computed"
WAITING = "asleep, most of it perhaps for other ranks"
NO_SOURCE = "outside the passes and the optimizer, without sampled stacks or a profiler window"
NO_SLICE = "in no operator, kernel, call or function of the trace"


def unexplained(analysis: Analysis, findings: Sequence[Finding]) -> Unexplained | None:
    train = train_steps(analysis)
    if train is None:
        return None
    parts = [
        UnexplainedPart(what, ms, clip_share(ms, train.mean_ms), source)
        for what, ms, source in sorted(_parts(analysis, train, findings), key=lambda part: (-part[1], part[0]))
        if ms > 0
    ]
    ms = min(train.mean_ms, sum(part.ms for part in parts))
    share = clip_share(ms, train.mean_ms)
    return Unexplained(ms, share, tuple(parts), tuple(_unseen(analysis)), share >= SILENCE.unexplained)


def _parts(analysis: Analysis, train: StepFacts, findings: Sequence[Finding]) -> Iterator[tuple[str, float, str]]:
    """(what, ms, source)."""
    cpu = analysis.machine.cpu
    if cpu is not None:
        source, users = f"system.jsonl, {cpu.readings} readings", ""
        if cpu.pool is not None:  # who used the cores besides: no rule may have had reason to name them
            others = "" if cpu.pool.others_cores is None else f", others on the machine {cpu.pool.others_cores:.1f}"
            used = f"{cpu.pool.used_cores:.1f}{others} of {cpu.cores:g} cores"
            users = f" (other threads of the process used {used})"
        waited = cpu.run_delay_share * train.mean_ms
        told = sum(finding.cost_ms_per_step for finding in findings if finding.rule in _CORES)
        yield NO_CORE + users, max(0.0, waited - told), source
        if cpu.main_cpu_share is not None and not ON_DEVICE.present(analysis):
            asleep = host.asleep_share(analysis, cpu) * train.mean_ms
            # a compiler sleeps for the programs it calls
            told_asleep = sum(one.cost_ms_per_step for one in findings if one.category == "compile")
            told_asleep += max(0.0, told - waited) + _known(analysis, cpu, train, findings)
            told_asleep += sum(one.cost_ms_per_step for one in findings if one.id == _BESIDE)
            what = ASLEEP if len(analysis.run.ranks) == 1 else WAITING
            # what it sleeps for while it loads a batch itself is told with the loading
            fed, told_rules = analysis.loader, {one.rule for one in findings}
            loads = fed is not None and fed.in_main_process and input.loader_bound.name in told_rules
            most = train.mean_ms - (fed.data_wait_ms if fed is not None and loads else 0.0)
            yield what + users, max(0.0, min(asleep - told_asleep, most)), source
    if analysis.stacks is None and not analysis.traces:
        outside = [one.ms for one in train.partition if one.category in ("before_forward", "other", "unattributed")]
        yield NO_SOURCE, sum(outside), "steps.jsonl"
    elif cpu is None and analysis.stacks is None:
        shares = [sum(one.parts[name].share for name in _UNKNOWN if name in one.parts) for one in overviews(analysis)]
        yield NO_SLICE, (fmean(shares) if shares else 0.0) * train.mean_ms, "traces"


def _known(analysis: Analysis, cpu: CpuFacts, train: StepFacts, findings: Sequence[Finding]) -> float:
    """What the main thread is known to sleep for, ms a step.

    Also the part of the step in which torch's other threads may have computed while the main one waited for them: they
    get parts of an operator as large as the main thread's. What threads use beyond that is the script's own, and the
    main thread may be kept waiting by it (for the interpreter's lock, for one).
    """
    told = [one.gain_ceiling * train.mean_ms for one in findings if one.category == "communication"]
    exchange = max([communication.exposed_share(analysis) * train.mean_ms, *told])
    computing = cpu.pool.used_cores if cpu.pool is not None else 0.0
    if cpu.threads is not None and cpu.main_cpu_share is not None:
        computing = min(computing, (cpu.threads - 1) * cpu.main_cpu_share)
    return cpu.waits_ms_per_step + exchange + computing * train.mean_ms


def _unseen(analysis: Analysis) -> Iterator[str]:
    machine = analysis.machine
    if machine.journaled and machine.cpu is None:
        yield "whether the main thread had a core (too little telemetry of the steady steps)"
    if ON_DEVICE.present(analysis) and not analysis.device_losses:
        yield "what the devices did (no profiler window with their work)"
    communicates = len(analysis.run.ranks) > 1 and not (analysis.views is not None and analysis.views.communication)
    if communicates and not ON_DEVICE.present(analysis):
        yield "what the ranks exchanged (no profiler window with collectives)"
