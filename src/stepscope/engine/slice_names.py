"""What the name of a slice says: a Python function's file, line and whose code it is; any slice's name for people."""

from __future__ import annotations

import re
from typing import NamedTuple

from stepscope.engine.user_code import UserCode
from stepscope.read.raw import Frame
from stepscope.tables.categories import STEP

MAX_FRAMES = 2_000  # of one recorded call stack
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


class Origin(NamedTuple):
    """A function or line found on the way up. `exact`: the line is the call's, not the definition's."""

    file: str
    function: str
    line: int | None
    exact: bool
    guess: bool


def origin_of(text: str, code: UserCode, *, exact: bool = False) -> Origin | None:
    """The user's function, or as a guess a library's outside torch; None for all others."""
    frame = python_frame(text)
    file = code.resolve(frame.file) if frame else None
    short = code.library(frame.file) if frame and file is None else None
    if frame is None or (file or short) is None:
        return None
    return Origin(file or short or "", frame.function, frame.line, exact, file is None)


def origins_of_stack(stack: str, code: UserCode) -> tuple[Origin | None, Origin | None]:
    """The innermost of the user's frames in a call stack as old traces hold it, and of a library's up to there."""
    library: Origin | None = None
    for text in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]:
        found = origin_of(text.strip(), code, exact=True)
        if found is not None and not found.guess:
            return found, library
        library = library or found
    return None, library
