"""The report of a run that is judged by its reduced tables: rule, sentence, who was read, what was left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard import single
from stepscope.errors import UnreadableInputError
from stepscope.report.document import report_bytes
from tests.cli.calls import call, json_of
from tests.on_terminal import joined
from tests.reduced_runs import LINE, Made, reduced_run
from tests.run_folders import make_run_folder

OPTIONS = api.ReadOptions(cache=False, keep=False)
RULE = "communication.late_ranks"


def opened(run: Path, **more: Any) -> api.Run:
    return api.open_run(run, options=api.ReadOptions(cache=False, keep=False, **more))


def surfaces(run: api.Run) -> dict[str, str]:
    report = run.report()
    pages = single.documents(run, report)
    texts = {
        key: " ".join(block["text"] for block in pages[f"runs/this/pages/{key}"]["blocks"] if block["kind"] == "text")
        for key in ("findings", "ranks")
    }
    return {"terminal": joined(report), "html": single.plain(report, pages), **texts}


def test_a_late_rank_is_a_finding_with_cost_place_and_falsifier(tmp_path: Path) -> None:
    report = opened(reduced_run(tmp_path / "run")).report()
    (finding,) = [row for row in report.findings if row["rule"] == RULE]
    assert finding["ranks"] == [13]
    assert 15 < finding["cost_ms_per_step"] < 21
    (place,) = finding["where"]
    assert {key: place[key] for key in LINE} == LINE
    assert "Rank 13 (host node2) waits for its data" in finding["title"]
    assert "data.py:12" in finding["title"]
    assert finding["confidence"] == "high"
    assert "other files" in finding["fix"]
    assert finding["falsified_by"]
    assert {row["source"] for row in finding["evidence"]} >= {"reduced tables of 32 ranks, 60 steps"}
    assert report.findings[0] is finding


def test_all_surfaces_say_the_same(tmp_path: Path) -> None:
    missing = range(8, 16)
    run = opened(reduced_run(tmp_path / "run", Made(ranks=48, late=(21,), missing=missing)))
    verdict = run.many_ranks
    assert verdict is not None
    assert (verdict.ranks, verdict.missing) == (40, tuple(missing))
    for name, text in surfaces(run).items():
        assert f"40 of 48 ranks judged by the reduced tables of 5 hosts: {verdict.reason}" in text, name
        assert "8 ranks" in text, name
        assert "8-15" in text, name
    written = json.loads(report_bytes(run.report()))
    assert written["views"]["many_ranks"]["reason"] == verdict.reason
    assert written["views"]["ranks_read"]["absent_ranks"] == "8-15"
    assert written["views"]["many_ranks"]["missing"] == [*missing]
    assert [row["confidence"] for row in written["findings"] if row["rule"] == RULE] == ["medium"]


def test_a_healthy_run_has_no_finding_and_a_short_one_abstains_by_name(tmp_path: Path) -> None:
    healthy = opened(reduced_run(tmp_path / "healthy", Made(late=()))).report()
    assert [row for row in healthy.findings if row["rule"] == RULE] == []
    assert RULE not in {row["rule"] for row in healthy.abstained}
    assert "no rank, host or group keeps the others waiting" in joined(healthy)
    short = opened(reduced_run(tmp_path / "short", Made(steps=5))).report()
    assert [row for row in short.findings if row["rule"] == RULE] == []
    (needs,) = [row["needs"] for row in short.abstained if row["rule"] == RULE]
    assert needs.startswith("enough in the reduced tables")
    assert "5 steps count, at least 20 are needed" in joined(short)


def test_a_persistent_rank_is_named_below_the_usual_floor(tmp_path: Path) -> None:
    report = opened(reduced_run(tmp_path / "run", Made(ranks=256, steps=300, excess_ms=3.0))).report()
    (finding,) = [row for row in report.findings if row["rule"] == RULE]
    assert finding["ranks"] == [13]
    assert finding["share"] < 0.04


def with_raw(run: Path, ranks: range) -> None:
    for rank in ranks:
        host = f"node{rank // 8 + 1}"
        make_run_folder(run.parent, name=run.name, rank=rank, pid=1000 + rank, host=host)


def test_of_many_ranks_only_suspects_and_their_peers_are_read(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run")
    with_raw(run, range(32))
    found = opened(run)
    read = found.ranks_read
    assert read is not None
    assert 13 in read.in_full
    assert len(read.in_full) <= 3
    assert not read.by_steps
    assert set(found.tables.steps["rank"]) == set(read.in_full)
    assert "ranks 0, 1, 13, read in full" in surfaces(found)["terminal"]
    asked = opened(run, ranks=(30,))
    assert set(asked.tables.steps["rank"]) == {*read.in_full, 30}


def test_ranks_that_lie_elsewhere_are_shown_by_their_reduced_steps(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run")
    with_raw(run, range(8))
    found = opened(run)
    assert found.ranks_read is not None
    assert (found.ranks_read.in_full, found.ranks_read.by_steps) == ((0, 1), (13,))
    assert {rank.rank: rank.host for rank in found.tables.ranks} == {0: "node1", 1: "node1", 13: "node2"}
    assert "of which only the reduced steps are here" in joined(found.report())


def test_ranks_that_were_not_reduced_are_no_missing_ones(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run")
    with_raw(run, range(32))
    shutil.rmtree(run / "reduced" / "host-node4")
    report = opened(run).report()
    read = report.views["ranks_read"]
    assert (read["absent"], read["not_reduced"], read["not_reduced_ranks"]) == (0, 8, "24-31")
    assert "8 recorded ranks were not judged, because their hosts were not reduced (24-31)" in joined(report)


def test_a_few_ranks_that_are_all_here_are_read_in_full(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run", Made(ranks=8))
    with_raw(run, range(8))
    found = opened(run)
    assert found.many_ranks is None
    assert set(found.tables.steps["rank"]) == set(range(8))
    assert RULE not in {row["rule"] for row in found.report().abstained}


def test_what_was_copied_away_alone_is_read(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run")
    with_raw(run, range(32))
    whole = opened(run)
    assert opened(run / "reduced").folder == whole.folder, "beside its recordings the folder is a part of the run"
    shutil.copytree(run / "reduced", tmp_path / "elsewhere")
    copied = opened(tmp_path / "elsewhere")
    assert copied.many_ranks == whole.many_ranks
    shutil.copytree(run / "reduced" / "host-node2", tmp_path / "one" / "host-node2")
    alone = opened(tmp_path / "one" / "host-node2")
    assert alone.many_ranks is not None
    assert (alone.many_ranks.ranks, alone.many_ranks.stragglers[0].ranks) == (8, (13,))
    inside = opened(run / "reduced" / "host-node2")
    assert inside.many_ranks is not None
    assert inside.many_ranks.ranks == 8, "the one that was named, not those beside it"


def test_damaged_hosts_are_left_out_and_said(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run", Made(left_out=("stacks-3.raw is too large",)))
    (run / "reduced" / "host-node1" / "steps.parquet").write_bytes(b"PAR1")
    (run / "reduced" / "host-node3" / "reduced.json").write_text('{"schema": "stepscope.reduced/999"}')
    report = opened(run).report()
    text = joined(report)
    assert "16 of 32 ranks judged by the reduced tables of 2 hosts" in text
    assert "host-node1: left out (steps.parquet is missing, or not as large" in text
    assert "host-node3: left out" in text
    assert "host node2: stacks-3.raw is too large" in text
    assert len(report.views["ranks_read"]["problems"]) == 4
    assert [row["ranks"] for row in report.findings if row["rule"] == RULE] == [[13]]


def test_where_all_tables_are_damaged_recordings_are_read_or_it_is_refused(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run", Made(ranks=16))
    for index in run.glob("reduced/host-*/reduced.json"):
        index.write_text('{"schema": "stepscope.reduced/1", "world_size": 1e400')
    with pytest.raises(UnreadableInputError, match="no host's reduced tables can be read"):
        opened(run).report()
    with_raw(run, range(2))
    report = opened(run).report()
    assert report.run["ranks"] == [0, 1]
    assert "all ranks that lie here were read instead" in joined(report)


def test_a_number_of_ranks_that_no_machine_has_is_damage(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run", Made(ranks=16))
    index = run / "reduced" / "host-node1" / "reduced.json"
    index.write_text(index.read_text().replace('"world_size":16', '"world_size":1000000000000'))
    report = opened(run).report()
    assert "the number of ranks is damaged" in joined(report)


def test_hotspots_of_a_rank_that_nobody_suspects_are_read_when_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = reduced_run(tmp_path / "run", Made(per_host=1))
    for rank in range(32):
        stack = f"MainThread;main (/home/user/project/train.py:{rank + 1}) 50"
        stacks = f'process {1000 + rank}:"python train.py";{stack}\n'
        make_run_folder(tmp_path, name="run", rank=rank, pid=1000 + rank, host=f"node{rank + 1}", stacks_raw=stacks)
    document = json_of(capfd, "hotspots", run, "--rank", "30")
    assert [row["library_function_line"] for row in document["rows"]] == [31]


def test_tables_and_comparisons_say_of_which_ranks_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = [reduced_run(tmp_path / name) for name in ("first", "second")]
    said = "of ranks 0, 1, 13, of which only the reduced steps are here"
    assert call("analyze", runs[0], "--table", "metrics", "--group", "curve") == 0
    assert f"this table is {said}" in " ".join(capfd.readouterr().out.split())
    assert f"first: figures are {said}" in json_of(capfd, "compare", *runs)["baseline"]["notes"]


def test_recordings_that_never_ended_are_one_note(tmp_path: Path) -> None:
    folder = reduced_run(tmp_path / "run")
    for path in folder.glob("reduced/host-*/reduced.json"):
        index = json.loads(path.read_text())
        del index["run"]["ended_ns"]
        path.write_text(json.dumps(index))
    text = joined(opened(folder).report())
    assert text.count("never ended") == 1
    assert "the recording on 4 hosts (node1, node2, node3 and 1 more) never ended" in text
