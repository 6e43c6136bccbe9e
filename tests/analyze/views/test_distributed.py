"""Several workers side by side: who waits for whom, with ranks missing, clocks apart and runs mixed up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import communication
from stepscope.engine.spans import Base
from stepscope.model.views import Distributed, WorkerShare
from tests.analyze.traces import Slices, tables
from tests.analyze.views.collective_traces import US, Rank, opened, written
from tests.builders import T0
from tests.run_folders import make_run_folder

DDP = Path(__file__).parent / "scripts" / "gloo_ddp.py"
TIMEOUT_S = 120


def seen(folder: Path, *ranks: Rank) -> Distributed:
    found = communication.distributed(written(folder, *ranks))
    assert found is not None
    return found


def refused(*paths: Path) -> str:
    """The reason why there is no view."""
    traces = opened(*paths)
    assert communication.distributed(traces) is None
    return str(communication.why_not_distributed(traces))


def shares(found: Distributed) -> dict[int, WorkerShare]:
    return {worker.span.rank: worker for worker in found.workers}


def talking(
    rank: int, waits: Sequence[float], *, size: int = 4, sequences: Sequence[int] | None = None, **more: float
) -> Rank:
    """A rank with one step per all-reduce, which takes 10 µs after a wait; steps are 100 µs, half of it computation."""
    made = Rank(rank, size, **more)
    for number, wait in enumerate(waits):
        begin = 100.0 * number
        made.step(number, begin, 100)
        made.compute(begin + 10, 50)
        sequence = sequences[number] if sequences is not None else None
        made.collective(begin + 70 - wait, 10 + wait, ranks=range(size), sequence=sequence, at=begin + 5)
    return made


def test_straggler_among_four_ranks_with_one_missing(tmp_path: Path):
    found = seen(tmp_path, *(talking(rank, [0 if rank == 2 else 20] * 3, sequences=[7, 8, 9]) for rank in (0, 1, 2)))
    assert found.missing_ranks == (3,)
    assert (found.matched, found.unmatched) == (3, 0)
    for rank, worker in shares(found).items():
        waits = 0 if rank == 2 else 20
        assert (worker.steps, worker.wall_ns) == (3, 100 * US)
        assert (worker.transferring_ns, worker.synchronizing_ns) == (10 * US, waits * US)
        overlap = 10 if rank != 2 else 0
        assert (worker.computation_ns, worker.overlap_ns) == ((50 - overlap) * US, overlap * US)
        assert worker.communication_ns == (10 + waits - overlap) * US
    (row,) = found.collectives
    assert (row.name, row.calls, row.workers, row.total_bytes, row.last_rank) == ("all_reduce", 3, 3, 12000, 2)
    assert row.transferring_ns == 10 * US
    assert row.mean_ns == row.transferring_ns + row.synchronizing_ns == pytest.approx((30 + 30 + 10) / 3 * US)
    assert any("rank 3" in note for note in found.notes)


def test_clocks_of_hosts_are_not_compared(tmp_path: Path):
    here = seen(tmp_path / "a", talking(0, [5, 0], size=2), talking(1, [0, 9], size=2))
    apart = seen(tmp_path / "b", talking(0, [5, 0], size=2), talking(1, [0, 9], size=2, shift_us=900e6))
    assert here == apart


def test_groups_of_one_name_with_other_ranks_are_other_groups(tmp_path: Path):
    made = [Rank(rank, 4) for rank in range(4)]
    for rank in made:
        members = (0, 1) if rank.rank < 2 else (2, 3)
        rank.collective(0, 10 + rank.rank, group="1", ranks=members, sequence=1)
    found = seen(tmp_path, *made)
    assert sorted((row.group, row.workers, row.calls, row.transferring_ns) for row in found.collectives) == [
        ("1 [0, 1]", 2, 1, 10 * US),
        ("1 [2, 3]", 2, 1, 12 * US),
    ]


def test_files_that_name_no_rank_are_compared_with_a_note(tmp_path: Path):
    for name in ("a", "b"):
        rank = Rank(0)
        rank.collective(0, 10)
        rank.write(tmp_path / f"{name}.json")
    found = communication.distributed(opened(tmp_path))
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["a", "b"]
    assert (found.matched, found.missing_ranks) == (1, ())
    assert any("guessed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"t": (0, 2)}, "one worker"),
        ({"0": (0, 2), "1": (1, 4)}, "different sizes"),
        ({"a": (0, 2), "b": (0, 2)}, "rank 0"),
    ],
)
def test_what_is_no_one_run(tmp_path: Path, files: dict[str, tuple[int, int]], said: str):
    for name, (rank, size) in files.items():
        talking(rank, [1], size=size).write(tmp_path / f"{name}.json")
    assert said in refused(tmp_path)


@pytest.mark.parametrize("size", [None, 2])
def test_same_rank_in_two_folders_is_two_runs(tmp_path: Path, size: int | None):
    for run in ("nccl", "gloo"):
        for rank in range(2):
            made = Rank(rank, size)
            made.collective(0, 10)
            made.write(tmp_path / run / f"worker{rank}.pt.trace.json")
    reason = refused(tmp_path)
    assert "different runs" in reason
    assert "nccl" in reason
    assert communication.distributed(opened(tmp_path / "nccl")) is not None


def test_a_world_too_large_to_be_true_is_not_counted_out(tmp_path: Path):
    for folder, size in (("usual", 2), ("huge", 2**31 - 1)):
        for rank in range(2):
            write(tmp_path / folder / f"{rank}.json", rank, size)
        found = communication.distributed(opened(tmp_path / folder))
        assert found is not None
        assert found.missing_ranks == ()


device_slices = st.lists(st.tuples(st.booleans(), st.integers(0, 90), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(device_slices, min_size=2, max_size=3), st.integers(1, 3))
def test_parts_sum_to_the_step(ranks: list[list[tuple[bool, int, int]]], steps: int):
    made, step_rows = [], []
    for number, rows in enumerate(ranks):
        trace = Slices(rank=number, trace=f"worker{number}.json")
        for step in range(steps):
            begin = 100 * step
            times = {"start_ns": T0 + begin * US, "wall_ns": 97 * US}
            step_rows.append({**times, "step": step, "rank": number, "process": f"rank-{number}", "in_window": True})
            for talks, start, length in rows:
                below = trace.add("cpu_op", "c10d::allreduce_" if talks else "aten::mm", begin + start)
                trace.kernel(begin + start, length, "ncclAllReduce" if talks else "gemm", below=below, step=step)
        made.append(trace)
    found = communication.distributed(Context(tables(*made, steps=step_rows)).base)
    assert (found is not None) == any(talks for rows in ranks for talks, _, _ in rows)
    for worker in found.workers if found is not None else ():
        parts = (worker.computation_ns, worker.overlap_ns, worker.communication_ns, worker.other_ns)
        assert min(parts) >= 0
        assert sum(parts) == worker.wall_ns
        if worker.transferring_ns is not None and worker.synchronizing_ns is not None:
            assert min(worker.transferring_ns, worker.synchronizing_ns) >= 0
            rounding = 1
            matched = worker.transferring_ns + worker.synchronizing_ns
            assert matched <= worker.overlap_ns + worker.communication_ns + rounding


@pytest.mark.torch
@pytest.mark.process
def test_two_processes_with_gloo(tmp_path: Path):
    """A real run on the CPU in which rank 1 comes 30 ms late to each all-reduce."""
    done = subprocess.run(
        [sys.executable, str(DDP), str(tmp_path)], capture_output=True, timeout=TIMEOUT_S, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    traces = opened(tmp_path)
    found = communication.distributed(traces)
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["host_0", "host_1"]
    assert (found.missing_ranks, found.unmatched) == ((), 0)
    late = next(row for row in found.collectives if row.name == "all_reduce")
    assert (late.workers, late.last_rank, late.calls) == (2, 1, 2)
    assert late.group == "default_pg [0, 1]"
    early, straggler = found.workers
    assert early.synchronizing_ns is not None
    assert straggler.synchronizing_ns is not None
    assert early.synchronizing_ns > 20_000 * US > straggler.synchronizing_ns
    reduced = next(row for row in communication.collectives(traces) if row.name == "all_reduce")
    assert (reduced.library, reduced.dtype, reduced.group_size) == ("gloo", "float32", 2)
    assert reduced.message_bytes == 4 * (64 * 64 + 64)


TIMES = (1623143089861, 1623143566756)


def write(path: Path, rank: int = 0, size: int | None = None) -> None:
    made = Rank(rank, size)
    made.collective(0, 10)
    made.write(path)


def names(found: Base) -> list[tuple[str, str, int]]:
    """(run, worker, span) of every trace, in order."""
    return [(span.ref.run, span.ref.worker, span.ref.span) for span in found.spans]


def with_event_files(folder: Path) -> Path:
    """The folder with what SummaryWriter leaves in each folder, and other litter."""
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        (inner / "events.out.tfevents.1623143089.host.1234.0").write_bytes(
            b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"'
        )
        (inner / "projector_config.pbtxt").write_text("embeddings {}")
        (inner / "hparams.json").write_text('{"lr": 0.1}')
    return folder


def test_nested_folders_mixed_with_event_files(tmp_path: Path):
    for run in ("resnet/2024-01-01", "resnet/2024-01-02"):
        for worker in ("host_11", "host_2"):
            for time in TIMES:
                write(tmp_path / "logs" / run / f"{worker}.{time}.pt.trace.json.gz")
    found = opened(with_event_files(tmp_path / "logs"))
    assert names(found) == [
        (run, f"{run}/{worker}", span)
        for run in ("resnet/2024-01-01", "resnet/2024-01-02")
        for worker in ("host_2", "host_11")
        for span in (1, 2)
    ]
    assert "2 folders" in str(communication.why_not_distributed(found))


def test_spans_are_numbered_by_their_time_and_not_by_their_name(tmp_path: Path):
    write(tmp_path / "worker0.999999999999.pt.trace.json")
    write(tmp_path / "worker0.1000000000000.pt.trace.json")
    assert [span.ref.trace.split(".")[1] for span in opened(tmp_path).spans] == ["999999999999", "1000000000000"]


def test_ranks_that_share_a_name_are_told_apart(tmp_path: Path):
    for rank, time in enumerate(TIMES):
        write(tmp_path / f"worker.{time}.pt.trace.json", rank, 2)
    assert len({span.ref.label for span in opened(tmp_path).spans}) == 2


def test_of_a_rank_that_was_started_again_the_last_process_is_compared(tmp_path: Path):
    for rank in range(2):
        run = make_run_folder(tmp_path, rank=rank, pid=100 + rank)
    for folder, late in (("rank-0", 0), ("rank-1", 0), ("rank-0.2", 1e6), ("rank-1.2", 1e6)):
        made = Rank(shift_us=late)
        made.collective(0, 10)
        made.write(run / folder / "trace-0.pt.trace.json")
    found = communication.distributed(opened(run))
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["rank-0.2", "rank-1.2"]
