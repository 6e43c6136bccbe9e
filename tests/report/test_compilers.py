"""What compilers did, on the terminal, on the page, in the document and as tables of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.views import select
from stepscope.model import Diagnosis
from stepscope.model.compilers import CompilerPoint, CompilersView
from stepscope.report.document import build, read_report, report_bytes
from tests.dashboard.plain_pages import Page, page_of
from tests.records import replace
from tests.report.fabricate import analysis, run_facts, write_script
from tests.report.fabricate_compilers import cause, view, xla_view
from tests.report.test_hostile import hostile
from tests.report.test_terminal import shown, words_of

NOTHING = Diagnosis((), ())


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_script(tmp_path)


def shown_page(file: str, found: CompilersView | None, **changes: Any) -> Page:
    facts_of = analysis(Path(file).parent, compilers=found, **changes)
    return Page(page_of(build(facts_of, NOTHING), facts_of))


def alone(file: str) -> dict[str, Any]:
    """Of a report of torch_xla alone, without any run of ours around it."""
    return {"steps": (), "stacks": None, "loader": None, "run": run_facts(Path(file).parent, hosts=())}


def block(text: str) -> str:
    """The block on compilers of a terminal report."""
    return text.split("\nCompilers\n")[1].split("\n\n")[0]


def test_the_page_holds_every_cause_change_step_and_metric(file: str) -> None:
    page = shown_page(file, view(file))

    assert page.open == []
    for text in ("x.size(0)", "s.calls", "aten::median", "mark_dynamic", "tensor 'x' size mismatch", "train.py:12"):
        assert text in page.text
    assert "What changed" in page.text
    assert "64" in page.text  # the last value of the chain, which the terminal leaves out
    assert "Steps that compiled" in page.text
    assert "Functions at their limit of versions" in page.text
    drawn = shown_page(file, view(file), steps=())  # no other drawing
    colours = [value for tag, name, value in drawn.attributes if tag == "rect" and name == "fill"]
    assert [colours.count(colour) for colour in dict.fromkeys(colours)] == [12, 12]
    assert "script" not in page.tags
    xla = shown_page(file, xla_view(file), **alone(file)).text
    assert "CompileTime" in xla
    assert "3.03 /s 966 ms 337 ms 0 InboundData bytes 30 161 KiB" in words_of(xla)
    assert "MarkStep" in xla


def test_huge_views_stay_small(file: str) -> None:
    long = hostile(view(file), text="A" * 20_000)
    one = replace(long.causes[0], kind="recompile", changes=long.causes[0].changes * 20, steps=tuple(range(9_000)))
    points = tuple(CompilerPoint(step, "train", 5.0, 4.0, 1, 1, 1, 1) for step in range(20_000))
    metrics = tuple(replace(xla_view(file).metrics[0], rank=rank) for rank in range(4_000))
    huge = replace(long, causes=(one,) * 1_000, points=points, metrics=metrics, warnings=xla_view(file).warnings * 600)
    huge_facts = analysis(Path(file).parent, compilers=huge)
    report = build(huge_facts, NOTHING)

    assert len(report_bytes(report)) < 20_000_000
    assert report.views["compilers"]["causes_total"] == 1_000
    assert report.views["compilers"]["points_total"] == 20_000
    assert len(page_of(report, huge_facts)) < 3_000_000
    assert len(block(shown(report)).splitlines()) < 120  # what is no sentence of ours ends at some 2,000 characters


def test_the_document_reads_back_and_quotes_lines_only_where_allowed(file: str) -> None:
    text = "s.calls == 0  # self.calls += 1  # train.py:7 in mean"
    facts_of = analysis(Path(file).parent, compilers=replace(view(file), causes=(cause(file, text=text),)))
    report = build(facts_of, NOTHING)
    assert read_report(report_bytes(report)) == report
    (row,) = report.views["compilers"]["causes"]
    assert row["code"] == 'image = Image.open(self.paths[index]).convert("RGB")'
    assert row["text"] == text
    bare = build(facts_of, NOTHING, source=False).views["compilers"]["causes"][0]
    assert "code" not in bare
    assert bare["text"] == "s.calls == 0"


class NoTraces:
    """A base without any trace."""

    spans: tuple[()] = ()


def rows_of(found: CompilersView | None, table: str, **chosen: Any) -> select.Rows:
    source = select.Source(NoTraces(), None, compilers=found)  # type: ignore[arg-type]
    return select.rows(source, table, select.Selection(**chosen))


@pytest.mark.parametrize("table", sorted(select.COMPILER_TABLES))
def test_tables_need_no_trace_and_give_a_reason_when_empty(file: str, table: str) -> None:
    assert (rows_of(view(file), table).rows or rows_of(xla_view(file), table).rows) != ()
    for empty in (None, CompilersView((), (), (), (), (), ())):
        none = rows_of(empty, table)
        assert not none.rows
        assert none.absent


def test_a_part_of_traces_cannot_be_asked_for(file: str) -> None:
    for chosen in ({"worker": "a"}, {"span": 1}, {"step": 1}, {"device": 0}, {"group": "shapes"}):
        with pytest.raises(select.UsageError):
            rows_of(view(file), "compiles", **chosen)
