"""Traces of every age and vendor: what the columns hold, one test or more for each way in which writers differ.

Where the bytes are cut never matters, and braces in texts or arguments fool nobody. Damage is in test_damage.py.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.api import open_run
from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths
from stepscope.read.kineto import RawEvents
from stepscope.read.raw import RawRun
from stepscope.read.streams import Limits
from stepscope.read.trace import TraceQuality
from tests.read.collected import BASE, SHARED, Collected, event, kernel, read, written

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")


def test_columns_of_operators_kernels_and_python(tmp_path: Path):
    operator = {
        "External id": 4, "Sequence number": 9, "Fwd thread id": 1, "Input Dims": [[4, 8], []],
        "Input type": ["float", ""], "Ev Idx": 3,
    }  # fmt: skip
    figures = {
        "External id": 4, "device": 0, "stream": 7, "correlation": 12, "registers per thread": 32, "shared memory": 64,
        "blocks per SM": 4.25, "warps per SM": 17, "grid": [564, 2, 1], "block": [128, 1, 1],
        "est. achieved occupancy %": 31,
    }  # fmt: skip
    python = {"Python id": 3, "Python parent id": 2, "Python module id": 1}
    events = [
        event(args=operator),
        kernel(**figures),
        event("Memcpy HtoD", cat="gpu_memcpy", args={"bytes": 4096, "correlation": 13, "memory bandwidth (GB/s)": 1.5}),
        event("cudaLaunchKernel", cat="cuda_runtime", args={"correlation": 12, "cbid": 211}),
        event("train.py(3): main", cat="python_function", args=python),
        event("bare"),
    ]
    trace = read(tmp_path, {"baseTimeNanoseconds": BASE, "traceEvents": events})
    slices = trace.slices
    assert slices["category"] == ["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "python_function", "cpu_op"]
    assert slices["track"] == ["1/1", "0/7", *["1/1"] * 4]
    assert trace.starts == [BASE + 1500, BASE + 5000, *[BASE + 1500] * 4]
    assert slices["duration_ns"] == [2000, 3000, *[2000] * 4]
    assert slices["external_id"] == [4, 4, None, None, None, None]
    assert slices["correlation"] == [None, 12, 13, 12, None, None]
    assert (slices["sequence"][0], slices["forward_thread"][0]) == (9, 1)
    assert (slices["shapes"][0], slices["types"][0]) == ("[[4,8],[]]", '["float",""]')
    assert [slices[name][1] for name in ("device", "stream", "blocks", "threads")] == [0, 7, 1128, 128]
    assert [slices[name][1] for name in ("registers", "shared_memory", "blocks_per_sm")] == [32, 64, 4.25]
    assert [slices[name][1] for name in ("warps_per_sm", "occupancy")] == [17, 31]
    assert slices["bytes"] == [None, None, 4096, None, None, None]
    assert slices["python_module"][4] == 1
    assert all(values[5] is None for name, values in slices.items() if name in ("shapes", "stream", "occupancy"))
    assert trace.quality == TraceQuality(events=6)


EXTERNAL = [*({"External id": number} for number in (4, "6", 7.0, None)), {"external id": 5}, {}]
GRAPH = event("cudaGraphLaunch", cat="cuda_runtime", args={"correlation": 9, "External id": 2})
WEEK = 8 * 86_400 * 10**6
STACK = "train.py(3): main;train.py(9): <module>"
IDS = {  # (pid, tid) -> track
    ("Spans", "PyTorch Profiler"): "Spans/PyTorch Profiler",
    (0, "stream 7"): "0/stream 7",
    ("GPU 0 Counters", ""): "GPU 0 Counters/",
    (-1, -1): "-1/-1",
    ("1", "1"): "1/1",
    (2**64, 5): f"{2**64}/5",
    (None, 1.5): "?/?",
    (3.0, 4.0): "3/4",
    (True, 1): "?/1",
}


@pytest.mark.parametrize(
    ("events", "column", "values"),
    [
        ([event(pid=pid, tid=tid) for pid, tid in IDS], "track", list(IDS.values())),  # pitfall 5
        ([event(pid=[1], tid={"a": 1})], "track", ["?/?"]),
        *(
            ([event(cat=category, args=each) for each in EXTERNAL], "external_id", [4, 6, 7, None, 5, None])
            for category in ("cpu_op", "cuda_runtime", "kernel", "xpu_runtime")  # pitfall 9
        ),
        ([GRAPH, kernel("a", correlation=9, **{"graph node id": 4}), kernel(correlation=9)], "correlation", [9, 9, 9]),
        # pitfalls 12 and 13: overlaps and impossible durations are kept for the tables
        ([event("a", 0, 10), event("b", 5, 10), kernel("late", 1, WEEK)], "duration_ns", [10_000, 10_000, WEEK * 1000]),
        # pitfall 16
        (
            [event("Linear_0", cat="python_function", args={"Python module id": module}) for module in (None, 0)],
            "python_module",
            [None, 0],
        ),
        ([event()], "device", [None]),
        ([kernel(device=0, stream=2**63 - 5)], "stream", [2**63 - 5]),
        ([event(cat="Operator", args={"Call stack": STACK}), event()], "call_stack", [STACK, None]),
    ],
)
def test_what_writers_differ_in(tmp_path: Path, events: list[Any], column: str, values: list[Any]):
    for version in ({"schemaVersion": 1}, {"schemaVersion": 99}, {"schemaVersion": "x"}, {}):  # pitfall 1
        trace = read(tmp_path, {**version, "traceEvents": events})
        assert trace.slices[column] == values
        assert trace.quality == TraceQuality(events=len(events))


class TestRoots:  # pitfall 6 and 21
    def test_array_object_and_byte_order_mark(self, tmp_path: Path):
        events = [event(pid="CPU functions"), event("b")]
        for content in (events, {"traceEvents": events}, b"\xef\xbb\xbf" + json.dumps(events).encode()):
            trace = read(tmp_path, content)
            assert trace.names == ["aten::add", "b"]
            assert trace.quality == TraceQuality(events=2)

    def test_metadata_on_either_side(self, tmp_path: Path):
        info = {"backend": "nccl", "rank": 3, "world_size": 8}
        before = {"distributedInfo": info, "traceEvents": [event()], "with_stack": 1, "traceName": "/home/me/x.json"}
        after = {"with_stack": 1, "traceEvents": [event()], "INFO": ["a {"], "distributedInfo": info, "trace_id": "q"}
        for content in (before, after):
            summary = read(tmp_path, content).summary
            assert summary.world_size == 8
            assert summary.metadata == {"with_stack": 1, "distributedInfo": info}

    def test_environment_dumps_stay_out(self, tmp_path: Path):
        dump = {"environ": {"HF_TOKEN": "example-not-a-secret"}, "schemaVersion": 9, "traceEvents": []}
        whole = {"schemaVersion": 1, "PT_PROFILER_JOB": "example-not-a-secret", "traceEvents": [event()], "env": dump}
        for content in (whole, json.dumps(whole).encode()[:-2], json.dumps(whole).encode()[:-60]):
            trace = read(tmp_path, content)
            assert trace.summary.metadata == {"schemaVersion": 1}
            assert "example-not-a-secret" not in repr(trace.summary)


def test_memory_instants(tmp_path: Path):  # pitfall 17
    full = {"Addr": 2**47, "Bytes": -512, "Device Type": 1, "Device Id": 0, "Total Allocated": 7, "Total Reserved": 9}
    old = {"Bytes": 512, "Device Type": 20, "Device Id": -1}
    instant = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1}
    instants = [{**instant, "ts": ts, "args": args} for ts, args in ((1, full), (2.5, old))]
    trace = read(tmp_path, [event(), *instants, {**instants[0], "name": "Iteration Start"}, {"ph": "C", "name": "c"}])
    assert trace.memory == {
        "track": ["1/1", "1/1"], "time_ns": [1000, 2500], "address": [2**47, None], "bytes": [-512, 512],
        "device_type": [1, 20], "device": [0, -1], "allocated_bytes": [7, None], "reserved_bytes": [9, None],
    }  # fmt: skip
    assert trace.quality == TraceQuality(events=5, unsupported=2)


class TestDistributed:  # pitfall 18
    ARGS = {  # noqa: RUF012
        "Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float", "Group size": 2,
        "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
        "In split size": "[1, 2, ...]", "Seq": 7, "Comms Id": 2**60, "Src Rank": 1, "Dst Rank": 0,
    }  # fmt: skip

    def test_collectives_on_operators_and_kernels(self, tmp_path: Path):
        other = {"correlation": 3, "token": "example-not-a-secret"}
        events = [event("record_param_comms", args={**self.ARGS, **other}), kernel("ncclKernel", **self.ARGS, **other)]
        trace = read(tmp_path, [*events, event()])
        assert [json.loads(text) if text else None for text in trace.slices["collective"]] == [
            self.ARGS,
            self.ARGS,
            None,
        ]
        assert "example-not-a-secret" not in trace.slices["collective"][0]

    def test_a_list_of_ranks_and_absurd_sizes(self, tmp_path: Path):
        args = {**self.ARGS, "Process Group Ranks": [0, 1], "In split size": list(range(100_000))}
        text = read(tmp_path, [kernel("nccl", **args)]).slices["collective"][0]
        assert json.loads(text)["Process Group Ranks"] == [0, 1]
        assert len(text) < 20_000

    def test_a_rank_as_text_and_groups_as_text_or_list(self, tmp_path: Path):
        for groups in ("[{...}]", [{"pg_name": "0", "ranks": [0, 1]}], [{"pg_name": "0", "ranks": "0,1"}]):
            info = {"rank": "2", "world_size": "4", "pg_config": groups, "hosts": "example-not-a-secret"}
            summary = read(tmp_path, {"distributedInfo": info, "traceEvents": [event()]}).summary
            assert summary.world_size == 4
            assert summary.metadata["distributedInfo"] == {"rank": "2", "world_size": "4", "pg_config": groups}
        for odd in (None, {}, [], {"rank": "x"}, {"rank": -1}, {"rank": 2**40}, 7):
            assert read(tmp_path, {"distributedInfo": odd, "traceEvents": [event()]}).summary.world_size is None


def test_device_properties(tmp_path: Path):  # pitfall 20
    nvidia = {"id": 0, "name": "NVIDIA B200", "numSms": 148, "computeMajor": 10, "maxThreadsPerMultiprocessor": 2048}
    amd = {"id": 0, "name": "AMD", "multiProcessorCount": 104, "maxThreadsPerMultiProcessor": 2048, "extra": {"a": 1}}
    for given_, kept in (
        ([nvidia, amd], [nvidia, {k: v for k, v in amd.items() if k != "extra"}]),
        ([], []),
        ({}, [{}]),
    ):
        content = {"deviceProperties": given_, "traceEvents": [event()]}
        assert read(tmp_path, content).summary.metadata["deviceProperties"] == kept
    many = {"deviceProperties": [nvidia] * 1000, "traceEvents": [event()]}
    assert len(read(tmp_path, many).summary.metadata["deviceProperties"]) <= 64
    long = {"deviceProperties": [{"name": "x" * 10_000}], "schemaVersion": "v" * 10_000, "traceEvents": [event()]}
    assert len(repr(read(tmp_path, long).summary.metadata)) < 1000


def test_names_of_threads_and_long_texts(tmp_path: Path):
    entries = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1 (python)"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": ["CPU"]}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": 7}},
    ]
    long = event("x" * 100_000, args={"Input Dims": [[1]] * 100_000, "Call stack": "x" * 100_000})
    for content in ([*entries, long], [long, *entries]):
        trace = read(tmp_path, content)
        assert trace.summary.threads == {"1/1": "thread 1 (python)"}
        assert trace.quality == TraceQuality(events=4)
        assert (len(trace.names[0]), trace.slices["shapes"]) == (4096, [None])
        assert len(trace.slices["call_stack"][0]) < 100_000


def test_slices_of_two_entries_are_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def half(kind: str, name: str | None, ts: float) -> dict[str, Any]:
        return {**event(name, ts), "ph": kind}

    entries = [half("B", "a", 1), half("B", "b", 2), half("E", None, 3.5), half("E", "a", 9), half("E", "c", 10)]
    trace = read(tmp_path, [*entries, half("B", "open", 11)])
    assert (trace.names, trace.slices["duration_ns"]) == (["b", "a"], [1500, 8000])
    assert trace.quality == TraceQuality(events=6, lost=2)
    monkeypatch.setattr("stepscope.read.trace._MOST_BEGUN", 1)  # that wait for their ends
    assert read(tmp_path, entries).quality == TraceQuality(events=5, lost=3)


def test_odd_events_cost_only_themselves(tmp_path: Path):
    bad = [event(ts=value) for value in (None, "soon", 10**30, True, [], 1e300)]
    bad += [event(dur=-1), event(dur=1e300), event(name=7), event(name=None)]
    odd = event("ok", pid="Spans", tid={"a": 1}, cat=7, args=[1])
    odd_args = kernel("k", grid="x", block=[1, 2], stream=[1], bytes={}, device=1.5, **{"blocks per SM": "many"})
    trace = read(tmp_path, [*bad, odd, event(), odd_args])
    assert trace.names == ["ok", "aten::add", "k"]
    assert trace.slices["category"] == [None, "cpu_op", "kernel"]
    assert all(trace.slices[name][2] is None for name in ("blocks", "threads", "stream", "bytes", "blocks_per_sm"))
    assert (trace.quality.events, trace.quality.lost) == (13, 10)


def test_gzip_by_content_not_by_name(tmp_path: Path):
    assert len(read(tmp_path, gzip.compress(json.dumps([event()]).encode()), "plain.json").names) == 1
    two = gzip.compress(b'{"traceEvents": [') + gzip.compress(json.dumps(event()).encode() + b"]}")
    assert len(read(tmp_path, two, "two.json.gz").names) == 1


VENDORS = {  # pitfall 19
    "mi250_minitoy_train_ROCm6_2_kineto.json.gz": "kernel",
    "mtia_inference_rank_0.json.gz": "mtia_ccp_events",
    "triton_example.json.gz": "kernel",
}
REAL = sorted(path for part in ("hta", "kineto_tb_plugin", "tracelens") for path in (SHARED / part).rglob("*.json*"))


@needs_shared
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name[:40])
def test_real_traces_lose_nothing(path: Path):
    trace = Collected(path)
    quality = trace.quality
    assert (quality.lost, quality.salvaged, quality.problems) == (0, 0, ())
    assert 0 < len(trace.names) + quality.unsupported <= quality.events
    assert VENDORS.get(path.name, "cpu_op") in trace.slices["category"] or path.name not in VENDORS
    if path.stat().st_size >= 500_000:
        return
    with gzip.open(path, "rt") if path.name.endswith(".gz") else path.open() as file:
        whole = json.load(file)
    expected = [entry for entry in whole["traceEvents"] if entry["ph"] == "X"]
    assert trace.names == [entry["name"][:4096] for entry in expected]
    correlations = [entry.get("args", {}).get("correlation") for entry in expected if entry["cat"] == "kernel"]
    kernels = [i for i, category in enumerate(trace.slices["category"]) if category == "kernel"]
    assert [trace.slices["correlation"][i] for i in kernels] == correlations
    assert quality.events == len(whole["traceEvents"])
    assert len(trace.flows["id"]) == sum(entry["ph"] in ("s", "t", "f") for entry in whole["traceEvents"])
    secrets = [value for key, value in whole.items() if key in ("metadata", "trace_id") and isinstance(value, str)]
    assert all(secret not in repr(trace.summary) for secret in [*secrets, "environ"])


# ---- times of every writer, to the nanosecond


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

    def test_base_as_text_and_a_base_beside_times_since_1970(self, tmp_path: Path):
        assert read(tmp_path, {"baseTimeNanoseconds": str(BASE), "traceEvents": [event()]}).starts == [BASE + 1500]
        trace = read(tmp_path, {"baseTimeNanoseconds": BASE, "traceEvents": [event(ts=1790857026000000)]})
        assert trace.starts == [1790857026000000000]
        assert "since 1970" in trace.quality.problems[0]


FLOW = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"}
TRICKY = [
    event("a},{b"),
    event('a"},{"ph": "X"}'),
    event("back\\slash\\"),
    event("]}"),
    event(args={"list": [{"ph": "X"}, {"ph": "X", "a": [{}, {"b": "},{"}]}], "Input Dims": [[1, 2], []]}),
    event(args={"deep": {"deeper": [{"a": 1}, {"b": [1, {"c": {}}]}]}}),
    kernel("k", correlation=3, grid=[1, 2, 3]),
    FLOW,
    {"name": "last first", "ph": "X", "ts": 3, "dur": 1},
    {"args": {"a": [{}, {}]}, "name": "args first", "ph": "X", "ts": 3, "dur": 1},
]
TAIL = {"ERROR": [{"ph": 1}, {}, {"message": "},{"}], "distributedInfo": {"rank": 4, "world_size": 5}, "traceName": "x"}


def whole(result: Collected) -> tuple[Any, ...]:
    return result.slices, result.flows, result.memory, result.summary


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("root", ["object", "array", "object with tail"])
def test_any_size_of_pieces_gives_the_same(tmp_path: Path, indent: int | None, root: str):
    events = TRICKY * 3
    if root != "array" and root != "object":
        events = [*events, {**TRICKY[0], "name": "end"}]
    content: Any = events if root == "array" else {"schemaVersion": 1, "traceEvents": events}
    if root.endswith("tail"):
        content |= {**TAIL, "ERROR": [{"x": 1}, {"message": "},{"}]}
    text = json.dumps(content, indent=indent).encode()
    expected = whole(read(tmp_path, text))
    assert len(expected[0]["name"]) == sum(each["ph"] == "X" for each in events)
    assert expected[3].quality.events == len(events)
    assert expected[3].quality.lost == expected[3].quality.salvaged == 0
    assert expected[3].quality.problems == ()
    assert expected[3].metadata.get("distributedInfo", {}).get("rank") == (4 if root.endswith("tail") else None)
    for name in ("trace.json", "trace.json.gz"):
        for size in (1, 7, 64, 200, 201, 202, 203, 1000, len(text) - 1):
            assert whole(read(tmp_path, text, name, Limits(piece_bytes=size))) == expected


@pytest.mark.parametrize(
    "text", ["[{0}, {0}]", " \n[ {0},\n{0} ]\n\n", '{{"traceEvents"\n:\n[\n{0}\n,{0},]\n, "with_stack": 1}}\n']
)
def test_surrounding_space_and_a_trailing_comma(tmp_path: Path, text: str):
    for size in (3, 2**20):
        trace = read(tmp_path, text.format(json.dumps(event())).encode(), limits=Limits(piece_bytes=size))
        assert (trace.names, trace.quality.lost) == (["aten::add"] * 2, 0)
        assert trace.quality.problems == () or ",]" in text


# ---- entries as bytes: all of them, untouched where sound, repaired where damaged

ENTRIES = [
    event('a},{"ph"'),
    {"ph": "C", "name": "counter", "args": {"x": 1.50}},
    kernel("k", list=[{"a": 1}, {}]),
    {"x": 1},
]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (rb'{"ph": "X", "name": "C:\x"}', r"C:\x"),
        (b'{"ph": "X", "name": "\xff"}', r"\xff"),
        (b'{"ph": "X", "name": "a", "args": {"x": NaN}}', "a"),
    ],
)
def test_damaged_entries_are_valid_afterwards(tmp_path: Path, bad: bytes, name: str):
    good = json.dumps(event()).encode()
    stream = RawEvents(written(tmp_path, b"[" + good + b"," + bad + b"," + good + b"]"))
    entries = [json.loads(entry) for entry in stream]
    assert [entry["name"] for entry in entries] == ["aten::add", name, "aten::add"]
    assert stream.lost == 0


EVENTS = [event()]


def trace(path: Path, rank: int | None = None, world_size: int | None = None, *, tail: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    info: dict[str, Any] = {"distributedInfo": {"rank": rank, "world_size": world_size}} if rank is not None else {}
    content = {"traceEvents": EVENTS * 3000, **info} if tail else {**info, "traceEvents": EVENTS}
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def ranks(run: RawRun) -> dict[str, list[str]]:
    return {rank.name: [ref.name for ref in rank.traces] for rank in run.ranks}


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
@pytest.mark.parametrize("tail", [False, True])
def test_rank_of_the_metadata_wins_over_the_name(tmp_path: Path, ending: str, tail: bool):
    paths = [trace(tmp_path / f"rank{n}{ending}", 5 - n, 6, tail=tail) for n in range(6)]
    run = read_paths(paths)
    assert ranks(run) == {f"rank-{n}": [f"rank{5 - n}.json"] for n in range(6)}
    assert not run.losses.counts


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["rank-10.json", "rank-9.json"], {9: "rank-9.json", 10: "rank-10.json"}),
        (["trace_rank_1.json", "trace_rank_0.json"], {0: "trace_rank_0.json", 1: "trace_rank_1.json"}),
        (["worker1.pt.trace.json", "worker0.pt.trace.json"], {0: "worker0.pt.trace.json", 1: "worker1.pt.trace.json"}),
        (["rank_1/t.json", "rank_0/t.json"], {0: "t.json", 1: "t.json"}),
        (["b.json", "a.json"], {0: "a.json", 1: "b.json"}),
        (["frank3.json"], {0: "frank3.json"}),
    ],
)
def test_rank_of_the_name(tmp_path: Path, names: list[str], expected: dict[int, str]):
    for name in names:
        trace(tmp_path / name)
    run = read_paths([tmp_path])
    assert {rank.rank: rank.traces[0].name for rank in run.ranks} == expected
    assert run.losses.counts["guessed_ranks"] == (2 if "b.json" in names else 0)


def test_spans_of_one_worker_are_one_rank(tmp_path: Path):
    spans = ("12.1623143089861", "12.1623143566756", "13.1623143089861")
    names = [f"host_{span}.pt.trace.json{'.gz' * (at == 1)}" for at, span in enumerate(spans)]
    for name in names:
        trace(tmp_path / "run" / name)
    run = read_paths([tmp_path])
    assert ranks(run) == {"rank-0": [names[0], names[1].removesuffix(".gz")], "rank-1": [names[2]]}


def test_foreign_files_in_a_folder(tmp_path: Path):
    trace(tmp_path / "t.json")
    (tmp_path / "config.json").write_text('{"lr": 1e-3, "layers": [1, 2]}')
    (tmp_path / "list.json").write_text("[1, 2, 3]")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.json").write_text(json.dumps(EVENTS))
    run = read_paths([tmp_path])
    assert ranks(run) == {"rank-0": ["t.json"]}
    assert run.losses.counts == {"foreign_files": 3}
    assert set(run.losses.files["foreign_files"]) == {"config.json", "list.json", "empty.json"}


@pytest.mark.parametrize("kind", ["absent", "empty folder", "folder without traces", "nothing"])
def test_no_trace(tmp_path: Path, kind: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.json").write_text("{}")
    paths = {"absent": ["none"], "empty folder": ["empty"], "folder without traces": ["other"], "nothing": []}[kind]
    with pytest.raises(UnreadableInputError):
        read_paths([tmp_path / path for path in paths])


def test_folders_that_lead_to_themselves(tmp_path: Path):
    trace(tmp_path / "a" / "t.json")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "again.json").symlink_to(tmp_path / "a" / "t.json")
    trace(tmp_path / "a" / "t.json.gz")  # the plain one is taken beside a packed one
    path = tmp_path / "a" / "t.json"
    run = read_paths([tmp_path, path, path])
    assert [(ref.path.resolve(), ref.owner) for rank in run.ranks for ref in rank.traces] == [(path, "user")]
    assert (run.hosts, run.ranks[0].steps, run.ranks[0].journal, run.ranks[0].info) == ((), (), (), None)


def test_a_trace_that_speaks_of_communicators_is_no_report_on_them(tmp_path: Path):
    events = [event("communicators", 0, 10, cat="cpu_op")]
    text = {"distributedInfo": {"nccl_version": "2.28.9"}, "traceEvents": events}
    (tmp_path / "trace.json").write_text(json.dumps(text))
    assert open_run(tmp_path / "trace.json").tables.events["name"].to_list() == ["communicators"]
