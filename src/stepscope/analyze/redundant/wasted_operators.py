"""Operators that another form of the same computation would not run, told by the shapes of their inputs.

- `broadcast`: a pointwise operator makes a tensor many times as large as what it was given, only to be reduced again.
- `one_hot`: a product with one-hot rows picks rows of the other matrix.
- `dense_gradient`: the gradient of an embedding is a whole table, of which a batch touches few rows; so is its update.
- `decomposition`: of matrices, whose many dependent steps no batch hides.
- `history`: a backward pass goes through nodes that it went through in an earlier step, as far as a graph is kept.
- `grown`: `torch.cat` makes a tensor that the next one takes again, a part longer: all of it is copied for each part.
- `unused_gradient`: of parameters that no update has; behind the last one that is updated all of the backward pass.

What works on the large tensor, backward pass and update included, goes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.redundant.extra_calls import BACKWARD_CALL, ENOUGH_SAMPLES
from stepscope.analyze.redundant.training_steps import TrainingScene, lines, outermost, summed, weights_of
from stepscope.engine.journal import json_list, sizes
from stepscope.engine.spans import texts
from stepscope.model.device_losses import GROWN, WastedWork
from stepscope.tables.arrays import Bools, Int64, climb, flags, self_or_ancestor, unique

MIN_ELEMENTS = 1 << 18  # of the large tensor: a MB in float32, as much as a core's own cache holds
MIN_RATIO = 16  # of it by the largest input: what broadcasts a bias or a mask makes nothing larger
UNTOUCHED = 4  # rows of the table by those of a batch
MAX_FACTS = 5
_POINTWISE = re.compile(r"^aten::(sub|add|mul|div|minimum|maximum|eq|ne|lt|le|gt|ge)_?$")
_REDUCES = re.compile(r"^aten::(sum|mean|amax|amin|max|min|any|all|norm|linalg_vector_norm|logsumexp|prod)$")
_PRODUCTS = ("aten::mm", "aten::matmul", "aten::addmm", "aten::linear", "aten::bmm")
_FILLS = ("aten::zero_", "aten::fill_")
_DENSE = "aten::embedding_dense_backward"
_LOOKS_UP = ("aten::embedding", "aten::index_select")
_DECOMPOSES = re.compile(
    r"^aten::(linalg_(svd|svdvals|qr|eig|eigh|eigvals|eigvalsh|inv|inv_ex|pinv|lstsq|matrix_exp)|svd|qr|inverse|pinverse)$"
    r"|^autograd::engine::evaluate_function: Linalg(Svd|Qr|Eig|Eigh|InvEx|Lstsq|MatrixExp)Backward\d*$"
)
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"^Optimizer\.step#")
_IN_PLACE = re.compile(r"^aten::(?!(_foreach_)?(zero|fill|mul|div)_$|_amp)\w+_$")  # no clearing, clipping, unscaling
_RENEWS = ("aten::sub", "aten::add")
TRAINED = 0.9  # of the gradients up to the last that is used: else an optimizer works in a way that shapes do not show
_SHARED = ("c10d::", "nccl:", "gloo:")  # of ranks, whose optimizers may hold parts of parameters
_Shape = tuple[int, ...]
_Key = tuple[str, str, _Shape]  # kind, operator, the large tensor


MIN_GROWN = 2  # of results that the next step took: two in a row grow
MIN_GROWN_WITHIN = 8  # the same within a step, where fewer may be the layers of a network
_WITH_WEIGHTS = re.compile(r"^aten::(_?convolution\w*|conv\dd|\w*(batch|group)_norm\w*)$")  # fixed sizes: such layers


def wasted(scenes: Sequence[TrainingScene], time: SampledTime | None) -> tuple[WastedWork, ...]:
    """Costliest first. `time`: sampled, of the steady steps of the scenes' run."""
    groups: dict[_Key, list[tuple[TrainingScene, Int64, Int64]]] = {}
    for scene in scenes:
        for key, rows, makers in _of_scene(scene) if scene.has("shapes") else ():
            groups.setdefault(key, []).append((scene, rows, makers))
    steps, found = sum(len(scene) for scene in scenes), []
    for (kind, operator, shape), parts in groups.items():
        ms = summed(scenes, [(scene, scene.lost(scene.times(rows), rows)) for scene, rows, _ in parts])
        weighed = [(scene, makers, weights_of(scene, makers)) for scene, _, makers in parts]
        calls, of_lines = sum(len(makers) for *_, makers in parts) / steps, lines(weighed, ms)
        if kind == GROWN and time is not None and of_lines and of_lines[0].exact:
            # the profiled steps are early ones: later there is more to copy
            place = of_lines[0].place
            at_line = (pl.col("user_file") == place.file) & (pl.col("user_line") == place.line)
            share = time.share(time.rows.filter(at_line & (pl.col("user_position") == pl.col("leaf_position"))))
            if share.samples >= ENOUGH_SAMPLES and share.ms > ms:
                ms, of_lines = share.ms, lines(weighed, share.ms)
        found.append(WastedWork(kind, operator, shape, calls, ms, of_lines))
    return tuple(sorted(found, key=lambda one: (-one.ms_per_step, one.kind, one.shape))[:MAX_FACTS])


class _Form(Struct, frozen=True):
    """What all operators have in common that are asked about here."""

    name: str
    dims: tuple[_Shape, ...]  # of the inputs
    first: tuple[_Shape, ...]  # of the first input, or of all tensors of a list there


class _Operators(Struct, frozen=True):
    """The operators of a scene's steps: that of row `rows[n]` is `forms[codes[n]]`. Few forms are of many rows."""

    scene: TrainingScene
    rows: Int64
    codes: Int64
    forms: list[_Form]

    def where(self, chosen: Iterable[bool]) -> Int64:
        """Rows of the chosen forms."""
        found: Int64 = self.rows[np.array([*chosen], bool)[self.codes]]
        return found

    def with_shape(self, *shapes: _Shape) -> Bools:
        """Whether one of the inputs has one of these shapes, by row of the scene."""
        return flags(len(self.scene.span), self.where(any(one in shapes for one in form.dims) for form in self.forms))

    def of(self, rows: Int64) -> list[_Form]:
        return [self.forms[code] for code in self.codes[np.searchsorted(self.rows, rows)].tolist()]

    def forward(self) -> list[_Form]:
        """What runs outside backward passes."""
        return [self.forms[code] for code in unique(self.codes[self.scene.in_backward[self.rows] < 0]).tolist()]

    def filled_below(self, rows: Int64) -> dict[int, _Shape]:
        """Of each of these rows the tensor that is filled below it."""
        if not len(rows):
            return {}
        holder = self_or_ancestor(self.scene.span.parent, flags(len(self.scene.span), rows))
        fills = np.array([form.name in _FILLS and bool(form.dims) for form in self.forms], bool)[self.codes]
        fills &= holder[self.rows] >= 0
        codes = self.codes[fills].tolist()
        return {
            row: self.forms[code].dims[0] for row, code in zip(holder[self.rows[fills]].tolist(), codes, strict=True)
        }


def _operators(scene: TrainingScene) -> _Operators:
    rows, names = np.flatnonzero(scene.operators), scene.span.names
    shapes = texts(scene.span.series("shapes").gather(rows))
    width = len(names.values)
    found, codes = np.unique(shapes.codes.astype(np.int64) * width + names.codes[rows], return_inverse=True)
    inputs = [*map(json_list, shapes.values), []]  # the last where there are none
    dims = [_shapes(one) for one in inputs]
    first = [(_shapes(one[0]) if isinstance(one[0], list) else ()) or _shapes(one[:1]) if one else () for one in inputs]
    pairs = (divmod(pair, width) for pair in found.tolist())
    return _Operators(scene, rows, codes, [_Form(names.values[name], dims[text], first[text]) for text, name in pairs])


def _shapes(values: list[object]) -> tuple[_Shape, ...]:
    return tuple(known for one in values if (known := sizes(one)) is not None)


def _of_scene(scene: TrainingScene) -> Iterator[tuple[_Key, Int64, Int64]]:
    """By kind, operator and shape: all rows of the work, and those whose line made it."""
    every = _operators(scene)
    yield from _broadcasts(every)
    yield from _one_hots(every)
    yield from _dense_gradients(every)
    makers = _grown(every)
    if len(makers):
        back = np.flatnonzero(scene.calls.is_backward & scene.mine & np.isin(scene.calls.forward, makers))
        yield (GROWN, "aten::cat", ()), np.sort(np.concatenate([makers, back])), makers
    yield from _unused_gradients(every)
    yield from _histories(scene)
    if len(scene.found):
        return  # on a device decompositions are a loss of launches
    decompositions = every.where(_DECOMPOSES.match(form.name) is not None for form in every.forms)
    rows = outermost(scene, flags(len(scene.span), decompositions))
    if len(rows):
        forward = rows[scene.span.names.starting("aten::")[rows]]
        if len(forward):
            yield ("decomposition", scene.span.names.values[scene.span.names.codes[forward[0]]], ()), rows, forward


MAPPED_ELEMENTS = 1 << 15  # 128 KiB in float32: glibc asks the system for memory of its own from there on, at first
_MAKES_NONE = re.compile(
    r"_$|^aten::(empty\w*|\w*view\w*|as_strided|t|reshape|(un)?squeeze|expand|transpose|permute|slice|select|detach"
    r"|alias|narrow|resolve_conj|resolve_neg|to|split\w*|chunk|unbind|unfold|diagonal|item|_local_scalar_dense"
    r"|zeros|ones|full)$"
)


def made_by(scenes: Sequence[TrainingScene]) -> tuple[float, float] | None:
    """Of the large tensors that operators of the host make, the parts by size that optimizers make, and those that
    grow, as far as shapes tell; None where none is made.
    """
    whole = updating = growing = 0
    for scene in scenes:
        if len(scene.found) or not scene.has("shapes"):
            continue
        every = _operators(scene)
        elements = np.array([_made(form) for form in every.forms] or [0], np.int64)[every.codes]
        large = flags(len(scene.span), every.rows[elements >= MAPPED_ELEMENTS])
        around = climb(scene.span.parent, scene.span.parent[large], large)  # operators that call others for it
        chosen = large[every.rows] & ~np.isin(every.rows, around)
        whole += int(elements[chosen].sum())
        updating += int(elements[chosen & _in_optimizer(scene)[every.rows]].sum())
        growing += int(elements[chosen & np.isin(every.rows, _grown(every))].sum())
    return (updating / whole, growing / whole) if whole else None


def _in_optimizer(scene: TrainingScene) -> Bools:
    found: Bools = self_or_ancestor(scene.span.parent, scene.span.names.matching(_OPTIMIZER.search)) >= 0
    return found


def _made(form: _Form) -> int:
    """Elements of its result, about."""
    if _MAKES_NONE.search(form.name) or not form.name.startswith("aten::"):
        return 0
    if form.name in _PRODUCTS and len(form.dims) >= 2:
        left, right = form.dims[-2:]
        return prod(left[:-1]) * right[-1] if left and right else 0
    return max(sum(map(prod, form.first)), *map(prod, form.dims), 0)


def _broadcasts(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    forward, made = every.forward(), dict[tuple[str, _Shape], list[_Form]]()
    reduced = {form.dims[0] for form in forward if form.dims and _REDUCES.match(form.name)}
    for form in forward:
        if len(form.dims) < 2 or not form.dims[0] or not form.dims[1] or not _POINTWISE.match(form.name):
            continue
        whole = _broadcast(form.dims[0], form.dims[1])
        largest = max(prod(form.dims[0]), prod(form.dims[1]))
        if whole in reduced and prod(whole) >= max(MIN_ELEMENTS, MIN_RATIO * largest):
            made.setdefault((form.name, whole), []).append(form)
    for (name, whole), forms in made.items():
        makers = every.where(form in forms for form in every.forms)
        makers = makers[(every.scene.in_backward[makers] < 0) & ~_in_optimizer(every.scene)[makers]]
        if len(makers):  # an optimizer makes what is as large as a parameter, and needs it
            rows = outermost(every.scene, every.with_shape(whole) | flags(len(every.scene.span), makers))
            yield ("broadcast", name, whole), rows, makers


def _broadcast(one: _Shape, other: _Shape) -> _Shape:
    """The shape of both together; () where they do not fit."""
    try:
        return tuple(int(size) for size in np.broadcast_shapes(one, other))
    except ValueError:
        return ()


def _one_hots(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    made = every.where(form.name == "aten::one_hot" for form in every.forms)
    for shape in sorted(set(every.filled_below(made).values())):
        if len(shape) < 2 or prod(shape) < MIN_ELEMENTS:
            continue
        flat = (prod(shape[:-1]), shape[-1])
        wide = (shape,), (flat,)
        makers = every.where(form.name in _PRODUCTS and form.dims[:1] in wide for form in every.forms)
        makers = makers[every.scene.in_backward[makers] < 0]
        if len(makers):
            work = every.with_shape(shape, flat, flat[::-1])
            makers = outermost(every.scene, flags(len(work), makers))
            yield ("one_hot", "aten::one_hot", shape), outermost(every.scene, work | flags(len(work), made)), makers


def _grown(every: _Operators) -> Int64:
    """Calls of `torch.cat` of which each takes what another made, or is taken by the next.

    Within a step the tensor grows along another dimension than its last, and no layer with weights of its size reads
    it: else the parts may be the layers of a network.
    """
    scene = every.scene
    rows = every.where(form.name == "aten::cat" and len(form.first) > 1 for form in every.forms)
    rows = rows[scene.in_backward[rows] < 0]
    rows = rows[np.argsort(scene.span.start_ns[rows], kind="stable")]
    read = {shape for form in every.forms if _WITH_WEIGHTS.match(form.name) for shape in form.dims[:1]}
    step, made = scene.step_around(rows).tolist(), dict[_Shape, int]()  # by shape the last call that made it
    links: dict[bool, list[int]] = {True: [], False: []}  # by whether both are of one step
    for at, form in enumerate(every.of(rows)):
        whole, along = _joined(form.first)
        taken = made.get(max(form.first, key=prod))
        within = taken is not None and step[taken] == step[at]
        again = whole in made and (not within or step[made[whole]] == step[at])  # it does not grow any more
        if taken is not None and not again and not (within and (along == len(whole) - 1 or whole in read)):
            links[within] += taken, at
        if whole:
            made[whole] = at
    least = {True: MIN_GROWN_WITHIN * len(scene), False: MIN_GROWN}
    ends = [at for within, own in links.items() if len(own) >= 2 * least[within] for at in own]
    found: Int64 = np.sort(rows[unique(np.array(ends, np.int64))])
    return found


def _joined(shapes: tuple[_Shape, ...]) -> tuple[_Shape, int]:
    """The shape of these one behind the other, and along which dimension; () where they do not fit, or are equal."""
    apart = {at for one in shapes for at, pair in enumerate(zip(one, shapes[0], strict=False)) if pair[0] != pair[1]}
    if len(apart) != 1 or len({*map(len, shapes)}) != 1:
        return (), -1
    along = apart.pop()
    return (*shapes[0][:along], sum(one[along] for one in shapes), *shapes[0][along + 1 :]), along


def _dense_gradients(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    dense = every.where(form.name == _DENSE and len(form.dims) >= 2 for form in every.forms)
    picked = dict(zip(dense.tolist(), (prod(form.dims[1]) for form in every.of(dense)), strict=True))
    tables: dict[_Shape, int] = {}
    for row, shape in every.filled_below(dense).items():
        tables[shape] = max(tables.get(shape, 0), picked[row])
    for shape, rows_of_batch in tables.items():
        # a table that is an output layer as well has a dense gradient anyway
        tied = any(form.name in _PRODUCTS and (shape in form.dims or shape[::-1] in form.dims) for form in every.forms)
        if tied or prod(shape) < MIN_ELEMENTS or shape[0] < UNTOUCHED * rows_of_batch:
            continue
        makers = every.where(form.name == _LOOKS_UP[0] and shape in form.dims for form in every.forms)
        work = every.with_shape(shape) & ~every.scene.span.names.where(_LOOKS_UP)
        yield ("dense_gradient", _DENSE, shape), outermost(every.scene, work | flags(len(work), dense)), makers


def _unused_gradients(every: _Operators) -> Iterator[tuple[_Key, Int64, Int64]]:
    """By shapes: as many parameters of one are updated as an optimizer has, or any that is changed in place; the first
    gradients of a pass are theirs. Between these a gradient is unused if no optimizer touches a tensor of its size.
    """
    scene, span = every.scene, every.scene.span
    if span.names.starting(*_SHARED).any():
        return
    left, rows = _updated(every), np.flatnonzero(scene.operators & span.names.where([_ACCUMULATES]))
    rows = rows[np.argsort(span.start_ns[rows], kind="stable")]
    forward = np.sort(span.start_ns[np.flatnonzero(scene.operators & (scene.in_backward < 0))])
    passes = np.searchsorted(forward, span.start_ns[rows])  # a pass has no other operators between its nodes
    forms = [every.forms[code] for code in unique(every.codes[_in_optimizer(scene)[every.rows]]).tolist()]
    touched = {prod(shape) for form in forms for shape in (*form.dims, *form.first)}
    weights = {form.dims[1] for form in every.forward() if form.name == "aten::linear" and len(form.dims) > 1}
    begins, ends, between = [], [], list[int]()
    for number in unique(passes).tolist():
        own, open_left = rows[passes == number], dict(left)
        used, foreign, shapes = [], [], [form.dims[0] if form.dims else () for form in every.of(own)]
        for shape in shapes:
            used.append(open_left.get(shape, 0) > 0)
            layer = len(shape) == 1 or shape in weights  # else perhaps of an input that gets one as well
            foreign.append(layer and shape not in left and prod(shape) not in touched)
            open_left[shape] = open_left.get(shape, 0) - 1
        behind = len(own) - next((at for at, is_used in enumerate(reversed(used)) if is_used), len(own))
        if behind and sum(used) + sum(foreign[:behind]) >= TRAINED * behind:
            begins.append(int(span.ends(own[[behind - 1]])[0]))
            ends.append(int(span.ends(own[[-1]])[0]))
            between += [own[at] for at in range(behind) if foreign[at] and shapes[at] in weights]
    nodes = np.flatnonzero(scene.calls.is_backward & scene.mine)
    at = np.searchsorted(begins, span.start_ns[nodes], side="right") - 1
    nodes = nodes[(at >= 0) & (span.start_ns[nodes] < np.array([*ends, 0])[at])]
    if between:
        nodes = np.union1d(nodes, _with_products(every, between))
    made = self_or_ancestor(span.parent, scene.calls.forward >= 0)[nodes]
    if len(nodes):
        yield ("unused_gradient", _ACCUMULATES, ()), nodes, unique(scene.calls.forward[made[made >= 0]])


def _with_products(every: _Operators, gradients: list[int]) -> Int64:
    """These gradients of matrices, each with the product that made it: the last one before it of its shape."""
    starts, products = every.scene.span.start_ns, every.where(form.name == "aten::mm" for form in every.forms)
    made, found = dict[tuple[int, ...], int](), set(gradients)
    rows = np.union1d(products, np.array(gradients, np.int64))
    for row in rows[np.argsort(starts[rows], kind="stable")].tolist():
        dims = every.of(np.array([row]))[0].dims
        if row not in found and len(dims) > 1 and all(dims[:2]):
            made[tuple(sorted((dims[0][0], dims[1][-1])))] = row
        elif row in found and dims and (product := made.pop(tuple(sorted(dims[0])), None)) is not None:
            gradients.append(product)
    return np.array(gradients, np.int64)


def _histories(scene: TrainingScene) -> Iterator[tuple[_Key, Int64, Int64]]:
    """Nodes whose number, which its thread gives once, runs in several steps: it was recorded in an earlier one."""
    span = scene.span
    nodes = np.flatnonzero(scene.calls.is_backward & scene.mine & (span.column("sequence") >= 0))
    nodes = nodes[span.names.starting(_ENGINE)[nodes]]
    numbers = {name: span.column(name, nodes) for name in ("sequence", "forward_thread")}
    frame = pl.DataFrame({"node": nodes, "step": scene.step_around(nodes), **numbers})
    again = frame.filter((pl.col("step") > pl.col("step").min()).over(*numbers))
    rows = np.sort(again["node"].to_numpy())
    calls = np.flatnonzero(span.names.matching(BACKWARD_CALL.search) & span.is_function & scene.mine)
    if len(rows) and len(calls):
        yield ("history", "backward", ()), rows, outermost(scene, flags(len(span), calls))


def _updated(every: _Operators) -> dict[_Shape, int]:
    """How many parameters of each shape an update changes, at most; nothing is known without an optimizer of torch."""
    scene, inside = every.scene, _in_optimizer(every.scene)[every.rows]
    found: dict[_Shape, int] = {}
    if not inside.any():
        return found
    counts: dict[tuple[_Shape, str], int] = {}
    for code, count in zip(*np.unique(every.codes[inside], return_counts=True), strict=True):
        form = every.forms[code]
        for shape in form.first:
            counts[shape, form.name] = counts.get((shape, form.name), 0) + int(count)
    for (shape, _), count in counts.items():
        per_step = max(1, round(count / len(scene)))
        found[shape] = min(per_step, found.get(shape, per_step))
    parent = scene.span.parent[every.rows]  # what copies a tensor works in place as well, on one of its own
    called = (parent < 0) | ~scene.operators[parent]
    for code in unique(every.codes[called & ~inside & (scene.in_backward[every.rows] < 0)]).tolist():
        form = every.forms[code]
        renews = form.name in _RENEWS and form.dims[:1] == form.dims[1:2]  # perhaps `weight - rate * gradient`
        if renews or _IN_PLACE.match(form.name):
            found |= dict.fromkeys(form.first, len(every.rows))
    return found
