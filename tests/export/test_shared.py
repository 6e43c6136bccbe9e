"""Real traces of all ages and vendors through the real command line: nothing lost, nothing larger, nothing secret."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from stepscope.read.kineto import KinetoTrace
from tests.export.traces import SHARED, check_format, export, load, load_loosely, needs_shared, timed

SECRET = b"example-not-a-secret"
TRACES = [
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/inference/sglang_decode/sglang_Qwen3-8B_decode.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
]

pytestmark = needs_shared


@pytest.mark.parametrize("name", TRACES)
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


def test_no_environment_comes_out(tmp_path: Path) -> None:
    source = next((SHARED / "tracelens" / "h100").glob("Qwen*"))
    assert SECRET in gzip.decompress(source.read_bytes())

    for options in ([], ["--steps", "6"], ["--categories", "kernel"]):
        out = tmp_path / "out.json"
        export(source, *options, "--force", "-o", out)
        assert SECRET not in out.read_bytes()
    export(source, SHARED / "tracelens" / "mi300", "--force", "-o", out)
    assert SECRET not in out.read_bytes()
