"""Memory from the allocations in traces: pairs, the peak and what stood there, by operator and by line."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import trace_memory
from stepscope.analyze.views.memory_blocks import pair, thinned
from stepscope.model.memory import MemoryCurve, MemoryOperator, MemoryView
from tests.analyze.traces import TRACE, US, Slices, tables
from tests.builders import T0

GPU, CPU = "cuda:0", "cpu"
ROWS = list[dict[str, Any]]


class Recorded:
    """Slices of a trace and its allocations; totals are kept as an allocator keeps them."""

    def __init__(self, *, before: int = 0, reserved: int | None = 10_000) -> None:
        self.slices = Slices()
        self.rows: ROWS = []
        self.reserved = reserved
        self.totals: dict[str, int] = defaultdict(int, {GPU: before})

    def add(self, size: int, at_us: float, address: int | None, *, device: str = GPU, track: str = "1/1") -> None:
        """An allocation, or a release where `size` is below 0."""
        self.totals[device] += size
        row = {"trace": TRACE, "track": track, "device": device, "time_ns": T0 + round(at_us * US), "bytes": size}
        row |= {"address": address, "allocated_bytes": self.totals[device], "reserved_bytes": self.reserved}
        self.rows.append(row)

    def view(self) -> MemoryView:
        if not self.slices.events:
            self.slices.add("cpu_op", "aten::nothing", 0, 1_000_000, track="9/9")
        found = trace_memory.view(Context(tables(self.slices, memory=self.rows)).base)
        assert found is not None
        return found


def curve_of(found: MemoryView, device: str = GPU) -> MemoryCurve:
    (curve,) = [curve for curve in found.curves if curve.device == device]
    return curve


def operators_of(found: MemoryView, device: str = GPU) -> dict[str | None, MemoryOperator]:
    rows = [row for row in found.operators if row.device == device]
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    return named


def nested() -> Recorded:
    """linear > (addmm > empty), a linear inside a linear, and a kernel's slice that lies over them all."""
    recorded = Recorded()
    slices = recorded.slices
    step = slices.add("user_annotation", "ProfilerStep#1", 0, 100)
    outer = slices.add("cpu_op", "aten::linear", 10, 40, parent=step, depth=1)
    addmm = slices.add("cpu_op", "aten::addmm", 15, 20, parent=outer, depth=2)
    launch = slices.add("cuda_runtime", "cudaMalloc", 16, 2, parent=addmm, depth=3)
    assert launch
    slices.add("cpu_op", "aten::empty", 20, 5, parent=addmm, depth=3)
    slices.add("cpu_op", "aten::linear", 40, 5, parent=outer, depth=2)
    slices.add("cpu_op", "aten::linear", 60, 5, parent=step, depth=1)
    slices.kernel(0, 100)
    recorded.add(1, 5, 0x1)  # in the step alone
    recorded.add(2, 12, 0x2)  # in linear
    recorded.add(4, 17, 0x3)  # in addmm, below its runtime call
    recorded.add(8, 20, 0x4)  # in empty, at its very start
    recorded.add(16, 25, 0x5)  # at empty's end: no longer in it
    recorded.add(32, 42, 0x6)  # in the inner linear
    recorded.add(-2, 45, 0x2)  # released in the outer one
    return recorded


def test_traces_of_2021_carry_no_addresses_and_no_totals():
    recorded = nested()
    for row in recorded.rows:
        row |= {"address": None, "allocated_bytes": None, "reserved_bytes": None}
    found = recorded.view()
    curve = curve_of(found)
    assert curve.relative
    assert curve.allocated_bytes == (0, 1, 3, 7, 15, 31, 63, 61)
    for figure in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_recorded_bytes", "peak_before_bytes"):
        assert getattr(curve, figure) is None
    assert curve.start_allocated_bytes is curve.end_allocated_bytes is None
    assert operators_of(found)["aten::linear"].total_allocated_bytes == 62
    assert {row.at_peak_bytes for row in found.operators} == {row.at_peak_bytes for row in found.lines} == {None}
    assert (found.blocks, found.pairs, found.unpaired_allocations) == ((), 0, 0)
    assert any("1.10" in note for note in found.notes)
    assert any("when it began" in note for note in found.notes)


def test_nothing_recorded_is_none():
    slices = Slices()
    slices.add("cpu_op", "aten::mm")
    assert trace_memory.view(Context(tables(slices)).base) is None
    assert trace_memory.view(Context(tables()).base) is None


def test_rows_that_say_nothing():
    recorded = Recorded()
    for missing in ("device", "bytes", "track"):
        recorded.add(5, 1, 0x1)
        recorded.rows[-1][missing] = None
    recorded.add(0, 2, 0x9)
    found = recorded.view()
    assert curve_of(found).events == 1
    assert operators_of(found)[None].self_allocated_bytes == 5


@st.composite
def histories(draw: st.DrawFn) -> tuple[Recorded, list[tuple[int, int]]]:
    """Allocations on a few addresses over random operators; some blocks stood before, some releases come late."""
    early = draw(st.lists(st.integers(1, 1_000), max_size=4))
    recorded = Recorded(before=sum(early))
    for number in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 100))
        name = draw(st.sampled_from(["a", "b", "c"]))
        recorded.slices.add("cpu_op", name, start, draw(st.integers(0, 50)), track=f"1/{number % 3}")
    standing = {-1 - number: size for number, size in enumerate(early)}
    truth = []
    for at in range(draw(st.integers(1, 40))):
        address = draw(st.integers(0, 5) | st.sampled_from(sorted(standing)) if standing else st.integers(0, 5))
        track = f"1/{draw(st.integers(0, 3))}"
        if address in standing:
            recorded.add(-standing.pop(address), at * 3, address + 100, track=track)
        else:
            standing[address] = draw(st.integers(1, 1_000))
            recorded.add(standing[address], at * 3, address + 100, track=track)
        truth.append((sum(standing.values()), sum(size for key, size in standing.items() if key >= 0)))
    return recorded, [(sum(early), 0), *truth]


@given(histories())
@settings(max_examples=150, deadline=None)
def test_parts_at_the_peak_sum_to_it(case: tuple[Recorded, list[tuple[int, int]]]):
    recorded, truth = case
    found = recorded.view()
    curve = curve_of(found)
    peak = max(range(len(truth)), key=lambda at: (truth[at][0], -at))
    assert curve.allocated_bytes == tuple(level for level, _ in truth)
    assert curve.peak_allocated_bytes == truth[peak][0]
    assert curve.peak_recorded_bytes == truth[peak][1]
    assert curve.peak_before_bytes == truth[peak][0] - truth[peak][1]
    assert sum(row.at_peak_bytes or 0 for row in found.operators) == truth[peak][1]
    assert sum(row.at_peak_bytes or 0 for row in found.lines) == truth[peak][1]
    assert sum(block.bytes for block in found.blocks if block.at_peak) == truth[peak][1]
    sizes = [row["bytes"] for row in recorded.rows]
    assert sum(row.self_allocated_bytes for row in found.operators) == sum(size for size in sizes if size > 0)
    assert sum(row.self_increase_bytes for row in found.operators) == sum(sizes)
    assert found.pairs + found.unpaired_allocations == sum(size > 0 for size in sizes)
    assert found.pairs + found.unpaired_releases == sum(size < 0 for size in sizes)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_pairs_are_those_of_a_plain_loop(events: list[tuple[int, bool]]):
    """Any order of events, lost releases and lone ones included."""
    found = pair(np.array([key for key, _ in events], np.int64), np.array([opens for _, opens in events], bool))
    open_blocks: dict[int, int] = {}
    release, lone, unseen = {}, [], 0
    for number, (address, opens) in enumerate(events):
        if opens:
            if address in open_blocks:
                release[open_blocks[address]] = number
                unseen += 1
            open_blocks[address] = number
            release[number] = len(events)
        elif address in open_blocks:
            release[open_blocks.pop(address)] = number
        else:
            lone.append(number)
    assert dict(zip(found.allocation.tolist(), found.release.tolist(), strict=True)) == release
    assert found.lone.tolist() == lone
    assert (found.unseen, found.never) == (unseen, len(events))


@given(
    gaps=st.lists(st.integers(0, 10**12), min_size=1, max_size=300),
    seed=st.integers(0, 2**32 - 1),
    points=st.integers(20, 100),
)
@settings(max_examples=100, deadline=None)
def test_thinning_keeps_the_peaks(gaps: list[int], seed: int, points: int):
    times = T0 + np.cumsum(np.array(gaps, np.int64))
    random = np.random.default_rng(seed)
    levels, reserved = random.integers(-1_000, 1_000, (2, len(times)))
    kept = thinned(times, levels, reserved, points)
    assert len(kept) <= points
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(times) - 1)
    assert int(levels.argmax()) in kept
    assert levels[kept].min() == levels.min()
    assert reserved[kept].max() == reserved.max()
