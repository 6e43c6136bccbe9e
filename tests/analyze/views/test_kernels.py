"""The kernel table: durations, weights, launches, who launched them; and the TensorBoard plugin's figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepscope.analyze.views import kernels
from tests.analyze import shared_traces
from tests.analyze.traces import tables
from tests.analyze.views.module_traces import US, Nested, base_of

PLUGIN = shared_traces.SHARED / "oracles" / "tb_plugin.json"
ORACLE: dict[str, Any] = json.loads(PLUGIN.read_text()) if PLUGIN.is_file() else {}


def kernel(trace: Nested, number: int, **columns: Any) -> None:
    trace.events[number].update(columns)


def test_several_devices_and_spans() -> None:
    made = []
    for rank in range(2):
        trace = Nested(rank=rank, trace=f"worker{rank}.pt.trace.json")
        kernel(trace, trace.kernel(0, 10 + rank, "gemm"), device=rank)
        made.append(trace)
    base = base_of(tables(*made))
    (row,) = kernels.table(base)
    assert (row.calls, row.device, row.max_ns) == (2, None, 11 * US)
    (alone,) = kernels.table(base, span=base.spans[1].ref)
    assert (alone.calls, alone.device, alone.share) == (1, 1, 1)
    (chosen,) = kernels.table(base, device=0)
    assert (chosen.calls, chosen.max_ns) == (1, 10 * US)
    assert kernels.table(base, device=5) == ()


def test_a_kernel_without_a_name() -> None:
    trace = Nested()
    operator = trace.operator("aten::mm", 0, 10)
    kernel(trace, trace.kernel(0, 10, below=operator, operator=operator), name=None)
    trace.kernel(20, 5, "gemm", below=operator, operator=operator)
    base = base_of(trace.tables())
    assert [(row.name, row.operator, row.total_ns) for row in kernels.table(base)] == [
        ("", "aten::mm", 10 * US),
        ("gemm", "aten::mm", 5 * US),
    ]
    assert len(kernels.table(base, by="launch")) == 2


def test_no_kernels() -> None:
    trace = Nested()
    trace.operator("aten::mm", 0, 10)
    assert kernels.table(base_of(trace.tables())) == ()
    assert kernels.table(base_of(tables())) == ()


@shared_traces.needs_traces
@pytest.mark.parametrize("run", ["resnet50_num_workers_0", "resnet50_num_workers_4"])
def test_figures_of_the_tensorboard_plugin(run: str) -> None:
    base = base_of(shared_traces.run_of(f"kineto_tb_plugin/{run}").tables)
    for span in base.spans:
        ours = kernels.plugin_kernels(kernels.table(base, span=span.ref))
        wanted = ORACLE[f"{run}/{span.ref.label}"]["top_kernels"]
        assert [list(row.values()) for row in ours[: len(wanted)]] == wanted
        assert list(ours[0]) == [
            *("Name", "Tensor Cores Used", "Calls", "Total Duration (us)", "Mean Duration (us)", "Max Duration (us)"),
            *("Min Duration (us)", "Mean Blocks Per SM", "Mean Est. Achieved Occupancy (%)"),
        ]


@shared_traces.needs_traces
@pytest.mark.parametrize("name", shared_traces.files())
def test_every_kernel_is_in_the_table_once(name: str) -> None:
    base = base_of(shared_traces.run_of(name).tables)
    for span in base.spans:
        by_name, by_launch = (kernels.table(base, span=span.ref, by=by) for by in ("name", "launch"))
        assert sum(row.calls for row in by_name) == sum(row.calls for row in by_launch)
        assert sum(row.total_ns for row in by_name) == sum(row.total_ns for row in by_launch)
        assert len({row.short_name for row in by_name}) == len(by_name)
        if by_name:
            assert sum(row.share for row in by_name) == pytest.approx(1)
        for row in by_name:
            assert row.min_ns <= row.mean_ns <= row.max_ns
