"""Reduced jobs in memory whose truth is known: data parallel ones, and pipelines played by a 1F1B of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.schema import REDUCED_SCHEMA
from stepscope.tables.reduced import LABELS, SCHEMAS, Group, Index, ReducedFrames, ReducedRank, TableFile, group_id

Array = npt.NDArray[np.float64]
BEGIN_US = 1_790_000_000_000_000
EXCHANGE_MS = 30.0
WINDOW = LABELS.index("window")


class Job(Struct, kw_only=True):
    """A job of `ranks`; arrays are (steps, ranks) in milliseconds. Rows beside the steps are added as they are."""

    ranks: int = 16
    per_host: int = 4
    steps: int = 120
    windows: int = 24  # the last steps
    seed: int = 7
    data: Array | None = None
    forward: Array | None = None
    compute: Array | None = None
    gc: Array | None = None
    tokens: Array | None = None
    wall: Array | None = None
    phases: bool = True
    places: Sequence[tuple[int, int, int]] | None = None  # (dp, pp, tp) of each rank
    groups: Sequence[Group] = ()
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    shift_us: Mapping[int, int] = field(default_factory=dict)  # by host: its clock's error
    absent: Sequence[int] = ()

    def noise(self, mean: float, deviation: float, salt: int = 0) -> Array:
        return np.random.default_rng(self.seed + salt).normal(mean, deviation, (self.steps, self.ranks))

    def host(self, rank: int) -> str:
        return f"node{rank // self.per_host}"

    def window_steps(self) -> range:
        return range(self.steps - self.windows, self.steps)

    def usual(self) -> tuple[Array, Array, Array]:
        """Data wait, forward pass and work of devices of a healthy job."""
        return self.noise(3, 0.2, 1), self.noise(40, 0.3, 2), self.noise(100, 0.5, 3)

    def own(self) -> Array:
        """What a rank does before it exchanges: its wait for data, and what its device works beyond the usual."""
        data, forward, compute = self.usual()
        late = 0.0 if self.compute is None else self.compute - compute
        own_data = data if self.data is None else self.data
        own_forward = forward if self.forward is None else self.forward
        return np.asarray(own_data + own_forward + late, np.float64)

    def walls(self) -> Array:
        """Of each step, as all wait for the last."""
        return np.asarray(self.own().max(axis=1) + 60 + EXCHANGE_MS, np.float64)

    def reduced(self) -> ReducedFrames:
        numbers = [rank for rank in range(self.ranks) if rank not in self.absent]
        hosts = sorted({rank // self.per_host for rank in numbers})
        frames = {self.host(host * self.per_host): self._frames(host, numbers) for host in hosts}
        indices = tuple(self._index(host, numbers, frames) for host in hosts)
        return ReducedFrames(folder=Path("/nowhere"), hosts=indices, problems=(), frames=frames)

    def _index(self, host: int, numbers: Sequence[int], frames: Mapping[str, Mapping[str, pl.DataFrame]]) -> Index:
        name = self.host(host * self.per_host)
        place = self.places or [(rank, 0, 0) for rank in range(self.ranks)]
        none = (None, None, None)
        return Index(
            schema=REDUCED_SCHEMA,
            version="0",
            host=name,
            world_size=self.ranks,
            ranks=tuple(
                ReducedRank(rank, dp=dp, pp=pp, tp=tp, exchange=("backward", "optimizer", "other"))
                for rank in numbers
                if rank // self.per_host == host
                for dp, pp, tp in [none if self.places == () else place[rank]]
            ),
            groups=tuple(self.groups),
            tables={table: TableFile(frames[name][table].height, 0, "") for table in SCHEMAS},
            source="",
        )

    def _frames(self, host: int, numbers: Sequence[int]) -> dict[str, pl.DataFrame]:
        mine = [rank for rank in numbers if rank // self.per_host == host]
        frames = {"steps": self._steps(host, mine)}
        for table, rows in self.rows.items():
            here = [
                row for row in rows if (row["rank"] in mine if row.get("rank") is not None else row["node"] == host)
            ]
            frames[table] = pl.DataFrame([{k: v for k, v in row.items() if k != "node"} for row in here])
        return {table: shaped(table, frames.get(table)) for table in SCHEMAS}

    def _steps(self, host: int, mine: Sequence[int]) -> pl.DataFrame:
        data, forward, compute = self.usual()
        data = data if self.data is None else self.data
        forward = forward if self.forward is None else self.forward
        compute = compute if self.compute is None else self.compute
        wall = np.repeat(self.walls()[:, None], self.ranks, axis=1) if self.wall is None else self.wall
        step, rank = (part.ravel() for part in np.meshgrid(np.arange(self.steps), np.array(mine), indexing="ij"))
        start = np.concatenate([[0.0], np.cumsum(wall.max(axis=1))[:-1]])
        windowed = pl.Series(np.isin(step, list(self.window_steps())))

        def us(values: Array) -> npt.NDArray[np.int64]:
            return np.rint(values[step, rank] * 1000).astype(np.int64)

        phases = {"data_wait_us": us(data), "forward_us": us(forward), "optimizer_us": us(np.full_like(wall, 10.0))}
        frame = pl.DataFrame(
            {
                "rank": rank,
                "step": step,
                "start_us": BEGIN_US + np.rint(start[step] * 1000).astype(np.int64) + self.shift_us.get(host, 0),
                "wall_us": us(wall),
                **(phases if self.phases else {}),
                "compute_us": pl.Series(us(compute)).set(~windowed, None),
                "label": np.where(windowed.to_numpy(), WINDOW, 0),
            }
        )
        if self.gc is not None:
            frame = frame.with_columns(gc_us=pl.Series(us(self.gc)))
        if self.tokens is not None:
            frame = frame.with_columns(tokens=pl.Series(us(self.tokens / 1000)))
        return frame


def shaped(table: str, frame: pl.DataFrame | None) -> pl.DataFrame:
    schema = SCHEMAS[table]
    if frame is None or frame.is_empty():
        return pl.DataFrame(schema=schema)
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None).alias(name)).cast(kind, strict=False)
        for name, kind in schema.items()
    )


def line(rank: int, phase: str, number: int, samples: int, **more: Any) -> dict[str, Any]:
    where = {"file": "/home/user/train.py", "line": number, "function": "main", "leaf": "", "waiting": False}
    return {"rank": rank, "phase": phase, "samples": samples, **where, **more}


def clock(rank: int, mhz: float, second: float = 0.0) -> dict[str, Any]:
    return {
        "rank": rank,
        "device": "gpu:0",
        "metric": "gpu_sm_clock_mhz",
        "unit": "MHz",
        "start_us": BEGIN_US + int(second * 1e6),
        "count": 10,
        "mean": mhz,
        "least": mhz,
        "most": mhz,
    }


def cores(node: int, busy: float) -> dict[str, Any]:
    reading = {"metric": "busy_cores", "unit": "cores", "start_us": BEGIN_US, "count": 10, "mean": busy}
    return {"rank": None, "node": node, "device": None, "least": busy, "most": busy, **reading}


def schedule(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """1F1B: as many forward passes ahead as there are stages behind, then one of each in turns."""
    ahead = min(stages - 1 - stage, count)
    order = [("forward", number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            order.append(("forward", ahead + number))
        order.append(("backward", number))
    return order


class Pipeline(Struct, kw_only=True):
    """dp x pp x tp ranks (tp fastest, then dp). A backward pass lasts twice as long as a forward one.

    factor: (steps, dp, stages, microbatches). slow: factors of ranks, for which other slots wait inside their passes.
    """

    dp: int = 4
    stages: int = 3
    tp: int = 1
    count: int = 6
    steps: int = 60
    windows: int = 30
    factor: Array | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    recorded: bool = True  # work and calls of windows
    seed: int = 3
    absent: Sequence[int] = ()

    def base(self) -> Array:
        shape = (self.steps, self.dp, self.stages, self.count)
        return np.random.default_rng(self.seed).normal(10, 0.05, shape)

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank // self.tp % self.dp, rank // self.tp // self.dp, rank % self.tp

    def spent(self) -> Array:
        spent = self.base() * (1.0 if self.factor is None else self.factor)
        for rank, more in self.slow.items():
            dp, stage, _ = self.place(rank)
            spent[:, dp, stage] *= more
        return np.asarray(spent, np.float64)

    def play(self, spent: Array) -> tuple[dict[tuple[int, int, int, str, int], tuple[float, float, float]], Array]:
        """By (step, dp, stage, kind, microbatch): free from, begin, end. And steps, with 20 ms behind the passes."""
        times: dict[tuple[int, int, int, str, int], tuple[float, float, float]] = {}
        orders = [schedule(stage, self.stages, self.count) for stage in range(self.stages)]
        lasted = np.zeros(self.steps)
        for step in range(self.steps):
            for dp in range(self.dp):
                done, free = [0] * self.stages, [0.0] * self.stages
                while any(done[stage] < len(orders[stage]) for stage in range(self.stages)):
                    for stage in range(self.stages):
                        if done[stage] == len(orders[stage]):
                            continue
                        kind, number = orders[stage][done[stage]]
                        other = stage - 1 if kind == "forward" else stage + 1
                        before = times.get((step, dp, other, kind, number))
                        if 0 <= other < self.stages and before is None:
                            continue
                        begin = max(free[stage], 0.0 if before is None else before[2])
                        end = begin + spent[step, dp, stage, number] * (1 if kind == "forward" else 2)
                        times[step, dp, stage, kind, number] = (free[stage], begin, end)
                        free[stage] = end
                        done[stage] += 1
                lasted[step] = max(lasted[step], *free)
        return times, lasted + 20

    def job(self) -> Job:
        ranks = self.dp * self.stages * self.tp
        spent = self.spent()
        times, lasted = self.play(spent)
        compute = np.zeros((self.steps, ranks))
        job = Job(ranks=ranks, per_host=max(self.tp, 2), steps=self.steps, windows=self.windows, seed=self.seed)
        begins = BEGIN_US * 1000 + np.rint(np.concatenate([[0.0], np.cumsum(lasted)[:-1]]) * 1e6).astype(np.int64)
        work: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        whole = Group(group_id(range(ranks), "default_pg"), tuple(range(ranks)), "default_pg")
        for rank in range(ranks):
            dp, stage, _ = self.place(rank)
            own = spent[:, dp, stage].sum(axis=1) * 3
            if self.slow and rank not in self.slow:  # the slots of a worker wait for the slow one inside their passes
                mates = [other for other in self.slow if self.place(other)[:2] == (dp, stage)]
                own = own / (self.slow[mates[0]] if mates else 1.0)
            compute[:, rank] = own
            for step in job.window_steps():
                last = 0.0
                for kind, number in schedule(stage, self.stages, self.count):
                    free, begin, last = times[step, dp, stage, kind, number]
                    at = {"rank": rank, "step": step}
                    span = {"start_ns": int(begins[step] + begin * 1e6), "end_ns": int(begins[step] + last * 1e6)}
                    work.append({**at, "kind": kind, "microbatch": number, "chunk": 0, **span})
                    received = {"start_ns": int(begins[step] + free * 1e6), "end_ns": span["start_ns"] + 20_000}
                    calls.append({**at, "group": "pp", "sequence": len(calls), "kind": "recv", **received})
                end = {"start_ns": int(begins[step] + last * 1e6), "end_ns": int(begins[step] + lasted[step] * 1e6)}
                calls.append(
                    {"rank": rank, "step": step, "group": whole.id, "sequence": step, "kind": "all_reduce", **end}
                )
        if self.recorded:
            job.rows.update(work=work, collectives=calls)
        job.compute = compute
        job.wall = np.repeat(lasted[:, None], ranks, axis=1)
        job.places = [self.place(rank) for rank in range(ranks)]
        job.groups = (whole,)
        job.absent = self.absent
        return job
