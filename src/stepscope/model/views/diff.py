"""Two spans, traces or runs side by side."""

from __future__ import annotations

from msgspec import Struct


class DiffRow(Struct, frozen=True):
    """One thing on both sides; None where one side has none. Delta is other minus base, nothing counting as 0; ratio is
    other over base.

    `ns` is time of the step in the overview, self time of the host for operators, time on the host for modules and the
    tree (with all below; forward and backward for modules), and time of the device for kernels.
    `device_ns` is self device time for operators, device time with all below for modules and the tree.
    """

    key: str
    level: int  # depth in the tree, 0 in a flat table
    base_calls: float | None  # like `ns`
    other_calls: float | None
    base_ns: float | None  # per step, where steps are known on both sides; else plain
    other_ns: float | None
    delta_ns: float
    ratio: float | None
    base_device_ns: float | None
    other_device_ns: float | None
    device_delta_ns: float | None  # None where neither side has device time


class Diff(Struct, frozen=True):
    """`tables` by name: "overview" (the step and our parts of it), "tensorboard" (its parts as the plugin had them),
    "operators", "kernels", "modules", with rows by falling |delta| of host or device, whichever is larger; and "tree"
    (structure of steps: loader, modules, backward, optimizer, matched in order) in its own order. `absent`: a table to
    why it is not there.
    """

    base: str
    other: str
    per_step: bool
    base_steps: int | None
    other_steps: int | None
    tables: dict[str, tuple[DiffRow, ...]]
    absent: dict[str, str]
    notes: tuple[str, ...]
