"""A small trace as torch.profiler writes them on a GPU, for tests of the command line: two steps, known times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

BASE_NS = 1_700_000_000_000_000_000
PROPERTIES = {
    "id": 0,
    "name": "Test GPU",
    "totalGlobalMem": 16 * 2**30,
    "computeMajor": 8,
    "computeMinor": 0,
    "numSms": 100,
    "maxThreadsPerMultiprocessor": 2048,
    "warpSize": 32,
}
STEP_US = 1000


def host(name: str, start: float, duration: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, "args": args}


def launch(start: float, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return host(name, start, 5, "cuda_runtime", correlation=correlation)


def kernel(
    name: str, start: float, duration: float, correlation: int, *, stream: int = 7, category: str = "kernel"
) -> dict[str, Any]:
    args = {
        "device": 0,
        "stream": stream,
        "correlation": correlation,
        "blocks per SM": 0.5,
        "warps per SM": 16.0,
        "grid": [50, 1, 1],
        "block": [256, 1, 1],
        "registers per thread": 32,
        "shared memory": 1024,
        "est. achieved occupancy %": 40,
    }
    place = {"pid": 0, "tid": stream, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


def step(number: int, *, gemm_us: float = 300) -> list[dict[str, Any]]:
    """One step of 1,000 µs: 200 for data, then an operator with a kernel on tensor cores, a copy, a sum."""
    at, first = number * STEP_US, number * 10
    return [
        host(f"ProfilerStep#{number}", at, STEP_US - 10, "user_annotation"),
        host("/app/train.py(7): train", at, STEP_US - 20, "python_function", **{"Python id": number}),
        host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, 200, "user_annotation"),
        host("aten::linear", at + 210, 60, **{"External id": first, "Input Dims": [[64, 32], [32, 8]]}),
        host("aten::mm", at + 220, 40, **{"External id": first + 1, "Input Dims": [[64, 32], [32, 8]]}),
        launch(at + 230, first + 1),
        kernel("ampere_sgemm_h1688_64x64", at + 250, gemm_us, first + 1),
        host("aten::copy_", at + 300, 40, **{"External id": first + 2}),
        launch(at + 310, first + 2, "cudaMemcpyAsync"),
        kernel("Memcpy HtoD (Pinned -> Device)", at + 560, 100, first + 2, category="gpu_memcpy"),
        host("aten::sum", at + 360, 40, **{"External id": first + 3}),
        launch(at + 370, first + 3),
        kernel("void at::native::reduce_kernel<512, 1, float>(float*)", at + 700, 100, first + 3),
        host("cudaStreamSynchronize", at + 420, 400, "cuda_runtime"),
    ]


def write(
    path: Path,
    *,
    steps: int = 2,
    gemm_us: float = 300,
    more: list[dict[str, Any]] | None = None,
    properties: dict[str, Any] | None = None,
) -> Path:
    """The trace as a file; a name that ends in .gz is packed. `properties` are what the device has besides."""
    events = [event for number in range(1, steps + 1) for event in step(number, gemm_us=gemm_us)] + (more or [])
    document = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_NS,
        "deviceProperties": [PROPERTIES | (properties or {})],
        "traceEvents": events,
    }
    data = json.dumps(document).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
