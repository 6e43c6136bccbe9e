"""`make gpu`: its judges on made-up times, and what it says where there is no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
SCRIPT = GPU / "check.py"


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ})


@pytest.mark.process
def test_the_judges_pass_what_is_true_and_catch_what_is_not(tmp_path: Path) -> None:
    done = run("--fake", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())}
    assert rows["product: duration"]["found"] == "300.0 µs"
    assert rows["wrong truths are caught"]["found"] == "3"
    assert {row["verdict"] for row in rows.values()} == {"pass"}


@pytest.mark.process
def test_without_a_device_it_says_so_in_a_line() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("no CUDA device")
    assert done.stderr.count("\n") == 1


@pytest.mark.torch
def test_every_case_has_its_planted_line_and_a_step_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for path in (GPU, GPU.parent / "zoo", GPU.parent):
        monkeypatch.syspath_prepend(str(path))
    from cases import CASES  # type: ignore[import-not-found]
    from check import judge_case, planted_lines, silent  # type: ignore[import-not-found]

    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)  # and as it was, afterwards
    assert sum(expected is not None for _, expected in CASES.values()) == 13
    for name, (case, expected) in CASES.items():
        for fixed in (False, True):
            made = case("cpu", fixed=fixed, small=True)
            made.step(*next(iter(made.batches(1))))
        if expected is None:
            continue
        where = [{"file": "/x/benchmarks/gpu/cases.py", "line": planted_lines(name)[0]}]
        finding = {"rule": "a.b", "category": expected[0], "cost_ms_per_step": 1, "gain_ceiling": 0.3, "where": where}
        rows = judge_case(name, {"findings": [finding]}, expected, 0.31)
        assert {row.verdict for row in rows.values()} == {"pass"}
        assert {row.verdict for row in judge_case(name, {"findings": []}, expected, 0.31).values()} == {"FAIL"}
    loud = {"rule": "input.loader_bound", "category": "input", "share": 0.2}
    assert silent("clean", {"findings": [loud]}).verdict == "FAIL"
    assert silent("clean", {"findings": []}).verdict == "pass"
