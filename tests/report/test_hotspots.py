"""Hotspots as people and programs read them: the shared columns, the header's facts, names that mean harm."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from stepscope.model.sampled import HotspotRow, Hotspots, SampledProcess
from stepscope.report.hotspots import show, to_csv, to_json
from stepscope.report.outputs import console
from stepscope.report.words import Shortener
from tests.records import replace

SEVEN = [
    "name",
    "path",
    "line",
    "library_function_name",
    "library_function_path",
    "library_function_line",
    "proportion (n)",
]
EVIL = "f\x1b[2Jg\r\u202e</script>"


def row(**fields: Any) -> HotspotRow:
    usual: dict[str, Any] = {
        "name": "Linear.forward",
        "path": "torch/nn/modules/linear.py",
        "line": 134,
        "library_function_name": "Net.forward",
        "library_function_path": "/home/user/project/train.py",
        "library_function_line": 31,
        "samples": 50,
        "proportion": 0.5,
        "waiting": False,
        "kind": "python",
        "module": "torch",
        "phase": "forward",
        "seconds": None,
        "ms_per_step": None,
        "roles": {"rank": 50},
    }
    return HotspotRow(**{**usual, **fields})


WAITING = row(
    name="Condition.wait", path="threading.py", line=327, samples=40, proportion=0.4, waiting=True, phase="data_wait"
)
NOBODY = row(
    name="(no Python frame)",
    path="",
    line=None,
    library_function_name=None,
    library_function_path=None,
    library_function_line=None,
    samples=10,
    proportion=0.1,
    kind="none",
    module="",
    phase=None,
)


def hotspots(*rows: HotspotRow, **fields: Any) -> Hotspots:
    rows = rows or (row(), WAITING, NOBODY)
    usual: dict[str, Any] = {
        "samples": 120,
        "skipped_samples": 3,
        "unit": "samples",
        "by": "line",
        "library": "your own code",
        "selected_samples": 100,
        "waiting_samples": 40,
        "left_out": {"parked threads": 20},
        "rows": rows,
        "working_rows": sum(not each.waiting for each in rows),
        "waiting_rows": sum(each.waiting for each in rows),
        "kinds": {"python": 90, "none": 10},
        "processes": (SampledProcess("", 7, "rank", 0, 2, 100, 40),),
        "files": 1,
        "formats": ("py-spy raw",),
        "idle": True,
        "idle_source": "inferred",
        "rate_hz": None,
        "wall_s": None,
        "wall_source": None,
        "steps": 0,
        "mean_step_ms": None,
        "warnings": (),
    }
    return Hotspots(**{**usual, **fields})


def shown(found: Hotspots, rows: int | None = None) -> str:
    out = io.StringIO()
    show(found, console(out), Shortener({"cwd": "/home/user/project"}), rows)
    return out.getvalue()


def table_rows(found: Hotspots, rows: int | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(found, rows).decode())))


class TestCsv:
    def test_the_seven_columns_come_first_and_read_as_elsewhere(self) -> None:
        header = to_csv(hotspots()).decode().splitlines()[0].split(",")
        assert header[:7] == SEVEN
        first = table_rows(hotspots(row(samples=7468, proportion=0.53051)))[0]
        assert first["proportion (n)"] == "53.05% (7468)"
        assert (first["samples"], float(first["proportion"])) == ("7468", 0.53051)
        assert [first[key] for key in SEVEN[:6]] == [
            "Linear.forward", "torch/nn/modules/linear.py", "134", "Net.forward", "/home/user/project/train.py", "31",
        ]  # fmt: skip

    def test_what_is_missing_is_empty(self) -> None:
        last = table_rows(hotspots())[-1]
        assert [last[key] for key in ("line", *SEVEN[3:6], "phase", "seconds", "ms_per_step")] == [""] * 7

    def test_a_name_is_no_formula(self) -> None:
        assert table_rows(hotspots(row(name="=1+1")))[0]["name"] == "'=1+1"

    def test_rows(self) -> None:
        assert len(table_rows(hotspots())) == 3
        assert len(table_rows(hotspots(), 2)) == 2


class TestJson:
    def test_the_agreed_keys(self) -> None:
        document = json.loads(to_json(hotspots()))
        assert list(document)[:3] == ["samples", "skipped_samples", "rows"]
        assert list(document["rows"][0])[:8] == [*SEVEN[:6], "samples", "proportion"]
        assert (document["samples"], document["skipped_samples"]) == (120, 3)
        assert document["schema"] == "stepscope.hotspots/1"
        assert document["rows"][2]["library_function_line"] is None

    def test_cut_rows_are_countable(self) -> None:
        document = json.loads(to_json(hotspots(), 1))
        assert len(document["rows"]) == 1
        assert (document["working_rows"], document["waiting_rows"]) == (2, 1)

    def test_text_that_no_encoder_takes(self) -> None:
        document = json.loads(to_json(hotspots(row(name="a\udcffb"))))
        assert document["rows"][0]["name"] == "a\\udcffb"


class TestTerminal:
    def test_working_and_waiting_are_two_tables(self) -> None:
        text = shown(hotspots())
        working, waiting = text.index("Working: 60 samples"), text.index("Waiting: 40 samples")
        assert working < text.index("Linear.forward") < waiting < text.index("Condition.wait")

    def test_without_waiting_there_is_one_table(self) -> None:
        assert "Waiting" not in shown(hotspots(row()))

    def test_the_header_says_what_the_samples_are_of(self) -> None:
        text = shown(hotspots())
        assert "100 samples, 40 % of them waiting" in text
        assert "1 file (py-spy raw) with 120 samples, 3 unreadable" in text
        assert "left out: 20 parked threads (--parked keeps them)" in text
        assert "rank 0, pid 7: 100, 2 threads, 40 % waiting" in text
        assert "waiting was sampled too (inferred" in text
        assert "how long is unknown" in text
        assert "no Python frame 10 %" in text

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"idle": None, "idle_source": None}, "mode unknown"),
            ({"idle": False, "idle_source": "recorded"}, "waiting was not sampled (as recorded)"),
            ({"wall_s": 12.0, "wall_source": "recorded", "rate_hz": 100.0}, "sampled for 12.0 s at 100 Hz"),
            ({"wall_s": 12.0, "wall_source": "nominal"}, "sampled for 12.0 s (at the nominal rate)"),
            ({"wall_s": 12.0, "wall_source": "nominal", "idle": False}, "sampled for at least 12.0 s"),
            ({"steps": 90, "mean_step_ms": 12.5}, "90 steady steps of 12.5 ms"),
            ({"warnings": ("beware of\nthis",)}, "! beware of this"),
            ({"unit": "us"}, "100 us, 40 % of them waiting"),
        ],
    )
    def test_facts_and_warnings(self, fields: dict[str, Any], said: str) -> None:
        assert said in shown(hotspots(**fields))

    def test_many_processes_are_summed_up(self) -> None:
        processes = tuple(SampledProcess("", n, "loader_worker", 0, 1, 5, 0) for n in range(20))
        text = shown(hotspots(processes=processes))
        assert text.count("loader worker of rank 0") == 8
        assert "and 12 more of loader worker" in text

    def test_times_instead_of_bare_shares_where_they_are_known(self) -> None:
        text = shown(hotspots(row(seconds=2.5, ms_per_step=7.4)))
        assert "per step" in text
        assert "7.4 ms" in text
        assert "2.5 s" in text
        assert "per step" not in shown(hotspots())

    def test_the_callers_place_is_relative_to_the_project(self) -> None:
        assert "Net.forward train.py:31" in shown(hotspots())
        itself = row(name="f", path="train.py", library_function_name="f", library_function_path="train.py")
        assert "itself" in shown(hotspots(itself))

    def test_rows_are_limited_and_said(self) -> None:
        text = shown(hotspots(), 1)
        assert "1 of 2 rows" in text
        assert "(no Python frame)" not in text

    @pytest.mark.parametrize(("by", "column"), [("function", "function"), ("file", "file"), ("module", "module")])
    def test_columns_by_what_rows_are(self, by: str, column: str) -> None:
        merged = row(line=None, library_function_line=None)
        if by in ("file", "module"):
            merged = replace(merged, name=None, library_function_name=None)
        text = shown(hotspots(merged, by=by))
        heading = next(line for line in text.splitlines() if line.startswith("share"))
        assert column in heading
        assert ("torch" if by == "module" else "torch/nn/modules/linear.py") in text
        assert ("called from" in heading) is (by == "function")

    @pytest.mark.parametrize("by", ["line", "module"])
    def test_names_cannot_move_the_cursor(self, by: str) -> None:
        evil = row(name=EVIL, path=EVIL, library_function_name=EVIL, library_function_path=EVIL, module=EVIL)
        others: dict[str, Any] = {
            "library": EVIL,
            "formats": (EVIL,),
            "warnings": (EVIL,),
            "processes": (SampledProcess(EVIL, 1, EVIL, 0, 1, 1, 0),),
            "kinds": {EVIL: 5},
            "left_out": {EVIL: 2},
            "by": by,
        }
        text = shown(hotspots(evil, replace(evil, kind=EVIL, phase=EVIL, roles={EVIL: 1}), **others))
        assert not set(text) & set("\x1b\r\u202e")
        assert "\\x1b[2J" in text

    def test_markup_of_the_console_is_text(self) -> None:
        assert "[bold]f[/bold]" in shown(hotspots(row(name="[bold]f[/bold]")))
