"""Differences of flame graphs: two runs, or one rank against the mean of the others.

Boxes match by the path of (function, file from the root of the code on), so that runs in different folders match. Both
sides are per step where both know their steps; else the other side is scaled to the same total, which shows how the
share of a path changed and nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.stack_selection import idle_sampled
from stepscope.analyze.pictures.flame_tree import Paths, PlannedTree, flame_tree, together
from stepscope.analyze.pictures.sampled_flame import FlameOptions, Names, Side, notes_of, title
from stepscope.errors import UsageError
from stepscope.model.sampled import FlameGraph

SCALED = "scaled to the same total"


def flame_diff(this: Context, other: Context, options: FlameOptions | None = None) -> FlameGraph:
    """This run with `other` as what it is compared with; one tree for each that both have.

    Raises `UsageError` for files that count different things or of which only one sampled idle threads.
    """
    options = options or FlameOptions()
    names = Names()
    sides = [Side(context, options, names) for context in (this, other)]
    if sides[0].per_step != sides[1].per_step:
        sides = [Side(context, replace(options, per_step=False), names) for context in (this, other)]
    notes = _comparable(*sides)
    trees = [flame_tree(pair, names.frames, options.limits) for pair in _run_pairs(*sides)]
    labels = _labels(this, other)
    for label, side in zip(labels, sides, strict=True):
        notes += [f"{label}: {note}" for note in side.notes()]
    return FlameGraph(
        title=f"{labels[0]} compared with {labels[1]}",
        frames=tuple(names.frames),
        trees=tuple(trees),
        notes=tuple(dict.fromkeys(notes)),
        sides=labels,
        source=sides[0].source(),
    )


def flame_rank_diff(context: Context, rank: int, options: FlameOptions | None = None) -> FlameGraph:
    """One rank's main thread with the mean of all other ranks' as what it is compared with.

    `options.selection` says which phase; its rank is not looked at. Raises `UsageError` where there is no other rank.
    """
    options = options or FlameOptions()
    side = Side(context, replace(options, selection=replace(options.selection, rank=None, process="all")), Names())
    others = tuple(each for each in side.ranks if each != rank)
    if rank not in side.ranks or not others:
        several = len(side.ranks) > 1
        known = f"ranks with samples: {', '.join(map(str, side.ranks))}" if several else "one rank was sampled"
        raise UsageError(f"--rank {rank} --diff others: needs samples of this rank and of another; {known}")
    trees = [flame_tree(pair, side.names.frames, options.limits) for pair in _rank_pairs(side, rank, others)]
    labels = (f"rank {rank}", f"rank {others[0]}" if len(others) == 1 else f"mean of {len(others)} other ranks")
    return FlameGraph(
        title=f"{title(context)}: {labels[0]} compared with {labels[1]}",
        frames=tuple(side.names.frames),
        trees=tuple(trees),
        notes=notes_of(side, trees),
        sides=labels,
        source=side.source(),
    )


def _rank_pairs(side: Side, rank: int, others: tuple[int, ...]) -> Iterator[PlannedTree]:
    """The training loop of the rank beside that of the others, where it is known apart, and the whole main thread."""
    for loop in (True, False) if side.loop_apart else (False,):
        mine, rest = side.of_rank(rank, loop=loop), side.of_rank(*others, loop=loop)
        if not len(mine) or not len(rest):
            continue
        key, label = (f"rank:{rank}:loop", "training loop") if loop else (f"rank:{rank}", "main thread")
        planned = side.plan(key, f"rank {rank}, {label}", mine, rank=rank)
        yield _pair(side, planned, rest, _same_total(mine, rest), f"the others' mean {SCALED}")


def _run_pairs(this: Side, other: Side) -> Iterator[PlannedTree]:
    others = {planned.key: planned.paths for planned in other.planned()}
    mine = list(this.planned())
    # one scale for all trees, but for loops: a phase that takes a larger part of the whole must show as grown
    whole = _same_total(mine[0].paths, others[mine[0].key])
    for planned in mine:
        match = others.get(planned.key)
        if match is not None and planned.key != "outside":
            scale = _same_total(planned.paths, match) if planned.key == "loop" else whole
            yield _pair(this, planned, match, scale, f"the other side {SCALED}")


def _same_total(this: Paths, other: Paths) -> float:
    total = float(other.own.sum())
    return float(this.own.sum()) / total if total else 1.0


def _pair(this: Side, planned: PlannedTree, other: Paths, scale: float, scaled: str) -> PlannedTree:
    """Both sides in one tree, the other one scaled unless both are per step. A box is drawn as on this side, where it
    is there at all.
    """
    mine = replace(planned.paths, base=np.zeros(len(planned.paths)))
    base = other.own if this.per_step else other.own * scale
    paths = together([mine, replace(other, own=np.zeros(len(other)), base=base)])
    return replace(planned, paths=paths, source=planned.source if this.per_step else scaled)


def _comparable(this: Side, other: Side) -> list[str]:
    """Warnings about what is not known; raises `UsageError` for sides that cannot be compared."""
    if this.unit != other.unit:
        raise UsageError(f"--diff: one side counts {this.unit}, the other {other.unit}; compare files of one kind")
    idle = [idle_sampled(side.context.tables) for side in (this, other)]
    if None in idle:
        return ["Whether idle threads were sampled is not known of both sides; if it differs, waiting seems to appear."]
    if idle[0] != idle[1]:
        with_idle = "the first" if idle[0] else "the second"
        raise UsageError(
            f"--diff: only {with_idle} side sampled idle threads, so waiting would show as a change; record both alike"
        )
    rates = [set(side.context.tables.segments["rate_hz"].drop_nulls().to_list()) for side in (this, other)]
    if not this.per_step and all(rates) and rates[0] != rates[1]:
        return ["The sides were sampled at different rates; values are scaled to the same total."]
    return []


def _labels(this: Context, other: Context) -> tuple[str, str]:
    names = title(this), title(other)
    if names[0] != names[1]:
        return names
    folders = this.tables.run.folder, other.tables.run.folder
    if folders[0] != folders[1] and all(folders):
        return folders
    return f"{names[0]} (this)", f"{names[1]} (other)"
