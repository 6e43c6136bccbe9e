"""Growth, limits and retries from the journal, and what survives a step in a trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.memory import MemoryGrowth, MemoryLimit, MemoryLosses
from stepscope.tables.schema import Tables
from tests.analyze.memory_scenes import GIB, MIB, STEPS, memory_tables, readings
from tests.analyze.scenes import Trace
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import some

TRACE = "window.pt.trace.json"


def facts(tables: Tables) -> MemoryLosses:
    return some(analyze(tables).memory_losses)


def grown(tables: Tables) -> MemoryGrowth:
    (one,) = facts(tables).growth
    return one


@pytest.mark.parametrize(
    "level",
    [
        lambda _: 4 * GIB,
        lambda step: 4 * GIB + (GIB if step > 150 else 0),  # a window or an evaluation
        lambda step: 4 * GIB + GIB * (1 - math.exp(-step / 60)),  # a cache that fills
        lambda step: 4 * GIB + step % 100 * 4 * MIB,  # a list that every epoch empties
        lambda step: 8 * GIB - step * MIB,
        lambda step: 4 * GIB + 50 * MIB * math.sin(step),
    ],
    ids=["level", "jump", "cache", "sawtooth", "falling", "noise"],
)
def test_what_does_not_rise_all_through_is_no_growth(level: Callable[[int], float]) -> None:
    found = facts(memory_tables(readings(level)))
    assert found.logged
    assert found.growth == ()


def test_readings_that_are_no_figures_are_passed_over() -> None:
    broken: list[dict[str, Any]] = [
        {"kind": "memory", "step": 5, "time_ns": T0, "private_bytes": value} for value in ("4", None, -3, 1e300, True)
    ]
    assert len(facts(memory_tables([*broken, *readings(lambda step: GIB + step * MIB)])).growth) == 1


def test_the_limit_of_the_cgroup_is_shared_by_the_ranks_of_a_host() -> None:
    hardware = {"memory_bytes": 64 * GIB, "cgroup_memory_limit_bytes": 16 * GIB}
    rank: dict[str, Any] = {"rank": 1, "process": "rank-1"}
    steps = [*step_rows(STEPS), *step_rows(STEPS, **rank)]
    both = [*readings(lambda step: 4 * GIB + step * MIB), *readings(lambda step: 4 * GIB + step * MIB, **rank)]
    first, second = facts(memory_tables(both, steps=steps, hardware=hardware)).growth
    assert {first.rank, second.rank} == {0, 1}
    assert first.limit is not None
    assert (first.limit.bytes, first.limit.reason) == (16 * GIB, "cgroup")
    assert first.steps_left == pytest.approx((8 * GIB / MIB - 2 * 380) / 2, rel=0.01)


def test_a_device_grows_by_what_its_allocator_gave_out() -> None:
    one = grown(memory_tables(readings(device=lambda step: {"allocated_bytes": 10 * GIB + step * MIB})))
    assert one.device == "cuda:0"
    assert one.room_bytes == pytest.approx(79 * GIB - 10 * GIB - 380 * MIB)


def limit_of(*events: dict[str, Any], **device: Any) -> MemoryLimit:
    found = facts(memory_tables([*events, *readings(device=lambda _: device)]))
    (peak,) = found.peaks
    assert peak.limit is not None
    return peak.limit


def test_the_fraction_that_the_script_set_with_its_line() -> None:
    site = {
        "kind": "site",
        "time_ns": T0,
        "what": "set_per_process_memory_fraction",
        "arguments": {"fraction": "0.5"},
        "file": "/home/user/project/train.py",
        "line": 7,
    }
    limit = limit_of(site, fraction=None)
    assert (limit.bytes, limit.reason, limit.fraction) == (40 * GIB, "fraction", 0.5)
    assert limit.place is not None
    assert limit.place.line == 7


def leaking(count: int = 5, *, keep: int | None = None, **journal: Any) -> Tables:
    """Steps of a window: line 10 makes a block that stays (or `keep` of them), line 20 one that a later step frees."""
    steps = step_rows(count, in_window=True)
    trace, memory = Trace(), []
    level = 0

    def event(at: int, size: int, address: int) -> None:
        nonlocal level
        level += size
        row = {"device": "cpu", "time_ns": at, "bytes": size, "address": address, "allocated_bytes": level}
        memory.append({**row, "reserved_bytes": 0, "trace": TRACE, "track": "1/1"})

    for row in steps:
        at, number = row["start_ns"], row["step"]
        whole = {"step": number, "trace": TRACE, "track": "1/1"}
        trace.add("train.py(10): forward", at + MS, MS, **whole)
        trace.add("aten::mm", at + MS + 1000, 1000, category="cpu_op", **whole)
        event(at + MS + 1500, 4 * MIB, 1000 + number)
        trace.add("train.py(20): prefetch", at + 3 * MS, MS, **whole)
        trace.add("aten::empty", at + 3 * MS + 1000, 1000, category="cpu_op", **whole)
        event(at + 3 * MS + 1500, 2 * MIB, 2000 + number)
        if number:
            event(at + 4 * MS, -2 * MIB, 2000 + number - 1)
        if keep is not None and number >= keep:
            event(at + 4 * MS + 500, -4 * MIB, 1000 + number - keep)
    return make_tables(steps=steps, events=trace.rows, memory=memory, traces=[{"trace": TRACE}], **journal)


def test_lines_that_leave_blocks_behind_in_every_step() -> None:
    one = grown(leaking())
    assert one.traced
    assert one.bytes_per_step == 4 * MIB
    (line,) = one.lines
    assert (line.place.line, line.operator) == (10, "aten::mm")
    assert (line.bytes_per_step, line.blocks_per_step) == (4 * MIB, 1)


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_blocks_that_live_for_some_steps_do_not_grow(keep: int) -> None:
    found = facts(leaking(8, keep=keep))
    assert found.traced
    assert found.growth == ()


def test_the_journal_decides_where_it_has_readings() -> None:
    level: list[dict[str, Any]] = [
        {"kind": "memory", "step": n, "time_ns": T0 + n * 10 * MS, "private_bytes": GIB} for n in range(1, 20)
    ]
    assert facts(leaking(20, journal=level)).growth == ()
    rising = [{**row, "private_bytes": GIB + row["step"] * 4 * MIB} for row in level]
    one = grown(leaking(20, journal=rising))
    assert not one.traced
    assert [line.place.line for line in one.lines] == [10]
