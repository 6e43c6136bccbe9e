"""Facts of the machine, of the loader's rhythm, of threads and telemetry, windows and regions, from known times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.machine import CpuFacts, MachineFacts, PoolFacts
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, Trace, stack, steps_with_window
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.records import some

SECOND = 1000 * MS
FOUR_CORES = {"hardware": {"affinity": [0, 1, 2, 3]}}


def of(tables: Tables) -> MachineFacts:
    return some(analyze(tables).machine)


def telemetry(seconds: int, rates: dict[str, float], *, levels: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Readings once a second of the training process: counters that grow by a rate, and figures that stay."""
    rows: list[dict[str, Any]] = []
    for second in range(seconds):
        time = T0 + second * SECOND
        rows += [
            {"metric": metric, "time_ns": time, "value": rate * second, "pid": PID} for metric, rate in rates.items()
        ]
        rows += [
            {
                "metric": metric,
                "time_ns": time,
                "value": value,
                "pid": PID if metric in ("cpu_pct", "rss_bytes") else None,
            }
            for metric, value in (levels or {}).items()
        ]
    return rows


def cores_tables(
    *, delay: float, cpu_pct: float, threads: int | None = None, throttled: float | None = None, **more: Any
) -> Tables:
    """A run of 40 s in steps of 100 ms; the main thread waits for a core for `delay` of the time."""
    rates = {"run_delay_ns": delay * 1e9, "involuntary_switches": 50.0, "major_faults": 0.0}
    system = telemetry(40, rates, levels={"cpu_pct": cpu_pct, "psi_cpu_some_pct": 30.0, "load_1m": 3.0})
    if throttled is not None:
        system += [
            {"metric": "cgroup_throttled_ns", "time_ns": T0 + second * SECOND, "value": throttled * 1e9 * second}
            for second in range(40)
        ]
    site = {"kind": "site", "what": "set_num_threads", "arguments": {"argument_0": str(threads)}}
    journal = [{**site, "file": TRAIN, "line": 5, "function": "main"}] if threads else []
    steps = step_rows(400, forward_ms=93)
    return make_tables(**{"steps": steps, "system": system, "journal": journal, "manifests": [FOUR_CORES], **more})


def collections(steps: Sequence[dict[str, Any]], duration_ms: float, every: int = 1) -> list[dict[str, Any]]:
    row = {"kind": "gc", "duration_ns": round(duration_ms * MS), "generation": 2, "collected": 3}
    place = {"file": TRAIN, "line": 30, "function": "train"}
    return [{**row, **place, "time_ns": step["start_ns"] + MS} for step in steps[::every]]


def test_a_collection_between_steps_or_beyond_its_step_is_none_of_the_steps() -> None:
    steps = step_rows(41)
    end = steps[20]["start_ns"] + steps[20]["wall_ns"]
    later = [{**row, "start_ns": row["start_ns"] + 50 * MS} for row in steps[21:]]
    row = {"kind": "gc", "duration_ns": 30 * MS, "generation": 2}
    between = {**row, "time_ns": end + MS}
    across = {**row, "time_ns": end - 2 * MS}
    pauses = some(of(make_tables(steps=steps[:21] + later, journal=[between, across])).pauses)
    assert pauses.count == 1
    assert pauses.longest_ms == pytest.approx(2)
    assert pauses.lines == ()


def test_throttled_time_is_no_more_than_the_wait() -> None:
    manifest = {**FOUR_CORES, "environment": {"OMP_NUM_THREADS": "12"}}
    cpu = some(of(cores_tables(delay=0.3, cpu_pct=300, throttled=2.0, manifests=[manifest])).cpu)
    assert cpu.threads == 12
    assert "OMP_NUM_THREADS" in cpu.threads_source
    assert cpu.throttled_share == pytest.approx(2)
    assert cpu.throttled_ms_per_step == pytest.approx(30)
    assert cpu.own_ms_per_step == cpu.others_ms_per_step == 0


@pytest.mark.parametrize("missing", ["cores", "telemetry", "steps", "most readings"])
def test_nothing_is_said_of_cores_without_their_inputs(missing: str) -> None:
    more: dict[str, Any] = {
        "cores": {"manifests": []},
        "telemetry": {"system": []},
        "steps": {"steps": []},
        "most readings": {"steps": step_rows(40, forward_ms=93)},
    }[missing]
    assert of(cores_tables(delay=0.4, cpu_pct=400, **more)).cpu is None


def growing(count: int = 120, by_ms: float = 0.1, *, jitter_ms: float = 1.0) -> list[dict[str, Any]]:
    """Steps of 10 ms and more whose other time grows, with a jitter that repeats and one stall."""
    rows: list[dict[str, Any]] = []
    start = T0
    for number in range(count):
        other = 1 + by_ms * number + jitter_ms * (number % 3) + (500 if number == 7 else 0)
        (row,) = step_rows(1, other_ms=other, start_ns=start, first_step=number)
        start += row["wall_ns"]
        rows.append(row)
    return rows


def test_a_drift_is_measured_from_its_start_whatever_a_stall_does() -> None:
    drift = some(of(make_tables(steps=growing())).drift)
    assert drift.rising
    assert drift.late_ms - drift.early_ms == pytest.approx(0.1 * 118, rel=0.03)
    assert drift.lost_ms_per_step == pytest.approx(0.1 * 118 / 2, rel=0.03)
    assert max(drift.phases, key=lambda phase: drift.phases[phase]) == "other"


@pytest.mark.parametrize(("early", "late", "rising"), [(0.1, 0.9, False), (0.5, 0.5, True)])
def test_steps_that_only_wait_longer_for_a_core_do_not_grow(early: float, late: float, rising: bool) -> None:
    steps = growing(1200)
    rows = telemetry(90, {"run_delay_ns": early * 1e9})
    for number, row in enumerate(rows):
        row["value"] += (late - early) * 1e9 * max(0, number - 45)
    assert some(of(make_tables(steps=steps, system=rows)).drift).rising is rising


def growing_stacks(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples in six parts of the run; line 20 has more in each."""
    begin, end = steps[0]["start_ns"], steps[-1]["start_ns"] + steps[-1]["wall_ns"]
    parts = [begin + (end - begin) * part // 6 for part in range(7)]
    slow = [f"train ({TRAIN}:11)", f"total ({TRAIN}:20)", "mean (/usr/lib/python3.11/statistics.py:400)"]
    work = [f"train ({TRAIN}:12)", f"linear ({TORCH}/nn/functional.py:1)"]
    stacks = []
    for part in range(6):
        times = {"start_ns": parts[part], "end_ns": parts[part + 1]}
        stacks += [stack(slow, 10 + 20 * part, **times), stack(work, 100, phase="forward", **times)]
    return stacks


def epochs_tables(*, remade: bool = False) -> Tables:
    """Epochs of ten steps of 10 ms; between them an iterator is made, and the first batch is waited for.

    `remade`: of a loader of its own.
    """
    site = {"kind": "site", "what": "DataLoader", "arguments": {"num_workers": "2", "persistent_workers": str(remade)}}
    steps: list[dict[str, Any]] = []
    journal: list[dict[str, Any]] = [{**site, "file": TRAIN, "line": 75, "function": "main"}]
    clock = T0
    for epoch in range(5):
        made = {"kind": "loader", "id": 1, "dataset": 9, "epoch": epoch, "num_workers": 2, "time_ns": clock}
        made |= {"id": 1 + epoch} if remade else {}
        journal.append({**made, "duration_ns": 50 * MS})
        clock += 50 * MS
        common = {"epoch": epoch, "first_step": 10 * epoch}
        first = step_rows(1, data_wait_ms=21, start_ns=clock, first_batch=True, **common)
        clock += first[0]["wall_ns"]
        common["first_step"] += 1
        rest = step_rows(9, data_wait_ms=0.1, forward_ms=3.9, start_ns=clock, first_batch=False, **common)
        clock += 9 * rest[0]["wall_ns"]
        steps += first + rest
    return make_tables(steps=steps, journal=journal)


def wave_tables(period: int = 4) -> Tables:
    steps: list[dict[str, Any]] = []
    clock = T0
    for number in range(80):
        wait = 100 if number % period == 0 else 0.1
        (row,) = step_rows(1, data_wait_ms=wait, start_ns=clock, first_step=number)
        clock += row["wall_ns"]
        steps.append(row)
    made = {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 4, "time_ns": T0 - MS, "duration_ns": MS}
    return make_tables(steps=steps, journal=[made])


def profiled_tables(slower: float = 2.0, *, ours: bool = False) -> Tables:
    steps = [
        *step_rows(50),
        *step_rows(10, forward_ms=10 * slower - 7, start_ns=T0 + 500 * MS, first_step=50, in_window=True),
    ]
    window = {"kind": "window", "trace": "trace-0.pt.trace.json", "first_step": 50, "steps": 10, "status": "kept"}
    return make_tables(steps=steps, journal=[window if ours else {"kind": "mark", "name": "x"}])


TWO_CORES = {"hardware": {"affinity": [0, 1]}}


def pool_tables(
    *,
    main: float,
    delay: float,
    slices: float = 0.0,
    pool: float,
    pool_delay: float,
    pool_slices: float = 0.0,
    others: float | None = 0.0,
    threads: int | None = 16,
    step_ms: int = 100,
    seconds: int = 40,
    **more: Any,
) -> Tables:
    """A run on two cores: shares of wall time that the main thread and the pool used and waited, slices per step."""
    per_second = 1e3 / step_ms
    rates = {"main_cpu_ns": main * 1e9, "run_delay_ns": delay * 1e9, "main_timeslices": slices * per_second}
    rates |= {"pool_cpu_ns": pool * 1e9, "pool_delay_ns": pool_delay * 1e9}
    rates |= {"pool_timeslices": pool_slices * per_second, "migrations": 3.0, "voluntary_switches": 400.0}
    system = telemetry(seconds, rates, levels={"cpu_pct": 100.0 * (main + pool)})
    if others is not None:
        system += [
            {"metric": "busy_cores", "time_ns": T0 + second * SECOND, "value": main + pool + others}
            for second in range(seconds)
        ]
    steps = step_rows(seconds * 1000 // step_ms, forward_ms=step_ms - 7)
    ranks = [rank_info(threads=threads)]
    return make_tables(**{"steps": steps, "system": system, "ranks": ranks, "manifests": [TWO_CORES], **more})


def cpu_of(tables: Tables) -> CpuFacts:
    machine = analyze(tables).machine
    assert machine.cpu is not None
    return machine.cpu


def pool_of(tables: Tables) -> PoolFacts:
    return some(cpu_of(tables).pool)


def lost(tables: Tables) -> tuple[float, float]:
    pool = pool_of(tables)
    assert pool.lost_ms_per_step is not None
    assert pool.at_most_ms_per_step is not None
    return pool.lost_ms_per_step, pool.at_most_ms_per_step


Counts = dict[str, Any]
# Counts of hand-made loops with 16 threads on two cores, steps of 100 ms: what a step took with fewer threads is known.
LARGE: Counts = {"main": 0.18, "delay": 0.38, "slices": 111, "pool": 1.56, "pool_delay": 5.85, "pool_slices": 1655}
SMALL: Counts = {"main": 0.23, "delay": 0.58, "slices": 652, "pool": 0.77, "pool_delay": 6.55, "pool_slices": 10640}


IDLE: Counts = {"main": 0.29, "delay": 0.37, "slices": 909, "pool": 1.23, "pool_delay": 5.1, "pool_slices": 13436}


@pytest.mark.parametrize(
    ("counts", "least", "saved", "most"),
    [
        (LARGE, 10, 17, 35),  # with two threads, though the main thread waited 82 ms: the pool's work is no loss
        ({**SMALL, "others": 1.0}, 50, 69, 95),  # with one thread, on the one core that others left: waking is one
        (IDLE, 45, 80, 95),  # with two; 68 with one
    ],
)
def test_the_loss_lies_around_what_fewer_threads_saved(counts: Counts, least: int, saved: int, most: int) -> None:
    cost, at_most = lost(pool_tables(**counts))
    assert least < cost <= at_most < most
    assert saved <= at_most


def test_a_step_is_not_lost_to_threads_where_others_have_the_cores() -> None:
    cost, _ = lost(
        pool_tables(main=0.06, delay=0.62, slices=20, pool=0.5, pool_delay=7.0, pool_slices=200, others=1.44)
    )
    assert cost < 5
    cost, _ = lost(pool_tables(main=0.4, delay=0.6, pool=0.0, pool_delay=0.0, others=1.6))
    assert cost == 0


@pytest.mark.parametrize("threads", [1, 2, None])
def test_threads_that_fit_and_unknown_ones_lose_nothing(threads: int | None) -> None:
    pool = pool_of(pool_tables(**LARGE, threads=threads))
    assert (pool.lost_ms_per_step, pool.at_most_ms_per_step) == (None, None)


def test_without_the_processors_use_only_what_the_run_used_counts_as_there() -> None:
    alone, unknown = (pool_of(pool_tables(**SMALL, others=others)) for others in (0.0, None))
    assert unknown.others_cores is None
    assert unknown.cores == pytest.approx(1.0)
    assert alone.cores == pytest.approx(2.0)


def test_a_window_with_its_cost() -> None:
    window = {"kind": "window", "trace": "trace-0.pt.trace.json", "first_step": 10, "steps": 2, "bytes": 5000}
    window |= {"stop_duration_ns": 3 * MS, "export_duration_ns": 4 * MS, "confidence": "low", "reason": "short"}
    dropped = {"kind": "window", "trace": "trace-1.pt.trace.json", "status": "dropped"}
    theirs = {"kind": "user_trace", "path": "/logs/a.json"}
    ours, users = analyze(make_tables(steps=steps_with_window(), journal=[window, dropped, theirs])).windows
    assert (ours.owner, ours.steps, ours.low_confidence, ours.bytes) == ("stepscope", 2, True, 5000)
    assert (ours.stop_ms, ours.export_ms) == (3, 4)
    assert ours.overhead_ratio == pytest.approx(2)
    assert (users.owner, users.trace, users.export_ms) == ("user", "/logs/a.json", None)


@pytest.mark.parametrize(
    ("row", "reported", "remedy"),
    [
        ({}, True, None),
        ({"reported": False, "role": "other", "command": "python -I train.py"}, False, "-I"),
        ({"reported": False, "role": "other"}, False, "PYTHONPATH"),
        ({"reported": False, "role": "other", "torch": None}, True, None),
        ({"reported": False, "role": "loader_worker"}, True, None),
    ],
)
def test_silent_processes_get_a_remedy(row: dict[str, Any], reported: bool, remedy: str | None) -> None:
    (process,) = analyze(make_tables(processes=[row])).processes
    assert process.reported is reported
    assert process.remedy is None if remedy is None else remedy in (process.remedy or "")


def test_telemetry_during_training_only() -> None:
    def reading(at_ms: float, metric: str, value: float, pid: int | None = None) -> dict[str, Any]:
        return {"time_ns": T0 + round(at_ms * MS), "metric": metric, "value": value, "pid": pid}

    system = [
        reading(-500, "cpu_pct", 5, PID),
        reading(50, "cpu_pct", 80, PID),
        reading(150, "cpu_pct", 120, PID),
        reading(50, "cpu_pct", 40, PID + 1),
        reading(50, "cpu_pct", 30, PID + 2),
        reading(50, "migrations", 10, PID),
        reading(150, "migrations", 30, PID),
        reading(50, "cgroup_throttled_ns", 0),
        reading(150, "cgroup_throttled_ns", 2e9),
        reading(50, "load_1m", 3),
    ]
    workers = [{"pid": PID + i, "role": "loader_worker"} for i in (1, 2)]
    summary = analyze(make_tables(steps=step_rows(30), system=system, processes=workers)).system
    assert summary["rank_cpu_pct"] == pytest.approx(100)
    assert summary["workers_cpu_pct"] == pytest.approx(70)
    assert summary["rank_migrations_per_s"] == pytest.approx(200)
    assert summary["cgroup_throttled_s"] == pytest.approx(2)
    assert summary["load_1m"] == 3
    assert "gpu_util_pct" not in summary


def test_regions_from_the_journal_and_the_window() -> None:
    steps = steps_with_window()
    region = {"kind": "region", "name": "attention", "duration_ns": 3 * MS, "time_ns": T0}
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            trace.add("aten::mm", row["start_ns"], MS, step=row["step"], category="cpu_op")
            for name in ("my range", "Optimizer.step#SGD.step", f"ProfilerStep#{row['step']}"):
                trace.add(name, row["start_ns"], MS, step=row["step"], category="user_annotation")
    journal = [{**region, "step": step} for step in (5, 6, 10)]  # 10 lies in the window
    regions = analyze(make_tables(steps=steps, journal=journal, events=trace.rows)).regions
    found = {region["name"]: region for region in regions}
    assert set(found) == {"attention", "my range"}
    assert found["attention"]["calls"] == 2
    assert found["attention"]["ms_per_step"] == pytest.approx(6 / 37)
    assert found["my range"]["calls_per_step"] == 1
