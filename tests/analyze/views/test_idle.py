"""Why devices are idle: what the training thread did meanwhile; and the same of a trace without a device."""

from __future__ import annotations

import pytest

from stepscope.model.views import HOST
from tests.analyze.traces import Slices
from tests.analyze.views.stepped import DATALOADER, overview_of, step, used

CONVERT = "torch/_dynamo/convert_frame.py(631): __call__"
IDLE = {
    "idle_data": [
        ("user_annotation", DATALOADER),
        ("python_function", "torch/utils/data/dataloader.py(700): __next__"),
    ],
    "idle_sync": [
        ("cuda_runtime", "cudaDeviceSynchronize"),
        ("cuda_runtime", "cudaStreamSynchronize"),
        ("cuda_runtime", "hipEventSynchronize"),
        ("cuda_runtime", "cudaMemcpy"),
        ("cuda_driver", "cuCtxSynchronize"),
    ],
    "idle_compile": [
        ("python_function", CONVERT),
        ("python_function", "torch/_inductor/compile_fx.py(788): compile_fx_inner"),
        ("python_function", "triton/compiler/compiler.py(226): compile"),
        ("cpu_op", "CachingAutotuner.benchmark_all_configs (dynamo_timed)"),
        ("cuda_driver", "cuModuleLoadData"),
    ],
    "idle_allocator": [("cuda_runtime", "cudaMalloc"), ("cuda_runtime", "cudaFree"), ("cuda_runtime", "cudaHostAlloc")],
    "idle_launch": [
        ("cuda_runtime", "cudaLaunchKernel"),
        ("cuda_driver", "cuLaunchKernelEx"),
        ("cuda_runtime", "cudaMemcpyAsync"),
        ("cuda_runtime", "hipGraphLaunch"),
    ],
    "idle_io": [
        ("python_function", "<built-in function open>"),
        ("python_function", "<built-in method write of _io.BufferedWriter object at 0x7f00>"),
        ("python_function", "torch/serialization.py(950): save"),
    ],
    "idle_operators": [("cpu_op", "aten::mm")],
    "idle_python": [
        ("python_function", "train.py(10): train"),
        # code that torch.compile has made, and what leads to it, runs in every step
        ("python_function", "torch/_dynamo/eval_frame.py(830): compile_wrapper"),
        ("python_function", "torch/_inductor/utils.py(3300): run"),
    ],
    "idle_unknown": [("user_annotation", "my region")],
}


@pytest.mark.parametrize(("part", "category", "name"), [(part, *kind) for part in IDLE for kind in IDLE[part]])
def test_what_the_host_did_while_the_device_was_idle(part: str, category: str, name: str) -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): <module>", 0, 20)
    trace.add(category, name, 20, 50)
    trace.kernel(60, 40)
    (only,) = overview_of(trace, step(1, 0, 100)).steps
    expected = {"compute": 40.0, "idle_python": 20.0}
    expected[part] = expected.get(part, 0) + 40
    assert used(only.parts_ns) == expected


# ------------------------------------------------------------------------------------------- without a device


def test_a_trace_without_a_device_is_split_by_what_the_host_did() -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): <module>", 0, 90)
    trace.add("user_annotation", DATALOADER, 0, 10)
    trace.add("cpu_op", "aten::conv2d", 10, 20)
    trace.add("cpu_op", "aten::mkldnn_convolution", 11, 18)
    trace.add("cpu_op", "aten::addmm", 30, 10)
    trace.add("cpu_op", "aten::scaled_dot_product_attention", 40, 5)
    trace.add("cpu_op", "aten::native_layer_norm", 45, 5)
    trace.add("cpu_op", "aten::relu", 50, 5)
    trace.add("cpu_op", "aten::copy_", 55, 5)
    trace.add("user_annotation", "Optimizer.step#SGD.step", 60, 10)
    trace.add("cpu_op", "aten::add_", 62, 6)
    trace.add("user_annotation", "gloo:all_reduce", 50, 30, track="1/9")  # beside relu, copies and the optimizer
    found = overview_of(trace, step(1, 0, 100))
    assert found.basis == HOST
    (only,) = found.steps
    assert used(only.parts_ns) == {
        "host_data": 10,
        "host_convolution": 20,
        "host_matmul": 10,
        "host_attention": 5,
        "host_normalization": 5,
        "host_optimizer": 6,
        "host_copies": 5,
        "host_operators": 5,
        "host_communication": 14,
        "host_python": 10,
        "host_unknown": 10,
    }
