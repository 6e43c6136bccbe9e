"""What a name may be in a CSV file: text, for a spreadsheet and for a terminal."""

from __future__ import annotations

import csv
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from stepscope.report import table


def cell(value: object) -> str:
    """A value as a spreadsheet reads it back."""
    ((text,),) = csv.reader(table.csv_bytes([[value]]).decode().splitlines())
    return text


@given(st.text(st.characters(codec=None), min_size=1))
def test_no_text_is_a_formula_or_moves_a_cursor(text: str) -> None:
    shown = cell(text)
    assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in shown)
    assert not shown.startswith(("@", "="))
    if shown.startswith(("+", "-")):
        float(shown)


def test_figures_stay_figures_and_what_is_missing_is_empty() -> None:
    row = [-1.5, 3, None, True, "+1", "-2.5e3", "-1+1|cmd", "\t=1+1", "\r=1", "-"]
    read = table.csv_bytes([row]).decode().strip().split(",")
    assert read == ["-1.5", "3", "", "true", "+1", "-2.5e3", "'-1+1|cmd", r"\x09=1+1", r"\x0d=1", "'-"]
