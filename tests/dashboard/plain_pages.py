"""A page of made-up facts, without a run behind: what `analyze --html` writes where no front end was built; and what a
single-file report holds, as its script would read it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from stepscope.api import Run
from stepscope.dashboard import single
from stepscope.model import Analysis, Diagnosis, Report
from tests.builders import MS, make_tables, step_rows
from tests.report.fabricate import analysis

MOST_STEPS = 600


def run_of(report: Report, facts: Analysis) -> Run:
    """A run that says these, and has as many steps as they count; no other table has a row."""
    run = Run((Path(facts.run.folder),), recorded=False)
    rows = [
        row
        for kind in facts.steps
        for row in step_rows(min(kind.count, MOST_STEPS), wall_ns=int(kind.mean_ms * MS), kind=kind.kind)
    ]
    vars(run).update(tables=make_tables(steps=rows), analysis=facts, diagnosis=Diagnosis((), ()))
    return run.showing(report)


def page_of(report: Report, facts: Analysis | None = None) -> str:
    """The page of a report of `facts`; those of `fabricate` by default."""
    run = run_of(report, analysis(Path(report.run["cwd"])) if facts is None else facts)
    page = single.plain(report, single.documents(run, report))
    assert single.UNMADE not in page, page[page.index(single.UNMADE) :][:400]
    return page


class Page(HTMLParser):
    """Collects elements, attributes, text, and what stands in scripts and styles, and checks that elements nest."""

    VOID = ("meta", "rect", "line", "polyline", "polygon", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.contents: defaultdict[str, list[str]] = defaultdict(list)
        self.open: list[str] = []
        self.top = 0  # elements that stand in no other
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.contents[tag].append("")
        self.top += not self.open
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self.open:
            self.contents[self.open[-1]][-1] += data


DATA = re.compile(r'<script type="application/json" id="stepscope-data"([^>]*)>(.*?)</script>', re.DOTALL)


def documents_text(page: str) -> str:
    """The JSON text in the page; "" of a page without, such as the plain report."""
    found = DATA.search(page)
    if found is None:
        return ""
    if 'data-encoding="gzip-base64"' in found[1]:
        return gzip.decompress(base64.b64decode(found[2])).decode()
    return found[2]


def embedded(page: str) -> dict[str, Any]:
    """The documents in the page, of which there is one element."""
    assert len(DATA.findall(page)) == 1
    found: dict[str, Any] = json.loads(documents_text(page))
    return found
