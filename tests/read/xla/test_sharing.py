"""Counts of steps and counts of lines are both kept when they are joined."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stepscope.read.xla.journal import evenly, in_order, split

counts = st.lists(st.integers(0, 50), max_size=20)


@given(counts, st.dictionaries(st.sampled_from("abcde"), st.integers(0, 200)))
def test_every_step_and_every_line_keeps_its_count(steps: list[int], lines: dict[str, int]) -> None:
    shares = list(evenly(steps, lines, "rest"))
    assert [sum(share.values()) for share in shares] == steps
    given_out = sum(shares, Counter[str]())
    whole, known = sum(steps), sum(lines.values())
    assert given_out["rest"] == max(0, whole - known)
    assert all(given_out[line] <= count for line, count in lines.items())
    if known <= whole:
        assert all(given_out[line] == count for line, count in lines.items())


def test_lines_are_mixed_in_their_proportions() -> None:
    assert list(evenly([4, 4, 4], {"a": 6, "b": 3}, "rest")) == [{"a": 2, "b": 1, "rest": 1}] * 3


@given(counts)
def test_in_order_takes_each_once(steps: list[int]) -> None:
    keys = list(range(sum(steps) + 3))
    shares = list(in_order(steps, keys))
    assert [key for share in shares for key in share] == keys[: sum(steps)]
    assert [sum(share.values()) for share in shares] == steps


@given(st.floats(0, 1e15), st.dictionaries(st.text(max_size=3), st.integers(1, 100), min_size=1))
def test_a_time_is_split_without_loss(total: float, parts: dict[str, int]) -> None:
    assert sum(split(total, parts).values()) == round(total)
