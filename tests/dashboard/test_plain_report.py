"""report.html: one file, no scripts, no network, everything escaped, readable by machines for people who need them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepscope.dashboard import static_page
from stepscope.model import Abstention, Diagnosis, Evidence, Note, Place, Quality, Try
from stepscope.report.document import build
from tests.dashboard.plain_pages import Page, page_of
from tests.report.fabricate import analysis, diagnosis, finding, hot_line, run_facts, step_facts, write_script
from tests.report.test_terminal import HOSTILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path)
    return tmp_path


def hostile_page(folder: Path) -> str:
    file = str(folder / "train.py")
    (folder / "train.py").write_text((HOSTILE + "\n") * 20)
    row = hot_line(HOSTILE, function=HOSTILE, role=HOSTILE, phase=HOSTILE, library_leaf=HOSTILE)
    facts = analysis(
        folder,
        run=run_facts(folder, name=HOSTILE, command=(HOSTILE,), versions={HOSTILE: HOSTILE}, git={"branch": HOSTILE}),
        quality=Quality({HOSTILE: 1}, (Note("warning", HOSTILE, ""), Note(HOSTILE, HOSTILE, ""))),
        steps=(step_facts(kind=HOSTILE, signal=HOSTILE), step_facts(kind=HOSTILE)),
        system={HOSTILE: HOSTILE},
        regions=({"name": HOSTILE, "source": HOSTILE},),
    )
    assert facts.stacks is not None
    object.__setattr__(facts, "stacks", type(facts.stacks)("py-spy", 1.0, 1, 0, 1, {}, (row,)))
    found = finding(
        file,
        **dict.fromkeys(("title", "severity", "confidence", "fix", "caveat", "falsified_by", "rule"), HOSTILE),
        explains=(HOSTILE,),
        learn="javascript:alert(1)",
        where=(Place(file, 7, HOSTILE), Place(HOSTILE, 1)),
        evidence=(Evidence(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        try_=(Try(HOSTILE, HOSTILE),),
    )
    return page_of(build(facts, Diagnosis((found,), (Abstention(HOSTILE, HOSTILE),))), facts)


PARTS = """pictures|61.3 ms|16.3|522|cut by the loader's next fetch|1 torn line|Paid once 4.2 s|data wait
1. Waiting for the loader|41.2 ms a step, 67 %|train.py:7|Image.open|Load in 4 worker|loader.workers=4
step time does not fall|memory.fragmented|we need every line|aten::conv2d|256 = dim 1 of (8, 256)|trace-0.json.gz
augment|DataLoader|4711|powersave"""


def test_it_says_what_the_terminal_says_asks_for_nothing_and_can_be_read_without_seeing_it(folder: Path) -> None:
    page = Page(page_of(build(analysis(folder), diagnosis(folder))))
    assert [part for part in re.split("[|\n]", PARTS) if part not in " ".join(page.text.split())] == []

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    (style,) = page.contents["style"]
    assert policy == f"default-src 'none'; style-src {static_page.hashes([style])}; base-uri 'none'; form-action 'none'"
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "style")]

    assert ("html", "lang", "en") in page.attributes
    assert page.tags.count("h1") == 1
    assert page.tags.count("table") == page.tags.count("thead")
    heads = [name for tag, name, _ in page.attributes if tag == "th" and name == "scope"]
    assert len(heads) == page.tags.count("th") > 0
    labels = [name for tag, name, _ in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == page.tags.count("svg") == 2 + 2 + 5  # of the overview, of steps, of metrics


def test_hostile_names_stay_text(folder: Path) -> None:
    text = hostile_page(folder)
    page = Page(text)

    assert page.open == []
    assert not {"script", "b"} & set(page.tags)
    assert "<script>x</script>" in page.text
    assert not {"\x1b", "\u202e", "\u2066", "\x9b", "\x07"} & set(text)
    assert "javascript:" not in {value for _, name, value in page.attributes if name == "href"}
    assert [value for tag, name, value in page.attributes if tag == "article" and name == "class"] == ["finding info"]
