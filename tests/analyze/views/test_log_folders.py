"""Log folders as tensorboard_trace_handler leaves them: run, worker and span are found as the plugin found them."""

from __future__ import annotations

from pathlib import Path

from stepscope import api
from stepscope.analyze.views import distributed
from stepscope.engine.spans import Base
from tests.analyze.shared_traces import TRACES, needs_traces
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


def test_one_run_however_deep_needs_no_folder_in_its_names(tmp_path: Path):
    for rank in range(2):
        write(tmp_path / "logs" / "resnet" / "2024-01-01" / f"worker{rank}.{TIMES[0]}.pt.trace.json", rank, 2)
    found = opened(with_event_files(tmp_path / "logs"))
    assert names(found) == [("", "worker0", 1), ("", "worker1", 1)]
    assert distributed.view(found) is not None


def test_spans_are_numbered_by_their_time_and_not_by_their_name(tmp_path: Path):
    write(tmp_path / "worker0.999999999999.pt.trace.json")
    write(tmp_path / "worker0.1000000000000.pt.trace.json")
    assert [span.ref.trace.split(".")[1] for span in opened(tmp_path).spans] == ["999999999999", "1000000000000"]


def test_workers_of_other_names_keep_them_in_folders_of_their_own(tmp_path: Path):
    write(tmp_path / "a" / "node1_7.pt.trace.json", 0, 2)
    write(tmp_path / "b" / "node2_9.pt.trace.json", 1, 2)
    assert names(opened(tmp_path)) == [("a", "node1_7", 1), ("b", "node2_9", 1)]


def test_host_names_with_dots_are_told_apart(tmp_path: Path):
    for process in (70, 71):
        write(tmp_path / f"node1.cluster.local_{process}.{TIMES[0]}.pt.trace.json", process - 70, 2)
    assert names(opened(tmp_path)) == [("", "node1.cluster.local_70", 1), ("", "node1.cluster.local_71", 1)]


def test_files_given_one_by_one_are_named_by_their_folders(tmp_path: Path):
    for run in ("before", "after"):
        write(tmp_path / "runs" / run / "worker0.pt.trace.json")
    found = opened(*(tmp_path / "runs" / run / "worker0.pt.trace.json" for run in ("before", "after")))
    assert sorted(names(found)) == [("after", "after/worker0", 1), ("before", "before/worker0", 1)]


def test_traces_beside_a_folder_of_traces(tmp_path: Path):
    write(tmp_path / "worker0.pt.trace.json")
    write(tmp_path / "old" / "worker0.pt.trace.json")
    assert sorted(names(opened(tmp_path))) == [(".", "worker0", 1), ("old", "old/worker0", 1)]


def test_ranks_that_share_a_name_are_told_apart(tmp_path: Path):
    for rank, time in enumerate(TIMES):
        write(tmp_path / f"worker.{time}.pt.trace.json", rank, 2)
    assert len({span.ref.label for span in opened(tmp_path).spans}) == 2


def test_a_rank_is_what_the_trace_says_also_where_another_run_has_it(tmp_path: Path):
    for run in ("a", "b"):
        write(tmp_path / run / "worker0.pt.trace.json", 0, 1)
    found = opened(tmp_path)
    assert [span.ref.rank for span in found.spans] == [0, 0]
    assert len({span.ref.process for span in found.spans}) == 2


def test_tables_hold_the_folder(tmp_path: Path):
    write(tmp_path / "x" / "y" / "t.json", 3, 4)
    write(tmp_path / "z" / "u.json")
    traces = api.open_run(tmp_path, options=api.ReadOptions(cache=False)).tables.traces
    assert dict(traces.select("folder", "claimed_rank").iter_rows()) == {"x/y": 3, "z": None}


def test_workers_of_a_recorded_run_are_its_ranks(tmp_path: Path):
    run = make_run_folder(tmp_path)
    write(run / "rank-0" / "trace-0.pt.trace.json")
    assert names(opened(run)) == [("", "rank-0", 1)]


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


@needs_traces
def test_folder_of_the_plugin_itself():
    found = opened(TRACES / "kineto_tb_plugin")
    runs = ("resnet50_num_workers_0", "resnet50_num_workers_4")
    assert names(found) == [(run, f"{run}/worker0", span) for run in runs for span in (1, 2)]
    assert names(opened(TRACES / "kineto_tb_plugin" / runs[0])) == [("", "worker0", 1), ("", "worker0", 2)]
    assert "different runs" in str(distributed.why_absent(found))
