"""Rules on the interpreter, the machine and drifting steps: each speaks of its loss, and only of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.machine import numa_caveat, numa_evidence
from stepscope.model import Finding, Place, Site
from stepscope.model.device_losses import PassesFacts, PassLine, WastedWork
from stepscope.model.machine import ChildrenFacts, DriftFacts, DriftLine
from stepscope.tables.schema import Tables
from tests.analyze.device_scenes import V100, made_tensors, repeated
from tests.analyze.scenes import TORCH, TRAIN, Trace, stack
from tests.analyze.test_machine import (
    SECOND,
    SMALL,
    collections,
    cores_tables,
    growing,
    growing_stacks,
    pool_tables,
    profiled_tables,
    telemetry,
)
from tests.analyze.test_machine_views import (
    STRANGER,
    TWO_NODES,
    gpu_rows,
    gpu_tables,
    numa_tables,
    storage_rows,
    storage_tables,
)
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import judged, needs, only, told, values
from tests.diagnose.test_host import NOTHING
from tests.records import replace

OWN = ("system.", "host.step_drift")
THREADS, OTHERS, CLOCKS = "system.threads_beyond_cores", "system.other_processes", "system.gpu_clocks"
STEADY = step_rows(41)
GROWING = [step for step in growing(jitter_ms=0) if step["wall_ns"] < 100 * MS]


def findings(tables: Tables) -> dict[str, Finding]:
    diagnosis = judged(tables)
    return {finding.rule: only(diagnosis, finding.rule) for finding in diagnosis.findings}


def own(tables: Tables) -> list[str]:
    return [rule for rule in findings(tables) if rule.startswith(OWN)]


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


def test_a_drift_in_one_segment_has_its_line_by_the_times_of_stacks() -> None:
    stacks, seen = growing_stacks(GROWING), []
    for slow, work in zip(stacks[::2], stacks[1::2], strict=True):
        share = slow["samples"] / (slow["samples"] + work["samples"])
        until = slow["start_ns"] + round((slow["end_ns"] - slow["start_ns"]) * share)
        seen += [slow | {"end_ns": until}, work | {"start_ns": until}]
    times = {"start_ns": stacks[0]["start_ns"], "end_ns": stacks[-1]["end_ns"]}
    found = findings(make_tables(steps=GROWING, stacks=[one | times for one in stacks], stretches=seen))
    assert found["host.step_drift"].where[0].line == 20


def test_a_profiler_of_python_is_a_risk_with_the_line_that_switches_it_on() -> None:
    made, source = make_tables(steps=STEADY, ranks=[rank_info(hook="cProfile.Profile")]), "# cProfile.Profile()\n"
    (risk,) = judged(made, {TRAIN: f"{source}with cProfile.Profile():\n    main()\n"}).risks
    assert (risk.rule, risk.where[0].line) == ("system.python_hook", 2)
    assert not judged(make_tables(steps=STEADY)).risks


def test_threads_that_sleep_in_turn_cost_what_fewer_would_save() -> None:
    site = {"kind": "site", "what": "set_num_threads", "arguments": {"argument_0": "16"}, "file": TRAIN, "line": 5}
    finding = findings(pool_tables(**SMALL, others=1.0, journal=[site]))[THREADS]
    assert finding.share == pytest.approx(0.68, abs=0.1)
    assert 0.69 < finding.gain_ceiling < 0.95
    assert "set_num_threads(2) at train.py:5" in finding.fix
    assert {evidence.metric for evidence in finding.evidence} >= {"main thread asleep", "torch threads per rank"}


@pytest.mark.parametrize(
    ("product_ms", "others", "physical", "share"),
    [(20, 0.0, 2, 0.8 * 2 / 7), (0.5, 0.0, 2, None), (20, 1.0, 2, None), (20, 0.0, 1, None), (20, None, 2, None)],
)
def test_one_thread_loses_where_products_are_large_and_cores_free(
    product_ms: float, others: float | None, physical: int, share: float | None
) -> None:
    steps = step_rows(400, forward_ms=93)
    trace = Trace()
    for row in steps[10:13]:
        row["in_window"] = True
        for at in range(4):
            begins, lasts = row["start_ns"] + 20 * at * MS, round(product_ms * MS)
            trace.add("aten::mm", begins, lasts, step=row["step"], category="cpu_op")
    hardware = {"affinity": [0, 1], "logical_cores": 2, "physical_cores": physical}
    run: Any = {"main": 1.0, "delay": 0.0, "pool": 0.0, "pool_delay": 0.0, "others": others, "threads": 1}
    made = pool_tables(**run, steps=steps, events=trace.rows, run={"hardware": hardware})
    finding = told(made, "system.threads_below_cores")
    assert (finding and finding.share) == (None if share is None else pytest.approx(share))
    assert finding is None or finding.try_[0].value == "2"
    assert told(made, "system.threads_below_cores", {TRAIN: 'os.environ["OMP_NUM_THREADS"] = "1"\n'}) is None
    asked = {"kind": "site", "what": "set_num_threads", "arguments": {"argument_0": "1"}, "file": TRAIN, "line": 5}
    made = pool_tables(**run, steps=steps, events=trace.rows, run={"hardware": hardware}, journal=[asked])
    assert told(made, "system.threads_below_cores") is None


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


RULE = "system.children_hold_cores"
BURN = "python burn.py 600"


def process(pid: int, **more: Any) -> dict[str, Any]:
    start = T0 - 200 * MS
    return {"pid": pid, "ppid": PID, "role": "other", "command": BURN, "start_ns": start, **more}


def used(pids: list[int], cores: float) -> list[dict[str, Any]]:
    return [
        {"metric": "cpu_pct", "time_ns": T0 + second * SECOND, "value": 100 * cores, "pid": pid}
        for second in range(40)
        for pid in pids
    ]


def started(pid: int | None, line: int, **more: Any) -> dict[str, Any]:
    place = {"file": TRAIN, "line": line, "function": "main"}
    row = {"kind": "child", "time_ns": T0 - 210 * MS, "pid": pid, "how": "subprocess.Popen", "command": BURN}
    return {**row, **place, **more}


def tables(processes: list[dict[str, Any]], cores: float, journal: list[dict[str, Any]], **more: Any) -> Tables:
    """A main thread that has a core for a quarter of the time and waits for one in 60 %."""
    values: dict[str, Any] = {"main": 0.25, "delay": 0.6, "pool": 0.25, "pool_delay": 0.0, "threads": 2, **more}
    rank = {"pid": PID, "ppid": 1, "role": "rank", "command": "python train.py", "start_ns": T0 - SECOND}
    made = pool_tables(**values, processes=[rank, *processes], journal=journal)
    beside = make_tables(system=used([row["pid"] for row in processes], cores / max(1, len(processes)))).system
    return replace(made, system=pl.concat([made.system, beside]))


def children(of: Tables) -> ChildrenFacts:
    machine = analyze(of).machine
    assert machine.children is not None
    return machine.children


def test_processes_of_the_script_that_hold_the_cores_are_named() -> None:
    three = [process(pid) for pid in (51, 52, 53)]
    finding = only(tables(three, 1.5, [started(pid, 7) for pid in (51, 52, 53)]), RULE)
    assert finding.title.startswith(
        f"3 processes that the script started ({BURN}, train.py:7) hold 1.5 of 2 cores: the main thread waits for one"
    )
    assert [(place.line, place.share) for place in finding.where] == [(7, pytest.approx(1))]
    assert finding.share == pytest.approx(0.6 * 1.5 / 1.75)  # the rest is for the process's own other thread
    assert finding.gain_ceiling >= 0.6
    assert finding.confidence == "medium"


def test_without_them_or_where_they_sleep_the_rule_keeps_quiet() -> None:
    assert told(tables([], 0.0, []), RULE) is None
    assert told(tables([process(51)], 0.02, [started(51, 7)]), RULE) is None
    assert told(tables([process(51)], 1.5, [started(51, 7)], delay=0.02), RULE) is None


def test_ranks_workers_and_helpers_are_nobodys_children() -> None:
    others = [process(50 + number, role=role) for number, role in enumerate(("loader_worker", "helper", "launcher"))]
    assert children(tables(others, 1.5, [started(50, 7)])).groups == ()


def test_a_fork_and_a_shell_that_is_gone_are_known_by_their_time() -> None:
    fork = started(None, 11, how="os.fork", command=None)
    (child,) = children(tables([process(51, command="python train.py")], 1.0, [fork])).groups
    assert (child.how, child.place and child.place.line) == ("os.fork", 11)
    gone = [process(52, ppid=1)]  # its shell lived for a moment
    (child,) = children(tables(gone, 1.0, [started(99, 12, command="burn &")])).groups
    assert child.place is not None
    assert child.place.line == 12
    seen = [process(52, ppid=1, end_ns=T0 + 40 * SECOND), process(99, end_ns=T0)]  # and was there when we looked
    (child,) = children(tables(seen, 1.0, [started(99, 12, command="burn &")])).groups
    assert (child.processes, child.place and child.place.line) == (2, 12)
    (late,) = children(tables(gone, 1.0, [started(99, 12, time_ns=T0 - 20 * SECOND)])).groups
    assert (late.how, late.place) == (None, None)


def test_a_process_of_python_is_named_by_what_it_runs() -> None:
    pool = {"how": "multiprocessing.Process", "command": "squares"}
    rows = [process(pid, command="python train.py") for pid in (51, 52)]
    (child,) = children(tables(rows, 1.0, [started(pid, 5, **pool) for pid in (51, 52)])).groups
    assert (child.command, child.processes) == ("Process(squares)", 2)
    assert child.cores == pytest.approx(1.0)


FAULTS, WASTED = "memory.page_faults", "compute.wasted_operators"
COST = {"page_bytes": 4096, "ns_alone": 1000.0, "threads": 2, "ns_beside": 1400.0, "ns_returned": 200.0}
GLIBC = {"cost": COST, "huge_pages": "madvise", "libc": "glibc 2.36", "installed": []}


def faulting(
    faults: int | None = 15_000,
    *,
    told: dict[str, Any] | None = GLIBC,
    environment: dict[str, str] | None = None,
    main: float | None = None,
    resident: float = 0.0,
    **step: Any,
) -> Tables:
    """40 steps of 60 ms, half forward and half backward, with telemetry once a second where `main` gives a share."""
    phases = {"data_wait_ms": 0, "forward_ms": 30, "backward_ms": 30, "optimizer_ms": 0, "other_ms": 0, **step}
    rows = step_rows(200, minor_faults=faults, major_faults=0, **phases)
    system = []
    for second in range(12) if main is not None else ():
        counted = {
            "minor_faults": second * 250_000.0,
            "main_minor_faults": main * second * 250_000.0,
            "rss_bytes": resident * second * 250_000.0 * 4096,
        }
        row = {"host": "a", "time_ns": T0 + second * 1000 * MS, "unit": "count", "pid": PID}
        system += [{**row, "metric": metric, "value": value} for metric, value in counted.items()]
    manifest = {"page_faults": told, "environment": environment or {}}
    return make_tables(steps=rows, system=system, manifests=[manifest])


def test_the_training_thread_pays_its_own_faults_and_all_that_is_given_back() -> None:
    alone, shared, unknown = (only(faulting(main=main), FAULTS) for main in (1.0, 0.5, None))
    assert alone.cost_ms_per_step == pytest.approx(15_000 * (1000 + 200) / 1e6)
    assert shared.cost_ms_per_step == pytest.approx(15_000 * (1400 / 2 + 200) / 1e6)
    assert unknown.cost_ms_per_step == shared.cost_ms_per_step  # the least it can have been
    assert shared.gain_ceiling == pytest.approx(15_000 * (1400 + 200) / 1e6 / 60)
    figures = values(shared)
    assert figures["page faults per step"] == 15_000
    assert figures["allocator"] == "glibc 2.36"
    assert figures["transparent huge pages"] == "madvise"


@pytest.mark.parametrize(("faults", "behind"), [(1_000, True), (15_000, False)])  # 4 MB are made and copied
def test_faults_of_what_is_made_to_be_copied_stand_behind_it(faults: int, behind: bool) -> None:
    traced = analyze(repeated(4, 10_000, made_tensors).tables(V100))
    costly = {**GLIBC, "cost": {**COST, "ns_alone": 5_000.0}}
    facts = analyze(faulting(faults, told=costly, main=1.0))
    found = {one.rule: one for one in diagnose(replace(facts, device_losses=traced.device_losses)).findings}
    made = found["transfer.made_on_host"]
    assert (found[FAULTS].id in made.explains) is behind
    assert bool(found[FAULTS].where) is behind


@pytest.mark.parametrize(("fused", "part"), [("None", 0.6), ("True", 1.0)])
def test_faults_of_an_optimizer_that_is_told_go_with_it(fused: str, part: float) -> None:
    facts = analyze(faulting(main=1.0, forward_ms=0, optimizer_ms=30))
    made = PassesFacts(runs=(replace(NOTHING, made_by_updates=0.4),), copies=None)
    site = Site("AdamW", Place(TRAIN, 7), {"fused": fused}, 0)
    found = {one.rule: one for one in diagnose(replace(facts, passes=made, sites=(site,))).findings}
    assert ("compute.unfused_optimizer" in found) is (part < 1)
    assert found[FAULTS].cost_ms_per_step == pytest.approx(part * 15_000 * (1000 + 200) / 1e6)
    assert (0.4 in [one.value for one in found[FAULTS].evidence]) is (part < 1)


@pytest.mark.parametrize(("grown_ms", "rules"), [(30.0, {WASTED}), (1.0, {"host.step_drift"})])
def test_a_tensor_that_grows_is_told_with_its_faults_and_its_growth(grown_ms: float, rules: set[str]) -> None:
    line = Place(TRAIN, 7)
    grown = WastedWork("grown", "aten::cat", (), 1.0, grown_ms, (PassLine(line, grown_ms, True),))
    run = replace(NOTHING, step_ms=60.0, wasted=(grown,), made_by_growing=0.4)
    drift = DriftFacts(200, 6, True, 40.0, 80.0, 20.0, (), {"forward": 40.0}, (DriftLine(line, 1.0, 40.0, 50),))
    facts = analyze(faulting(main=1.0))
    machine = replace(facts.machine, drift=drift)
    found = {
        one.rule: one for one in diagnose(replace(facts, passes=PassesFacts((run,), None), machine=machine)).findings
    }
    part = 0.6 if WASTED in rules else 1.0
    assert found.keys() == {FAULTS, *rules}
    assert found[FAULTS].cost_ms_per_step == pytest.approx(part * 15_000 * (1000 + 200) / 1e6)


@pytest.mark.parametrize(
    ("main", "runs", "used", "told_of"),
    [(0.4, 0.9, 0.6, True), (0.4, 0.2, 0.6, False), (0.4, 0.9, 0.0, False), (0.97, 0.9, 0.6, False)],
)
def test_python_of_another_thread_is_told_where_the_main_one_sleeps(
    main: float, runs: float, used: float, told_of: bool
) -> None:
    work = [stack([f"main ({TRAIN}:9)", f"linear ({TORCH}/nn/functional.py:1)"], 400, end_ns=T0 + 40_000 * MS)]
    thread = {"thread": "7", "thread_name": "stats", "main_thread": False, "phase": None}
    ends = [T0 + second * 1000 * MS for second in range(40)]
    frames = ["Thread.run (/usr/lib/python3.11/threading.py:982)", f"stats ({TRAIN}:30)"]
    seen = [stack(frames, 1, start_ns=at, end_ns=at + round(runs * 1000 * MS), **thread) for at in ends]
    stacks = {"stacks": work, "stretches": [*work, *seen]}
    made = pool_tables(main=main, delay=0.0, pool=used, pool_delay=0.0, threads=1, **stacks)
    finding = told(made, "host.python_on_critical_path")
    assert (finding is not None) is told_of
    if finding is not None:
        assert (finding.where[0].line, finding.share) == (30, pytest.approx(0.6, abs=0.02))


@pytest.mark.parametrize("faults", [0, 200, 3_000])
def test_silent_where_they_cost_little(faults: int) -> None:
    diagnosis = judged(faulting(faults))
    assert told(diagnosis, FAULTS) is None
    assert FAULTS not in needs(diagnosis)


def test_pages_that_a_run_keeps_are_no_loss() -> None:
    assert told(faulting(main=0.5, resident=1.0), FAULTS) is None
    half = only(faulting(main=0.5, resident=0.5), FAULTS)
    assert half.cost_ms_per_step == pytest.approx(7_500 * (1400 / 2 + 200) / 1e6)


@pytest.mark.parametrize(("faults", "measured"), [(None, GLIBC), (15_000, None), (15_000, {**GLIBC, "cost": None})])
def test_abstains_without_counts_or_calibration(faults: int | None, measured: dict[str, Any] | None) -> None:
    assert FAULTS in needs(faulting(faults, told=measured))


KEPT = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
PLAIN = "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4294967296"


@pytest.mark.parametrize(
    ("environment", "told", "words", "tries"),
    [
        ({}, GLIBC, PLAIN, ["keep", "keep_all", "huge_pages"]),
        (KEPT, GLIBC, "out=", ["huge_pages"]),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, GLIBC, "dirty_decay_ms", ["huge_pages"]),
        ({}, {**GLIBC, "libc": None, "installed": ["jemalloc"]}, "jemalloc", ["jemalloc"]),
        ({}, {**GLIBC, "huge_pages": "never"}, "MALLOC_MMAP_THRESHOLD_", ["keep", "keep_all"]),
        ({}, {**GLIBC, "installed": 3}, PLAIN, ["keep", "keep_all", "huge_pages"]),
    ],
)
def test_the_fix_is_for_the_allocator_in_use(
    environment: dict[str, str], told: dict[str, Any], words: str, tries: list[str]
) -> None:
    found = only(faulting(environment=environment, told=told), FAULTS)
    assert words in found.fix
    assert [(one.knob, one.value) for one in found.try_] == [("host.allocator", value) for value in tries]
