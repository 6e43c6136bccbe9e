"""Hotspots as people and programs read them: the shared columns, the header's facts, names that mean harm."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from stepscope.dashboard.hotspots import show, to_csv, to_json
from stepscope.model.sampled import HotspotRow, Hotspots, SampledProcess
from stepscope.report.outputs import console
from stepscope.report.words import Shortener
from tests.records import replace
from tests.report.fabricate import kept

EVIL = "f\x1b[2Jg\r\u202e</script>"


KEPT = kept("hotspots", Hotspots)
_, WAITING, NOBODY = KEPT.rows


def row(**fields: Any) -> HotspotRow:
    return replace(KEPT.rows[0], **fields)


def hotspots(*rows: HotspotRow, **fields: Any) -> Hotspots:
    rows = rows or KEPT.rows
    counts = {
        "working_rows": sum(not each.waiting for each in rows),
        "waiting_rows": sum(each.waiting for each in rows),
    }
    return replace(KEPT, rows=rows, **{**counts, **fields})


def shown(found: Hotspots, rows: int | None = None) -> str:
    out = io.StringIO()
    show(found, console(out), Shortener({"cwd": "/home/user/project"}), rows)
    return out.getvalue()


def table_rows(found: Hotspots, rows: int | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(found, rows).decode())))


class TestCsv:
    def test_a_name_is_no_formula(self) -> None:
        assert table_rows(hotspots(row(name="=1+1")))[0]["name"] == "'=1+1"


class TestJson:
    def test_text_that_no_encoder_takes(self) -> None:
        document = json.loads(to_json(hotspots(row(name="a\udcffb"))))
        assert document["rows"][0]["name"] == "a\\udcffb"


class TestTerminal:
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
