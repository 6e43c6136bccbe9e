"""Log folders as tensorboard_trace_handler leaves them: run, worker and span are found as the plugin found them."""

from __future__ import annotations

from pathlib import Path

from stepscope.analyze.views import distributed
from stepscope.engine.spans import Base
from tests.analyze.views.collective_traces import Rank, opened
from tests.run_folders import make_run_folder

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
    assert "2 folders" in str(distributed.why_absent(found))


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
    found = distributed.view(opened(run))
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["rank-0.2", "rank-1.2"]
