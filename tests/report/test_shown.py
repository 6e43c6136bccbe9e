"""What terminal, JSON and CSV show of made-up facts is what is kept in `shown.txt`, to the letter.

After a change that was meant: `python -m tests.report.shown_cases`, and read the difference.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.report.shown_cases import KEPT, texts

CASES = dict(re.findall(r"^#{8} (.+)\n((?:(?!#{8} ).*\n)*)", KEPT.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_case_is_shown_as_it_was(tmp_path: Path) -> None:
    shown = texts(tmp_path)
    assert list(shown) == list(CASES)
    for name, text in shown.items():
        assert text == CASES[name], name
