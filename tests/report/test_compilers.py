"""What compilers did, on the terminal, on the page, in the document and as tables of the command line."""

from __future__ import annotations

import csv
import io
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from stepscope.analyze.views import select
from stepscope.model import Analysis, Diagnosis, Place, Report
from stepscope.model.compilers import Change, CompilerPoint, CompilersView, CompileStorm
from stepscope.report import build
from stepscope.report.document import read_report, report_bytes
from stepscope.report.metrics import metric
from stepscope.report.table import Choice, document, to_csv
from tests.dashboard.plain_pages import page_of
from tests.dashboard.test_plain_report import Page
from tests.records import annotated, replace
from tests.report.fabricate import analysis, finding, run_facts, step_facts, write_script
from tests.report.fabricate_compilers import ARTICLE, cause, facts, steps, view, xla_view
from tests.report.test_terminal import HOSTILE, shown, words_of

NOTHING = Diagnosis((), ())


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_script(tmp_path)


def report_of(file: str, found: CompilersView | None, diagnosis: Diagnosis = NOTHING, **changes: Any) -> Report:
    return build(analysis(Path(file).parent, compilers=found, **changes), diagnosis)


def shown_page(file: str, found: CompilersView | None, **changes: Any) -> Page:
    facts_of = analysis(Path(file).parent, compilers=found, **changes)
    return Page(page_of(build(facts_of, NOTHING), facts_of))


def alone(file: str) -> dict[str, Any]:
    """Of a report of torch_xla alone, without any run of ours around it."""
    return {"steps": (), "stacks": None, "loader": None, "run": run_facts(Path(file).parent, hosts=())}


def xla_report(file: str, found: CompilersView) -> Report:
    return report_of(file, found, **alone(file))


def block(text: str) -> str:
    """The block on compilers of a terminal report."""
    return text.split("\nCompilers\n")[1].split("\n\n")[0]


def test_nothing_is_said_where_no_compiler_was_seen(file: str) -> None:
    for found in (None, CompilersView((), (), (), (), (), ())):
        report = report_of(file, found)
        assert "Compilers" not in shown(report)
        assert "No compiler was seen" in shown_page(file, found).text


def test_the_block_says_how_much_and_why(file: str) -> None:
    lines = block(shown(report_of(file, view(file)), width=100)).splitlines()
    flat = words_of("\n".join(lines))

    assert flat.startswith(
        "torch.compile (torch 2.13.0): 17 compiles (14 of them recompiles), 1 time at the limit of versions"
    )
    assert "compiling took 4,130 ms, the longest 1,200 ms" in flat
    assert "  x.size(0) 8 -> 16 -> 24 …  train.py:7  11 recompiles, 2,300 ms, steps 1-11" in lines
    assert '     │ image = Image.open(self.paths[index]).convert("RGB")' in lines
    assert "  limit of 8 versions reached by mean: s.calls (expected 7)  train.py:14  30.0 ms, step 12" in lines
    assert "since step 12 inputs of it that match no version run eagerly; steps took 52.0 ms before" in flat
    assert "  graph break: print  train.py:7  2 times, 2,300 ms, steps 1-11" in lines
    assert "to the host: aten::_local_scalar_dense train.py:13 30 transfers, 4.5 ms" in flat
    assert "  no lowering, so run on the host: aten::median (15)" in lines
    assert any("data" in line and "aten::nonzero (9)" in line for line in lines)
    assert "what compilers did in profiler windows is left out" in flat
    assert "compile of mean" not in flat  # a first compile is nobody's fault
    assert "15 calls" not in flat  # operators have a line together


def test_the_block_is_compact(file: str) -> None:
    many = replace(view(file), causes=tuple(cause(file, id=str(i), subject=f"t{i}") for i in range(90)))
    text = block(shown(report_of(file, many)))

    assert len(text.splitlines()) <= 30
    assert "and 85 more causes: --table compiles" in text


def test_a_slow_evaluation_beside_fast_training_is_seen_at_once(file: str) -> None:
    slow = (step_facts(), step_facts(kind="eval", count=3, mean_ms=212.0, median_ms=210.0, p95_ms=230.0))
    report = report_of(file, view(file), steps=slow)
    text = shown(report, width=100)
    head, page = words_of(text.split("\nCompilers")[0]), words_of(shown_page(file, view(file), steps=slow).text)
    said = "eval: 3 of 12 steps are steady, 212 ms a step (median 210, p95 230), slower than train; "
    said += "compiling was 94 % of the time of"

    assert said in head
    assert f"E{said[1:]}" in page
    assert "compiling was 5.4 % of the time of all 512 train steps; 1 compiled, 1,860 ms" in head
    rows = [line.split() for line in block(text).splitlines() if line.split()[:1] in (["train"], ["eval"])]
    assert rows[0] == ["train", "512", "1", "1,800", "ms", "5.4", "%", "1,860", "ms", "61.3", "ms"]
    assert rows[1][:8] == ["eval", "15", "12", "2,330", "ms", "94", "%", "201"]
    bold = shown(report, width=200, terminal_like=True)
    assert "\x1b[1meval: 3 of 12 steps" in bold


def test_a_fast_evaluation_that_compiles_little_stays_quiet(file: str) -> None:
    calm = replace(view(file), steps=(steps("eval", share=0.002),))
    text = shown(report_of(file, calm), width=200, terminal_like=True)

    assert "\x1b[2meval: 40 of 49 steps are steady, 20.1 ms a step (median 20.0, p95 22.0)\x1b" in text


def test_a_report_of_torch_xla_has_a_headline_that_makes_sense(file: str) -> None:
    report = xla_report(file, xla_view(file))
    said = "15 steps by torch_xla's own count, about 352 ms a step by the rates of its report (estimated)"  # fmt: skip

    assert words_of(shown(report)).startswith(f"pictures: {said} ")
    assert f"{said}." in shown_page(file, xla_view(file), **alone(file)).text
    unrated = xla_view(file)
    unrated = replace(unrated, backends=(replace(unrated.backends[0], step_estimate_ms=None),))
    assert shown(xla_report(file, unrated)).startswith("pictures: 15 steps by torch_xla's own count\n")
    uncounted = replace(unrated, backends=(replace(unrated.backends[0], marked_steps=None),))
    assert shown(xla_report(file, uncounted)).startswith("pictures: no step was seen\n")


def test_the_warnings_are_the_articles_words_once(file: str) -> None:
    report = xla_report(file, xla_view(file))
    text, page = shown(report, width=100), shown_page(file, xla_view(file), **alone(file)).text

    assert f"! {ARTICLE}  (in the log, 5 lines of it)" in text
    assert "! TransferFromDeviceTime too frequent: 30 counts during 15 steps  (by torch_xla's own rule" in text
    assert ARTICLE in page
    assert "Nothing worth fixing" not in text + page  # its own rule says otherwise
    told = Diagnosis((finding(file, title=f"{ARTICLE} and more", category="compile"),), ())
    assert f"! {ARTICLE}" not in shown(report_of(file, xla_view(file), told), width=100)


def test_a_compile_of_a_source_that_cannot_tell_recompiles_is_shown(file: str) -> None:
    assert "  torch_xla.sync  train.py:7  15 compiles, 2,300 ms" in shown(xla_report(file, xla_view(file)))


def test_a_clean_report_of_torch_xla_is_healthy(file: str) -> None:
    clean = replace(xla_view(file), causes=(), warnings=(), steps=())
    text = shown(xla_report(file, clean))

    assert "Nothing worth fixing" in text
    assert "!" not in block(text)


def test_causes_that_findings_tell_are_not_told_again(file: str) -> None:
    by_id = finding(file, id="compile.recompiles-torch.compile:recompile:mean:shape", category="compile", where=())
    by_line = finding(file, rule="compile.limit_hit", category="compile", where=(Place(file, 14),))
    other = finding(file, rule="host.python", where=(Place(file, 13),))
    text = block(shown(report_of(file, view(file), Diagnosis((by_id, by_line, other), ()))))

    assert "x.size(0)" not in text
    assert "limit of 8" not in text
    assert "to the host: aten::_local_scalar_dense" in text  # another kind of finding names its line
    assert "a wording of the future" in text


def test_storms_are_told_unless_a_finding_does(file: str) -> None:
    storm = CompileStorm("torch.compile", 40, 140, False, 38, 102, 100, 90, 1.0, 0.2, "train", 40)
    stormy = replace(view(file), storms=(storm,))
    text = words_of(block(shown(report_of(file, stormy))))

    assert "torch.compile kept compiling after warm-up, at 38 steps, first at step 102" in text
    assert "torch.compile compiled again in step 100 after 90 steps without" in text
    told = Diagnosis((finding(file, rule="compile.storm", category="compile"),), ())
    assert "kept compiling" not in shown(report_of(file, stormy, told))


def test_a_rank_of_its_own_is_named(file: str) -> None:
    alone = replace(view(file), backends=(facts(ranks=(0, 1)),), causes=(cause(file, ranks=(1,)),))
    both = replace(alone, causes=(cause(file, ranks=(0, 1)),))

    assert "steps 1-11, rank 1" in block(shown(report_of(file, alone), width=100))
    assert "rank" not in block(shown(report_of(file, both), width=100))


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ([("8", "12"), ("12", "16")], "x 8 -> 12 -> 16"),
        ([("8", "12"), ("8", "16"), ("8", "20"), ("8", "24")], "x 8 -> 12 -> 16 …"),
        ([("0", None), ("1", None)], "x 0 -> 1"),
        ([("0", None)], "x (expected 0)"),
        ([(None, "16")], "x 16"),
        ([(None, None)], "x"),
        ([], "x"),
        ([("f" * 200, "g")], f"x {'f' * 39}… -> g"),
    ],
)
def test_values_are_a_chain(file: str, changes: list[tuple[str | None, str | None]], values: str) -> None:
    found = tuple(Change(step, old, new) for step, (old, new) in enumerate(changes))
    one = cause(file, subject="x", changes=found, count=len(found) or 1)
    found_view = replace(view(file), causes=(one,))

    assert f" {values} " in words_of(block(shown(report_of(file, found_view), width=200)))
    assert f" {values} " in words_of(shown_page(file, found_view).text)


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


def test_the_drawing_needs_neither_times_of_steps_nor_compiles(file: str) -> None:
    def drawing(*points: CompilerPoint) -> int:
        return shown_page(file, replace(view(file), points=points), steps=()).tags.count("rect")

    untimed = [CompilerPoint(step, "train", None, 5.0, 1, 0, 0, 0) for step in range(3)]
    assert drawing(*untimed) == 3
    assert drawing(*untimed[:1]) == 0
    assert drawing(*(replace(point, compile_ms=None) for point in untimed)) == 0


def hostile(value: Any, text: str = HOSTILE) -> Any:
    """`value` with every text in it replaced."""
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(hostile(item, text) for item in value)
    if isinstance(value, Struct):
        parts = {name: hostile(getattr(value, name), text) for name in value.__struct_fields__}
        return replace(value, **parts)
    return value


def kept_kinds(found: CompilersView, original: CompilersView) -> CompilersView:
    """`found` with the kinds of its causes as they were, so that each is worded in its own way."""
    pairs = zip(found.causes, original.causes, strict=True)
    return replace(found, causes=tuple(replace(bad, kind=good.kind, cause=good.cause) for bad, good in pairs))


@pytest.mark.parametrize("which", [view, xla_view])
@pytest.mark.parametrize("width", [40, 100])
def test_hostile_texts_are_shown_not_obeyed(file: str, which: Any, width: int) -> None:
    for found in (hostile(which(file)), kept_kinds(hostile(which(file)), which(file))):
        for changes in ({}, {"steps": (), "run": run_facts(Path(file).parent, hosts=())}):
            report = report_of(file, found, **changes)
            text = shown(report, width=width)
            harmful = {char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char != "\n"}
            assert harmful == set()
            assert not any(line.startswith("fake:") for line in text.splitlines()) or width < 80
            page = shown_page(file, found, **changes)
            assert page.open == []
            assert "script" not in page.tags
            assert {char for char in page.text if unicodedata.category(char) == "Cf"} == set()
            assert not any(name.startswith("on") for _, name, _ in page.attributes)


def test_huge_views_stay_small(file: str) -> None:
    long = hostile(view(file), "A" * 100_000)
    one = replace(long.causes[0], kind="recompile", changes=long.causes[0].changes * 20, steps=tuple(range(9_000)))
    points = tuple(CompilerPoint(step, "train", 5.0, 4.0, 1, 1, 1, 1) for step in range(100_000))
    metrics = tuple(replace(xla_view(file).metrics[0], rank=rank) for rank in range(20_000))
    huge = replace(
        long, causes=(one,) * 5_000, points=points, metrics=metrics, warnings=xla_view(file).warnings * 3_000
    )
    huge_facts = analysis(Path(file).parent, compilers=huge)
    report = build(huge_facts, NOTHING)

    assert len(report_bytes(report)) < 60_000_000
    assert report.views["compilers"]["causes_total"] == 5_000
    assert report.views["compilers"]["points_total"] == 100_000
    assert len(page_of(report, huge_facts)) < 3_000_000
    assert len(block(shown(report)).splitlines()) < 60


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


def test_reasons_say_whether_one_looked(file: str) -> None:
    clean = replace(view(file), causes=())
    unwatched = replace(clean, backends=(facts(graph_breaks=None, transfers=None),))

    assert "no graph broke" in str(rows_of(clean, "graph-breaks").absent)
    assert "not watched" in str(rows_of(unwatched, "graph-breaks").absent)
    assert "not watched" in str(rows_of(unwatched, "transfers").absent)
    assert "not watched" not in str(rows_of(clean, "transfers").absent)


def test_every_column_with_a_figure_is_defined(file: str) -> None:
    named = {"line", "step", "rank"}
    asked: list[tuple[str, str | None]] = [("compiles", "cause"), ("compiles", "change"), ("compile-steps", "kind")]
    asked += [("compile-steps", "step"), ("graph-breaks", None), ("transfers", None), ("xla-metrics", None)]
    for table, group in asked:
        for found in (view(file), xla_view(file)):
            document_of = document(table, rows_of(found, table, group=group).rows, Choice())
            figures = {key for row in document_of.rows for key, value in row.items() if type(value) in (int, float)}
            assert {key for key in figures - named if metric(table, key) is None} == set(), (table, group)


def test_tables_hold_what_belongs_there(file: str) -> None:
    kinds = {table: [row["kind"] for row in rows_of(view(file), table).rows] for table in ("compiles", "graph-breaks")}
    assert kinds == {"compiles": ["recompile", "compile", "limit_hit", "recompile"], "graph-breaks": ["graph_break"]}
    assert [row["operator"] for row in rows_of(view(file), "transfers").rows] == [
        "aten::_local_scalar_dense",
        "aten::median",
        "aten::nonzero",
    ]
    first = rows_of(view(file), "compiles").rows[0]
    assert (first["old"], first["new"], first["line"], first["definition_line"], first["call_line"]) == (
        *("8", "72"),
        *(7, 6, 12),
    )
    changes = rows_of(view(file), "compiles", group="change").rows
    assert [(row["step"], row["old"], row["new"]) for row in changes[:2]] == [(1, "8", "16"), (2, "16", "24")]
    metrics = rows_of(xla_view(file), "xla-metrics").rows
    assert (metrics[0]["p50"], metrics[0]["unit"], metrics[2]["samples"]) == (336.64, "ms", None)


def test_a_part_of_traces_cannot_be_asked_for(file: str) -> None:
    for chosen in ({"worker": "a"}, {"span": 1}, {"step": 1}, {"device": 0}, {"group": "shapes"}):
        with pytest.raises(select.UsageError):
            rows_of(view(file), "compiles", **chosen)


def test_csv_holds_every_column_and_no_formula(file: str) -> None:
    one = cause(file, function="=cmd()", text="+1", place=Place("@evil.py", 3))
    rows = rows_of(replace(view(file), causes=(one,)), "compiles").rows
    (read,) = csv.DictReader(io.StringIO(to_csv(document("compiles", rows, Choice())).decode()))

    assert list(read) == list(rows[0])
    assert (read["function"], read["text"], read["file"]) == ("'=cmd()", "+1", "'@evil.py")
    assert (read["count"], read["total_ms"], read["new"]) == ("11", "2300.0", "72")


def test_analysis_has_a_place_for_it() -> None:
    assert "compilers" in annotated(Analysis)
