"""Differences of flame graphs: two runs, or one rank against the mean of the others.

Boxes match by the path of (function, file from the root of the code on), so that runs in different folders match. Both
sides are per step where both know their steps; else the other side is scaled to the same total, which shows how the
share of a path changed and nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.stack_selection import idle_sampled
from stepscope.analyze.pictures.flame_tree import ROOT, FrameIndex, Names, Paths, flame_tree, summed
from stepscope.analyze.pictures.sampled_flame import Boxes, FlameOptions, PlannedTree, Side, notes_of, title, together
from stepscope.errors import UsageError
from stepscope.model.sampled import FlameGraph, FlameTree

SCALED = "scaled to the same total"


class _Pair(Struct, frozen=True):
    this: PlannedTree
    other: Boxes
    scale: float  # of the other side's values
    source: str


def flame_diff(this: Context, other: Context, options: FlameOptions | None = None) -> FlameGraph:
    """This run with `other` as what it is compared with; one tree for each that both have.

    Raises `UsageError` for files that count different things or of which only one sampled idle threads.
    """
    options = options or FlameOptions()
    names = Names(FrameIndex(), options.by)
    sides = [Side(context, options, names) for context in (this, other)]
    if sides[0].rows.per_step != sides[1].rows.per_step:
        plain = replace(options, per_step=False)
        sides = [Side(context, plain, names) for context in (this, other)]
    warnings = _comparable(sides[0], sides[1])
    trees = [_tree(pair, names, options) for pair in _run_pairs(sides[0], sides[1])]
    labels = _labels(this, other)
    told = (f"{label}: {note}" for label, side in zip(labels, sides, strict=True) for note in side.notes())
    notes = (*warnings, *told)
    return FlameGraph(
        title=f"{labels[0]} compared with {labels[1]}",
        frames=names.frames.frames,
        trees=tuple(trees),
        notes=tuple(dict.fromkeys(notes)),
        sides=labels,
        source=sides[0].source(names.frames.frames) if options.source else {},
    )


def flame_rank_diff(context: Context, rank: int, options: FlameOptions | None = None) -> FlameGraph:
    """One rank's main thread with the mean of all other ranks' as what it is compared with.

    `options.selection` says which phase; its rank is not looked at. Raises `UsageError` where there is no other rank.
    """
    options = options or FlameOptions()
    selection = replace(options.selection, rank=None, process="all")
    names = Names(FrameIndex(), options.by)
    side = Side(context, replace(options, selection=selection), names)
    ranks = side.rows.ranks
    others = tuple(each for each in ranks if each != rank)
    if rank not in ranks or not others:
        known = f"ranks with samples: {', '.join(map(str, ranks))}" if len(ranks) > 1 else "one rank was sampled"
        raise UsageError(f"--rank {rank} --diff others: needs samples of this rank and of another; {known}")
    trees = [_tree(pair, names, options) for pair in _rank_pairs(side, rank, others)]
    labels = (f"rank {rank}", f"rank {others[0]}" if len(others) == 1 else f"mean of {len(others)} other ranks")
    return FlameGraph(
        title=f"{title(context)}: {labels[0]} compared with {labels[1]}",
        frames=names.frames.frames,
        trees=tuple(trees),
        notes=notes_of(side, trees),
        sides=labels,
        source=side.source(names.frames.frames) if options.source else {},
    )


def _rank_pairs(side: Side, rank: int, others: tuple[int, ...]) -> Iterator[_Pair]:
    """The training loop of the rank beside that of the others, where it is known apart, and the whole main thread."""
    per_step = side.rows.per_step
    for loop in (True, False) if side.loop_apart else (False,):
        mine, rest = side.of_rank(rank, loop=loop), side.of_rank(*others, loop=loop)
        if not len(mine.own) or not len(rest.own):
            continue
        key, label = (f"rank:{rank}:loop", "training loop") if loop else (f"rank:{rank}", "main thread")
        planned = side.plan(key, f"rank {rank}, {label}", mine, rank=rank)
        scale = 1.0 if per_step else _same_total(mine, rest)
        yield _Pair(planned, rest, scale, planned.source if per_step else f"the others' mean {SCALED}")


def _run_pairs(this: Side, other: Side) -> Iterator[_Pair]:
    """The trees that both runs have."""
    per_step = this.rows.per_step
    others = {planned.key: planned for planned in other.planned()}
    mine = list(this.planned())
    # one scale for all trees, but for loops: a phase that takes a larger part of the whole must show as grown
    scale = 1.0 if per_step else _same_total(mine[0].boxes, others[mine[0].key].boxes)
    for planned in mine:
        match = others.get(planned.key)
        if match is None or planned.key == "outside":
            continue
        source = planned.source if per_step else f"the other side {SCALED}"
        own_scale = _same_total(planned.boxes, match.boxes) if planned.key == "loop" else scale
        yield _Pair(planned, match.boxes, own_scale, source)


def _same_total(this: Boxes, other: Boxes) -> float:
    total = float(other.own.sum())
    return float(this.own.sum()) / total if total else 1.0


def _tree(pair: _Pair, names: Names, options: FlameOptions) -> FlameTree:
    """Both sides in one tree. A box is drawn as on this side, where it is there at all."""
    up, _, shown, own, group = together([pair.this.boxes, pair.other])
    split = len(pair.this.boxes.own)
    paths = Paths(
        parent=up,
        frame=shown,
        own=summed(group[:split], own[:split], len(up)),
        base=summed(group[split:], own[split:] * pair.scale, len(up)),
    )
    planned = pair.this
    return flame_tree(
        paths,
        names.frames,
        key=planned.key,
        label=planned.label,
        unit=planned.unit,
        source=pair.source,
        limits=options.limits,
        root=replace(ROOT, name=planned.label),
    )


def _comparable(this: Side, other: Side) -> list[str]:
    """Warnings about what is not known; raises `UsageError` for sides that cannot be compared."""
    units = [side.rows.unit for side in (this, other)]
    if units[0] != units[1]:
        raise UsageError(f"--diff: one side counts {units[0]}, the other {units[1]}; compare files of one kind")
    idle = [idle_sampled(side.context.tables) for side in (this, other)]
    if None in idle:
        return ["Whether idle threads were sampled is not known of both sides; if it differs, waiting seems to appear."]
    if idle[0] != idle[1]:
        with_idle = "the first" if idle[0] else "the second"
        raise UsageError(
            f"--diff: only {with_idle} side sampled idle threads, so waiting would show as a change; record both alike"
        )
    rates = [set(side.context.tables.segments["rate_hz"].drop_nulls().to_list()) for side in (this, other)]
    if not this.rows.per_step and rates[0] and rates[1] and rates[0] != rates[1]:
        return ["The sides were sampled at different rates; values are scaled to the same total."]
    return []


def _labels(this: Context, other: Context) -> tuple[str, str]:
    """Names of the two sides that tell them apart."""
    names = title(this), title(other)
    if names[0] != names[1]:
        return names
    folders = [context.tables.run.folder for context in (this, other)]
    if folders[0] != folders[1] and all(folders):
        return folders[0], folders[1]
    return f"{names[0]} (this)", f"{names[1]} (other)"
