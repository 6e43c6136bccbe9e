"""Facts of the machine and of the loader's rhythm, from tables with known times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.machine import MachineFacts
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.builders import MS, PID, T0, make_tables, step_rows
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


def test_collections_in_steady_steps_are_counted_by_line() -> None:
    steps = step_rows(41)
    pauses = some(of(make_tables(steps=steps, journal=collections(steps, 2, every=2))).pauses)
    assert (pauses.count, pauses.full, pauses.steps, pauses.steps_struck) == (20, 20, 40, 20)  # the first is warm-up
    assert pauses.ms_per_step == pytest.approx(1)
    assert pauses.collected == 60
    assert [(line.place.line, line.count) for line in pauses.lines] == [(30, 20)]


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


def test_a_wait_on_a_machine_that_the_run_fills_is_its_own() -> None:
    cpu = some(of(cores_tables(delay=0.4, cpu_pct=400, threads=16)).cpu)
    assert cpu.run_delay_share == pytest.approx(0.4)
    assert cpu.own_ms_per_step == pytest.approx(40)
    assert cpu.others_ms_per_step == 0
    left = some(of(cores_tables(delay=0.4, cpu_pct=60)).cpu)
    assert (left.own_ms_per_step, left.others_ms_per_step) == (0, pytest.approx(40))
    assert (cpu.threads, cpu.threads_place and cpu.threads_place.line) == (16, 5)


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


def epochs_tables() -> Tables:
    """Epochs of ten steps of 10 ms; between them an iterator is made, and the first batch is waited for."""
    site = {"kind": "site", "what": "DataLoader", "arguments": {"num_workers": "2"}}
    steps: list[dict[str, Any]] = []
    journal: list[dict[str, Any]] = [{**site, "file": TRAIN, "line": 75, "function": "main"}]
    clock = T0
    for epoch in range(5):
        made = {"kind": "loader", "id": 1, "epoch": epoch, "num_workers": 2, "time_ns": clock}
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


def test_starting_workers_for_every_epoch() -> None:
    (fact,) = of(epochs_tables()).epochs or ()
    assert (fact.restarts, fact.num_workers, fact.persistent, fact.kind) == (4, 2, False, "train")
    assert fact.make_ms == pytest.approx(50)
    assert fact.first_wait_ms == pytest.approx(21)
    assert fact.usual_wait_ms == pytest.approx(0.1)
    assert fact.batch_ms is None  # no stacks: then the wait for the first batch is not counted
    assert fact.lost_ms_per_step == pytest.approx(4 * 50 / 50)
    assert fact.site is not None
    assert fact.site.line == 75


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


def test_waves_of_as_many_steps_as_there_are_workers() -> None:
    waves = some(of(wave_tables()).waves)
    assert waves.period == 4
    assert waves.regular == 1
    assert waves.share > 0.9
    assert (waves.wave_wait_ms, waves.other_wait_ms) == (pytest.approx(100), pytest.approx(0.1))


def profiled_tables(slower: float = 2.0, *, ours: bool = False) -> Tables:
    steps = [
        *step_rows(50),
        *step_rows(10, forward_ms=10 * slower - 7, start_ns=T0 + 500 * MS, first_step=50, in_window=True),
    ]
    window = {"kind": "window", "trace": "trace-0.pt.trace.json", "first_step": 50, "steps": 10, "status": "kept"}
    return make_tables(steps=steps, journal=[window if ours else {"kind": "mark", "name": "x"}])


def test_the_steps_of_the_scripts_own_profiler() -> None:
    facts = some(of(profiled_tables()).profiler)
    assert (facts.inside, facts.outside, facts.steps, facts.source) == (10, 49, 60, "journal")
    assert facts.lost_ms_per_step == pytest.approx(10 * 10 / 60)
    assert facts.total_ms_per_step == pytest.approx((500 + 200) / 60)
