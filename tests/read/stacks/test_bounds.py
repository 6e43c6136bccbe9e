"""Memory stays bounded whatever a file holds, and what falls to a bound is said or still counted."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.read import speedscope, stack_lines
from stepscope.read.raw import FrameNames, Losses
from stepscope.read.sampled_files import open_stacks
from stepscope.read.stack_lines import Austin, Collapsed, PySpyRaw
from tests.read.stack_text import parse, read_all


def raw(count: int) -> list[str]:
    """Records of as many different threads and frames."""
    return [f'process 5:"a;{n}";thread ({n}): T{n};f{n} (x.py:{n + 1}) {n + 1}' for n in range(count)]


def test_too_many_different_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_DISTINCT_FRAMES", 10)
    parsed = parse(raw(50))
    assert sum(stack.samples for stack in parsed.stacks) == 50 * 51 // 2
    functions = [stack.frames[0].function for stack in parsed.stacks]
    assert functions[:10] == [f"f{n}" for n in range(10)]
    assert set(functions[10:]) == {stack_lines.MORE_FRAMES.function}


def test_too_much_text_of_different_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_FRAME_CHARS", 100)
    assert parse(raw(50)).stacks[-1].frames == (stack_lines.MORE_FRAMES,)


def test_too_many_different_threads_are_still_told_apart(monkeypatch: pytest.MonkeyPatch):
    expected = parse(raw(50) * 2).stacks
    monkeypatch.setattr(stack_lines, "MAX_PREFIX_PIECES", 10)
    assert parse(raw(50) * 2).stacks == expected
    assert [stack.thread_name for stack in expected[:2]] == ["T0", "T1"]


def test_hints_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_PROCESSES", 3)
    stacks = PySpyRaw(Path("x"))
    lines = [f'process {n}:"torchrun t.py {n}";f (x.py:1) 1' for n in range(9)]
    assert len(list(stacks.parse([lines], FrameNames(), Losses()))) == 9
    assert len(stacks.hints) == 3


def test_records_and_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_RECORD_CHARS", 500)
    long = ";".join(["f (x.py:1)"] * 100)
    parsed = parse([f"{long} 3", "f (x.py:1) 4"])
    assert ([stack.samples for stack in parsed.stacks], parsed.skipped_samples) == ([4], 3)
    monkeypatch.setattr(stack_lines, "LINES", replace(stack_lines.LINES, longest=2**20))
    path = tmp_path / "x"
    path.write_bytes(b"f (x.py:1) 1\n" + b"x" * (3 * 2**20) + b" 7\nf (x.py:1) 2\n")
    parsed = read_all(PySpyRaw(path))
    assert ([stack.samples for stack in parsed.stacks], parsed.skipped_records) == ([1, 2], 1)
    path.write_bytes(b"f (x.py:1) 1\n" + b"x" * (3 * 2**20))
    assert read_all(PySpyRaw(path)).skipped_records == 1


def test_records_of_too_many_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_RECORD_LINES", 10)
    parsed = parse(['process 5:"a', *["b"] * 100, 'c";thread (5): M;f (x.py:1) 3', 'process 5:"x";f (x.py:1) 4'])
    assert [stack.samples for stack in parsed.stacks] == [4]
    assert (parsed.skipped_records >= 10, parsed.skipped_samples) == (True, 3)


def test_too_many_frames_in_a_stack(tmp_path: Path):
    assert parse([";".join(["f (x.py:1)"] * 20_001) + " 3"]).skipped_samples == 3
    (tmp_path / "x").write_text(";".join(["f"] * 20_001) + " 3\n")
    assert read_all(Collapsed(tmp_path / "x")).skipped_samples == 3


def test_stacks_that_wait_for_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_MERGED_STACKS", 3)
    (tmp_path / "x").write_text("".join(f"P1;T0:1;a.py:f:{n % 7 + 1} {n}\n" for n in range(100)))
    parsed = read_all(Austin(tmp_path / "x"))
    assert sum(stack.samples for stack in parsed.stacks) == 99 * 100 // 2
    assert len(parsed.stacks) > 7


def test_samples_of_speedscope_that_wait_for_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speedscope, "MAX_DISTINCT_BYTES", 10)
    samples = ",".join(f"[{n % 5}]" for n in range(50))
    weights = ",".join(["2"] * 50)
    path = tmp_path / "x"
    path.write_text(
        '{"shared":{"frames":[{"name":"a"},{"name":"b"},{"name":"c"},{"name":"d"},{"name":"e"}]},"profiles":'
        f'[{{"type":"sampled","name":"p","unit":"none","samples":[{samples}],"weights":[{weights}]}}]}}'
    )
    assert sum(stack.samples for stack in read_all(open_stacks(path)).stacks) == 100


def test_paths_of_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speedscope, "MAX_PATHS", 4)
    events = ",".join(f'{{"type":"O","frame":0,"at":{n}}}' for n in range(10))
    path = tmp_path / "x"
    path.write_text(
        '{"shared":{"frames":[{"name":"a"}]},"profiles":[{"type":"evented","name":"p","unit":"none",'
        f'"startValue":0,"endValue":10,"events":[{events}]}}]}}'
    )
    parsed = read_all(open_stacks(path))
    assert sum(stack.samples for stack in parsed.stacks) == 10
    assert parsed.skipped_records == 7


def test_files_of_speedscope_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speedscope, "MAX_BYTES", 100)
    path = tmp_path / "x"
    path.write_text('{"shared":{"frames":[]},"profiles":[' + " " * 200 + "]}")
    assert read_all(open_stacks(path)).losses.counts == {"oversized_files": 1}


def test_packed_files_that_are_cut_off(tmp_path: Path):
    lines = "".join(f"f (x.py:{n + 1}) 1\n" for n in range(50_000)).encode()
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(lines)[:-2000])
    parsed = read_all(open_stacks(path))
    assert 0 < len(parsed.stacks) < 50_000
    assert parsed.losses.counts["cut_off_files"] == 1


def test_progress_says_the_bytes_that_were_read(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text("f (x.py:1) 1\n" * 100_000)
    said: list[tuple[int, int]] = []
    stacks = PySpyRaw(path).read(FrameNames(), Losses(), lambda done, size: said.append((done, size)))
    assert sum(stack.samples for stack in stacks) == 100_000
    assert len(said) > 2
    assert said == sorted(said)
    assert said[-1] == (path.stat().st_size, path.stat().st_size)
