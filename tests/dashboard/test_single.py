"""report.html as one file: bounded, self-contained, safe against any name, and the plain report where it cannot be."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.api import Run, open_run
from stepscope.dashboard import bundle, single
from stepscope.dashboard.pages import PAGES
from stepscope.dashboard.single import LEVELS, Level, shrunk
from stepscope.errors import UnreadableInputError
from stepscope.report.escape import markup
from tests.browser_page import Opened
from tests.dashboard.browser import View
from tests.dashboard.embedded import embedded

SCRIPT = "const a = '</script><!-- \\u2028'; document.title = a;"
STYLE = "body { color: red }"
INDEX = (
    "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>stepscope</title></head>"
    "<body><div id='app'></div></body></html>"
)
FORMS = ("small", "fuzzed", "empty", "cpu")
REAL = ("tb_plugin", "h100", "demo")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end of two lines instead of the built one."""
    made = bundle.Bundle(INDEX, (SCRIPT,), (STYLE,))
    monkeypatch.setattr(bundle, "load", lambda: made)


def path_of(name: str, request: pytest.FixtureRequest) -> Path:
    fixture = {"tb_plugin": name, **{kind: f"{kind}_trace" for kind in ("cpu", "gpu", "h100")}}.get(name, f"{name}_run")
    found: Path = request.getfixturevalue(fixture)
    return found


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest) -> Callable[[str], Run]:
    """A run by its name, opened once."""
    known: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in known:
            known[name] = open_run(path_of(name, request))
        return known[name]

    return run


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

    monkeypatch.setattr("stepscope.dashboard.pages.kernels.build", fail)
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


# ---- made to fit -----------------------------------------------------------------------------------------------------


def flame_block(depth: int, base: bool) -> dict[str, Any]:
    """A tree of `depth` levels of two boxes each, the second of which is narrow and ends there."""
    parent, value = [-1], [1000.0]
    for level in range(depth):
        wide = max(at for at in range(len(parent)) if at == 0 or at % 2 == 1)
        parent += [wide, wide]
        value += [900.0 - level, 1.0]
    size = len(parent)
    tree = {"key": "all", "label": "all", "unit": "samples", "source": "", "hidden": 0, "parent": parent}
    tree |= {"frame": list(range(size)), "value": value, "base": value[:] if base else None}
    tree |= {"change": [0] * size if base else None}
    document = {
        "schema": "stepscope.flame/1",
        "trees": [tree],
        "names": [f"f{at}" for at in range(size)],
        "files": ["x.py"],
    }
    document |= {
        "frames": [[at, 0, at, 0] for at in range(size)],
        "source": {str(at): f"line {at}" for at in range(size)},
    }
    return {"kind": "flame", "id": "flame", "document": document, "first": None}


@pytest.mark.parametrize("base", [False, True])
def test_flame_graphs_keep_their_widest_boxes_and_their_sum(base: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "LEAST_BOXES", 10)
    before = flame_block(60, base)
    copy = json.dumps(before)
    (block,) = shrunk({"blocks": [before]}, Level(rows=1, boxes=50, slices=1, details=1))["blocks"]
    assert json.dumps(before) == copy

    document, (tree,) = block["document"], block["document"]["trees"]
    assert len(tree["parent"]) == 50
    assert all(parent < at for at, parent in enumerate(tree["parent"]))
    assert tree["value"][0] == 1000.0
    assert tree["hidden"] > 0
    own = [
        value - sum(tree["value"][at] for at, up in enumerate(tree["parent"]) if up == node)
        for node, value in enumerate(tree["value"])
    ]
    assert min(own) >= 0
    names = [document["names"][document["frames"][frame][0]] for frame in tree["frame"]]
    assert len(set(names)) == len(document["names"]) == 50
    for frame in tree["frame"]:
        line = document["frames"][frame][2]
        assert document["source"][str(frame)] == f"line {line}"
        assert document["names"][document["frames"][frame][0]] == f"f{line}"


def timeline_block(slices: int) -> dict[str, Any]:
    def column(make: Callable[[int], int]) -> list[int]:
        return [make(at) for at in range(slices)]

    track = {
        "key": "0",
        "start": column(lambda at: at * 100),
        "duration": column(lambda at: at),
        "depth": [0] * slices,
    }
    track |= {
        "name": column(lambda at: at),
        "kind": [0] * slices,
        "id": column(lambda at: at),
        "count": [1] * slices,
    }
    window = {
        "names": [f"n{at}" for at in range(slices)],
        "kinds": ["k"],
        "tracks": [track],
        "total": slices,
        "notes": [],
    }
    details = {str(at): {"duration_ns": at, "name": f"n{at}"} for at in range(slices)}
    return {"kind": "timeline", "window": window, "details": details}


def test_timelines_keep_their_longest_slices() -> None:
    (block,) = shrunk({"blocks": [timeline_block(100)]}, Level(rows=1, boxes=1, slices=10, details=3))["blocks"]
    (track,) = block["window"]["tracks"]
    assert track["duration"] == list(range(90, 100))
    assert [block["window"]["names"][name] for name in track["name"]] == [f"n{at}" for at in range(90, 100)]
    assert set(block["details"]) == {"97", "98", "99"}
    assert block["window"]["total"] == 100
    assert "10 longest" in block["window"]["notes"][-1]


def test_tables_are_cut_and_what_does_not_fit_says_so() -> None:
    table = {"kind": "table", "rows": [{"a": at} for at in range(100)], "total": 4321}
    blocks = shrunk({"blocks": [table, flame_block(60, False), timeline_block(9)]}, LEVELS[-1])["blocks"]
    assert (len(blocks[0]["rows"]), blocks[0]["total"]) == (LEVELS[-1].rows, 4321)
    assert [block["kind"] for block in blocks[1:]] == ["empty", "empty"]
    assert all("too large" in block["why"] for block in blocks[1:])


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


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMS, *REAL])
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
    assert view.text("h1") == "Findings"
    for finding in report.findings[:1]:
        assert finding["title"][:30] in view.page.locator("main").inner_text()
    for key in view.pages():
        view.open(key)
        assert view.page.locator("[role=alert]").all_inner_texts() == [], key
        assert view.page.locator("main .block").count() > 0, key
