"""Places and pieces in the messages of compilers: the user's line in a stack, a shortened path, a list of hints.

Messages are untrusted text. Each is cut to `MAX_TEXT` characters before anything looks at it, and the patterns here
are bounded, so that a hostile one costs time in proportion to its length. Nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_TEXT = 20_000
MAX_VALUE = 200  # of a subject or a value
MAX_ADVICE = 600

_FRAME = re.compile(r'File "([^"\n]{1,1000})", line (\d{1,9})(?:, in ([^\n]{1,200}))?')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.{1,200})_at_(\d{1,9})")
_PLACE = re.compile(r":(\d{1,9}) in (\S{1,200})")
# Shortened paths are relative to torch's own folder, so torch's files begin with one of its parts.
_TORCH_NAMES = """
    _decomp _dynamo _export _functorch _guards.py _higher_order_ops _inductor _jit_internal.py _library _lobpcg.py
    _logging _meta_registrations.py _ops.py _prims _prims_common _refs _subclasses _tensor.py _tensor_str.py _utils.py
    _utils_internal.py _vmap_internals.py amp ao autograd backends compiler cpu cuda distributed distributions export
    fft func functional.py futures fx hub.py jit library.py linalg masked mtia multiprocessing nested nn onnx optim
    overrides.py package profiler quantization quasirandom.py random.py return_types.py serialization.py signal sparse
    special storage.py testing utils xpu
"""
_TORCH_PARTS = frozenset(_TORCH_NAMES.split())
_FRAMEWORK = ("/site-packages/torch", "/dist-packages/torch", "/torch/_", "/stepscope/record/")
_SHORTEST_SUFFIX = 6  # "a.py" would fit too many paths


class Location(NamedTuple):
    """A place in a message; `line` or `function` is None where the message does not say it."""

    file: str
    line: int | None
    function: str | None


def bounded(text: str) -> str:
    """What is looked at of a message."""
    return text[:MAX_TEXT]


def value(text: str | None) -> str | None:
    """A value as a message writes it, on one line and cut; None for nothing."""
    text = " ".join(text[: 4 * MAX_VALUE].split()) if text else ""
    return (text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…") or None


def one_line(text: str) -> str | None:
    """Advice on one line, cut to what a report can show."""
    return " ".join(text[:2_000].split())[:MAX_ADVICE] or None


def frames(text: str) -> list[Location]:
    """The frames of a stack as Python prints it, in order."""
    return [
        Location(match[1], int(match[2]), plain_function(match[3].strip()) if match[3] else None)
        for match in _FRAME.finditer(text)
    ]


def plain_function(name: str) -> str:
    """The function as the user wrote it: what Dynamo resumes after a graph break is a part of one."""
    match = _RESUMED.fullmatch(name)
    return match[1] if match else name


def resumed_at(name: str | None) -> int | None:
    """The line of the graph break after which a function resumes, from the name Dynamo gives it."""
    match = _RESUMED.fullmatch(name) if name else None
    return int(match[2]) if match else None


def user_location(places: Iterable[Location]) -> Location | None:
    """The innermost (last) place outside installed packages and the standard library, else outside torch."""
    outside = [place for place in places if not is_torch(place.file)]
    own = [place for place in outside if not is_library(place.file)]
    return own[-1] if own else outside[-1] if outside else None


def is_torch(file: str) -> bool:
    """Whether a file is of torch, torch_xla or this package's recorder, or no file at all."""
    path = file.replace("\\", "/")
    if path.startswith(("<", "torch/", "torch_xla/", "stepscope/")):  # no file, or as traces shorten paths
        return True
    return any(part in path for part in _FRAMEWORK)


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    path = file.replace("\\", "/")
    return "/site-packages/" in path or "/dist-packages/" in path or "/lib/python3" in path


def comment_location(comment: str) -> Location | None:
    """The place at the end of a guard's comment: `code  # path:12 in function`. The path is shortened."""
    tail = comment.rpartition("  # ")[2]
    tail = tail.removeprefix("# ").strip()
    match = _PLACE.search(tail)
    if match is None or not match.start():
        return None
    return Location(tail[: match.start()][-1000:], int(match[1]), match[2])


def resolve(place: Location, known: Iterable[str]) -> Location | None:
    """`place` with the full path of the known file its shortened path is of; None for a file of torch."""
    file = place.file.replace("\\", "/")
    for full in known:
        path = full.replace("\\", "/")
        if path == file or (len(file) >= _SHORTEST_SUFFIX and path.endswith(file)):
            return None if is_torch(full) else place._replace(file=full)
    if is_torch(file) or file.partition("/")[0] in _TORCH_PARTS:
        return None
    return place
