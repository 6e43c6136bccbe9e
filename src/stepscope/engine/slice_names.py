"""What the name of a slice says: of a Python function its file, line and function, of any slice a name for people."""

from __future__ import annotations

import re

from stepscope.read.raw import Frame
from stepscope.tables.categories import STEP

MODULE_CALL = "nn.Module: "  # what the names of calls of modules begin with
# The recorder's own functions are no part of the run; through its wrapper around torch's functions the caller shows.
RECORDER = re.compile(r"(^|/)stepscope/record/")
RECORDER_WRAPPER = re.compile(r"(^|/)stepscope/record/agent/(probes/)?wrapper_importlib_bootstrap\.py")
_PYTHON_NAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
# Traces of 2021 call these annotations operators.
_ANNOTATIONS = (STEP, "enumerate(DataLoader)#", "enumerate(DataPipe)#", "Optimizer.")
_OPTIMIZER_STEP = ("wrapper", "profile_hook_step")  # torch puts them around every optimizer's step
_ADDRESS = re.compile(r"( of \S+( \S+)*? object)? at 0x[0-9a-fA-F]+>?$|^<|>$")


def is_annotation(name: str) -> bool:
    """Whether a slice that an old trace calls an operator is a range that torch itself names."""
    return name.startswith(_ANNOTATIONS)


def python_frame(name: str) -> Frame | None:
    """The frame that a Python function of a trace is, or a line of a recorded call stack; None for all other slices."""
    match = _PYTHON_NAME.fullmatch(name)
    return Frame(match[3], match[1], int(match[2])) if match else None


def callee_name(name: str) -> str:
    """A name for people: `torch/nn/functional.py(3472): cross_entropy` is `cross_entropy`."""
    frame = python_frame(name)
    if frame:
        return "step" if frame.function in _OPTIMIZER_STEP and "torch/optim/" in frame.file else frame.function
    if name.startswith("<built-in"):
        words = _ADDRESS.sub("", name.removeprefix("<built-in function ").removeprefix("<built-in method "))
        return words.split(" ")[0].rstrip(">")
    if name.startswith(MODULE_CALL):
        return name.removeprefix(MODULE_CALL).rsplit("_", 1)[0]
    return name


def called_by_name(name: str | None) -> str | None:
    """What source calls a slice by; None for a module: a line with the name of its class makes one."""
    return None if name is None or name.startswith(MODULE_CALL) else callee_name(name)
