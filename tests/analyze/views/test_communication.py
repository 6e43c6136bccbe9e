"""Collectives: what they carried, how fast, what nothing hides; of several workers who waits for whom."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.analyze.views import communication
from stepscope.engine import spans as base
from stepscope.engine.collective_names import is_collective_kernel, kind_of
from stepscope.engine.spans import Base
from stepscope.model.views import CollectiveRow, Distributed, WorkerShare
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.analyze.traces import Slices, tables
from tests.builders import T0
from tests.run_folders import make_run_folder

BASE_NS = 1_750_000_000_000_000_000
US = 1000
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 13
Rows = list[dict[str, Any]]


class Rank:
    """What one rank writes. `size` None: nothing in the file says which rank of how many it is."""

    def __init__(self, rank: int = 0, size: int | None = None, *, shift_us: float = 0) -> None:
        self.rank = rank
        self.size = size
        self.events: Rows = []
        self.shift_us = shift_us
        self._correlation = 0

    def slice(
        self, category: str, name: str, start: float, length: float, *, thread: int | str = 1, **args: Any
    ) -> None:
        """Any slice; of a device where `thread` names a stream."""
        process: int | str = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 100
        row = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "dur": length, "args": args}
        self.events.append({**row, "ts": start + self.shift_us})

    def step(self, number: int, start: float, length: float) -> None:
        self.slice("user_annotation", f"ProfilerStep#{number}", start, length)

    def kernel(self, name: str, start: float, length: float, *, at: float | None = None, **args: Any) -> None:
        """A kernel, launched at `at` (just before it by default)."""
        self._correlation += 1
        stream = COMMUNICATION_STREAM if "nccl" in name.lower() else COMPUTE_STREAM
        launch = start - 2 if at is None else at
        self.slice("cuda_runtime", "cudaLaunchKernel", launch, 1, correlation=self._correlation)
        known = {"device": 0, "stream": stream, "correlation": self._correlation}
        self.slice("kernel", name, start, length, thread=stream, **known, **args)

    def collective(
        self,
        start: float,
        length: float,
        kind: str = "allreduce",
        *,
        group: str = "0",
        ranks: Sequence[int] | None = (0, 1),
        sequence: int | None = None,
        at: float | None = None,
    ) -> None:
        """A kernel of NCCL with the arguments that newer writers give it; `ranks` None leaves them out."""
        args: dict[str, Any] = {}
        if ranks is not None:
            named = {"Process Group Name": group, "Process Group Ranks": str(list(ranks)), "Group size": len(ranks)}
            count = {"In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
            args = {"Collective name": kind, **count, **named}
        if sequence is not None:
            args["Seq"] = sequence
        self.kernel(f"ncclDevKernel_{kind}(ncclDevKernelArgsStorage<4096ul>)", start, length, at=at, **args)

    def compute(self, start: float, length: float, *, at: float | None = None) -> None:
        self.kernel("gemm", start, length, at=at)

    def write(self, path: Path) -> Path:
        """To a file, packed where its name says so."""
        head: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS}
        if self.size is not None:
            head["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.size}
        data = json.dumps({**head, "traceEvents": self.events}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
        return path


def opened(*paths: Path) -> base.Base:
    """What the views start from, of traces or a run folder."""
    return Context(api.open_run(*paths, options=api.ReadOptions(cache=False)).tables).base


def written(folder: Path, *ranks: Rank) -> base.Base:
    """The ranks in files of one folder, opened."""
    for number, rank in enumerate(ranks):
        rank.write(folder / f"worker{number if rank.size is None else rank.rank}.pt.trace.json")
    return opened(folder)


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


def test_two_collectives_at_once_are_exposed_once():
    trace = Slices()
    trace.kernel(0, 100, NCCL)
    trace.kernel(50, 100, SEND_RECV)
    rows = {row.name: row for row in of(trace)}
    assert (rows["all_reduce"].exposed_ns, rows["send_recv"].exposed_ns) == (100 * US, 50 * US)
    assert (rows["all_reduce"].total_ns, rows["send_recv"].total_ns) == (100 * US, 100 * US)


# --------------------------------------------------------------------------------------------------- missing, odd


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


DDP = Path(__file__).parent / "scripts" / "gloo_ddp.py"
TIMEOUT_S = 120


def seen(folder: Path, *ranks: Rank) -> Distributed:
    found = communication.distributed(written(folder, *ranks))
    assert found is not None
    return found


def refused(*paths: Path) -> str:
    """The reason why there is no view."""
    traces = opened(*paths)
    assert communication.distributed(traces) is None
    return str(communication.why_not_distributed(traces))


def shares(found: Distributed) -> dict[int, WorkerShare]:
    return {worker.span.rank: worker for worker in found.workers}


def talking(
    rank: int, waits: Sequence[float], *, size: int = 4, sequences: Sequence[int] | None = None, **more: float
) -> Rank:
    """A rank with one step per all-reduce, which takes 10 µs after a wait; steps are 100 µs, half of it computation."""
    made = Rank(rank, size, **more)
    for number, wait in enumerate(waits):
        begin = 100.0 * number
        made.step(number, begin, 100)
        made.compute(begin + 10, 50)
        sequence = sequences[number] if sequences is not None else None
        made.collective(begin + 70 - wait, 10 + wait, ranks=range(size), sequence=sequence, at=begin + 5)
    return made


def test_straggler_among_four_ranks_with_one_missing(tmp_path: Path):
    found = seen(tmp_path, *(talking(rank, [0 if rank == 2 else 20] * 3, sequences=[7, 8, 9]) for rank in (0, 1, 2)))
    assert found.missing_ranks == (3,)
    assert (found.matched, found.unmatched) == (3, 0)
    for rank, worker in shares(found).items():
        waits = 0 if rank == 2 else 20
        assert (worker.steps, worker.wall_ns) == (3, 100 * US)
        assert (worker.transferring_ns, worker.synchronizing_ns) == (10 * US, waits * US)
        overlap = 10 if rank != 2 else 0
        assert (worker.computation_ns, worker.overlap_ns) == ((50 - overlap) * US, overlap * US)
        assert worker.communication_ns == (10 + waits - overlap) * US
    (row,) = found.collectives
    assert (row.name, row.calls, row.workers, row.total_bytes, row.last_rank) == ("all_reduce", 3, 3, 12000, 2)
    assert row.transferring_ns == 10 * US
    assert row.mean_ns == row.transferring_ns + row.synchronizing_ns == pytest.approx((30 + 30 + 10) / 3 * US)
    assert any("rank 3" in note for note in found.notes)


def test_clocks_of_hosts_are_not_compared(tmp_path: Path):
    here = seen(tmp_path / "a", talking(0, [5, 0], size=2), talking(1, [0, 9], size=2))
    apart = seen(tmp_path / "b", talking(0, [5, 0], size=2), talking(1, [0, 9], size=2, shift_us=900e6))
    assert here == apart


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"t": (0, 2)}, "one worker"),
        ({"0": (0, 2), "1": (1, 4)}, "different sizes"),
        ({"a": (0, 2), "b": (0, 2)}, "rank 0"),
    ],
)
def test_what_is_no_one_run(tmp_path: Path, files: dict[str, tuple[int, int]], said: str):
    for name, (rank, size) in files.items():
        talking(rank, [1], size=size).write(tmp_path / f"{name}.json")
    assert said in refused(tmp_path)


@pytest.mark.parametrize("size", [None, 2])
def test_same_rank_in_two_folders_is_two_runs(tmp_path: Path, size: int | None):
    for run in ("nccl", "gloo"):
        for rank in range(2):
            made = Rank(rank, size)
            made.collective(0, 10)
            made.write(tmp_path / run / f"worker{rank}.pt.trace.json")
    reason = refused(tmp_path)
    assert "different runs" in reason
    assert "nccl" in reason
    assert communication.distributed(opened(tmp_path / "nccl")) is not None


def test_a_world_too_large_to_be_true_is_not_counted_out(tmp_path: Path):
    for folder, size in (("usual", 2), ("huge", 2**31 - 1)):
        for rank in range(2):
            write(tmp_path / folder / f"{rank}.json", rank, size)
        found = communication.distributed(opened(tmp_path / folder))
        assert found is not None
        assert found.missing_ranks == ()


device_slices = st.lists(st.tuples(st.booleans(), st.integers(0, 90), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(device_slices, min_size=2, max_size=3), st.integers(1, 3))
def test_parts_sum_to_the_step(ranks: list[list[tuple[bool, int, int]]], steps: int):
    made, step_rows = [], []
    for number, rows in enumerate(ranks):
        trace = Slices(rank=number, trace=f"worker{number}.json")
        for step in range(steps):
            begin = 100 * step
            times = {"start_ns": T0 + begin * US, "wall_ns": 97 * US}
            step_rows.append({**times, "step": step, "rank": number, "process": f"rank-{number}", "in_window": True})
            for talks, start, length in rows:
                below = trace.add("cpu_op", "c10d::allreduce_" if talks else "aten::mm", begin + start)
                trace.kernel(begin + start, length, "ncclAllReduce" if talks else "gemm", below=below, step=step)
        made.append(trace)
    found = communication.distributed(Context(tables(*made, steps=step_rows)).base)
    assert (found is not None) == any(talks for rows in ranks for talks, _, _ in rows)
    for worker in found.workers if found is not None else ():
        parts = (worker.computation_ns, worker.overlap_ns, worker.communication_ns, worker.other_ns)
        assert min(parts) >= 0
        assert sum(parts) == worker.wall_ns
        if worker.transferring_ns is not None and worker.synchronizing_ns is not None:
            assert min(worker.transferring_ns, worker.synchronizing_ns) >= 0
            rounding = 1
            matched = worker.transferring_ns + worker.synchronizing_ns
            assert matched <= worker.overlap_ns + worker.communication_ns + rounding


@pytest.mark.torch
@pytest.mark.process
def test_two_processes_with_gloo(tmp_path: Path):
    """A real run on the CPU in which rank 1 comes 30 ms late to each all-reduce."""
    done = subprocess.run(
        [sys.executable, str(DDP), str(tmp_path)], capture_output=True, timeout=TIMEOUT_S, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    traces = opened(tmp_path)
    found = communication.distributed(traces)
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["host_0", "host_1"]
    assert (found.missing_ranks, found.unmatched) == ((), 0)
    late = next(row for row in found.collectives if row.name == "all_reduce")
    assert (late.workers, late.last_rank, late.calls) == (2, 1, 2)
    assert late.group == "default_pg [0, 1]"
    early, straggler = found.workers
    assert early.synchronizing_ns is not None
    assert straggler.synchronizing_ns is not None
    assert early.synchronizing_ns > 20_000 * US > straggler.synchronizing_ns
    reduced = next(row for row in communication.collectives(traces) if row.name == "all_reduce")
    assert (reduced.library, reduced.dtype, reduced.group_size) == ("gloo", "float32", 2)
    assert reduced.message_bytes == 4 * (64 * 64 + 64)


TIMES = (1623143089861, 1623143566756)


def write(path: Path, rank: int = 0, size: int | None = None) -> None:
    made = Rank(rank, size)
    made.collective(0, 10)
    made.write(path)


def names(found: Base) -> list[tuple[str, str, int]]:
    """(run, worker, span) of every trace, in order."""
    return [(span.ref.run, span.ref.worker, span.ref.span) for span in found.spans]


def with_event_files(folder: Path) -> Path:
    """The folder with what SummaryWriter leaves in each folder, and other litter."""
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        (inner / "events.out.tfevents.1623143089.host.1234.0").write_bytes(
            b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"'
        )
        (inner / "projector_config.pbtxt").write_text("embeddings {}")
        (inner / "hparams.json").write_text('{"lr": 0.1}')
    return folder


def test_nested_folders_mixed_with_event_files(tmp_path: Path):
    for run in ("resnet/2024-01-01", "resnet/2024-01-02"):
        for worker in ("host_11", "host_2"):
            for time in TIMES:
                write(tmp_path / "logs" / run / f"{worker}.{time}.pt.trace.json.gz")
    found = opened(with_event_files(tmp_path / "logs"))
    assert names(found) == [
        (run, f"{run}/{worker}", span)
        for run in ("resnet/2024-01-01", "resnet/2024-01-02")
        for worker in ("host_2", "host_11")
        for span in (1, 2)
    ]
    assert "2 folders" in str(communication.why_not_distributed(found))


def test_ranks_that_share_a_name_are_told_apart(tmp_path: Path):
    for rank, time in enumerate(TIMES):
        write(tmp_path / f"worker.{time}.pt.trace.json", rank, 2)
    assert len({span.ref.label for span in opened(tmp_path).spans}) == 2


def test_of_a_rank_that_was_started_again_the_last_process_is_compared(tmp_path: Path):
    for rank in range(2):
        run = make_run_folder(tmp_path, rank=rank, pid=100 + rank)
    for folder, late in (("rank-0", 0), ("rank-1", 0), ("rank-0.2", 1e6), ("rank-1.2", 1e6)):
        made = Rank(shift_us=late)
        made.collective(0, 10)
        made.write(run / folder / "trace-0.pt.trace.json")
    found = communication.distributed(opened(run))
    assert found is not None
    assert [worker.span.worker for worker in found.workers] == ["rank-0.2", "rank-1.2"]
