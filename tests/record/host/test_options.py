"""Options of a recording and the words of `--window`."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.record.host.options import parse_window


def test_window_words() -> None:
    assert parse_window(None).mode == "auto"
    assert parse_window(None, off=True).mode == "off"
    assert parse_window(None, memory=True).memory == "on"
    found = parse_window("skip_first=10, wait=2,warmup=0,active=5,repeat=3,everywhere")
    assert (found.mode, found.skip_first, found.wait, found.warmup, found.active, found.repeat, found.everywhere) == (
        "schedule", 10, 2, 0, 5, 3, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["active", "active=", "active=-1", "active=0", "steps=3", "active=x", "wait=1;active=2"]
)
def test_window_words_that_cannot_be_used_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="--window"):
        parse_window(text)
