"""Rules on the interpreter, the machine and drifting steps: each speaks of its loss, and only of that."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Diagnosis, Finding
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.analyze.test_machine import (
    collections,
    cores_tables,
    growing,
    growing_stacks,
    profiled_tables,
    telemetry,
)
from tests.builders import MS, T0, make_tables, rank_info, step_rows

OWN = ("system.", "host.step_drift")


def judged(tables: Tables) -> Diagnosis:
    return diagnose(analyze(tables))


def only(tables: Tables) -> Finding:
    (finding,) = judged(tables).findings
    analysis = analyze(tables)
    assert finding.evidence
    assert all(evidence.source for evidence in finding.evidence)
    assert finding.fix
    assert finding.caveat
    assert finding.falsified_by
    assert 0 < finding.share <= 1
    assert finding.share <= finding.gain_ceiling <= finding.share + 0.05  # caches, at most
    assert finding.cost_ms_per_step <= analysis.steps[0].mean_ms
    return finding


def needs(tables: Tables) -> dict[str, str]:
    return {abstention.rule: abstention.needs for abstention in judged(tables).abstained}


def own(tables: Tables) -> list[str]:
    return [finding.rule for finding in judged(tables).findings if finding.rule.startswith(OWN)]


# ------------------------------------------------------------------------------------------ garbage collection


def test_collections_that_one_line_asks_for() -> None:
    steps = step_rows(41)
    finding = only(make_tables(steps=steps, journal=collections(steps, 2)))
    assert finding.rule == "system.garbage_collection"
    assert finding.cost_ms_per_step == pytest.approx(2)
    assert finding.share == pytest.approx(0.2)
    assert [(place.line, place.share) for place in finding.where] == [(30, pytest.approx(1))]
    assert "gc.collect()" in finding.fix
    assert "train.py:30" in finding.title


def test_time_of_the_collector_is_not_told_again_as_python() -> None:
    steps = step_rows(41)
    frames = [f"<module> ({TRAIN}:90)", f"train ({TRAIN}:30)", "mean (/usr/lib/python3.11/statistics.py:400)"]
    times = {"start_ns": T0, "end_ns": T0 + 410 * MS}
    stacks = [stack(frames, 20, **times), stack([f"train ({TRAIN}:31)", f"relu ({TORCH}/nn.py:1)"], 80, **times)]
    with_gc = make_tables(steps=steps, stacks=stacks, journal=collections(steps, 2))
    without = make_tables(steps=steps, stacks=stacks)
    assert "host.python_on_critical_path" in {finding.rule for finding in judged(without).findings}
    assert "host.python_on_critical_path" not in {finding.rule for finding in judged(with_gc).findings}


def test_beside_an_accelerator_it_is_a_weak_finding() -> None:
    steps = step_rows(41)
    finding = only(make_tables(steps=steps, journal=collections(steps, 2), ranks=[rank_info(device="cuda")]))
    assert finding.confidence == "low"
    assert "cuda" in finding.caveat


# ------------------------------------------------------------------------------------------------------- cores


def test_threads_beyond_cores() -> None:
    finding = only(cores_tables(delay=0.4, cpu_pct=400, threads=16))
    assert finding.rule == "system.threads_beyond_cores"
    assert finding.cost_ms_per_step == pytest.approx(40)
    assert [place.line for place in finding.where] == [5]
    assert "torch.set_num_threads(4)" in finding.fix
    assert finding.confidence == "medium"


def test_threads_are_not_blamed_for_what_others_took() -> None:
    assert own(cores_tables(delay=0.4, cpu_pct=60, threads=16)) == ["system.other_processes"]


def test_a_quota_that_stops_the_run() -> None:
    finding = only(cores_tables(delay=0.3, cpu_pct=300, throttled=2.0, threads=16))
    assert finding.rule == "system.cpu_throttled"
    assert finding.cost_ms_per_step == pytest.approx(30)
    assert "set_num_threads(4)" in finding.fix


def test_a_quota_that_stops_other_cores_only_is_healthy() -> None:
    assert own(cores_tables(delay=0.01, cpu_pct=300, throttled=2.0)) == []


def test_without_telemetry_the_rules_on_cores_abstain() -> None:
    missing = needs(cores_tables(delay=0.4, cpu_pct=400, threads=16, system=[]))
    for rule in ("threads_beyond_cores", "cpu_throttled", "other_processes", "swapping_or_faults"):
        assert "telemetry" in missing[f"system.{rule}"]


# ----------------------------------------------------------------------------------------- memory and profilers


def pressed(stalled_pct: float, faults_per_s: float, *, device: str | None = None) -> Tables:
    levels = {"psi_memory_some_pct": stalled_pct, "rss_bytes": 5e9}
    system: list[dict[str, Any]] = telemetry(40, {"major_faults": faults_per_s}, levels=levels)
    for row in system:
        if row["metric"].startswith("psi"):
            row["device"] = device
    return make_tables(steps=step_rows(400, forward_ms=93), system=system)


def test_memory_that_is_short() -> None:
    finding = only(pressed(30, 100, device="cgroup"))
    assert finding.rule == "system.swapping_or_faults"
    assert finding.cost_ms_per_step == pytest.approx(30)
    assert finding.confidence == "medium"
    assert only(pressed(30, 100)).confidence == "low"  # the machine's figure, not the cgroup's


@pytest.mark.parametrize(("stalled_pct", "faults_per_s"), [(30, 1), (1, 100), (0, 0)])
def test_faults_without_pressure_and_pressure_without_faults_are_healthy(
    stalled_pct: float, faults_per_s: float
) -> None:
    assert own(pressed(stalled_pct, faults_per_s)) == []


def test_the_scripts_own_profiler() -> None:
    finding = only(profiled_tables())
    assert finding.rule == "system.profiler_overhead"
    assert finding.cost_ms_per_step == pytest.approx(100 / 60)
    assert finding.share == pytest.approx(100 / 700)


def test_a_cheap_profiler_and_none_are_healthy() -> None:
    assert own(profiled_tables(1.1)) == []
    abstained = {a.rule: a for a in judged(make_tables(steps=step_rows(40))).abstained}
    assert abstained["system.profiler_overhead"].quiet


# ------------------------------------------------------------------------------------------------------- drift


def test_steps_that_grow_slower() -> None:
    steps = growing(jitter_ms=0)
    finding = only(make_tables(steps=[step for step in steps if step["wall_ns"] < 100 * MS]))
    assert finding.rule == "host.step_drift"
    assert finding.cost_ms_per_step == pytest.approx(0.1 * 118 / 2, rel=0.05)
    assert "other" in finding.title


def test_a_drift_explains_the_python_of_its_lines() -> None:
    steps = [step for step in growing(jitter_ms=0) if step["wall_ns"] < 100 * MS]
    stacks = growing_stacks(steps)
    findings = {finding.rule: finding for finding in judged(make_tables(steps=steps, stacks=stacks)).findings}
    assert findings["host.step_drift"].explains == (findings["host.python_on_critical_path"].id,)
