"""report.html as one file: bounded, self-contained, safe against any name, and the plain report where it cannot be."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepscope.api import Run, open_run
from stepscope.dashboard import bundle, single
from stepscope.dashboard.pages import PAGES, flame
from stepscope.errors import UnreadableInputError
from stepscope.report.escape import markup
from tests.browser_page import Opened
from tests.dashboard.browser import View
from tests.dashboard.plain_pages import embedded

SCRIPT = "const a = '</script><!-- \\u2028'; document.title = a;"
STYLE = "body { color: red }"
INDEX = (
    "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>stepscope</title></head>"
    "<body><div id='app'></div></body></html>"
)
FORMS = ("small", "fuzzed", "cpu", "h100")  # those that browsers see served are others (test_pages_in_browser)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end of two lines instead of the built one."""
    made = bundle.Bundle(INDEX, (SCRIPT,), (STYLE,))
    monkeypatch.setattr(bundle, "load", lambda: made)


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest) -> Callable[[str], Run]:
    """A run by its name, opened once."""
    fixtures = {"cpu": "cpu_trace", "h100": "h100_trace"}
    return cache(lambda name: open_run(request.getfixturevalue(fixtures.get(name, f"{name}_run"))))


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.usefixtures("tiny")
def test_it_holds_every_page_and_the_plain_report(opened: Callable[[str], Run]) -> None:
    run = opened("small")
    report = run.report()
    page = single.render(run, report)

    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert "<title>small – stepscope</title>" in page
    found = embedded(page)
    assert (found["schema"], found["run"]) == ("stepscope.embedded/1", "this")
    assert set(found["documents"]) == {"runs/this", *(f"runs/this/pages/{key}" for key in PAGES)}
    head = found["documents"]["runs/this"]
    assert [entry["key"] for entry in head["pages"]] == list(PAGES)
    assert head["preparing"] is head["error"] is None
    assert head["state"] == "finished"
    for key in PAGES:
        document = found["documents"][f"runs/this/pages/{key}"]
        assert document["page"] == key
        assert document["blocks"]
        assert single.UNMADE not in json.dumps(document)
    (without_scripts,) = re.findall(r"<noscript>(.*?)</noscript>", page, re.DOTALL)
    for finding in report.findings:
        assert markup(finding["title"]) in without_scripts


@pytest.mark.usefixtures("tiny")
def test_only_its_own_scripts_and_styles_may_run(opened: Callable[[str], Run]) -> None:
    page = single.render(opened("small"), opened("small").report())

    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    assert "unsafe" not in policy
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert parts["script-src"].split() == [hash_of(script) for script in scripts]
    assert len(scripts) == 1
    assert set(parts["style-src"].split()) == {
        hash_of(style) for style in re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    }
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", page)
    assert " style=" not in page


def test_scripts_and_styles_mean_the_same_inside_a_page() -> None:
    inlined = single.inline_script("a = '</SCRIPT>';\r\nb = '<!--';\0")
    assert inlined == "a = '<\\/SCRIPT>';\nb = '\\x3C!--';\\x00"
    assert single.inline_style("a::after { content: '</style>' }") == "a::after { content: '<\\/style>' }"


@pytest.mark.usefixtures("tiny")
def test_without_source_no_line_of_source_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.run_folders import make_run_folder

    secret = "password = 'quoted nowhere'"
    script = tmp_path / "train.py"
    script.write_text("\n".join([secret] * 40))
    os.utime(script, (1, 1))  # older than the run: it is what ran
    stack = f'process 4711:"python train.py";MainThread;train ({script}:7);__getitem__ ({script}:9) 400'
    folder = make_run_folder(
        tmp_path,
        stacks_raw=stack + "\n",
        manifest={"user_roots": [str(tmp_path)]},
        rank_json={"main_file": str(script)},
    )
    monkeypatch.chdir(tmp_path)
    run = open_run(folder)
    with_source = single.render(run, run.report())
    without = single.render(run, run.report(source=False), source=False)
    assert secret in json.dumps(embedded(with_source), ensure_ascii=False)
    assert "quoted nowhere" not in json.dumps(embedded(without), ensure_ascii=False)
    assert "quoted nowhere" not in without


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("error", [KeyError("kernels"), UnreadableInputError("nothing was sampled; record again")])
def test_a_page_that_cannot_be_made_takes_no_other_with_it(
    error: Exception, opened: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_context: Any) -> Any:
        raise error

    monkeypatch.setattr("stepscope.dashboard.pages.work.kernels", fail)
    found = embedded(single.render(opened("small"), opened("small").report()))["documents"]
    (block,) = found["runs/this/pages/kernels"]["blocks"]
    assert block["kind"] == "empty"
    assert str(error) in block["why"]
    assert (single.UNMADE in block["why"]) == isinstance(error, KeyError)
    assert next(page["empty"] for page in found["runs/this"]["pages"] if page["key"] == "kernels")
    assert len(found["runs/this/pages/operators"]["blocks"]) > 1


def test_where_no_front_end_was_built_the_report_is_plain(
    opened: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "not_built.txt").write_text("npm ci: ECONNREFUSED\n")
    monkeypatch.setattr(bundle, "FOLDER", tmp_path)
    monkeypatch.setattr(bundle, "load", lambda: None)
    run = opened("small")
    page = single.render(run, run.report())
    assert "<script" not in page
    assert "npm ci: ECONNREFUSED" in page
    assert page.replace("\n", "").count("<p class='soft'>This is the plain form of the report") == 1


@pytest.mark.usefixtures("tiny")
def test_a_page_that_would_be_too_large_is_made_smaller(
    opened: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened("small")
    whole = single.render(run, run.report())
    monkeypatch.setattr(single, "NO_SCRIPT_BYTES", 2_000)
    monkeypatch.setattr(single, "PLAIN_DATA", 1_000)
    packed = single.render(run, run.report())
    assert 'data-encoding="gzip-base64"' in packed
    assert embedded(packed) == embedded(whole)
    monkeypatch.setattr(single, "MAX_BYTES", len(packed) - 1)
    smaller = single.render(run, run.report())
    assert len(smaller) < len(packed)
    assert set(embedded(smaller)["documents"]) == set(embedded(whole)["documents"])
    monkeypatch.setattr(single, "MAX_BYTES", 5_000)
    assert single.render(run, run.report()) == single.plain(run.report(), single.documents(run, run.report()))


@pytest.mark.usefixtures("tiny")
def test_of_what_is_made_smaller_the_totals_stay(opened: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(level: tuple[int, int], page: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(single, "LEVELS", (level,))
        found: list[dict[str, Any]] = embedded(single.render(run, run.report()))["documents"][
            f"runs/this/pages/{page}"
        ]["blocks"]
        return found

    run = opened("small")
    monkeypatch.setattr(flame, "LEAST_BOXES", 3)
    before, after = (blocks((100, boxes), "flame")[0]["document"]["trees"][0] for boxes in (8_000, 5))
    assert (after["value"][0], after["hidden"] > 0) == (before["value"][0], True)
    assert len(after["parent"]) < len(before["parent"])
    tables = [[block for block in blocks((rows, 8_000), "steps") if block["kind"] == "table"] for rows in (100, 2)]
    assert [(block["total"], block["rows"][:2]) for block in tables[0]] == [(b["total"], b["rows"]) for b in tables[1]]
    for page in ("flame", "timeline"):
        (left_out,) = blocks((15, 0), page)
        assert (left_out["kind"], "too large" in left_out["why"]) == ("empty", True)


@pytest.mark.parametrize("name", FORMS)
def test_the_file_opens_without_a_network(
    name: str, opened: Callable[[str], Run], open_page: Callable[..., Opened], tmp_path: Path
) -> None:
    if bundle.load() is None:
        pytest.skip(bundle.missing())
    run = opened(name)
    report = run.report()
    file = tmp_path / "report.html"
    file.write_text(single.render(run, report), encoding="utf-8")
    assert file.stat().st_size <= single.MAX_BYTES
    assert single.UNMADE not in json.dumps(embedded(file.read_text(encoding="utf-8")))

    shown = open_page(file)
    view = View(shown.page, shown.wrong).ready()
    assert view.text("h1") == "Overview"
    for finding in report.findings[:1]:
        assert finding["title"][:30] in view.page.locator("main").inner_text()
    for key in view.pages():
        view.open(key)
        assert view.page.locator("[role=alert]").all_inner_texts() == [], key
        assert view.page.locator("main .block").count() > 0, key
