"""Damaged, hostile and absurd traces: what is whole is kept, the rest is counted, and nothing else ever happens."""

from __future__ import annotations

import gzip
import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.api import open_run
from stepscope.errors import UnreadableInputError
from stepscope.read.kineto import KinetoTrace, RawEvents
from stepscope.read.streams import Limits
from stepscope.report.document import read_report, report_bytes
from tests import gpu_traces
from tests.read.collected import Collected, event, kernel, read, written
from tests.run_folders import make_run_folder

BOMB_SECONDS = 60  # generous: it takes about one

GOOD = json.dumps(event())


def around(middle: bytes) -> bytes:
    events = b",\n".join((GOOD.encode(), middle, GOOD.encode()))
    return b'{"baseTimeNanoseconds": 7, "traceEvents": [' + events + b'], "traceName": "x"}'


class TestInvalidJson:  # pitfall 7
    @pytest.mark.parametrize(
        ("middle", "name"),
        [
            (rb'{"ph": "X", "name": "C:\path\x", "ts": 2, "dur": 1}', r"C:\path\x"),
            (rb'{"ph": "X", "name": "C:\new\u12", "ts": 2, "dur": 1}', "C:\new\\u12"),
            (b'{"ph": "X", "name": "bytes \xff\xfe", "ts": 2, "dur": 1}', r"bytes \xff\xfe"),
            (b'{"ph": "X", "name": "half \\ud800", "ts": 2, "dur": 1}', r"half \ud800"),
            (b'{"ph": "X", "name": "line\nbreak\x00\x1b", "ts": 2, "dur": 1}', "line\nbreak\x00\x1b"),
            (b'{"ph": "X", "name": "dynamo "<string>" 3", "ts": 2, "dur": 1}', 'dynamo "<string>" 3'),
            (b'{"ph": "X", "name": "inf", "ts": 2, "dur": 1, "args": {"x": inf, "y": [NaN, -Infinity]}}', "inf"),
            (b'{"ph": "X", "name": "n/a", "ts": 2, "dur": 1, "args": {"x": N/A, "y": 1.#INF, "z": nan}}', "n/a"),
            (b'{"ph": "X", "name": "bare", "ts": 2, "dur": 1, "args": {"x": unknown, "y": None, "z": true}}', "bare"),
            (b'{"ph": "X", "name": "open", "ts": 2, "dur": 1, "args": {"x": 3}', "open"),
            (b'{"ph": "X", "name": "list, {\\"a\\"}", "ts": 2, "dur": 1, "args": []}', 'list, {"a"}'),
        ],
    )
    def test_what_can_be_repaired_is(self, tmp_path: Path, middle: bytes, name: str):
        trace = read(tmp_path, around(middle))
        assert trace.names == ["aten::add", name, "aten::add"]
        assert trace.starts == [1507, 2007, 1507]
        assert (trace.quality.events, trace.quality.lost) == (3, 0)
        assert trace.quality.salvaged == (b'"args": []' not in middle)

    @pytest.mark.parametrize(
        "middle",
        [
            b'{"ph": "X", "name": "a", "b", "ts": 2, "dur": 1}',
            b'{"ph": "X", "name": , "ts": 2, "dur": 1}',
            b'"ph": "X", "name": "no bracket", "ts": 2, "dur": 1}',
            b'{"ph": "X", "name": "a" "ts": 2 "dur": 1}',
            b'{"ph": "X", "name": "deep", "ts": 2, "dur": 1, "args": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
            b'{"ph": "X", "name": "deep", "ts": 2, "dur": 1, "args": {"x": ' + b'{"a":' * 100_000 + b"}}",
        ],
    )
    def test_what_cannot_costs_one_event(self, tmp_path: Path, middle: bytes):
        trace = read(tmp_path, around(middle))
        assert trace.names == ["aten::add", "aten::add"]
        assert (trace.quality.events, trace.quality.lost, trace.quality.salvaged) == (3, 1, 0)
        assert trace.quality.problems

    def test_many_damaged_events_in_a_large_trace(self, tmp_path: Path):
        lines = [json.dumps(event(f"op{i}")) for i in range(30_000)]
        for i in range(0, 30_000, 100):
            lines[i] = lines[i].replace(f"op{i}", f'op", "{i}')
        trace = read(tmp_path, ("[" + ",\n".join(lines) + "]").encode())
        assert trace.names == [f"op{i}" for i in range(30_000) if i % 100]
        assert (trace.quality.lost, trace.quality.events) == (300, 30_000)


class TestCutOff:
    def test_every_place_to_cut(self, tmp_path: Path):
        events = [event("first", args={"a": [{"b": "},{"}]}), event("second"), kernel("third", correlation=1)]
        text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}).encode()
        for at in range(0, len(text), 3):
            ends = [text.index(name) for name in (b"second", b"third", b"traceName")]
            complete = sum(at > end for end in ends)
            try:
                trace = read(tmp_path, text[:at])
            except UnreadableInputError:
                assert complete == 0
                continue
            assert complete <= len(trace.names) <= complete + 1
            assert trace.names == ["first", "second", "third"][: len(trace.names)]
            assert trace.quality.events <= 3
            assert trace.quality.problems or at > ends[2] - 4

    @pytest.mark.parametrize(
        ("content", "count", "problem"),
        [
            (f'{{"traceEvents": [{GOOD}, {GOOD}]', 2, False),  # no end of the object
            (f'"name": "half", "ts": 1}}, {GOOD}, {GOOD}]}}', 2, True),  # no beginning
            (f'{{"traceEvents": {GOOD}, {GOOD}], "with_stack": 1}}', 2, False),  # no bracket of the list
            (f'{{"with_stack": 1, "traceEvents": [{GOOD}, {GOOD}]}}\n' * 2, 4, True),  # two traces in one file
        ],
    )
    def test_what_is_missing_around_events(self, tmp_path: Path, content: str, count: int, problem: bool):
        trace = read(tmp_path, content.encode())
        assert (len(trace.names), trace.quality.lost <= problem) == (count, True)
        assert bool(trace.quality.problems) == problem

    def test_damaged_gzip(self, tmp_path: Path):
        data = bytearray(
            gzip.compress(json.dumps([event(str(random.Random(i).random())) for i in range(5000)]).encode())
        )
        data[len(data) // 2] ^= 0xFF
        trace = read(tmp_path, bytes(data), "x.json")
        assert trace.names
        assert trace.quality.problems


class TestNothingUsable:
    @pytest.mark.parametrize(
        "content",
        [b"", b"{}", b"[]", b"\x1f\x8b", b"\x1f\x8b\x08garbage", b"[" * 100_000, b"<svg>", b"[[1, 2], [3, 4]]", b"null",
         b'{"a": 1}', b'[{"a": 1}]', b'{"traceEvents": {}}', b'{"traceEvents": [1, 2]}', b"\x00" * 5000, b'"ph"'],
    )  # fmt: skip
    def test_says_so(self, tmp_path: Path, content: bytes):
        with pytest.raises(UnreadableInputError, match="no trace event"):
            read(tmp_path, content)

    def test_absent_file_and_folder(self, tmp_path: Path):
        with pytest.raises(UnreadableInputError, match="No such file"):
            KinetoTrace(tmp_path / "none.json")
        with pytest.raises(UnreadableInputError, match="directory"):
            KinetoTrace(tmp_path)


class TestSize:
    def bomb(self, tmp_path: Path, filler: bytes, megabytes: int, prefix: bytes = b"") -> Path:
        path = tmp_path / "bomb.json.gz"
        block = (filler * (2**20 // len(filler) + 1))[: 2**20]
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(prefix)
            for _ in range(megabytes):
                file.write(block)
        return path

    @pytest.mark.parametrize("filler", [b" ", b"[", b'{"ph":1},'])
    def test_unpacking_without_end(self, tmp_path: Path, filler: bytes):
        limits = Limits(ratio_from_bytes=8 * 2**20, ratio=100)
        begin = time.monotonic()
        with pytest.raises(UnreadableInputError, match="no trace event"):
            Collected(self.bomb(tmp_path, filler, 64, b'{"traceEvents": ['), limits)
        assert time.monotonic() - begin < BOMB_SECONDS

    def test_events_before_the_bomb_are_kept(self, tmp_path: Path):
        limits = Limits(ratio_from_bytes=8 * 2**20, ratio=100)
        trace = Collected(self.bomb(tmp_path, b" ", 64, f'{{"traceEvents": [{GOOD},'.encode()), limits)
        assert len(trace.names) == 1
        assert "times its size" in trace.quality.problems[0]

    def test_limit_of_unpacked_bytes(self, tmp_path: Path):
        trace = read(tmp_path, [event()] * 1000, limits=Limits(unpacked_bytes=5000))
        assert 10 < len(trace.names) < 1000
        assert "more than" in trace.quality.problems[0]

    def test_an_endless_event_is_lost_alone(self, tmp_path: Path):
        limits = Limits(event_bytes=100_000, piece_bytes=10_000)
        long = json.dumps(event("x" * 300_000))
        trace = read(tmp_path, f"[{GOOD}, {long}, {GOOD}, {GOOD}]".encode(), limits=limits)
        assert trace.names[0] == trace.names[-1] == "aten::add"
        assert len(trace.names) >= 2
        assert trace.quality.lost >= 1

    def test_memory_does_not_grow_with_the_trace(self, tmp_path: Path):
        line = json.dumps(event(args={"Input Dims": [[4, 8], [8, 16]], "External id": 77})) + ","
        peaks = []
        for count in (40_000, 100_000):
            path = tmp_path / "long.json"
            path.write_text("[" + line * count + GOOD + "]")
            tracemalloc.start()
            total = sum(len(chunk.slices) for chunk in KinetoTrace(path).chunks())
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert total == count + 1
        assert peaks[1] < peaks[0] * 1.5 + 2**20
        assert peaks[1] < 100 * 2**20


def synthetic() -> bytes:
    flow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"}
    meta = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}}
    events = [meta, event(args={"Input Dims": [[1]], "x": [{"a": 1}, {"b": 2}]}), kernel("k", correlation=1), flow]
    return json.dumps(
        {"baseTimeNanoseconds": 5, "traceEvents": events * 6, "distributedInfo": {"rank": 1}}, indent=1
    ).encode()


def mutated(whole: bytes, data: st.DataObject) -> tuple[bytes, str]:
    kinds = ("flip", "cut", "bracket", "repeat", "insert", "remove", "packed cut", "packed flip")
    kind = data.draw(st.sampled_from(kinds))
    content = bytearray(gzip.compress(whole) if kind.startswith("packed") else whole)
    at, width = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 3000))
    if kind == "bracket":
        places = [i for i, byte in enumerate(whole) if byte in b'{}[]",:']
        for place in sorted(data.draw(st.sets(st.sampled_from(places), min_size=1, max_size=6)), reverse=True):
            del content[place]
    elif kind.endswith("cut"):
        del content[at:]
    elif kind.endswith("flip"):
        for _ in range(data.draw(st.integers(1, 8))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "repeat":
        content[at:at] = whole[at : at + width]
    elif kind == "insert":
        content[at:at] = data.draw(st.binary(max_size=30))
    else:
        del content[at : at + width]
    return bytes(content), kind


def is_json(content: bytes) -> bool:
    """What was taken out may have been whole events."""
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def check_damage(folder: Path, whole: bytes, data: st.DataObject) -> None:
    """Read a mutation of `whole`: no exception but one, and an account that adds up."""
    sound = read(folder, whole)
    content, kind = mutated(whole, data)
    limits = Limits(piece_bytes=data.draw(st.sampled_from([300, 5000, 2**20])))
    path = written(folder, content, "damaged.json")
    try:
        trace = Collected(path, limits)
    except UnreadableInputError:
        trace = None
    try:
        count = sum(isinstance(json.loads(entry), dict) for entry in RawEvents(path, limits))
        assert count > 0 or trace is None
    except UnreadableInputError:
        assert trace is None
    if trace is None:
        return
    quality = trace.quality
    kept = len(trace.names) + len(trace.flows["id"]) + len(trace.memory["bytes"])
    assert quality.events > 0
    assert kept + quality.unsupported + quality.lost <= quality.events  # names of threads make up the rest
    assert quality.salvaged <= quality.events
    lists = [*trace.slices.values(), *trace.flows.values()]
    assert {len(values) for values in lists} == {len(trace.names), len(trace.flows["id"])}
    json.dumps([trace.slices, trace.flows, trace.summary.threads, trace.summary.metadata]).encode()
    if kind not in ("repeat", "insert", "flip"):
        assert quality.events <= sound.quality.events + 8
    missing = sound.quality.events - quality.events
    if missing > 12 and not is_json(content):  # so much is not lost without a word
        assert quality.problems


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(st.data())
def test_mutated_small_traces(tmp_path: Path, data: st.DataObject):
    check_damage(tmp_path, synthetic(), data)


def test_one_damaged_byte_costs_one_event(tmp_path: Path):
    whole = json.dumps(
        {"traceEvents": [event(f"op{i}", args={"a": [1, {"b": 2}]}) for i in range(12)], "with_stack": 1}
    )
    begin, end = whole.index("[") + 1, whole.index('"with_stack"') - 4
    for at in range(begin, end, 23):
        for damaged in (whole[:at] + whole[at + 1 :], whole[:at] + "\x01" + whole[at + 1 :]):
            trace = read(tmp_path, damaged.encode())
            kept = [name for name in trace.names if name in whole]
            assert len(kept) >= 10
            assert 11 <= trace.quality.events <= 13
            assert trace.quality.events - trace.quality.lost - trace.quality.unsupported == len(trace.names)
            assert trace.summary.metadata == {"with_stack": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]),
    st.sampled_from(
        ["External id", "correlation", "stream", "grid", "Input Dims", "Collective name", "Call stack", "bytes"]
    ),
)
@example([{"": float("inf")}], "ph", "External id")  # damage inside a nested object
def test_any_value_anywhere(tmp_path: Path, value: Any, field: str, argument: str):
    entries: list[Any] = [
        {**event(), field: value},
        {**kernel(), "args": {argument: value}},
        {**event(), "args": {argument: value}},
    ]
    entries += [
        {"ph": "s", "id": 1, "ts": 1, "pid": 1, field: value},
        {"ph": "i", "name": "[memory]", "ts": 1, field: value},
    ]
    trace = read(
        tmp_path, {"traceEvents": [*entries, event("last")], "distributedInfo": value, "deviceProperties": [value]}
    )
    assert trace.names[-1] == "last"
    kept = len(trace.names) + len(trace.flows["id"]) + len(trace.memory["bytes"])
    assert kept >= 3
    assert trace.quality.events == 6


@pytest.mark.parametrize("number", [2**63, -(2**64), 10**400, "7", None], ids=repr)
def test_figures_that_no_column_holds_are_missing(tmp_path: Path, number: Any) -> None:
    gpu_traces.write(tmp_path / "trace.json", steps=3)
    trace = json.loads((tmp_path / "trace.json").read_text())
    trace["deviceProperties"] = [{"id": number, "name": "A100", "numSms": number, "totalGlobalMem": number}]
    for row in trace["traceEvents"]:
        if row.get("cat") == "kernel":
            row["args"].update(device=number, stream=number)
    steps = [row for row in trace["traceEvents"] if row["name"].startswith("ProfilerStep#")]
    trace["traceEvents"] += [dict(row) for row in steps]  # every step twice
    steps[0]["name"] = "ProfilerStep#" + "9" * 20
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    report = open_run(tmp_path / "trace.json").report()
    assert report.steps
    assert read_report(report_bytes(report)).schema == report.schema


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 10**400], ids=("largest", "smallest", "beyond"))
def test_what_events_count_beyond_a_column_is_missing(tmp_path: Path, number: int) -> None:
    window = {"kind": "window", "trace": "t", "status": "kept", "first_step": number, "steps": number, "bytes": number}
    loader = {"kind": "loader", "num_workers": number, "batch_size": number, "id": number, "epoch": number}
    events = [window, loader, {"kind": "gc", "generation": number}, {"kind": "save", "bytes": number}]
    report = open_run(make_run_folder(tmp_path, events=events)).report()
    assert report.views["windows"][0]["steps"] == 0
    assert read_report(report_bytes(report)).schema == report.schema
