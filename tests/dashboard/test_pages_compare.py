"""The page that lays runs and experiments beside each other, as a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import api
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext
from stepscope.model import Report
from stepscope.report.experiment_report import experiment_document
from tests.dashboard.opened import Runs, kinds, page, part, said
from tests.records import replace
from tests.report.fabricate_experiment import experiment

# ------------------------------------------------------------------------------------------------------ compare


def test_sides_can_be_turned_round(slow: dict[str, api.Run]) -> None:
    found = page(slow["after"], "compare", catalog=Runs(slow), own="after", side="baseline", **{"with": "before"})
    assert "before against after" in said(found)
    assert part(found, "phases")["rows"][0]["difference_ms"] == pytest.approx(-3, rel=0.05)


@pytest.mark.parametrize("other", ["nope", "after"])
def test_what_cannot_be_compared_says_why(slow: dict[str, api.Run], other: str) -> None:
    found = page(slow["after"], "compare", catalog=Runs(slow), own="after", **{"with": other})
    (why,) = [block for block in found["blocks"] if block["kind"] == "empty"]
    assert why["why"]


def test_an_experiment_shows_intervals_beside_ceilings(fabricated: Report, nothing: api.Run) -> None:
    document = experiment_document(experiment())
    shown = nothing.showing(replace(fabricated, views={**fabricated.views, "experiment": document}))
    found = page(shown, "compare", embedded=True)
    chart = part(found, "intervals")
    measured = chart["series"][0]
    assert chart["type"] == "interval"
    assert all(
        low is None or low <= value <= high
        for low, value, high in zip(measured["low"], measured["values"], measured["high"], strict=True)
    )
    (best,) = [row for row in document["candidates"] if row["verdict"] == "faster"]
    assert chart["series"][1]["role"] == "ceiling"
    assert chart["series"][1]["values"][0] == pytest.approx(-best["ceiling"])
    rows = part(found, "candidates")["rows"]
    assert {row["verdict"].split(",")[0].split(" >")[0] for row in rows} == {
        "faster",
        "no difference",
        "undecided",
        "void",
    }
    assert rows[0]["change"] == pytest.approx(best["effect"]["ratio"] - 1)
    assert "makes training faster" in said(found, "good")
    assert {"verdict", "loss", "doubt"} <= {row["about"] for row in part(found, "candidate-notes")["rows"]}
    assert all(column.get("signed") for column in part(found, "candidates")["columns"] if column["unit"] == "share")
    assert not pages.PAGES["compare"].empty(PageContext(shown, shown))


def test_an_experiment_can_be_chosen_like_a_run(tmp_path: Path, slow: dict[str, api.Run]) -> None:
    from stepscope.report.experiment_report import dumps

    (tmp_path / "experiment.json").write_bytes(dumps(experiment()))
    catalog = Runs({"trial": slow["before"]}, {"trial": tmp_path})
    found = page(slow["after"], "compare", catalog=catalog, own="after", **{"with": "trial"})
    assert part(found, "candidates")["rows"]
    (tmp_path / "experiment.json").write_bytes(b"{}")
    found = page(slow["after"], "compare", catalog=catalog, own="after", **{"with": "trial"})
    assert "empty" in kinds(found)
