"""Flame graphs: weighted trees of frames, by what was sampled or traced, ready to be drawn."""

from __future__ import annotations

from msgspec import Struct, field


class FlameFrame(Struct, frozen=True):
    """A frame as it is drawn. `kind` decides its colour.

    `file` is named from the root of the user's code, or of its package, on. Where one box stands for all lines of a
    function, `line` is the one sampled most.

    Kinds: "user" (the user's own code), "library", "import", "native", "operator" (of torch, from a trace), "kernel"
    (on a device, from a trace), "wait" (a known wait), "root".
    """

    name: str
    file: str
    line: int | None
    kind: str


class FlameTree(Struct, frozen=True):
    """One tree. Node 0 is the root; parents come before children. Values include what lies below.

    `value` is in `unit`; `base` holds the other side of a difference, node by node (0 where the path is not there), in
    the same unit, and is None outside differences. `source` says where the figures come from.
    """

    key: str  # "all", "phase:forward", "process:workers", "rank:0", "outside", "gpu", ...
    label: str
    unit: str  # "ms per step" | "samples" | "us" | "bytes"
    parent: tuple[int, ...]  # -1 at the root
    frame: tuple[int, ...]  # index into the graph's `frames`
    value: tuple[float, ...]
    base: tuple[float, ...] | None
    source: str
    hidden: float = (
        0.0  # value of paths too thin or too deep to be kept, drawn nowhere; in the root's value all the same
    )


class FlameGraph(Struct, frozen=True):
    """Trees over one list of frames; `notes` say what the reader must know before the picture is believed."""

    title: str
    frames: tuple[FlameFrame, ...]
    trees: tuple[FlameTree, ...]
    notes: tuple[str, ...]
    sides: tuple[str, str] | None = None  # of a difference: (this, what it is compared with)
    source: dict[int, str] = field(default_factory=dict)  # text of the user's lines, by frame, where at hand
