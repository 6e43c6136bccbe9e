"""No character of a run reaches a terminal or a page as a command."""

from __future__ import annotations

import unicodedata
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from stepscope.report.escape import markup, one_line, plain

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


def test_long_text_is_cut() -> None:
    assert plain("x" * 1_000, 10) == "x" * 9 + "…"
