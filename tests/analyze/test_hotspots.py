"""Hotspots: what a row is, whose library frame it names, what the header claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.host.hotspots import (
    GROUPS,
    NO_FRAME,
    PROCESSES,
    HotspotOptions,
    StackSelection,
    check,
    choose,
    hotspots,
)
from stepscope.engine.user_code import CodeOptions
from stepscope.errors import UsageError
from stepscope.model.sampled import HotspotRow, Hotspots
from stepscope.read.sampled_files import read_stack_files
from stepscope.tables import build
from stepscope.tables.schema import Tables
from tests.analyze.shared_traces import TRACES
from tests.builders import make_tables, step_rows

WAIT = ("run (threading.py:1)", "Condition.wait (threading.py:327)")


CAST: list[dict[str, Any]] = [
    {"role": "rank", "rank": 0, "phase": "forward", "samples": 1},
    {"role": "rank", "rank": 0, "phase": "data_wait", "samples": 2, "waiting": True},
    {"role": "rank", "rank": 0, "thread": "7", "main_thread": False, "phase": None, "samples": 4, "waiting": True},
    {"role": "rank", "rank": 0, "thread": "8", "main_thread": False, "phase": None, "samples": 8},
    {"role": "rank", "rank": 1, "pid": 101, "phase": "forward", "samples": 16},
    {"role": "loader_worker", "rank": 0, "pid": 102, "samples": 32},
    {"role": "launcher", "rank": None, "pid": 103, "samples": 64},
    {"role": "helper", "rank": None, "pid": 104, "samples": 128},
    {"role": "other", "rank": None, "pid": 105, "samples": 256},
]


stack_rows = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["rank", "loader_worker", "launcher", "helper", "other", None]),
        "rank": st.sampled_from([0, 1, None]),
        "pid": st.sampled_from([1, 2, None]),
        "thread": st.sampled_from(["1", "2", None]),
        "main_thread": st.sampled_from([True, False, None]),
        "waiting": st.booleans(),
        "phase": st.sampled_from(["forward", "startup", None]),
        "stage": st.sampled_from(["import", "compile", None]),
        "samples": st.integers(0, 1000),
        "rate_hz": st.sampled_from([100.0, None]),
        "frames": st.sampled_from([(), ("<module> (train.py:3)",), WAIT, ("mkl_gemm (libmkl.so)",), ("f",)]),
    }
)


selections = st.builds(
    StackSelection,
    phase=st.sampled_from([None, "forward", "nowhere"]),
    rank=st.sampled_from([None, 0, 1, 7]),
    process=st.sampled_from(PROCESSES),
    parked=st.booleans(),
)


PROJECT = "/home/user/project"


def found(tables: Tables, code: CodeOptions | None = None, **options: Any) -> Hotspots:
    return hotspots(Context(tables, options=code or CodeOptions()), HotspotOptions(**options))


def rows_of(*stacks: dict[str, Any], **options: Any) -> tuple[HotspotRow, ...]:
    return found(make_tables(stacks=stacks), **options).rows


def stack(*frames: str, samples: int = 1, **columns: Any) -> dict[str, Any]:
    return {"frames": frames, "samples": samples, **columns}


def segment(**columns: Any) -> dict[str, Any]:
    return {"host": "host-a", "file": "stacks-0.raw", "unit": "samples", "samples": 1, "skipped_samples": 0, **columns}


def library(row: HotspotRow) -> tuple[str | None, str | None, int | None]:
    return row.library_function_name, row.library_function_path, row.library_function_line


class TestRows:
    def test_top_level_code_native_frames_and_empty_stacks_are_kept_and_told_apart(self) -> None:
        found = rows_of(
            stack("<module> (train.py:3)", samples=5),
            stack("<module> (train.py:3)", "gemm(float const*, int) (libtorch_cpu.so)", samples=4),
            stack("<module> (train.py:3)", "0x7f02422b6109 (libc.so.6)", samples=3),
            stack(
                "<module> (train.py:3)", "_find_and_load (<frozen importlib._bootstrap>:1)", stage="import", samples=2
            ),
            stack(samples=1),
        )
        assert [(row.name, row.kind) for row in found] == [
            ("<module>", "module"),
            ("gemm(float const*, int)", "native"),
            ("0x7f02422b6109", "native"),
            ("_find_and_load", "import"),
            (NO_FRAME, "none"),
        ]


class TestGroups:
    STACKS = (
        stack("main (train.py:1)", "f (torch/nn/a.py:3)", samples=4),
        stack("main (train.py:2)", "f (torch/nn/a.py:5)", samples=3),
        stack("main (train.py:2)", "g (torch/nn/a.py:9)", samples=2),
        stack("main (train.py:2)", "h (numpy/core.py:9)", samples=1),
    )

    def test_by_module_is_the_package_of_libraries_and_the_module_of_own_code(self) -> None:
        found = rows_of(
            *self.STACKS,
            stack(f"x ({PROJECT}/pkg/flow/net.py:1)", samples=20),
            stack(f"x ({PROJECT}/pkg/flow/__init__.py:1)", samples=19),
            stack("x (/home/user/venv/lib/python3.11/site-packages/torch/b.py:1)", samples=10),
            stack("x (/usr/lib/python3.11/threading.py:1)", samples=6),
            stack("x (<frozen importlib._bootstrap>:1)", samples=5),
            by="module",
        )
        assert [(row.module, row.samples) for row in found] == [
            ("pkg.flow.net", 20), ("pkg.flow", 19), ("torch", 19), ("threading", 6), ("importlib", 5), ("numpy", 1),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"by": "file", "aggregate": False}, "leave out --by"),
            ({"by": "lines"}, "line, function, file, module"),
            *(({"library": name}, "--library") for name in ("", " ", "/", "./")),
        ],
    )
    def test_options_that_mean_nothing(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            rows_of(**options)


class TestLibrary:
    @pytest.mark.parametrize(
        ("name", "file", "matches"),
        [
            ("train", "train.py", True),
            ("train", "train_databound.py", False),
            ("train", "lib/train/loop.py", True),
            ("data", "torch/utils/data/dataloader.py", True),  # a whole part
            ("data", "torch/utils/database/x.py", False),
            ("data", "metadata.py", False),
            ("torch", "torchvision/ops.py", False),
            ("torch", "/opt/venv/lib/python3.11/site-packages/torch/nn/a.py", True),
            ("pkg.flow", "pkg/flow.py", True),
            ("pkg.flow", "src/pkg/flow/net.py", True),
            ("pkg.flow", "pkg/workflow.py", False),
            ("pkg.flow", "flow/pkg.py", False),
            ("train.py", "train.py", True),
            ("train.py", "train/loop.py", False),
            ("my.dir", "/data/my.dir/a.py", True),
            ("nn/modules", "torch/nn/modules/linear.py", True),
            ("nn/modules", "torch/nn/modules_extra/linear.py", False),
            ("./pkg/", "pkg/a.py", True),
            ("/home/user/project/pkg", "/home/user/project/pkg/a.py", True),
            ("/home/user/project/pkg", "/home/user/project/pkg2/a.py", False),
            ("/user/project", "/home/user/project/a.py", False),  # a full path is a beginning
            ("/home/user/project", "train.py", True),  # shortened, but it is the user's
            ("pkg", "C:\\work\\pkg\\a.py", True),
            ("string", "<string>", False),
        ],
    )
    def test_whole_parts_of_the_path(self, name: str, file: str, matches: bool) -> None:
        (row,) = rows_of(stack(f"f ({file}:3)", "g (<string>:1)"), library=name)
        assert library(row) == (("f", file, 3) if matches else (None, None, None))


@given(st.lists(stack_rows, max_size=12), selections, st.sampled_from([*GROUPS, "paths"]))
def test_rows_add_up_to_what_was_selected(rows: list[dict[str, Any]], selection: StackSelection, by: str) -> None:
    paths = by == "paths"
    try:
        result = found(make_tables(stacks=rows), by="line" if paths else by, aggregate=not paths, selection=selection)
    except UsageError:  # none of that rank or phase
        return
    assert sum(row.samples for row in result.rows) == result.selected_samples
    assert result.selected_samples + sum(result.left_out.values()) == result.samples
    assert all(result.left_out.values())
    assert sum(result.kinds.values()) == result.selected_samples
    assert sum(process.samples for process in result.processes) == result.selected_samples
    assert sum(row.samples for row in result.rows if row.waiting) == result.waiting_samples
    for row in result.rows:
        assert sum(row.roles.values()) == row.samples
    keys = [(row.path, row.line, row.name, row.module, row.waiting, library(row)) for row in result.rows]
    assert paths or len(set(keys)) == len(keys)


class TestFacts:
    def test_samples_that_were_not_kept_have_a_reason(self) -> None:
        segments = [segment(samples=12, skipped_samples=3)]
        result = found(make_tables(stacks=[stack("f (train.py:1)", samples=10)], segments=segments))
        assert (result.samples, result.skipped_samples) == (12, 3)
        assert result.left_out == {"torn or the recorder's own": 2}
        assert any("3 samples could not be read" in text for text in result.warnings)

    def test_processes_and_threads(self) -> None:
        result = found(
            make_tables(
                stacks=[
                    stack("f (train.py:1)", samples=6),
                    stack("g (train.py:1)", samples=1, thread="8", main_thread=False, phase=None),
                    stack("h (train.py:2)", samples=5, role="loader_worker", pid=9),
                    stack("h (train.py:2)", samples=4, role="loader_worker", pid=9, waiting=True),
                ]
            )
        )
        assert [(p.role, p.pid, p.rank, p.threads, p.samples, p.waiting_samples) for p in result.processes] == [
            ("loader_worker", 9, 0, 1, 9, 4),
            ("rank", 100, 0, 2, 7, 0),
        ]
        assert any("2 processes are summed (1 rank, 1 loader worker)" in text for text in result.warnings)

    def test_weights_of_time_are_times(self) -> None:
        stacks = [stack("f (train.py:1)", samples=2_000_000, rate_hz=None)]
        result = found(make_tables(stacks=stacks, segments=[segment(unit="us", samples=2_000_000)]))
        assert (result.unit, result.rows[0].seconds) == ("us", 2.0)

    def test_files_that_count_different_things_are_warned_of(self) -> None:
        segments = [segment(file=unit, unit=unit) for unit in ("us", "bytes")]
        result = found(
            make_tables(stacks=[stack("f (a.py:1)", file="us"), stack("f (a.py:1)", file="bytes")], segments=segments)
        )
        assert any("count different things" in text for text in result.warnings)


class TestSteps:
    def tables(self, *stacks: dict[str, Any], ranks: int = 1) -> Tables:
        steps = [row for rank in range(ranks) for row in step_rows(500, rank=rank, process=f"rank-{rank}")]
        return make_tables(steps=steps, stacks=stacks)

    def test_a_ranks_samples_in_steps_are_its_mean_step(self) -> None:
        result = found(
            self.tables(
                stack("f (train.py:1)", samples=30, phase="forward"),
                stack("g (train.py:2)", samples=10, phase="data_wait", waiting=True),
                stack("h (train.py:3)", samples=60, role="loader_worker", pid=9),
                stack("i (train.py:4)", samples=100, phase="startup"),
            )
        )
        by_name = {row.name: row.ms_per_step for row in result.rows}
        assert by_name == {"f": pytest.approx(7.5), "g": pytest.approx(2.5), "h": None, "i": None}
        assert result.mean_step_ms == pytest.approx(10.0)
        assert result.steps > 400


class TestIdle:
    """`idle` of the segments is null here, as for py-spy's raw files; the threads have to tell."""

    @pytest.mark.parametrize(
        ("threads", "recorded", "expected", "said"),
        [
            (((1000, False), (990, True)), None, (True, "inferred"), None),  # sampled like the busy one
            (((1000, False), (40, True), (30, True)), None, (False, "inferred"), "waiting was not sampled"),
            (((1000, False),), None, (None, None), "unknown"),  # no thread that waits
            (((1000, True),), None, (None, None), "unknown"),  # the busiest thread is no evidence of itself
            (((1000, False), (300, True)), None, (None, None), "unknown"),  # between the two
            (((1000, False), (10, False)), None, (None, None), "unknown"),  # a thread that works now and then
            (((20, False), (1, True)), None, (None, None), "unknown"),  # too few
            (((1000, False), (990, True)), False, (False, "recorded"), "waiting was not sampled"),
        ],
    )
    def test_whether_waiting_was_sampled(
        self, threads: Any, recorded: bool | None, expected: tuple[bool | None, str | None], said: str | None
    ) -> None:
        stacks = [
            stack("f (a.py:1)", samples=samples, waiting=waiting, pid=1, thread=str(number), main_thread=number == 0)
            for number, (samples, waiting) in enumerate(threads)
        ]
        result = found(make_tables(stacks=stacks, segments=[segment(idle=recorded)]))
        assert (result.idle, result.idle_source) == expected
        told = [text for text in result.warnings if "whether waiting" in text or "waiting was" in text]
        assert len(told) == (said is not None)
        assert all(str(said) in text for text in told)


PY_SPY = TRACES / "py_spy"
needs_files = pytest.mark.skipif(not PY_SPY.is_dir(), reason=f"the recorded stacks are not at {PY_SPY}")


def recorded(*names: str, **options: Any) -> Hotspots:
    return found(build(read_stack_files([PY_SPY / name for name in names])), **options)


def own_sum(name: str) -> int:
    """All counts of a file, by nothing but the format's last field; a newline in a name ends no record there."""
    lines = (PY_SPY / name).read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    return sum(int(line.rpartition(" ")[2]) for line in lines if re.search(r" \d+$", line))


@needs_files
class TestRecorded:
    @pytest.mark.parametrize("name", sorted(path.name for path in PY_SPY.glob("*.txt")))
    def test_every_sample_of_every_file_is_accounted_for(self, name: str) -> None:
        result = recorded(name)
        assert result.samples + result.skipped_samples == own_sum(name)
        assert result.selected_samples + sum(result.left_out.values()) == result.samples
        assert sum(row.samples for row in result.rows) == result.selected_samples


def test_files_of_a_folder_are_summed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<module> (train.py:1);f (train.py:2) 5\n")
    (tmp_path / "b.txt").write_text("f (train.py:2) 1\n" * 8 + "g (train.py:3) oops\n")
    (tmp_path / "job.log").write_text("epoch 1\nloss 0.5 at last\n")
    result = found(build(read_stack_files([tmp_path])), library="train")
    assert [(row.name, row.samples) for row in result.rows] == [("f", 13)]
    assert result.files == 2
    assert any("1 file beside them without sampled stacks" in text for text in result.warnings)


def test_by_default_all_stay_but_launchers_helpers_and_parked_threads() -> None:
    found = choose(make_tables(stacks=CAST), StackSelection())
    assert found.rows["samples"].to_list() == [1, 2, 8, 16, 32, 256]
    assert found.left_out == {"launchers": 64, "helper processes": 128, "parked threads": 4}


@pytest.mark.parametrize(
    ("stacks", "selection", "said"),
    [
        (CAST, StackSelection(rank=7), "ranks with samples: 0, 1"),
        (CAST, StackSelection(phase="forwards"), "phases with samples: data_wait, forward"),
        (CAST, StackSelection(process="worker"), "main, workers, all"),
        ([], StackSelection(rank=0), "no ranks are known here"),
    ],
)
def test_what_there_is_not_is_named(stacks: list[dict[str, Any]], selection: StackSelection, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(make_tables(stacks=stacks), selection)
