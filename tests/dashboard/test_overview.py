"""The first page: what it says of runs; in a browser, that it is one screen, and the keys that all pages have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard import blocks, single
from stepscope.model import Report
from tests.dashboard.browser import View
from tests.dashboard.opened import harmful, page, part, parts
from tests.dashboard.test_findings_in_browser import HOSTILE, card
from tests.records import replace

LONG = "module." * 60
COMMAND = (
    "stepscope experiment --try loader.num_workers=4 --try loader.persistent_workers=true --together -- python train.py"
)


def overview(run: api.Run, **given: Any) -> dict[str, Any]:
    (found,) = parts(page(run, "overview", **given), "overview")
    return found


def test_it_says_what_the_pages_behind_it_say(small: api.Run) -> None:
    report, found = small.report(), overview(small)
    assert [row["title"] for row in found["findings"]] == [row["title"] for row in report.findings[:3]]
    assert found["total"] == len(report.findings)
    assert sum(row["share"] for row in found["bar"]["parts"]) == pytest.approx(1, abs=2e-3)
    (mean, *_) = found["figures"]["items"]
    assert mean["value"] == report.steps["mean_ms"]  # type: ignore[index]
    (steps, *_) = found["charts"]
    assert max(steps["series"][0]["values"]) == max(part(page(small, "steps"), "longest")["rows"][0]["wall_ms"], 0)
    text = single.plain(report, single.documents(small, report))
    for row in found["findings"]:
        assert blocks.value_text(row["cost_ms_per_step"], "ms") in text
    assert not harmful(page(small, "overview"))


def test_a_run_without_findings_or_without_steps(fabricated: Report, nothing: api.Run, small: api.Run) -> None:
    quiet = overview(small.showing(replace(small.report(), findings=(), risks=(), unexplained=None)))
    assert quiet["findings"] == []
    assert "worth" in quiet["healthy"]
    assert "What a step loses" in page(nothing, "overview")["blocks"][-1]["why"]
    many = [{**fabricated.findings[0], "id": f"f-{at}", "title": LONG, "explains": []} for at in range(300)]
    found = overview(nothing.showing(replace(fabricated, findings=tuple(many))))
    assert (len(found["findings"]), found["total"]) == (3, 300)
    assert found["more_notes"] >= 0


def test_the_command_proves_all_knobs_of_a_finding_together(fabricated: Report, nothing: api.Run) -> None:
    def command(*tries: dict[str, str]) -> str | None:
        finding = {**fabricated.findings[0], "try": list(tries)}
        shown = replace(fabricated, findings=(finding,), run={**fabricated.run, "command": ["python", "my train.py"]})
        return overview(nothing.showing(shown))["findings"][0]["command"]

    workers = {"knob": "loader.num_workers", "value": "4"}
    one = command(workers)
    assert one == "stepscope experiment --try loader.num_workers=4 -- python 'my train.py'"
    assert "--together" in str(command(workers, {"knob": "loader.pin_memory", "value": "true"}))
    assert command() is None
    # a comma would part it into two candidates
    assert "stepscope experiment --from " in str(command({"knob": "arg:--sizes", "value": "1,2"}))


def made_up() -> dict[str, Any]:
    rows = [card(f"f{at}", title=f"{HOSTILE} {LONG}", command=COMMAND if at else None) for at in range(3)]
    names = ("compute", "exposed communication", "exposed copies", "idle: waiting for data", "idle: synchronising")
    names += ("idle: launching", "idle: operators on the host", "idle: unknown")
    bar = [{"label": name, "role": name, "ms": 12.5, "share": 0.125} for name in names]
    line = [blocks.series("step time", "ms", [float(at % 7) for at in range(100)])]
    small = [
        blocks.chart(
            id, id, "line", sentence=f"{id}.", x=("step", "number", range(100)), y=(id, "ms"), series=line, small=True
        )
        for id in ("time", "loss")
    ]
    labels = (
        "Mean step",
        "Median",
        "95th percentile",
        "Steps per second",
        "Samples per second",
        "Steady steps",
        "Paid",
    )
    return {
        "kind": "overview",
        "figures": blocks.figures([blocks.figure(label, 3.6e-11, "ns") for label in labels]),
        "bar": {"title": "Where a mean step goes", "sentence": "Of a mean step.", "parts": bar},
        "findings": list(map(blocks.cleaned, rows)),
        "total": 900,
        "risks": 2,
        "healthy": None,
        "charts": small,
        "notes": [
            blocks.text(f"{tone} {HOSTILE} " * 40, tone, blocks.link("Ranks", "ranks"))
            for tone in ("warning", "note", "plain")
        ],
        "more_notes": 4,
    }


def test_it_is_one_screen_whatever_it_holds(show_made_up: Callable[..., View]) -> None:
    height = 720 - 36  # the line of a run that goes on fits too
    view = show_made_up("overview", [made_up()]).sized(1280, height)
    assert view.page.locator("html").evaluate("root => root.scrollHeight") <= height
    titles = view.page.locator("main ol li a.title")
    assert [title.bounding_box()["height"] < 30 for title in titles.all()] == [True] * 3
    assert LONG in str(titles.first.get_attribute("title"))
    assert "e-11" not in view.text("main")
    assert "< 0.001" in view.text("main")
    view.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    view.page.get_by_role("button", name="Copy the command that proves it").first.click()
    view.until(lambda: view.page.locator("#announcements").inner_text() == "Copied")
    view.page.get_by_role("link", name="All 900 findings").click()
    view.until(lambda: "/findings" in view.page.url)


def test_keys_lead_from_page_to_page_but_not_while_typing(show_made_up: Callable[..., View]) -> None:
    columns = [blocks.column("name", "Name")]
    rows = [{"name": f"{'encoder.' * 30}{at}.self{'_attention' * 10}"} for at in range(40)]
    view = show_made_up("operators", [blocks.table("names", "Names", columns, rows, limit=99)])
    shown = view.page.locator("tbody tr").all_inner_texts()
    assert len(set(shown)) == 40  # shortened where they are alike
    assert all(f".{at}.self" in text and len(text.strip()) <= 130 for at, text in enumerate(shown))
    assert view.page.locator("tbody .shown").first.get_attribute("title") == rows[0]["name"]

    view.page.get_by_placeholder("Filter rows").press_sequentially("g s ?")
    assert view.text("h1") == "Operators"
    view.page.locator("h1").click()
    view.page.keyboard.press("?")
    dialog = view.page.locator("dialog[open]")
    view.until(lambda: dialog.count() == 1)
    assert "Operators" in dialog.inner_text()
    view.page.keyboard.press("Escape")
    view.until(lambda: dialog.count() == 0)
    view.page.keyboard.press("g")
    view.page.keyboard.press("s")
    view.until(lambda: view.text("h1") == "Steps")
    view.page.keyboard.press("[")
    view.until(lambda: view.text("h1") == "Findings")


def test_a_phone_folds_what_can_be_chosen(show_made_up: Callable[..., View]) -> None:
    view = show_made_up("overview", [made_up()]).sized(390, 844)
    assert view.page.locator("html").evaluate("root => root.scrollWidth") <= 390
    title = view.page.locator("main ol li a.title").first
    assert title.bounding_box()["width"] > 250
    assert view.page.locator("header").bounding_box()["height"] < 60
    theme = view.page.get_by_label("Theme")
    assert not theme.is_visible()
    view.page.get_by_role("button", name="What to show").click()
    assert theme.is_visible()
