"""`stepscope export` cuts: to steps, to a time range, to ranks and categories; and refuses what it cannot do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope import export as layer
from stepscope.errors import StepscopeError
from tests.export.traces import (
    BASE_NS,
    check_format,
    export,
    load,
    names,
    ns,
    of,
    run_folder,
    save,
    slice_,
    timed,
    trace,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "trace.json", trace())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


def slices(path: Path) -> list[tuple[str, float]]:
    """(name, microseconds since the source's own base) of the slices of an export."""
    content = load(path)
    return [(name, (start - BASE_NS) / 1000) for phase, name, start, _ in timed(content) if phase == "X"]


def test_a_whole_trace_keeps_every_time_and_name_and_of_metadata_what_is_known(source: Path, out: Path) -> None:
    done = export(source, "-o", out)

    check_format(out)
    assert sorted(timed(load(out))) == sorted(timed(trace()))
    assert done == f"Wrote {out} (0.0 MB, 16 slices)\n"
    assert out.stat().st_size < source.stat().st_size
    assert b"hunter2" not in out.read_bytes()
    assert set(load(out)) == {"schemaVersion", "deviceProperties", "baseTimeNanoseconds", "traceEvents"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("50us:60us", ["ProfilerStep#5", "aten::mm"]),
        ("0.05:0.06ms", ["ProfilerStep#5", "aten::mm"]),
        (":50us", ["ProfilerStep#5"]),
        ("0.00035s:", ["ProfilerStep#8", "aten::mm", "cudaLaunchKernel", "gemm", "gemm"]),
    ],
)
def test_a_range_keeps_what_overlaps_it_whole(source: Path, out: Path, given: str, expected: list[str]) -> None:
    export(source, "--range", given, "-o", out)

    check_format(out)
    assert sorted(name for name, _ in slices(out)) == expected
    annotation = next(event for event in of(load(out), "X") if event["name"].startswith("ProfilerStep"))
    assert ns(annotation["dur"]) == 99_500


@pytest.mark.parametrize("late_ns", [0, 1_500_000_000])
def test_steps_of_a_run_folder_are_the_journals(tmp_path: Path, out: Path, late_ns: int) -> None:
    run = run_folder(tmp_path / "run", late_ns=late_ns)
    export(run, "--steps", "21", "-o", out)

    content = load(out)
    assert [(start - BASE_NS) / 1000 for _, name, start, _ in timed(content) if name == "aten::mm"] == [1150.25]
    assert "which hold steps 20:23" in export(run, "--steps", "30", "-o", out, "--force", status=2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_costs_what_it_hits_and_never_the_format(tmp_path: Path, data: st.DataObject) -> None:
    sound = save(tmp_path / "sound.json", trace()).read_bytes()
    broken = bytearray(sound[: data.draw(st.integers(1, len(sound)))])
    for _ in range(data.draw(st.integers(0, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    source, out = save(tmp_path / "broken.json", bytes(broken)), tmp_path / "out.json"
    try:
        layer.export([source], out, layer.Cut(range_ns=data.draw(st.sampled_from([None, (0, 10**6)]))), force=True)
    except StepscopeError:
        return
    check_format(out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "90:91"], "no such step in the traces, which hold steps 5:8"),
        (["--steps", "7:6"], "--steps 7:6"),
        (["--range", "5:9"], "write --range 100ms:250ms"),
        (["--range", "9ms:5ms"], "ends before it begins"),
        (["--range", "9s:10s"], "no event is in that cut"),
        (["--steps", "5", "--range", "1ms:2ms"], "exclude each other"),
        (["--rank", "3"], "--rank 3: no trace of that rank"),
        (["--categories", "kernels"], "there are cpu_op, cuda_runtime, kernel, memory, user_annotation"),
        (["--categories", ","], "an empty name"),
    ],
)
def test_what_cannot_be_cut_is_one_line(source: Path, out: Path, options: list[str], said: str) -> None:
    done = export(source, *options, "-o", out, status=2)

    assert said in done
    assert done.startswith("stepscope: ")
    assert done.count("\n") == 1
    assert not out.exists()


def test_steps_of_a_trace_without_any(tmp_path: Path, out: Path) -> None:
    source = save(tmp_path / "trace.json", {"traceEvents": [slice_("a", 1, 2)]})
    assert "mark no steps; cut by time" in export(source, "--steps", "1", "-o", out, status=2)


def test_a_source_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    assert "one of the traces to read" in export(source, "-o", source, "--force", status=2)
    assert "one of the traces to read" in export(tmp_path, "-o", source, "--force", status=2)
    assert source.read_bytes() == before


def test_what_exists_is_kept_unless_forced_and_a_link_not_followed(source: Path, out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    out.symlink_to(other)

    assert "exists; add --force" in export(source, "-o", out, status=2)
    assert out.is_symlink()
    export(source, "-o", out, "--force")

    assert other.read_text() == "mine"
    assert not out.is_symlink()
    check_format(out)


def test_unwritable_places_and_missing_traces(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in export(source, "-o", tmp_path / "file" / "out.json", status=4)
    export(source, "-o", tmp_path / "new" / "folder" / "out.json")
    assert "is a folder" in export(source, "-o", tmp_path, status=2)
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in export(source, "--force", "-o", tmp_path / "pipe", status=2)
    assert "no-such" in export(tmp_path / "no-such.json", "-o", out, status=3)
    empty = save(tmp_path / "empty.json", {"traceEvents": []})
    export(empty, "-o", out, status=3)
    only_names = save(tmp_path / "names.json", {"traceEvents": names()})
    assert "nothing with a time in it" in export(only_names, "-o", out, status=3)
    assert not out.exists()


def test_a_failed_export_leaves_nothing_behind(source: Path, out: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    export(source, "--steps", "99", "-o", out, status=2)
    export(source, tmp_path / "missing.json", "-o", out, status=3)
    assert sorted(os.listdir(tmp_path)) == before
