"""What the name of a slice says: of a Python function its file, line and function, of any slice a name for people."""

from __future__ import annotations

import re

from stepscope.tables.categories import STEP

_MODULE = "nn.Module: "
PYTHON_NAME = r"^(.*)\((\d+)\): (.*)$"
# Traces of 2021 call these annotations operators.
_ANNOTATIONS = (STEP, "enumerate(DataLoader)#", "enumerate(DataPipe)#", "Optimizer.")
_OPTIMIZER_STEP = ("wrapper", "profile_hook_step")  # torch puts them around every optimizer's step
_ADDRESS = re.compile(r"( of \S+( \S+)*? object)? at 0x[0-9a-fA-F]+>?$|^<|>$")


def is_annotation(name: str) -> bool:
    """Whether a slice that an old trace calls an operator is a range that torch itself names."""
    return name.startswith(_ANNOTATIONS)


def callee_name(name: str) -> str:
    """A name for people: `torch/nn/functional.py(3472): cross_entropy` is `cross_entropy`."""
    match = re.match(PYTHON_NAME, name)
    if match:
        return "step" if match[3] in _OPTIMIZER_STEP and "torch/optim/" in match[1] else match[3]
    if name.startswith("<built-in"):
        words = _ADDRESS.sub("", name.removeprefix("<built-in function ").removeprefix("<built-in method "))
        return words.split(" ")[0].rstrip(">")
    if name.startswith(_MODULE):
        return name.removeprefix(_MODULE).rsplit("_", 1)[0]
    return name


def called_by_name(name: str | None) -> str | None:
    """What source calls a slice by; None for a module: a line with the name of its class makes one."""
    return None if name is None or name.startswith(_MODULE) else callee_name(name)
