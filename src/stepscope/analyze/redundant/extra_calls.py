"""Calls of a trained module that train nothing, such as validation or metrics inside the training step; and copies of
the model, or of its state, inside training steps.

A call of a module that no other module makes counts when no backward pass reads what it computed although the steps
train the same instance elsewhere, and when its result is scored before the training goes on: compared, turned into a
loss, or read by the host. Calls inside the backward pass, or of activation checkpointing, are none; nor are those of a
function that draws from what the model says: actions and generated texts are what is trained on. Whether gradients were
recorded is told by the sequence numbers of its operators: they count nodes.

Copies are told by sampled stacks, or by the functions of a trace. Time counts below the functions of Python and torch
that copy a model; the line is the user's innermost one above. What `copy.deepcopy` copies can be anything; it counts
where tensors are copied below it. What `torch.save` calls is file output, and copying by a loop of the user's own is a
loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.redundant.training_steps import TrainingScene, outermost, summed
from stepscope.engine import intervals
from stepscope.engine.attribution import calls, origins, place, trace_back
from stepscope.engine.intervals import Intervals
from stepscope.engine.samples import Samples, bare, short
from stepscope.model import Place
from stepscope.model.device_losses import ExtraCall, ModelCopy
from stepscope.tables.arrays import NONE, Int64, climb, flags, self_or_ancestor, unique

# A share of one half then has a standard error of 9 points; windows on a busy machine are no better.
ENOUGH_SAMPLES = 30
LINE_SAMPLES = 3
MOST = 0.7  # of the recorded time of these calls: then the line with nearly all of the samples makes them
SOME = 0.05  # of the samples of a function that call a module: lines with fewer are torn samples
ONE_LINE = 0.8  # of the samples of a function that call a module: the rest are torn
MAX_LEVELS = 1_000  # functions around each other; a broken tree ends here
_SCORES = re.compile(r"^aten::(is_nonzero|eq|ne|nonzero|bincount|histc|unique\w*)$|^aten::\w*(loss|cross_entropy)\w*$")
_READS = re.compile(r"^aten::(item|_local_scalar_dense)$")
_PICKS = re.compile(r"^aten::(argmax|argmin|topk)$")  # what is read of it then is a choice, as an action, and no score
_DRAWS = re.compile(r"^aten::(multinomial|bernoulli|normal|poisson|binomial)$")  # dropout draws by others
_NOT_FORWARD = re.compile(
    r"(^|/)torch/utils/checkpoint\.py\(|(^|/)torch/autograd/__init__\.py\(\d+\): (backward|grad)$"
)
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
BACKWARD_CALL = re.compile(
    r"(^|/)torch/_tensor\.py\(\d+\): backward$|(^|/)torch/autograd/__init__\.py\(\d+\): backward$"
)
_EXTRA, _OTHER, _BACKWARD = "extra", "other", "backward"
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl", "__call__")


class _Found(Struct, frozen=True):
    """Extra calls of one instance from one place in one trace.

    `around`: the user's code that trains nothing. `order`: what the function that makes them does in a step, in time:
    calls of modules (`_EXTRA` these, else `_OTHER`) and `_BACKWARD`; empty where it makes no others. `part`: of the
    time of all calls of modules that the function makes.
    """

    scene: TrainingScene
    calls: Int64
    around: Intervals
    outer: Place | None
    nodes: int
    order: tuple[str, ...]
    part: float


def extra_calls(
    scenes: Sequence[TrainingScene], samples: Samples | None, time: SampledTime | None
) -> tuple[ExtraCall, ...]:
    """Costliest first. `samples` and `time`: of the steady steps of the scenes' run."""
    groups: dict[tuple[str, Place, bool], list[_Found]] = {}
    for scene in scenes:
        for module, where, exact, found in _Calls(scene).groups():
            groups.setdefault((module, where, exact), []).append(found)
    made = []
    steps = sum(len(scene) for scene in scenes)
    on_host = not any(len(scene.found) for scene in scenes)
    for (module, where, exact), parts in groups.items():
        ms = summed(scenes, [(one.scene, one.scene.lost(one.scene.times(one.calls), one.calls)) for one in parts])
        around_ms = summed(scenes, [(one.scene, one.scene.lost(one.around, one.calls)) for one in parts])
        source = ", ".join(one.scene.span.ref.label for one in parts)
        seen, outer, at_most_ms = 0, parts[0].outer, 0.0
        if samples is not None and time is not None and on_host:
            line, rows = _sampled(samples, time, where, parts[0].order, parts[0].part)
            if line is not None and not exact:
                where, exact = Place(where.file, line, where.function), True
            whole = share = time.share_of(rows)
            seen = share.samples
            if outer is not None:
                whole = time.share_of(samples.through(outer.file, outer.function or "", None, None))
            if seen >= ENOUGH_SAMPLES:
                ms, source = share.ms, f"sampled stacks, {seen} of {time.samples} samples in steps"
                around_ms = around_ms if outer is None else whole.ms
                at_most_ms = whole.at_most_ms
        call = ExtraCall(
            module=module,
            place=where,
            exact=exact,
            calls_per_step=sum(len(one.calls) for one in parts) / steps,
            steps_share=sum(len(unique(one.scene.step_around(one.calls))) for one in parts) / steps,
            ms_per_step=ms,
            around_ms_per_step=max(ms, around_ms),
            at_most_ms_per_step=max(ms, around_ms, at_most_ms),
            around=outer,
            nodes_per_step=sum(one.nodes for one in parts) / steps,
            samples=seen,
            source=source,
        )
        made.append(call)
    return tuple(sorted(made, key=lambda one: (-one.ms_per_step, one.place.file, one.place.line or 0, one.module)))


def _sampled(
    samples: Samples, time: SampledTime, where: Place, order: tuple[str, ...], part: float
) -> tuple[int | None, pl.Series]:
    """The line of the function that makes the calls, if it can be told, and the stacks below it."""
    none = pl.Series("row", [], time.rows["row"].dtype)
    frames = samples.frames.join(time.rows.select("row", "samples"), on="row").sort("row", "position")
    callee = short(pl.col("function")).shift(-1).over("row")
    here = (pl.col("user_file") == where.file) & (short(pl.col("function")) == bare(where.function))
    stacks = frames.with_columns(callee=callee, backward=callee == _BACKWARD)
    stacks = stacks.filter(here & pl.col("callee").is_in([*_MODULE_CALLS, _BACKWARD])).unique(["row", "line"])
    calls = stacks.group_by("line", "backward").agg(n=pl.col("samples").sum())
    calls = calls.sort("n", "line", descending=[True, False])
    modules = calls.filter(~pl.col("backward"))
    every = int(modules["n"].sum())
    if every < LINE_SAMPLES:
        return None, none
    line = _line_by_order(calls.filter(pl.col("n") >= SOME * every), order)
    if line is None and part >= MOST and int(modules["n"][0]) >= ONE_LINE * every:
        line = int(modules["line"][0])
    own = stacks.filter((pl.col("line") == line) & ~pl.col("backward")) if line is not None else stacks.clear()
    return (line, own["row"]) if int(own["samples"].sum()) >= LINE_SAMPLES else (None, none)


def _line_by_order(calls: pl.DataFrame, order: tuple[str, ...]) -> int | None:
    """Which line of a loop makes the extra calls: in the text its calls stand as they follow each other in time, from
    some call on. The backward pass tells from which.
    """
    text = calls.sort("line").select("line", "backward").rows()
    marks = [number for number, (_, backward) in enumerate(text) if backward]
    if len(marks) != 1 or len(text) != len(order) or _BACKWARD not in order:
        return None
    shift = order.index(_BACKWARD) - marks[0]
    lines = {line for number, (line, _) in enumerate(text) if order[(number + shift) % len(order)] == _EXTRA}
    return int(lines.pop()) if len(lines) == 1 else None


class _Calls:
    """The calls of modules of one trace, and which of them train nothing."""

    def __init__(self, scene: TrainingScene) -> None:
        self.scene, self.span = scene, scene.span
        calls, names, parent = scene.calls, scene.span.names, scene.span.parent
        # calls in the steps that no module makes, nor the backward pass
        rows = calls.rows[calls.outer < 0] if len(calls.rows) else calls.rows
        rows = rows[scene.mine[rows]]
        stop = names.matching(_NOT_FORWARD.search) | calls.is_backward
        self.roots: Int64 = rows[climb(parent, rows, stop) < 0]
        # forward operators that a backward node reads
        self.trained: Int64 = unique(calls.forward[calls.forward >= 0])
        # for each row the call around it that no module makes, or itself; -1 for none
        self.root_of = self_or_ancestor(parent, flags(len(self.span), self.roots)).astype(np.int64)
        # by position in `calls.rows` the name of the instance
        self.instances = [calls.paths.name[number] if number >= 0 else "" for number in calls.path.tolist()]
        # when the training goes on, in order: a trained operator, the backward pass, the optimizer begins
        goes_on = np.flatnonzero(names.matching(_OPTIMIZER.search) | calls.is_backward)
        goes_on = np.concatenate([self.trained, goes_on])
        self.resumes: Int64 = np.sort(self.span.start_ns[goes_on[scene.mine[goes_on]]])

    @cached_property
    def _holder(self) -> Int64:
        """For each row the user's function around it, or itself; -1 for none."""
        span = self.span
        user = (origins(self.scene.base, span).user >= 0) & span.is_function
        return self_or_ancestor(span.parent, user).astype(np.int64)

    def groups(self) -> Iterator[tuple[str, Place, bool, _Found]]:
        """By instance and the user's line or function that calls it, as (instance, place, exact, calls)."""
        rows = self.roots[~np.isin(self.roots, self.root_of[self.trained])]
        # the instances around a trained operator
        at = climb(self.span.parent, self.trained, self.scene.calls.is_call)
        inner, trained = unique(np.searchsorted(self.scene.calls.rows, at[at >= 0])), set[str]()
        while len(rows) and len(inner):
            trained.update(self.instances[number] for number in inner.tolist())
            inner = unique(self.scene.calls.outer[inner])
            inner = inner[inner >= 0]
        names = [self.instances[number] for number in np.searchsorted(self.scene.calls.rows, rows).tolist()]
        rows = rows[[number for number, name in enumerate(names) if name in trained]]
        names = [name for name in names if name in trained]
        if not names:
            return
        begins, ends = np.array([self._around(int(row)) for row in rows.tolist()], np.int64).T
        found = trace_back(self.scene.base, self.span, rows)
        operators = self.scene.operators & ~flags(len(self.span), self.trained)

        def happens(name: re.Pattern[str], since: Int64) -> Any:  # before `ends`, and trains nothing
            times = np.sort(self.span.start_ns[self.span.names.matching(name.search) & operators])
            return np.searchsorted(times, ends) > np.searchsorted(times, since)

        # whether the result of each call is scored, and nothing drawn around it
        over = self.span.ends(rows)
        scored = happens(_SCORES, over) | (happens(_READS, over) & ~happens(_PICKS, over))
        scored &= ~happens(_DRAWS, np.where(begins >= 0, self.span.start_ns[begins], over))
        # or nothing is done with it, though gradients are recorded: not even detached
        sequence = self.span.column("sequence")
        loose = np.sort(self.span.start_ns[operators & (self.root_of < 0)])
        unused = np.searchsorted(loose, ends) == np.searchsorted(loose, over)
        scored |= unused & np.isin(rows, self.root_of[self.scene.operators & (sequence >= 0)])
        trains = self.roots[np.isin(self.roots, self.root_of[self.trained])]
        also_train = trace_back(self.scene.base, self.span, trains).place
        keys: dict[tuple[str, int], list[int]] = {}
        for number in np.flatnonzero(scored & (found.place >= 0)).tolist():
            keys.setdefault((names[number], int(found.place[number])), []).append(number)
        places, user = self.scene.base.places, origins(self.scene.base, self.span).user
        for (name, index), numbers in sorted(keys.items()):
            own, begin = rows[numbers], begins[numbers]
            starts = self.span.start_ns[np.where(begin >= 0, begin, own)]
            around = intervals.union(starts, ends[numbers])
            # the one function of the user's that holds all of the calls, if there is one
            holders, outer = unique(user[begin]), None
            if (begin >= 0).all() and len(holders) == 1:
                origin = places[int(holders[0])]
                outer = Place(origin.file, origin.line, origin.function)
            # nodes that the operators of these calls recorded: how far their sequence numbers count up
            chosen = np.isin(self.root_of, own) & (sequence >= 0) & self.scene.operators
            counted = pl.DataFrame({"call": self.root_of[chosen], "number": sequence[chosen]}).group_by("call")
            nodes = int(counted.agg(pl.col("number").max() - pl.col("number").min())["number"].sum())
            where, exact = place(self.scene.base, index)
            if outer is not None and index in also_train:  # what calls that function is the difference
                where, exact = self._caller(begin) or (where, exact)
            yield name, where, exact, _Found(self.scene, own, around, outer, nodes, *self._order(own))

    def _caller(self, functions: Int64) -> tuple[Place, bool] | None:
        """The one place of the user's that calls these functions, if there is one."""
        above = trace_back(self.scene.base, self.span, self.span.parent[functions]).place
        made = calls(self.scene.base, self.span, functions)
        pairs = [pair for pair in zip(above.tolist(), made.tolist(), strict=True) if pair[0] >= 0]
        found = {place(self.scene.base, *pair) for pair in pairs}
        return found.pop() if len(found) == 1 else None

    def _order(self, rows: Int64) -> tuple[tuple[str, ...], float]:
        """`_Found.order` and `part` of the step of the first of these calls."""
        span = self.span
        backward = span.names.matching(BACKWARD_CALL.search) & span.is_function
        calls = np.concatenate([self.roots, np.flatnonzero(backward & self.scene.mine)])
        step = self.scene.step_around(np.append(calls, rows[0]))
        calls = calls[step[:-1] == step[-1]]
        holder, place_of = self._holder[calls], np.append(origins(self.scene.base, span).user, NONE)
        first = self._holder[rows[0]]
        same = holder == first
        shared = place_of[holder] == place_of[first]
        if (shared & ~same & ~np.isin(calls, rows) & ~backward[calls]).any():
            return (), 0.0  # the same function trains when it is called again: its samples are of both
        calls = calls[same]
        calls = calls[np.argsort(span.start_ns[calls], kind="stable")]
        own = set(rows.tolist())
        found: list[str] = []
        for row in calls.tolist():
            kind = _EXTRA if row in own else _BACKWARD if backward[row] else _OTHER
            if kind == _OTHER or not found or found[-1] != kind:  # a loop over batches, or two frames of one call
                found.append(kind)
        modules = calls[~backward[calls]]
        part = span.duration_ns[modules[np.isin(modules, rows)]].sum() / max(1, span.duration_ns[modules].sum())
        return tuple(found) if found.count(_BACKWARD) == 1 else (), float(part)

    def _around(self, row: int) -> tuple[int, int]:
        """The outermost function of the user's around a call in which nothing is trained, -1 for none; and when what
        belongs to the call is over: that function, or the code up to where the training goes on.
        """
        span, user = self.span, origins(self.scene.base, self.span).user
        outer, above = NONE, int(span.parent[row])
        for _ in range(MAX_LEVELS):
            if above < 0:
                break
            start, end = int(span.start_ns[above]), int(span.start_ns[above] + span.duration_ns[above])
            if user[above] >= 0:
                resumes = np.searchsorted(self.resumes, [start, end])
                if resumes[0] != resumes[1]:
                    break
                outer = above
            above = int(span.parent[above])
        whole = outer if outer >= 0 else row
        end = int(span.start_ns[whole] + span.duration_ns[whole])
        if outer >= 0:
            return outer, end
        over = int(self.scene.ends[self.scene.step_around(np.array([row], np.int64))[0]])
        later = int(np.searchsorted(self.resumes, end))
        return NONE, min(int(self.resumes[later]), over) if later < len(self.resumes) else over


MAX_FACTS = 10
_DEEPCOPY = "copy.deepcopy"
_CALLS = (  # (end of the file's name, function, what the report calls it)
    (r"(^|/)copy\.py$", "deepcopy", _DEEPCOPY),
    (r"(^|/)torch/nn/modules/module\.py$", "state_dict", "Module.state_dict"),
    (r"(^|/)torch/nn/modules/module\.py$", "load_state_dict", "Module.load_state_dict"),
    (r"(^|/)torch/optim/optimizer\.py$", "state_dict", "Optimizer.state_dict"),
    (r"(^|/)torch/optim/optimizer\.py$", "load_state_dict", "Optimizer.load_state_dict"),
    (r"(^|/)torch/optim/swa_utils\.py$", "update_parameters", "AveragedModel.update_parameters"),
)
_TENSOR_COPY = pl.col("file").str.contains(r"(^|/)torch/(_tensor|nn/parameter)\.py$") & (
    short(pl.col("function")) == "__deepcopy__"
)
_ELSEWHERE = re.compile(r"(^|/)torch/(serialization|utils/data/dataloader)\.py\(")  # file output; items of a data set
_TENSOR_COPIES = ("aten::clone", "aten::copy_", "aten::_foreach_lerp_", "aten::_foreach_copy_", "aten::lerp_")
_SAVES = pl.col("file").str.contains(r"(^|/)torch/serialization\.py$")


def sampled_copies(samples: Samples | None, timed: SampledTime | None) -> tuple[ModelCopy, ...] | None:
    """None without stacks of steady steps; costliest first."""
    if samples is None or timed is None:
        return None
    everything = timed.rows.filter(pl.col("phase") != "data_wait")
    frames = samples.frames.join(everything.select("row", "samples"), on="row")
    call = pl.lit(None, pl.String)
    for file, function, name in _CALLS:
        here = pl.col("file").str.contains(file) & (short(pl.col("function")) == function)
        call = pl.when(here).then(pl.lit(name)).otherwise(call)
    copying = frames.with_columns(call=call).filter(pl.col("call").is_not_null() & pl.col("user_file").is_null())
    copying = copying.sort("row", "position").unique("row", keep="first", maintain_order=True)
    saving = frames.filter(_SAVES)["row"].unique()
    tensors = frames.filter(_TENSOR_COPY)["row"].unique()
    users = frames.filter(pl.col("user_file").is_not_null()).select(
        "row", "user_file", user_line="line", user_function="function", at="position"
    )
    own = (
        copying.filter(~pl.col("row").is_in(saving.implode()))
        .select("row", "samples", "call", "position")
        .join(users, on="row")
        .filter(pl.col("at") < pl.col("position"))
        .sort("row", "at")
        .unique("row", keep="last", maintain_order=True)
        .with_columns(tensors=pl.col("row").is_in(tensors.implode()))
        .group_by("call", "user_file", "user_line", "user_function")
        .agg(n=pl.col("samples").sum(), rows=pl.col("row"), tensors=pl.col("tensors").any())
        .filter(pl.col("tensors") | (pl.col("call") != _DEEPCOPY))
        .sort("n", "user_file", "user_line", "call", descending=[True, False, False, False])
        .head(MAX_FACTS)
    )
    found = []
    for row in own.iter_rows(named=True):
        # the journal times the parts of a step; samples, which see too little of busy Python, only divide them
        share, where = timed.share_of(row["rows"]), Place(row["user_file"], row["user_line"], row["user_function"])
        source = f"sampled stacks, {row['n']} of {timed.samples} samples in steps"
        found.append(ModelCopy(row["call"], where, share.ms, share.at_most_ms, row["n"], source))
    return tuple(found)


def traced_copies(scenes: Sequence[TrainingScene]) -> tuple[ModelCopy, ...]:
    """The same by the Python functions of traces, costliest first."""
    groups: dict[tuple[str, Place], list[tuple[TrainingScene, list[int]]]] = {}
    for scene in scenes:
        span, names, called = scene.span, scene.span.names, [_called(name) for name in scene.span.names.values]
        rows = outermost(scene, names.pick([bool(name) for name in called]) & span.is_function & scene.mine)
        rows = rows[climb(span.parent, rows, names.matching(_ELSEWHERE.search)) < 0]
        copying = np.flatnonzero(names.where(_TENSOR_COPIES) & scene.operators)
        rows = unique(rows[np.isin(rows, self_or_ancestor(span.parent, flags(len(span), rows))[copying])])
        own: dict[tuple[str, Place], list[int]] = {}  # by call and the user's line above it
        by = trace_back(scene.base, span, rows)
        made = calls(scene.base, span, by.called)
        for row, number, made_by in zip(rows.tolist(), by.place.tolist(), made.tolist(), strict=True):
            if number >= 0:
                where, _ = place(scene.base, number, made_by)
                own.setdefault((called[names.codes[row]], where), []).append(row)
        for key, mine in own.items():
            groups.setdefault(key, []).append((scene, mine))
    found = []
    for (call, where), parts in groups.items():
        source = ", ".join(scene.span.ref.label for scene, _ in parts)
        arrays = [(scene, np.array(rows, np.int64)) for scene, rows in parts]
        ms = summed(scenes, [(scene, scene.lost(scene.times(rows), rows)) for scene, rows in arrays])
        found.append(ModelCopy(call, where, ms, ms, 0, source))
    found.sort(key=lambda one: (-one.ms_per_step, one.place.file, one.place.line or 0, one.call))
    return tuple(found[:MAX_FACTS])


def _called(name: str) -> str:
    """What the report calls a function of a trace that copies a model; "" for all others."""
    head, _, function = name.partition("): ")
    file = head.rpartition("(")[0]
    return next((call for ending, own, call in _CALLS if function == own and re.search(ending, file)), "")
