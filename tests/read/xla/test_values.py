"""Times, sizes and numbers of reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.read.xla.report import time_ns, value
from tests.read.xla.texts import time_text


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("085.582us", 85_582),
        ("000.059us", 59),
        ("053ms484.827us", 53_484_827),
        ("05s089ms084.194us", 5_089_084_194),
        ("001ms32.778us", 1_032_778),
        # 4.874804665 s: seconds and milliseconds are both rounded up by their writer
        ("05s875ms804.665us", 4_874_804_665),
        # 46 minutes 59.6 s, where seconds are rounded up to sixty
        ("47m60s600ms000.000us", 46 * 60 * 10**9 + 59_600_000_000),
        ("47m60s8ms", 47 * 60 * 10**9 + 60_008_000_000 - 60 * 10**9),
        ("01d02h03m04s005ms006.000us", (((24 + 2) * 60 + 3) * 60 + 4) * 10**9 + 5_006_000),
        # no rounding writer writes a first part of one with more than a half behind it
        ("01s600ms000.000us", 1_600_000_000),
        ("02m00s900ms000.000us", 120_900_000_000),
    ],
)
def test_times_are_what_the_writer_had(text: str, ns: int) -> None:
    assert time_ns(text) == ns


@given(st.integers(min_value=0, max_value=40 * 86_400 * 10**9))
def test_a_written_time_reads_back_to_the_nanosecond(ns: int) -> None:
    for unit in (86_400 * 10**9, 3_600 * 10**9, 60 * 10**9, 10**9, 10**6):
        ns += 1 if 2 * (ns % unit) == unit else 0  # a tie can have come from either side
    assert time_ns(time_text(ns)) == ns


@pytest.mark.parametrize(
    ("text", "unit", "figure"),
    [
        ("120.00B", "bytes", 120.0),
        ("161.29KB", "bytes", 161.29 * 1024),
        ("4.84MB", "bytes", 4.84 * 2**20),
        ("2.00GB", "bytes", 2.0 * 2**30),
        ("1.50TB", "bytes", 1.5 * 2**40),
        ("60.00", "count", 60.0),
        ("1.2e+06", "count", 1.2e6),
        (" 001.000us ", "ns", 1000.0),
    ],
)
def test_values_have_their_unit(text: str, unit: str, figure: float) -> None:
    assert value(text) == (unit, figure)


@pytest.mark.parametrize("text", ["nan", "inf", "B", "12XB", "one", "1e999", "0x10", "1_000"])
def test_what_is_no_value_is_none(text: str) -> None:
    assert value(text) is None
    for other in ("", "s", "5s3d", "1.5s", "-5s", "1e3us", "9" * 70 + "us", "5 s"):
        assert value(other) is None


@given(st.text(alphabet="0123456789dhmsu.BKMGTe+- ", max_size=80))
def test_any_text_is_a_value_or_none(text: str) -> None:
    found = value(text)
    assert found is None or found[0] in ("ns", "bytes", "count")
