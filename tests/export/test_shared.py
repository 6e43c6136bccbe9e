"""Real traces of all ages and vendors through the real command line: nothing lost, nothing larger, nothing secret."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from stepscope import cli
from stepscope.read.kineto import KinetoTrace
from tests.export.traces import SHARED, check_format, export, load, load_loosely, needs_shared, ns, of, timed

SECRET = b"example-not-a-secret"
TRACES = [
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/call_stack/backward_thread.json",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "hta/trace_filter/sampled_rank-0.json.gz",
    "hta/triton_example/triton_example.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/inference/sglang_decode/sglang_Qwen3-8B_decode.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/torch_compile_triton/trace.json.gz",
]
PLUGIN = SHARED / "kineto_tb_plugin" / "resnet50_num_workers_0" / "worker0.1623143089861.pt.trace.json.gz"

pytestmark = needs_shared


def slice_count(path: Path) -> int:
    """As our own reader counts them."""
    return sum(len(chunk.slices) for chunk in KinetoTrace(path).chunks())


@pytest.mark.parametrize("name", TRACES)
def test_a_whole_trace_comes_out_complete_and_smaller(name: str, tmp_path: Path) -> None:
    source = SHARED / name
    out = tmp_path / f"out{''.join(source.suffixes[-2:]) if name.endswith('.gz') else '.json'}"
    done = export(source, "-o", out)

    assert "could not be read" not in done.stderr
    check_format(out)
    assert Counter(timed(load(out))) == Counter(timed(load_loosely(source)))
    assert slice_count(out) == slice_count(source)
    assert out.stat().st_size <= source.stat().st_size


def test_no_environment_comes_out(tmp_path: Path) -> None:
    source = next((SHARED / "tracelens" / "h100").glob("Qwen*"))
    assert SECRET in gzip.decompress(source.read_bytes())

    for options in ([], ["--steps", "6"], ["--categories", "kernel"]):
        out = tmp_path / "out.json"
        export(source, *options, "--force", "-o", out)
        assert SECRET not in out.read_bytes()
    export(source, SHARED / "tracelens" / "mi300", "--force", "-o", out)
    assert SECRET not in out.read_bytes()


def test_steps_of_a_real_trace(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    export(PLUGIN, "--steps", "6:7", "-o", out)

    check_format(out)
    content, source = load(out), load_loosely(PLUGIN)
    steps = {e["name"]: e for e in of(source, "X") if e["name"].startswith("ProfilerStep")}
    start = ns(steps["ProfilerStep#6"]["ts"])
    end = ns(steps["ProfilerStep#7"]["ts"]) + ns(steps["ProfilerStep#7"]["dur"])
    assert {e["name"] for e in of(content, "X") if e["name"].startswith("ProfilerStep")} == {
        "ProfilerStep#6",
        "ProfilerStep#7",
    }
    launched = {
        e["args"]["correlation"]
        for e in of(source, "X")
        if e["cat"] == "Runtime" and start <= ns(e["ts"]) < end and "correlation" in e["args"]
    }
    expected = Counter(
        (e["name"], ns(e["ts"]), ns(e["dur"]))
        for e in of(source, "X")
        if not e["name"].startswith("ProfilerStep")
        and (
            (ns(e["ts"]) < end and ns(e["ts"]) + ns(e["dur"]) > start)
            or (ns(e["ts"]) == start and ns(e["dur"]) == 0)
            or (e["cat"] in ("Kernel", "Memcpy", "Memset") and e["args"]["correlation"] in launched)
        )
    )
    base = content["baseTimeNanoseconds"]
    found = Counter(
        (e["name"], ns(e["ts"]) + base, ns(e["dur"]))
        for e in of(content, "X")
        if not e["name"].startswith("ProfilerStep")
    )
    assert found == expected
    assert len(of(content, "s")) == len(of(content, "f")) > 1000
    assert {e["id"] for e in of(content, "s")} == {e["id"] for e in of(content, "f")}
    assert len([e for e in of(content, "i") if e["name"] == "[memory]"]) > 1000
    assert out.stat().st_size < PLUGIN.stat().st_size / 2


def analysis_counts(path: Path, folder: Path) -> dict[str, int]:
    """What the report says of reading a trace."""
    report = folder / "report.json"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as ended:
        cli.main(["analyze", str(path), "--no-cache", "--json", str(report), "--force"])
    assert ended.value.code in (0, None)
    counts: dict[str, int] = json.loads(report.read_bytes())["quality"]["counts"]
    return counts


def test_analyze_sees_the_same_in_the_export(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.json.gz", tmp_path / "cut.json.gz"
    export(PLUGIN, "-o", whole)
    export(PLUGIN, "--steps", "6", "-o", cut)

    source, same, part = (analysis_counts(path, tmp_path) for path in (PLUGIN, whole, cut))
    assert same == source
    assert part["trace_events"] == len(of(load(cut), "X"))
    assert part["steps_read"] == 1
    assert part["linked_by_correlation_ns"] > 0
    assert part["unlinked_ns"] == 0
    assert part["trace_events_lost"] == part["clipped_overlaps"] == 0


def test_two_real_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    export(SHARED / "hta" / "trace_filter", "-o", out)

    check_format(out)
    content = load(out)
    expected = [
        timed(load_loosely(SHARED / "hta" / "trace_filter" / f"sampled_rank-{rank}.json.gz")) for rank in (0, 1)
    ]
    assert Counter(timed(content)) == Counter(expected[0] + expected[1])
    labels = [e["args"]["name"] for e in of(content, "M") if e["name"] == "process_name"]
    assert {label.partition(":")[0] for label in labels} == {"rank 0", "rank 1"}
    assert len(set(labels)) == len(labels)


def test_spans_of_one_worker_share_their_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    export(PLUGIN.parent, "--categories", "Kernel", "-o", out)

    assert {e["pid"] for e in of(load(out), "X")} == {0}
    assert len(of(load(out), "X")) == 2 * sum(e["cat"] == "Kernel" for e in of(load_loosely(PLUGIN), "X"))
