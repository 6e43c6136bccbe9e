"""Traces of all ages: times to the nanosecond, damage, bombs, secrets, and real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.read import kineto
from stepscope.read.kineto import RawTrace, read_trace

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
BASE = 1_790_857_026_000_000_000


def slice_(name: str = "aten::add", ts: Any = 1.5, dur: Any = 2, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def read(tmp_path: Path, content: Any, name: str = "trace-0.json") -> RawTrace:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_trace(path)


def test_columns(tmp_path: Path):
    args = {"External id": 4, "Sequence number": 9, "Input Dims": [[4, 8], []], "Input type": ["float", ""], "x": 1}
    device = {"device": 0, "stream": 7, "correlation": 12, "bytes": 4096, "External id": 4}
    events = [
        slice_(args=args),
        slice_("Memcpy HtoD", 5, 1, cat="gpu_memcpy", tid=7, pid=0, args=device),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1 (python)"}},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    ]
    trace = read(tmp_path, {"baseTimeNanoseconds": BASE, "traceEvents": events})
    columns = trace.events
    assert columns.name == ["aten::add", "Memcpy HtoD"]
    assert columns.category == ["cpu_op", "gpu_memcpy"]
    assert columns.track == ["1/1", "0/7"]
    assert columns.start_ns.tolist() == [BASE + 1500, BASE + 5000]
    assert columns.duration_ns.tolist() == [2000, 1000]
    assert (columns.external_id, columns.sequence) == ([4, 4], [9, None])
    assert (columns.device, columns.stream, columns.correlation) == ([None, 0], [None, 7], [None, 12])
    assert columns.bytes == [None, 4096]
    assert [json.loads(text) if text else None for text in columns.shapes] == [[[4, 8], []], None]
    assert [json.loads(text) if text else None for text in columns.types] == [["float", ""], None]
    assert trace.threads == {"1/1": "thread 1 (python)"}
    assert trace.quality == kineto.TraceQuality(2, 0, None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.integers(0, 92 * 86_400 * 10**9), st.integers(0, 10**12))
def test_relative_times_are_exact(tmp_path: Path, start_ns: int, duration_ns: int):
    def microseconds(ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03d}"

    event = f'{{"ph": "X", "name": "a", "ts": {microseconds(start_ns)}, "dur": {microseconds(duration_ns)}}}'
    text = f'{{"baseTimeNanoseconds": {BASE}, "traceEvents": [{event}]}}'
    trace = read(tmp_path, text.encode())
    assert trace.events.start_ns.tolist() == [BASE + start_ns]
    assert trace.events.duration_ns.tolist() == [duration_ns]


def test_absolute_decimals_are_exact(tmp_path: Path):
    first = b'{"ph": "X", "name": "a", "ts": 1712195495519689.047, "dur": 63.813}'
    text = b'{"traceEvents": [' + first + b"," + first.replace(b".047", b".048").replace(b"63.813", b"1") + b"]}"
    events = read(tmp_path, text).events
    assert events.start_ns.tolist() == [1712195495519689047, 1712195495519689048]
    assert events.duration_ns.tolist() == [63813, 1000]


def test_whole_microseconds_and_text(tmp_path: Path):
    events = read(tmp_path, [slice_(ts=1623143622460111, dur=0), slice_(ts="1623143622460111.25", dur="2.5")]).events
    assert events.start_ns.tolist() == [1623143622460111000, 1623143622460111250]
    assert events.duration_ns.tolist() == [0, 2500]


def test_odd_events_cost_only_themselves(tmp_path: Path):
    bad = [
        slice_(ts=None),
        slice_(ts="soon"),
        slice_(dur=-1),
        slice_(dur=1e300),
        slice_(ts=10**30),
        slice_(name=7),
        slice_(ts=True),
    ]
    odd = [
        slice_("ok", pid="Spans", tid={"a": 1}, cat=None, args={"stream": "x", "device": 2**40, "correlation": "12"})
    ]
    trace = read(tmp_path, {"traceEvents": [*bad, *odd]})
    assert trace.events.name == ["ok"]
    assert trace.events.correlation == [12]
    assert (trace.events.stream, trace.events.device) == ([None], [None])
    assert trace.quality == kineto.TraceQuality(8, 7, None)


def test_gzip_by_content_not_by_name(tmp_path: Path):
    content = gzip.compress(json.dumps({"traceEvents": [slice_()]}).encode())
    assert len(read(tmp_path, content, "trace-0.json").events) == 1
    two = gzip.compress(b'{"traceEvents": [') + gzip.compress(json.dumps(slice_()).encode() + b"]}")
    assert read(tmp_path, two, "trace-1.json.gz").name == "trace-1.json"


@pytest.mark.parametrize("packed", [False, True])
def test_cut_off_file_is_salvaged(tmp_path: Path, packed: bool):
    rng_names = [f"op{i}-{hash(i * 7919) % 10**9}" for i in range(2000)]
    whole = json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": [slice_(name) for name in rng_names]}, indent=1)
    data = gzip.compress(whole.encode()) if packed else whole.encode()
    trace = read(tmp_path, data[: len(data) // 2], "cut.json")
    assert 500 < len(trace.events) < 1500
    assert trace.events.name == rng_names[: len(trace.events)]
    assert trace.events.start_ns[0] == BASE + 1500
    assert trace.quality.problem
    assert trace.quality.lost <= 1


@pytest.mark.parametrize(
    "middle",
    [
        b'{"ph": "X", "name": "C:\\path\\x", "ts": 2, "dur": 1}',
        b'{"ph": "X", "name": "bytes \xff\xfe", "ts": 2, "dur": 1}',
        b'{"ph": "X", "name": "bandwidth", "ts": 2, "dur": 1, "args": {"x": inf, "y": [NaN, N/A]}}',
        b'{"ph": "X", "name": "line\nbreak", "ts": 2, "dur": 1}',
        b'{"ph": "X", "name": "list, {\\"a\\"}", "ts": 2, "dur": 1, "args": []}',
        b'{"ph": "X", "name": "half \\ud800", "ts": 2, "dur": 1}',
    ],
)
def test_invalid_json_is_repaired_where_it_can_be(tmp_path: Path, middle: bytes):
    good = json.dumps(slice_()).encode()
    data = b'{"baseTimeNanoseconds": 7, "traceEvents": [' + good + b",\n" + middle + b",\n" + good
    trace = read(tmp_path, data + b'], "traceName": "x"}')
    names = trace.events.name
    assert names[0] == names[-1] == "aten::add"
    assert len(names) == 3 or (trace.quality.lost == 1 and b"args" in middle)
    assert trace.events.start_ns[0] == 1507
    "".join(names).encode()


def test_unescaped_quote_costs_one_event(tmp_path: Path):
    events = [json.dumps(slice_(f"op{i}")) for i in range(10)]
    events[4] = events[4].replace("op4", 'op"4')
    trace = read(tmp_path, ('{"traceEvents": [' + ",\n".join(events) + "]}").encode())
    assert len(trace.events) == 9
    assert trace.quality.lost == 1


def test_only_allowed_metadata_comes_out(tmp_path: Path):
    dump = {"environ": {"HF_TOKEN": "example-not-a-secret"}, "schemaVersion": 9}
    whole = {"schemaVersion": 1, "metadata": dump, "trace_id": "x", "with_stack": 1, "traceEvents": [slice_()]}
    trace = read(tmp_path, whole)
    assert trace.metadata == {"schemaVersion": 1, "with_stack": 1}
    damaged = read(tmp_path, json.dumps(whole).encode()[:-2])
    assert "example-not-a-secret" not in repr(damaged)


def test_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kineto, "MAX_TRACE_BYTES", 100_000)
    head = b'{"traceEvents": [' + json.dumps(slice_()).encode() + b","
    trace = read(tmp_path, gzip.compress(head + b" " * 50_000_000))
    assert len(trace.events) == 1
    assert "more than" in (trace.quality.problem or "")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\x1f\x8b", b"\x1f\x8b\x08garbage", b"[" * 100_000, b"<svg>"])
def test_nothing_usable(tmp_path: Path, content: bytes):
    with pytest.raises(UnreadableInputError, match="no trace event"):
        read(tmp_path, content)


def test_absent_file(tmp_path: Path):
    with pytest.raises(UnreadableInputError, match="No such file"):
        read_trace(tmp_path / "none.json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.data())
def test_damage_never_raises_anything_else(tmp_path: Path, data: st.DataObject):
    whole = json.dumps({"baseTimeNanoseconds": 5, "traceEvents": [slice_(args={"Input Dims": [[1]]})] * 4}).encode()
    at = data.draw(st.integers(0, len(whole)))
    width = data.draw(st.integers(0, 20))
    content = whole[:at] + data.draw(st.binary(max_size=12)) + whole[at + width :]
    try:
        trace = read(tmp_path, content)
    except UnreadableInputError:
        return
    assert len(trace.events.start_ns) == len(trace.events.name) == len(trace.events.shapes)


@needs_shared
@pytest.mark.parametrize(
    "name",
    [
        "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
        "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
        "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
        "hta/triton_example/triton_example.json.gz",
        "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
        "hta/call_stack/backward_thread.json",
        "tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz",
        "tracelens/torch_compile_triton/trace.json.gz",
        "tracelens/inference/vllm_decode_full/graph_execution.json.gz",
    ],
)
def test_real_traces(name: str):
    path = SHARED / name
    trace = read_trace(path)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "rt") as file:
        whole = json.load(file)
    events = whole["traceEvents"] if isinstance(whole, dict) else whole
    expected = [event for event in events if event["ph"] == "X"]
    assert trace.events.name == [event["name"][: kineto.MAX_NAME_CHARS] for event in expected]
    assert trace.quality == kineto.TraceQuality(len(expected), 0, None)
    assert "example-not-a-secret" not in repr(trace)


@needs_shared
def test_nanoseconds_of_a_real_absolute_trace():
    trace = read_trace(SHARED / "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz")
    assert trace.events.start_ns[0] == 1712195495519689047


@pytest.mark.torch
def test_trace_of_the_installed_torch(tmp_path: Path):
    import torch

    with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
        torch.nn.functional.linear(torch.ones(4, 8), torch.ones(2, 8)).sum()
    path = tmp_path / "t.json"
    profiler.export_chrome_trace(str(path))
    events = read_trace(path).events
    at = events.name.index("aten::linear")
    assert json.loads(events.shapes[at] or "null")[0] == [4, 8]
    assert "python_function" in events.category
    assert events.duration_ns[at] > 0
