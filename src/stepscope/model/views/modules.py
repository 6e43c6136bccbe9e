"""Time by nn.Module, as a tree."""

from __future__ import annotations

from msgspec import Struct


class ModuleNode(Struct, frozen=True):
    """A module instance at one place of the call tree (`path` is its way from the root, "ResNet_0/Sequential_1/…").

    Host and device time are of the forward calls, with the modules called below (`total`) or without (`self`); backward
    is what the autograd nodes of its forward operators cost. Summed over calls, threads and streams. Device times are
    None in a trace without work of a device, backward times in one without operators of a backward pass that are
    linked to their forward operators.
    """

    path: str
    name: str  # "Conv2d_3"
    module: str  # "Conv2d"
    depth: int
    calls: int
    calls_per_step: float | None  # of the calls that begin in a step
    host_self_ns: int
    host_total_ns: int
    device_self_ns: int | None
    device_total_ns: int | None
    backward_host_self_ns: int | None
    backward_host_total_ns: int | None
    backward_device_self_ns: int | None
    backward_device_total_ns: int | None
    operators: int  # called directly: by the module's own code, not by another operator or module


class ModuleTree(Struct, frozen=True):
    """Nodes in depth-first order, children in order of total time, the longest first. Self times of the device, forward
    and backward, and `unattributed_device_ns` sum to `device_ns`. Of traces without modules nothing is in it.
    """

    nodes: tuple[ModuleNode, ...]
    device_ns: int | None  # durations of all device slices
    unattributed_device_ns: int | None  # launched by no module
    backward_linked_share: float | None  # of the backward operators' host time, what reached a module
    steps: int | None  # of the traces
