"""What terminal, JSON and CSV show of made-up facts is what is kept in `shown.txt`, to the letter.

After a change that was meant: `python -m tests.report.shown_cases`, and read the difference.
"""

from __future__ import annotations

import re

import pytest

from tests.report.shown_cases import KEPT, texts

CASES = dict(re.findall(r"^#{8} (.+)\n((?:(?!#{8} ).*\n)*)", KEPT.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return texts(tmp_path_factory.mktemp("shown"))


def test_every_case_is_kept(shown: dict[str, str]) -> None:
    assert list(shown) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_shown_as_it_was(shown: dict[str, str], name: str) -> None:
    assert shown[name] == CASES[name]
