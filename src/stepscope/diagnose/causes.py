"""Which finding explains which: the same time often shows in several findings, and only its cause is worth fixing.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.diagnose import collectives, communication, compile, compute, host, input, input_extra, launch, system
from stepscope.diagnose.common import bare
from stepscope.diagnose.thresholds import CAUSES
from stepscope.model import Analysis, Finding, Place

_EFFECTS = ("sync", "launch", "transfer", "compute", "memory", system.GC_RULE)
_SHOWS_IN: Mapping[str, tuple[str, ...]] = {  # of a rule, else of its category: rules and categories
    "host": ("host", "io", *_EFFECTS, "communication"),
    host.PYTHON_RULE: ("launch", "communication"),  # the rest of a line's time is its operators' and the collector's
    host.DRIFT_RULE: (),  # of a line's time only what grew
    launch.HOST_RULE: ("communication",),
    "io": ("sync", "transfer", "launch", "communication"),
    "input": (system.GC_RULE, "communication"),  # what a device idles for the loader no other rule counts
    compile.LIMIT_RULE: ("launch", compute.POINTWISE_RULE),  # what runs eagerly since
    **dict.fromkeys(("sync", "launch", "transfer", "compute", "memory"), ("communication",)),
}
_CODE = ("host", "io")
_LOADERS = (input.RULE, input_extra.WAVES_RULE)
_IN_EXPOSED = (
    *(communication.STRAGGLER_RULE, communication.UNBALANCED_RULE),
    *(collectives.SMALL_RULE, collectives.GLOO_RULE),
)

Line = tuple[str, int]


class _Code(Struct, frozen=True):
    """What a finding is about: lines, ranges of lines, and (file, function) where a whole function is meant."""

    lines: frozenset[Line]
    ranges: tuple[tuple[str, int, int], ...]
    below: frozenset[Line]
    functions: frozenset[tuple[str, str]]

    def holds(self, place: Place) -> bool:
        """Whether the place is in it."""
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
    if not _could_hold(cause, symptom):
        return False
    if symptom.id in cause.explains or _meeting(cause, symptom, analysis):
        return True
    shows_in = _of_rule(cause)
    if symptom.rule == host.DRIFT_RULE or not ({symptom.rule, symptom.category} & set(shows_in)):
        return False
    code = codes[cause.id]
    if symptom.category not in _CODE or symptom.rule == launch.HOST_RULE:
        return _part(symptom, code) >= CAUSES.part
    # both are of the user's code: who calls is the cause
    lead = symptom.where[0] if symptom.where else None
    return lead is not None and code.calls(lead) and not codes[symptom.id].calls(cause.where[0])


def _could_hold(cause: Finding, symptom: Finding) -> bool:
    """Whether the cause's cost and ranks allow for it. What one rank loses is less in the mean of all ranks."""
    waits = symptom.category == "communication"
    others = waits and cause.category == "communication"  # one rank keeps the others waiting: they need share none
    if cause.ranks and symptom.ranks and not others and not set(cause.ranks) & set(symptom.ranks):
        return False
    ranks = max(1, len(cause.ranks)) if waits else 1
    return cause.cost_ms_per_step * ranks >= CAUSES.part * symptom.cost_ms_per_step


def _meeting(cause: Finding, symptom: Finding, analysis: Analysis) -> bool:
    """Losses that meet in a phase or a resource, and not at a line."""
    pair = (cause.rule, symptom.rule)
    if symptom.rule == host.DRIFT_RULE and cause.rule in _LOADERS:
        return _grows_in(analysis, "data_wait")  # the loader's finding counts all of that phase
    if pair == (host.PYTHON_RULE, host.DRIFT_RULE):
        return _common_line(cause, symptom)
    if pair == (system.THREADS_RULE, system.THROTTLED_RULE):
        return True  # both count the main thread's wait for a core
    return symptom.rule == collectives.EXPOSED_RULE and cause.rule in _IN_EXPOSED


def _grows_in(analysis: Analysis, phase: str) -> bool:
    drift = analysis.machine.drift if analysis.machine is not None else None
    if drift is None:
        return False
    grown = sum(max(0.0, ms) for ms in drift.phases.values())
    return grown > 0 and drift.phases.get(phase, 0.0) >= CAUSES.part * grown


def _common_line(one: Finding, other: Finding) -> bool:
    lines = {(place.file, place.line) for place in one.where}
    return any((place.file, place.line) in lines for place in other.where)


def _of_rule(finding: Finding) -> tuple[str, ...]:
    return _SHOWS_IN.get(finding.rule, _SHOWS_IN.get(finding.category, ()))


def _order(finding: Finding) -> tuple[int, float, str]:
    """Whose links come first, where two findings could explain each other: growth that holds most of a line's cost is
    the better name for it than the line, and what shows in more places is nearer to the cause.
    """
    first = -1 if finding.rule == host.DRIFT_RULE else 0
    return first or len(_EFFECTS) + 3 - len(_of_rule(finding)), -finding.cost_ms_per_step, finding.id


def _part(symptom: Finding, code: _Code) -> float:
    """The part of its cost that lies in the code: of lines with a share their sum, else all or nothing of the first."""
    shares = [(place, place.share) for place in symptom.where if place.share is not None]
    if shares:
        return min(1.0, sum(share for place, share in shares if code.holds(place)))
    return 1.0 if symptom.where and code.holds(symptom.where[0]) else 0.0


def _code(finding: Finding, analysis: Analysis) -> _Code:
    lines = frozenset((place.file, place.line) for place in finding.where if place.line is not None)
    whole = finding.rule == compile.LIMIT_RULE
    functions = frozenset((place.file, bare(place.function)) for place in finding.where if whole and place.function)
    return _Code(lines, tuple(_ranges(lines, analysis)), frozenset(_below(lines, analysis)), functions)


def _ranges(lines: frozenset[Line], analysis: Analysis) -> Iterator[tuple[str, int, int]]:
    """From the `for` to the last line of each loop that has one of the lines as its own."""
    for loop in analysis.loops or ():
        own = (loop.place.file, loop.place.line or 0)
        if own in lines and loop.loop_line is not None:
            yield loop.place.file, loop.loop_line, max(loop.loop_line, loop.place.line or 0, loop.loop_end or 0)


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
