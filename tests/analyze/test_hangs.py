"""The verdict on a hang, by dumps of flight recorders, reports of NCCL RAS, and what else was recorded of the run."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from stepscope import open_run
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.model.ranks import HangVerdict
from stepscope.read import hang_recording
from tests.builders import T0 as RUN_T0
from tests.cli.calls import call as command
from tests.cli.calls import json_of
from tests.hang_dumps import SCRIPT, WORLD, call, communicator, dump, ras, write
from tests.records import some
from tests.run_folders import make_run_folder

STEP = [call(line=10), call(kind="broadcast", line=11), call(kind="all_reduce", line=12)]


def verdict(*paths: Path) -> HangVerdict:
    return some(open_run(*paths).hang)


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_a_rank_that_never_arrives_is_named_with_the_line_of_the_call(tmp_path: Path, form: str) -> None:
    waits = [*STEP, *STEP, call(line=20, open=True)]
    found = verdict(write(tmp_path / "dumps", {0: waits, 1: [*STEP, *STEP], 2: waits}, form=form))
    (cause,) = found.causes
    assert (cause.kind, cause.ranks, found.verdict) == ("missing", (1,), "missing")
    assert cause.place is not None
    assert (cause.place.file, cause.place.line, cause.place.function) == (SCRIPT, 20, "step")
    (row,) = found.calls
    assert (row.sequence, row.call, row.waiting_ranks, row.absent_ranks, row.role) == (
        7,
        "all_reduce",
        "0, 2",
        "1",
        "cause",
    )
    assert (row.sizes, row.dtypes, row.size) == ("[8]", "Float", 3)
    assert "its last call was all_reduce #6 of group 0 (default_pg) at train.py:12" in found.sentence
    first = found.ranks[0]
    assert (first.rank, first.state, first.place and first.place.line) == (1, "cause", 12)


def test_a_call_that_one_rank_left_out_is_found_by_lines_where_all_calls_look_alike(tmp_path: Path) -> None:
    every = [call(line=line) for line in (1, 2, 3, 1, 2, 3, 1, 2)]
    short = [one for number, one in enumerate(every) if number != 4]
    found = verdict(write(tmp_path, {0: [*every, call(line=3, open=True)], 1: [*short, call(line=3)]}))
    assert found.causes[0].ranks == (1,)
    assert some(found.causes[0].place).line == 2
    assert "it left out all_reduce #5 of group 0 (default_pg) at train.py:2" in found.sentence


@pytest.mark.parametrize(
    ("other", "what", "expected"),
    [
        ({"kind": "broadcast"}, "operation", "all_reduce"),
        ({"input_sizes": [[4]], "output_sizes": [[4]]}, "sizes", "all_reduce of [8]"),
        ({"input_dtypes": ["Half"], "output_dtypes": ["Half"]}, "dtypes", "all_reduce of Float"),
    ],
)
def test_calls_that_differ_are_named_with_both_lines(
    tmp_path: Path, other: dict[str, Any], what: str, expected: str
) -> None:
    usual, odd = [*STEP, call(line=20, open=True)], [*STEP, call(line=30, open=True, **{"kind": "all_reduce"} | other)]
    found = verdict(write(tmp_path, {0: usual, 1: usual, 2: odd, 3: usual}))
    (row,) = found.mismatches
    assert (found.verdict, found.causes[0].ranks, row.what, row.ranks, row.expected) == (
        "mismatch",
        (2,),
        what,
        "2",
        expected,
    )
    assert (some(row.place).line, some(row.expected_place).line) == (30, 20)


def test_dumps_read_side_by_side_give_the_same_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {2: [call(kind="broadcast", line=7), *STEP], 3: [*STEP, call(kind="all_gather", line=30, open=True)]}
    folder = write(tmp_path, {rank: odd.get(rank, [*STEP, call(line=20, open=True)]) for rank in range(5)})
    (folder / "again").mkdir()
    write(folder / "again", {4: STEP})
    (folder / "torn_rank_9").write_bytes(b'{"version": "2.10", "entries": [], "pg_config"')
    alone = verdict(folder)
    monkeypatch.setattr(hang_recording, "_WORTH_BYTES", 0)
    monkeypatch.setattr(hang_recording, "usable_cores", lambda: 3)
    monkeypatch.setattr(hang_recording, "main_is_guarded", lambda: True)
    assert verdict(folder) == alone
    assert alone.ranks


def test_sizes_that_may_differ_are_no_mismatch_nor_is_what_has_ended(tmp_path: Path) -> None:
    def of(rank: int) -> list[dict[str, Any]]:
        own = [[4 + rank]]
        return [
            call(kind="all_to_all", input_sizes=own, output_sizes=own, open=True),
        ]

    assert verdict(write(tmp_path / "uneven", {0: of(0), 1: of(1)})).verdict == "stuck"
    ended = {rank: [call(input_sizes=[[4 + rank]]), call(open=True)] for rank in (0, 1)}
    assert verdict(write(tmp_path / "ended", ended)).verdict == "stuck"
    shapes = {0: [call(input_sizes=[[2, 4]], open=True)], 1: [call(input_sizes=[[8]], open=True)]}
    assert verdict(write(tmp_path / "shapes", shapes)).mismatches == ()


def test_where_two_sides_are_equal_nobody_is_blamed(tmp_path: Path) -> None:
    found = verdict(write(tmp_path, {0: [call(open=True)], 1: [call(kind="broadcast", line=11, open=True)]}))
    assert (found.verdict, found.causes[0].ranks, found.mismatches[0].expected) == ("mismatch", (0, 1), None)
    assert "rank 0 made all_reduce at train.py:10 and rank 1 made broadcast at train.py:11" in found.sentence


NESTED = {
    WORLD: ("default_pg", range(4)),
    "a": ("TP", (0, 1)),
    "b": ("TP", (2, 3)),
    "c": ("DP", (0, 2)),
    "d": ("DP", (1, 3)),
}


def test_of_nested_groups_the_one_is_named_that_the_others_follow(tmp_path: Path) -> None:
    begin = {
        rank: [call("a" if rank < 2 else "b", line=5), call("c" if rank % 2 == 0 else "d", line=6)] for rank in range(4)
    }
    ranks = {
        0: [*begin[0], call("a", line=5, open=True)],
        1: begin[1],  # stands before its tensor group's call
        2: [*begin[2], call("b", line=5), call("c", line=6, open=True)],
        3: [*begin[3], call("b", line=5), call("d", line=6, open=True)],
    }
    found = verdict(write(tmp_path, ranks, NESTED))
    assert [(cause.kind, cause.ranks) for cause in found.causes] == [("missing", (1,))]
    cause, *others = found.calls
    assert (cause.group, cause.role, {row.role for row in others}) == ("a (TP)", "cause", {"follows"})
    follower = next(row for row in others if row.group == "c (DP)")
    assert follower.follows == (cause.number,)


def test_without_the_culprits_dump_it_is_one_of_those_without(tmp_path: Path) -> None:
    waits = [*STEP, call(line=20, open=True)]
    found = verdict(write(tmp_path, {0: waits, 2: waits, 3: waits}, {WORLD: ("default_pg", range(5))}))
    (cause,) = found.causes
    assert (cause.kind, cause.ranks, found.absent, found.world_size) == ("no_dump", (1, 4), (1, 4), 5)
    assert "Ranks 1, 4 are without a dump" in found.sentence


def test_groups_entered_in_different_orders(tmp_path: Path) -> None:
    groups = {"a": ("first", (0, 1)), "b": ("second", (0, 1))}
    one = [call("a", line=5, open=True), call("b", line=6, open=True)]
    other = [call("b", line=6, open=True), call("a", line=5, open=True)]
    found = verdict(write(tmp_path, {0: one, 1: other}, groups))
    assert (found.verdict, found.causes[0].ranks, len(found.calls)) == ("crossed", (0, 1), 2)


def test_a_send_that_nobody_receives(tmp_path: Path) -> None:
    groups = {"pp": ("PP", (4, 6))}
    found = verdict(
        write(tmp_path, {4: [call("pp", "send 0->1", 7, open=True)], 6: [call("pp", "barrier", 8)]}, groups)
    )
    assert found.causes[0].ranks == (6,)
    assert (found.calls[0].call, found.calls[0].sequence) == ("transfer 4 -> 6", None)


def test_pieces_of_a_coalesced_call_are_over_with_it(tmp_path: Path) -> None:
    groups = {"pp": ("PP", (0, 1))}

    def batch(*kinds: str, open: bool) -> list[dict[str, Any]]:
        pieces = [call("pp", kind, 7, open=True, p2p_seq_id=1, collective_seq_id=0) for kind in kinds]
        return [*pieces, call("pp", "coalesced", 7, open=open, is_p2p=True, p2p_seq_id=1, collective_seq_id=0)]

    over = {0: batch("send 0->1", open=False), 1: batch("recv 1<-0", open=False)}
    assert verdict(write(tmp_path / "over", over, groups)).verdict == "none"
    alone = {0: batch("send 0->1", "recv 0<-1", open=True), 1: []}
    found = verdict(write(tmp_path / "alone", alone, groups))
    assert found.causes[0].ranks == (1,)


def test_names_of_groups_may_repeat(tmp_path: Path) -> None:
    waits, comes = [call("7", open=True)], [call("7", open=True)]
    first, second = {"7": ("DP", (0, 1))}, {"7": ("DP", (2, 3))}
    write(tmp_path, {0: waits, 1: []}, first)
    write(tmp_path, {2: waits, 3: comes}, second)
    kinds = {(cause.kind, cause.ranks) for cause in verdict(tmp_path).causes}
    assert kinds == {("missing", (1,)), ("stuck", (2, 3))}


def test_an_overwritten_ring_proves_no_absence(tmp_path: Path) -> None:
    groups = {"a": ("TP", (0, 1)), "b": ("rare", (0, 1))}
    busy = [call("a", record_id=5_000 + number, collective_seq_id=900 + number) for number in range(3)]
    found = verdict(write(tmp_path, {0: [call("b", line=6, open=True)], 1: busy}, groups))
    assert (found.verdict, found.causes[0].ranks) == ("no_dump", (1,))


def test_gloo_tells_neither_members_nor_states_and_is_read_all_the_same(tmp_path: Path) -> None:
    gathers = call(kind="all_gather", line=9, output_sizes=[[5, 8]], state="scheduled")
    last = call(line=20, state="scheduled")  # retired by its timeout
    ranks = {0: [gathers, last], 1: [gathers], 2: [gathers, last]}
    found = verdict(write(tmp_path, ranks, {WORLD: ("default_pg", None)}))
    assert (found.world_size, found.absent, found.causes[0].ranks) == (5, (3, 4), (1,))


# ----------------------------------------------------------------------------------------------------- other sources


def test_ras_alone_names_who_is_gone_and_who_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    path.write_text(
        json.dumps(ras(communicator({0: 9, 1: 8, 2: 9}, {3: {"unresponsive": True, "considered_dead": True}})))
    )
    found = verdict(path)
    assert [(cause.kind, cause.ranks) for cause in found.causes] == [("ended", (3,)), ("missing", (1,))]
    assert "8 calls of AllReduce, others 9" in found.causes[1].sentence
    path.write_text(json.dumps(ras(communicator({0: 9, 1: 9}))))
    assert verdict(path).verdict == "not_enough"


def test_ras_of_nccl_2_28_9_is_read_though_a_comma_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    text = json.dumps(ras(communicator({0: 9, 1: 9}, {2: {"unresponsive": True, "considered_dead": False}})), indent=2)
    broken = text.replace('"nvml_dev": 2,\n', '"nvml_dev": 2\n')
    assert broken != text
    path.write_text(f"OK\nOK\n{broken}")
    assert verdict(path).causes[0].ranks == (2,)
    path.write_text(broken[: len(broken) // 2])
    with pytest.raises(UnreadableInputError, match="no valid JSON, perhaps cut off; write one with `ncclras -f json`"):
        open_run(path).hang  # noqa: B018


def test_ras_agrees_or_is_said_to_disagree(tmp_path: Path) -> None:
    waits = [*STEP, call(line=20, open=True)]
    dumps = write(tmp_path, {0: waits, 1: STEP, 2: waits})
    (tmp_path / "ras.json").write_text(json.dumps(ras(communicator({0: 7, 1: 6, 2: 7}))))
    found = verdict(dumps)
    assert "NCCL RAS agrees" in found.sentence
    assert (found.disagreements, found.ras_reports) == ((), 1)
    (tmp_path / "ras.json").write_text(json.dumps(ras(communicator({0: 6, 1: 7, 2: 7}))))
    (said,) = verdict(dumps).disagreements
    assert "by the dumps rank 1 did not come, by NCCL RAS rank 0 made fewer calls" in said
    (tmp_path / "ras.json").write_text(
        json.dumps(ras(communicator({0: 7, 2: 7}, {1: {"unresponsive": True, "considered_dead": True}})))
    )
    found = verdict(dumps)
    assert (found.verdict, found.causes[0].ranks) == ("ended", (1,))


STACKS = (
    'process 101:"python";thread (101): MainThread;'
    "<module> ({0}:99);fetch ({0}:41);read (/usr/lib/python3.11/io.py:7) 5\n"
)


@pytest.mark.parametrize("place", ["inside", "beside", "two paths"])
def test_with_the_run_the_missing_ranks_main_thread_is_placed(tmp_path: Path, place: str) -> None:
    roots = {"user_roots": [str(Path(SCRIPT).parent)], "cwd": str(Path(SCRIPT).parent)}
    make_run_folder(tmp_path, manifest=roots, stacks_raw=STACKS.format(SCRIPT), rank=0, pid=100)
    run = make_run_folder(tmp_path, rank=1, pid=101)
    waits = [*STEP, call(line=20, open=True)]
    folder = {"inside": run / "dumps", "beside": tmp_path / "dumps", "two paths": tmp_path / "elsewhere" / "dumps"}[
        place
    ]
    write(folder, {0: waits, 1: STEP})
    opened = {"inside": (run,), "beside": (tmp_path,), "two paths": (run, folder)}[place]
    found = open_run(*opened)
    assert found.recorded
    assert found.hang is not None
    assert (found.hang.causes[0].ranks, some(found.hang.causes[0].place).line) == ((1,), 41)
    assert found.hang.ranks[0].stands_in == "read"
    assert "its main thread stood at train.py:41 (read) at last" in found.hang.sentence


def test_a_process_that_is_gone_is_said_to_have_ended(tmp_path: Path) -> None:
    make_run_folder(tmp_path, rank=0, pid=100)
    second = 10**9
    run = make_run_folder(
        tmp_path, rank=1, pid=101,
        processes=[{"time_ns": RUN_T0, "pid": 101, "ppid": 1, "start_ns": RUN_T0, "cmdline": "python"},
                   {"time_ns": RUN_T0 + 9 * second, "pid": 101, "ended_ns": RUN_T0 + 9 * second}],
        system=[{"time_ns": RUN_T0 + 60 * second, "metrics": [["cpu_pct", "%", 1.0, None, None]]}],
    )  # fmt: skip
    write(run / "dumps", {0: [*STEP, call(line=20, open=True)], 1: STEP})
    found = verdict(run)
    assert (found.verdict, found.causes[0].ranks) == ("ended", (1,))
    assert "process 101 ended 51 s before the last reading" in found.sentence


# ------------------------------------------------------------------------------------------------------------ surfaces


def test_the_report_says_it_first_and_makes_a_risk_without_a_cost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dumps = write(tmp_path / "dumps", {0: [*STEP, call(line=20, open=True)], 1: STEP})
    page = tmp_path / "report.html"
    assert command("analyze", dumps, "--html", page, "--json", tmp_path / "report.json") == 0
    assert capfd.readouterr().out.lstrip().startswith("Hang: Rank 1 did not come to all_reduce #4")
    assert "Rank 1 did not come to all_reduce #4" in page.read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["findings"], report["views"]["hang"]["verdict"]) == ([], "missing")
    (risk,) = report["risks"]
    assert (risk["rule"], risk["severity"], risk["ranks"], risk["where"][0]["line"]) == (
        "communication.hang",
        "critical",
        [1],
        20,
    )
    (row,) = json_of(capfd, "analyze", dumps, "--table", "pending_calls")["rows"]
    assert (row["sequence"], row["absent_ranks"], row["file"], row["line"]) == (4, "1", SCRIPT, 20)
    rows = json_of(capfd, "analyze", dumps, "--table", "hang-ranks")["rows"]
    assert [(row["rank"], row["state"]) for row in rows] == [(1, "cause"), (0, "waits")]


def test_a_run_without_dumps_has_no_such_view(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run_folder(tmp_path)
    assert "hang" not in open_run(run).report().views
    found = json_of(capfd, "analyze", run, "--table", "pending-calls")
    assert (found["rows"], found["absent"]) == (
        [],
        "no dump of a flight recorder and no report of `ncclras -f json` was given",
    )
    with pytest.raises(UsageError, match="open it alone, or with dumps of a hang"):
        open_run(run, make_run_folder(tmp_path, name="other"))


# ----------------------------------------------------------------------------------------------------- hostile dumps


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HANG_TEST_FOLDER"],)


def test_a_pickle_that_would_run_something_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    monkeypatch.setenv("HANG_TEST_FOLDER", str(made))
    value = dump(STEP, {WORLD: ("default_pg", (0, 1))}, evil=_Evil())
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(value))
    assert command("analyze", path) == 3
    said = capfd.readouterr().err
    assert "the pickle was refused: imports or calls code; give one that PyTorch's flight recorder wrote" in " ".join(
        said.split()
    )
    assert not made.exists()
    write(tmp_path, {1: [*STEP, call(line=20, open=True)], 2: STEP})
    found = verdict(tmp_path)  # beside good ones it is said, and they are judged
    assert any("refused" in note for note in found.notes)
    assert found.causes


def test_odd_files_among_dumps_cost_no_more_than_themselves(tmp_path: Path) -> None:
    waits = [*STEP, call(line=20, open=True)]
    write(tmp_path, {0: waits, 1: STEP, 2: waits})
    good = (tmp_path / "nccl_trace_rank_2").read_bytes()
    (tmp_path / "nccl_trace_rank_7").write_bytes(good[: len(good) // 2])
    (tmp_path / "nccl_trace_rank_2.gz").write_bytes(gzip.compress(good))  # the same rank twice
    (tmp_path / "nccl_trace_rank_9").write_bytes(good)  # lies: its groups are of ranks 0 to 2
    os.mkfifo(tmp_path / "nccl_trace_rank_8")
    (tmp_path / "nccl_trace_rank_6").symlink_to("/dev/zero")
    (tmp_path / "notes.md").write_text("profiling_name")
    found = verdict(tmp_path)
    assert (found.dumps, found.causes[0].ranks) == (3, (1,))
    assert any("nccl_trace_rank_7: no valid JSON, perhaps cut off" in note for note in found.notes)
    assert any("nccl_trace_rank_9: its groups do not hold rank 9" in note for note in found.notes)


def test_records_that_are_none_are_counted_and_names_are_harmless(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = {"<script>alert(1)</script>\x1b[31m": ("\u202edesc", (0, 1))}
    name = next(iter(groups))
    value = dump([call(name, line=1), call(name, "all_reduce<b>", 2, open=True)], groups)
    value["entries"] += [None, 3, {"profiling_name": 7}, {"profiling_name": "nccl:x", "process_group": ["a"]}]
    value["entries"].append(
        {**value["entries"][0], "input_sizes": [[10**40]], "collective_seq_id": 10**30, "record_id": -5}
    )
    value["entries"].append({**value["entries"][0], "record_id": 2**70})
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    value["entries"].append(
        {**value["entries"][0], "frames": nested, "input_sizes": nested, "output_dtypes": [{"a": 1}]}
    )
    (tmp_path / "rank_0").write_text(json.dumps(value))
    (tmp_path / "rank_1").write_bytes(pickle.dumps(dump([call(name, line=1)], groups)))
    page = tmp_path / "page.html"
    assert command("analyze", tmp_path, "--html", page) == 0
    shown = capfd.readouterr().out
    assert "\x1b[31m" not in shown
    assert "<script>alert(1)" not in page.read_text()
    assert any("rank_0: 6 records could not be read" in note for note in verdict(tmp_path).notes)


def test_lists_that_hold_themselves_or_each_other_many_times_end(tmp_path: Path) -> None:
    shared: Any = [0] * 1_000
    for _ in range(40):
        shared = [shared] * 10
    circle: Any = []
    circle.append(circle)
    value = dump([call(open=True)] * 3, {WORLD: ("default_pg", (0, 1))})
    for entry, hostile in zip(value["entries"], (shared, circle, [circle] * 100_000), strict=True):
        entry["input_sizes"] = entry["frames"] = hostile
    (tmp_path / "rank_0").write_bytes(pickle.dumps(value))
    (tmp_path / "rank_1").write_bytes(pickle.dumps(dump([], {WORLD: ("default_pg", (0, 1))})))
    assert verdict(tmp_path).causes[0].ranks == (1,)
