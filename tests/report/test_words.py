"""Numbers as a reader sees them; and no character of a run reaches a terminal, a page or a spreadsheet as a command."""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.model import counted
from stepscope.report import sentences, table, words
from stepscope.report.escape import markup, one_line, plain

CASES: dict[Callable[..., str], list[tuple[Any, ...]]] = {  # arguments, then the text
    words.number: [
        *((None, "–"), (0, "0"), (0.0, "0"), (0.4123, "0.412"), (9.996, "10.0"), (41.25, "41.2"), (1234.5, "1,234")),
        (-3.14159, "-3.14"),
    ],
    words.milliseconds: [
        *((None, "–"), (0.0, "0.0 ms"), (0.0412, "0.041 ms"), (7.4, "7.4 ms"), (412.3, "412 ms"), (61_300.0, "61.3 s")),
    ],
    counted.short: [(0.4123, "0.412"), (12.0, "12"), (999.4, "999"), (999.6, "1,000"), (1211.2, "1,211")],
    words.percent: [
        *((None, "–"), (0.0, "0 %"), (0.0001, "< 0.1 %"), (0.042, "4.2 %"), (0.672, "67 %"), (1.0, "100 %")),
    ],
    words.quantity: [
        *((None, "ms", "–"), (True, "", "yes"), (0.5, "share", "50 %"), (12.5, "%", "12.5 %"), (0.25, "ms", "0.25 ms")),
        *((104_857_600, "bytes", "100 MiB"), (256.0, "calls", "256 calls"), ("256 = dim 1", "text", "256 = dim 1")),
        *((1, "processes", "1 process"), (1.0, "calls", "1 call"), (1, "ns", "1 ns")),
    ],
}


@pytest.mark.parametrize(("say", "case"), [(say, case) for say, cases in CASES.items() for case in cases])
def test_figures_in_words(say: Callable[..., str], case: tuple[Any, ...]) -> None:
    *values, text = case
    assert say(*values) == text


@pytest.mark.parametrize(
    ("status", "text"), [(0, None), (None, None), (3, "status 3"), (137, "SIGKILL"), (255, "status 255")]
)
def test_how_the_command_ended(status: int | None, text: str | None) -> None:
    said = sentences.ended(status)
    assert said is None if text is None else text in (said or "")


ANY_TEXT = st.text(st.characters(), max_size=200)  # lone surrogates included


@given(ANY_TEXT)
def test_plain_text_has_no_control_or_directional_characters(text: str) -> None:
    shown = plain(text)

    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not any(
        unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        for char in shown
    )
    shown.encode("utf-8")


@given(ANY_TEXT)
def test_markup_is_text_and_nothing_else(text: str) -> None:
    seen: list[str] = []

    class Watcher(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.extend((tag, *(name for name, _ in attrs)))

        def handle_comment(self, data: str) -> None:
            seen.append(data)

    parser = Watcher(convert_charrefs=True)
    parser.feed(f"<p title='{markup(text)}'>{markup(text)}</p>")
    parser.close()

    assert seen == ["p", "title"]


def test_what_was_there_can_be_read() -> None:
    assert plain("a\x1b[2Jb\u202ec\r\n\td") == "a\\x1b[2Jb\\u202ec\\x0d\\x0a    d"
    assert plain("Größe 🙂 [bold]") == "Größe 🙂 [bold]"
    assert one_line("two\n  lines") == "two lines"
    assert markup("<b a='\"&'>") == "&lt;b a=&#x27;&quot;&amp;&#x27;&gt;"


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
