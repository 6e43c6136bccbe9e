"""A played run as reduced tables, and the truth about it in a file beside the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ranks_simulated.play import PHASES, Tape
from ranks_simulated.run import Run
from ranks_simulated.scenario import AXES, PLANTS, Floats, Plant
from ranks_simulated.work import python_part
from stepscope.schema import REDUCED_SCHEMA
from stepscope.tables.reduced import (
    BUCKET_NS,
    SCHEMAS,
    STEPS_OF_BLOCK,
    Index,
    ReducedRank,
    bins_of,
    write_host,
)

EPOCH_US = 1_790_000_000_000_000  # when the run began
SAMPLES_PER_SECOND = 20.0
CLOCK_MHZ = 1980.0
LEAST_EVENT_US = 1e4  # of a collection
EXCHANGE = {
    "dp": ("backward", "optimizer"),
    "fsdp": ("forward", "backward", "optimizer"),
    "hsdp": ("forward", "backward", "optimizer"),
    "3d": ("forward", "backward", "optimizer"),
}
# phase -> (line of train.py, its function, where it stands in the library, whether it waits there)
_LINES = {
    "data_wait": (41, "train", "_try_get_data (torch/utils/data/dataloader.py:1131)", True),
    "before_forward": (44, "train", "to (torch/_tensor.py:1010)", False),
    "forward": (47, "train", "linear (torch/nn/functional.py:125)", False),
    "backward": (51, "train", "_engine_run_backward (torch/autograd/graph.py:829)", False),
    "optimizer": (55, "train", "_multi_tensor_adamw (torch/optim/adamw.py:600)", False),
    "other": (59, "train", "emit (logging/__init__.py:1100)", False),
}
_PLANTED_LINE = (63, "augment_on_main", "sub (re.py:185)", False)


def write(run: Run, folder: Path) -> Path:
    """Write the tables of every host that is not missing to folder/reduced, and FOLDER.truth.json beside the folder."""
    scenario, layout = run.scenario, run.layout
    gone = missing(run)
    windowed = _Windowed(run)
    for host in range(scenario.hosts):
        of_host = np.arange(host * scenario.per_host, (host + 1) * scenario.per_host)
        ranks = np.array([rank for rank in of_host if rank not in gone], np.int64)
        if not len(ranks):
            continue
        collectives = windowed.collectives(host, ranks)
        frames = {
            "steps": _steps(run, host, ranks, windowed),
            "collectives": collectives,
            "folded": _folded(collectives),
            "work": windowed.work(host, ranks),
            "lines": _lines(run, ranks),
            "telemetry": _telemetry(run, host, ranks),
            "metrics": _metrics(run, ranks),
            "events": _events(run, host, ranks),
        }
        index = Index(
            schema=REDUCED_SCHEMA,
            version="simulated",
            host=host_name(host),
            world_size=scenario.ranks,
            ranks=tuple(_rank(run, int(rank)) for rank in ranks),
            groups=tuple(group for group in layout.groups if not set(ranks.tolist()).isdisjoint(group.ranks)),
            tables={},
            source=f"seed {scenario.seed}",
            run={"name": scenario.layout, "script": "train.py"},
        )
        write_host(folder, index, frames)
    truth_file(folder).write_text(json.dumps(truth(run, gone), indent=1))
    return folder


def truth_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.truth.json")


def host_name(host: int) -> str:
    return f"node{host:03d}"


def missing(run: Run) -> set[int]:
    """Ranks of which nothing was recorded."""
    scenario, rng = run.scenario, np.random.default_rng([run.scenario.seed, 5])
    count = int(np.ceil(scenario.missing * scenario.ranks))
    kept = {int(rank) for _, hit in run.work.plants if len(hit) <= scenario.per_host for rank in hit}
    gone: set[int] = set(kept) if scenario.culprit_missing else set()
    if scenario.whole_hosts:
        for host in rng.permutation(scenario.hosts):
            ranks = set(range(host * scenario.per_host, (host + 1) * scenario.per_host))
            if len(gone) + len(ranks) <= max(count // 2, scenario.per_host) and not ranks & kept:
                gone |= ranks
    for rank in rng.permutation(scenario.ranks).tolist():
        if len(gone) < count and rank not in kept:
            gone.add(rank)
    return gone


def _rank(run: Run, rank: int) -> ReducedRank:
    layout, told = run.layout, run.scenario.places_told
    return ReducedRank(
        rank=rank,
        process=f"rank-{rank}",
        pid=1000 + rank,
        device=f"cuda:{rank % run.scenario.per_host}",
        # shards are replicas, too: each has batches of its own
        dp=None if not told else rank if run.scenario.layout == "hsdp" else int(layout.d[rank]),
        pp=int(layout.p[rank]) if told else None,
        tp=None if not told else 0 if run.scenario.layout == "hsdp" else int(layout.t[rank]),
        exchange=EXCHANGE[run.scenario.layout],
        exchange_source="collectives in windows",
        samples_per_second=SAMPLES_PER_SECOND if _recorded(run, "python_line") else None,
    )


def _recorded(run: Run, name: str) -> bool:
    """Whether what tells a kind of plant was recorded."""
    return all(plant.recorded for plant in run.scenario.plants if plant.name == name)


def _table(name: str, columns: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame({key: columns.get(key) for key in SCHEMAS[name]}, schema_overrides=SCHEMAS[name])


def _steps(run: Run, host: int, ranks: np.ndarray, windowed: _Windowed) -> pl.DataFrame:
    steps, clock = run.scenario.steps, run.clocks[host]
    start = run.start[:, ranks]
    shown = start + clock.ahead(start)
    begun = np.rint(EPOCH_US + shown[:-1]).astype(np.int64)
    phases = {name: run.phases[name][:, ranks].astype(np.float64) for name in PHASES}
    # a step's data wait reaches to its first forward pass where a loader is seen, else nothing says that it was one
    loader = run.work.loads[ranks] & (_recorded(run, "slow_data") and _recorded(run, "rotating_data"))
    before = phases["data_wait"] + phases["before_forward"]
    phases["data_wait"], phases["before_forward"] = np.where(loader, before, np.nan), np.where(loader, np.nan, before)
    wall = np.nansum(np.stack(list(phases.values())), axis=0)
    computed, in_collectives = windowed.device_times(ranks)
    columns: dict[str, Any] = {
        "rank": np.tile(ranks, steps),
        "step": np.repeat(np.arange(steps), len(ranks)),
        "start_us": begun.ravel(),
        "wall_us": wall.ravel(),
        **{f"{name}_us": _known(values) for name, values in phases.items()},
        "gc_us": run.gc[:, ranks].ravel() if _recorded(run, "gc") else None,
        "device_us": wall.ravel(),
        "compute_us": _known(computed),
        "collective_us": _known(in_collectives),
        "samples": np.full(steps * len(ranks), 32),
        "tokens": run.tokens[:, ranks].ravel() if _recorded(run, "sequence_length") else None,
        "label": np.repeat(run.labels, len(ranks)),
    }
    return _table("steps", columns)


def _known(values: Floats) -> pl.Series:
    return pl.Series(np.rint(values.ravel()), nan_to_null=True)


class _Windowed:
    """What windows recorded, of all ranks, in true microseconds; told host by host."""

    def __init__(self, run: Run) -> None:
        self.run, scenario = run, run.scenario
        self.numbers = np.arange(scenario.ranks).reshape(run.layout.shape)
        self.steps = sorted(run.windowed)
        rng = np.random.default_rng([scenario.seed, 6])
        self._calls: dict[int, list[dict[str, np.ndarray]]] = {}
        union = []
        calls: list[dict[str, np.ndarray]] = []
        for step in self.steps:
            rows = list(self._rows(step, run.windowed[step], rng))
            union.append(_union(rows, scenario.ranks))
            calls += rows
        self.union = np.array(union).reshape(-1, scenario.ranks)
        self.computed = np.array([run.windowed[step].computed for step in self.steps]).reshape(-1, scenario.ranks)
        self.calls = _by_rank(calls)
        self.pieces = _by_rank(list(self._pieces()))

    def _rows(self, step: int, tape: Tape, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
        layout, outliers = self.run.layout, self.run.scenario.clocks.outliers
        for kind, axis, number, part, size, start, end in tape.calls:
            ranks = self.numbers[part].ravel()
            end = end.ravel().copy()
            if layout.spans_hosts[axis] and kind not in ("send", "recv"):
                # the stamp alone is late: the rank goes on when it was let go
                end += (rng.random(len(end)) < outliers) * rng.uniform(1e3, 3e3, len(end))
            same = {"step": step, "sequence": number, "bytes": size}
            yield {
                "rank": ranks,
                **{name: np.full(len(ranks), value) for name, value in same.items()},
                "group": layout.ids[axis][ranks],
                "kind": np.full(len(ranks), kind, object),
                "start": start.ravel() + rng.uniform(0, 2, len(ranks)),
                "end": end,
            }

    def _pieces(self) -> Iterator[dict[str, np.ndarray]]:
        for step in self.steps:
            for kind, batch, part, start, end in self.run.windowed[step].work:
                ranks = self.numbers[part].ravel()
                yield {
                    "rank": ranks,
                    "step": np.full(len(ranks), step),
                    "kind": np.full(len(ranks), kind, object),
                    "microbatch": np.full(len(ranks), batch),
                    "start": start.ravel(),
                    "end": end.ravel(),
                }

    def device_times(self, ranks: np.ndarray) -> tuple[Floats, Floats]:
        """(computing, in collectives), NaN outside windows; shape (steps, ranks)."""
        found = []
        for known in (self.computed, self.union):
            values = np.full((self.run.scenario.steps, len(ranks)), np.nan)
            values[self.steps] = known[:, ranks]
            found.append(values)
        return found[0], found[1]

    def collectives(self, host: int, ranks: np.ndarray) -> pl.DataFrame:
        return _table("collectives", {**self._of(self.calls, host, ranks), "basis": "device"})

    def work(self, host: int, ranks: np.ndarray) -> pl.DataFrame:
        return _table("work", {**self._of(self.pieces, host, ranks), "chunk": 0})

    def _of(self, columns: dict[str, np.ndarray], host: int, ranks: np.ndarray) -> dict[str, Any]:
        """The rows of a host's ranks, by its own clock, in order of step and rank."""
        if not columns:
            return {}
        low, high = np.searchsorted(columns["rank"], (host * self.run.scenario.per_host, ranks[-1] + 1))
        mine = {name: values[low:high] for name, values in columns.items()}
        kept = np.isin(mine["rank"], ranks)
        mine = {name: values[kept] for name, values in mine.items()}
        order = np.lexsort((mine["start"], mine["rank"], mine["step"]))
        clock = self.run.clocks[host]
        found: dict[str, Any] = {}
        for name, values in mine.items():
            values = values[order]
            if name in ("start", "end"):
                shown = values + clock.ahead(values)
                found[f"{name}_ns"] = EPOCH_US * 1000 + np.rint(shown * 1000).astype(np.int64)
            else:
                found[name] = values
        return found


def _by_rank(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if not rows:
        return {}
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    order = np.argsort(columns["rank"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _union(rows: list[dict[str, np.ndarray]], ranks: int) -> Floats:
    """Time of each rank in any of the calls."""
    start, end = np.zeros((len(rows), ranks)), np.zeros((len(rows), ranks))
    for number, row in enumerate(rows):
        start[number, row["rank"]], end[number, row["rank"]] = row["start"], row["end"]
    order = np.argsort(start, axis=0)
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    reached = np.maximum.accumulate(np.concatenate([np.zeros((1, ranks)), end]), axis=0)[:-1]
    return np.maximum(0, end - np.maximum(start, reached)).sum(axis=0)


def _folded(collectives: pl.DataFrame) -> pl.DataFrame:
    if collectives.is_empty():
        return pl.DataFrame(schema=SCHEMAS["folded"])
    took = ((collectives["end_ns"] - collectives["start_ns"]) / 1000).round().cast(pl.Int64)
    frame = collectives.select("rank", "group", "kind", "bytes", block=pl.col("step") // STEPS_OF_BLOCK).with_columns(
        took=took, bin=pl.Series(bins_of(took.to_numpy()), dtype=pl.Int64)
    )
    keys = ["rank", "block", "group", "kind"]
    counted = frame.group_by(*keys, "bin").agg(counts=pl.len()).sort("bin")
    sketches = counted.group_by(keys).agg(bins=pl.col("bin"), counts=pl.col("counts"))
    sums = frame.group_by(keys).agg(
        count=pl.len(),
        bytes=pl.col("bytes").sum(),
        sum_us=pl.col("took").sum(),
        least_us=pl.col("took").min(),
        most_us=pl.col("took").max(),
    )
    return (
        sums.join(sketches, on=keys)
        .sort(keys)
        .select(pl.col(name).cast(kind) for name, kind in SCHEMAS["folded"].items())
    )


def _lines(run: Run, ranks: np.ndarray) -> pl.DataFrame:
    """Samples of the line of each phase; of a planted line, its part of its phase."""
    if not _recorded(run, "python_line"):
        return pl.DataFrame(schema=SCHEMAS["lines"])
    rng = np.random.default_rng([run.scenario.seed, 9, int(ranks[0])])
    planted: dict[int, float] = {}
    for plant, hit in run.work.plants:
        if plant.name == "python_line":
            lost = plant.size * run.scenario.step_ms * 1e3 * run.scenario.steps * (1 - plant.since)
            planted.update({int(rank): lost for rank in hit})
    phase_of_plant = {"other": "other", "before": "before_forward"}[python_part(run.scenario)]
    rows: list[tuple[Any, ...]] = []
    for rank in ranks.tolist():
        loads = bool(run.work.loads[rank])
        for phase, (line, function, leaf, waiting) in _LINES.items():
            spent = float(run.phases[phase][:, rank].sum(dtype=np.float64))
            if phase == "before_forward" and loads:
                phase_told = "data_wait"  # the phase reaches to the first forward pass
            else:
                phase_told = phase if phase != "data_wait" or loads else "before_forward"
            own = planted.get(rank, 0.0) if phase == phase_of_plant else 0.0
            rows.append((rank, phase_told, "train.py", line, function, leaf, waiting, spent - own))
            if own:
                rows.append((rank, phase_told, "train.py", *_PLANTED_LINE, own))
    names = ("rank", "phase", "file", "line", "function", "leaf", "waiting")
    columns: dict[str, Any] = {name: [row[number] for row in rows] for number, name in enumerate(names)}
    expected = np.maximum(0, np.array([row[-1] for row in rows])) * 1e-6 * SAMPLES_PER_SECOND
    columns["samples"] = rng.poisson(expected)
    return _table("lines", columns).filter(pl.col("samples") > 0)


def _telemetry(run: Run, host: int, ranks: np.ndarray) -> pl.DataFrame:
    scenario = run.scenario
    rng = np.random.default_rng([scenario.seed, 10, host])
    width = BUCKET_NS / 1e9 * 1e6
    clock = run.clocks[host]
    start = run.start[:, ranks[0]]
    count = max(1, int(start[-1] // width))
    begun = np.arange(count) * width
    shown = np.rint(EPOCH_US + begun + clock.ahead(begun)).astype(np.int64)
    # how much of a bucket each planted cause is on: looked up at ten times in it
    steps = np.clip(np.searchsorted(start, begun[:, None] + width * np.arange(0.05, 1, 0.1)) - 1, 0, scenario.steps - 1)
    frames = []
    for rank in ranks.tolist():
        lowered, on = np.zeros(count), np.zeros(count)
        for plant, hit in run.work.plants:
            if rank in hit and plant.name == "thermal":
                on = run.work.hot(steps, plant).mean(axis=1)
                slower = 2 * plant.size * scenario.step_ms * 1000 / run.work.computing
                lowered = on * (1 - 1 / (1 + slower))
        readings = (
            ("gpu_sm_clock_mhz", "MHz", CLOCK_MHZ * (1 - lowered), 4.0, -np.where(on > 0, 0.15 * CLOCK_MHZ, 15)),
            ("gpu_sm_clock_max_mhz", "MHz", np.full(count, CLOCK_MHZ), 0.0, np.zeros(count)),
            ("gpu_temperature_c", "C", 62 + 4 * rng.random() + 22 * on, 0.5, np.full(count, -1.0)),
            ("gpu_power_w", "W", 620 - 90 * on, 6.0, np.full(count, -60.0)),
        )
        if not all(_recorded(run, name) for name in ("thermal", "slow_gpu", "slow_host")):
            readings = ()
        device = f"gpu:{rank % scenario.per_host}"
        frames += [_readings(rng, rank, device, *reading, shown) for reading in readings]
    if _recorded(run, "other_processes"):
        busy = np.full(count, 0.0)
        for plant, hit in run.work.plants:
            if plant.name == "other_processes" and set(ranks.tolist()) <= set(hit.tolist()):
                busy += 44.0 * work_on(run, plant, steps)
        frames.append(_readings(rng, None, None, "busy_cores", "cores", 18 + busy, 0.5, np.full(count, -3.0), shown))
    return pl.concat(frames) if frames else pl.DataFrame(schema=SCHEMAS["telemetry"])


def work_on(run: Run, plant: Plant, steps: np.ndarray) -> Floats:
    return (steps >= plant.since * run.scenario.steps).mean(axis=1)


def _readings(
    rng: np.random.Generator,
    rank: int | None,
    device: str | None,
    metric: str,
    unit: str,
    mean: Floats,
    noise: float,
    below: Floats,
    start_us: np.ndarray,
) -> pl.DataFrame:
    mean = np.round(mean + noise * rng.standard_normal(len(mean)), 1)
    columns = {
        "rank": rank,
        "device": device,
        "metric": metric,
        "unit": unit,
        "start_us": start_us,
        "count": 10,
        "mean": mean,
        "least": np.floor(mean + below),
        "most": np.ceil(mean - below * (metric != "gpu_sm_clock_mhz")),
    }
    return _table("telemetry", columns)


def _metrics(run: Run, ranks: np.ndarray) -> pl.DataFrame:
    """The loss, of rank 0 alone."""
    if 0 not in ranks:
        return pl.DataFrame(schema=SCHEMAS["metrics"])
    blocks = np.arange((run.scenario.steps + STEPS_OF_BLOCK - 1) // STEPS_OF_BLOCK)
    loss = 2.0 + 8.0 / np.sqrt(1 + blocks)
    columns = {
        "rank": 0,
        "block": blocks,
        "name": "loss",
        "count": STEPS_OF_BLOCK,
        "mean": loss,
        "least": loss - 0.2,
        "most": loss + 0.2,
        "last": loss,
        "not_finite": 0,
    }
    return _table("metrics", columns)


def _events(run: Run, host: int, ranks: np.ndarray) -> pl.DataFrame:
    hidden = {"gc": "gc", "checkpoint": "checkpoint", "allocator_retries": "retry"}
    unseen = {kind for name, kind in hidden.items() if not _recorded(run, name)}
    mine = set(ranks.tolist())
    rows = [each for each in run.happenings if each.rank in mine and each.kind not in unseen]
    if not rows:
        return pl.DataFrame(schema=SCHEMAS["events"])
    begun = np.array([run.start[each.step, each.rank] for each in rows])
    saved = [each.kind == "checkpoint" for each in rows]
    columns = {
        "rank": [each.rank for each in rows],
        "step": [each.step for each in rows],
        "start_us": np.rint(EPOCH_US + begun + run.clocks[host].ahead(begun)).astype(np.int64),
        "duration_us": [round(each.duration_us) for each in rows],
        "kind": [each.kind for each in rows],
        "file": ["train.py" if each else None for each in saved],
        "line": [70 if each else None for each in saved],
        "function": ["save" if each else None for each in saved],
        "text": ["" for _ in rows],
    }
    return _table("events", columns).sort("step", "rank")


def truth(run: Run, gone: set[int]) -> dict[str, Any]:
    """What a verdict is held against. Losses are of the mean steady step, by playing it without the plant."""
    scenario = run.scenario
    walls = run.wall_us[:, run.steady].mean(axis=1)
    return {
        "layout": scenario.layout,
        "shape": scenario.shape,
        "ranks": scenario.ranks,
        "steps": scenario.steps,
        "seed": scenario.seed,
        "step_ms": walls[0] / 1000,
        "missing": sorted(gone),
        "plants": [
            _told(run, plant, hit, float(walls[number + 1] - walls[0]) / -1000, float(1 - walls[number + 1] / walls[0]))
            for number, (plant, hit) in enumerate(run.work.plants)
        ],
        "clocks": _clocks(run),
        "calls": _calls(run),
    }


def _calls(run: Run) -> list[dict[str, Any]]:
    """Of each kind of collective in windows: mean wait for the last member, and transfer, of a rank's call."""
    waits: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for tape in run.windowed.values():
        for kind, axis, _, _, _, start, end in tape.calls:
            if kind not in ("send", "recv"):
                latest = start.max(axis=tuple(number - 1 for number in AXES[axis]), keepdims=True)
                waits.setdefault((axis, kind), []).append(
                    (float((latest - start).mean()), float((end - latest).mean()))
                )
    return [
        {"axis": axis, "kind": kind, "wait_ms": wait / 1000, "transfer_ms": transfer / 1000}
        for (axis, kind), found in sorted(waits.items())
        for wait, transfer in [np.mean(found, axis=0).tolist()]
    ]


def _told(run: Run, plant: Plant, hit: np.ndarray, loss_ms: float, share: float) -> dict[str, Any]:
    kinds, recorded, unrecorded = PLANTS[plant.name]
    if plant.name == "python_line" and python_part(run.scenario) == "before":
        unrecorded = (*unrecorded, "data")  # the phase reaches from the fetch to the forward pass
    one = len(hit) <= run.scenario.per_host
    crossing = {axis for axis, spans in run.layout.spans_hosts.items() if spans}
    return {
        "name": plant.name,
        "size": plant.size,
        "recorded": plant.recorded,
        "kinds": kinds,
        "causes": recorded if plant.recorded else unrecorded,
        "ranks": hit.tolist() if one else [],
        "hosts": sorted({host_name(int(rank) // run.scenario.per_host) for rank in hit}) if one else [],
        "groups": sorted({str(run.layout.ids[axis][rank]) for axis in crossing for rank in hit if axis != "all"})
        if plant.name == "slow_link"
        else [],
        "stage": run.layout.shape[0] - 1 if plant.name == "heavy_stage" else None,
        "excess_ms": plant.size * run.scenario.step_ms,
        "loss_ms": loss_ms,
        "loss_share": share,
    }


def _clocks(run: Run) -> list[dict[str, Any]]:
    """Of each host and window; the offset in the middle between its first step's begin and its last one's end."""
    rows = []
    for host, clock in enumerate(run.clocks):
        for first, begin, end in run.window_spans():
            rows.append(
                {
                    "host": host_name(host),
                    "window": first,
                    "offset_us": float(clock.ahead((begin + end) / 2)),
                    "rate_ppm": clock.rate_ppm(begin, end),
                    "changes": clock.changes(begin, end),
                    "set_us": [amount for at, length, amount in clock.slews if length == 0 and at < begin],
                }
            )
    return rows
