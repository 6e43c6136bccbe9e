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

from stepscope.read.raw import Row
from stepscope.read.xla.debug_log import Analyses, Compile, Place
from stepscope.read.xla.report import EAGER_COMPILE, SCALAR, STEPS, TRANSFER, Report, StepChange

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


class Sources(Struct, frozen=True):
    """What is known of a rank. `changes` are steps, or the whole run as one; `source` names where they are from."""

    changes: tuple[StepChange, ...]
    source: str
    report: Report  # the highest totals of all files
    last_step: int | None
    analyses: Analyses | None
    log: str  # names the debug log


def events(found: Sources) -> list[Row]:
    """The journal of a rank; events have no time, as no text of torch_xla tells one."""
    rows: list[Row] = []
    for part in (_compiles(found), _eager(found), _transfers(found), _fallbacks(found)):
        rows.extend(part)
        if len(rows) > MAX_EVENTS:
            break
    if found.analyses is not None:
        rows.extend(_executions(found.analyses, found.log))
        rows.extend(_warnings(found.analyses, found.log))
    rows.extend(_counters(found))
    return rows


def _event(kind: str, step: int | None, duration_ns: int | None, source: str, **fields: Any) -> Row:
    common = {"kind": kind, "time_ns": None, "duration_ns": duration_ns, "step": step, "backend": BACKEND}
    return {**common, "step_source": "file" if step is not None else None, **fields, "source": source}


def _at(place: Place | None, function: bool = True) -> dict[str, Any]:
    fields: dict[str, Any] = {"file": place.file if place else None, "line": place.line if place else None}
    if function:
        fields["function"] = place.function if place else None
    return fields


# ---------------------------------------------------------------------------------------------------- compilations


def _compiles(found: Sources) -> Iterator[Row]:
    analyses = found.analyses
    cells = [change for change in found.changes if change.compiles]
    counted = sum(cell.compiles for cell in cells)
    logged = [] if analyses is None else analyses.compiles
    if not logged or analyses is None:
        for cell in cells:
            yield _compile(_UNKNOWN, cell.compiles, cell.step, round(cell.compile_ns), found.source)
        return
    whole = len(logged) + sum(analyses.more_compiles.values())
    counts = [cell.compiles for cell in cells]
    exact = len(logged) >= counted
    steps = analyses.steps_hold and not cells
    nameless = [_stepless(compile_) for compile_ in logged] if not steps else logged
    shares = in_order(counts, nameless) if exact else evenly(counts, Counter(map(_ungraphed, logged)), _UNKNOWN)
    for cell, share in zip(cells, shares, strict=True):
        lengths = split(cell.compile_ns, share)
        source = _joined(found, exact=exact, shared=sum(share.values()) > 1)
        for compile_, count in share.items():
            yield _compile(compile_, count, cell.step, lengths[compile_], source)
    if exact:
        for compile_, count in Counter(nameless[counted:]).items():
            yield _compile(compile_, count, compile_.step, None, found.log)
        yield from _unkept(analyses, whole - max(counted, len(logged)), found.log)


def _unkept(analyses: Analyses, count: int, source: str) -> Iterator[Row]:
    """Compilations beyond those that are kept one by one."""
    for compile_, more in analyses.more_compiles.items():
        if count > 0:
            yield _compile(compile_, min(more, count), None, None, source)
        count -= more


def _compile(compile_: Compile, count: int, step: int | None, duration_ns: int | None, source: str) -> Row:
    return _event(
        "compile",
        step,
        duration_ns,
        source,
        count=count,
        graph=compile_.graph,
        cause_text=compile_.cause,
        inputs=compile_.inputs,
        outputs=compile_.outputs,
        **_at(compile_.place),
    )


def _stepless(compile_: Compile) -> Compile:
    return Compile(compile_.cause, compile_.graph, compile_.inputs, compile_.outputs, compile_.place)


def _ungraphed(compile_: Compile) -> Compile:
    return Compile(compile_.cause, None, None, None, compile_.place)


def _joined(found: Sources, *, exact: bool, shared: bool) -> str:
    notes = ["causes in their order" if exact else "causes shared out evenly"]
    if shared:
        notes.append("time shared by number")
    return f"{found.source}; {found.log} ({', '.join(notes)})"


def _eager(found: Sources) -> Iterator[Row]:
    for change in found.changes:
        if change.eager_compiles:
            source = f"{EAGER_COMPILE} of {found.source}"
            yield _compile(_UNKNOWN, change.eager_compiles, change.step, round(change.eager_compile_ns), source)


# ------------------------------------------------------------------------------------------------------- transfers


def _transfers(found: Sources) -> Iterator[Row]:
    cells = [change for change in found.changes if change.transfers]
    analyses = found.analyses
    if not cells:
        yield from _logged_transfers(found) if analyses is not None else ()
        return
    scalars = [cell.scalars for cell in cells]
    others = [cell.transfers - cell.scalars for cell in cells]
    targets, spread = _targets(found)
    nowhere: _Target = (None, None)
    if targets is None:  # which operator was called at which line is not known
        shares = list(evenly([cell.transfers for cell in cells], spread, nowhere))
    else:
        read = evenly(scalars, {(SCALAR, place): count for place, count in targets.items()}, (SCALAR, None))
        rest = evenly(others, spread, nowhere)
        shares = [one + other for one, other in zip(read, rest, strict=True)]
    source = found.source if not (targets or spread) else f"{found.source}; lines of {found.log}"
    for cell, share in zip(cells, shares, strict=True):
        times, sizes = split(cell.transfer_ns, share), split(cell.transfer_bytes, share)
        for target, count in share.items():
            size = sizes[target] if cell.transfer_bytes else None
            yield _transfer(target, count, cell.step, times[target], size, source)


def _targets(found: Sources) -> tuple[dict[Place | None, int] | None, dict[_Target, int]]:
    """Lines of reads of single values, or None where they cannot be told from those of others; lines of the others."""
    analyses = found.analyses
    if analyses is None or not analyses.frames:
        return {}, {}
    named = [frame for frame in analyses.frames if frame.operator is not None]
    if named:
        scalar = Counter[Place | None]()
        other = Counter[_Target]()
        for frame in named:
            if frame.operator in (SCALAR, SCALAR.removeprefix("aten::")):
                scalar[frame.place] += frame.count
            else:
                other[None, frame.place] += frame.count
        return dict(scalar), dict(other)
    places = Counter[Place | None]()
    for frame in analyses.frames:
        places[frame.place] += frame.count
    if not _unlowered(found):
        return dict(places), {}
    if len(places) == 1:
        return dict(places), {(None, place): count for place, count in places.items()}
    return None, {(None, place): count for place, count in places.items()}


def _unlowered(found: Sources) -> set[str]:
    """Operators without lowering that were called, by any source."""
    names = {name for change in found.changes for name in change.operators}
    return (names | set(found.analyses.operators if found.analyses is not None else ())) - {SCALAR}


def _transfer(
    target: _Target, count: int, step: int | None, duration_ns: int | None, size: int | None, source: str
) -> Row:
    operator, place = target
    fields = {"direction": "device_to_host", "operator": operator, "count": count, "bytes": size, "cause_text": None}
    return _event("transfer", step, duration_ns, source, **fields, **_at(place))


def _logged_transfers(found: Sources) -> Iterator[Row]:
    """Of a debug log alone: the table of frames, or what the last warning counted."""
    analyses = found.analyses
    assert analyses is not None
    default = SCALAR if not _unlowered(found) else None
    shown = 0
    for frame in analyses.frames:
        shown += frame.count
        operator = frame.operator if frame.operator is None or "::" in frame.operator else f"aten::{frame.operator}"
        yield _transfer((operator or default, frame.place), frame.count, None, None, None, found.log)
    warned = max(analyses.counts.get(TRANSFER, 0), analyses.counts.get("TransferFromServerTime", 0))
    if warned > shown:
        yield _transfer((None, None), warned - shown, None, None, None, found.log)


# ------------------------------------------------------------------------------------------------------- fallbacks


def _fallbacks(found: Sources) -> Iterator[Row]:
    analyses = found.analyses
    lines = _fallback_lines(found)
    seen = set()
    for change in found.changes:
        for operator, count in change.operators.items():
            if operator != SCALAR:
                seen.add(operator)
                yield _fallback(operator, count, change.step, lines.get(operator), found.source)
    for operator in analyses.operators if analyses is not None else ():
        if operator not in seen and operator != SCALAR:
            alone = analyses.fallback_calls if analyses is not None and len(analyses.operators) == 1 else None
            yield _fallback(operator, alone, None, lines.get(operator), found.log)


def _fallback(operator: str, count: int | None, step: int | None, place: Place | None, source: str) -> Row:
    return _event("fallback", step, None, source, operator=operator, count=count, **_at(place, function=False))


def _fallback_lines(found: Sources) -> Mapping[str, Place]:
    """The line of each operator: the one named with it, or the only one there is."""
    frames = found.analyses.frames if found.analyses is not None else []
    most: dict[str, tuple[int, Place]] = {}
    for frame in frames:
        if frame.operator is not None:
            name = frame.operator if "::" in frame.operator else f"aten::{frame.operator}"
            if name not in most or most[name][0] < frame.count:
                most[name] = frame.count, frame.place
    places = {frame.place for frame in frames}
    if not most and len(places) == 1:
        return dict.fromkeys(_unlowered(found), places.pop())
    return {name: place for name, (_, place) in most.items()}


# --------------------------------------------------------------------------------------------- the rest of the log


def _executions(analyses: Analyses, source: str) -> Iterator[Row]:
    for execution, count in analyses.executions.items():
        fields = {"count": count, "cause_text": execution.cause, "graph": execution.graph}
        yield _event("xla_executions", None, None, source, **fields, **_at(execution.place, function=False))


def _warnings(analyses: Analyses, source: str) -> Iterator[Row]:
    for text, repeats in analyses.warnings.values():
        yield _event("xla_warning", None, None, source, text=text, repeats=repeats)


def _counters(found: Sources) -> Iterator[Row]:
    report = found.report
    if report:
        metrics = {
            name: {
                "unit": metric.unit,
                "samples": metric.samples,
                "total": metric.total,
                "samples_per_second": metric.samples_per_second,
                "value_per_second": metric.value_per_second,
                "percentiles": metric.percentiles,
            }
            for name, metric in sorted(report.metrics.items())
        }
        fields = {"metrics": metrics, "counters": dict(sorted(report.counters.items())), "renamed": report.renamed}
        yield _event("counters", found.last_step, None, found.source, **fields)
    elif found.analyses is not None and found.analyses.steps:
        yield _event(
            "counters", None, None, found.log, metrics={}, counters={STEPS: found.analyses.steps}, renamed={}
        )  # fmt: skip


def changes_of(sections: Sequence[StepChange], whole: StepChange) -> tuple[StepChange, ...]:
    """The steps, and without a step what a report of the whole run counts beyond them."""
    rest = StepChange(None)
    rest.add(whole)
    for change in sections:
        rest.add(change, -1)
    return (*sections, rest) if rest else tuple(sections)
