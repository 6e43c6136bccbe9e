"""Numbers as a reader sees them."""

from __future__ import annotations

import pytest

from stepscope.report import sentences, words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0, "0"),
        (0.4123, "0.412"),
        (9.996, "10.0"),
        (41.25, "41.2"),
        (1234.5, "1,234"),
        (-3.14159, "-3.14"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.0 ms"), (0.0412, "0.041 ms"), (7.4, "7.4 ms"), (412.3, "412 ms"), (61_300.0, "61.3 s")],
)
def test_milliseconds(value: float | None, text: str) -> None:
    assert words.milliseconds(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0.0, "0 %"), (0.0001, "< 0.1 %"), (0.042, "4.2 %"), (0.672, "67 %"), (1.0, "100 %")],
)
def test_percent(share: float | None, text: str) -> None:
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "–"),
        (True, "", "yes"),
        (0.5, "share", "50 %"),
        (12.5, "%", "12.5 %"),
        (104_857_600, "bytes", "100 MiB"),
        (256.0, "calls", "256 calls"),
        (0.25, "ms", "0.25 ms"),
        ("256 = dim 1", "text", "256 = dim 1"),
    ],
)
def test_quantity(value: object, unit: str, text: str) -> None:
    assert words.quantity(value, unit) == text


def test_signals_are_named() -> None:
    assert words.signal("loader") == "the loader's next fetch"
    assert words.signal("optimizer,user") == "the optimizer's step or the user's own mark"
    assert words.signal("new\x1b") == "new\\x1b"


@pytest.mark.parametrize(
    ("status", "text"), [(0, None), (None, None), (3, "status 3"), (137, "SIGKILL"), (255, "status 255")]
)
def test_how_the_command_ended(status: int | None, text: str | None) -> None:
    said = sentences.ended(status)
    assert said is None if text is None else text in (said or "")
