"""Which line of the user's code is calling: the innermost frame outside torch, stepscope and installed packages."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import Any, Tuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MARKERS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TORCH = "torch" + os.sep
_FRAME_LIMIT = 200

Place = Tuple[str, int, str]


def _library_prefixes() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        paths.add(os.path.dirname(torch))
    return (_PACKAGE, "<frozen ", *(path + os.sep for path in paths if path))


_known: dict[str, bool] = {}  # file name -> it is the user's
_prefixes: tuple[str, ...] = ()


def is_user_file(path: str) -> bool:
    """Whether `path` is neither the standard library, an installed package, torch nor stepscope."""
    known = _known.get(path)
    if known is None:
        global _prefixes
        _prefixes = _prefixes or _library_prefixes()
        # "<string>" and the like are generated code; cells of a notebook are the user's.
        generated = path.startswith("<") and not path.startswith(("<ipython", "<stdin>"))
        known = not generated and not path.startswith(_prefixes) and not any(marker in path for marker in _MARKERS)
        if len(_known) < 10_000:
            _known[path] = known
    return known


def user_place(skip: int = 1) -> Place | None:
    """(file, line, function) of the innermost user frame, `skip` frames up at least; None when there is none."""
    return caller(skip + 1)[0]


def caller(skip: int = 1) -> tuple[Place | None, str | None]:
    """`user_place`, and the file of the installed package that its line called into, from its folder on.

    The second is None where the line calls torch itself: `DataLoader(...)` in the user's file, not in a framework's.
    """
    frame: FrameType | None = sys._getframe(skip)
    via: str | None = None
    for _ in range(_FRAME_LIMIT):
        if frame is None:
            return None, via
        code = frame.f_code
        if is_user_file(code.co_filename):
            file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
            return (file, frame.f_lineno, getattr(code, "co_qualname", code.co_name)), via
        via = _of_package(code.co_filename) or via
        frame = frame.f_back
    return None, via


def _of_package(path: str) -> str | None:
    for marker in _MARKERS:
        _, found, name = path.rpartition(marker)
        if found and not name.startswith(_TORCH) and not path.startswith(_PACKAGE):
            return name
    return None


def place_fields(place: Place | None) -> dict[str, Any]:
    """`file`, `line`, `function` as events carry them, each None when unknown."""
    file, line, function = place if place is not None else (None, None, None)
    return {"file": file, "line": line, "function": function}
