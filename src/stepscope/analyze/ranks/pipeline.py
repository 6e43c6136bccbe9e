"""Steps of pipelines played again from the work of their stages: what a step would last, were some of it otherwise.

A worker is a stage of a replica: the ranks of its tensor slots compute together, so its longest counts. Each works in
the order that was recorded, whatever the schedule; a forward pass waits for the stage before it, a backward pass for
the one behind, and all workers for each other once a step, when gradients are exchanged. Durations alone are used.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Steps
from stepscope.analyze.ranks.pieces import BEHIND, BEHIND_ALL, BEHIND_MESSAGE, CHUNKS, HOST, worker_of
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.reduced import Reduced


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

    def play(
        self,
        work: Floats | None = None,
        before: Floats | None = None,
        tail: Floats | None = None,
        hops: Floats | None = None,
        inside: Floats | None = None,
    ) -> Floats:
        """How long each step lasts."""
        work, before = self.work if work is None else work, self.before if before is None else before
        hops, inside = self.hops if hops is None else hops, self.inside if inside is None else inside
        ends = np.zeros_like(work)
        now = np.zeros(work.shape[:3])
        for stage, number, other, awaited in self.played:
            start = now[:, :, stage] + before[:, :, stage, number]
            if other >= 0:
                hop = 0.0 if other == stage else hops[:, _between(other, stage)]
                start = np.maximum(start, ends[:, :, other, awaited] + hop)
            now[:, :, stage] = ends[:, :, stage, number] = (
                start + inside[:, :, stage, number] + work[:, :, stage, number]
            )
        for stage, passes in enumerate(self.passes):
            now[:, :, stage] += before[:, :, stage, len(passes)]
        behind = self.tail if tail is None else tail
        lasted: Floats = now.max(axis=(1, 2)) + behind.max(axis=(1, 2))
        return lasted

    def without(self, part: Int64, late: Int64) -> Floats | None:
        """By step: what it is shorter when the workers of these ranks have the work of a usual one in other steps.

        None where a stage has no worker that is not late itself.
        """
        replicas, stages = self.work.shape[1:3]
        odd = set(self.worker[np.union1d(part, late)].tolist())
        work, before, tail, inside = (part.copy() for part in (self.work, self.before, self.tail, self.inside))
        for worker in sorted(set(self.worker[part].tolist())):
            replica, stage = divmod(worker, stages)
            twins = [other for other in range(replicas) if other * stages + stage not in odd]
            if not twins:
                return None
            means = self.work[:, twins, stage].sum(axis=2).mean(axis=0)
            twin = twins[int(np.argsort(means, kind="stable")[(len(means) - 1) // 2])]
            shift = len(work) // 3 + 1
            for values, source in (
                (work, self.work), (before, self.before), (tail, self.tail), (inside, self.inside)
            ):  # fmt: skip
                values[:, replica, stage] = np.roll(source[:, twin, stage], shift, axis=0)
        return self.play() - self.play(work, before, tail, inside=inside)

    def without_heavy(self, stage: int, late: Int64) -> Floats:
        """By step: what it is shorter when a stage's passes are as long as those of the others in the mean, workers of
        `late` ranks left out of both."""
        work = self.work.copy()
        replicas, stages = work.shape[1:3]
        odd = set(self.worker[late].tolist())

        def usual_of(at: int, passes: list[int]) -> float:
            rows = [row for row in range(replicas) if row * stages + at not in odd] or list(range(replicas))
            return float(self.work[:, rows, at][:, :, passes].sum(axis=2).mean())

        others = [other for other in range(len(self.passes)) if other != stage]
        for backward in (False, True):
            of = [[number for number, one in enumerate(passes) if one.backward is backward] for passes in self.passes]
            if not of[stage] or not any(of[other] for other in others):
                continue
            usual = np.mean([usual_of(other, of[other]) for other in others if of[other]])
            mine = usual_of(stage, of[stage])
            if mine > 0:
                work[:, :, stage, of[stage]] *= float(usual) / float(mine)
        return self.play() - self.play(work)

    def batch_factors(self) -> Floats | None:
        """By step, replica and microbatch: how much longer its passes are than those of others, on most stages and in
        both directions alike, which only what is in the batch makes so. None where microbatches are not on all stages.
        """
        known = [{(one.backward, one.microbatch) for one in passes} for passes in self.passes]
        batches = sorted({batch for _, batch in known[0]})
        if any(each != {(back, batch) for back in (False, True) for batch in batches} for each in known):
            return None
        parts = []
        for stage, passes in enumerate(self.passes):
            for backward in (False, True):
                spent = np.zeros((*self.work.shape[:2], len(batches)))
                for number, one in enumerate(passes):
                    if one.backward is backward:
                        spent[:, :, batches.index(one.microbatch)] += self.work[:, :, stage, number]
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
            row = [batches.index(one.microbatch) for one in passes]
            work[:, :, stage, : len(passes)] *= even[:, :, row]
            for backward in (False, True):
                of = [number for number, one in enumerate(passes) if one.backward is backward]
                before = self.work[:, :, stage, of]
                after = before * alike[:, :, [row[number] for number in of]]
                scale = max(float(np.median(before)), 1e-9)
                # of the middle half of the workers: one that is late itself has a variance of its own
                was += float(np.median(before.var(axis=(0, 2)))) / scale**2
                left += float(np.median(after.var(axis=(0, 2)))) / scale**2
        return self.play() - self.play(work), 1 - left / was if was > 0 else 0.0

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
        without = self.play(before=parts[..., :passes], tail=parts[..., passes], inside=parts[..., passes + 1 :])
        return self.play(before=before) - without

    def without_slow_hop(self, replica: int, stage: int) -> Floats:
        """By step: what it is shorter when messages between a stage and the next take as long as elsewhere."""
        hops = self.hops.copy()
        hops[replica, stage] = np.median(self.hops)
        return self.play() - self.play(hops=hops)

    def beyond_ideal(self) -> Floats:
        """By step: what it is longer than with all passes of a direction, and all else, as long as their mean."""
        work = np.zeros_like(self.work)
        for backward in (False, True):
            of = [[number for number, one in enumerate(passes) if one.backward is backward] for passes in self.passes]
            parts = [self.work[:, :, stage, numbers].ravel() for stage, numbers in enumerate(of) if numbers]
            for stage, numbers in enumerate(of):
                work[:, :, stage, numbers] = np.concatenate(parts).mean() if parts else 0.0
        before = np.broadcast_to(self.before.mean(axis=(0, 1), keepdims=True), self.before.shape)
        inside = np.broadcast_to(self.inside.mean(axis=(0, 1, 2, 3)), self.inside.shape)
        tail = np.full_like(self.tail, self.tail.mean())
        return self.play() - self.play(work, before, tail, inside=inside)


def _between(one: int, other: int) -> int:
    """The earlier of two stages that exchange; so do the last and the first where a rank holds several chunks."""
    return min(one, other) if abs(one - other) == 1 else max(one, other)


def pipelines(reduced: Reduced, layout: Layout, steps: Steps, rows: pl.DataFrame) -> Pipelines | None:
    """None where no work of microbatches was recorded, no stages are known, or the order cannot be played.

    Args:
        rows: of `pieces`.
    """
    stages = layout.stages
    if stages < 2 or (layout.dp < 0).any() or not (rows["code"] >= 0).any():
        return None
    worker = worker_of(layout)
    replica = worker // stages
    replicas = int(replica.max()) + 1
    order = _order(rows, stages)
    if order is None:
        return None
    passes, rows = order
    played = _played(passes)
    if played is None:
        return None
    numbers = np.unique(rows["step"].to_numpy()).astype(np.int64)
    longest = max(map(len, passes))
    step = np.searchsorted(numbers, rows["step"].to_numpy())
    where = rows["worker"].to_numpy()
    kind, slot, number = rows["kind"].to_numpy(), rows["slot"].to_numpy(), rows["number"].to_numpy()
    # what the host does behind all it does before the first pass of the next step
    last = kind == BEHIND_ALL
    step, number = np.where(last, (step + 1) % len(numbers), step), np.where(last, 0, number)
    kind = np.where(last, HOST, kind)
    spent = rows["ms"].to_numpy()
    work = np.full((len(numbers), replicas * stages, longest), np.nan)
    before = np.full((len(numbers), replicas * stages, longest + 1), np.nan)
    tail, inside = np.full((len(numbers), replicas * stages), np.nan), np.full(work.shape, np.nan)
    for one in np.unique(slot):
        passed, hosted, behind, held = (
            chosen & (slot == one) for chosen in (kind < HOST, kind == HOST, kind == BEHIND, kind == BEHIND_MESSAGE)
        )
        seen = np.zeros(tail.shape, bool)
        seen[step[passed], where[passed]] = True
        own, waited, last = np.full(work.shape, np.nan), np.zeros(before.shape), np.zeros(tail.shape)
        between = np.zeros(work.shape)
        np.add.at(between, (step[held], where[held], number[held]), spent[held])
        own[step[passed], where[passed], number[passed]] = spent[passed]
        np.add.at(waited, (step[hosted], where[hosted], number[hosted]), spent[hosted])
        np.add.at(last, (step[behind], where[behind]), spent[behind])
        # slots go on together: one that begins a pass late is waited for in the passes of the others
        work = np.fmax(work, own + between + waited[:, :, :longest])
        inside[seen] = np.fmax(inside[seen], between[seen])
        before[seen] = np.fmax(before[seen], waited[seen])
        tail[seen] = np.fmax(tail[seen], last[seen])
    work -= before[:, :, :longest] + inside
    shape = len(numbers), replicas, stages
    work = _by_batch(work.reshape(*shape, -1), passes)
    filled = [_filled(values.reshape(*shape, -1)) for values in (work, before, inside, tail)]
    for stage, mine in enumerate(passes):
        filled[0][:, :, stage, len(mine) :] = 0.0
    if not (kind == HOST).any():
        _with_phases(filled[1], steps, numbers, replica, layout)
    if not all(np.isfinite(values).all() for values in filled):
        return None
    hops = _hops(reduced, layout, replica, numbers)
    return Pipelines(numbers, worker, passes, played, filled[0], filled[1], filled[2], filled[3][..., 0], hops)


def _with_phases(before: Floats, steps: Steps, numbers: Int64, replica: Int64, layout: Layout) -> None:
    """What the host did before the first pass, by its phases, where windows tell nothing of it."""
    rows = np.flatnonzero(np.isin(steps.numbers, numbers))
    into = np.searchsorted(numbers, steps.numbers[rows])
    for rank in range(len(layout.ranks)):
        cells = into, replica[rank], layout.pp[rank], 0
        before[cells] = np.maximum(before[cells], np.nan_to_num(steps.own[rows, rank]))


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
        passes.append(tuple(Pass(bool(code % 2), code // 2 // CHUNKS, code // 2 % CHUNKS) for code in codes.to_list()))
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


def _hops(reduced: Reduced, layout: Layout, replica: Int64, numbers: Int64) -> Floats:
    """The usual transfer between stages: who comes to a message last stays no longer than that."""
    hops = np.full((int(replica.max()) + 1, layout.stages), np.nan)
    for pair, least in messages(reduced, numbers).items():
        members = layout.at(np.array(layout.groups[pair].ranks, np.int64))
        if len(members) != 2 or (members < 0).any() or replica[members[0]] != replica[members[1]]:
            continue
        one, other = layout.pp[members].tolist()
        if abs(one - other) in (1, layout.stages - 1):
            cell = int(replica[members[0]]), _between(one, other)
            hops[cell] = np.fmax(hops[cell], least)
    known = hops[np.isfinite(hops)]
    usual = float(np.median(known)) if len(known) else _shortest(reduced, numbers)
    return np.where(np.isfinite(hops), hops, usual)


def _shortest(reduced: Reduced, numbers: Int64) -> float:
    """Where nothing tells which two belong together: most messages wait, but the shortest ones hardly do."""
    spent = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
    sent = pl.col("kind").is_in(list(POINT_TO_POINT)) & pl.col("step").is_in(
        numbers[:: len(numbers) // 10 + 1].tolist()
    )
    found = reduced.scan("collectives").filter(sent & (spent >= 0)).select(spent.quantile(0.01)).collect().item()
    return float(found or 0.0)


def messages(reduced: Reduced, numbers: Int64) -> dict[str, float]:
    """The usual transfer (ms) of messages in groups of two."""
    spent = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
    pairs = [group.id for group in {group.id: group for host in reduced.hosts for group in host.groups}.values()
             if len(set(group.ranks)) == 2]  # fmt: skip
    calls = (
        reduced.scan("collectives")
        .filter(
            pl.col("kind").is_in(list(POINT_TO_POINT))
            & pl.col("group").is_in(pairs)
            & pl.col("step").is_in(numbers[:: max(len(numbers) // 50, 1)].tolist())
            & (pl.col("end_ns") >= pl.col("start_ns"))
            & pl.col("sequence").is_not_null()
        )
        .group_by("step", "group", "sequence")
        .agg(members=pl.len(), least=spent.min())
        .filter(pl.col("members") == 2)
        .group_by("group")
        .agg(pl.col("least").median())
        .collect()
    )
    return dict(calls.select("group", "least").rows())
