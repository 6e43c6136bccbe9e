"""Files of speedscope: py-spy's and those of other tools, damage, and what their weights mean."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepscope.read.raw import Frame, StackSource
from stepscope.read.sampled_files import Speedscope, open_stacks
from tests.read.stack_text import Parsed, read_all

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces" / "py_spy" / "speedscope.json"
FRAMES = [{"name": "main", "file": "a.py", "line": 1}, {"name": "f", "file": None, "line": None}, {"name": "g"}]
MAIN, F, G = Frame("main", "a.py", 1), Frame("f", "", None), Frame("g", "", None)


def sampled(samples: Any, weights: Any, unit: str = "seconds", **more: Any) -> dict[str, Any]:
    profile = {"type": "sampled", "name": "p", "unit": unit, "startValue": 0, "endValue": 1}
    return {**profile, "samples": samples, "weights": weights, **more}


def evented(
    events: list[tuple[str, int, float]], unit: str = "seconds", end: float = 10, **more: Any
) -> dict[str, Any]:
    listed = [{"type": kind, "frame": frame, "at": at} for kind, frame, at in events]
    profile = {"type": "evented", "name": "p", "unit": unit, "startValue": 0, "endValue": end}
    return {**profile, "events": listed, **more}


def write(path: Path, *profiles: Any, frames: Any = FRAMES, **more: Any) -> StackSource:
    file = {"$schema": "https://www.speedscope.app/file-format-schema.json", "shared": {"frames": frames}}
    path.write_text(json.dumps({**file, "profiles": profiles, **more}))
    return open_stacks(path)


def counts(parsed: Parsed) -> dict[tuple[Frame, ...], int]:
    return {stack.frames: stack.samples for stack in parsed.stacks}


US = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}


@pytest.mark.parametrize(
    ("samples", "weights", "unit", "expected", "told"),
    [
        # equal weights of time are samples at a rate
        ([[0, 1], [0, 1], [0], []], [0.02] * 4, "seconds", {(MAIN, F): 2, (MAIN,): 1, (): 1}, ("samples", 50.0, None)),
        # others are microseconds
        *(
            ([[0], [1]], [3000, 9000], unit, {(MAIN,): 3000 * us, (F,): 9000 * us}, ("us", None, us * 1000))
            for unit, us in US.items()
        ),
        ([[0], [1]], [4096, 8], "bytes", {(MAIN,): 4096, (F,): 8}, ("bytes", None, None)),
        ([[0], [1]], [12, 1], "none", {(MAIN,): 12, (F,): 1}, ("samples", None, None)),
        ([[0], [0]], [], "seconds", {(MAIN,): 2}, ("samples", None, None)),
    ],
)
def test_weights(tmp_path: Path, samples: Any, weights: Any, unit: str, expected: Any, told: Any):
    source = write(tmp_path / "x", sampled(samples, weights, unit))
    parsed = read_all(source)
    assert counts(parsed) == expected
    assert (source.unit, source.rate_hz, source.wall_ns) == pytest.approx(told)
    assert not parsed.losses.counts


def test_self_times_of_opened_and_closed_frames(tmp_path: Path):
    events = [("O", 0, 1.0), ("O", 1, 2.0), ("C", 1, 5.0), ("O", 1, 5.5), ("C", 1, 6.0), ("C", 0, 8.0), ("O", 2, 9.0)]
    source = write(tmp_path / "x", evented(events))
    parsed = read_all(source)
    assert counts(parsed) == {(MAIN,): 3_500_000, (MAIN, F): 3_500_000, (G,): 1_000_000}
    assert (source.unit, source.wall_ns) == ("us", 10 * 10**9)
    assert not parsed.losses.counts
    events = [("O", 0, 0), ("O", 0, 1), ("C", 0, 3), ("C", 0, 10)]
    assert counts(read_all(write(tmp_path / "x", evented(events)))) == {(MAIN,): 8_000_000, (MAIN, MAIN): 2_000_000}


def test_events_out_of_order_are_counted(tmp_path: Path):
    events = [("O", 0, 0), ("C", 1, 1), ("O", 1, 2), ("O", 77, 3), ("C", 0, 4), ("O", 1, 3), ("X", 1, 5)]
    parsed = read_all(write(tmp_path / "x", evented(events)))
    assert counts(parsed) == {(MAIN,): 2_000_000, (MAIN, F): 2_000_000}
    assert parsed.skipped_records == 4


def test_weights_and_events_of_other_types_cost_themselves(tmp_path: Path):
    parsed = read_all(write(tmp_path / "x", sampled([[0], [1], [0]], [1, "x", None], "none")))
    assert counts(parsed) == {(MAIN,): 1, (F,): 0}
    profile = evented([("O", 0, 0), ("C", 0, 10)])
    profile["events"][1:1] = [5, {"type": "O"}]
    parsed = read_all(write(tmp_path / "x", profile))
    assert (counts(parsed), parsed.skipped_records) == ({(MAIN,): 10_000_000}, 2)


def test_threads_by_the_names_of_profiles(tmp_path: Path):
    names = ('Process 14153 Thread 14153 "MainThread"', 'Process 14153 Thread 0x7f ""', "Thread 77", "odd \ud800", 5)
    profiles = [sampled([[0]], [0.01], name=name) for name in names]
    found = [(s.pids, s.thread, s.thread_name) for s in read_all(write(tmp_path / "x", *profiles)).stacks]
    assert found[:3] == [((14153,), "14153", "MainThread"), ((14153,), "0x7f", None), ((), "77", None)]
    assert len(found) == 5
    repr(found).encode()
    (stack,) = read_all(write(tmp_path / "x", sampled([[0]], [0.01], name="train.py at 12:00"))).stacks
    assert stack[:3] == ((), None, None)  # the only profile is of an unknown thread


def test_processes_and_threads_that_stand_as_frames(tmp_path: Path):
    names = ['process 7:"torchrun --token secret;x"', 'process 8:"python t.py"', "thread (9): odd; name", "thread (9)"]
    names += ["f", 'process 7:"torchrun --token secret', 'secret"']
    frames = [{"name": name, "file": "", "line": 0} for name in names]
    samples = [[0, 1, 2, 4], [0, 1, 3, 4], [5, 4, 6, 3, 4], [4, 0], [4]]
    source = write(tmp_path / "x", sampled(samples, [0.01] * 5, name='Process 8 Thread 9 "late"'), frames=frames)
    parsed = read_all(source)
    assert [(stack.pids, stack.thread, stack.thread_name) for stack in parsed.stacks] == [
        ((7, 8), "9", "odd; name"),
        ((7, 8), "9", "late"),
        ((7,), "9", "late"),
        ((8,), "9", "late"),
        ((8,), "9", "late"),
    ]
    functions = [[frame.function for frame in stack.frames] for stack in parsed.stacks]
    assert functions == [["f"], ["f"], ["f"], ["f", "(process)"], ["f"]]
    assert source.hints == {7: "launcher"}
    assert "secret" not in repr(parsed)


def test_profiles_of_another_unit_are_left_out_and_counted(tmp_path: Path):
    parsed = read_all(write(tmp_path / "x", sampled([[0]], [4096], "bytes"), sampled([[1]], [3], "none")))
    assert counts(parsed) == {(MAIN,): 4096}
    assert parsed.losses.counts == {"other_units": 1}


def test_samples_of_unknown_frames_and_bad_weights_are_counted(tmp_path: Path):
    samples = [[0], [9], [-1], "x", [0.5], [1], [0]]
    parsed = read_all(write(tmp_path / "x", sampled(samples, [1, 2, 3, 4, 5, -6], "bytes")))
    assert counts(parsed) == {(MAIN,): 1}
    assert (parsed.skipped_records, parsed.skipped_samples) == (6, 14)


def test_odd_frames(tmp_path: Path):
    frames: list[Any] = [{}, {"name": 3, "file": [], "line": "x"}, "text", None, 7]
    (stack,) = read_all(write(tmp_path / "x", sampled([[0, 1, 2, 3, 4]], [0.01]), frames=frames)).stacks
    assert stack.frames == (Frame("?", "", None),) * 5


def test_profiles_that_are_none_cost_themselves(tmp_path: Path):
    bad: list[Any] = [{"type": "other"}, 3, {"type": "sampled", "samples": 4, "weights": {}}, sampled([], [])]
    bad.append(sampled([[0]], [0.01]))
    parsed = read_all(write(tmp_path / "x", *bad))
    assert counts(parsed) == {(MAIN,): 1}
    assert parsed.skipped_records == 2


def test_written_in_other_ways(tmp_path: Path):
    file = {"shared": {"frames": FRAMES}, "profiles": [sampled([[0, 1], [0]], [3, 4], "none"), sampled([], [])]}
    (tmp_path / "flamegraph.txt").write_bytes(gzip.compress(json.dumps(file, indent=8).encode()))
    parsed = read_all(open_stacks(tmp_path / "flamegraph.txt"))
    assert counts(parsed) == {(MAIN, F): 3, (MAIN,): 4}
    assert not parsed.losses.counts
    assert write(tmp_path / "x", exporter="pyinstrument@5.1").tool == "pyinstrument"
    assert write(tmp_path / "y").tool == "speedscope"


def test_cut_off_and_deeply_nested_files(tmp_path: Path):
    write(tmp_path / "x", sampled([[0, 1]] * 50, [0.01] * 50))
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-40])
    parsed = read_all(Speedscope(tmp_path / "cut"))
    assert (parsed.stacks, parsed.losses.counts) == ([], {"unreadable_files": 1})
    for name, nested in (("lists", "[" * 100_000), ("objects", '{"a":' * 100_000)):
        (tmp_path / name).write_text('{"shared":{"frames":[' + nested)
        assert read_all(Speedscope(tmp_path / name)).stacks == []
        (tmp_path / name).write_text('{"profiles":[{"type":"sampled","samples":[' + nested + "]}]}")
        assert read_all(Speedscope(tmp_path / name)).stacks == []


def test_long_lists_are_cut_where_a_sample_ends(tmp_path: Path):
    samples = [[0] * (n % 40) + [1] for n in range(20_000)]
    parsed = read_all(write(tmp_path / "x", sampled(samples, [0.001 + n % 7 for n in range(20_000)])))
    expected = Counter[tuple[Frame, ...]]()
    for n in range(20_000):
        expected[(MAIN,) * (n % 40) + (F,)] += 1000 + n % 7 * 10**6
    assert counts(parsed) == expected
    events = [("O", 0, 0.0)] + [(kind, 1, float(n)) for n in range(1, 16_001) for kind in ("O", "C")]
    events = [(kind, frame, at + 0.5 * (kind == "C")) for kind, frame, at in events]
    parsed = read_all(write(tmp_path / "y", evented(events, end=16_001)))
    assert counts(parsed) == {(MAIN,): 8_001 * 10**6, (MAIN, F): 8_000 * 10**6}
    assert not parsed.losses.counts


@pytest.mark.parametrize("unit", ["seconds", "bytes", "none"])
def test_absurd_weights_fit_64_bits(tmp_path: Path, unit: str):
    source = write(tmp_path / "x", sampled([[0]] * 3, [2**53 - 1, 1e300, 9e12], unit, endValue=2**53 - 1))
    events = [("O", 0, 0), ("C", 0, 2**53 - 1)]
    for opened in (source, write(tmp_path / "y", evented(events, unit, end=2**53 - 1))):
        assert all(stack.samples <= 10**15 for stack in read_all(opened).stacks)
        assert opened.wall_ns is None


@pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
def test_a_real_file_of_py_spy():
    source = open_stacks(SHARED)
    parsed = read_all(source)
    file = json.loads(SHARED.read_text())
    assert sum(stack.samples for stack in parsed.stacks) == sum(len(p["samples"]) for p in file["profiles"])
    assert (source.tool, source.unit, source.rate_hz) == ("py-spy", "samples", pytest.approx(100.0))
    assert {stack.pids for stack in parsed.stacks} == {(14153,), (14153, 14321), (14153, 14322)}
    assert "--steps 80" not in repr(parsed)
    assert not any(frame.function.startswith("thread (") for stack in parsed.stacks for frame in stack.frames)
    main = [stack for stack in parsed.stacks if stack.pids == (14153,) and stack.thread == "14153"]
    assert {stack.thread_name for stack in main} == {None, "MainThread"}
    assert not parsed.losses.counts
    first = file["profiles"][0]["samples"][0]
    names = [file["shared"]["frames"][number]["name"] for number in first[2:]]  # behind process and thread
    assert [frame.function for frame in parsed.stacks[0].frames] == names
