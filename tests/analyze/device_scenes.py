"""Profiled steps with device work, written out slice by slice, for the tests of what devices lose time to.

Times are microseconds from the start of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stepscope.tables.schema import Tables
from tests.analyze.traces import US, Slices, tables
from tests.builders import T0, rank_info

V100 = {"id": 0, "name": "Tesla V100", "computeMajor": 7, "computeMinor": 0, "totalGlobalMem": 34_089_730_048}
A100 = {**V100, "name": "NVIDIA A100", "computeMajor": 8}
P100 = {**V100, "name": "Tesla P100", "computeMajor": 6}
SGEMM, TENSOR = "volta_sgemm_128x64_nn", "volta_h884gemm_128x128_ldg8_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"
FILE = "/home/user/project/train.py"
PAGEABLE_IN, PINNED_IN = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
WITHIN, BETWEEN = "Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)"
PAGEABLE_OUT = "Memcpy DtoH (Device -> Pageable)"


class Scene:
    """One trace. `step` adds a profiled step; what is added next lies in it, with times from its start."""

    def __init__(self) -> None:
        self.slices = Slices()
        self.steps: list[dict[str, Any]] = []
        self.at = 0.0
        self._main = 0

    def step(self, length: float, line: str = "train.py(10): train") -> None:
        """A step of `length` behind the last one, in which a function of the user's runs throughout."""
        self.at = sum(row["wall_ns"] for row in self.steps) / US
        number = len(self.steps) + 1
        wall = round(length * US)
        self.steps.append({"step": number, "start_ns": T0 + round(self.at * US), "wall_ns": wall, "in_window": True})
        self._main = self.slices.add("python_function", line, self.at, length)

    def op(self, name: str, start: float, length: float, below: int | None = None, **columns: Any) -> int:
        """An operator of the host."""
        parent = self._main if below is None else below
        return self.slices.add("cpu_op", name, self.at + start, length, parent=parent, **columns)

    def python(self, name: str, start: float, length: float) -> int:
        """A function of a library."""
        return self.slices.add("python_function", name, self.at + start, length, parent=self._main)

    def mark(self, name: str, start: float, length: float) -> int:
        """A range as torch marks its optimizers."""
        return self.slices.add("user_annotation", name, self.at + start, length, parent=self._main)

    def call(self, name: str, start: float, length: float, below: int | None = None) -> int:
        """A call of the runtime."""
        return self.slices.add(
            "cuda_runtime", name, self.at + start, length, parent=self._main if below is None else below
        )

    def work(
        self,
        name: str,
        start: float,
        length: float,
        *,
        launch: int | None,
        op: int | None = None,
        category: str = "kernel",
        stream: int = 7,
        **columns: Any,
    ) -> int:
        """A slice of the device that call `launch` below operator `op` launched."""
        columns.setdefault("device", 0)
        number = self.slices.add(category, name, self.at + start, length, track=f"0/{stream}", stream=stream, **columns)
        self.slices.links.append(
            {
                "process": "rank-0",
                "trace": self.slices.events[0]["trace"],
                "event": number,
                "launch": launch,
                "operator": op,
                "method": "correlation",
                "state": "linked" if op is not None else "unlinked",
            }
        )
        return number

    def kernel(
        self,
        name: str,
        start: float,
        length: float,
        *,
        op: str = "aten::mm",
        launched: float = 5,
        below: int | None = None,
        shapes: str | None = None,
        types: str | None = None,
        **columns: Any,
    ) -> int:
        """A kernel that an operator launched `launched` before its start; both end there."""
        operator = self.op(op, start - launched, launched, below, shapes=shapes, types=types)
        launch = self.call("cudaLaunchKernel", start - launched / 2, launched / 2, operator)
        return self.work(name, start, length, launch=launch, op=operator, **columns)

    def tables(self, *gpus: dict[str, Any], **more: Any) -> Tables:
        """Of a run on a GPU; `gpus` are the devices that the trace tells of."""
        metadata = json.dumps({"deviceProperties": list(gpus)})
        more.setdefault("ranks", [rank_info(device="cuda")])
        return tables(self.slices, steps=self.steps, quality={"metadata": metadata}, **more)


def repeated(steps: int, length: float, fill: Callable[[Scene], Any]) -> Scene:
    """`steps` equal steps, each filled by `fill`."""
    scene = Scene()
    for _ in range(steps):
        scene.step(length)
        fill(scene)
    return scene


def reads_value(scene: Scene, *, python: float = 100) -> None:
    """A step of 400: the device works for 200, the host reads a value and prepares for `python` before it launches."""
    scene.kernel(SGEMM, 10, 200)
    item = scene.op("aten::item", 20, 195)
    copy = scene.call("cudaMemcpyAsync", 25, 186, item)
    scene.work(PAGEABLE_OUT, 210, 2, launch=copy, op=item, category="gpu_memcpy", bytes=4)
    scene.call("cudaStreamSynchronize", 212, 3, item)
    scene.kernel(SGEMM, 215 + python, 400 - 215 - python)


def short_launches(
    scene: Scene,
    *,
    count: int = 30,
    gap: float = 30,
    length: float = 2,
    name: str = ADD,
    op: str = "aten::add_",
    **kernel: Any,
) -> None:
    """`count` kernels, each launched long after the one before it has ended."""
    for number in range(count):
        scene.kernel(name, 10 + number * (gap + length), length, op=op, **kernel)


def updates(scene: Scene, *, optimizer: str = "Adam", op: str = "aten::add_", count: int = 30, name: str = ADD) -> None:
    """A step of 1000 in an optimizer that launches `count` kernels."""
    scene.mark(f"Optimizer.step#{optimizer}.step", 0, 990)
    short_launches(scene, op=op, count=count, name=name)


def zeros(scene: Scene) -> None:
    """A step of 1000 that sets gradients to zero one by one."""
    scene.mark("Optimizer.zero_grad#SGD.zero_grad", 0, 990)
    short_launches(scene, op="aten::zero_")


def compiled(scene: Scene, *, name: str = ADD) -> None:
    """A step of 1000 in a compiled function that launches 30 kernels."""
    short_launches(scene, name=name, below=scene.op("CompiledFunction", 1, 989))


def small_batch(scene: Scene, *, blocks: float = 0.2, shapes: str = "[[4, 16, 8], [8, 8]]") -> None:
    """A step of 1000 with 30 layers whose kernels have `blocks` for each multiprocessor."""
    short_launches(scene, op="aten::linear", shapes=shapes, blocks_per_sm=blocks)


def odd_sizes(scene: Scene, *, shapes: str = "[[130, 64], [64, 64]]", kind: str = "c10::BFloat16") -> None:
    """A step of 1000, 800 of them in a product of 130 x 64 x 64 in tiles of 128 x 64."""
    types = f'["{kind}", "{kind}"]'
    scene.kernel("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", 10, 800, shapes=shapes, types=types)


def decompositions(scene: Scene, *, length: float = 2, blocks: float = 0.1) -> None:
    """A step of 1000 with a QR of 30 matrices, one kernel for each, and a wait in it."""
    qr = scene.op("aten::linalg_qr", 5, 960, shapes="[[30, 3, 3], []]")
    for number in range(30):
        scene.kernel("geqr2_smem", 10 + number * 32, length, op="aten::geqrf", below=qr, blocks_per_sm=blocks)
    scene.call("cudaStreamSynchronize", 942, 20, qr)


def replicas(scene: Scene, *, device: int = 1) -> None:
    """A step of 1000 in which DataParallel replicates the model to `device` for 300 and idles for 100."""
    scene.python("torch/nn/parallel/data_parallel.py(174): forward", 0, 990)
    frame = scene.python("torch/nn/parallel/replicate.py(80): replicate", 5, 395)
    operator = scene.op("Broadcast", 8, 9, frame)
    call = scene.call("cudaMemcpyPeerAsync", 10, 5, operator)
    scene.work(BETWEEN, 110, 300, launch=call, op=operator, category="gpu_memcpy", bytes=3_000_000)
    scene.kernel(TENSOR, 410, 500, device=device)


def copies_within(scene: Scene, name: str | None = None) -> None:
    """A step of 1000 with a copy of 300 behind a product."""
    scene.kernel(TENSOR, 10, 500)
    clone = scene.op("aten::clone", 20, 20)
    call = scene.call("cudaMemcpyAsync", 25, 5, clone)
    scene.work(name or WITHIN, 510, 300, launch=call, op=clone, category="gpu_memcpy", bytes=3_000_000)


def batch_copies(scene: Scene, name: str = PAGEABLE_IN, *, wait: bool = True) -> None:
    """A step of 1000 that copies its batch for 300 before it works; from pageable memory the call itself takes as long.

    `wait`: the operator waits for the copy, as without non_blocking=True.
    """
    to = scene.op("aten::to", 5, 312)
    at_once = name == PINNED_IN
    call = scene.call("cudaMemcpyAsync", 10, 5 if at_once else 302, to)
    scene.work(name, 12, 300, launch=call, op=to, category="gpu_memcpy", bytes=3_000_000)
    begin = 16 if at_once else 313
    if wait:
        scene.call("cudaStreamSynchronize", begin, 316 - begin, to)
    scene.kernel(SGEMM, 330, 600, launched=325 if at_once and not wait else 5)


def made_tensors(scene: Scene, *, name: str = "aten::randn", count: int = 1, length: float = 4000) -> None:
    """A step of 10 ms in which operators of the host, `count` of `length`, make what is copied next."""
    scene.kernel(SGEMM, 10, 1000)
    for number in range(count):
        scene.op(name, 1100 + number * (length + 20), length)
    for begin in (5200, 5700):
        to = scene.op("aten::to", begin, 420)
        call = scene.call("cudaMemcpyAsync", begin + 10, 400, to)
        scene.work(PAGEABLE_IN, begin + 50, 350, launch=call, op=to, category="gpu_memcpy", bytes=2_000_000)
    scene.kernel(SGEMM, 6200, 3700)


def allocations(scene: Scene) -> None:
    """A step of 1000 that frees and gets device memory while the device idles."""
    scene.kernel(SGEMM, 10, 300)
    empty = scene.op("aten::empty", 320, 210)
    scene.call("cudaFree", 325, 100, empty)
    scene.call("cudaMalloc", 425, 100, empty)
    scene.kernel(SGEMM, 540, 400)


def gives_back(scene: Scene, *, call: str = "cudaFree", below: str = "", again: str = "cudaMalloc") -> None:
    """A step of 1000 that waits for its device, frees for 200 and gets memory for 100.

    In `empty_cache()`, or where an operator `below` that frees finds no room for its result.
    """
    scene.kernel(SGEMM, 10, 300)
    function = "torch/cuda/memory.py(212): empty_cache"
    freeing = scene.op(below, 20, 510) if below else scene.python(function, 20, 510)
    scene.call("cudaDeviceSynchronize", 25, 287, freeing)
    scene.call(call, 313, 100, freeing)
    scene.call(call, 420, 100, freeing)
    empty = scene.op("aten::empty", 540, 110)
    scene.call(again, 545, 100, empty)
    scene.kernel(SGEMM, 660, 330)


def host_work(scene: Scene) -> None:
    """A step of 10 ms in which the host sorts for 6 ms and launches nothing."""
    scene.kernel(SGEMM, 10, 1000)
    scene.op("aten::sort", 1100, 6000)
    scene.kernel(SGEMM, 7150, 2800)


def products(scene: Scene, name: str = SGEMM) -> None:
    """A step of 1000, 800 of them in one product."""
    scene.kernel(name, 10, 800)
    scene.kernel(ADD, 810, 150, op="aten::add", launched=100)


def attention(scene: Scene, *, softmax: str = "aten::_softmax", product: str = "aten::bmm") -> None:
    """A step of 1000 with an attention whose parts between the products take 500."""
    at = 10.0
    for op, name, length in (
        (product, TENSOR, 100.0),
        ("aten::mul", ADD, 150.0),
        (softmax, "cunn_SoftMaxForward", 350.0),
        (product, TENSOR, 100.0),
        ("aten::add", ADD, 100.0),
    ):
        scene.kernel(name, at, length, op=op)
        at += length


def conversions(scene: Scene) -> None:
    """A step of 1000 with two conversions of 150 each around a convolution."""
    for name, start, length in (
        ("void cudnn::ops::nchwToNhwcKernel<float>", 10, 150),
        ("sm80_xmma_fprop_implicit_gemm", 160, 500),
        ("void cudnn::ops::nhwcToNchwKernel<float>", 660, 150),
    ):
        scene.kernel(name, start, length, op="aten::cudnn_convolution")


def converted_inputs(scene: Scene) -> None:
    """A step of 1000 with three convolutions, the first of which copies its input into another layout for 300."""
    at = 10.0
    for number in range(3):
        convolution = scene.op("aten::conv2d", at - 6, 6)
        inner = scene.op("aten::cudnn_convolution", at - 6, 6, convolution)
        if not number:
            contiguous = scene.op("aten::contiguous", at - 6, 3, inner)
            copy = scene.op("aten::copy_", at - 6, 3, contiguous)
            call = scene.call("cudaLaunchKernel", at - 5, 1, copy)
            scene.work("void elementwise_kernel<direct_copy_kernel_cuda>", at, 300, launch=call, op=copy)
            at += 300
        call = scene.call("cudaLaunchKernel", at - 2 if number else at - 302, 1, inner)
        scene.work("sm80_xmma_fprop_implicit_gemm", at, 200, launch=call, op=inner)
        at += 200


def pointwise_run(scene: Scene, *, op: str = "aten::mul") -> None:
    """A step of 1000 with a product of 400 and a run of five pointwise kernels of 100 behind it."""
    scene.kernel(TENSOR, 10, 400)
    for number in range(5):
        scene.kernel(ADD, 410 + 100 * number, 100, op=op)
