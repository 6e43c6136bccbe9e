"""A comparison as JSON, on a terminal and as a page: what they say and how they hold up."""

from __future__ import annotations

import io
import json
import math
from typing import Any

from rich.console import Console

from stepscope.dashboard.blocks import Alone
from stepscope.dashboard.pages import compare
from stepscope.dashboard.terminal import show_comparison
from stepscope.model import SourceFiles
from stepscope.model.comparison import (
    SLOWER,
    Change,
    Comparison,
    Effect,
    Flag,
    Measure,
    Outcome,
    PhaseEffect,
    PhaseTime,
    SideFacts,
    Verdict,
)
from stepscope.report import comparison_report
from stepscope.report.escape import json_bytes
from tests.records import replace

EFFECT = Effect(1.28, 1.25, 1.31, 4, 0.01, 0.001)


def measure(label: str, mean_ms: float, **more: Any) -> Measure:
    phases = (PhaseTime("data_wait", mean_ms),)
    return Measure(label, f"/runs/{label}", 90, 10, mean_ms, mean_ms, mean_ms, 8, 800 / mean_ms, 2.0, phases, **more)


def comparison(*changes: Change, **more: Any) -> Comparison:
    before, after = measure("a/1", 100), measure("b/1", 128)
    outcome = Outcome(
        knobs=(),
        verdict=Verdict(SLOWER, "slower by 28 % (95 %: 25 to 31 %), 4 pairs"),
        effects={"mean_ms": EFFECT, "fixed_cost_s": Effect(1.0, None, None, 1)},
        phases=(
            PhaseEffect("forward", 10, 9, -1, -2, 0.5),
            PhaseEffect("data_wait", 20, 50, 30, 28, 32),
            PhaseEffect("other", 0, 0, 0),
        ),
        pairs=((before, after),) * 4,
    )
    sides = [SideFacts(one.label[0], (one,), (one.path,), (), {"mean_ms": one.mean_ms}) for one in (before, after)]
    values = {"baseline": sides[0], "candidate": sides[1], "outcome": outcome, "changes": changes, "absent": {}}
    return Comparison(**{**values, **more})


def change(kind: str = "kernel", name: str = "gemm", difference: float | None = 3.0, **more: Any) -> Change:
    values = {"baseline": 10.0, "candidate": 13.0, "unit": "ms per step", "status": "grew", **more}
    return Change(kind=kind, name=name, difference=difference, **values)


def terminal(found: Comparison, *, encoding: str = "utf-8", top: int | None = None) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(
        file=out, width=100, force_terminal=True, color_system=None, highlight=False, markup=False, emoji=False
    )
    show_comparison(comparison_report.comparison_document(found), console, top=top)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def page(found: Comparison) -> str:
    return compare.render(comparison_report.comparison_document(found))


def test_flags_say_whether_they_withhold_and_which_runs_they_keep_out() -> None:
    found = comparison()
    assert found.outcome is not None
    flag = Flag("failed", "the command ended with status 1", "manifest", True)
    outcome = replace(found.outcome, flags=(flag, flag), left_out=(measure("b/7", 1),))
    document = comparison_report.comparison_document(replace(found, outcome=outcome))
    shown = compare.comparison(Alone(), document)
    assert [block["text"] for block in shown if block.get("tone") == "warning"][1:] == [
        "The command ended with status 1 (no verdict rests on such a run).",
        "Left out of the pairs for that: b/7.",
    ]


def test_without_step_time_the_reason_stands_in_its_place() -> None:
    found = comparison(change(), outcome=None, absent={"step time": "b: no steps", "function": "b: no steps"})
    for text in (terminal(found), page(found)):
        assert "No step time to compare: b: no steps" in text
        assert "gemm" in text
    assert "Not compared: step time, function (b: no steps)" in terminal(found)
    assert comparison_report.comparison_document(found)["candidates"] == []


def test_text_of_a_run_is_never_markup() -> None:
    odd = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
    found = comparison(
        change(name=odd, file=odd, line=3),
        change("finding", odd, rule=odd, status="gone"),
        change("environment", odd, None, baseline=odd, candidate=None, unit="", status="gone"),
        absent={odd: odd},
        notes=(odd,),
    )
    assert "<img" not in page(found)
    for text in (page(found), terminal(found)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_json_carries_what_is_no_number_as_null() -> None:
    found = comparison(change(difference=math.inf, baseline=math.nan))
    document = json.loads(json_bytes(comparison_report.comparison_document(found)))
    assert (document["changes"][0]["difference"], document["changes"][0]["baseline"]) == (None, None)


def test_losses_of_a_run_are_thinned() -> None:
    losses = tuple((step, float(step)) for step in range(5_000))
    row = comparison_report.measure_document(measure("a", 1, losses=losses))
    assert len(row["losses"]) == comparison_report.MAX_LOSSES
    assert row["losses"][0] == [0, 0.0]


def test_a_spreadsheet_gets_no_formula() -> None:
    rows = comparison_report.to_csv((change(name="=1+1"), change(name="@sum"), change(difference=-3.0)))
    lines = rows.decode().splitlines()
    assert lines[0] == ",".join(comparison_report.CSV_COLUMNS)
    assert lines[1].startswith("kernel,'=1+1,")
    assert lines[2].startswith("kernel,'@sum,")
    assert ",-3.0," in lines[3]


def test_a_line_is_quoted_only_where_its_file_is_as_it_was(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nloss.backward()\n")
    written_ns = script.stat().st_mtime_ns
    for started_ns, code in ((written_ns + 1, "loss.backward()"), (written_ns - 10**9, None)):
        roots = (str(tmp_path),)
        measures = (measure("b", 1, started_ns=started_ns),)
        side = SideFacts("b", measures, ("b",), roots=roots, source_files=SourceFiles(roots))
        found = comparison(change("line", "main", file="train.py", line=2), candidate=side)
        assert comparison_report.comparison_document(found)["changes"][0]["code"] == code
        assert "code" not in comparison_report.comparison_document(found, source=False)["changes"][0]


def test_less_utilisation_in_a_shorter_step_is_no_regression() -> None:
    values = {"baseline": 90.0, "candidate": 60.0, "unit": "%", "status": "shrank"}
    faster = comparison(change("utilisation", "GPU utilisation", -30.0, **values))
    assert faster.outcome is not None
    effects = {"mean_ms": Effect(0.7, 0.68, 0.72, 4)}
    outcome = replace(faster.outcome, verdict=Verdict("faster", "faster by 30 %"), effects=effects)
    for text in (terminal(replace(faster, outcome=outcome)), page(replace(faster, outcome=outcome))):
        assert "-30.0 points" in text
        assert "Faster by 30 %" in text
        said_of_it = text.rpartition("<main>")[2].lower()  # without the style sheet
        assert not any(word in said_of_it for word in ("slower", "regress", "worse"))
