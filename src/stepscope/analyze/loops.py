"""Python loops of the user's that call the same thing once per item, from the calls the window saw.

A function of the user's that makes the same call many times within one of its invocations and one step loops. The
loop's time is the distance from call to call (a long break is left out), scaled from the window, where recording slows
Python, to the steady step. Every operator of the loop that needs a gradient leaves a node for the backward pass; nodes
carry their operator's sequence number, so the loop's part of the backward pass is added up too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.dimensions import explain
from stepscope.analyze.sampled_time import SampledTime
from stepscope.analyze.trace import OPERATOR, TRANSPARENT, Window
from stepscope.engine.samples import Samples
from stepscope.engine.source_lines import CallSite, Lines
from stepscope.model import LoopFacts, Place

MIN_CALLS = 32  # fewer calls of one kind are layers, heads or parameter groups rather than items
MOSTLY = 0.9  # of the calls between those of another loop: then they are its iterations
MAX_BREAK = 5.0  # a distance of more than this many median distances is work beside the loop
MAX_LOOPS = 20
ENOUGH_SAMPLES = 50  # a share of 20 % then has a standard error of 6 points, less than the window's slowing
FITS = 1.05  # times a part of the step by the journal, which a loop in it may be by the trace's clock
_AHEAD = (("forward",), ("data_wait", "before_forward"), ("data_wait", "before_forward", "forward"))
_BEHIND = ("optimizer", "other")
_ENGINE = "autograd::engine::evaluate_function: "
_GENERATORS = ("<genexpr>",)


@dataclass(frozen=True)
class _Loop:
    """A loop in all its invocations: `calls` holds (caller, step) groups of its dominant callee."""

    file: str
    function: str
    def_line: int
    label: str
    callee: str
    calls: pl.DataFrame  # caller, step, process, track, n, starts, ends, rows
    span_ns: float  # summed over all window steps
    total_calls: float
    per_invocation: int


def facts(
    window: Window | None, lines: Lines, samples: Samples | None, mean_ms: float | None, time: SampledTime | None
) -> tuple[LoopFacts, ...] | None:
    """None without a window with Python functions; costliest first. `mean_ms` is the steady training step."""
    if window is None or not window.step_times_known or not window.has_functions:
        return None
    loops = _find(window)
    found = [(loop, _with_samples(_describe(window, lines, loop, mean_ms), samples, time)) for loop in loops]
    found.sort(key=lambda pair: -(pair[1].ms_per_step + (pair[1].backward_ms_per_step or 0.0)))
    found = found[:MAX_LOOPS]
    if len(found) < 2:
        return tuple(fact for _, fact in found)
    above = dict(window.all_slices.filter(pl.col("what") != OPERATOR).select("row", "above").iter_rows())
    result: list[LoopFacts] = []
    for loop, fact in found:
        outer = next((other for around, other in found if around is not loop and _runs_in(above, loop, around)), None)
        result.append(replace(fact, nested_in=outer.place) if outer else fact)
    return tuple(result)


def stacks_in(samples: Samples, loop: LoopFacts) -> pl.Series:
    """`row` of the sampled stacks that stand in an iteration of the loop.

    The line of the `for` pays for the iteration too; without the source the whole function counts.
    """
    last = max(loop.place.line or 0, loop.loop_end or 0) if loop.loop_line is not None else None
    return samples.through(loop.place.file, loop.place.function or "", loop.loop_line, last)


def _with_samples(fact: LoopFacts, samples: Samples | None, time: SampledTime | None) -> LoopFacts:
    """Takes the forward time from the steady steps' own samples where they are many: the window slows Python."""
    if samples is None or time is None:
        return fact
    inside = time.share_of(stacks_in(samples, fact))
    if inside.samples < ENOUGH_SAMPLES:
        most = fact.at_most_ms_per_step
        if inside.samples and time.samples >= ENOUGH_SAMPLES and most is not None:
            # too few to say how long it takes, but enough to say how long at most
            most = max(fact.ms_per_step, min(most, inside.at_most_ms))
        return replace(fact, samples=inside.samples, at_most_ms_per_step=most)
    backward = fact.backward_ms_per_step
    return replace(
        fact,
        ms_per_step=inside.ms,
        at_most_ms_per_step=inside.at_most_ms,
        backward_ms_per_step=min(backward, time.mean_ms - inside.ms) if backward is not None else None,
        samples=inside.samples,
        time_source=f"sampled stacks, {inside.samples} of {time.samples} samples in steps",
    )


def _find(window: Window) -> list[_Loop]:
    calls = window.slices.filter(
        pl.col("direct") & (pl.col("what") != TRANSPARENT) & ~pl.col("in_loader") & pl.col("step").is_not_null()
    )
    calls = calls.with_columns(
        # modules keep their instance: the layers of a network are not items of a loop
        pl.when(pl.col("name").str.starts_with("nn.Module: ")).then("name").otherwise("label").alias("key")
    )
    groups = (
        calls.sort("start_ns")
        .group_by("process", "step", "track", "caller", "key", "label", maintain_order=True)
        .agg(
            n=pl.len(),
            total=pl.col("duration_ns").sum(),
            starts=pl.col("start_ns"),
            ends=pl.col("start_ns") + pl.col("duration_ns"),
            rows=pl.col("row"),
        )
        .filter(pl.col("n") >= MIN_CALLS)
        .collect()
        .join(window.callers(), on="caller", maintain_order="left")
    )
    loops: list[_Loop] = []
    for (file, function, line), of_function in sorted(
        groups.group_by("caller_file", "caller_function", "caller_line"), key=lambda pair: [str(k) for k in pair[0]]
    ):
        loops.extend(_of_function(window, str(file), str(function), int(str(line)), of_function))
    return loops


def _of_function(window: Window, file: str, function: str, line: int, groups: pl.DataFrame) -> list[_Loop]:
    """The distinct loops of one function: calls whose time lies within another's loop belong to that loop."""
    order = groups.group_by("key").agg(pl.col("total").sum()).sort(["total", "key"], descending=[True, False])
    loops: list[_Loop] = []
    for key in order["key"].to_list():
        own = groups.filter(pl.col("key") == key)
        if any(_inside(own, loop.calls) for loop in loops):
            continue
        loops.append(_build(window, file, function, line, own))
    return loops


def _inside(own: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Whether the calls of `own` fall between the calls of `other`, judged in the invocation with the most of them."""
    row = own.sort("n", "step", "caller", descending=[True, False, False]).row(0, named=True)
    same = other.filter((pl.col("caller") == row["caller"]) & (pl.col("step") == row["step"]))
    if same.is_empty():
        return False
    first, last = same["starts"][0].min(), same["ends"][0].max()
    period = (last - first) / max(1, same["n"][0])
    starts = np.asarray(row["starts"])
    return float(np.mean((starts >= first - period) & (starts < last))) >= MOSTLY  # one of them may have been held up


def _build(window: Window, file: str, function: str, line: int, own: pl.DataFrame) -> _Loop:
    label = str(own["label"][0])
    callee, count = label, float(own["n"].sum())
    per_invocation = int(np.median(own["n"].to_numpy()))
    if label in _GENERATORS:  # one more resumption ends it; the call worth naming is made inside
        count -= own.height
        per_invocation -= 1
        callee = _heaviest_child(window, own["rows"].explode()) or label
    span = sum(_span_ns(starts, ends) for starts, ends in own.select("starts", "ends").iter_rows())
    return _Loop(file, function, line, label, callee, own, span, count, per_invocation)


def _span_ns(starts: list[int], ends: list[int]) -> float:
    begin = np.asarray(starts)
    distances = np.diff(begin)
    if not len(distances):
        return float(ends[-1] - starts[0])
    typical = float(np.median(distances))
    return float(np.minimum(distances, MAX_BREAK * typical).sum()) + float(
        min(ends[-1] - begin[-1], MAX_BREAK * typical)
    )


def _heaviest_child(window: Window, rows: pl.Series) -> str | None:
    children = (
        window.all_slices.filter(pl.col("above").is_in(rows.to_list()))
        .group_by("label")
        .agg(pl.col("duration_ns").sum())
        .sort("duration_ns", "label", descending=[True, False])
    )
    return str(children["label"][0]) if children.height else None


def _describe(window: Window, lines: Lines, loop: _Loop, mean_ms: float | None) -> LoopFacts:
    inside = _slices_within(window, loop)
    operators = inside.filter(pl.col("what") == OPERATOR)
    recorded_ms = loop.span_ns / window.steps / 1e6
    ms, most_ms = _steady_ms(window, recorded_ms, after_backward=_after_backward(window, loop))
    back_ms, back_at_most, back_calls, node = _backward(window, operators)
    if mean_ms is not None:
        ms, most_ms = min(ms, mean_ms), min(most_ms, mean_ms)
        back_ms = min(back_ms, mean_ms - ms) if back_ms is not None else None
        back_at_most = min(back_at_most, mean_ms - ms) if back_at_most is not None else None
    site = lines.call_site(loop.file, loop.function, loop.def_line, loop.callee, loop=True)
    return LoopFacts(
        callee=loop.callee,
        calls_per_step=loop.total_calls / window.steps,
        ms_per_step=ms,
        at_most_ms_per_step=most_ms,
        operators_per_call=operators.height / max(1.0, loop.total_calls),
        place=_place(loop, site),
        dimension=explain(loop.per_invocation, operators["shapes"]),
        source=f"{window.source}, {window.steps} window step{'s' * (window.steps != 1)}; "
        f"line: {site.method if site else 'the definition'}",
        loop_line=site.loop_line if site else None,
        loop_end=site.loop_end if site else None,
        backward_ms_per_step=back_ms,
        backward_at_most_ms_per_step=back_at_most,
        backward_calls_per_step=back_calls,
        backward_node=node,
        exact_line=site is not None,
        low_confidence=window.low_confidence,
        window_steps=window.steps,
        time_source=f"{window.source}, scaled to the steady step",
        operators_ms_per_step=_outermost_ms(operators) / window.steps,
        calls_per_invocation=loop.per_invocation,
    )


def _outermost_ms(operators: pl.DataFrame) -> float:
    return float(operators.filter(~pl.col("in_operator"))["duration_ns"].sum()) / 1e6


def _place(loop: _Loop, site: CallSite | None) -> Place:
    return Place(loop.file, site.line if site else loop.def_line, loop.function)


def _steady_ms(window: Window, ms: float, *, after_backward: bool) -> tuple[float, float]:
    """Time of the window as time of a steady step, by the part of the step that has room for it, and at most.

    A window slows a part that is all small operators many times, and others little; what else lies in the part may have
    been slowed more than the loop.
    """
    for phases in (_BEHIND,) if after_backward else _AHEAD:
        known = [window.phase_ms[phase] for phase in phases if phase in window.phase_ms]
        recorded, steady = sum(each for each, _ in known), sum(each for _, each in known)
        if 0 < ms <= recorded * FITS:
            return min(ms * steady / recorded, steady), min(ms, steady)
    scaled = ms * window.ratio.get("wall", 1.0)
    return scaled, scaled


def _backward_ratio(window: Window) -> float:
    return window.ratio.get("backward", window.ratio.get("wall", 1.0))


def _slices_within(window: Window, loop: _Loop) -> pl.DataFrame:
    """Slices of the loop's threads between its first and last call, one invocation after the other."""
    bounds = loop.calls.select(
        "process",
        "step",
        "track",
        pl.col("starts").list.first().alias("first"),
        pl.col("ends").list.last().alias("last"),
    )
    # the operands of the first call are made just before it
    bounds = bounds.with_columns(pl.col("first") - (pl.col("last") - pl.col("first")) // loop.calls["n"].min())
    joined = window.slices.join(bounds.lazy(), on=["process", "step", "track"])
    inside = (pl.col("start_ns") >= pl.col("first")) & (pl.col("start_ns") < pl.col("last"))
    return joined.filter(inside).unique("row").collect()


def _after_backward(window: Window, loop: _Loop) -> bool:
    """Whether the loop runs behind the step's backward pass: an update written by hand, say."""
    row: dict[str, Any] = loop.calls.row(0, named=True)
    nodes = window.slices.filter(
        (pl.col("process") == row["process"])
        & (pl.col("step") == row["step"])
        & pl.col("name").str.starts_with(_ENGINE)
    ).collect()
    return bool(nodes.height and nodes["start_ns"].min() < row["starts"][0])


def _backward(window: Window, operators: pl.DataFrame) -> tuple[float | None, float | None, float | None, str | None]:
    """Of the backward nodes the loop's operators left: ms per steady step, the most it can be, calls per step, and the
    most frequent node."""
    ranges = (
        operators.filter(pl.col("sequence").is_not_null() & (pl.col("sequence") >= 0))
        .group_by("process", "step")
        .agg(low=pl.col("sequence").min(), high=pl.col("sequence").max(), first=pl.col("start_ns").min())
    )
    nodes = (
        window.slices.filter(pl.col("name").str.starts_with(_ENGINE))
        .join(ranges.lazy(), on=["process", "step"])
        .filter(pl.col("sequence").is_between("low", "high") & (pl.col("start_ns") > pl.col("first")))
        .collect()
    )
    if nodes.is_empty():
        return None, None, None, None
    names = nodes.group_by("name").agg(n=pl.len()).sort(["n", "name"], descending=[True, False])
    every = window.slices.filter(pl.col("name").str.starts_with(_ENGINE)).select("duration_ns").collect()
    in_no_node_ms = _in_no_node_ms(window, float(every["duration_ns"].sum()) / window.steps / 1e6)
    recorded_ms = float(nodes["duration_ns"].sum()) / window.steps / 1e6
    others_ms = float(every["duration_ns"].sum()) / window.steps / 1e6 - recorded_ms
    least = _least_in_steady_backward(window, recorded_ms, others_ms)
    most = recorded_ms * _backward_ratio(window)
    # between two nodes the engine adds up gradients and picks the next: work for each node
    between_ms = in_no_node_ms * nodes.height / max(1, every.height) * _backward_ratio(window)
    return (
        (min(least, most) + most) / 2,
        most + between_ms,
        int(names["n"][0]) / window.steps,
        str(names["name"][0]).removeprefix(_ENGINE),
    )


def _least_in_steady_backward(window: Window, recorded_ms: float, others_ms: float) -> float:
    """What the other nodes, at their recorded time, leave of a steady backward pass.

    Recording slows many small nodes far more than few large ones, and can fragment the heap under all of them: scaling
    in proportion gives the loop too much, taking the others' recorded time as it is gives it too little. The middle is
    reported; the proportion, with its part of what lies between nodes, bounds the gain.
    """
    means = window.phase_ms.get("backward")
    if means is None:
        return recorded_ms * _backward_ratio(window)
    window_ms, steady_ms = means
    ratio = steady_ms / window_ms
    in_no_node_ms = _in_no_node_ms(window, recorded_ms + others_ms)
    return max(0.0, steady_ms - others_ms * max(1.0, ratio) - in_no_node_ms * ratio)


def _in_no_node_ms(window: Window, in_nodes_ms: float) -> float:
    """What of the window's backward pass lies in no node; 0 where the pass was not timed."""
    means = window.phase_ms.get("backward")
    return max(0.0, means[0] - in_nodes_ms) if means is not None else 0.0


def _runs_in(above: dict[int, int | None], inner: _Loop, outer: _Loop) -> bool:
    """Whether an invocation of `inner` lies below a call that `outer` makes once per item."""
    row = inner.calls.row(0, named=True)
    same = outer.calls.filter((pl.col("process") == row["process"]) & (pl.col("step") == row["step"]))
    if same.is_empty() or row["caller"] in same["caller"].to_list():
        return False
    callees = set(same["rows"].explode().to_list())
    at: int | None = row["caller"]
    hops = 0
    while at is not None and hops < 1000:
        if at in callees:
            return True
        at, hops = above.get(at), hops + 1
    return False
