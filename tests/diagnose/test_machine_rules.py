"""Rules on threads, clocks and storage: each speaks of its loss with what it stands on, and keeps quiet otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.input import is_network
from stepscope.diagnose.machine import numa_caveat, numa_evidence
from stepscope.model import Finding
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TRAIN
from tests.analyze.test_machine import cores_tables
from tests.analyze.test_machine_views import (
    STRANGER,
    TWO_NODES,
    gpu_rows,
    gpu_tables,
    numa_tables,
    storage_rows,
    storage_tables,
)
from tests.analyze.test_pool import LARGE, SMALL, pool_tables
from tests.builders import PID, rank_info, step_rows

THREADS, OTHERS, CLOCKS = "system.threads_beyond_cores", "system.other_processes", "system.gpu_clocks"


def found(tables: Tables, rule: str) -> Finding | None:
    findings = [finding for finding in diagnose(analyze(tables)).findings if finding.rule == rule]
    assert len(findings) <= 1
    if findings:
        assert all(evidence.source for evidence in findings[0].evidence)
        assert findings[0].gain_ceiling >= findings[0].share > 0
    return findings[0] if findings else None


def spoken(tables: Tables, rule: str) -> Finding:
    finding = found(tables, rule)
    assert finding is not None
    return finding


def missing(tables: Tables, rule: str) -> str | None:
    return next((one.needs for one in diagnose(analyze(tables)).abstained if one.rule == rule), None)


# ------------------------------------------------------------------------------------------------------ threads


def test_threads_that_sleep_in_turn_cost_what_fewer_would_save() -> None:
    site = {"kind": "site", "what": "set_num_threads", "arguments": {"argument_0": "16"}, "file": TRAIN, "line": 5}
    finding = spoken(pool_tables(**SMALL, others=1.0, journal=[site]), THREADS)
    assert finding.share == pytest.approx(0.68, abs=0.1)
    assert 0.69 < finding.gain_ceiling < 0.95
    assert [place.line for place in finding.where] == [5]
    assert "set_num_threads(2) at train.py:5" in finding.fix
    assert {evidence.metric for evidence in finding.evidence} >= {"main thread asleep", "torch threads per rank"}
    assert finding.confidence == "medium"


def test_threads_that_no_line_set_have_no_line_and_a_name_to_set() -> None:
    finding = spoken(pool_tables(**LARGE), THREADS)
    assert finding.where == ()
    assert "OMP_NUM_THREADS=2" in finding.fix


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_fit_are_healthy(threads: int) -> None:
    assert found(pool_tables(**SMALL, threads=threads), THREADS) is None


def test_others_are_blamed_where_they_have_the_cores() -> None:
    run: dict[str, Any] = {"main": 0.3, "delay": 0.65, "slices": 20, "pool": 0.05, "pool_delay": 2.0, "others": 1.65}
    tables = pool_tables(**run)
    assert found(tables, THREADS) is None
    finding = spoken(tables, OTHERS)
    metrics = {evidence.metric: evidence.value for evidence in finding.evidence}
    assert metrics["CPU use of others"] == pytest.approx(1.65)
    assert metrics["moves of the main thread to another core"] == 3


def test_others_that_use_no_core_are_not_blamed_for_an_idle_one() -> None:
    assert found(pool_tables(main=0.3, delay=0.4, pool=0.0, pool_delay=0.0, others=0.02), OTHERS) is None


# ------------------------------------------------------------------------------------------------------- clocks


def test_a_gpu_below_its_clock_costs_its_part_of_the_busy_time() -> None:
    finding = spoken(gpu_tables(gpu_rows(clock=1500, reasons=0x4, limit_w=400)), CLOCKS)
    assert finding.share == pytest.approx(0.9 * 0.25)
    assert finding.cost_ms_per_step == pytest.approx(0.9 * 25)
    assert finding.confidence == "low"  # no window tells how much of the step is the device's
    assert "power limit" in finding.fix
    assert "1500 of 2000 MHz" in finding.title


@pytest.mark.parametrize(
    "options", [{"clock": 1950}, {"reasons": 0}, {"reasons": 0x4}, {"seconds": 8}, {"reasons": 0x1}]
)
def test_gpus_that_keep_their_clock_or_work_at_their_power_are_healthy(options: dict[str, Any]) -> None:
    assert found(gpu_tables(gpu_rows(**options)), CLOCKS) is None


def test_of_several_gpus_the_slowest_speaks() -> None:
    both = gpu_tables(gpu_rows(clock=1800), gpu_rows("gpu:1", clock=1200))
    finding = spoken(both, CLOCKS)
    assert finding.title.startswith("GPU 1 (2 of 2 GPUs) runs at 1200 of 2000 MHz")


def test_clocks_are_not_judged_without_a_gpu_or_its_readings() -> None:
    assert "clocks" in str(missing(gpu_tables(), CLOCKS))
    on_cpu = gpu_tables(gpu_rows(), ranks=[rank_info()])
    abstained = next(one for one in diagnose(analyze(on_cpu)).abstained if one.rule == CLOCKS)
    assert abstained.quiet


def test_processes_of_others_on_the_gpu_are_shown() -> None:
    shown = {one.metric: one.value for one in spoken(gpu_tables(gpu_rows(pids=(PID, STRANGER))), CLOCKS).evidence}
    assert shown["processes of others on gpu:0"] == 1
    assert shown["memory they hold on gpu:0"] == 2_000_000_000
    alone = spoken(gpu_tables(gpu_rows()), CLOCKS)
    assert not [one for one in alone.evidence if "others" in one.metric]


# ------------------------------------------------------------------------------------------------ storage, NUMA


def slow_loader(*rows: dict[str, Any]) -> tuple[dict[str, object], str]:
    """(figures, advice) of a slow loader beside these readings of storage."""
    steps = step_rows(400, data_wait_ms=60, forward_ms=34)
    site = {"kind": "site", "what": "DataLoader", "arguments": {"num_workers": "0"}, "file": TRAIN, "line": 9}
    finding = spoken(storage_tables(*rows, steps=steps, journal=[site]), "input.loader_bound")
    return {one.metric: one.value for one in finding.evidence}, finding.fix


def test_a_network_file_system_is_named_with_what_to_do() -> None:
    figures, advice = slow_loader(*storage_rows())
    assert figures["file system of the data"] == "lustre at /scratch"
    assert figures["of it not in the page cache"] == pytest.approx(0.5)
    assert figures["blocked for a disk or network storage"] == pytest.approx(0.25, abs=0.03)
    assert "The data lies on lustre at /scratch" in advice
    assert "node-local" in advice


def test_a_cache_that_warms_up_is_told_before_anything_else() -> None:
    assert "page cache" in slow_loader(*storage_rows(device=40e6, until=15))[1]


def test_warm_local_files_and_few_reads_ask_for_nothing() -> None:
    local = [row for row in storage_rows(device=0) if row.get("device") != "lustre:/scratch"]
    for rows in (local, (), tuple(storage_rows(asked=1e3, device=0))):
        figures, advice = slow_loader(*rows)
        assert ("read from the device" in figures) is (rows is local)
        assert "page cache" not in advice
        assert "storage" not in advice


@pytest.mark.parametrize(
    ("kind", "far"), [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("tmpfs", False)]
)
def test_kinds_of_file_systems(kind: str, far: bool) -> None:
    assert is_network(kind) is far


def test_a_main_thread_away_from_its_gpu_is_shown_and_advised_upon() -> None:
    away = analyze(numa_tables(TWO_NODES, 0, 0, 0, 2))
    assert {evidence.metric for evidence in numa_evidence(away)} == {
        "nodes of memory the main thread ran on",
        "main thread on another node than its GPU",
    }
    assert "numactl" in numa_caveat(away)
    near = analyze(numa_tables(TWO_NODES, 2, 3))
    assert (list(numa_evidence(near)), numa_caveat(near)) == ([], "")


def test_a_quota_that_one_thread_exceeds_has_nothing_but_the_quota_to_raise() -> None:
    quota = {"hardware": {"affinity": [0, 1, 2, 3], "cgroup_cpu_limit": 0.2}}
    tables = cores_tables(delay=0.8, cpu_pct=20, throttled=0.35, threads=1, manifests=[quota])
    finding = spoken(tables, "system.cpu_throttled")
    assert finding.fix == "Ask for a larger quota"
    assert finding.try_ == ()
    assert finding.share == pytest.approx(0.35)


def test_a_wait_beyond_a_quota_is_of_those_who_use_the_processors() -> None:
    quota = {"hardware": {"affinity": [0, 1], "cgroup_cpu_limit": 0.2}}
    run: dict[str, Any] = {"main": 0.18, "delay": 0.82, "pool": 0.0, "pool_delay": 0.0, "others": 1.82}
    assert spoken(pool_tables(**run, threads=1, manifests=[quota]), OTHERS).share == pytest.approx(0.82)
