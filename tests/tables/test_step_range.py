"""Steps of a large trace: the tables are those of the whole trace, and what lies far from the steps is never held."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stepscope import tables
from stepscope.tables import BuildOptions, Tables, step_range
from tests.tables.test_cache import run_of, same
from tests.tables.test_foreign import slice_of

STEPS = 40


def events() -> list[dict[str, Any]]:
    """Steps of 100 us in a function; each launches a kernel that runs in the next but one, and frees memory."""
    made = [slice_of("train.py(1): main", 0, 100 * (STEPS + 4), "python_function")]
    for step in range(STEPS):
        start = 100 + step * 100
        made += [
            slice_of("gemm", start + 220, 30, "kernel", correlation=step),  # kernels may stand before their launches
            slice_of("aten::mm", start + 10, 50, **{"External id": step}),
            slice_of("cudaLaunchKernel", start + 20, 5, "cuda_runtime", correlation=step),
            slice_of(f"ProfilerStep#{step}", start, 100, "user_annotation"),
        ]
        memory = {"Bytes": -64, "Addr": step, "Device Type": 0, "Device Id": -1, "Total Allocated": 128}
        made.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": start + 5, "args": memory})
    return made


def written(path: Path, entries: list[dict[str, Any]]) -> Path:
    data = json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": entries}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def built(path: Path, cache: Path | None = None) -> Tables:
    return tables.build(run_of(path), BuildOptions(steps=(20, 22), cache=cache))


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_range, "LARGE_BYTES", 1)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_large_trace_gives_the_same_tables(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / name, events())
    whole = built(path)
    monkeypatch.setattr(step_range, "LARGE_BYTES", 1)
    monkeypatch.setattr(step_range, "_BEHIND_BYTES", 0)
    near = built(path, tmp_path / "cache")
    assert same(whole, near)
    assert same(whole, built(path, tmp_path / "cache"))  # found in the cache, where it is not taken for the whole
    assert (whole.events.height, whole.links.height, whole.memory.height) == (13, 3, 3)
    taken, of_all = near.quality.counts["trace_events"], whole.quality.counts["trace_events"]
    assert taken < of_all / 2 + STEPS  # the annotations of all steps stay, for their numbers
    assert tables.build(run_of(path), BuildOptions(cache=tmp_path / "cache")).events.height == of_all


@pytest.mark.usefixtures("small_is_large")
def test_where_steps_are_small_the_device_may_lag_far_behind(tmp_path: Path):
    late = events()
    for one in late:
        one["ts"] += 1_000 if one.get("cat") == "kernel" else 0  # twelve steps behind what launches it
    links = built(written(tmp_path / "a.json", late)).links
    assert links.height == 3
    assert links["launch"].null_count() == 0


@pytest.mark.usefixtures("small_is_large")
def test_steps_that_are_not_there_leave_empty_tables(tmp_path: Path):
    path = written(tmp_path / "a.json", [one for one in events() if "ProfilerStep#2" not in one["name"]])
    assert built(path).events.height == 0


def test_steps_that_damage_hides_from_the_first_pass_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path / "a.json", events())
    whole = built(path)
    monkeypatch.setattr(step_range, "LARGE_BYTES", 1)
    real = step_range.trace_steps
    calls = []

    def some(marks: Any) -> Any:
        calls.append(marks)
        return [row for row in real(marks) if len(calls) > 1 or row["step"] != 22]

    monkeypatch.setattr(step_range, "trace_steps", some)
    monkeypatch.setattr(step_range, "_BEHIND_STEPS", 0)
    monkeypatch.setattr(step_range, "_BEHIND_BYTES", 0)
    assert same(whole, built(path))
    assert len(calls) == 2
