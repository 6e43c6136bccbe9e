"""What one frame of a sampled stack says of its thread: the phase it opens, whether it waits, imports or compiles.

Functions are matched by the last part of their name and the end of their file, as samplers write qualified names or
bare ones and full or shortened paths. Frames that compiled code passes through on every call are no marks of compiling.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from stepscope.read.raw import Frame

DATA_WAIT, FORWARD, BACKWARD = "data_wait", "forward", "backward"
OPTIMIZER, OTHER, STARTUP = "optimizer", "other", "startup"


class _Frames(Struct):
    """phases.json: by the last part of a function's name the ends of files with it.

    `marks` open a phase, `waits` are innermost frames in which a thread waits for something, whatever the sampler calls
    idle. `compilers` are files, in groups that say of what, with the functions that are marks; without any, all are.
    """

    marks: dict[str, tuple[tuple[str, str], ...]]
    waits: dict[str, tuple[str, ...]]
    compilers: dict[str, dict[str, str]]


_KNOWN = msgspec.json.decode(Path(__file__).with_name("phases.json").read_bytes(), type=_Frames)
_OPTIMIZERS = "torch/optim/"
_SCHEDULERS = "lr_scheduler.py"

# With a device, backward waits here for the engine's own threads.
_DEVICE_WAITS: dict[str, tuple[str, ...]] = {"_engine_run_backward": ("torch/autograd/graph.py",)}


def last_part(function: str) -> str:
    """`Optimizer.profile_hook_step.<locals>.wrapper` → `wrapper`."""
    return function.rpartition(".")[2] or function


def in_file(file: str, ending: str) -> bool:
    """Whether `file` is `ending` or ends in it at a path boundary."""
    file = file.replace("\\", "/")
    return file.endswith(ending) and (len(file) == len(ending) or file[-len(ending) - 1] == "/")


def phase_mark(frame: Frame) -> str | None:
    """The phase that this frame opens, None where it opens none."""
    name = last_part(frame.function)
    if frame.function.startswith("_disable_dynamo"):  # decorates functions while torch is imported
        return None
    for ending, phase in _KNOWN.marks.get(name, ()):
        if in_file(frame.file, ending):
            return phase
    if name == "step" and _OPTIMIZERS in frame.file and not frame.file.endswith(_SCHEDULERS):
        return OPTIMIZER
    return None


def imports(frame: Frame) -> bool:
    return "importlib._bootstrap" in frame.file


def is_wait(leaf: Frame, *, on_device: bool) -> bool:
    """Whether a thread whose innermost frame this is waits; `on_device` when the process trains on a GPU."""
    name = last_part(leaf.function)
    endings = _KNOWN.waits.get(name, ())
    if on_device:
        endings += _DEVICE_WAITS.get(name, ())
    return any(in_file(leaf.file, ending) for ending in endings)


IMPORT, COMPILE = "import", "compile"

_MODULE = "<module>"  # of a compiler's file: it is being imported
# last part of the file's name -> ends of files with their functions
_COMPILERS: dict[str, list[tuple[str, list[str]]]] = {}
for _files in _KNOWN.compilers.values():
    for _file, _functions in _files.items():
        _COMPILERS.setdefault(_file.rpartition("/")[2], []).append((_file, _functions.split()))


def compiles(frame: Frame) -> bool:
    file, name = frame.file.replace("\\", "/"), last_part(frame.function)
    known = _COMPILERS.get(file.rpartition("/")[2], ()) if name != _MODULE else ()
    return any(in_file(file, ending) and (not functions or name in functions) for ending, functions in known)
