"""What makes the timing of a run doubtful, over the steps that were measured and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.comparison.flags import with_flags_of_set
from stepscope.comparison.measure import measure
from stepscope.model.comparison import Flag, Measure
from tests.builders import MS, PID, T0, make_tables, step_rows
from tests.comparison.measures import measure as measure_of
from tests.integration.harness import SCRIPTS
from tests.records import replace

S = 1000 * MS
STEPS = step_rows(400)  # 10 ms each; four seconds


def raised(*, asked: int | None = None, **tables: Any) -> dict[str, Flag]:
    """The flags of a run of `STEPS` by name."""
    made = make_tables(**{"steps": STEPS, **tables})
    measured = measure(made, analyze(made), label="run", path="run", asked=asked)
    assert measured is not None
    found = measured.flags
    assert [flag.withholds for flag in found] == sorted((flag.withholds for flag in found), reverse=True)
    assert all(flag.text and flag.source and not flag.text.endswith(".") for flag in found)
    return {flag.name: flag for flag in found}


def withheld(found: dict[str, Flag]) -> dict[str, bool]:
    return {name: flag.withholds for name, flag in found.items()}


def test_a_sound_run_has_no_flag() -> None:
    assert raised(asked=300) == {}


# ------------------------------------------------------------------------------------------------- how the run went


@pytest.mark.parametrize(
    ("status", "limited", "expected"),
    [
        (0, False, {}),
        (130, True, {}),
        (1, True, {"ended_oddly": False}),
        (130, False, {"interrupted": False}),
        (1, False, {"run_failed": True}),
        (137, False, {"run_failed": True}),
    ],
)
def test_how_the_command_ended(status: int, limited: bool, expected: dict[str, bool]) -> None:
    journal = [{"kind": "exit", "reason": "max_steps" if limited else "atexit"}]

    assert withheld(raised(run={"exit_status": status}, journal=journal)) == expected


def test_a_recording_without_an_end() -> None:
    assert withheld(raised(run={"exit_status": None, "ended_ns": None})) == {"run_unfinished": False}
    assert raised(run={"exit_status": None}) == {}  # stepscope.profile has no command that ends
    assert raised(run={"exit_status": None, "ended_ns": None, "hosts": ()}) == {}  # traces of others


def knob(name: str, applied: bool, **fields: Any) -> dict[str, Any]:
    return {"kind": "knob", "knob": name, "value": "2", "applied": applied, **fields}


def test_a_knob_that_was_not_applied_withholds() -> None:
    found = raised(journal=[knob("gc", True), knob("amp.dtype", False, reason="no CUDA device")])

    assert withheld(found) == {"knob_not_applied": True}
    assert found["knob_not_applied"].text == "knob amp.dtype=2 was not applied: no CUDA device"
    assert found["knob_not_applied"].source == "rank-0/events.jsonl"


def test_a_knob_that_was_asked_for_and_never_reported_withholds() -> None:
    found = raised(manifests=[{"options": {"knobs": [["gc", "off"]]}}])

    assert withheld(found) == {"knob_not_applied": True}


def test_a_knob_of_one_loader_of_two_is_said() -> None:
    places = [knob("k", True, file="/t.py", line=3), knob("k", False, file="/t.py", line=9, reason="a batch sampler")]
    found = raised(journal=places)

    assert withheld(found) == {"knob_partly_applied": False}
    assert "/t.py:9" in found["knob_partly_applied"].text


@pytest.mark.parametrize(
    ("asked", "expected"), [(399, {}), (400, {"few_steps": False}), (799, {"few_steps": True}), (None, {})]
)
def test_fewer_steps_than_asked_for(asked: int | None, expected: dict[str, bool]) -> None:
    assert withheld(raised(asked=asked)) == expected


def test_a_run_that_ended_before_its_limit() -> None:
    limit = [{"options": {"max_steps": 1000}}]

    assert withheld(raised(manifests=limit)) == {"few_steps": True}
    assert raised(manifests=[{"options": {"max_steps": 400}}]) == {}


def test_a_handful_of_steps_is_said() -> None:
    assert withheld(raised(steps=STEPS[:8])) == {"few_steps": False}


# ---------------------------------------------------------------------------------------------------- the machine


def readings(
    seconds: int, of: list[tuple[str, float, int | None, str | None]], start: int = T0
) -> list[dict[str, Any]]:
    """`of` (metric, growth or level, pid, device) once a second. Counters grow by the value with every reading."""
    counters = ("run_delay_ns", "read_bytes", "major_faults")
    return [
        {
            "time_ns": start + 500 * MS + second * S,
            "metric": metric,
            "value": value * second if metric in counters else value,
            "pid": pid,
            "device": device,
        }
        for second in range(seconds)
        for metric, value, pid, device in of
    ]


def gpu(reasons: float, clock: float = 1200, **more: float) -> list[tuple[str, float, int | None, str | None]]:
    levels = {"gpu_sm_clock_mhz": clock, "gpu_sm_clock_max_mhz": 1980, "gpu_clock_reasons": reasons, "gpu_util_pct": 90}
    return [(name, value, None, "gpu:0") for name, value in {**levels, **more}.items()]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (0x40, {"throttled": True}),  # heat
        (0x8, {"throttled": True}),
        (0x80, {"throttled": True}),
        (0x4, {}),  # a power cap as delivered is how the board works
        (0x2, {}),  # clocks that somebody set are the same in every run
        (0x0, {}),
    ],
)
def test_a_gpu_that_is_too_hot_withholds(reasons: int, expected: dict[str, bool]) -> None:
    assert withheld(raised(system=readings(4, gpu(reasons)))) == expected


def test_what_happened_before_the_measured_steps_does_not_count() -> None:
    early = readings(4, gpu(0x40), start=T0 - 10 * S)

    assert raised(system=[*early, *readings(4, gpu(0x0))]) == {}


def test_a_single_hot_reading_is_no_throttling() -> None:
    assert raised(system=[*readings(1, gpu(0x40)), *readings(3, gpu(0), start=T0 + S)]) == {}


def test_another_tenant_of_the_gpu_withholds() -> None:
    ours, theirs = ("gpu_process", 1.0, PID, "gpu:0"), ("gpu_process", 1.0, 4711, "gpu:0")

    assert withheld(raised(system=readings(4, [*gpu(0), ours, theirs]))) == {"other_tenants": True}
    assert raised(system=readings(4, [*gpu(0), ours])) == {}


def cores(busy: float, own_pct: float, delay: float) -> list[tuple[str, float, int | None, str | None]]:
    return [("busy_cores", busy, None, None), ("cpu_pct", own_pct, PID, None), ("run_delay_ns", delay * 1e9, PID, None)]


HARDWARE = [{"hardware": {"affinity": [0, 1]}}]


@pytest.mark.parametrize(
    ("busy", "own_pct", "delay", "expected"),
    [
        (2.0, 120, 0.3, {"other_processes": False}),
        (2.0, 120, 0.02, {}),  # nobody waits
        (1.28, 120, 0.3, {}),  # our own recorder and a little more
        (2.0, 195, 0.5, {}),  # the run's own threads
    ],
)
def test_others_count_where_the_run_waited_for_cores(
    busy: float, own_pct: float, delay: float, expected: dict[str, bool]
) -> None:
    assert withheld(raised(system=readings(4, cores(busy, own_pct, delay)), manifests=HARDWARE)) == expected


def test_too_few_readings_say_nothing() -> None:
    assert raised(system=readings(2, [*cores(2, 50, 0.5), *gpu(0x40)]), manifests=HARDWARE) == {}


# ---------------------------------------------------------------------------------------------- inside the training


def compiled(*steps: int) -> dict[str, Any]:
    return {"compiles": [{"kind": "recompile", "step": step, "time_ns": T0 + step * 10 * MS} for step in steps]}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((0,), {}),  # in warm-up
        ((40,), {"recompiles": True}),
        ((40, 45, 380), {"recompiles": True}),
        (tuple(range(5, 400, 20)), {"recompiles": False}),  # how the run is
    ],
)
def test_recompiles_in_the_measured_part(steps: tuple[int, ...], expected: dict[str, bool]) -> None:
    assert withheld(raised(**compiled(*steps))) == expected


def test_a_graph_break_is_no_compilation() -> None:
    assert raised(compiles=[{"kind": "graph_break", "step": 50}]) == {}


def memory(step: int, retries: int, failed: int = 0) -> dict[str, Any]:
    row = {"kind": "memory", "step": step, "time_ns": T0 + step * 10 * MS, "device": "cuda:0", "private_bytes": 1}
    return {**row, "retries": retries, "out_of_memory": failed, "allocated_bytes": 1}


@pytest.mark.parametrize(
    ("journal", "expected"),
    [
        ([memory(0, 3), memory(100, 3), memory(300, 3)], {}),  # all of them while warming up
        ([memory(0, 0), memory(100, 2), memory(300, 2)], {"allocator_retries": True}),
        ([memory(0, 0), *(memory(step, step) for step in (50, 150, 250, 350))], {"allocator_retries": False}),
        ([memory(0, 0), memory(200, 0, failed=1)], {"out_of_memory": True}),
    ],
)
def test_an_allocator_that_runs_out(journal: list[dict[str, Any]], expected: dict[str, bool]) -> None:
    assert withheld(raised(journal=journal)) == expected


LONG = step_rows(2000)  # twenty seconds


def worker(pid: int, ended_s: float | None, started_s: float = -1.0, **fields: Any) -> dict[str, Any]:
    end = None if ended_s is None else T0 + round(ended_s * S)
    start = T0 + round(started_s * S)
    return {"pid": pid, "ppid": PID, "role": "loader_worker", "start_ns": start, "end_ns": end, **fields}


def with_workers(*workers: dict[str, Any], length: int | None = 2000, count: int = 2) -> dict[str, Any]:
    made = {"kind": "loader", "id": 1, "num_workers": count, "length": length, "time_ns": T0 - S}
    return {"steps": LONG, "processes": [{}, *workers], "journal": [made]}


def test_a_worker_that_died_before_its_siblings_withholds() -> None:
    found = raised(**with_workers(worker(201, 6), worker(202, None, -0.9)))

    assert withheld(found) == {"dead_workers": True}
    assert found["dead_workers"].text == "1 of 2 loader workers ended 14 s before the others"


@pytest.mark.parametrize(
    "workers",
    [
        with_workers(worker(201, 9), worker(202, 10)),  # the end of an epoch
        with_workers(worker(201, 6), worker(202, 14, 6.5)),  # of two epochs
        with_workers(worker(201, -0.5), worker(202, None)),  # before the measured part
        with_workers(worker(201, 3), worker(202, None), count=1),  # each of a loader of its own
        with_workers(worker(201, 21), worker(202, 21)),
    ],
)
def test_workers_that_end_as_they_should(workers: dict[str, Any]) -> None:
    assert raised(**workers) == {}


def test_workers_of_a_data_set_without_a_length_may_end_at_any_time() -> None:
    assert withheld(raised(**with_workers(worker(201, 6), worker(202, None), length=None))) == {"dead_workers": False}


# ------------------------------------------------------------------------------------------------ runs of one kind


def one_run(**changes: Any) -> Measure:
    return measure_of(**{"samples_per_step": 8, "signal": "optimizer", **changes})


def figures(**values: float) -> Measure:
    return one_run(conditions={"cores": 2.0, **values})


def of_set(*sides: list[Measure]) -> list[list[dict[str, bool]]]:
    return [[{flag.name: flag.withholds for flag in each.flags} for each in side] for side in with_flags_of_set(*sides)]


def test_alike_runs_raise_nothing() -> None:
    alike = figures(read_bytes_per_step=4e6, others_cores=0.1, cpu_frequency_mhz=3000, gpu_clock_mhz=1900)

    assert of_set([alike] * 3, [alike] * 3) == [[{}] * 3] * 2
    assert of_set([alike]) == [[{}]]
    assert of_set() == []


def test_the_first_run_that_fills_the_cache_is_withheld() -> None:
    cold, warm = figures(read_bytes_per_step=30e6), figures(read_bytes_per_step=1e4)

    assert of_set([cold, warm, warm], [warm, warm]) == [[{"cold_cache": True}, {}, {}], [{}, {}]]
    assert of_set([cold], [warm]) == [[{"cold_cache": True}], [{}]]
    assert of_set([cold, cold], [cold]) == [[{}, {}], [{}]]  # data that never fits
    assert of_set([figures(read_bytes_per_step=2e5), warm], [warm]) == [[{}, {}], [{}]]  # a log file


def test_page_faults_of_a_cold_cache() -> None:
    cold, warm = figures(major_faults_per_step=40), figures(major_faults_per_step=0)

    assert of_set([warm, cold], [warm]) == [[{}, {"cold_cache": True}], [{}]]


def test_more_pages_mapped_in_longer_steps() -> None:
    many, few = figures(minor_faults_per_step=16_000), figures(minor_faults_per_step=9_000)
    slow = replace(many, mean_ms=110)

    assert of_set([slow], [few]) == [[{"page_faults_differ": False}], [{}]]
    ((flagged,), _) = with_flags_of_set([slow], [few])
    assert "16,000 page faults a step, in the other runs 9,000" in flagged.flags[0].text
    assert of_set([many], [few]) == [[{}], [{}]]  # no longer for it
    assert of_set([replace(few, mean_ms=110)], [many]) == [[{}], [{}]]  # longer for another reason


def test_a_run_that_shared_its_machine_more_than_the_others() -> None:
    busy, quiet = figures(others_cores=1.2), figures(others_cores=0.3)

    assert of_set([busy, quiet], [quiet, quiet]) == [[{"machine_busier": False}, {}], [{}, {}]]
    assert of_set([busy, busy], [busy, quiet]) == [[{}, {}], [{}, {}]]


def test_clocks_are_compared_within_a_side() -> None:
    slow, fast = figures(gpu_clock_mhz=1500), figures(gpu_clock_mhz=1900)

    assert of_set([slow, fast, fast], [fast]) == [[{"clocks_differ": True}, {}, {}], [{}]]
    assert of_set([slow, slow], [fast, fast]) == [[{}, {}], [{}, {}]]  # other work may have another clock


def test_the_clock_of_the_cpu_is_said_and_withholds_nothing() -> None:
    slow, fast = figures(cpu_frequency_mhz=2000), figures(cpu_frequency_mhz=3000)

    assert of_set([slow, fast, fast]) == [[{"clocks_differ": False}, {}, {}]]
    assert of_set([figures(cpu_frequency_mhz=2850), fast]) == [[{}, {}]]


def test_steps_that_were_cut_elsewhere() -> None:
    by_loader = one_run(signal="loader", samples_per_step=4)

    assert of_set([one_run()], [by_loader]) == [[{"cut_differently": True}], [{"cut_differently": True}]]
    assert of_set([one_run()], [one_run(signal="loader")]) == [
        [{"cut_differently": False}],
        [{"cut_differently": False}],
    ]
    assert of_set([one_run()], [one_run(signal=None)]) == [[{}], [{}]]


def test_flags_are_added_once_and_keep_their_one_run() -> None:
    own = Flag("recompiles", "something was compiled", "rank-0/events.jsonl", True)
    cold = replace(figures(read_bytes_per_step=30e6), flags=(own,))
    warm = figures(read_bytes_per_step=1e4)
    (first, second), (third,) = with_flags_of_set([cold, warm], [warm])

    assert [flag.name for flag in first.flags] == ["recompiles", "cold_cache"]
    assert (second.flags, third.flags) == ((), ())
    assert with_flags_of_set([first, second], [third]) == ((first, second), (third,))


# ------------------------------------------------------------------------------------------------------ conditions


def test_figures_are_of_the_measured_steps() -> None:
    system = [
        *readings(3, [("read_bytes", 500e6, PID, None)], start=T0 - 20 * S),  # imports and start-up
        *readings(4, [("read_bytes", 2e6, PID, None), ("read_bytes", 1e6, 300, None), *cores(1.5, 100, 0.1)]),
    ]
    made = make_tables(steps=STEPS, system=system, manifests=HARDWARE, processes=[{}, worker(300, None)])
    measured = measure(made, analyze(made), label="run", path="run")
    assert measured is not None
    found = measured.conditions

    assert found["read_bytes_per_step"] == pytest.approx(3e6 * 3.99 / 399)
    assert found["others_cores"] == pytest.approx(0.5)
    assert found["run_delay_share"] == pytest.approx(0.1)
    assert found["cores"] == 2


# ---------------------------------------------------------------------------------------------------- a real run

SCRIPT = """
import torch
from plain_sgd import PlainSGD
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
model = torch.nn.Linear(16, 1)
optimizer = PlainSGD(model.parameters(), lr=0.01)
for epoch in range(100):
    for x, y in DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
"""


def test_a_recorded_run_is_measured_with_its_knobs_and_losses(tmp_path: Path) -> None:
    """Through the command line and back: a loader knob, a knob that has no occasion, the limit, the losses."""
    from stepscope.read import read_run
    from stepscope.tables import build

    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    shutil.copy(SCRIPTS / "plain_sgd.py", tmp_path)
    options = ["--quiet", "--no-window", "--max-steps", "60", "--seed", "3", "--losses", "--out", str(out)]
    options += ["--knob", "loader.prefetch_factor=2", "--knob", "gc=off"]
    command = [sys.executable, "-m", "stepscope", "run", *options, "--", sys.executable, str(script)]
    subprocess.run(command, check=False, timeout=120, cwd=tmp_path, capture_output=True)

    tables = build(read_run(out))
    analysis = analyze(tables)
    found = measure(tables, analysis, label="run", path=str(out), warmup_limit=20, asked=40)

    assert found is not None
    assert found.steps + found.dropped == 60
    assert 1 <= found.dropped <= 20
    assert sum(part.ms for part in found.phases) == pytest.approx(found.mean_ms)
    assert found.samples_per_step == 16
    assert found.fixed_cost_s is not None
    assert analysis.trial is not None
    assert analysis.trial.seed == 3
    assert [step for step, _ in found.losses][:60] == list(range(60))
    assert {one.knob: one.applied for one in found.knobs} == {"loader.prefetch_factor": False, "gc": True}
    withholding = {flag.name for flag in found.flags if flag.withholds}
    assert withholding == {"knob_not_applied"}  # a loader without workers fetches nothing ahead
