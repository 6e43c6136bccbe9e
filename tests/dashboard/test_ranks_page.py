"""The page of ranks: of a thousand by reduced tables, of a few that were read in full, and in the single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope import api
from stepscope.dashboard import bundle, single
from stepscope.model.ranks import HostClock
from tests.builders import step_rows
from tests.dashboard.opened import OPTIONS, figures, harmful, is_empty, page, part, parts, said, series
from tests.dashboard.plain_pages import embedded
from tests.dashboard.served_runs import EVIL
from tests.reduced_runs import Made, reduced_run
from tests.run_folders import make_run_folder

HOSTILE = tuple(name.replace("/", "\\") for name in EVIL)


def opened(run: Path) -> api.Run:
    return api.open_run(run, options=api.ReadOptions(cache=False, keep=False))


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """125 hosts of 8, five stages; rank 13 is late, and a host is missing."""
    made = Made(ranks=1000, steps=120, windows=20, stages=5, late=(13,), missing=range(992, 1000))
    return opened(reduced_run(tmp_path_factory.mktemp("thousand") / "run", made))


def test_a_thousand_ranks_stand_by_host_and_by_stage(thousand: api.Run) -> None:
    found = page(thousand, "ranks")
    assert said(found).startswith("992 of 1,000 ranks judged by the reduced tables of 124 hosts: rank 13 keeps")
    assert "992-999" in said(found, "note")
    assert (figures(found)["Ranks judged"]["value"], figures(found)["Ranks of the job"]["value"]) == (992, 1000)
    (late,) = part(found, "late")["rows"]
    assert (late["what"], late["cause"], late["place"]["line"]) == ("rank 13", "data", 12)
    every_step, windows = parts(found, "chart")
    assert (every_step["type"], every_step["y"]["min"], every_step["y"]["max"]) == ("heat", 0, 4.8)
    rows = series(every_step)
    assert [*rows][:3] == ["node1", "node2", "node3"]
    assert len(rows) == 124
    assert min(rows["node2"]) > 15 > max(rows["node1"])
    assert "The most is" in every_step["sentence"]
    assert "node2" in every_step["sentence"]
    assert windows["x"]["values"][0] == 100
    first = part(found, "hosts")["rows"][0]
    assert (first["host"], first["host_rank"], first["ranks"]) == ("node2", 13, 8)
    assert first["host_ms"] > 15 > first["device_ms"]
    stages = series(part(page(thousand, "ranks", by="stages"), "map-0"))
    assert [*stages] == [f"stage {number}" for number in range(5)]
    assert min(stages["stage 1"]) > 15


def test_one_hosts_ranks_are_shown_when_asked_for(thousand: api.Run) -> None:
    (choice,) = parts(page(thousand, "ranks"), "choice")
    options = {option["label"]: option["value"] for option in choice["options"]}
    ranks = series(part(page(thousand, "ranks", by=options["the ranks of node2"]), "map-0"))
    assert [*ranks] == [f"rank {number}" for number in range(8, 16)]
    assert min(ranks["rank 13"]) > 15 > max(ranks["rank 12"])
    late = series(part(page(thousand, "ranks", by=options["the late ranks and their peers"]), "map-0"))
    assert "rank 13" in late
    assert len(late) <= 20
    unknown = page(thousand, "ranks", by="host-99999")
    assert len(series(part(unknown, "map-0"))) == 124


def test_other_pages_say_of_which_ranks_they_are(thousand: api.Run) -> None:
    for key in ("steps", "timeline"):
        first = page(thousand, key)["blocks"][0]
        assert first["text"].startswith("This page is of ranks 13, "), key
        assert first["link"]["page"] == "ranks"
    assert "992 of 1,000 ranks judged" in said(page(thousand, "findings"))
    (overview,) = page(thousand, "overview")["blocks"]
    assert "992 of 1,000 ranks judged" in str(overview["notes"])
    assert overview["total"] == 1
    (card,) = [card for block in parts(page(thousand, "findings"), "findings") for card in block["findings"]]
    assert (card["rule"], card["links"][0]["page"]) == ("communication.late_ranks", "ranks")


def test_the_single_file_of_a_thousand_ranks_is_small_and_holds_every_rank(thousand: api.Run) -> None:
    if bundle.folder() is None:
        pytest.skip("needs the built front end: npm --prefix web run build")
    text = single.render(thousand, thousand.report())
    assert len(text.encode()) <= 2_000_000
    documents = embedded(text)["documents"]
    path = "runs/this/pages/ranks"
    (choice,) = parts(documents[path], "choice")
    behind = [documents[f"{path}?by={option['value']}"] for option in choice["options"] if option["value"]]
    shown = {name for document in behind for name in series(part(document, "map-0")) if name.startswith("rank ")}
    assert shown == {f"rank {number}" for number in range(992)}
    assert "Comes last in" in text.partition('id="stepscope-data"')[0], "without scripts, too"


def test_a_file_of_too_many_ranks_has_those_of_the_latest_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.dashboard.pages import ranks

    run = opened(reduced_run(tmp_path / "run", Made(ranks=64)))
    monkeypatch.setattr(ranks, "EMBEDDED_CELLS", 8 * 60 * 3)  # 60 steps
    found = page(run, "ranks", embedded=True)
    (choice,) = parts(found, "choice")
    labels = [option["label"] for option in choice["options"]]
    assert "the ranks of node2" in labels
    assert sum(label.startswith("the ranks of") for label in labels) == 3
    assert "This file has the ranks of 3 hosts" in said(found)
    assert "This file" not in said(page(run, "ranks"))


def test_clocks_stand_with_what_is_known_of_them(tmp_path: Path) -> None:
    run = opened(reduced_run(tmp_path / "run"))
    assert run.many_ranks is not None
    clocks = (
        HostClock("node1", 40, 0.0, 0.0, 0.0, 0, "the reference"),
        HostClock("node2", 40, -812.5, 1.25, 14.0, 60),
        HostClock("node3", 40, None, None, None, 2, "too few collectives"),
    )
    run.__dict__["many_ranks"] = replace(run.many_ranks, clocks=clocks)
    rows = part(page(run, "ranks"), "clocks")["rows"]
    assert [row["offset_us"] for row in rows] == [0, -812.5, None]
    assert rows[2]["reason"] == "too few collectives"


def test_hostile_host_names_are_text(tmp_path: Path) -> None:
    run = opened(reduced_run(tmp_path / "run", Made(hosts=HOSTILE)))
    found = page(run, "ranks")
    assert harmful(found) == []
    assert any("onerror" in name for name in series(part(found, "map-0")))
    assert harmful(page(run, "ranks", by="host-1")) == []


def test_a_few_ranks_read_in_full_stand_side_by_side(tmp_path: Path) -> None:
    for rank, wait_ms in enumerate((1, 12, 1)):
        rows = step_rows(60, data_wait_ns=wait_ms * 10**6)
        make_run_folder(tmp_path, rank=rank, pid=100 + rank, host=f"node{rank}", steps=rows)
    run = api.open_run(tmp_path / "run", options=OPTIONS)
    assert not is_empty(run, "ranks")
    found = page(run, "ranks")
    assert figures(found)["Rank that works longest"]["value"] == 1
    assert [row["host"] for row in part(found, "ranks")["rows"]] == ["node0", "node1", "node2"]
    rows_: dict[str, list[Any]] = series(part(found, "map-0"))
    assert min(rows_["rank 1"]) == max(rows_["rank 1"]) == 11
    assert "All ranks were read in full" in said(found)
    assert not parts(found, "choice")


def test_one_rank_alone_is_pointed_to_the_page_that_shows_it(nothing: api.Run, tmp_path: Path) -> None:
    run = api.open_run(make_run_folder(tmp_path), options=OPTIONS)
    assert is_empty(run, "ranks")
    (why,) = parts(page(run, "ranks"), "empty")
    assert "page Steps" in why["why"]
    assert is_empty(nothing, "ranks")
    make_run_folder(tmp_path, rank=1, pid=9)
    short = api.open_run(tmp_path / "run", options=OPTIONS)
    if is_empty(short, "ranks"):
        (why,) = parts(page(short, "ranks"), "empty")
        assert "page Steps" in why["why"]
