"""report.html: one file, no scripts, no network, everything escaped, readable by machines for people who need them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from stepscope.dashboard import static_page
from stepscope.model import Abstention, Diagnosis, Evidence, Note, Place, Quality, Try
from stepscope.report import build
from tests.dashboard.plain_pages import page_of
from tests.report.fabricate import (
    analysis,
    diagnosis,
    finding,
    hot_line,
    run_facts,
    step_facts,
    write_script,
)
from tests.report.test_terminal import HOSTILE

VOID = {"meta", "rect", "line", "polyline", "polygon", "br"}


class Page(HTMLParser):
    """Collects elements, attributes and text, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


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
        title=HOSTILE,
        severity=HOSTILE,
        confidence=HOSTILE,
        fix=HOSTILE,
        caveat=HOSTILE,
        falsified_by=HOSTILE,
        rule=HOSTILE,
        explains=(HOSTILE,),
        learn="javascript:alert(1)",
        where=(Place(file, 7, HOSTILE), Place(HOSTILE, 1)),
        evidence=(Evidence(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        try_=(Try(HOSTILE, HOSTILE),),
    )
    return page_of(build(facts, Diagnosis((found,), (Abstention(HOSTILE, HOSTILE),))), facts)


def test_it_says_what_the_terminal_says_and_more(folder: Path) -> None:
    text = " ".join(Page(page_of(build(analysis(folder), diagnosis(folder)))).text.split())

    for part in (
        *("pictures", "61.3 ms", "16.3", "522", "cut by the loader's next fetch", "1 torn line", "Paid once 4.2 s"),
        *(
            "data wait",
            "1. Waiting for the loader",
            "41.2 ms a step, 67 %",
            "train.py:7",
            "Image.open",
            "Load in 4 worker",
        ),
        *("loader.workers=4", "step time does not fall", "memory.fragmented", "we need every line"),
        *("aten::conv2d", "256 = dim 1 of (8, 256)", "trace-0.json.gz", "augment", "DataLoader", "4711", "powersave"),
    ):
        assert part in text, part


def test_it_is_one_file_that_asks_for_nothing(folder: Path) -> None:
    page = Page(page_of(build(analysis(folder), diagnosis(folder))))

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "src"]


def test_it_can_be_read_without_seeing_it(folder: Path) -> None:
    page = Page(page_of(build(analysis(folder), diagnosis(folder))))

    assert ("html", "lang", "en") in page.attributes
    assert page.tags.count("h1") == 1
    assert page.tags.count("table") == page.tags.count("thead")
    heads = [name for tag, name, _ in page.attributes if tag == "th" and name == "scope"]
    assert len(heads) == page.tags.count("th") > 0
    labels = [name for tag, name, _ in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == page.tags.count("svg") == 2


def test_hostile_names_stay_text(folder: Path) -> None:
    text = hostile_page(folder)
    page = Page(text)

    assert page.open == []
    assert not {"script", "b"} & set(page.tags)
    assert "<script>x</script>" in page.text
    assert not {"\x1b", "\u202e", "\u2066", "\x9b", "\x07"} & set(text)
    assert "javascript:" not in {value for _, name, value in page.attributes if name == "href"}
    assert [value for tag, name, value in page.attributes if tag == "article" and name == "class"] == ["finding info"]


def test_the_page_is_bounded(folder: Path) -> None:
    file = str(folder / "train.py")
    rows = tuple({"name": "&" * 3_000, "source": "'" * 3_000} for _ in range(5_000))
    findings = tuple(finding(file, fix="<" * 5_000, caveat="<" * 5_000) for _ in range(500))
    series = tuple((step, 1.0) for step in range(100_000))
    facts = analysis(folder, regions=rows, steps=(step_facts(series=series),))

    assert len(page_of(build(facts, Diagnosis(findings, ())), facts).encode()) <= static_page.MAX_BYTES
