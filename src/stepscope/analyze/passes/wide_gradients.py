"""Backward nodes that each make a whole tensor of zeros for the gradient of a small part of it.

The gradient of `x[:, t]` is a tensor of the size of `x`, zero but for one slice. A loop over `t` makes one per call,
and the engine adds all of them up: bytes and time grow with the square of the length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.dimensions import explain
from stepscope.analyze.passes.training import TrainingScene, summed_backward
from stepscope.engine.attribution import PlaceSums
from stepscope.engine.samples import bare
from stepscope.engine.tree import nearest
from stepscope.model import Place
from stepscope.model.device_losses import WideGradients
from stepscope.tables.arrays import NONE, Int64

MIN_CALLS = 8  # per step of one kind: fewer add up to no more than a few passes over the tensor
MIN_RATIO = 4  # elements filled by elements of the gradient that came in
MAX_FACTS = 10
_ENGINE = "autograd::engine::evaluate_function: "
_NODE = re.compile(  # of operators that take a part of a tensor
    r"^autograd::engine::evaluate_function: (Select|Slice|Index|IndexSelect|Gather|Take|TakeAlongDim|MaskedSelect|"
    r"Diagonal|AsStrided|Embedding|Unbind|Split\w*|UnsafeSplit\w*|UnsafeChunk|Narrow)Backward\d*$"
)
_FILLS = ("aten::zero_", "aten::fill_")
_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
_Key = tuple[str, str | None, tuple[int, ...], tuple[int, ...], str]


class _Nodes(Struct, frozen=True):
    """Nodes of one kind and shape in one trace: their rows, and those of their forward operators (-1 for none)."""

    scene: TrainingScene
    rows: Int64
    forward: Int64


def facts(scenes: Sequence[TrainingScene]) -> tuple[WideGradients, ...]:
    """Costliest first; those with fewer than `MIN_CALLS` per step are left out."""
    steps = sum(len(scene) for scene in scenes)
    groups: dict[_Key, list[_Nodes]] = {}
    for scene in scenes:
        if scene.has("shapes"):
            for key, nodes in _of_scene(scene):
                groups.setdefault(key, []).append(nodes)
    found = []
    for key, parts in groups.items():
        calls = sum(len(one.rows) for one in parts) / steps
        if calls >= MIN_CALLS:
            found.append(_fact(scenes, key, parts, calls))
    found.sort(key=lambda one: (-one.ms_per_step, one.node, one.shape))
    return tuple(found[:MAX_FACTS])


def _fact(scenes: Sequence[TrainingScene], key: _Key, parts: Sequence[_Nodes], calls: float) -> WideGradients:
    node, forward, shape, part, dtype = key
    lost = [(one.scene, one.scene.lost(one.scene.times(one.rows), one.rows)) for one in parts]
    without_one = 1 - 1 / calls  # one such tensor is needed
    ms, most = summed_backward(lost)
    places = PlaceSums(scenes[0].base, 1)
    texts: list[pl.Series] = []
    for one in parts:
        known = one.forward[one.forward >= 0]
        places.add(one.scene.span, np.zeros(len(known), np.int64), known, np.ones(len(known), np.int64))
        texts.append(one.scene.span.series("shapes").gather(known))
    (where,) = places.dominant()
    if where is not None and not where[1]:
        where = _in_loop(scenes[0], where[0], forward)
    return WideGradients(
        node=node,
        forward=forward,
        place=where[0] if where is not None else None,
        exact=where is not None and where[1],
        calls_per_step=calls,
        bytes_per_call=prod(shape) * _BYTES.get(dtype, 0),
        shape=shape,
        part=part,
        dtype=dtype,
        dimension=explain(round(calls), pl.concat(texts)),
        ms_per_step=ms * without_one,
        at_most_ms_per_step=most * without_one,
    )


def _in_loop(scene: TrainingScene, where: Place, forward: str | None) -> tuple[Place, bool]:
    """The line of the loop that takes the parts, where the source has one: so many calls are made by no other."""
    function = bare(where.function)
    site = scene.base.lines.call_site(where.file, function, where.line, forward or "", loop=True)
    return (where, False) if site is None else (Place(where.file, site.line, where.function), True)


def _of_scene(scene: TrainingScene) -> list[tuple[_Key, _Nodes]]:
    span, names = scene.span, scene.span.names
    node = names.pick([_NODE.match(name) is not None for name in names.values]) & scene.mine
    holder = nearest(span.parent, node)
    fills = np.flatnonzero(names.where(_FILLS) & scene.operators)
    fills = fills[holder[fills] >= 0]
    if not len(fills):
        return []
    table = pl.DataFrame(
        {
            "node": holder[fills].astype(np.int64),
            "shapes": span.series("shapes").gather(fills),
            "types": span.series("types").gather(fills),
        }
    )
    table = table.unique("node", keep="first", maintain_order=True)  # a fill below a fill, or a second output
    incoming = _incoming(scene, table["node"].to_numpy())
    forward = scene.calls.forward[table["node"].to_numpy()]
    groups: dict[_Key, list[int]] = {}
    for number, (row, shapes, types) in enumerate(table.iter_rows()):
        shape, dtype = _first(shapes), _first_type(types)
        part = incoming[number]
        if shape is None or part is None or dtype not in _BYTES or prod(shape) < MIN_RATIO * max(1, prod(part)):
            continue
        made = names.values[names.codes[forward[number]]] if forward[number] >= 0 else None
        name = names.values[names.codes[row]].removeprefix(_ENGINE)
        groups.setdefault((name, made, shape, part, dtype), []).append(number)
    rows = table["node"].to_numpy()
    return [(key, _Nodes(scene, rows[numbers], forward[numbers])) for key, numbers in groups.items()]


def _incoming(scene: TrainingScene, nodes: Int64) -> list[tuple[int, ...] | None]:
    """The shape of the first gradient that came into each node: that of the operator of its name right below it."""
    span, names = scene.span, scene.span.names
    wanted = {_ENGINE + name: number for number, name in enumerate(names.values)}
    same = np.array([wanted.get(name, NONE) for name in names.values] + [NONE], np.int64)
    parent = span.parent
    children = np.flatnonzero(np.isin(parent, nodes))
    own = children[same[names.codes[parent[children]]] == names.codes[children]]
    shapes = dict(zip(parent[own].tolist(), span.series("shapes").gather(own).to_list(), strict=True))
    return [_first(shapes.get(node)) for node in nodes.tolist()]


def _first(text: str | None) -> tuple[int, ...] | None:
    """The first shape of a JSON list of shapes; () for a number, None where it cannot be told."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, list) or not all(isinstance(size, int) and size >= 0 for size in first):
        return None
    return tuple(first)


def _first_type(text: str | None) -> str:
    try:
        value = json.loads(text or "")
    except ValueError:
        return ""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else ""
