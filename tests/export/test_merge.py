"""`stepscope export` merges: ranks on one clock, apart in numbers; real traces stay whole, and analyze reads all."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.api import ReadOptions, open_run
from stepscope.errors import StepscopeError
from stepscope.export import Cut
from stepscope.export import export as written
from stepscope.read.kineto import KinetoTrace
from tests import gpu_traces
from tests.dashboard import served_runs
from tests.export.traces import (
    BASE_NS,
    SHARED,
    check_format,
    export,
    load,
    load_loosely,
    needs_shared,
    of,
    save,
    slice_,
    timed,
    trace,
)
from tests.fuzz import cases as damage


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    """Two ranks that name different bases; rank 1 begins 0.5 ms and 3 ns after rank 0."""
    first = trace(rank=0)
    second = trace(rank=1, base_ns=BASE_NS - 1_000_000_000 + 3, shift_us=1_000_000 + 1500.0)
    return [save(tmp_path / "a.json", first), save(tmp_path / "b.json.gz", second)]


def processes(content: Any) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in of(content, "M") if e["name"] == "process_name"}


def test_ids_never_meet_across_ranks(ranks: list[Path], out: Path) -> None:
    export(*ranks, "-o", out)

    rank_of = {1000: 0, 1001: 0, 2000: 1, 2001: 1}
    for key in ("correlation", "External id", "Sequence number"):
        owners: dict[int, set[int]] = {}
        for event in of(load(out), "X"):
            if key in event.get("args", {}):
                owners.setdefault(event["args"][key], set()).add(rank_of[event["pid"]])
        assert len(owners) == 8, key
        assert all(len(ranks) == 1 for ranks in owners.values()), key
    ends: dict[int, list[tuple[str, int]]] = {}
    for event in load(out)["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append((event["ph"], rank_of[event["pid"]]))
    assert len(ends) == 8
    assert all(sorted(found) in ([("f", 0), ("s", 0)], [("f", 1), ("s", 1)]) for found in ends.values())


def test_a_rank_without_the_steps_is_said(ranks: list[Path], tmp_path: Path, out: Path) -> None:
    late = save(tmp_path / "c.json", trace(rank=2, steps=range(50, 52)))
    done = export(*ranks, late, "--steps", "6", "-o", out)

    assert "c.json: has none of these steps" in done
    assert set(processes(load(out))) == {1000, 1001, 2000, 2001}


def test_an_unreadable_rank_is_said_and_the_others_exported(ranks: list[Path], tmp_path: Path, out: Path) -> None:
    broken = save(tmp_path / "rank7.json", b'{"traceEvents": [')
    done = export(*ranks, broken, "-o", out)

    assert "rank7.json" in done
    assert len(processes(load(out))) == 4


def export_events(events: list[Any], tmp_path: Path) -> Any:
    source = tmp_path / "odd.json"
    source.write_text(json.dumps({"traceEvents": events}))
    export(source, "-o", tmp_path / "out.json")
    check_format(tmp_path / "out.json")
    return load(tmp_path / "out.json")


def test_names_that_break_viewers(tmp_path: Path) -> None:
    harmless = ['quote " and \\', "größe 日本", "<b>&"]
    odd = ["a\x1b[2Jb", "nul\x00", "line\nbreak", "\u202egnp.exe", "lone \ud800", *harmless]
    content = export_events([slice_(name, index, 1) for index, name in enumerate(odd)], tmp_path)

    shown = ["a\\x1b[2Jb", "nul\\x00", "line\\x0abreak", "\\u202egnp.exe", "lone \\ud800"]
    assert [e["name"] for e in of(content, "X")] == [*shown, *harmless]


def test_long_names_are_bounded_and_real_ones_kept(tmp_path: Path) -> None:
    content = export_events([slice_("k" * 10**6, 1, 1), slice_("t" * 10_000, 2, 1)], tmp_path)

    first, second = of(content, "X")
    assert len(first["name"]) == 16_384
    assert first["name"].endswith("k…")
    assert second["name"] == "t" * 10_000


def test_arguments_are_made_safe_too_and_numbers_in_them_stay(tmp_path: Path) -> None:
    args = {"key\x07": ["\x00", {"deep": "\u202e"}], "float": 1.10, "big": 2**62, "huge": 2**80, "none": None}
    content = export_events(
        [slice_("a", 1, 1, args=args), slice_("b", 2, 1, args={"exact": 0.1, "big": 2**63})], tmp_path
    )

    first, second = of(content, "X")
    assert first["args"]["key\\x07"] == ["\\x00", {"deep": "\\u202e"}]
    assert (first["args"]["float"], first["args"]["big"], first["args"]["none"]) == ("1.1", 2**62, None)
    assert second["args"] == {"exact": "0.1", "big": 2**63}


def test_tracks_of_any_type_become_numbers_with_names(tmp_path: Path) -> None:
    tracks: list[tuple[Any, Any]] = [(1, "stream 7"), (1, -1), (1, 2**40), ("Spans", "PyTorch Profiler")]
    tracks += [("", ""), (None, None), (-1, 0), (1, 1)]
    content = export_events([slice_(f"s{i}", i, 1, pid=p, tid=t) for i, (p, t) in enumerate(tracks)], tmp_path)

    places = [(e["pid"], e["tid"]) for e in of(content, "X")]
    assert len(set(places)) == len(tracks)
    assert places[-1] == (1, 1)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(content, "M") if e["name"] == "thread_name"}
    assert [threads.get(place) for place in places[:4]] == ["stream 7", "-1", str(2**40), "PyTorch Profiler"]
    named = processes(content)
    assert named[places[3][0]] == "Spans"
    assert places[0][0] == places[1][0] == 1


@pytest.mark.parametrize(
    ("written", "expected_ns"),
    [
        ("1712195495519695.8", 1712195495519695800),
        ("1712195495519695.123", 1712195495519695123),
        ('"1712195495519695.12"', 1712195495519695120),
        ("1712195495519695", 1712195495519695000),
        ("4458676456914.077", 4458676456914077),
        ("1.5e3", 1500000),
        ("0.0015", 2),
    ],
)
def test_times_of_any_writer_are_exact(tmp_path: Path, written: str, expected_ns: int) -> None:
    text = '{"traceEvents": [{"ph": "X", "name": "zero", "pid": 1, "tid": 1, "ts": 0, "dur": 1},'
    text += f'{{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": {written}, "dur": 0.001}}]}}'
    source = save(tmp_path / "t.json", text.encode())
    export(source, "-o", tmp_path / "out.json")

    check_format(tmp_path / "out.json")
    assert ("X", "a", expected_ns, 1) in timed(load(tmp_path / "out.json"))


def test_what_has_no_time_or_name_is_left_out_and_counted(tmp_path: Path) -> None:
    good = slice_("good", 10, 1)
    bad = [slice_("late", "never", 1), slice_("negative", 1, -5), slice_("none", 5, None)]
    bad.append({**slice_("x", 1, 1), "name": 7})
    other = [{"ph": "N", "name": "object", "pid": 1, "tid": 1, "ts": 1}, {"ph": ["X"], "name": "a"}]
    source = save(tmp_path / "t.json", {"traceEvents": [good, *bad, *other]})
    done = export(source, "-o", tmp_path / "out.json")

    assert [e["name"] for e in of(load(tmp_path / "out.json"), "X")] == ["good"]
    assert "1 slices; 4 could not be read" in done


def test_a_stray_instant_does_not_become_the_start(tmp_path: Path) -> None:
    stray = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 0}
    near = {**stray, "ts": 1_700_000_000_000_000 - 50}
    content = export_events([stray, near, slice_("a", 1_700_000_000_000_000, 1)], tmp_path)

    assert [e["ts"] for e in of(content, "X")] == ["0.000"]
    assert of(content, "i") == []


SECRET = b"example-not-a-secret"
TRACES = [
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "tracelens/inference/sglang_decode/sglang_Qwen3-8B_decode.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
]
MORE_TRACES = [
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
]


@needs_shared
@pytest.mark.parametrize("name", [*TRACES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_TRACES)])
def test_a_whole_trace_comes_out_complete_and_smaller(name: str, tmp_path: Path) -> None:
    source = SHARED / name
    out = tmp_path / f"out{''.join(source.suffixes[-2:]) if name.endswith('.gz') else '.json'}"
    done = export(source, "-o", out)

    assert "could not be read" not in done
    check_format(out)
    assert Counter(timed(load(out))) == Counter(timed(load_loosely(source)))
    counts = [sum(len(chunk.slices) for chunk in KinetoTrace(path).chunks()) for path in (out, source)]
    assert counts[0] == counts[1]  # as our own reader counts them
    assert out.stat().st_size <= source.stat().st_size


@needs_shared
def test_no_environment_comes_out(tmp_path: Path) -> None:
    source = next((SHARED / "tracelens" / "h100").glob("Qwen*"))
    assert SECRET in gzip.decompress(source.read_bytes())

    for options in ([], ["--steps", "6"], ["--categories", "kernel"]):
        out = tmp_path / "out.json"
        export(source, *options, "--force", "-o", out)
        assert SECRET not in out.read_bytes()
    export(source, SHARED / "tracelens" / "mi300", "--force", "-o", out)
    assert SECRET not in out.read_bytes()


OPTIONS = ReadOptions(cache=False, keep=False, workers=1)
QUARTER_NS = 250_000  # of a millisecond
CATEGORIES = ("kernel", "cpu_op", "user_annotation", "python_function", "nothing")

cuts = st.one_of(
    st.just(Cut()),
    st.tuples(st.integers(0, 9), st.integers(0, 5)).map(lambda at: Cut(steps=(at[0], sum(at)))),
    st.tuples(st.integers(0, 20), st.integers(1, 30)).map(
        lambda at: Cut(range_ns=(at[0] * QUARTER_NS, sum(at) * QUARTER_NS))
    ),
    st.sampled_from(CATEGORIES).map(lambda name: Cut(categories=(name,))),
)


def write(kind: str, path: Path) -> None:
    if kind == "gpu":
        gpu_traces.write(path, steps=3)
    elif kind == "cpu":
        served_runs.cpu_trace(path)
    else:
        save(path, trace(rank=int(kind)))


@given(
    kinds=st.lists(st.sampled_from(["gpu", "cpu", "0", "0", "1"]), min_size=1, max_size=3),
    seed=st.one_of(st.none(), st.integers(min_value=0, max_value=10**6)),
    cut=cuts,
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_analyze_reads_every_export(kinds: list[str], seed: int | None, cut: Cut) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "out.json"
        paths = [folder / f"{number}.json" for number in range(len(kinds))]
        for kind, path in zip(kinds, paths, strict=True):
            write(kind, path)
            if seed is not None:
                rng = random.Random(seed)
                path.write_bytes(damage.dumped(damage.of_value(json.loads(path.read_bytes()), rng), rng))
        try:
            done = written(paths, out, cut)
        except StepscopeError:
            assert seed is not None or not cut.whole  # nothing is left of a cut, or of what was damaged
            return
        try:
            report = open_run(out, options=OPTIONS).report()
        except StepscopeError:
            assert done.slices == 0
            return
        if seed is None and cut.whole and len(paths) == 1:
            before = open_run(paths[0], options=OPTIONS).report()
            assert report.steps is not None
            assert before.steps is not None
            for key in ("count", "mean_ms", "partition"):
                assert report.steps[key] == before.steps[key]
