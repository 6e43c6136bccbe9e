"""Energy of a run from readings with known sums: what is counted, by whom it is shared, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.context import Context
from stepscope.analyze.machine import energy
from stepscope.analyze.machine.energy import counted
from stepscope.analyze.views.select import Selection, Source, rows
from stepscope.engine.intervals import Intervals
from stepscope.model import DeviceTime
from stepscope.model.machine import EnergyFacts, Prices
from stepscope.tables.schema import Tables
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.records import blank, some

SECOND = 1000 * MS
CUDA = (rank_info(device="cuda"),)
H100 = {"index": 0, "name": "H100", "uuid": "GPU-a", "mig": False, "virtualization": "none"}


def gpu(
    seconds: Iterable[float],
    watts: float = 300.0,
    *,
    device: str = "gpu:0",
    pids: Sequence[int] = (PID,),
    counter: bool = True,
    power: float | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """Readings of a board that draws evenly; each counter is read 2 ms after the time of its row."""
    found: list[dict[str, Any]] = []
    for second in seconds:
        own = {"time_ns": T0 + round(second * SECOND), "device": device, **more}
        if counter:
            found.append({**own, "metric": "gpu_energy_mj", "value": 7e9 + 1e3 * watts * (second + 0.002)})
            found.append({**own, "metric": "energy_after_ns", "value": 2e6})
        found.append({**own, "metric": "gpu_power_limit_w", "value": 700.0})
        found += [{**own, "metric": "gpu_process", "value": 1.0, "pid": pid} for pid in pids]
        if power is not None:
            found.append({**own, "metric": "gpu_power_w", "value": power})
    return found


def package(
    seconds: Iterable[float], watts: float = 80.0, *, start: float = 0.0, highest: float = 2.6e11, **more: Any
) -> list[dict[str, Any]]:
    """Readings of a processor whose counter begins anew at `highest` uJ."""
    own = [{"time_ns": T0 + round(second * SECOND), "device": "package-0", **more} for second in seconds]
    values = [(start + 1e6 * watts * (row["time_ns"] - T0) / SECOND) % highest for row in own]
    return [{**row, "metric": "cpu_energy_uj", "value": value} for row, value in zip(own, values, strict=True)] + [
        {**row, "metric": "cpu_energy_range_uj", "value": highest} for row in own
    ]


def made(system: Sequence[dict[str, Any]], **more: Any) -> Tables:
    """A run of 20 s from T0 on in steps of 10 ms with 8 samples each."""
    usual = {"steps": step_rows(2000), "run": {"started_ns": T0, "ended_ns": T0 + 20 * SECOND}, "ranks": CUDA}
    return make_tables(system=system, **{**usual, **more})


def of(tables: Tables, prices: Prices | None = None) -> EnergyFacts:
    return some(analyze(tables, prices=prices or Prices()).energy)


def manifest(*gpus: dict[str, Any], **hardware: Any) -> dict[str, Any]:
    environment = hardware.pop("environment", {})
    return {"host": "host-a", "hardware": {"gpus": list(gpus), **hardware}, "environment": environment}


def test_a_run_its_steps_and_what_they_cost() -> None:
    system = [*gpu(range(-2, 30)), *package(range(-2, 30), start=2.6e11 - 9e8)]  # begins anew within the run
    found = of(made(system, manifests=[manifest(H100)]), Prices(kwh=0.5, gpu_hour=1.8, co2_g_per_kwh=400))
    assert found.joules == pytest.approx(20 * 380)
    assert (found.wh, found.mean_w, found.seconds) == pytest.approx((20 * 380 / 3600, 380, 20))
    assert found.sources == ("GPU by counter", "processors by RAPL")
    assert found.per_step.steps == 1999  # the first is warm-up
    assert found.per_step.joules_per_step == pytest.approx(3.8)
    assert found.per_step.joules_per_sample == pytest.approx(3.8 / 8)
    assert found.per_step.gpu_joules_per_step == pytest.approx(3.0)
    assert (found.idle_share, found.idle_joules_per_step) == (None, None)  # no window tells
    cost, of_1000 = some(found.cost), some(found.cost_per_1000_steps)
    kwh, hours = 20 * 380 / 3.6e6, 20 / 3600
    assert (cost.energy, cost.gpus, cost.co2_g) == pytest.approx((kwh * 0.5, hours * 1.8, kwh * 400))
    assert cost.cost == pytest.approx(kwh * 0.5 + hours * 1.8)
    assert of_1000.cost == pytest.approx(3800 / 3.6e6 * 0.5 + 10 / 3600 * 1.8)
    assert found.absent is None
    assert found.warnings == ()


@given(
    grown=st.lists(st.integers(0, 900_000_000), min_size=2, max_size=40),
    first=st.integers(0, 2_000_000_000),
    cuts=st.lists(st.integers(0, 40_000_000_000), max_size=8),
    wraps=st.booleans(),
)
def test_parts_sum_to_the_whole_wherever_it_is_cut(grown: list[int], first: int, cuts: list[int], wraps: bool) -> None:
    """Also where the counter begins anew, and beyond the readings, where nothing is added."""
    times = T0 + SECOND * np.arange(len(grown) + 1)
    read = np.cumsum([first, *grown])
    highest = 2_000_000_000 if wraps else None
    shown = read % highest if highest is not None else read
    series = some(counted(times, shown / 1e6, 1000.0, highest and highest / 1e6))
    assert not series.holes.any()
    whole = Intervals(times[:1], times[-1:])
    assert series.drawn(whole)[0] == pytest.approx(sum(grown) / 1e6)
    edges = np.array([T0 - SECOND, *sorted(T0 + cut for cut in cuts), T0 + 41 * SECOND])
    parts = [series.drawn(Intervals(edges[at : at + 1], edges[at + 1 : at + 2])) for at in range(len(edges) - 1)]
    assert sum(joules for joules, _ in parts) == pytest.approx(sum(grown) / 1e6)
    assert sum(seconds for _, seconds in parts) == pytest.approx(len(grown))


def test_a_missing_reading_is_bridged_by_the_counter_and_said() -> None:
    found = of(made(gpu([0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 20])))
    assert found.joules == pytest.approx(300 * 19.998)  # it was first read 2 ms after the start
    assert [text for text in found.warnings if "9 s without a reading" in text]


def fallen(rows: list[dict[str, Any]], after_s: float, by: float) -> list[dict[str, Any]]:
    late = [row["metric"] == "gpu_energy_mj" and row["time_ns"] > T0 + after_s * SECOND for row in rows]
    return [{**row, "value": row["value"] + by} if is_late else row for row, is_late in zip(rows, late, strict=True)]


@pytest.mark.parametrize(("by", "why"), [(-6.9e9, "fell back"), (1e9, "more than the device can draw")])
def test_a_counter_that_cannot_be_is_no_measurement(by: float, why: str) -> None:
    """A driver that is loaded anew, and a leap: power takes their place, by name, and without it there is no figure."""
    broken = of(made(fallen(gpu(range(21)), 10.5, by)))
    assert (broken.joules, broken.per_step.joules_per_step, broken.sources) == (None, None, ())
    assert why in some(broken.absent)
    replaced = of(made(fallen(gpu(range(21), power=290.0), 10.5, by)))
    assert replaced.joules == pytest.approx(20 * 290)
    assert replaced.sources == ("GPU by sampled power",)
    assert why in some(replaced.domains[0].why)
    before = of(made([*fallen(gpu(range(-5, 21)), -2.5, by)]))  # before the run it does no harm
    assert before.joules == pytest.approx(20 * 300)


def test_sampled_power_stands_in_and_its_gaps_are_holes() -> None:
    found = of(made(gpu(range(21), counter=False, power=250.0)))
    assert (found.joules, found.sources) == (pytest.approx(20 * 250), ("GPU by sampled power",))
    assert "no energy counter" in some(found.domains[0].why)
    holed = of(made(gpu([*range(8), *range(15, 21)], counter=False, power=250.0)))
    assert (holed.joules, holed.per_step.joules_per_step) == (None, None)
    assert "too long without a reading" in some(holed.absent)


def test_counter_and_sampled_power_are_laid_beside_each_other() -> None:
    agreeing, differing = (of(made(gpu(range(21), power=power))) for power in (301.0, 225.0))
    assert agreeing.domains[0].sampled_ratio == pytest.approx(301 / 300)
    assert agreeing.warnings == ()
    assert differing.joules == pytest.approx(agreeing.joules)
    assert [text for text in differing.warnings if "25 % less than the counter" in text]


SHARED = {
    "another's process": ({}, (PID, 4711), "another process used it too"),
    "MIG": ({"mig": True}, (PID,), "MIG"),
    "vGPU": ({"virtualization": "vgpu"}, (PID,), "vGPU"),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_shared_board_is_shown_and_charged_to_nobody(case: str) -> None:
    facts, pids, why = SHARED[case]
    found = of(made(gpu(range(21), pids=pids), manifests=[manifest({**H100, **facts})]), Prices(kwh=1.0, gpu_hour=1.0))
    (board,) = found.domains
    assert (board.joules, board.counted, board.shared) == (pytest.approx(300 * 19.998), False, True)
    assert why in some(board.why)
    assert (found.joules, found.per_step.joules_per_step, some(found.cost).energy) == (None, None, None)
    assert why in some(found.absent)
    assert some(found.cost).gpus == pytest.approx(20 / 3600)  # a rented board is paid for all the same


def test_only_boards_that_the_run_computes_on_are_its_own() -> None:
    system = [*gpu(range(-1, 22)), *gpu(range(-1, 22), 500.0, device="gpu:1", pids=(4711,))]
    found = of(made(system))
    assert (found.joules, found.boards) == (pytest.approx(20 * 300), 1)
    assert [one.device for one in found.domains] == ["gpu:0"]
    assert [note for note in found.notes if "did not use, 1 of them" in note]
    nobody = of(made(system, ranks=(rank_info(pid=7),)))  # trains on the CPU, on a machine with boards
    assert (nobody.joules, nobody.domains, nobody.boards) == (None, (), 0)


def held(device: str) -> list[dict[str, Any]]:
    return [{"kind": "memory", "time_ns": T0, "device": device, "allocated_bytes": 1}]


@pytest.mark.parametrize(
    ("environment", "boards", "used", "why"),
    [
        ({}, [H100, H100], "gpu:1", None),
        ({"CUDA_VISIBLE_DEVICES": "3,0"}, [H100] * 4, "gpu:0", None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, [H100, {**H100, "uuid": "GPU-b"}], "gpu:0", None),
        ({"CUDA_VISIBLE_DEVICES": "0,x,1"}, [H100, H100], None, "which of 2 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, [H100], None, "MIG"),
        ({}, [H100, {**H100, "name": "A100"}], None, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [H100, {**H100, "name": "A100"}], "gpu:1", None),
    ],
)
def test_where_the_driver_lists_no_process_torchs_numbers_name_the_boards(
    environment: dict[str, str], boards: list[dict[str, Any]], used: str | None, why: str | None
) -> None:
    """As in a container: the second device that torch can see."""
    listed = [{**board, "index": at, "uuid": f"{board['uuid']}{at}"} for at, board in enumerate(boards)]
    system = [row for at in range(len(boards)) for row in gpu(range(-1, 22), device=f"gpu:{at}", pids=())]
    tables = made(system, manifests=[manifest(*listed, environment=environment)], journal=held("cuda:1"))
    found = of(tables)
    assert [one.device for one in found.domains] == ([used] if used else [])
    if why is None:
        assert found.joules == pytest.approx(20 * 300)
        assert found.domains[0].shared is None
        assert [note for note in found.notes if "lists no process of the run" in note]
    else:
        assert (found.joules, found.boards) == (None, None)
        assert why in some(found.absent)


def test_more_processes_than_the_run_has_are_others() -> None:
    """In a container the driver tells numbers of the host."""
    found = of(made(gpu(range(-1, 22), pids=(91, 92)), manifests=[manifest(H100)], journal=held("cuda:0")))
    assert (found.joules, found.domains[0].shared) == (None, True)
    assert "2 processes used it" in some(found.absent)
    alone = of(made(gpu(range(-1, 22), pids=(91,)), manifests=[manifest(H100)], journal=held("cuda:0")))
    assert (alone.joules, alone.domains[0].shared) == (pytest.approx(20 * 300), None)


def test_hosts_are_summed_and_no_board_counts_twice() -> None:
    """Two launchers of one machine read the same board and processor; a second machine has its own."""
    ranks = tuple(rank_info(number, device="cuda", host=host) for number, host in enumerate(("a", "a.2", "b")))
    hosts = {"a": ("node", "GPU-a"), "a.2": ("node", "GPU-a"), "b": ("other", "GPU-b")}
    manifests = [{"host": name, "hardware": {"gpus": [{**H100, "uuid": uuid}]}} for name, uuid in hosts.values()]
    pids = [rank.pid for rank in ranks]
    system = [
        row
        for host in hosts
        for row in (*gpu(range(-1, 22), pids=pids[:3], host=host), *package(range(-1, 22), host=host))
    ]
    processes = [{"host": host, "pid": pid, "role": "rank"} for host in hosts for pid in pids]
    steps = [{**row, "rank": rank.rank, "process": rank.process} for rank in ranks for row in step_rows(2000)]
    run = {"started_ns": T0, "ended_ns": T0 + 20 * SECOND, "hosts": tuple(hosts)}
    found = of(made(system, ranks=ranks, manifests=manifests, processes=processes, steps=steps, run=run))
    assert found.joules == pytest.approx(20 * 2 * 380)
    assert (len(found.domains), found.boards) == (4, 2)
    assert found.per_step.joules_per_step == pytest.approx(7.6)
    assert found.per_step.joules_per_sample == pytest.approx(7.6 / 24)


def test_a_machine_without_counters_leaves_no_sum_of_the_others() -> None:
    ranks = tuple(rank_info(number, host=host) for number, host in enumerate("ab"))
    run = {"started_ns": T0, "ended_ns": T0 + 20 * SECOND, "hosts": ("a", "b")}
    found = of(made(package(range(-1, 22), host="a"), ranks=ranks, manifests=[{"host": "a"}, {"host": "b"}], run=run))
    assert (found.joules, found.domains[0].joules) == (None, pytest.approx(20 * 80))
    assert "not every machine" in some(found.absent)


def test_processors_of_which_the_run_has_a_part_are_left_out() -> None:
    part = manifest(H100, logical_cores=64, affinity=[0, 1, 2, 3])
    found = of(made([*gpu(range(-1, 22)), *package(range(-1, 22))], manifests=[part]))
    assert (found.joules, found.sources) == (pytest.approx(20 * 300), ("GPU by counter",))
    assert found.domains[1].joules == pytest.approx(20 * 80)
    assert "4 of 64 processors" in some(found.domains[1].why)
    alone = of(made(package(range(-1, 22)), ranks=(rank_info(),), manifests=[part]))
    assert alone.joules is None
    assert "4 of 64 processors" in some(alone.absent)


def test_why_nothing_was_measured() -> None:
    load = [{"metric": "load_1m", "value": 1.0}]
    refused = {"reason": "energy of package-0 may be read by root alone", "remedy": "sudo chmod"}
    told = manifest(cpu_energy={"devices": [], **refused})
    found = of(made(load, ranks=(rank_info(),), manifests=[told]))
    assert found.absent == f"no GPU answers NVML, and {refused['reason']}: sudo chmod"
    on_gpu = of(made([*load, *package(range(21))], manifests=[told]))  # its processors alone would be a part of it
    assert (on_gpu.joules, on_gpu.domains[0].joules) == (None, pytest.approx(20 * 80))
    assert "no GPU of the run" in some(on_gpu.absent)
    assert analyze(make_tables(steps=step_rows(20))).energy is None  # without telemetry
    few = of(made(gpu([0.0, 19.9])))
    assert few.joules is not None
    assert "too few to tell" in some(few.per_step.absent)


def test_what_gpus_draw_while_they_wait_is_an_estimate_from_windows() -> None:
    tables = made(gpu(range(-1, 22)))
    analysis = analyze(tables)
    traced = [
        blank(DeviceTime, scope=scope, idle_ns=idle, total_ns=100) for scope, idle in (("all", 25), ("launched", 60))
    ]
    steady = Context(tables).labelled.steady()
    found = energy.facts(tables, steady, analysis.steps[0], traced, Prices())
    assert (found.idle_share, found.idle_joules_per_step) == pytest.approx((0.25, 0.75))


ODD = st.sampled_from([None, [], {}, "", "x", -1, 0, 3, True, 1e308, float("nan"), [[]], ["1"], {"a": []}])
GARBAGE = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(
            ["gpu_energy_mj", "cpu_energy_uj", "cpu_energy_range_uj", "energy_after_ns", "gpu_power_w", "gpu_process"]
        ),
        "time_ns": st.integers(0, 30).map(lambda second: T0 + second * SECOND) | st.sampled_from([0, 2**61]),
        "value": st.floats(-1e308, 1e308) | st.sampled_from([0.0, 1.0, 5e6, float("nan"), float("inf")]),
        "device": st.sampled_from(
            ["gpu:0", "gpu:\N{ARABIC-INDIC DIGIT ONE}", "package-0", "package-0-dram", "\n|<b>", None]
        ),
        "pid": st.sampled_from([None, PID, -1, 7]),
        "host": st.sampled_from(["host-a", "", "b.2"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    system=st.lists(GARBAGE, min_size=1, max_size=40),
    hardware=st.dictionaries(
        st.sampled_from(["gpus", "logical_cores", "affinity", "cgroup_cpu_limit", "cpu_energy"]), ODD
    ),
    board=st.dictionaries(st.sampled_from(["index", "name", "uuid", "mig", "virtualization"]), ODD),
    visible=st.none() | st.text(max_size=12) | st.just("9" * 5000),
    ends=st.tuples(*2 * [st.sampled_from([None, T0, T0 + 20 * SECOND])]),
)
def test_a_damaged_recording_gives_figures_or_reasons(
    system: list[dict[str, Any]],
    hardware: dict[str, Any],
    board: dict[str, Any],
    visible: str | None,
    ends: tuple[int | None, int | None],
) -> None:
    told = {"hardware": {"gpus": [board, H100], **hardware}, "environment": {"CUDA_VISIBLE_DEVICES": visible}}
    run = {"started_ns": ends[0], "ended_ns": ends[1]}
    tables = made(system, manifests=[told], journal=held("cuda:0"), run=run, steps=step_rows(300, forward_ms=30))
    found = of(tables, Prices(kwh=1.0, gpu_hour=1.0))
    assert (found.joules is None) == (found.absent is not None)
    figures = [found.joules, found.mean_w, found.per_step.joules_per_step, some(found.cost).cost, found.run_s]
    figures += [figure for one in found.domains for figure in (one.joules, one.mean_w, one.sampled_ratio)]
    assert all(0 <= figure < float("inf") for figure in figures if figure is not None)
    rows(Source(Context(tables)), "metrics", Selection(name="sys/"))


def test_curves_hold_power_and_energy_of_each_device() -> None:
    tables = made([*gpu([0, 0.1, 1, 2, 3]), *package([0, 1, 2, 3], start=2.6e11 - 1e8)])
    source = Source(Context(tables))
    found = {row.name: row for row in rows(source, "metrics", Selection(group="curve", name="sys/")).rows}
    assert (found["sys/gpu.0.energy_j"].last, found["sys/gpu.0.energy_j"].points) == (pytest.approx(900), 5)
    power = found["sys/gpu.0.counted_power_w"]  # none of a tenth of a second: counters are not that quick
    assert (power.points, power.lowest, power.highest) == (3, pytest.approx(300), pytest.approx(300))
    assert found["sys/package-0.power_w"].lowest == pytest.approx(80)
    assert found["sys/package-0.energy_j"].last == pytest.approx(240)
