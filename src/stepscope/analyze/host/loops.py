"""Python loops of the user's that call the same thing once per item, from the calls the window saw.

A function of the user's that makes the same call many times within one of its invocations and one step loops. The
loop's time is the distance from call to call (a long break is left out), scaled from the window, where recording slows
Python, to the steady step. Every operator of the loop that needs a gradient leaves a node for the backward pass; nodes
carry their operator's sequence number, so the loop's part of the backward pass is added up too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.engine import intervals
from stepscope.engine.host_calls import OPERATOR, TRANSPARENT, Function, HostCalls, ProfiledCalls
from stepscope.engine.journal import parse_json
from stepscope.engine.samples import Samples
from stepscope.engine.source_lines import Lines
from stepscope.engine.user_code import MODULE_CALL, callee_name
from stepscope.model import LoopFacts, Place
from stepscope.tables.arrays import Int64, climb, unique
from stepscope.tables.phases import BACKWARD, OPTIMIZER

MIN_CALLS = 32  # fewer calls of one kind are layers, heads or parameter groups rather than items
IN_TURN = 4  # calls of each module of a class by one invocation: layers are called once, or for two or three inputs
MIN_BEHIND = 4  # behind a backward pass, without a gradient: parameters or items, since no layer is called there
OPERATORS = 0.3  # of the time of such a loop, as recorded: else it is Python or files, which are told by themselves
MOSTLY = 0.9  # of the calls between those of another loop: then they are its iterations
MAX_BREAK = 5.0  # a distance of more than this many median distances is work beside the loop
MAX_LOOPS = 20
ENOUGH_SAMPLES = 50  # a share of 20 % then has a standard error of 6 points, less than the window's slowing
SOME_SAMPLES = 10  # enough where the window's time lies beyond their chance: few steps, or no free core
FITS = 1.05  # times a part of the step by the journal, which a loop in it may be by the trace's clock
_AHEAD = (("forward",), ("data_wait", "before_forward"), ("data_wait", "before_forward", "forward"))
_BEHIND = ("optimizer", "other")
_ENGINE = "autograd::engine::evaluate_function: "
_GENERATORS = ("<genexpr>",)
# What a loop over a module's parts goes through: its work are other calls, and list(...) of them does none.
_ITERATES = re.compile(r"nn/modules/module\.py\(\d+\): (named_)?(parameters|buffers|modules|children)$")
_TRAINS = re.compile(r"\b(backward|step)\(")  # what a training loop calls


class _Calls(Struct, frozen=True):
    """The calls of one thing that one invocation of a function makes in one step, in order of time.

    `positions`, as `caller`, are those of `part`.
    """

    part: HostCalls
    caller: int
    step: int
    positions: Int64

    @property
    def starts(self) -> Int64:
        return self.part.start_ns[self.positions]

    @property
    def ends(self) -> Int64:
        return self.starts + self.part.duration_ns[self.positions]

    def __len__(self) -> int:
        return len(self.positions)


class _Loop(Struct, frozen=True):
    """A loop in all its invocations: `calls` are those of its dominant callee."""

    function: Function
    callee: str
    calls: tuple[_Calls, ...]
    span_ns: float  # summed over all window steps
    total_calls: float
    per_invocation: int


_Slices = list[tuple[HostCalls, Int64]]  # some of all traces: positions of each part of the window


def loops(
    context: Context, window: ProfiledCalls | None, mean_ms: float | None, time: SampledTime | None
) -> tuple[LoopFacts, ...] | None:
    """None without a window with Python functions; costliest first. `mean_ms` is the steady training step."""
    if window is None or not window.step_times_known or not window.has_functions:
        return None
    found = []
    for loop in _find(window):
        fact = _describe(window, context.lines, loop, mean_ms)
        if loop.per_invocation < MIN_CALLS and not _of_items(fact, loop.span_ns / window.steps / 1e6, context.lines):
            continue
        if _makes_updates(fact, context):
            continue
        if context.sampled is not None and time is not None:
            # from the steady steps' own samples where they are many: the window slows Python
            inside = time.share_of(stacks_in(context.sampled, fact))
            most, backward = fact.at_most_ms_per_step, fact.backward_ms_per_step
            fact = replace(fact, samples=inside.samples)
            disagree = abs(inside.ms - fact.ms_per_step) > inside.at_most_ms - inside.ms
            if inside.samples >= ENOUGH_SAMPLES or (disagree and inside.samples >= SOME_SAMPLES):
                fact = replace(
                    fact,
                    ms_per_step=inside.ms,
                    at_most_ms_per_step=inside.at_most_ms,
                    backward_ms_per_step=None if backward is None else min(backward, time.mean_ms - inside.ms),
                    time_source=f"sampled stacks, {inside.samples} of {time.samples} samples in steps",
                )
            elif inside.samples and time.samples >= ENOUGH_SAMPLES and most is not None:
                # too few to say how long it takes, but enough to say how long at most
                fact = replace(fact, at_most_ms_per_step=max(fact.ms_per_step, min(most, inside.at_most_ms)))
        found.append((loop, fact))
    found.sort(key=lambda pair: -(pair[1].ms_per_step + (pair[1].backward_ms_per_step or 0.0)))
    found = found[:MAX_LOOPS]
    result: list[LoopFacts] = []
    for loop, fact in found:
        outer = next((other for around, other in found if around is not loop and _runs_in(loop, around)), None)
        result.append(replace(fact, nested_in=outer.place) if outer else fact)
    return tuple(result)


def _of_items(loop: LoopFacts, recorded_ms: float, lines: Lines) -> bool:
    """Whether the source has a loop there that runs operators without gradients for a notable part of its time.

    It is not the training loop, with calls one after the other.
    """
    differentiated = (loop.backward_calls_per_step or 0.0) >= loop.calls_per_step / 2
    works = (loop.operators_ms_per_step or 0.0) >= OPERATORS * recorded_ms
    return loop.loop_line is not None and works and not differentiated and not _trains(loop, lines)


def _trains(loop: LoopFacts, lines: Lines) -> set[str]:
    """What the text of a loop calls of backward passes and updates."""
    numbers = range(loop.loop_line or 0, (loop.loop_end or -1) + 1)
    return {name for number in numbers for name in _TRAINS.findall(lines.text(loop.place.file, number) or "")}


def _makes_updates(loop: LoopFacts, context: Context) -> bool:
    """Whether it is the training loop, with backward passes and updates, whose calls are no items of a step.

    A rollout steps an environment, gradients of single samples are summed up, an optimizer loops over parameters: each
    has one of both at most.
    """
    if loop.loop_line is None:
        return False
    phases: set[str] = set()
    if context.sampled is not None:
        inside = context.sampled.rows.filter(pl.col("row").is_in(stacks_in(context.sampled, loop).implode()))
        phases = {*inside["phase"].drop_nulls()}
    return {BACKWARD, OPTIMIZER} <= phases or len(_trains(loop, context.lines)) > 1


def stacks_in(samples: Samples, loop: LoopFacts) -> pl.Series:
    """`row` of the sampled stacks that stand in an iteration of the loop.

    The line of the `for` pays for the iteration too; without the source the whole function counts.
    """
    last = max(loop.place.line or 0, loop.loop_end or 0) if loop.loop_line is not None else None
    return samples.through(loop.place.file, loop.place.function or "", loop.loop_line, last)


def _find(window: ProfiledCalls) -> list[_Loop]:
    by_function: dict[Function, dict[str, list[_Calls]]] = {}
    for part in window.parts:
        for key, calls in _repeated(part):
            by_function.setdefault(part.function_at(calls.caller), {}).setdefault(key, []).append(calls)
    loops: list[_Loop] = []
    for function in sorted(by_function, key=lambda one: (one.file, one.name, str(one.line))):
        of_key = by_function[function]
        totals = {
            key: sum(_undisturbed_ns(calls.part.duration_ns[calls.positions]) for calls in own)
            for key, own in of_key.items()
        }
        found: list[_Loop] = []
        for key in sorted(totals, key=lambda key: (-totals[key], key)):
            own = of_key[key]
            # calls whose time lies within another's loop belong to that loop
            if any(_inside(own, loop.calls) for loop in found):
                continue
            callee = own[0].part.label(own[0].positions[0])
            count, per_invocation = sum(map(len, own)), int(np.median([len(calls) for calls in own]))
            if callee in _GENERATORS:  # one more resumption ends it; the call worth naming is made inside
                count, per_invocation = count - len(own), per_invocation - 1
                callee = _heaviest_child(own) or callee
            span_ns = 0.0
            for calls in own:
                distances = np.append(np.diff(calls.starts), calls.ends[-1] - calls.starts[-1])
                # of few, parameters for one, each may have another size
                longest = MAX_BREAK * np.median(distances[:-1]) if len(calls) >= MIN_CALLS else np.inf
                span_ns += float(np.minimum(distances, longest).sum())
            found.append(_Loop(function, callee, tuple(own), span_ns, float(count), per_invocation))
        loops += found
    return loops


def _repeated(part: HostCalls) -> Iterator[tuple[str, _Calls]]:
    """Many calls of one thing by one invocation in one step, and a key that tells instances of modules apart."""
    own = part.direct & (part.what != TRANSPARENT) & ~part.in_loader & (part.step >= 0) & part.inside
    own &= ~part.named(lambda name: _ITERATES.search(name) is not None, own)
    positions = np.flatnonzero(own)
    positions = positions[np.argsort(part.start_ns[positions], kind="stable")]
    # modules keep their instance: the layers of a network are not items of a loop
    codes = unique(part.codes[positions]).tolist()
    names = [part.span.names.values[code] if code >= 0 else "?" for code in codes]
    keys = {
        code: name if name.startswith(MODULE_CALL) else callee_name(name)
        for code, name in zip(codes, names, strict=True)
    }
    columns = {
        "position": positions,
        "step": part.step[positions],
        "track": part.tracks[positions],
        "caller": part.caller[positions],
        "key": pl.Series(part.codes[positions]).replace_strict(keys, return_dtype=pl.String),
    }
    # but for a few that are called in turn, each again and again, as experts of single tokens
    kind = pl.col("key").cast(pl.String).str.replace(rf"^({MODULE_CALL}.*)_\d+$", "$1")
    of_kind = ("step", "track", "caller", "kind")
    in_turn = pl.len().over(of_kind) >= IN_TURN * pl.col("key").n_unique().over(of_kind)
    keyed = pl.DataFrame(columns).with_columns(kind=kind)
    keyed = keyed.with_columns(key=pl.when(in_turn).then("kind").otherwise("key"))
    calls = keyed.group_by("step", "track", "caller", "key", maintain_order=True).agg("position")
    modules = np.flatnonzero(part.named(lambda name: name.startswith(MODULE_CALL), part.inside))
    node_ns, module_ns = (np.sort(part.start_ns[rows]) for rows in (_nodes(part), modules))
    for step, _, caller, key, together in calls.filter(pl.col("position").list.len() >= MIN_BEHIND).iter_rows():
        for mine in _runs(part, np.array(together, np.int64)):
            ends = part.start_ns[[mine[0], mine[-1]]]
            nodes, passes = np.searchsorted(node_ns, ends), np.searchsorted(module_ns, ends)
            apart = nodes[0] == nodes[1] > 0 and passes[0] == passes[1]  # neither of both runs meanwhile
            behind = apart and (passes[0] == 0 or module_ns[passes[0] - 1] < node_ns[nodes[0] - 1])
            if len(mine) >= MIN_CALLS or behind:
                yield key, _Calls(part, caller, step, mine)


def _runs(part: HostCalls, positions: Int64) -> list[Int64]:
    """The calls of an inner loop, each time it is run: equally many, with more between two runs than two calls."""
    distances = np.diff(part.start_ns[positions])
    runs = np.split(positions, np.flatnonzero(distances > MAX_BREAK * np.median(distances)) + 1)
    return runs if len({len(run) for run in runs}) == 1 and len(runs[0]) >= MIN_BEHIND else [positions]


def _inside(own: Sequence[_Calls], other: Sequence[_Calls]) -> bool:
    """Whether the calls of `own` fall between the calls of `other`, judged in the invocation with the most of them."""
    most = min(own, key=lambda calls: (-len(calls), calls.step, calls.caller))
    for calls in other:
        if (calls.part, calls.caller, calls.step) == (most.part, most.caller, most.step):
            first, last = int(calls.starts.min()), int(calls.ends.max())
            period = (last - first) / len(calls)
            outside = int(((most.starts < first - period) | (most.starts >= last)).sum())
            # one may have been held up, and a generator is asked for the first item and after the last
            if outside <= max(2, (1 - MOSTLY) * len(most)):
                return True
    return False


def _undisturbed_ns(durations: Int64) -> float:
    """The sum of like calls' durations, of one that was held up only what five of them usually take.

    On a busy machine a call that happens to be held up would else give the loop its name.
    """
    return float(np.minimum(durations, MAX_BREAK * np.median(durations)).sum())


def _heaviest_child(own: Sequence[_Calls]) -> str | None:
    totals: Counter[str] = Counter()
    for part in dict.fromkeys(calls.part for calls in own):
        called = np.zeros(len(part), bool)
        called[np.concatenate([calls.positions for calls in own if calls.part is part])] = True
        children = np.flatnonzero((part.parent >= 0) & called[part.parent])
        for code in dict.fromkeys(part.codes[children].tolist()):
            like = children[part.codes[children] == code]
            totals[part.label(like[0])] += _undisturbed_ns(part.duration_ns[like])  # type: ignore[assignment]
    return min(totals, key=lambda label: (-totals[label], label), default=None)


def _describe(window: ProfiledCalls, lines: Lines, loop: _Loop, mean_ms: float | None) -> LoopFacts:
    operators = _operators_within(loop)
    ms, most_ms = _steady_ms(window, loop, loop.span_ns / window.steps / 1e6)
    back_ms, back_at_most, back_calls, node = _backward(window, operators, loop.per_invocation)
    if mean_ms is not None:
        ms, most_ms = min(ms, mean_ms), min(most_ms, mean_ms)
        back_ms = min(back_ms, mean_ms - ms) if back_ms is not None else None
        back_at_most = min(back_at_most, mean_ms - ms) if back_at_most is not None else None
    made = loop.function
    site = lines.call_site(made.file, made.name, made.line, loop.callee, loop=True)
    outermost_ns = sum(int(part.duration_ns[own[~part.in_operator[own]]].sum()) for part, own in operators)
    shapes = pl.concat([part.span.series("shapes").gather(part.rows[own]) for part, own in operators])
    return LoopFacts(
        callee=loop.callee,
        calls_per_step=loop.total_calls / window.steps,
        ms_per_step=ms,
        at_most_ms_per_step=most_ms,
        operators_per_call=sum(len(own) for _, own in operators) / max(1.0, loop.total_calls),
        place=Place(made.file, site.line if site else made.line, made.name),
        dimension=explain(loop.per_invocation, shapes),
        source=f"{window.source}, {window.steps} window step{'s' * (window.steps != 1)}; "
        f"line: {site.method if site else 'the definition'}",
        loop_line=site.loop_line if site else None,
        loop_end=site.loop_end if site else None,
        carried=site.carried if site else None,
        backward_ms_per_step=back_ms,
        backward_at_most_ms_per_step=back_at_most,
        backward_calls_per_step=back_calls,
        backward_node=node,
        exact_line=site is not None,
        low_confidence=window.low_confidence,
        window_steps=window.steps,
        time_source=f"{window.source}, scaled to the steady step",
        operators_ms_per_step=outermost_ns / 1e6 / window.steps,
        calls_per_invocation=loop.per_invocation,
    )


def _steady_ms(window: ProfiledCalls, loop: _Loop, ms: float) -> tuple[float, float]:
    """Time of the window as time of a steady step, by the part of the step that has room for it, and at most.

    A window slows a part that is all small operators many times, and others little; what else lies in the part may have
    been slowed more than the loop.
    """
    first, behind = loop.calls[0], False  # behind the step's backward pass: an update written by hand, say
    for part in window.parts:
        if part.span.ref.process == first.part.span.ref.process:
            nodes = _nodes(part)
            begins = part.start_ns[nodes[part.step[nodes] == first.step]]
            behind |= bool((begins < first.starts[0]).any())
    for phases in (_BEHIND,) if behind else _AHEAD:
        known = [window.phase_ms[phase] for phase in phases if phase in window.phase_ms]
        recorded, steady = sum(each for each, _ in known), sum(each for _, each in known)
        if 0 < ms <= recorded * FITS:
            return min(ms * steady / recorded, steady), min(ms, steady)
    scaled = ms * window.ratio.get("wall", 1.0)
    return scaled, scaled


def _operators_within(loop: _Loop) -> _Slices:
    """Operators of the loop's threads between its first and last call, one invocation after the other."""
    found = []
    fewest = min(map(len, loop.calls))
    for part in dict.fromkeys(calls.part for calls in loop.calls):
        threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for calls in loop.calls:
            if calls.part is part:
                first, last = int(calls.starts[0]), int(calls.ends[-1])
                # the operands of the first call are made just before it; the backward pass may be as well
                ahead = (last - first) // fewest if fewest >= MIN_CALLS else 0
                thread = calls.step, int(part.tracks[calls.positions[0]])
                threads.setdefault(thread, []).append((first - ahead, last))
        operators = np.flatnonzero((part.what == OPERATOR) & part.inside)
        chosen = np.zeros(len(operators), bool)
        for (step, track), bounds in threads.items():
            times = intervals.union(*np.array(bounds, np.int64).T)
            mine = (part.step[operators] == step) & (part.tracks[operators] == track)
            chosen |= mine & intervals.inside(times, part.start_ns[operators])
        found.append((part, operators[chosen]))
    return found


def _nodes(part: HostCalls) -> Int64:
    """What the autograd engine ran."""
    return np.flatnonzero(part.named(lambda name: name.startswith(_ENGINE), part.inside))


def _backward(
    window: ProfiledCalls, operators: _Slices, calls: int
) -> tuple[float | None, float | None, float | None, str | None]:
    """Of the backward nodes the loop's operators left: ms per steady step, the most it can be, calls per step, and the
    most frequent node. Where fewer numbers than half of an invocation's calls were given out, calls left none.
    """
    names: Counter[str] = Counter()
    every_count = ns = every_ns = 0
    for part in window.parts:
        nodes = _nodes(part)
        every_ns += int(part.duration_ns[nodes].sum())
        every_count += len(nodes)
        # they carry a sequence number between those of the operators of their step, and ran after the first of these
        left = np.zeros(len(nodes), bool)
        for other, own in operators:
            own = own[other.sequence[own] >= 0]
            same = other.span.ref.process == part.span.ref.process
            for step in unique(other.step[own]).tolist() if same else ():
                mine = own[other.step[own] == step]
                numbers = unique(other.sequence[mine])
                if len(numbers) < calls / 2:
                    continue
                low, high = numbers[0], numbers[-1]
                numbered = (part.sequence[nodes] >= low) & (part.sequence[nodes] <= high)
                later = part.start_ns[nodes] > other.start_ns[mine].min()
                left |= (part.step[nodes] == step) & numbered & later
        ns += int(part.duration_ns[nodes[left]].sum())
        names.update(part.span.names.values[code] for code in part.codes[nodes[left]].tolist())
    if not names:
        return None, None, None, None
    name = min(names, key=lambda name: (-names[name], name))
    recorded_ms, all_ms = ns / window.steps / 1e6, every_ns / window.steps / 1e6
    means, ratio = window.phase_ms.get("backward"), window.ratio.get("backward", window.ratio.get("wall", 1.0))
    least, most = recorded_ms * ratio, recorded_ms * ratio
    between_ms = 0.0
    if means is not None:
        least, _ = in_steady_backward(recorded_ms, all_ms, means)
        # between two nodes the engine adds up gradients and picks the next: work for each node
        between_ms = max(0.0, means[0] - all_ms) * names.total() / max(1, every_count) * ratio
    return (min(least, most) + most) / 2, most + between_ms, names[name] / window.steps, name.removeprefix(_ENGINE)


def in_steady_backward(recorded: float, nodes: float, means: tuple[float, float]) -> tuple[float, float]:
    """What a part of the backward pass takes of a steady one, at least and at most, by its time in a profiled one.

    Recording slows many small nodes far more than few large ones, and can fragment the heap under all of them: scaling
    in proportion gives what is slowed most too much (the most), taking the others' recorded time as it is gives it too
    little (the least). The middle is told, and the proportion bounds the gain.

    Args:
        nodes: what all nodes took as recorded.
        means: the profiled and the steady backward pass.
    """
    profiled, steady = means
    ratio = steady / profiled
    others = max(0.0, nodes - recorded) * max(1.0, ratio)
    return max(0.0, steady - others - max(0.0, profiled - nodes) * ratio), recorded * ratio


def _runs_in(inner: _Loop, outer: _Loop) -> bool:
    """Whether an invocation of `inner` lies below a call that `outer` makes once per item."""
    first = inner.calls[0]
    same = [calls for calls in outer.calls if (calls.part, calls.step) == (first.part, first.step)]
    if not same or first.caller in {calls.caller for calls in same}:
        return False
    part = first.part
    called = np.zeros(len(part), bool)
    called[np.concatenate([calls.positions for calls in same])] = True
    met = climb(part.parent, np.array([first.caller]), called | (part.what == OPERATOR))[0]
    return bool(met >= 0 and called[met])


MAX_SHAPES = 5_000  # distinct texts looked at; a step rarely has hundreds
MAX_RANK = 16


def explain(count: int, shapes: pl.Series) -> str | None:
    """The simplest recorded shape that has `count` (or `count + 1`, a loop that leaves one out) as a dimension.

    `shapes` holds JSON texts of "Input Dims": a list with one list of integers per tensor argument. Of several shapes
    the one with the fewest dimensions (but more than one) wins, then the most frequent: a slice `x[:, t]` is cut from
    the shape that the loop walks along. Where none has it, two neighbouring dimensions may: `x[b, t]` in two loops.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for text, times in shapes.drop_nulls().value_counts(sort=True).head(MAX_SHAPES).rows():
        for shape in _shapes(text):
            seen[shape] += int(times)
    simplest = sorted(seen, key=lambda shape: (len(shape) < 2, len(shape), -seen[shape], shape))
    for wanted, suffix in ((count, ""), (count + 1, " without one")):
        for shape in simplest:
            if wanted in shape:
                return f"{count} = dim {shape.index(wanted)} of {shape}{suffix}"
    for shape in simplest:  # two neighbours that make `count` together: a loop in a loop; dimensions of 1 are no loop
        for first, (one, other) in enumerate(itertools.pairwise(shape)):
            if one > 1 < other and one * other == count:
                return f"{count} = dims {first} * {first + 1} of {shape}"
    return None


def _shapes(text: str) -> list[tuple[int, ...]]:
    value = parse_json(text)
    items = [item for item in value if isinstance(item, list)] if isinstance(value, list) else []
    found: list[tuple[int, ...]] = []
    for item in items:
        if all(isinstance(size, int) for size in item):
            found.append(tuple(item))
        elif len(item) <= MAX_RANK:  # a list of tensors, as in cat or stack
            found += [tuple(s) for s in item if isinstance(s, list) and all(isinstance(n, int) for n in s)]
    return [shape for shape in found if 0 < len(shape) <= MAX_RANK]
