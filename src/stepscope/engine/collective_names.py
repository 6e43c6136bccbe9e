"""What the names of collectives, their data types and their sizes mean, whoever wrote them.

Kernels are told by name; host calls are the operators and ranges that c10d and its backends write. Sizes follow the
nccl-tests: the larger of a rank's input and output, and bus bandwidth is that size by time, by a factor of the group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

UNKNOWN = "unknown"
MAX_ELEMENTS = 2**40  # of a message; more is damage, and sums of sizes stay whole numbers of 64 bits
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
# Every rank's message has the same size, so calls of different sizes are different calls.
SAME_SIZE = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, "broadcast", "reduce", "barrier"})

_KERNEL_PARTS = (
    *("nccl", "rccl", "hccl", "xccl", "oneccl", "nvshmem", "deep_ep", "deepep", "internode::", "intranode::"),
    *("cross_device_reduce", "quick_reduce", "quickreduce"),
)
_OPERATIONS = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter"),
    *("all_to_all", "alltoall", "all2all"),
)
# An operation is a word of the name ("one_shot_all_reduce", "oneShotAllReduceKernel"), not a piece: "small_gather".
_OPERATION = re.compile(
    r"(?<![A-Za-z])(?i:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all)"
    r"|All_?(?:Reduce|Gather|ToAll|2All)|Reduce_?Scatter"
)
# A fused kernel is named after all it was fused from, the collective beside it included.
_GENERATED = ("triton_",)
_BACKENDS = ("nccl:", "rccl:", "gloo:", "mpi:", "ucc:", "hccl:", "xccl:", "ccl:")
_CALL = re.compile(
    r"(?:nccl|rccl|gloo|mpi|ucc|hccl|xccl|ccl):|record_param_comms$|_?c10d(?:_functional)?(?:_autograd)?::|symm_mem::"
    r"|\w+::_?(?:custom_)?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?!\w*copy)"
)
# Work of these backends runs on the host: the range that names the call is the call itself.
_ON_HOST = ("gloo:", "mpi:", "ucc:")

_LETTERS = re.compile(r"[^a-z0-9]")
_KINDS: tuple[tuple[str, str], ...] = (  # the first that the name holds, without what is no letter
    *((part, ALL_REDUCE) for part in ("allreduce", "crossdevicereduce", "quickreduce")),
    ("reducescatter", REDUCE_SCATTER),
    ("allgather", ALL_GATHER),
    *((part, ALL_TO_ALL) for part in ("alltoall", "all2all")),
    *((part, "broadcast") for part in ("broadcast", "bcast")),
    ("sendrecv", "send_recv"),
    *((part, part) for part in ("barrier", "scatter", "gather", "reduce", "send", "recv")),
    *((part, part) for part in ("dispatch", "combine", "coalesced")),
)
_LIBRARIES = ("nccl", "rccl", "gloo", "hccl", "xccl", "oneccl", "nvshmem", "mpi", "ucc")


class _DataType(Struct):
    bytes: int
    spelled: str  # as c10d, the operators' "Input type" and PyTorch itself spell it


# PyTorch's name, bytes
_TYPES: dict[str, tuple[str, int]] = {
    spelling: (name, kind.bytes)
    for name, kind in msgspec.json.decode(
        Path(__file__).with_name("data_types.json").read_bytes(), type=dict[str, _DataType]
    ).items()
    for spelling in kind.spelled.split()
}
_NAMESPACE = re.compile(r"\s|c10::|at::|torch\.|std::")


def is_collective_kernel(name: str) -> bool:
    """Whether a device slice of this name is a collective, or a part of one."""
    lower = name.lower()
    if any(part in lower for part in _KERNEL_PARTS):
        return not name.startswith(_GENERATED)
    # Names of kernels are long and most are none: the pattern looks at few of them.
    named = any(part in lower for part in _OPERATIONS) and _OPERATION.search(name) is not None
    return named and not name.startswith(_GENERATED)


def is_collective_call(name: str) -> bool:
    """Whether a host slice of this name is a call of a collective: an operator of c10d, a range of its backend."""
    return _CALL.match(name) is not None


def is_backend_range(name: str) -> bool:
    """Whether it is the range a backend writes around a collective ("nccl:all_reduce"); its inputs are the rank's."""
    return name.startswith(_BACKENDS)


def runs_on_host(name: str) -> bool:
    """Whether a host slice of this name is a collective's own work, not the call that starts it."""
    return name.startswith(_ON_HOST)


def kind_of(name: str) -> str | None:
    letters = _LETTERS.sub("", name.lower())
    return next((kind for part, kind in _KINDS if part in letters), None)


def library_of(name: str) -> str | None:
    """The library that a kernel's or range's name tells: "nccl" (of AMD's as well), "gloo" …"""
    lower = name.lower()
    return next((library for library in _LIBRARIES if library in lower), None)


def type_of(name: str) -> tuple[str, int] | None:
    """PyTorch's name of a data type and its size in bytes, None for one that is unknown."""
    return _TYPES.get(_NAMESPACE.sub("", name).lower())


def bus_factor(kind: str, size: int) -> float | None:
    """Bus bandwidth by algorithm bandwidth in a group of `size` ranks, as the nccl-tests define it."""
    if size < 2:
        return None
    if kind == ALL_REDUCE:
        return 2 * (size - 1) / size
    if kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, "gather", "scatter"):
        return (size - 1) / size
    return 1.0 if kind in ("broadcast", "reduce") or kind in POINT_TO_POINT else None


def tensor_bytes(dims: object, types: object) -> list[tuple[str | None, int]]:
    """(type, bytes) of each tensor argument in an operator's "Input Dims" and "Input type", those of unknown type left
    out. A list of tensors, whose type is not written down, gives its number of elements and no type.
    """
    if not isinstance(dims, list) or not isinstance(types, list):
        return []
    found: list[tuple[str | None, int]] = []
    for shape, name in zip(dims, types, strict=False):
        if not isinstance(shape, list) or not shape or not isinstance(name, str):
            continue
        kind, size = type_of(name) or (None, int(name == "TensorList"))
        elements = _elements(shape)
        if elements is not None and size:
            found.append((kind, elements * size))
    return found


def _elements(shape: Sequence[object]) -> int | None:
    """Elements of a shape, or of all shapes in a list of them."""
    if all(isinstance(item, list) for item in shape):
        parts = [_elements(item) if item else 1 for item in shape if isinstance(item, list)]
        count = sum(part for part in parts if part is not None)
        return count if None not in parts and count <= MAX_ELEMENTS else None
    count = 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_ELEMENTS:
            return None
        count *= size
    return count if count <= MAX_ELEMENTS else None
