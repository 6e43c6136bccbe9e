"""Hotspots: what a row is, whose library frame it names, what the header claims."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.host.hotspots import GROUPS, NO_FRAME, HotspotOptions, hotspots, of_run
from stepscope.analyze.host.stack_selection import StackSelection
from stepscope.engine.user_code import CodeOptions
from stepscope.errors import UsageError
from stepscope.model.sampled import HotspotRow, Hotspots
from stepscope.tables.schema import Tables
from tests.analyze.sampled.test_selection import selections, stack_rows
from tests.builders import make_tables, step_rows

PROJECT = "/home/user/project"


def found(tables: Tables, code: CodeOptions | None = None, **options: Any) -> Hotspots:
    return of_run(Context(tables, options=code or CodeOptions()), HotspotOptions(**options))


def rows_of(*stacks: dict[str, Any], **options: Any) -> tuple[HotspotRow, ...]:
    return found(make_tables(stacks=stacks), **options).rows


def stack(*frames: str, samples: int = 1, **columns: Any) -> dict[str, Any]:
    return {"frames": frames, "samples": samples, **columns}


def library(row: HotspotRow) -> tuple[str | None, str | None, int | None]:
    return row.library_function_name, row.library_function_path, row.library_function_line


class TestRows:
    def test_a_row_is_the_innermost_frame_with_the_users_frame_that_led_there(self) -> None:
        (row,) = rows_of(
            stack(
                f"<module> ({PROJECT}/train.py:9)", f"main ({PROJECT}/train.py:5)", "Linear.forward (torch/nn/a.py:7)"
            )
        )
        assert (row.name, row.path, row.line) == ("Linear.forward", "torch/nn/a.py", 7)
        assert library(row) == ("main", f"{PROJECT}/train.py", 5)
        assert (row.samples, row.proportion, row.kind, row.module) == (1, 1.0, "python", "torch")

    def test_every_call_path_is_a_row_when_they_are_not_merged(self) -> None:
        found = rows_of(
            stack("a (train.py:1)", "x (torch/m.py:3)", samples=2),
            stack("b (torch/q.py:9)", "a (train.py:1)", "x (torch/m.py:3)", samples=3),
            aggregate=False,
        )
        assert [(row.name, library(row)[0], row.samples) for row in found] == [("x", "a", 3), ("x", "a", 2)]

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

    def test_waiting_and_working_are_never_merged(self) -> None:
        found = rows_of(stack("f (train.py:1)", samples=2), stack("f (train.py:1)", waiting=True), by="file")
        assert [(row.samples, row.waiting) for row in found] == [(2, False), (1, True)]

    def test_a_limit_makes_the_first_rows_of_working_and_of_waiting(self) -> None:
        stacks = [stack(f"f{n} (a.py:{n})", samples=n, waiting=n % 2 == 0) for n in range(1, 9)]
        part = found(make_tables(stacks=stacks), limit=2)
        assert [row.samples for row in part.rows] == [8, 7, 6, 5]
        assert (part.working_rows, part.waiting_rows) == (4, 4)
        assert part.selected_samples == sum(range(1, 9))


class TestGroups:
    STACKS = (
        stack("main (train.py:1)", "f (torch/nn/a.py:3)", samples=4),
        stack("main (train.py:2)", "f (torch/nn/a.py:5)", samples=3),
        stack("main (train.py:2)", "g (torch/nn/a.py:9)", samples=2),
        stack("main (train.py:2)", "h (numpy/core.py:9)", samples=1),
    )

    def test_by_function_merges_lines_and_says_no_line_where_they_differ(self) -> None:
        first, second, _ = rows_of(*self.STACKS, by="function")
        assert (first.name, first.path, first.line, first.samples) == ("f", "torch/nn/a.py", None, 7)
        assert library(first) == ("main", "train.py", None)
        assert (second.name, second.line, library(second)[2]) == ("g", 9, 2)

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

    def test_call_paths_have_no_other_grouping(self) -> None:
        with pytest.raises(UsageError, match="leave out --by"):
            rows_of(by="file", aggregate=False)

    def test_unknown_grouping(self) -> None:
        with pytest.raises(UsageError, match="line, function, file, module"):
            rows_of(by="lines")


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

    def test_a_library_that_is_nowhere_is_said(self) -> None:
        result = found(make_tables(stacks=[stack("f (train.py:1)")]), library="itwinai")
        assert any("no sampled stack runs through itwinai" in text for text in result.warnings)
        assert result.library == "itwinai"

    @pytest.mark.parametrize("name", ["", " ", "/", "./"])
    def test_empty(self, name: str) -> None:
        with pytest.raises(UsageError, match="--library"):
            rows_of(library=name)


@given(st.lists(stack_rows, max_size=12), selections, st.sampled_from([*GROUPS, "paths"]))
def test_rows_add_up_to_what_was_selected(rows: list[dict[str, Any]], selection: StackSelection, by: str) -> None:
    tables = make_tables(stacks=rows)
    context = Context(tables)
    paths = by == "paths"
    options = HotspotOptions(by="line" if paths else by, aggregate=not paths, selection=selection)
    result = hotspots(tables, context.calls, context.code, options)
    assert sum(row.samples for row in result.rows) == result.selected_samples
    assert result.selected_samples + sum(result.left_out.values()) == result.samples
    assert sum(result.kinds.values()) == result.selected_samples
    assert sum(process.samples for process in result.processes) == result.selected_samples
    assert sum(row.samples for row in result.rows if row.waiting) == result.waiting_samples
    for row in result.rows:
        assert sum(row.roles.values()) == row.samples
    keys = [(row.path, row.line, row.name, row.module, row.waiting, library(row)) for row in result.rows]
    assert paths or len(set(keys)) == len(keys)


class TestFacts:
    def test_samples_that_were_not_kept_have_a_reason(self) -> None:
        segment = {"host": "host-a", "file": "stacks-0.raw", "unit": "samples", "samples": 12, "skipped_samples": 3}
        result = found(make_tables(stacks=[stack("f (train.py:1)", samples=10)], segments=[segment]))
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

    def test_a_file_with_a_rate_lasted_as_long_as_its_busiest_thread(self) -> None:
        unknown = {"start_ns": None, "end_ns": None, "rate_hz": 50.0}
        result = found(
            make_tables(
                stacks=[
                    stack("f (train.py:1)", samples=100, **unknown),
                    stack("f (train.py:2)", samples=50, **unknown),
                    stack("g (train.py:3)", samples=120, thread="9", main_thread=False, **unknown),
                ]
            )
        )
        assert (result.wall_s, result.wall_source) == (3.0, "nominal")

    def test_weights_of_time_are_times(self) -> None:
        segment = {"host": "host-a", "file": "stacks-0.raw", "unit": "us", "samples": 2_000_000, "skipped_samples": 0}
        stacks = [stack("f (train.py:1)", samples=2_000_000, rate_hz=None)]
        result = found(make_tables(stacks=stacks, segments=[segment]))
        assert (result.unit, result.rows[0].seconds) == ("us", 2.0)

    def test_files_that_count_different_things_are_warned_of(self) -> None:
        segments = [
            {"host": "host-a", "file": f, "unit": f, "samples": 1, "skipped_samples": 0} for f in ("us", "bytes")
        ]
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
