"""Events of a rank from all that its files tell, each thing once.

Counts and times are those of the log with steps, else of the report with the highest totals, else of the debug log.
The debug log adds causes and lines. Where a duration is known of several compilations together only, each has its
share by number, and `source` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from stepscope.model.findings import Place
from stepscope.read.raw import Row
from stepscope.read.xla.debug_log import Analyses, Compile
from stepscope.read.xla.report import (
    COMPILE,
    EAGER_COMPILE,
    INBOUND,
    SCALAR,
    STEPS,
    TRANSFER,
    Report,
    StepChange,
    Totals,
)

Key = TypeVar("Key", bound=Hashable)


def in_order(counts: Sequence[int], keys: Sequence[Key]) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of `keys`, of which there must be as many as all counts together, or more."""
    position = 0
    for count in counts:
        yield Counter(keys[position : position + count])
        position += count


def evenly(counts: Sequence[int], weights: Mapping[Key, int], rest: Key) -> Iterator[Counter[Key]]:
    """For each of `counts`, its share of the keys, each of which is had `weights` times; `rest` for what is over."""
    whole = sum(counts)
    left = Counter({key: weight for key, weight in weights.items() if weight > 0})
    left[rest] += max(0, whole - sum(left.values()))
    for count in counts:
        share = _share(count, left)
        left -= share
        yield share


def _share(count: int, left: Counter[Key]) -> Counter[Key]:
    """`count` of what is `left`, in its proportions; what rounding leaves goes to the largest remainders."""
    total = sum(left.values())
    if count <= 0 or total <= 0:
        return Counter()
    share = Counter({key: have * count // total for key, have in left.items()})
    over = count - sum(share.values())
    order = sorted(left, key=lambda key: (-(left[key] * count % total), -left[key], str(key)))
    for key in order[: max(0, over)]:
        share[key] += 1
    return +share


def split(total: float, parts: Mapping[Key, int]) -> dict[Key, int]:
    """`total` as whole numbers in proportion to `parts`; together they are `total`, rounded."""
    whole, count = round(total), sum(parts.values())
    found: dict[Key, int] = {}
    given = taken = 0
    for key, part in parts.items():
        taken += part
        upto = whole * taken // count if count else 0
        found[key] = upto - given
        given = upto
    return found


BACKEND = "torch_xla"
MAX_EVENTS = 400_000
_UNKNOWN = Compile(None, None, None, None, None)
_Target = tuple["str | None", "Place | None"]  # operator, place
_NOWHERE: _Target = (None, None)


class Sources(Struct, frozen=True):
    """What is known of a rank. `changes` are steps, or the whole run as one; `source` names where they are from."""

    changes: tuple[StepChange, ...]
    source: str
    report: Report  # the highest totals of all files
    last_step: int | None
    analyses: Analyses  # empty without a debug log
    log: str  # names the debug log

    @property
    def unlowered(self) -> set[str]:
        """Operators without lowering that were called, by any source."""
        counted = {name for change in self.changes for name in change.operators}
        return (counted | set(self.analyses.operators)) - {SCALAR}


def events(found: Sources) -> list[Row]:
    """The journal of a rank; events have no time, as no text of torch_xla tells one."""
    rows: list[Row] = []
    for part in (_compiles(found), _eager(found), _transfers(found), _fallbacks(found)):
        rows.extend(part)
        if len(rows) > MAX_EVENTS:
            break
    return [*rows, *_executions(found), *_warnings(found), *_counters(found)]


def _event(kind: str, step: int | None, duration_ns: int | None, source: str, **fields: Any) -> Row:
    common = {"kind": kind, "time_ns": None, "duration_ns": duration_ns, "step": step, "backend": BACKEND}
    return {**common, "step_source": "file" if step is not None else None, **fields, "source": source}


def _at(place: Place | None) -> dict[str, Any]:
    return {"file": place.file if place else None, "line": place.line if place else None}


# ---------------------------------------------------------------------------------------------------- compilations


def _compiles(found: Sources) -> Iterator[Row]:
    analyses, log = found.analyses, found.log
    cells = [change for change in found.changes if change.samples[COMPILE]]
    counts = [cell.samples[COMPILE] for cell in cells]
    counted, logged = sum(counts), analyses.compiles
    if not logged:
        for cell, count in zip(cells, counts, strict=True):
            yield _compile(_UNKNOWN, count, cell.step, round(cell.totals[COMPILE]), found.source)
        return
    exact = len(logged) >= counted
    if cells or not analyses.steps_hold:
        logged = [replace(compile_, step=None) for compile_ in logged]
    shares = in_order(counts, logged) if exact else evenly(counts, Counter(map(Compile.kind, logged)), _UNKNOWN)
    for cell, share in zip(cells, shares, strict=True):
        lengths = split(cell.totals[COMPILE], share)
        notes = ["causes in their order" if exact else "causes shared out evenly"]
        notes += ["time shared by number"] if share.total() > 1 else []
        for compile_, count in share.items():
            source = f"{found.source}; {log} ({', '.join(notes)})"
            yield _compile(compile_, count, cell.step, lengths[compile_], source)
    if not exact:
        return
    for compile_, count in Counter(logged[counted:]).items():
        yield _compile(compile_, count, compile_.step, None, log)
    # Beyond those that are kept one by one.
    left = len(logged) + analyses.more_compiles.total() - max(counted, len(logged))
    for compile_, count in analyses.more_compiles.items():
        if left > 0:
            yield _compile(compile_, min(count, left), None, None, log)
        left -= count


def _compile(compile_: Compile, count: int, step: int | None, duration_ns: int | None, source: str) -> Row:
    fields = {"graph": compile_.graph, "cause_text": compile_.cause, "inputs": compile_.inputs}
    place = compile_.place
    fields |= {"outputs": compile_.outputs, **_at(place), "function": place.function if place else None}
    return _event("compile", step, duration_ns, source, count=count, **fields)


def _eager(found: Sources) -> Iterator[Row]:
    source = f"{EAGER_COMPILE} of {found.source}"
    for change in found.changes:
        if count := change.samples[EAGER_COMPILE]:
            yield _compile(_UNKNOWN, count, change.step, round(change.totals[EAGER_COMPILE]), source)


# ------------------------------------------------------------------------------------------------------- transfers


def _transfers(found: Sources) -> Iterator[Row]:
    cells = [change for change in found.changes if change.samples[TRANSFER]]
    if not cells:
        yield from _logged_transfers(found)
        return
    transfers = [cell.samples[TRANSFER] for cell in cells]
    scalars = [cell.scalars for cell in cells]
    targets, spread = _targets(found)
    if targets is None:  # which operator was called at which line is not known
        shares = list(evenly(transfers, spread, _NOWHERE))
    else:
        read = evenly(scalars, {(SCALAR, place): count for place, count in targets.items()}, (SCALAR, None))
        others = [count - scalar for count, scalar in zip(transfers, scalars, strict=True)]
        shares = [one + other for one, other in zip(read, evenly(others, spread, _NOWHERE), strict=True)]
    source = found.source if not (targets or spread) else f"{found.source}; lines of {found.log}"
    for cell, share in zip(cells, shares, strict=True):
        times, sizes = split(cell.totals[TRANSFER], share), split(cell.totals[INBOUND], share)
        for target, count in share.items():
            size = sizes[target] if cell.totals[INBOUND] else None
            yield _transfer(target, count, source, cell.step, times[target], size)


def _targets(found: Sources) -> tuple[Counter[Place | None] | None, Counter[_Target]]:
    """Lines of reads of single values, or None where they cannot be told from those of others; lines of the others."""
    frames = found.analyses.frames
    scalar, other = Counter[Place | None](), Counter[_Target]()
    named = [frame for frame in frames if frame.operator is not None]
    for frame in named or frames:
        if frame.operator in (None, SCALAR):
            scalar[frame.place] += frame.count
        else:
            other[None, frame.place] += frame.count
    if named or not found.unlowered:
        return scalar, other
    other = Counter({(None, place): count for place, count in scalar.items()})
    return scalar if len(scalar) <= 1 else None, other


def _transfer(
    target: _Target,
    count: int,
    source: str,
    step: int | None = None,
    duration_ns: int | None = None,
    size: int | None = None,
) -> Row:
    operator, place = target
    fields = {"direction": "device_to_host", "operator": operator, "count": count, "bytes": size, "cause_text": None}
    fields |= {**_at(place), "function": place.function if place else None}
    return _event("transfer", step, duration_ns, source, **fields)


def _logged_transfers(found: Sources) -> Iterator[Row]:
    """Of a debug log alone: the table of frames, or what the last warning counted."""
    analyses = found.analyses
    default = SCALAR if not found.unlowered else None
    for frame in analyses.frames:
        yield _transfer((frame.operator or default, frame.place), frame.count, found.log)
    shown = sum(frame.count for frame in analyses.frames)
    warned = max(analyses.counts.get(TRANSFER, 0), analyses.counts.get("TransferFromServerTime", 0))
    if warned > shown:
        yield _transfer(_NOWHERE, warned - shown, found.log)


# ------------------------------------------------------------------------------------------------------- fallbacks


def _fallbacks(found: Sources) -> Iterator[Row]:
    analyses = found.analyses
    lines = _fallback_lines(found)
    seen = {SCALAR}
    for change in found.changes:
        for operator, count in change.operators.items():
            if operator != SCALAR:
                seen.add(operator)
                yield _fallback(operator, count, change.step, lines.get(operator), found.source)
    for operator in analyses.operators:
        if operator not in seen:
            alone = analyses.fallback_calls if len(analyses.operators) == 1 else None
            yield _fallback(operator, alone, None, lines.get(operator), found.log)


def _fallback(operator: str, count: int | None, step: int | None, place: Place | None, source: str) -> Row:
    return _event("fallback", step, None, source, operator=operator, count=count, **_at(place))


def _fallback_lines(found: Sources) -> dict[str, Place]:
    """The line of each operator: the one named with it, or the only one there is."""
    frames = found.analyses.frames
    named = [frame for frame in frames if frame.operator is not None]
    places = {frame.place for frame in frames}
    if not named and len(places) == 1:
        return dict.fromkeys(found.unlowered, places.pop())
    named.sort(key=lambda frame: frame.count, reverse=True)
    lines: dict[str, Place] = {}
    for frame in named:
        lines.setdefault(frame.operator or "", frame.place)
    return lines


# --------------------------------------------------------------------------------------------- the rest of the log


def _executions(found: Sources) -> Iterator[Row]:
    for execution, count in found.analyses.executions.items():
        fields = {"count": count, "cause_text": execution.cause, "graph": execution.graph}
        yield _event("xla_executions", None, None, found.log, **fields, **_at(execution.place))


def _warnings(found: Sources) -> Iterator[Row]:
    for text, repeats in found.analyses.warnings.values():
        yield _event("xla_warning", None, None, found.log, text=text, repeats=repeats)


def _counters(found: Sources) -> Iterator[Row]:
    figures = sorted(found.report.figures.items())
    if figures:
        metrics = {name: asdict(figure) for name, figure in figures if figure.unit is not None}
        counters = {name: figure.samples for name, figure in figures if figure.unit is None}
        fields = {"metrics": metrics, "counters": counters, "renamed": found.report.renamed}
        yield _event("counters", found.last_step, None, found.source, **fields)
    elif steps := found.analyses.steps:
        yield _event("counters", None, None, found.log, metrics={}, counters={STEPS: steps}, renamed={})


def changes_of(sections: Sequence[StepChange], report: Report) -> tuple[StepChange, ...]:
    """The steps, and without a step what a report of the whole run counts beyond them."""
    rest = Totals().add(report)
    for change in sections:
        rest.remove(change)
    return (*sections, rest) if rest else tuple(sections)
