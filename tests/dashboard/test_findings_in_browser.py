"""The cards of findings in a real Chromium, on documents that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.dashboard import blocks
from stepscope.dashboard.static_page import TONES
from tests.dashboard.browser import View

HOSTILE = "<img src=x onerror=alert(1)></script>{a|b}"
SOURCE = [
    {"line": 41, "text": "    def __getitem__(self, index):", "here": False},
    {"line": 42, "text": "        return Image.open(self.paths[index]).convert('RGB')", "here": True},
]


def place(line: int, *, source: Any = None, share: float | None = 0.5) -> dict[str, Any]:
    made = blocks.place("/home/me/data.py", line, "__getitem__", shown=f"data.py:{line}")
    return {**made, "share": share, "source": source}


def card(id: str, **changes: Any) -> dict[str, Any]:
    made = {
        "id": id,
        "rule": "input.loader_bound",
        "category": "input",
        "title": f"Title of {id}",
        "severity": "warning",
        "confidence": "high",
        "cost_ms_per_step": 12.5,
        "share": 0.25,
        "gain_ceiling": 0.3,
        "expected_gain": {"low": 0.2, "high": 0.28},
        "gain": "20 % to 28 % of the step expected, 30 % at most",
        "of": None,
        "where": [place(42, source=SOURCE), *(place(line) for line in range(50, 54))],
        "ranks": [0, 3],
        "evidence": [{"metric": "data wait", "text": "12.5 ms", "source": "steps.jsonl"}],
        "fix": "Use workers.",
        "caveat": "More memory.",
        "learn": "https://example.org/learn",
        "falsified_by": "No change with workers.",
        "try": [{"knob": "num_workers", "value": "4"}],
        "explains": [],
        "explained_by": [],
        "disagreements": [],
        "links": [{"label": "Longest steps", "page": "steps", "params": {"kind": "train"}}],
        "command": "stepscope experiment --try num_workers=4",
    }
    return {**made, **changes}


def three() -> list[dict[str, Any]]:
    first = card("first", severity="critical", explains=[{"id": "second", "title": "Title of second"}])
    second = card("second", explained_by=[{"id": "first", "title": "Title of first"}], cost_ms_per_step=9.0, share=0.18)
    third = card("third", severity="info", confidence="low", expected_gain=None, cost_ms_per_step=1.0, share=0.02)
    return [first, second, third]


def test_a_text_of_every_tone_is_shown(show_made_up: Callable[..., View]) -> None:
    """Of a replayed operator, for one, the first is a head."""
    words = [f"A text that is {tone}." for tone in ("plain", *TONES)]
    view = show_made_up("steps", [blocks.text(each, each.split()[-1].rstrip(".")) for each in words])
    told = view.text("main")
    assert [each for each in words if each not in told] == []


def test_a_cost_of_other_steps_fits_a_telephone(show: Callable[..., View]) -> None:
    """Its words are a sentence, where other costs are figures."""
    view = show([card("first", of="of 8.6 ms, the mean of all steps: those that compile, warm up or are profiled too")])
    width = view.sized(400, 800).page.evaluate("document.documentElement.scrollWidth")
    assert width <= 400


@pytest.fixture
def show(show_made_up: Callable[..., View]) -> Callable[..., View]:
    def open_findings(findings: Any, risks: Any = (), *, more: Any = None, **options: Any) -> View:
        return show_made_up("findings", [blocks.findings(findings, risks, **(more or {}))], **options)

    return open_findings


def articles(view: View) -> Any:
    return view.page.locator("article.finding")


def test_cards_are_complete_and_accessible(show: Callable[..., View]) -> None:
    risk = card("risk", cost_ms_per_step=None, share=None, gain_ceiling=None, expected_gain=None, title="Memory grows")
    more = {"abstained": [{"rule": "gpu.idle", "needs": "a trace"}], "ignored": [{"rule": "io.log", "reason": "known"}]}
    view = show(three(), [risk], more=more, axe=True)
    first = articles(view).first
    for text in (
        *("CRITICAL", "high confidence", "ranks 0, 3", "12.5\u202fms", "25\u202f%", "data.py:42", "Image.open"),
        *("20 % to 28 % of the step expected, 30 % at most", "data wait", "Use workers.", "More memory."),
        *("num_workers=4", "Wrong if: No change with workers.", "stepscope experiment --try num_workers=4"),
        "2 more places",
    ):
        assert text in first.inner_text(), text
    assert articles(view).count() == 4
    assert "a step" not in articles(view).last.inner_text()  # a risk has no cost
    assert view.violations() == []
    view.page.get_by_text("Not judged").click()
    assert view.page.get_by_text("a trace").is_visible()
    view.page.emulate_media(color_scheme="dark")
    assert view.violations() == []


def test_ranking_leads_to_cards_and_links_restore_it(show: Callable[..., View]) -> None:
    view = show(three())
    view.page.get_by_role("link", name="Title of third").first.click()
    view.until(lambda: "f.card=third" in view.page.url)
    focused = view.page.locator("article:focus")
    view.until(lambda: focused.count() == 1 and "Title of third" in focused.inner_text())
    view.page.evaluate("window.scrollTo(0, 0)")
    view.page.get_by_role("link", name="Title of third").first.click()  # the address names it already
    view.until(lambda: view.page.evaluate("window.scrollY") > 100)
    assert view.asked("pages/findings") == 1

    again = show(three(), query="?f.card=third")
    focused = again.page.locator("article:focus")
    again.until(lambda: focused.count() == 1 and "Title of third" in focused.inner_text())


def test_hostile_texts_are_text(show: Callable[..., View]) -> None:
    texts = dict.fromkeys(("title", "fix", "caveat", "falsified_by", "category", "command"), HOSTILE)
    source = [{"line": 1, "text": HOSTILE, "here": True}]
    odd = card(HOSTILE, **texts, learn="javascript:alert(1)", where=[{**place(1, source=source), "shown": HOSTILE}])
    of = {"explained_by": [{"id": "a b", "title": HOSTILE}], "explains": [{"id": "gone", "title": HOSTILE}]}
    circle = [
        card("a b", explained_by=[{"id": "c", "title": "c"}], where=[], evidence=[], links=[], learn=""),
        card("c", **of, share=7.0, gain_ceiling=-1.0),
    ]
    view = show([odd, *circle], axe=True)
    assert articles(view).count() == 3
    assert view.page.locator("main :is(img, script)").count() == 0
    assert view.page.locator("a[href^='javascript']").count() == 0
    assert HOSTILE in articles(view).first.inner_text()
    assert view.page.locator("html").evaluate("root => root.scrollWidth") <= 1280
    assert view.violations() == []
