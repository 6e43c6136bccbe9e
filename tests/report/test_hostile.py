"""No text of a run is obeyed: not by a terminal, a page, a notebook, or the page of an experiment.

Every text of the made-up facts is replaced by one that clears a screen, turns the reading direction, ends lines and
opens tags; once all of them, and once without those by which facts are worded, so that each is worded in its own way.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from stepscope.dashboard import single
from stepscope.model import Abstention, Analysis, DeviceLines, DeviceTime, Diagnosis, ReadingFacts, TraceFacts
from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.model.sampled import SampledViews
from stepscope.report import experiment_report
from stepscope.report.document import build
from stepscope.report.escape import json_bytes
from tests.dashboard.plain_pages import Page, page_of
from tests.records import replace
from tests.report import fabricate_experiment as tried
from tests.report.fabricate import analysis, finding, kept, run_facts, write_script
from tests.report.fabricate_compilers import view, xla_view
from tests.report.test_terminal import HOSTILE, shown

OURS = ("basis", "place_basis", "source_hashes")  # never of a run
WORDED = ("kind", "cause", "category", "phase", "state", "severity", "confidence", "metric", "scope", "unit", "signal")


def hostile(value: Any, leave: tuple[str, ...] = OURS, text: str = HOSTILE) -> Any:
    """`value` with every text in it replaced, but for fields of these names."""
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(hostile(item, leave, text) for item in value)
    if isinstance(value, dict):
        return {hostile(key, leave, text): hostile(item, leave, text) for key, item in value.items()}
    if isinstance(value, Struct):
        names = [name for name in value.__struct_fields__ if name not in leave]
        return replace(value, **{name: hostile(getattr(value, name), leave, text) for name in names})
    return value


def everything(folder: Path) -> Analysis:
    """Facts of every view that is shown."""
    file = write_script(folder)
    knob = AppliedKnob("gc", "off", False, reason="why", file=file, line=3)
    return analysis(
        folder,
        trial=TrialFacts((knob,), None),
        sampled=kept("sampled", SampledViews),
        reading=kept("reading", ReadingFacts),
        traces=(kept("trace", TraceFacts),),
        device_time=(kept("device_time", DeviceTime), replace(kept("device_time", DeviceTime), trace="b")),
        device_lines=kept("device_lines", DeviceLines, file),
        compilers=view(file),
    )


def no_harm(text: str) -> None:
    """Of what a terminal shows."""
    harmful = {char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char != "\n"}
    assert harmful == set()
    assert "[bold" in text.replace("\n", "")  # as text, not as a style


def no_markup(text: str, *tags: str) -> None:
    """Of what a browser shows."""
    page = Page(text)
    assert page.open == []
    assert not {"script", "b", "img", "iframe", *tags} & set(page.tags)
    assert "<script>x</script>" in page.text
    assert not {"\x1b", "\u202e", "\u2066", "\x9b", "\x07"} & set(text)
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert "javascript:" not in {value for _, name, value in page.attributes if name == "href"}


@pytest.mark.parametrize("leave", [OURS, (*OURS, *WORDED)], ids=["all", "names"])
@pytest.mark.parametrize("of", ["run", "trace", "compiler"])
def test_a_report_is_shown_not_obeyed(tmp_path: Path, leave: tuple[str, ...], of: str) -> None:
    facts = hostile(everything(tmp_path), leave)
    (tmp_path / "train.py").write_text((HOSTILE + "\n") * 20)
    if of == "trace":
        facts = replace(facts, steps=(), stacks=None, loader=None, compilers=None)
    if of == "compiler":
        alone = {"steps": (), "stacks": None, "loader": None, "run": run_facts(tmp_path, hosts=())}
        facts = replace(facts, compilers=hostile(xla_view(""), leave), **alone)
    found = hostile(finding(str(tmp_path / "train.py")), leave)
    found = replace(found, learn="javascript:alert(1)", explains=(HOSTILE,))
    for findings in ((found,), ()):
        report = build(facts, Diagnosis(findings, (Abstention(HOSTILE, HOSTILE),)))
        for width in (30, 80):
            no_harm(shown(report, width=width))
        piped = shown(report, piped=True)
        no_harm(piped)
        assert not any(line.startswith("fake:") for line in piped.splitlines())
        no_markup(page_of(report, facts))
        no_markup(single.fragment(report, page=HOSTILE), "svg", "html")


def test_colours_are_ours(tmp_path: Path) -> None:
    text = shown(build(hostile(everything(tmp_path)), Diagnosis((hostile(finding("")),), ())), coloured=True)
    for code in range(110):
        for start in ("", "1;", "2;"):
            text = text.replace(f"\x1b[{start}{code}m", "")
    no_harm(text)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_experiment_is_shown_not_obeyed(tmp_path: Path, encoding: str) -> None:
    applied = AppliedKnob("gc", "off", False, reason="why", file="train.py", line=1)
    whole = tried.experiment(
        by_hand=(tried.BY_HAND,),
        noise=tried.self_test().noise,
        tried=(replace(tried.FASTER, applied=(applied,)), *tried.KEPT.tried[:3]),
        notes=("a note",),
        stopped="spent",
        source="a run",
        finished=False,
    )
    found = hostile(whole, (*OURS, "schema", "word", "figure", "headline", "effects"))
    no_harm(tried.shown(found, encoding=encoding))
    write_script(tmp_path)
    report = build(analysis(tmp_path), Diagnosis((), ()))
    document = experiment_report.experiment_document(found)
    no_markup(page_of(experiment_report.with_experiment(report, document)))


def test_json_on_a_terminal_is_obeyed_no_more_than_text() -> None:
    names = ["\x9b31m\u202e\u2066\ufeff\U000e0041", "é → 一 😀\n", "\x1b[2J\x7f"]
    data = json_bytes({"names": names})
    assert json.loads(data) == {"names": names}
    assert "é → 一 😀" in data.decode()
    assert not [one for one in data.decode() if unicodedata.category(one) in ("Cc", "Cf") and one not in "\n\x7f"]
