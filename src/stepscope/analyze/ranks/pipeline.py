"""Pieces of work that windows recorded, in order, and steps of pipelines played again from them.

What a step would last, were some of it otherwise: a worker is a stage of a replica; the ranks of its tensor slots
compute together, so its longest counts. Each works in the order that was recorded, whatever the schedule; a forward
pass waits for the stage before it, a backward pass for the one behind, and all workers for each other once a step, when
gradients are exchanged. Durations alone are used.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import MAX_NS, Steps
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Bools, Floats, Int64
from stepscope.tables.reduced import Index, Reduced
from stepscope.workers import side_by_side

# Kinds beside forward (0) and backward (1): of the host in between, from the optimizer on, idle before a call, of the
# host behind the last call of a step, for which nobody waits before the next one, and idle between message and pass
HOST, BEHIND, BEFORE_CALL, BEHIND_ALL, BEHIND_MESSAGE = 2, 3, 4, 7, 8
_CHUNKS, _MICROBATCHES = 2**8, 2**16
_CALL, _MESSAGE = 5, 6
_KINDS = {"forward": 0, "backward": 1, "optimizer": BEHIND, "data": HOST, "gc": HOST, "other": HOST}
_LASTED = pl.col("end_ns") - pl.col("start_ns")
_IN_TIME = (pl.col("step") >= 0) & (_LASTED > 0) & (_LASTED < MAX_NS)
_SOUND = pl.col("kind").is_in(list(_KINDS)) & _IN_TIME
_SENT = pl.col("kind").is_in(list(POINT_TO_POINT))
_NOTHING = np.iinfo(np.int64).min


def pieces(reduced: Reduced, layout: Layout) -> pl.DataFrame | None:
    """What each rank did itself in steps of windows; None where no work was recorded.

    Columns: rank, step, kind, number (of passes of the step before it), code (which pass; -1 of others), ms, and the
    rank's column, worker, stage and slot. Time before work in which neither work nor a call ran is the host's own,
    where calls were recorded: who waits for others does so inside one. Before a call it may be that, too, or a wait in
    another call that was not recorded.
    """
    hosts = [host for host in reduced.hosts if host.tables["work"].rows]
    if not hosts:
        return None
    total = sum(host.tables["work"].rows for host in hosts)
    steps = reduced.scan("work").filter(_SOUND).select(pl.col("step").unique().sort()).collect()["step"]
    steps = steps.gather_every(-(-total // at.MAX_PLAYED))
    places = pl.DataFrame(
        {
            "rank": layout.ranks.astype(np.int32),
            "column": np.arange(len(layout.ranks), dtype=np.int32),
            "worker": layout.workers.astype(np.int32),
            "stage": layout.pp.astype(np.int32),
            "slot": np.maximum(layout.tp, 0).astype(np.int32),
        }
    )
    inside = layout.groups_of_slots() if layout.slots > 1 else []
    of_host = partial(_of_host, reduced, steps=steps, inside=inside, messages=layout.stages > 1)
    rows = pl.concat(side_by_side(of_host, hosts)).join(places, on="rank")
    return None if rows.is_empty() else rows


def _of_host(reduced: Reduced, host: Index, *, steps: pl.Series, inside: list[str], messages: bool) -> pl.DataFrame:
    """`inside`: groups whose calls lie inside passes. `messages`: without some, nothing tells waits from idle time."""
    kind = pl.col("kind")
    chosen = pl.col("step").is_in(steps.implode())  # of a list Polars takes twenty times as long
    work = (
        reduced.part("work", host)
        .filter(_SOUND & chosen)
        .select(
            "rank",
            "step",
            "start_ns",
            "end_ns",
            "microbatch",
            kind.replace_strict(_KINDS, return_dtype=pl.Int8),
            chunk=pl.col("chunk").fill_null(0).clip(0, _CHUNKS - 1),
        )
    )
    calls = (
        reduced.part("collectives", host)
        .filter(_IN_TIME & chosen & ~pl.col("group").is_in(inside).fill_null(False))
        .select("rank", "step", "start_ns", "end_ns", kind=pl.when(_SENT).then(_MESSAGE).otherwise(_CALL).cast(pl.Int8))
    )
    begins = (
        reduced.part("steps", host)
        .filter(chosen & pl.col("start_us").is_not_null())
        .select("rank", "step", begin_ns=pl.col("start_us") * 1000)
    )
    columns = (
        pl.concat([work, calls], how="diagonal")
        .join(begins, on=["rank", "step"], how="left")
        .sort("rank", "step", "start_ns", "end_ns", maintain_order=True)
        .collect()
    )
    return _in_order(columns, messages=messages)


def _in_order(columns: pl.DataFrame, *, messages: bool) -> pl.DataFrame:
    """Of one host's work and calls, by rank, step and start: passes by their number, and the time between."""
    rank, step, kind = (columns[name].to_numpy() for name in ("rank", "step", "kind"))
    start, end = columns["start_ns"].to_numpy(), columns["end_ns"].to_numpy()
    first = np.ones(len(rank), np.bool_)  # of its rank's step
    first[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
    part = np.cumsum(first) - 1
    is_pass, is_work = kind < HOST, kind <= BEHIND
    worked = _latest_before(end, part, is_work)
    ran = _latest_before(end, part, np.ones(len(end), np.bool_))
    begin = columns["begin_ns"].fill_null(columns["start_ns"]).to_numpy()
    # who waits for others does so in a message, or a call: of a step without, nothing tells waits from idle time
    counts = np.bincount(part, (kind == _MESSAGE) if messages else ~is_work)
    waits = (counts > 0)[part] if len(part) else np.zeros(0, np.bool_)
    idle = np.where(waits, np.clip(start - np.where(ran == _NOTHING, begin, ran), 0, MAX_NS), 0) / 1e6
    ms = np.clip(end - np.where(is_pass, start, np.maximum(start, worked)), 0, None) / 1e6
    opened = np.flatnonzero(first)[part]  # the first row of its rank's step
    passes: Int64 = np.cumsum(is_pass) - is_pass
    number: Int64 = passes - passes[opened]
    ended: Int64 = np.cumsum(kind == BEHIND)  # from the optimizer on, gradients have been exchanged
    behind = ended - ended[opened] + (kind == BEHIND)[opened] > 0
    microbatch = columns["microbatch"].cast(pl.Int64)
    if microbatch.null_count():
        counted = columns.select(pl.int_range(pl.len()).over("rank", "step", "kind", "chunk")).to_series()
        microbatch = microbatch.fill_null(counted)
    chunk = columns["chunk"].fill_null(0).cast(pl.Int64).to_numpy()
    code = (np.clip(microbatch.to_numpy(), 0, _MICROBATCHES - 1) * _CHUNKS + chunk) * 2 + kind
    called: Int64 = np.cumsum(~is_work)
    calls = np.bincount(part, ~is_work)
    ahead = called - called[opened] + (~is_work)[opened] < calls[part] if len(part) else behind
    of_host = np.where(behind, np.where(ahead, BEHIND, BEHIND_ALL), HOST)

    def rows(of: Bools, kinds: Int64, codes: Int64, lasted: Floats) -> pl.DataFrame:
        columns = {"rank": rank[of], "step": step[of], "kind": kinds[of].astype(np.int8), "number": number[of]}
        return pl.DataFrame({**columns, "code": codes[of], "ms": lasted[of]})

    did = rows(is_work, np.where(kind == HOST, of_host, kind), np.where(is_pass, code, -1), ms)
    after_message = np.zeros(len(kind), np.bool_)
    after_message[1:] = is_pass[1:] & (kind[:-1] == _MESSAGE) & ~first[1:]
    # before its first pass no stage waits for another one but in a message
    between = np.where(is_work | (messages & (number == 0) & ~behind), of_host, BEFORE_CALL)
    between = np.where(after_message & ~behind, BEHIND_MESSAGE, between)
    return pl.concat([did, rows(idle > 0, between, np.full(len(rank), -1), idle)])


def _latest_before(end: Int64, part: Int64, counts: Bools) -> Int64:
    """By row, the latest end of the rows of its part before it that count; `_NOTHING` where there is none."""
    ends = np.where(counts, end, _NOTHING)
    order = np.lexsort((ends, part))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # parts follow each other, so the largest place so far is one of the row's own part
    latest = ends[order[np.maximum.accumulate(place)]] if len(place) else ends
    before = np.full(len(ends), _NOTHING)
    same = part[1:] == part[:-1]
    before[1:][same] = latest[:-1][same]
    return before


class Pass(Struct, frozen=True):
    """A forward or backward pass of one microbatch through one chunk of the model."""

    backward: bool
    microbatch: int
    chunk: int


class Pipelines(Struct, frozen=True):
    """Milliseconds by step, replica, stage and number of the pass on its stage; what was not recorded is as its peers'.

    `before`: work of the host between the passes, before the one of the same number; the last one behind all.
    `inside`: of the host, too, between the message that a pass waits for and the pass.
    `tail`: the optimizer's, behind the exchange of gradients, by step, replica and stage.
    """

    numbers: Int64  # of the steps
    worker: Int64  # by position of a rank: replica * stages + stage
    passes: tuple[tuple[Pass, ...], ...]  # by stage, in order
    played: tuple[tuple[int, int, int, int], ...]  # stage and number of each pass, and of the one it waits for or -1
    work: Floats
    before: Floats
    inside: Floats
    tail: Floats
    hops: Floats  # of a message, by replica and the earlier of two stages; the last one's leads to the first

    def play(self) -> Floats:
        """How long each step lasts."""
        ends = np.zeros_like(self.work)
        now = np.zeros(self.work.shape[:3])
        for stage, number, other, awaited in self.played:
            start = now[:, :, stage] + self.before[:, :, stage, number]
            if other >= 0:
                hop = 0.0 if other == stage else self.hops[:, _between(other, stage)]
                start = np.maximum(start, ends[:, :, other, awaited] + hop)
            now[:, :, stage] = ends[:, :, stage, number] = (
                start + self.inside[:, :, stage, number] + self.work[:, :, stage, number]
            )
        for stage, passes in enumerate(self.passes):
            now[:, :, stage] += self.before[:, :, stage, len(passes)]
        lasted: Floats = now.max(axis=(1, 2)) + self.tail.max(axis=(1, 2))
        return lasted

    def shorter(self, **otherwise: Floats) -> Floats:
        """By step: what it is shorter when some of this is otherwise."""
        return self.play() - replace(self, **otherwise).play()

    def _numbers(self, *, backward: bool) -> list[list[int]]:
        """Of each stage, the numbers of its passes in one direction."""
        return [[number for number, one in enumerate(own) if one.backward is backward] for own in self.passes]

    def without(self, part: Int64, late: Int64) -> Floats | None:
        """By step: what it is shorter when the workers of these ranks have the work of a usual one in other steps.

        None where a stage has no worker that is not late itself.
        """
        replicas, stages = self.work.shape[1:3]
        odd = set(self.worker[np.union1d(part, late)].tolist())
        otherwise = {name: getattr(self, name).copy() for name in ("work", "before", "tail", "inside")}
        for worker in sorted(set(self.worker[part].tolist())):
            replica, stage = divmod(worker, stages)
            twins = [other for other in range(replicas) if other * stages + stage not in odd]
            if not twins:
                return None
            means = self.work[:, twins, stage].sum(axis=2).mean(axis=0)
            twin = twins[int(np.argsort(means, kind="stable")[(len(means) - 1) // 2])]
            for name, values in otherwise.items():
                usual = getattr(self, name)[:, twin, stage]
                values[:, replica, stage] = np.roll(usual, len(self.work) // 3 + 1, axis=0)
        return self.shorter(**otherwise)

    def without_heavy(self, stage: int, late: Int64) -> Floats:
        """By step: what it is shorter when a stage's passes are as long as those of the others in the mean, workers of
        `late` ranks left out of both."""
        work = self.work.copy()
        replicas, stages = work.shape[1:3]
        odd = set(self.worker[late].tolist())
        for backward in (False, True):
            means: list[float | None] = []
            for at_stage, passes in enumerate(self._numbers(backward=backward)):
                rows = [row for row in range(replicas) if row * stages + at_stage not in odd] or list(range(replicas))
                spent = self.work[:, rows, at_stage][:, :, passes].sum(axis=2)
                means.append(float(spent.mean()) if passes else None)
            mine = means.pop(stage)
            others = [mean for mean in means if mean is not None]
            if mine and others:
                work[:, :, stage, self._numbers(backward=backward)[stage]] *= float(np.mean(others)) / mine
        return self.shorter(work=work)

    def batch_factors(self) -> Floats | None:
        """By step, replica and microbatch: how much longer its passes are than those of others, on most stages and in
        both directions alike, which only what is in the batch makes so. None where microbatches are not on all stages.
        """
        batches = sorted({one.microbatch for one in self.passes[0]})
        whole = {(backward, batch) for backward in (False, True) for batch in batches}
        if any({(one.backward, one.microbatch) for one in passes} != whole for passes in self.passes):
            return None
        parts = []
        for stage, passes in enumerate(self.passes):
            for numbers in (self._numbers(backward=backward)[stage] for backward in (False, True)):
                spent = np.zeros((*self.work.shape[:2], len(batches)))
                for number in numbers:
                    spent[:, :, batches.index(passes[number].microbatch)] += self.work[:, :, stage, number]
                parts.append(spent / max(float(np.median(spent)), 1e-9))
        middle: Floats = np.sort(np.stack(parts), axis=0)[(len(parts) - 1) // 2]
        return middle

    def without_uneven(self, factors: Floats) -> tuple[Floats, float]:
        """By step: what it is shorter when all its microbatches are equally long; and which part of the variance of
        passes that is.

        Args:
            factors: of `batch_factors`.
        """
        alike = 1 / np.maximum(factors, 1e-9)
        even = alike * factors.mean(axis=(1, 2), keepdims=True)
        batches = sorted({one.microbatch for one in self.passes[0]})
        work = self.work.copy()
        was = left = 0.0
        for stage, passes in enumerate(self.passes):
            row = np.array([batches.index(one.microbatch) for one in passes])
            work[:, :, stage, : len(passes)] *= even[:, :, row]
            for numbers in (self._numbers(backward=backward)[stage] for backward in (False, True)):
                before = self.work[:, :, stage, numbers]
                after = before * alike[:, :, row[numbers]]
                scale = max(float(np.median(before)), 1e-9)
                # of the middle half of the workers: one that is late itself has a variance of its own
                was += float(np.median(before.var(axis=(0, 2)))) / scale**2
                left += float(np.median(after.var(axis=(0, 2)))) / scale**2
        return self.shorter(work=work), 1 - left / was if was > 0 else 0.0

    def without_waits(self, numbers: Int64, columns: Int64, waits_ms: Floats) -> Floats:
        """By step: what it is shorter when the host of ranks (positions) waits so much less, where it waits longest
        beyond what is usual: before or in front of one of the passes, or behind all, which may delay the next step;
        before the first pass what is seen nowhere."""
        stages, passes = self.work.shape[2], self.before.shape[3]
        parts = np.concatenate([self.before, self.tail[..., None], self.inside], axis=3)
        kept = np.isin(numbers, self.numbers)
        replica, stage = np.divmod(self.worker[columns[kept]], stages)
        step, left = np.searchsorted(self.numbers, numbers[kept]), waits_ms[kept]
        more = np.maximum(parts - np.median(parts, axis=(0, 1)), 0.0)
        behind = np.roll(more[..., 0], -1, axis=0)  # before the first pass of the next step
        both = np.concatenate([more, behind[..., None]], axis=3)[step, replica, stage]
        where = both.argmax(axis=1)
        seen = np.minimum(left, both.max(axis=1, initial=0.0))
        next_ = where == parts.shape[3]
        cells = np.where(next_, (step + 1) % len(self.numbers), step), replica, stage, np.where(next_, 0, where)
        np.subtract.at(parts, cells, seen)
        parts, before = np.maximum(parts, 0.0), self.before.copy()
        np.add.at(before, (step, replica, stage, np.zeros(len(step), np.int64)), left - seen)
        without = replace(self, before=parts[..., :passes], tail=parts[..., passes], inside=parts[..., passes + 1 :])
        return replace(self, before=before).play() - without.play()

    def without_slow_hop(self, replica: int, stage: int) -> Floats:
        """By step: what it is shorter when messages between a stage and the next take as long as elsewhere."""
        hops = self.hops.copy()
        hops[replica, stage] = np.median(self.hops)
        return self.shorter(hops=hops)

    def beyond_ideal(self) -> Floats:
        """By step: what it is longer than with all passes of a direction, and all else, as long as their mean."""
        work = np.zeros_like(self.work)
        for numbers_of in (self._numbers(backward=backward) for backward in (False, True)):
            parts = [self.work[:, :, stage, numbers].ravel() for stage, numbers in enumerate(numbers_of)]
            mean = np.concatenate(parts).mean() if sum(map(len, parts)) else 0.0
            for stage, numbers in enumerate(numbers_of):
                work[:, :, stage, numbers] = mean
        before = np.broadcast_to(self.before.mean(axis=(0, 1), keepdims=True), self.before.shape)
        inside, tail = np.full_like(self.inside, self.inside.mean()), np.full_like(self.tail, self.tail.mean())
        return self.shorter(work=work, before=before, tail=tail, inside=inside)


def _between(one: int, other: int) -> int:
    """The earlier of two stages that exchange; so do the last and the first where a rank holds several chunks."""
    return min(one, other) if abs(one - other) == 1 else max(one, other)


def pipelines(reduced: Reduced, layout: Layout, steps: Steps, rows: pl.DataFrame) -> Pipelines | None:
    """None where no work of microbatches was recorded, no stages are known, or the order cannot be played.

    Args:
        rows: of `pieces`.
    """
    stages, worker = layout.stages, layout.workers
    if stages < 2 or (layout.dp < 0).any() or not (rows["code"] >= 0).any():
        return None
    order = _order(rows, stages)
    played = None if order is None else _played(order[0])
    if order is None or played is None:
        return None
    passes, rows = order
    numbers = np.unique(rows["step"].to_numpy()).astype(np.int64)
    replicas, longest = int(worker.max()) // stages + 1, max(map(len, passes))
    work, before, inside, tail = _spent(rows, numbers, replicas * stages, longest)
    shape = len(numbers), replicas, stages
    work = _by_batch(work.reshape(*shape, -1), passes)
    work, before, inside, tail = (_filled(values.reshape(*shape, -1)) for values in (work, before, inside, tail))
    for stage, mine in enumerate(passes):
        work[:, :, stage, len(mine) :] = 0.0
    if not rows["kind"].is_in([HOST, BEHIND_ALL]).any():
        # what the host did before the first pass, by its phases, as windows tell nothing of it
        known = np.flatnonzero(np.isin(steps.numbers, numbers))
        into = np.searchsorted(numbers, steps.numbers[known])
        for rank, (replica, stage) in enumerate(zip(worker // stages, layout.pp, strict=True)):
            own = np.nan_to_num(steps.own[known, rank])
            before[into, replica, stage, 0] = np.maximum(before[into, replica, stage, 0], own)
    if not all(np.isfinite(values).all() for values in (work, before, inside, tail)):
        return None
    hops = _hops(reduced, layout, numbers)
    return Pipelines(numbers, worker, passes, played, work, before, inside, tail[..., 0], hops)


def _spent(rows: pl.DataFrame, numbers: Int64, workers: int, longest: int) -> tuple[Floats, Floats, Floats, Floats]:
    """(work, before, inside, tail) of `Pipelines`, replicas and stages as one axis; NaN where nothing was recorded."""
    step, where = np.searchsorted(numbers, rows["step"].to_numpy()), rows["worker"].to_numpy()
    kind, slot, number, spent = (rows[name].to_numpy() for name in ("kind", "slot", "number", "ms"))
    # what the host does behind all it does before the first pass of the next step
    last = kind == BEHIND_ALL
    step, number = np.where(last, (step + 1) % len(numbers), step), np.where(last, 0, number)
    kind = np.where(last, HOST, kind)
    work = np.full((len(numbers), workers, longest), np.nan)
    before, inside = np.full((len(numbers), workers, longest + 1), np.nan), work.copy()
    tail = np.full((len(numbers), workers), np.nan)

    def added(chosen: Bools, shape: tuple[int, ...]) -> Floats:
        total = np.zeros(shape)
        np.add.at(total, (step[chosen], where[chosen], number[chosen])[: len(shape)], spent[chosen])
        return total

    for one in np.unique(slot):
        mine = slot == one
        passed = mine & (kind < HOST)
        own, seen = np.full(work.shape, np.nan), np.zeros(tail.shape, bool)
        own[step[passed], where[passed], number[passed]] = spent[passed]
        seen[step[passed], where[passed]] = True
        waited, between = added(mine & (kind == HOST), before.shape), added(mine & (kind == BEHIND_MESSAGE), work.shape)
        # slots go on together: one that begins a pass late is waited for in the passes of the others
        work = np.fmax(work, own + between + waited[:, :, :longest])
        inside[seen] = np.fmax(inside[seen], between[seen])
        before[seen] = np.fmax(before[seen], waited[seen])
        tail[seen] = np.fmax(tail[seen], added(mine & (kind == BEHIND), tail.shape)[seen])
    return work - (before[:, :, :longest] + inside), before, inside, tail


def _by_batch(work: Floats, passes: tuple[tuple[Pass, ...], ...]) -> Floats:
    """Workers of which nothing was recorded have the passes of their stage, as long as the same batch is elsewhere."""
    found: Floats = work.copy()
    usual = np.nanmedian(work, axis=(0, 1))
    ratio = work / usual
    ratio /= np.nanmedian(ratio, axis=(0, 3), keepdims=True)  # what makes all of a worker longer is no batch
    for stage, own in enumerate(passes):
        gaps = ~np.isfinite(work[:, :, stage])
        if not gaps.any():
            continue
        for number, one in enumerate(own):
            same = [(at, row) for at, other in enumerate(passes) for row, its in enumerate(other)
                    if (its.backward, its.microbatch) == (one.backward, one.microbatch)]  # fmt: skip
            batch = np.nanmedian(np.stack([ratio[:, :, at, row] for at, row in same]), axis=0)
            known = np.isfinite(work[:, :, stage, number])
            found[:, :, stage, number] = np.where(known, work[:, :, stage, number], batch * usual[stage, number])
    return found


def _filled(values: Floats) -> Floats:
    """Without gaps: the middle one of the other replicas in the same step, else of all steps."""
    for axis in (1, (0, 1)):
        gaps = ~np.isfinite(values)
        if gaps.any():
            usual = np.broadcast_to(np.nanmedian(values, axis=axis, keepdims=True), values.shape)
            values = np.where(gaps, usual, values)
    return values


def _order(rows: pl.DataFrame, stages: int) -> tuple[tuple[tuple[Pass, ...], ...], pl.DataFrame] | None:
    """Each stage's usual order of passes, and the rows of ranks and steps that have it."""
    passed = rows.filter(pl.col("code") >= 0)
    # a number that two orders share by chance alone; where it does, damaged input is played oddly, and no more
    mixed = (pl.col("code").cast(pl.UInt64) + 1) * ((pl.col("number").cast(pl.UInt64) + 1) * 0x9E3779B1 + 7)
    signs = passed.group_by("stage", "rank", "step").agg(count=pl.len(), sign=mixed.sum())
    passes, kept = [], []
    for stage in range(stages):
        mine = signs.filter(pl.col("stage") == stage)
        if mine.is_empty():
            return None
        (count, sign), _ = Counter(mine.select("count", "sign").rows()).most_common(1)[0]
        alike = mine.filter((pl.col("count") == count) & (pl.col("sign") == sign)).select("rank", "step")
        kept.append(alike)
        first = alike.row(0)
        codes = passed.filter((pl.col("rank") == first[0]) & (pl.col("step") == first[1])).sort("number")["code"]
        passes.append(
            tuple(Pass(bool(code % 2), code // 2 // _CHUNKS, code // 2 % _CHUNKS) for code in codes.to_list())
        )
    rows = rows.join(pl.concat(kept), on=["rank", "step"], how="semi")
    return tuple(passes), rows


def _played(passes: tuple[tuple[Pass, ...], ...]) -> tuple[tuple[int, int, int, int], ...] | None:
    """An order in which every pass comes after those it waits for; None where there is none."""
    last = len(passes) - 1
    number = [{one: row for row, one in enumerate(own)} for own in passes]
    chunks = max((one.chunk for own in passes for one in own), default=0)
    done = [0] * len(passes)
    found: list[tuple[int, int, int, int]] = []
    total, moved = sum(map(len, passes)), True
    while moved:
        moved = False
        for stage, own in enumerate(passes):
            while done[stage] < len(own):
                one = own[done[stage]]
                other, chunk = (stage + 1, one.chunk) if one.backward else (stage - 1, one.chunk)
                if other > last:
                    other, chunk = (0, chunk + 1) if chunk < chunks else (-1, 0)
                elif other < 0 and chunk > 0:
                    other, chunk = last, chunk - 1
                awaited = number[other].get(Pass(one.backward, one.microbatch, chunk), -1) if other >= 0 else -1
                if awaited >= 0 and done[other] <= awaited:
                    break
                found.append((stage, done[stage], other if awaited >= 0 else -1, awaited))
                done[stage] += 1
                moved = True
    return tuple(found) if len(found) == total else None


def _hops(reduced: Reduced, layout: Layout, numbers: Int64) -> Floats:
    """The usual transfer between stages (ms): who comes to a message last stays no longer than that."""
    spent = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
    replica = layout.workers // layout.stages
    hops = np.full((int(replica.max()) + 1, layout.stages), np.nan)
    pairs = [group.id for group in layout.groups.values() if len(set(group.ranks)) == 2]
    some = pl.col("step").is_in(numbers[:: max(len(numbers) // 50, 1)].tolist())
    met = (
        reduced.scan("collectives")
        .filter(_SENT & pl.col("group").is_in(pairs) & some & (spent >= 0) & pl.col("sequence").is_not_null())
        .group_by("step", "group", "sequence")
        .agg(members=pl.len(), least=spent.min())
        .filter(pl.col("members") == 2)
        .group_by("group")
        .agg(pl.col("least").median())
        .collect()
    )
    for pair, least in met.select("group", "least").rows():
        members = layout.members(layout.groups[pair])
        if len(members) == 2 and replica[members[0]] == replica[members[1]]:
            one, other = layout.pp[members].tolist()
            if abs(one - other) in (1, layout.stages - 1):
                cell = int(replica[members[0]]), _between(one, other)
                hops[cell] = np.fmax(hops[cell], least)
    known = hops[np.isfinite(hops)]
    if len(known):
        return np.where(np.isfinite(hops), hops, np.median(known))
    # nothing tells which two belong together: most messages wait, but the shortest ones hardly do
    some = pl.col("step").is_in(numbers[:: len(numbers) // 10 + 1].tolist())
    calls = reduced.scan("collectives").filter(_SENT & some & (spent >= 0))
    return np.full(hops.shape, float(calls.select(spent.quantile(0.01)).collect().item() or 0.0))
