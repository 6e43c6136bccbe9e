"""Whether waiting was sampled: what the recorder noted, else what threads that only wait tell."""

from __future__ import annotations

import pytest

from stepscope.analyze.host.stack_selection import idle_sampled
from stepscope.tables.schema import Tables
from tests.analyze.hotspots.test_table import found, stack
from tests.builders import make_tables


class TestIdle:
    """`idle` of the segments is null here, as for py-spy's raw files; the threads have to tell."""

    def tables(self, *threads: tuple[int, bool], idle: bool | None = None, pid: int = 1) -> Tables:
        """(samples, waiting) of a main thread and others of one process."""
        stacks = [
            stack("f (a.py:1)", samples=samples, waiting=waiting, pid=pid, thread=str(number), main_thread=number == 0)
            for number, (samples, waiting) in enumerate(threads)
        ]
        segment = {
            "host": "host-a",
            "file": "stacks-0.raw",
            "unit": "samples",
            "idle": idle,
            "samples": 1,
            "skipped_samples": 0,
        }
        return make_tables(stacks=stacks, segments=[segment])

    def test_threads_that_wait_are_sampled_like_the_busy_one(self) -> None:
        result = found(self.tables((1000, False), (990, True)))
        assert (result.idle, result.idle_source) == (True, "inferred")
        assert not any("waiting was" in text for text in result.warnings)

    def test_threads_that_wait_are_hardly_sampled(self) -> None:
        result = found(self.tables((1000, False), (40, True), (30, True)))
        assert (result.idle, result.idle_source) == (False, "inferred")
        assert any("waiting was not sampled" in text and "--idle" in text for text in result.warnings)

    @pytest.mark.parametrize(
        "threads",
        [
            ((1000, False),),  # no thread that waits
            ((1000, True),),  # the busiest thread is no evidence of itself
            ((1000, False), (300, True)),  # between the two
            ((1000, False), (10, False)),  # a thread that works now and then
            ((20, False), (1, True)),  # too few
        ],
    )
    def test_otherwise_it_is_unknown(self, threads: tuple[tuple[int, bool], ...]) -> None:
        result = found(self.tables(*threads))
        assert (result.idle, result.idle_source) == (None, None)
        assert any("unknown" in text for text in result.warnings)

    def test_what_the_recorder_noted_wins(self) -> None:
        result = found(self.tables((1000, False), (990, True), idle=False))
        assert (result.idle, result.idle_source) == (False, "recorded")

    def test_waiting_that_is_missing_in_one_file_is_missing(self) -> None:
        segments = [
            {"host": "host-a", "file": file, "unit": "samples", "idle": idle, "samples": 1, "skipped_samples": 0}
            for file, idle in (("a", True), ("b", False))
        ]
        assert idle_sampled(make_tables(segments=segments)) is False
