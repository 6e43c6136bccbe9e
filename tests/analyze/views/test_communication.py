"""Collectives of one rank: what they carried, how fast, and what of their time nothing else hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import communication
from stepscope.engine.collective_names import is_collective_call, is_collective_kernel, kind_of
from stepscope.model.views import CollectiveRow
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.analyze.traces import Slices, tables
from tests.analyze.views.collective_traces import US, Rank, opened, written

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"


def of(*traces: Slices) -> tuple[CollectiveRow, ...]:
    return communication.collectives(Context(tables(*traces)).base)


def one(*traces: Slices) -> CollectiveRow:
    (row,) = of(*traces)
    return row


def around(trace: Slices, *calls: tuple[str, str, Any, Any], kernel: str, **args: Any) -> None:
    """A kernel below nested host slices (category, name, dims, types), the outermost first."""
    parent = None
    for category, name, dims, types in calls:
        texts = {"shapes": dims and json.dumps(dims), "types": types and json.dumps(types)}
        parent = trace.add(category, name, 0, 5, parent=parent, **texts)
    assert parent is not None
    trace.kernel(10, 100, kernel, below=parent, **args)


def arguments(**more: Any) -> dict[str, Any]:
    usual = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
    group = {"Group size": 4, "Process Group Name": "7", "Process Group Ranks": "[0, 1, 2, 3]"}
    return {**usual, **group, **more}


def with_arguments(**more: Any) -> CollectiveRow:
    trace = Slices()
    trace.kernel(0, 100, NCCL, below=trace.add("cpu_op", "record_param_comms"))
    trace.events[-1]["collective"] = json.dumps(arguments(**more))
    return one(trace)


@pytest.mark.parametrize(
    ("kind", "name", "sent", "got", "size", "factor"),
    [
        ("allreduce", "all_reduce", 8, 8, 8, 2 * 3 / 4),
        ("allreduce_coalesced", "all_reduce", 8, 8, 8, 2 * 3 / 4),
        ("_allgather_base", "all_gather", 8, 32, 32, 3 / 4),
        ("all_gather_into_tensor_coalesced", "all_gather", 8, 32, 32, 3 / 4),
        ("_reduce_scatter_base", "reduce_scatter", 32, 8, 32, 3 / 4),
        ("all_to_allv", "all_to_all", 8, 16, 16, 3 / 4),
        ("broadcast", "broadcast", 8, 8, 8, 1),
        ("reduce", "reduce", 8, 8, 8, 1),
        ("gather", "gather", 8, 32, 32, 3 / 4),
        ("send", "send", 8, 0, 8, 1),
        ("barrier", "barrier", 1, 1, 1, None),
    ],
)
def test_size_and_bus_bandwidth_follow_the_nccl_tests(
    kind: str, name: str, sent: int, got: int, size: int, factor: float | None
):
    row = with_arguments(**{"Collective name": kind, "In msg nelems": sent, "Out msg nelems": got})
    assert (row.name, row.message_bytes) == (name, 4 * size)
    assert row.algorithm_bytes_per_s is not None
    expected = None if factor is None else pytest.approx(row.algorithm_bytes_per_s * factor)
    assert row.bus_bytes_per_s == expected


def test_unknown_type_gives_no_size_and_no_bandwidth():
    row = with_arguments(dtype="Quantum")
    assert (row.dtype, row.message_bytes, row.total_bytes) == ("Quantum", None, None)
    assert (row.algorithm_bytes_per_s, row.bus_bytes_per_s) == (None, None)


def test_output_of_all_gather_is_its_size():
    trace = Slices()
    around(
        trace,
        ("cpu_op", "c10d::_allgather_base_", [[64], [16], []], ["c10::BFloat16", "c10::BFloat16", ""]),
        ("user_annotation", "nccl:_all_gather_base", [[16]], ["c10::BFloat16"]),
        kernel="ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)",
    )
    assert (one(trace).name, one(trace).message_bytes) == ("all_gather", 128)
    alone = Slices()
    around(alone, ("user_annotation", "nccl:all_gather", [[16]], ["float"]), kernel="ncclKernel_AllGather_RING")
    assert (one(alone).dtype, one(alone).message_bytes) == ("float32", None)  # of how many ranks is not known


def test_lists_of_tensors_have_the_type_of_the_range():
    trace = Slices()
    around(
        trace,
        ("cpu_op", "c10d::allreduce_", [[[10], [2, 5]], []], ["TensorList", ""]),
        ("user_annotation", "nccl:all_reduce", [[20]], ["c10::Half"]),
        kernel=NCCL,
    )
    assert (one(trace).dtype, one(trace).message_bytes) == ("float16", 40)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", None),
        ("void vllm::cross_device_reduce_1stage<__hip_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>", "all_reduce"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "dispatch"),
        ("nvshmemi_barrier_all_kernel", "barrier"),
        ("hcclAllReduceRing", "all_reduce"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 4>", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>", "all_reduce"),
    ],
)
def test_kernels_of_collectives(name: str, kind: str | None):
    assert is_collective_kernel(name)
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "triton_poi_fused_add_all_reduce_wait_tensor_0",
        "void at::native::vectorized_gather_kernel<16, long>",
        "ampere_sgemm_128x64_tn",
        "void small_gather_kernel<float>(float*, long)",
    ],
)
def test_other_kernels_are_none(name: str):
    assert not is_collective_kernel(name)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("nccl:all_reduce", True), ("gloo:broadcast", True), ("c10d::allreduce_", True)),
        *(("record_param_comms", True), ("_c10d_functional::all_gather_into_tensor", True)),
        *(("symm_mem::multimem_all_reduce_", True), ("_C_custom_ar::all_reduce", True), ("vllm::all_reduce", True)),
        *(("fsdp::all_gather_copy_in", False), ("aten::_scaled_mm", False), ("aten::gather", False)),
    ],
)
def test_host_calls_of_collectives(name: str, call: bool):
    assert is_collective_call(name) is call


def test_two_collectives_at_once_are_exposed_once():
    trace = Slices()
    trace.kernel(0, 100, NCCL)
    trace.kernel(50, 100, SEND_RECV)
    rows = {row.name: row for row in of(trace)}
    assert (rows["all_reduce"].exposed_ns, rows["send_recv"].exposed_ns) == (100 * US, 50 * US)
    assert (rows["all_reduce"].total_ns, rows["send_recv"].total_ns) == (100 * US, 100 * US)


# --------------------------------------------------------------------------------------------------- missing, odd


def test_calls_without_device_work_are_no_rows(tmp_path: Path):
    rank = Rank(0)
    rank.slice("user_annotation", "nccl:all_reduce", 0, 10, **{"Input Dims": [[8]], "Input type": ["float"]})
    found = written(tmp_path, rank)
    assert communication.collectives(found) == ()
    assert "record" in str(communication.why_absent(found))


def test_no_collective_has_a_reason(tmp_path: Path):
    rank = Rank(0)
    rank.compute(0, 10)
    found = written(tmp_path, rank)
    assert communication.collectives(found) == ()
    assert communication.why_absent(found)


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(arguments(Seq=1))), odd), odd, odd)
def test_odd_arguments_never_raise(values: dict[str, Any], dims: Any, types: Any):
    trace = Slices()
    around(trace, ("cpu_op", "c10d::allreduce_", [dims], [types]), kernel=NCCL)
    trace.events[-1]["collective"] = json.dumps(values)
    (row,) = of(trace)
    assert row.calls == 1
    assert row.message_bytes is None or row.message_bytes >= 0


@needs_traces
@pytest.mark.parametrize(
    ("name", "total_us", "exposed_us", "sized"),
    [
        ("hta/nccl_parser_config/nccl_data.json.gz", 46876.493, 39529.327, 1.0),
        ("hta/df_index_resolver/df_index_resolver.json.gz", 357343, 357343, 0.0),
        ("tracelens/b200/eager_trace.json.gz", 21.953, 21.953, 1.0),
    ],
)
def test_figures_of_the_peers(name: str, total_us: float, exposed_us: float, sized: float):
    rows = [row for row in communication.collectives(opened(TRACES / name)) if row.library == "nccl"]
    assert sum(row.total_ns for row in rows) / US == pytest.approx(total_us, abs=1)
    assert sum(row.exposed_ns for row in rows) / US == pytest.approx(exposed_us, abs=1)
    assert sum(row.total_ns for row in rows if row.total_bytes) / US == pytest.approx(sized * total_us, abs=1)
