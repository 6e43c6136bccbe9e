"""Rules on the interpreter, the machine and drifting steps: each speaks of its loss, and only of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.machine import numa_caveat, numa_evidence
from stepscope.model import Finding
from stepscope.tables.schema import Tables
from tests.analyze.scenes import TORCH, TRAIN, stack
from tests.analyze.test_machine import collections, cores_tables, growing, growing_stacks, profiled_tables, telemetry
from tests.analyze.test_machine_views import (
    STRANGER,
    TWO_NODES,
    gpu_rows,
    gpu_tables,
    numa_tables,
    storage_rows,
    storage_tables,
)
from tests.analyze.test_pool import SMALL, pool_tables
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import values

OWN = ("system.", "host.step_drift")
THREADS, OTHERS, CLOCKS = "system.threads_beyond_cores", "system.other_processes", "system.gpu_clocks"
STEADY = step_rows(41)
GROWING = [step for step in growing(jitter_ms=0) if step["wall_ns"] < 100 * MS]


def findings(tables: Tables) -> dict[str, Finding]:
    found = {finding.rule: finding for finding in diagnose(analyze(tables)).findings}
    for finding in found.values():
        assert all(evidence.source for evidence in finding.evidence)
        assert finding.gain_ceiling >= finding.share > 0
    return found


def own(tables: Tables) -> list[str]:
    return [rule for rule in findings(tables) if rule.startswith(OWN)]


def needs(tables: Tables) -> dict[str, tuple[str, bool]]:
    return {one.rule: (one.needs, one.quiet) for one in diagnose(analyze(tables)).abstained}


def pressed(stalled_pct: float, faults_per_s: float, *, device: str | None = None) -> Tables:
    levels = {"psi_memory_some_pct": stalled_pct, "rss_bytes": 5e9}
    system: list[dict[str, Any]] = telemetry(40, {"major_faults": faults_per_s}, levels=levels)
    for row in system:
        if row["metric"].startswith("psi"):
            row["device"] = device
    return make_tables(steps=step_rows(400, forward_ms=93), system=system)


@pytest.mark.parametrize(
    ("tables", "rule", "cost_ms", "said"),
    [
        (
            lambda: make_tables(steps=STEADY, journal=collections(STEADY, 2)),
            "system.garbage_collection",
            2,
            {"title": "train.py:30", "fix": "gc.collect()", "lines": [30], "confidence": "high"},
        ),
        (
            lambda: make_tables(steps=STEADY, journal=collections(STEADY, 2), ranks=[rank_info(device="cuda")]),
            "system.garbage_collection",
            2,
            {"caveat": "cuda", "confidence": "low"},  # a device may hide it
        ),
        (
            lambda: cores_tables(delay=0.4, cpu_pct=400, threads=16),
            THREADS,
            40,
            {"fix": "torch.set_num_threads(4)", "lines": [5], "confidence": "medium"},
        ),
        (
            lambda: cores_tables(delay=0.3, cpu_pct=300, throttled=2.0, threads=16),
            "system.cpu_throttled",
            30,
            {"fix": "set_num_threads(4)"},
        ),
        (lambda: pressed(30, 100, device="cgroup"), "system.swapping_or_faults", 30, {"confidence": "medium"}),
        # the machine's figure, not the cgroup's
        (lambda: pressed(30, 100), "system.swapping_or_faults", 30, {"confidence": "low"}),
        (profiled_tables, "system.profiler_overhead", 100 / 60, {}),
        (lambda: make_tables(steps=GROWING), "host.step_drift", 0.1 * 118 / 2, {"title": "other"}),
        # no window tells how much of the step is the device's
        (
            lambda: gpu_tables(gpu_rows(clock=1500, reasons=0x4, limit_w=400)),
            CLOCKS,
            0.9 * 25,
            {"title": "1500 of 2000 MHz", "fix": "power limit", "confidence": "low"},
        ),
    ],
)
def test_a_loss_is_told_with_its_cost_its_line_and_what_to_do(
    tables: Callable[[], Tables], rule: str, cost_ms: float, said: dict[str, Any]
) -> None:
    made = tables()
    assert own(made) == [rule]
    finding = findings(made)[rule]
    assert finding.cost_ms_per_step == pytest.approx(cost_ms, rel=0.05)
    assert finding.share == pytest.approx(cost_ms / (finding.step_ms or 0), rel=0.05)
    assert finding.gain_ceiling <= finding.share + 0.05  # caches, at most
    lines = [place.line for place in finding.where]
    assert lines[:1] == said.pop("lines", lines[:1])
    assert all(text in getattr(finding, name) for name, text in said.items())
    assert all((finding.evidence, finding.fix, finding.caveat, finding.falsified_by))


@pytest.mark.parametrize(
    "tables",
    [
        lambda: cores_tables(delay=0.01, cpu_pct=300, throttled=2.0),  # a quota that stops other cores only
        lambda: pressed(30, 1),
        lambda: pressed(1, 100),
        lambda: pressed(0, 0),
        lambda: profiled_tables(1.1),
        *(
            lambda options=options: gpu_tables(gpu_rows(**options))
            # a clock that is kept, no reason, one that is the work's own, few readings, an idle GPU
            for options in ({"clock": 1950}, {"reasons": 0}, {"reasons": 0x4}, {"seconds": 8}, {"reasons": 0x1})
        ),
    ],
)
def test_what_costs_little_or_is_another_s_is_healthy(tables: Callable[[], Tables]) -> None:
    assert own(tables()) == []


def test_what_is_not_recorded_is_not_judged() -> None:
    missing = needs(cores_tables(delay=0.4, cpu_pct=400, threads=16, system=[]))
    for rule in ("threads_beyond_cores", "cpu_throttled", "other_processes", "swapping_or_faults"):
        assert "telemetry" in missing[f"system.{rule}"][0]
    assert needs(make_tables(steps=step_rows(40)))["system.profiler_overhead"][1]
    assert "clocks" in needs(gpu_tables())[CLOCKS][0]
    assert needs(gpu_tables(gpu_rows(), ranks=[rank_info()]))[CLOCKS][1]


def test_time_of_the_collector_is_not_told_again_as_python() -> None:
    frames = [f"<module> ({TRAIN}:90)", f"train ({TRAIN}:30)", "mean (/usr/lib/python3.11/statistics.py:400)"]
    times = {"start_ns": T0, "end_ns": T0 + 410 * MS}
    stacks = [stack(frames, 20, **times), stack([f"train ({TRAIN}:31)", f"relu ({TORCH}/nn.py:1)"], 80, **times)]
    with_gc = make_tables(steps=STEADY, stacks=stacks, journal=collections(STEADY, 2))
    without = make_tables(steps=STEADY, stacks=stacks)
    assert "host.python_on_critical_path" in findings(without)
    assert "host.python_on_critical_path" not in findings(with_gc)


def test_a_drift_explains_the_python_of_its_lines() -> None:
    found = findings(make_tables(steps=GROWING, stacks=growing_stacks(GROWING)))
    assert found["host.step_drift"].explains == (found["host.python_on_critical_path"].id,)


def test_threads_that_sleep_in_turn_cost_what_fewer_would_save() -> None:
    site = {"kind": "site", "what": "set_num_threads", "arguments": {"argument_0": "16"}, "file": TRAIN, "line": 5}
    finding = findings(pool_tables(**SMALL, others=1.0, journal=[site]))[THREADS]
    assert finding.share == pytest.approx(0.68, abs=0.1)
    assert 0.69 < finding.gain_ceiling < 0.95
    assert "set_num_threads(2) at train.py:5" in finding.fix
    assert {evidence.metric for evidence in finding.evidence} >= {"main thread asleep", "torch threads per rank"}


def test_others_are_blamed_where_they_have_the_cores() -> None:
    assert own(cores_tables(delay=0.4, cpu_pct=60, threads=16)) == [OTHERS]
    run: dict[str, Any] = {"main": 0.3, "delay": 0.65, "slices": 20, "pool": 0.05, "pool_delay": 2.0, "others": 1.65}
    found = findings(pool_tables(**run))
    assert THREADS not in found
    metrics = values(found[OTHERS])
    assert metrics["CPU use of others"] == pytest.approx(1.65)
    assert metrics["moves of the main thread to another core"] == 3


def test_processes_of_others_on_the_gpu_are_shown() -> None:
    shown = {one.metric: one.value for one in findings(gpu_tables(gpu_rows(pids=(PID, STRANGER))))[CLOCKS].evidence}
    assert shown["processes of others on gpu:0"] == 1
    assert shown["memory they hold on gpu:0"] == 2_000_000_000
    alone = findings(gpu_tables(gpu_rows()))[CLOCKS]
    assert not [one for one in alone.evidence if "others" in one.metric]


def test_a_quota_that_one_thread_exceeds_has_nothing_but_the_quota_to_raise() -> None:
    quota = {"hardware": {"affinity": [0, 1, 2, 3], "cgroup_cpu_limit": 0.2}}
    made = cores_tables(delay=0.8, cpu_pct=20, throttled=0.35, threads=1, manifests=[quota])
    finding = findings(made)["system.cpu_throttled"]
    assert (finding.fix, finding.try_, finding.share) == ("Ask for a larger quota", (), pytest.approx(0.35))


def slow_loader(*rows: dict[str, Any]) -> tuple[dict[str, object], str]:
    """(figures, advice) of a slow loader beside these readings of storage."""
    steps = step_rows(400, data_wait_ms=60, forward_ms=34)
    site = {"kind": "site", "what": "DataLoader", "arguments": {"num_workers": "0"}, "file": TRAIN, "line": 9}
    finding = findings(storage_tables(*rows, steps=steps, journal=[site]))["input.loader_bound"]
    return values(finding), finding.fix


def test_a_network_file_system_is_named_with_what_to_do() -> None:
    figures, advice = slow_loader(*storage_rows())
    assert figures["file system of the data"] == "lustre at /scratch"
    assert figures["of it not in the page cache"] == pytest.approx(0.5)
    assert figures["blocked for a disk or network storage"] == pytest.approx(0.25, abs=0.03)
    assert "The data lies on lustre at /scratch" in advice
    assert "page cache" in slow_loader(*storage_rows(device=40e6, until=15))[1]  # one that warms up comes first


def test_warm_local_files_and_few_reads_ask_for_nothing() -> None:
    local = [row for row in storage_rows(device=0) if row.get("device") != "lustre:/scratch"]
    for rows in (local, (), tuple(storage_rows(asked=1e3, device=0))):
        figures, advice = slow_loader(*rows)
        assert ("read from the device" in figures) is (rows is local)
        assert "page cache" not in advice
        assert "storage" not in advice


def test_a_main_thread_away_from_its_gpu_is_shown_and_advised_upon() -> None:
    away = analyze(numa_tables(TWO_NODES, 0, 0, 0, 2))
    assert {evidence.metric for evidence in numa_evidence(away)} == {
        "nodes of memory the main thread ran on",
        "main thread on another node than its GPU",
    }
    assert "numactl" in numa_caveat(away)
    near = analyze(numa_tables(TWO_NODES, 2, 3))
    assert (list(numa_evidence(near)), numa_caveat(near)) == ([], "")
