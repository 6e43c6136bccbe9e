"""Times of every writer, to the nanosecond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.read.collected import BASE, event, read


class TestTimes:  # pitfalls 2, 3 and 4
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
    @given(st.integers(0, 92 * 86_400 * 10**9), st.integers(0, 10**12), st.booleans())
    def test_relative_times_are_exact(self, tmp_path: Path, start_ns: int, duration_ns: int, base_first: bool):
        start, duration = (f"{ns // 1000}.{ns % 1000:03d}" for ns in (start_ns, duration_ns))
        entry = f'{{"ph": "X", "name": "a", "ts": {start}, "dur": {duration}}}'
        base = f'"baseTimeNanoseconds": {BASE}'
        parts = [f'"traceEvents": [{entry}]', base]
        trace = read(tmp_path, ("{" + ", ".join(parts[::-1] if base_first else parts) + "}").encode())
        assert trace.starts == [BASE + start_ns]
        assert trace.slices["duration_ns"] == [duration_ns]

    @pytest.mark.parametrize("quote", ["", '"'])
    def test_decimals_since_1970_are_exact(self, tmp_path: Path, quote: str):
        times = ["1712195495519689.047", "1712195495519689.048", "1712195495519689.5", "1712195495519690"]
        entries = [f'{{"ph": "X", "name": "a", "ts": {quote}{ts}{quote}, "dur": {quote}63.813{quote}}}' for ts in times]
        trace = read(tmp_path, f'{{"traceEvents": [{",".join(entries)}]}}'.encode())
        assert [start - 1712195495519689000 for start in trace.starts] == [47, 48, 500, 1000]
        assert trace.slices["duration_ns"] == [63813] * 4
        assert trace.quality.lost == 0

    def test_decimals_since_1970_of_flows_and_memory(self, tmp_path: Path):
        flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 0, "cat": "ac2g", "name": "ac2g"}
        instant = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 0, "args": {"Bytes": 8}}
        text = json.dumps([event(ts=0), flow, instant]).replace('"ts": 0', '"ts": 1712195495519689.047')
        trace = read(tmp_path, text.encode())
        assert trace.flows["time_ns"] == trace.memory["time_ns"] == [1712195495519689047]

    def test_whole_microseconds_and_text(self, tmp_path: Path):
        trace = read(tmp_path, [event(ts=1623143622460111, dur=0), event(ts="1623143622460111.25", dur="2.5")])
        assert trace.starts == [1623143622460111000, 1623143622460111250]
        assert trace.slices["duration_ns"] == [0, 2500]

    def test_base_as_text_and_a_base_beside_times_since_1970(self, tmp_path: Path):
        assert read(tmp_path, {"baseTimeNanoseconds": str(BASE), "traceEvents": [event()]}).starts == [BASE + 1500]
        trace = read(tmp_path, {"baseTimeNanoseconds": BASE, "traceEvents": [event(ts=1790857026000000)]})
        assert trace.starts == [1790857026000000000]
        assert "since 1970" in trace.quality.problems[0]
