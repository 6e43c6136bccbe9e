"""What makes the timing of a run doubtful, over the steps that were measured and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.comparison.flags import with_flags_of_set
from stepscope.comparison.measure import measure
from stepscope.model.comparison import Flag, Measure
from tests.builders import MS, PID, T0, make_tables, step_rows
from tests.comparison.measures import measure as measure_of
from tests.records import replace, some

S = 1000 * MS
STEPS = step_rows(400)  # 10 ms each; four seconds
LONG = step_rows(2000)  # twenty seconds
HARDWARE = [{"hardware": {"affinity": [0, 1]}}]

Reading = tuple[str, float, "int | None", "str | None"]  # metric, growth or level, pid, device


def measured(*, asked: int | None = None, **tables: Any) -> Measure:
    """Of a run of `STEPS`."""
    made = make_tables(**{"steps": STEPS, **tables})
    return some(measure(made, analyze(made), label="run", path="run", asked=asked))


def ended(status: int | None, *, limited: bool = False, **run: Any) -> dict[str, Any]:
    journal = [{"kind": "exit", "reason": "max_steps" if limited else "atexit"}]
    return {"run": {"exit_status": status, **run}, "journal": journal}


def knob(name: str, applied: bool, **fields: Any) -> dict[str, Any]:
    return {"kind": "knob", "knob": name, "value": "2", "applied": applied, **fields}


def readings(seconds: int, *of: Reading, start: int = T0) -> list[dict[str, Any]]:
    """Once a second. Counters grow by the value with every reading."""
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


def gpu(reasons: float, *pids: int) -> list[Reading]:
    levels = {"gpu_sm_clock_mhz": 1200, "gpu_sm_clock_max_mhz": 1980, "gpu_clock_reasons": reasons, "gpu_util_pct": 90}
    processes: list[Reading] = [("gpu_process", 1.0, pid, "gpu:0") for pid in pids]
    return [*((name, value, None, "gpu:0") for name, value in levels.items()), *processes]


def hot(reasons: int, *pids: int) -> dict[str, Any]:
    return {"system": readings(4, *gpu(reasons, *pids))}


def cores(busy: float, own_pct: float, delay: float) -> list[Reading]:
    return [("busy_cores", busy, None, None), ("cpu_pct", own_pct, PID, None), ("run_delay_ns", delay * 1e9, PID, None)]


def shared(busy: float, own_pct: float, delay: float) -> dict[str, Any]:
    return {"system": readings(4, *cores(busy, own_pct, delay)), "manifests": HARDWARE}


def compiled(*steps: int) -> dict[str, Any]:
    return {"compiles": [{"kind": "recompile", "step": step, "time_ns": T0 + step * 10 * MS} for step in steps]}


def memory(*known: tuple[int, int, int]) -> dict[str, Any]:
    """Readings of (step, allocations tried again, allocations failed)."""
    row = {"kind": "memory", "device": "cuda:0", "private_bytes": 1, "allocated_bytes": 1}
    return {
        "journal": [
            {**row, "step": step, "time_ns": T0 + step * 10 * MS, "retries": retries, "out_of_memory": failed}
            for step, retries, failed in known
        ]
    }


def worker(pid: int, ended_s: float | None, started_s: float = -1.0) -> dict[str, Any]:
    end = None if ended_s is None else T0 + round(ended_s * S)
    start = T0 + round(started_s * S)
    return {"pid": pid, "ppid": PID, "role": "loader_worker", "start_ns": start, "end_ns": end}


def workers(*of: dict[str, Any], length: int | None = 2000, count: int = 2) -> dict[str, Any]:
    made = {"kind": "loader", "id": 1, "num_workers": count, "length": length, "time_ns": T0 - S}
    return {"steps": LONG, "processes": [{}, *of], "journal": [made]}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"asked": 300}, {}),
        # how the run went
        (ended(130, limited=True), {}),
        (ended(1, limited=True), {"ended_oddly": False}),
        (ended(130), {"interrupted": False}),
        (ended(1), {"run_failed": True}),
        (ended(None, ended_ns=None), {"run_unfinished": False}),
        (ended(None), {}),  # stepscope.profile has no command that ends
        (ended(None, ended_ns=None, hosts=()), {}),  # traces of others
        ({"journal": [knob("gc", True), knob("amp.dtype", False, reason="no CUDA")]}, {"knob_not_applied": True}),
        ({"manifests": [{"options": {"knobs": [["gc", "off"]]}}]}, {"knob_not_applied": True}),  # never reported
        (
            {"journal": [knob("k", True, file="/t.py", line=3), knob("k", False, file="/t.py", line=9)]},
            {"knob_partly_applied": False},
        ),
        ({"asked": 399}, {}),
        ({"asked": 400}, {"few_steps": False}),
        ({"asked": 799}, {"few_steps": True}),
        ({"manifests": [{"options": {"max_steps": 1000}}]}, {"few_steps": True}),
        ({"manifests": [{"options": {"max_steps": 400}}]}, {}),
        ({"steps": STEPS[:8]}, {"few_steps": False}),
        # the machine
        (hot(0x40), {"throttled": True}),
        (hot(0x8), {"throttled": True}),
        (hot(0x80), {"throttled": True}),
        (hot(0x4), {}),  # a power cap as delivered is how the board works
        (hot(0x2), {}),  # clocks that somebody set are the same in every run
        (
            {"system": [*readings(4, *gpu(0x40), start=T0 - 10 * S), *readings(4, *gpu(0x0))]},
            {},  # before the measured steps
        ),
        ({"system": [*readings(1, *gpu(0x40)), *readings(3, *gpu(0), start=T0 + S)]}, {}),  # a single reading
        (hot(0, PID, 4711), {"other_tenants": True}),
        (hot(0, PID), {}),
        (shared(2.0, 120, 0.3), {"other_processes": False}),
        (shared(2.0, 120, 0.02), {}),  # nobody waits
        (shared(1.28, 120, 0.3), {}),  # our own recorder and a little more
        (shared(2.0, 195, 0.5), {}),  # the run's own threads
        ({"system": readings(2, *cores(2, 50, 0.5), *gpu(0x40)), "manifests": HARDWARE}, {}),  # too few readings
        # inside the training
        (compiled(0), {}),  # in warm-up
        (compiled(40), {"recompiles": True}),
        (compiled(40, 45, 380), {"recompiles": True}),
        (compiled(*range(5, 400, 20)), {"recompiles": False}),  # how the run is
        ({"compiles": [{"kind": "graph_break", "step": 50}]}, {}),
        (memory((0, 3, 0), (100, 3, 0), (300, 3, 0)), {}),  # all of them while warming up
        (memory((0, 0, 0), (100, 2, 0), (300, 2, 0)), {"allocator_retries": True}),
        (memory((0, 0, 0), *((step, step, 0) for step in (50, 150, 250, 350))), {"allocator_retries": False}),
        (memory((0, 0, 0), (200, 0, 1)), {"out_of_memory": True}),
        (workers(worker(201, 6), worker(202, None, -0.9)), {"dead_workers": True}),
        (workers(worker(201, 6), worker(202, None), length=None), {"dead_workers": False}),  # may end at any time
        (workers(worker(201, 9), worker(202, 10)), {}),  # the end of an epoch
        (workers(worker(201, 6), worker(202, 14, 6.5)), {}),  # of two epochs
        (workers(worker(201, -0.5), worker(202, None)), {}),  # before the measured part
        (workers(worker(201, 3), worker(202, None), count=1), {}),  # each of a loader of its own
    ],
)
def test_flags_of_a_run(tables: dict[str, Any], expected: dict[str, bool]) -> None:
    found = measured(**tables).flags
    assert {flag.name: flag.withholds for flag in found} == expected
    assert all(flag.text and flag.source and not flag.text.endswith(".") for flag in found)


def test_flags_say_what_was_seen_and_where() -> None:
    (refused,) = measured(journal=[knob("amp.dtype", False, reason="no CUDA device")]).flags
    assert (refused.text, refused.source) == (
        "knob amp.dtype=2 was not applied: no CUDA device",
        "rank-0/events.jsonl",
    )
    (dead,) = measured(**workers(worker(201, 6), worker(202, None, -0.9))).flags
    assert dead.text == "1 of 2 loader workers ended 14 s before the others"


def test_figures_are_of_the_measured_steps() -> None:
    system = [
        *readings(3, ("read_bytes", 500e6, PID, None), start=T0 - 20 * S),  # imports and start-up
        *readings(4, ("read_bytes", 2e6, PID, None), ("read_bytes", 1e6, 300, None), *cores(1.5, 100, 0.1)),
    ]
    found = measured(system=system, manifests=HARDWARE, processes=[{}, worker(300, None)]).conditions

    assert found["read_bytes_per_step"] == pytest.approx(3e6 * 3.99 / 399)
    assert found["others_cores"] == pytest.approx(0.5)
    assert found["run_delay_share"] == pytest.approx(0.1)
    assert found["cores"] == 2


def run(mean_ms: float = 100.0, **figures: float) -> Measure:
    return measure_of(mean_ms, samples_per_step=8, signal="optimizer", conditions={"cores": 2.0, **figures})


def cut_by(signal: str | None, samples: float = 8.0) -> Measure:
    return replace(run(), signal=signal, samples_per_step=samples)


COLD, WARM = run(read_bytes_per_step=30e6), run(read_bytes_per_step=1e4)
MANY, FEW = run(minor_faults_per_step=16_000), run(minor_faults_per_step=9_000)
BUSY, QUIET = run(others_cores=1.2), run(others_cores=0.3)
SLOW, FAST = run(gpu_clock_mhz=1500), run(gpu_clock_mhz=1900)


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        # the first run that fills the cache is withheld
        (([COLD, WARM, WARM], [WARM, WARM]), [[{"cold_cache": True}, {}, {}], [{}, {}]]),
        (([COLD], [WARM]), [[{"cold_cache": True}], [{}]]),
        (([COLD, COLD], [COLD]), [[{}, {}], [{}]]),  # data that never fits
        (([run(read_bytes_per_step=2e5), WARM], [WARM]), [[{}, {}], [{}]]),  # a log file
        (([run(major_faults_per_step=0), run(major_faults_per_step=40)],), [[{}, {"cold_cache": True}]]),
        # more pages mapped in longer steps
        (([replace(MANY, mean_ms=110)], [FEW]), [[{"page_faults_differ": False}], [{}]]),
        (([MANY], [FEW]), [[{}], [{}]]),  # no longer for it
        (([replace(FEW, mean_ms=110)], [MANY]), [[{}], [{}]]),  # longer for another reason
        # others on the machine
        (([BUSY, QUIET], [QUIET, QUIET]), [[{"machine_busier": False}, {}], [{}, {}]]),
        (([BUSY, BUSY], [BUSY, QUIET]), [[{}, {}], [{}, {}]]),
        # clocks, within a side: other work may have another clock
        (([SLOW, FAST, FAST], [FAST]), [[{"clocks_differ": True}, {}, {}], [{}]]),
        (([SLOW, SLOW], [FAST, FAST]), [[{}, {}], [{}, {}]]),
        (([run(cpu_frequency_mhz=2000), run(cpu_frequency_mhz=3000)],), [[{"clocks_differ": False}, {}]]),
        # steps that were cut elsewhere
        (([run()], [cut_by("loader", 4)]), [[{"cut_differently": True}], [{"cut_differently": True}]]),
        (([run()], [cut_by("loader")]), [[{"cut_differently": False}], [{"cut_differently": False}]]),
        (([run()], [cut_by(None)]), [[{}], [{}]]),
    ],
)
def test_flags_that_only_the_other_runs_make_visible(
    sides: tuple[list[Measure], ...], expected: list[list[dict[str, bool]]]
) -> None:
    flagged = with_flags_of_set(*sides)
    assert [[{flag.name: flag.withholds for flag in one.flags} for one in side] for side in flagged] == expected


def test_flags_are_added_once_and_keep_their_run() -> None:
    own = Flag("recompiles", "something was compiled", "rank-0/events.jsonl", True)
    (first, second), (third,) = with_flags_of_set([replace(COLD, flags=(own,)), WARM], [WARM])

    assert [flag.name for flag in first.flags] == ["recompiles", "cold_cache"]
    assert with_flags_of_set([first, second], [third]) == ((first, second), (third,))
