"""The verdict over many ranks: who is late, why, at which line, at which cost; and when it is not said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.analyze.ranks import judge
from stepscope.api import ReadOptions, open_run
from stepscope.errors import UnreadableInputError
from stepscope.model.ranks import RanksVerdict, Straggler
from stepscope.tables.reduced import Group, group_id
from tests.analyze.rank_jobs import BEGIN_US, Job, Pipeline, clock, cores, line
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.records import some

SECOND_RANKS = range(8, 12)  # of the third host


def first(verdict: RanksVerdict) -> Straggler:
    assert verdict.stragglers, verdict.reason
    assert verdict.verdict == verdict.stragglers[0].kind
    return verdict.stragglers[0]


def lost_ms(job: Job) -> float:
    """What was planted: the mean step beside that of the same job, the same noise, without it."""
    healthy = Job(steps=job.steps)
    if job.tokens is not None:  # as many of the others' noise, and those of rank 9 as usual
        tokens = np.where(np.arange(job.ranks) == 9, 1000, job.tokens)
        healthy.compute = healthy.usual()[2] + (tokens - 1000) * 0.1
    return float(job.walls().mean() - healthy.walls().mean())


def late_data(job: Job) -> None:
    job.data = job.usual()[0]
    job.data[:, 9] += 25
    job.rows["lines"] = [
        *(line(rank, "forward", 40, 600) for rank in range(16)),
        *(line(rank, "data_wait", 12, 400 if rank == 9 else 20, waiting=True) for rank in range(16)),
    ]


def late_line(job: Job) -> None:
    job.forward = job.usual()[1]
    job.forward[:, 9] += 25
    job.rows["lines"] = [
        *(line(rank, "forward", 40, 600) for rank in range(16)),
        line(9, "forward", 51, 300),
        line(9, "forward", 70, 900, waiting=True),
    ]


def late_gc(job: Job) -> None:
    job.gc = np.zeros((job.steps, job.ranks))
    job.gc[:, 9] = 25
    job.forward = job.usual()[1] + job.gc


def late_retries(job: Job) -> None:
    job.forward = job.usual()[1]
    rows = []
    for step in range(0, job.steps, 2):
        job.forward[step, 9] += 50
        rows.append({"rank": 9, "step": step, "start_us": BEGIN_US, "duration_us": 50_000, "kind": "retry"})
    job.rows["events"] = rows


def slow_device(job: Job, mhz: float) -> None:
    job.compute = job.usual()[2]
    job.compute[:, 9] += 25
    job.rows["telemetry"] = [
        clock(rank, mhz if rank == 9 else 1980, second) for rank in range(16) for second in (0, 10)
    ]


def more_tokens(job: Job) -> None:
    job.tokens = np.random.default_rng(5).integers(950, 1050, (job.steps, job.ranks)).astype(float)
    job.tokens[:, 9] = 1300
    job.compute = job.usual()[2] + (job.tokens - 1000) * 0.1


ON_RANK_9: list[tuple[str, Callable[[Job], None], str, int | None]] = [
    ("data", late_data, "data", 12),
    ("line", late_line, "python", 51),
    ("gc", late_gc, "gc", None),
    ("retries", late_retries, "memory", None),
    ("device", lambda job: slow_device(job, 1979), "compute", None),
    ("clock", lambda job: slow_device(job, 1500), "clock", None),
    ("tokens", more_tokens, "sequence_length", None),
]


@pytest.mark.parametrize(("plant", "cause", "number"), [case[1:] for case in ON_RANK_9], ids=[c[0] for c in ON_RANK_9])
def test_a_late_rank_its_cause_line_and_cost(plant: Callable[[Job], None], cause: str, number: int | None) -> None:
    job = Job()
    plant(job)
    found = judge(job.reduced())
    late = first(found)
    assert (late.kind, late.ranks, late.hosts, late.cause) == ("rank", (9,), ("node2",), cause)
    assert (late.place.line if late.place else None) == number
    assert late.cost_ms == pytest.approx(lost_ms(job), rel=0.1)
    assert late.peers == "all other ranks"
    assert len(found.stragglers) == 1
    assert found.suspects[0] == 9
    assert len(found.suspects) == 3
    assert some(found.slowdown) > 1.1


def test_what_was_not_recorded_is_unknown_and_no_guess() -> None:
    device, host = Job(), Job()
    slow_device(device, 1500)
    late_line(host)
    device.rows.clear()
    host.rows.clear()
    for job in (device, host):
        late = first(judge(job.reduced()))
        assert (late.ranks, late.cause, late.place) == ((9,), "unknown", None)
        assert "not recorded" in late.cause_source or "no stacks" in late.cause_source


def test_all_of_a_host_are_one_and_other_processes_its_cause() -> None:
    job = Job()
    job.data = job.usual()[0]
    job.data[:, SECOND_RANKS] += np.random.default_rng(1).normal(25, 1, (job.steps, 4))
    late = first(judge(job.reduced()))
    assert (late.kind, late.hosts, late.ranks, late.cause) == ("host", ("node2",), tuple(SECOND_RANKS), "data")
    job.rows["telemetry"] = [cores(node, 60.0 if node == 2 else 18.0) for node in range(4)]
    late = first(judge(job.reduced()))
    assert (late.kind, late.cause) == ("host", "other_processes")
    assert late.cost_ms == pytest.approx(lost_ms(job), rel=0.1)


@pytest.mark.parametrize("cause", ["gc", "data", "sequence_length"])
def test_what_goes_from_rank_to_rank_is_blamed_on_none(cause: str) -> None:
    job = Job(ranks=32, windows=40)
    random = np.random.default_rng(11)
    spikes = np.zeros((job.steps, job.ranks))
    for step in range(job.steps):
        spikes[step, random.choice(job.ranks, 2, replace=False)] = random.uniform(40, 60, 2)
    if cause == "gc":
        job.gc, job.forward = spikes, job.usual()[1] + spikes
    elif cause == "data":
        job.data = job.usual()[0] + spikes
    else:
        job.tokens = random.integers(700, 1300, spikes.shape).astype(float)
        job.compute = job.usual()[2] + (job.tokens - 1000) * 0.1
    late = first(judge(job.reduced()))
    assert (late.kind, late.cause) == ("rotating", cause)
    assert len(late.ranks) == 16
    assert late.cost_ms == pytest.approx(job.walls().mean() - Job(ranks=32).walls().mean(), rel=0.1)


def test_checkpoints_of_a_rank_and_steps_slow_for_all() -> None:
    job = Job(steps=200)
    job.wall = np.repeat(job.walls()[:, None], 16, axis=1)
    job.wall[20::20] += 700
    saves = [
        {"rank": 0, "step": step - 1, "start_us": BEGIN_US, "duration_us": 700_000, "kind": "checkpoint",
         "file": "/home/user/train.py", "line": 70, "function": "save"}
        for step in range(20, 200, 20)
    ]  # fmt: skip
    job.rows["events"] = saves
    late = first(judge(job.reduced()))
    assert (late.kind, late.ranks, late.cause) == ("rank", (0,), "checkpoint")
    assert some(late.place).line == 70
    job.rows["events"] = []
    late = first(judge(job.reduced()))
    assert (late.kind, late.cause) == ("global", "unknown")
    assert late.cost_ms == pytest.approx(700 * 9 / 200, rel=0.1)
    job.data = job.usual()[0]
    job.data[20::20] += 700
    assert (first(judge(job.reduced())).kind, first(judge(job.reduced())).cause) == ("global", "data")


def test_a_clock_that_drops_now_and_then_between_the_windows() -> None:
    job = Job(steps=800, windows=20)
    walls = job.walls()
    low = np.arange(job.steps) // 200 % 2 == 1
    low[-20:] = False
    walls[low] += 30
    job.wall = np.repeat(walls[:, None], 16, axis=1)
    starts = np.concatenate([[0.0], np.cumsum(walls)[:-1]]) / 1000
    seconds = range(0, int(starts[-1]), 10)
    dropped = {second: bool(low[np.searchsorted(starts, second + 5)]) for second in seconds}
    job.rows["telemetry"] = [
        clock(rank, 1500 if rank == 9 and dropped[second] else 1980, second) for rank in range(16) for second in seconds
    ]
    job.shift_us = {0: 40_000, 2: -50_000}
    late = first(judge(job.reduced()))
    assert (late.kind, late.ranks, late.cause) == ("rank", (9,), "clock")
    assert late.cost_ms == pytest.approx(30 * low.mean(), rel=0.1)


def test_a_healthy_job_with_wrong_clocks_is_told_so() -> None:
    found = judge(Job(shift_us={0: -50_000, 1: 40_000, 3: 5_000_000}).reduced())
    assert (found.verdict, found.stragglers) == ("none", ())
    assert some(found.least_ms) < 0.05 * some(found.step_ms)


def test_absent_ranks_are_named_and_the_others_judged() -> None:
    job = Job()
    late_data(job)
    job.absent = (3, 12)
    found = judge(job.reduced())
    assert found.missing == (3, 12)
    assert first(found).ranks == (9,)
    job.absent = (9, 12)
    found = judge(job.reduced())
    assert (found.verdict, found.missing) == ("none", (9, 12))
    assert "of 2 ranks nothing was recorded" in found.reason


def test_too_little_to_tell_is_an_answer() -> None:
    def reason(job: Job) -> str:
        found = judge(job.reduced())
        assert (found.verdict, found.stragglers) == ("not_enough", ())
        return found.reason

    assert "1 rank has steps" in reason(Job(ranks=1))
    assert "8 steps count" in reason(Job(steps=8, windows=0))
    assert "neither phases of the host nor the work of devices" in reason(Job(phases=False, windows=0))
    assert "of 16 ranks could be laid beside peers" in reason(Job(absent=range(6)))
    assert "too few windows" in reason(Pipeline(windows=4).job())
    two = Job(ranks=2, steps=60, windows=6, forward=np.random.default_rng(1).normal((40, 60), 15, (60, 2)))
    assert "of 2 ranks none" in reason(two)
    empty = Job().reduced()
    frames = {host: {table: frame.clear() for table, frame in tables.items()} for host, tables in empty.frames.items()}
    bare = type(empty)(folder=empty.folder, hosts=empty.hosts, problems=(), frames=frames)
    assert judge(bare).verdict == "not_enough"


def test_the_slot_is_told_by_its_device_though_all_slots_pass_late() -> None:
    pipeline = Pipeline(tp=2, dp=3, slow={9: 1.25})
    late = first(judge(pipeline.job().reduced()))
    assert (late.kind, late.ranks) == ("rank", (9,))
    assert late.peers == "the same pipeline stage and tensor slot in 2 other replicas"


def test_a_slot_that_was_not_recorded_is_not_laid_to_the_one_beside_it() -> None:
    found = judge(Pipeline(tp=2, dp=3, slow={9: 1.25}, absent=(9,)).job().reduced())
    assert (found.verdict, found.stragglers) == ("not_enough", ())
    assert "rank 8 waits" in found.reason
    assert "rank 9, of which nothing was recorded" in found.reason


def test_a_rank_late_in_some_of_the_steps_is_named() -> None:
    job = Job(forward=Job().usual()[1])
    assert job.forward is not None
    job.forward[::4, 9] += 80
    late = first(judge(job.reduced()))
    assert (late.kind, late.ranks) == ("rank", (9,))
    assert late.cost_ms == pytest.approx(lost_ms(job), rel=0.1)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_heavy_stage_is_no_late_rank(dp: int) -> None:
    factor = np.ones((60, dp, 3, 6))
    factor[:, :, 2] = 1.3
    pipeline = Pipeline(dp=dp, factor=factor)
    found = judge(pipeline.job().reduced())
    late = first(found)
    assert (late.kind, late.stage, late.cause) == ("stage", 2, "stage")
    planted = pipeline.play(pipeline.spent())[1].mean() - pipeline.play(pipeline.base())[1].mean()
    assert late.cost_ms == pytest.approx(planted, rel=0.1)
    assert all(one.kind == "stage" for one in found.stragglers)
    assert ("a slow device would look the same" in late.cause_source) is (dp == 1)


def test_uneven_microbatches_are_told_by_all_stages_together() -> None:
    factor = np.random.default_rng(4).lognormal(0, 0.35, (60, 4, 1, 6)) * np.ones((1, 1, 3, 1))
    pipeline = Pipeline(factor=factor)
    found = judge(pipeline.job().reduced())
    late = first(found)
    assert (late.kind, late.cause) == ("rotating", "sequence_length")
    even = np.broadcast_to(factor.mean(axis=(1, 3), keepdims=True), factor.shape)
    planted = pipeline.play(pipeline.spent())[1].mean() - pipeline.play(pipeline.base() * even)[1].mean()
    assert late.cost_ms == pytest.approx(planted, rel=0.1)
    assert not [one for one in found.stragglers if one.kind in ("rank", "host")]
    one_stage = np.ones((60, 4, 3, 6))
    one_stage[:, :, 1] = factor[:, :, 0]
    assert all(one.cause != "sequence_length" for one in judge(Pipeline(factor=one_stage).job().reduced()).stragglers)


def test_a_healthy_pipeline_and_one_with_absent_ranks() -> None:
    assert judge(Pipeline().job().reduced()).verdict == "none"
    found = judge(Pipeline(slow={5: 1.25}, absent=(1, 7)).job().reduced())
    assert first(found).ranks == (5,)
    assert found.missing == (1, 7)


def pairs(job: Job, slow: int, spent_ms: float) -> None:
    """Groups of two neighbours on different hosts, each with a call in every step of windows."""
    groups = [Group(group_id((rank, rank + 4), "mesh_dp"), (rank, rank + 4), "mesh_dp") for rank in (0, 1, 2, 3, 8, 9)]
    whole = Group(group_id(range(16), "default_pg"), tuple(range(16)), "default_pg")
    calls = []
    for step in job.window_steps():
        for number, group in enumerate(groups):
            for rank in group.ranks:
                more = spent_ms if number == slow else 5.0
                calls.append(call(rank, step, group.id, "all_reduce", more + (3.0 if rank == group.ranks[0] else 0.0)))
        for rank in range(16):
            late = spent_ms - 5.0 if rank in groups[slow].ranks else 0.0
            calls.append(call(rank, step, whole.id, "barrier", 21.0 - late))
    job.groups = (*groups, whole)
    job.rows["collectives"] = calls


def call(rank: int, step: int, group: str, kind: str, ms: float) -> dict[str, Any]:
    start = (BEGIN_US + step * 200_000) * 1000
    return {"rank": rank, "step": step, "group": group, "sequence": 0, "kind": kind, "start_ns": start,
            "end_ns": start + int(ms * 1e6), "bytes": 2**20, "basis": "device"}  # fmt: skip


def test_a_slow_link_beside_groups_alike() -> None:
    job = Job()
    pairs(job, 4, 25.0)
    late = first(judge(job.reduced()))
    assert (late.kind, late.cause, late.ranks, late.group) == ("link", "link", (8, 12), job.groups[4].id)
    assert late.cost_ms == pytest.approx(20, rel=0.1)
    job.absent = (12,)  # without all members the shortest stay may be a wait
    assert judge(job.reduced()).verdict == "none"
    healthy = Job()
    pairs(healthy, 4, 5.0)
    assert judge(healthy.reduced()).verdict == "none"


def test_stages_are_known_by_the_names_of_groups() -> None:
    pipeline = Pipeline(slow={5: 1.25})
    job = pipeline.job()
    job.places = ()
    stages = [tuple(range(stage * 4, stage * 4 + 4)) for stage in range(3)]
    pipes = [tuple(dp + 4 * stage for stage in range(3)) for dp in range(4)]
    job.groups = (
        *job.groups,
        *(Group(group_id(ranks, "DATA_PARALLEL_GROUP"), ranks, "DATA_PARALLEL_GROUP") for ranks in stages),
        *(Group(group_id(ranks, "PIPELINE_MODEL_PARALLEL_GROUP"), ranks, "PIPELINE_MODEL_PARALLEL_GROUP")
          for ranks in pipes),
    )  # fmt: skip
    found = judge(job.reduced())
    assert "told by the groups' names" in found.layout
    assert first(found).ranks == (5,)
    job.groups = ()
    unknown = judge(job.reduced())
    assert "unknown" in unknown.layout
    assert first(unknown).peers == "all other ranks: the layout is not known"


def test_damaged_values_change_no_verdict() -> None:
    job = Job()
    late_data(job)
    whole = Group(group_id(range(16), "default_pg"), tuple(range(16)), "default_pg")
    job.groups = (whole,)
    job.rows["collectives"] = [
        call(rank, step, whole.id, "all_reduce", 5.0 if rank == 9 else 30.0)
        for step in job.window_steps()
        for rank in range(16)
    ]
    usual = judge(job.reduced())
    job.rows["collectives"] += [
        call(1, -5, "nobody", "all_reduce", 1.0),
        call(2, 110, "nobody", "all_reduce", -4.0),
        {**call(2, 110, job.groups[0].id, "send", 5.0), "end_ns": 2**62, "sequence": -1},
        {**call(2, 110, job.groups[0].id, "all_reduce", 5.0), "start_ns": -(2**62)},
    ]
    job.rows["work"] = [
        {
            "rank": 3,
            "step": 110,
            "kind": "forward",
            "microbatch": 2**31 - 1,
            "chunk": -7,
            "start_ns": 0,
            "end_ns": 2**62,
        },
        {"rank": 3, "step": -1, "kind": "backward", "microbatch": None, "chunk": None, "start_ns": 9, "end_ns": 1},
        {"rank": 4, "step": 110, "kind": "<b>", "microbatch": -1, "chunk": 2**31 - 1, "start_ns": 1, "end_ns": 2},
    ]
    job.rows["telemetry"] = [
        clock(1, float("nan")), clock(2, float("inf")), clock(3, -1e300), {**clock(4, 1980), "start_us": 2**62},
        cores(0, float("nan")), cores(1, 1e300),
    ]  # fmt: skip
    job.rows["events"] = [
        {"rank": rank, "step": step, "start_us": 0, "duration_us": length, "kind": kind}
        for kind in ("retry", "checkpoint", "gc", "?")
        for rank, step, length in ((5, -3, 2**60), (6, None, 1000), (7, 50, -1))
    ]
    job.rows["lines"].append(line(5, "data_wait", -1, -(2**60)))
    found = judge(job.reduced())
    assert [(one.kind, one.ranks, one.cause) for one in found.stragglers] == [("rank", (9,), "data")]
    assert first(found).cost_ms == pytest.approx(first(usual).cost_ms)


JOBS = TRACES / "ranks" / "straggler_analysis"
UNCACHED = ReadOptions(cache=False, keep=False)


@needs_traces
@pytest.mark.parametrize(
    ("name", "kind", "ranks", "stage", "slowdown"),
    [("AR", "rank", (0,), None, 1.973), ("ST", "stage", (6, 7), 3, 1.179)],
)
def test_published_answers_to_real_jobs(
    name: str, kind: str, ranks: tuple[int, ...], stage: int | None, slowdown: float
) -> None:
    run = open_run(JOBS / f"trace-{name}.parquet", options=UNCACHED)
    found = some(run.many_ranks)
    late = first(found)
    assert (late.kind, late.ranks, late.stage) == (kind, ranks, stage)
    assert late.share_of_steps > 0.9
    assert found.slowdown == pytest.approx(slowdown, abs=0.05)
    if name == "AR":  # its range around a collective ends 9.8 ms late in every step: work in it, not its clock
        assert len(some(found.missing)) == 48
        assert all(abs(one.offset_us) < 2000 for one in found.clocks if one.offset_us is not None)
        assert any("rank 0 ends" in one.reason and "not its clock" in one.reason for one in found.clocks)
    assert any(finding.rule == "communication.late_ranks" for finding in run.diagnosis.findings)


def operations(steps: int = 24) -> pl.DataFrame:
    """Two replicas of two stages, two microbatches; stage 1 takes half as long again."""
    rows = []
    for step in range(steps):
        for dp in range(2):
            for stage in range(2):
                spent, at = 0.1 * (1 + 0.5 * stage), 0.1 * stage
                for number in range(2):
                    for kind in ("forward-compute", "backward-compute"):
                        rows.append((dp, stage, 2 * stage + dp, step, kind, at, spent, number, 0, number, stage))
                        at += spent
                rows.append((dp, stage, 2 * stage + dp, step, "params-all-gather", at, 0.9 - at, 0, 0, -1, -1))
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
    kinds = {"start_ts": pl.Float32, "duration": pl.Float32, "optype": pl.Categorical}
    return pl.DataFrame(rows, schema=list(names), orient="row").cast(
        {name: kinds.get(name, pl.Int32) for name in names}
    )


def test_a_trace_of_operators_is_read_and_damaged_rows_are_counted(tmp_path: Path) -> None:
    good = operations()
    bad = good.head(6).with_columns(
        start_ts=pl.Series([0.0] * 5 + [80_000.0], dtype=pl.Float32),
        duration=pl.Series([float("nan"), -1.0, 1e30, 1.0, 1.0, 1.0], dtype=pl.Float32),
        optype=pl.Series(["forward-compute"] * 4 + ["<script>", "gc"], dtype=pl.Categorical),
        rank=pl.Series([0, 0, 0, -4, 0, 0], dtype=pl.Int32),
    )
    path = tmp_path / "trace-X.parquet"
    pl.concat([good, bad]).write_parquet(path)
    (tmp_path / "meta-X.yaml").write_text("world_size: 8\ntp_size: 2\npp_size: !!python/object:os.system 2\n")
    run = open_run(path, options=UNCACHED)
    assert run.many_ranks is not None
    assert any(f"6 of {good.height + 6} rows left out" in problem for problem in some(run.reduced).problems)
    assert run.many_ranks.world_size == 8
    assert first(run.many_ranks).stage == 1


@pytest.mark.parametrize("damage", ["other columns", "text in a number", "cut off", "no rows"])
def test_what_is_no_trace_of_operators_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "trace-X.parquet"
    good = operations(2)
    if damage == "other columns":
        good.drop("optype").write_parquet(path)
    elif damage == "text in a number":
        good.with_columns(pl.col("step").cast(pl.String)).write_parquet(path)
    elif damage == "cut off":
        good.write_parquet(path)
        path.write_bytes(path.read_bytes()[:200])
    else:
        good.clear().write_parquet(path)
    with pytest.raises(UnreadableInputError) as error:
        open_run(path, options=UNCACHED).load()
    assert "\n" not in str(error.value)
    assert "trace-X.parquet" in str(error.value)
