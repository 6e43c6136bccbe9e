"""Sampled stacks become paths of one tree, and what a stack's frames say together becomes a few bits.

Frames are looked at once each, and a path that was met before costs one lookup per frame. Frames of this package are
left out, and what they call in the standard library; its wrappers hand over to the code they stand around. A loader
worker's path begins at its worker loop, any other child's at the last `Process.run`. A loader's `__next__` wins over
everything inside it; of backward and optimizer the inner one wins, and both over a forward inside them, as in the
journal; but the closure that an optimizer of torch's calls is the forward pass.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.raw import Frame, FrameNames
from stepscope.tables import phases
from stepscope.tables.arrays import NONE
from stepscope.tables.schema import SCHEMAS

MAX_NODES = 2_000_000  # some 400 MB; files of a gigabyte hold about half of it
_PATH_LEFT_OUT = Frame("(one of too many different call paths)", "", None)

# What a frame says by itself; a stack's bits are those of its frames, but for what `add` takes back.
OWN, OWN_WORK, ELSEWHERE, HELPER, WORKER = 1, 2, 4, 8, 16
DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, IMPORT, COMPILE = 32, 64, 128, 256, 512, 1024
_RUN = 2048  # `Process.run` of multiprocessing
TORN, LEAF_OWN, FROM_THREAD, FROM_MODULE, LEFT_OUT = 4096, 8192, 16384, 32768, 65536
STANDARD, HANDS_OVER = 262144, 524288  # the standard library; a frame of ours that calls the run's own code
IN_TORCH, UPDATE = 1048576, 2097152  # torch itself; the `step` of one of its optimizers
CLOSURE = 4194304  # below a closure that an optimizer calls
IMPORTING = 131072  # no phase begins below the import: a script that trains while it is imported does not import
_MARKED = DATA_WAIT | FORWARD | BACKWARD | OPTIMIZER
_BELOW_FORK = _MARKED | IMPORT | COMPILE | IMPORTING  # what the parent of a forked child did says nothing of the child
_SPECIAL = STANDARD | OWN | OWN_WORK | WORKER | _RUN | _MARKED  # more than a bit to add

_OWN_PACKAGE = f"{Path(__file__).parents[1]}/"
_OWN_PARTS = ("/stepscope/record/agent/",)  # the recorder may live in another environment than this reader
# Windows open and export on the training thread, between steps: none of the user's lines is to blame for that.
_OWN_WORK = "/stepscope/record/agent/window"
_HANDS_OVER = (
    "/stepscope/record/agent/wrapper_importlib_bootstrap.py",
    "/stepscope/record/agent/probes/wrapper_importlib_bootstrap.py",  # where it was in runs of earlier versions
    "/stepscope/record/agent/imports.py",
)
_IN_TORCH = re.compile(r"(^|/)torch/")
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python\d+(\.\d+)?t?/(?!site-packages/|dist-packages/)")
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
_PROCESS_FILE = "multiprocessing/process.py"
_HELPER_FILES = ("multiprocessing/resource_tracker.py", "multiprocessing/forkserver.py")
# What a main thread's stack starts with; without stopping the process, a sampler now and then reads a torn stack.
_ROOTS = {"<module>", "_run_module_as_main", "_run_code", "_bootstrap", "_shutdown", "_find_and_load", "_exit_function"}
# phase -> its bit; of several that a stack has, the first counts
_MARK_BITS = {
    phases.DATA_WAIT: DATA_WAIT,
    phases.BACKWARD: BACKWARD,
    phases.OPTIMIZER: OPTIMIZER,
    phases.FORWARD: FORWARD,
}


class CallPaths:
    """The tree under construction; `names` gives the frames their numbers."""

    def __init__(self, names: FrameNames, *, most: int = MAX_NODES) -> None:
        self._names = names
        self._most = most
        self._known: dict[int, int] = {}  # (parent + 1) << 32 | frame -> node
        self._parent, self._frame, self._depth = array("i"), array("i"), array("i")
        self._bits: list[int] = []  # by frame number
        self._first: list[int] = []  # of stacks that begin with the frame

    def add(self, frames: Sequence[int]) -> tuple[int, int]:
        """The node of a stack (-1 without a frame that is kept) and its bits."""
        if not frames:
            return NONE, 0
        self._look_at_new_frames()
        of_frame, known = self._bits, self._known
        node, bits, ours, updates = NONE, self._first[frames[0]], False, False
        for frame in frames:
            own = of_frame[frame]
            if own & _SPECIAL:
                if own & (OWN | OWN_WORK):
                    bits |= own
                    ours = not own & HANDS_OVER
                    if not ours and bits & OPTIMIZER:  # around the closure that any optimizer was given
                        bits = bits & ~OPTIMIZER | FORWARD | CLOSURE
                    continue
                if ours and own & STANDARD:
                    continue
                if (own & WORKER and not bits & WORKER) or (own & _RUN and not bits & WORKER and node >= 0):
                    node, bits = NONE, bits & ~_BELOW_FORK
                if own & _MARKED:
                    bits &= ~(IMPORTING | BACKWARD | OPTIMIZER) if own & (BACKWARD | OPTIMIZER) else ~IMPORTING
                    updates = bool(own & UPDATE)
            elif updates and not own & IN_TORCH:
                bits, updates = bits & ~OPTIMIZER | FORWARD | CLOSURE, False
            bits |= own
            ours = False
            below = known.get((node + 1) << 32 | frame)
            node = self._new(node, frame) if below is None else below
            if node == NONE:
                return self._left_out(), bits | LEFT_OUT
        if ours:
            bits |= LEAF_OWN
        return node, bits

    def _new(self, parent: int, frame: int) -> int:
        node = len(self._parent)
        if node >= self._most:
            return NONE
        self._known[(parent + 1) << 32 | frame] = node
        self._parent.append(parent)
        self._frame.append(frame)
        self._depth.append(self._depth[parent] + 1 if parent >= 0 else 0)
        return node

    def _left_out(self) -> int:
        """The one node that stands for all paths beyond the limit."""
        frame = self._names.number(_PATH_LEFT_OUT)
        self._look_at_new_frames()
        node = self._known.get(frame)
        if node is None:
            self._most = max(self._most, len(self._parent) + 1)
            node = self._new(NONE, frame)
            self._most = len(self._parent)
        return node

    def _look_at_new_frames(self) -> None:
        frames = self._names.frames
        for number in range(len(self._bits), len(frames)):
            bits = _bits_of(frames[number])
            self._bits.append(bits)
            self._first.append(_bits_of_root(frames[number], bits))

    def nodes_table(self) -> pl.DataFrame:
        own = {"parent": self._parent, "depth": self._depth, "frame": self._frame}
        columns = {name: np.array(values, np.int32) for name, values in own.items()}
        columns["node"] = np.arange(len(self._parent), dtype=np.int32)
        frame = pl.DataFrame(columns).select(list(SCHEMAS["nodes"]))
        return frame.with_columns(pl.when(pl.col("parent") >= 0).then("parent"))

    def frames_table(self) -> pl.DataFrame:
        rows = [(number, *frame) for number, frame in enumerate(self._names.frames)]
        return pl.DataFrame(rows, schema=SCHEMAS["frames"], orient="row")

    def waiting(self, node: npt.NDArray[np.int32], on_device: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether threads whose innermost frames are these nodes wait; `on_device` says which of them train on one.

        Below a wait a sampler that unwinds native code shows libc, so the innermost Python frame decides.
        """
        frames = self._names.frames
        waits = [np.array([phases.is_wait(frame, on_device=flag) for frame in frames], bool) for flag in (False, True)]
        if not len(self._frame):
            return np.zeros(len(node), bool)
        native = np.array([bool(frame.file) and not frame.file.endswith((".py", ">")) for frame in frames], bool)
        of_node, parent = np.frombuffer(self._frame, np.int32), np.frombuffer(self._parent, np.int32)
        at = node.copy()
        while (below := (at >= 0) & native[of_node[np.maximum(at, 0)]]).any():
            at[below] = parent[at[below]]
        leaf = of_node[np.maximum(at, 0)]
        found: npt.NDArray[np.bool_] = np.where(on_device, waits[1][leaf], waits[0][leaf]) & (at >= 0)
        return found


def phase_of(bits: int) -> str | None:
    """The phase that the frames of a rank's main thread mark; None where none does."""
    return next((phase for phase, bit in _MARK_BITS.items() if bits & bit), None)


def _bits_of(frame: Frame) -> int:
    if frame.file.startswith(_OWN_PACKAGE) or any(part in frame.file for part in _OWN_PARTS):
        hands_over = HANDS_OVER if frame.file.endswith(_HANDS_OVER) else 0
        return OWN | hands_over | (OWN_WORK if _OWN_WORK in frame.file else 0)
    name = phases.last_part(frame.function)
    mark = phases.phase_mark(frame)
    in_torch, updates = bool(_IN_TORCH.search(frame.file)), mark == phases.OPTIMIZER
    said = (
        (_MARK_BITS.get(mark or "", 0), True),
        (ELSEWHERE, not phases.in_file(frame.file, "threading.py")),
        (STANDARD, _STANDARD_LIBRARY.search(frame.file)),
        (IN_TORCH, in_torch),
        (UPDATE, in_torch and updates and not phases.in_file(frame.file, "torch/optim/optimizer.py")),
        (HELPER, any(phases.in_file(frame.file, file) for file in _HELPER_FILES)),
        (WORKER, name == "_worker_loop" and phases.in_file(frame.file, _WORKER_LOOP)),
        (_RUN, name == "run" and phases.in_file(frame.file, _PROCESS_FILE)),
        (IMPORT | IMPORTING, phases.imports(frame)),
        (COMPILE, phases.compiles(frame)),
    )
    return sum(bit for bit, is_so in said if is_so)


def _bits_of_root(frame: Frame, bits: int) -> int:
    if bits & OWN:
        return 0
    name = phases.last_part(frame.function)
    # Native frames (a library for a file) stand below Python's where a sampler unwinds them.
    found = 0 if name in _ROOTS or not frame.file.endswith((".py", ">")) else TORN
    if phases.in_file(frame.file, "threading.py"):
        return found | FROM_THREAD
    return found | (FROM_MODULE if name in _ROOTS else 0)
