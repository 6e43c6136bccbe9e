"""What a sampled frame is: native or Python, of which module, and whether it belongs to the library asked for.

All of it depends on the frame alone, so it is found once per distinct frame. For one file samplers write
`torch/nn/functional.py` or `/home/me/venv/lib/python3.11/site-packages/torch/nn/functional.py`; both give one answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stepscope.engine.call_tree import CallFrame
from stepscope.engine.user_code import UserCode

MODULE = "<module>"
_NATIVE_FILE = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$|\.(c|cc|cpp|cxx|cu|cuh|h|hpp|rs|f|f90)$|^\?$|^\[.*\]$")
_ADDRESS = re.compile(r"^0x[0-9A-Fa-f]+$")
_FROZEN = re.compile(r"^<frozen ([\w.]+)>$")
# What comes before the first package in the full name of an installed file.
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python\d+(?:\.\d+)?t?)/")


def is_native(frame: CallFrame) -> bool:
    """Whether a frame is of a compiled library. Cython's `.pyx` and files without an ending count as Python."""
    if _ADDRESS.match(frame.function) or _NATIVE_FILE.search(frame.file):
        return True
    # Python frames without a line (--nolineno) still name a source file or something like `<string>`
    return bool(frame.file) and frame.line is None and "." in frame.file and not frame.file.endswith((".py", ">"))


def module(file: str, code: UserCode, roots: Sequence[str]) -> str:
    """The module of a Python file: a dotted name from the user's `roots` on, the package of all other code."""
    frozen = _FROZEN.match(file)
    if frozen:
        return frozen[1].partition(".")[0]
    if not file or file.startswith("<"):
        return file
    own = code.resolve(file)
    if own is None:
        return _stem(_INSTALLED.sub("", file.replace("\\", "/")).lstrip("/").partition("/")[0])
    below = [own[len(root) :] for root in (root.rstrip("/") + "/" for root in roots) if own.startswith(root)]
    name = min(below, key=len, default=file if not file.startswith("/") else own.rpartition("/")[2])
    parts = _components(name.removeprefix("./"))
    return ".".join(parts[:-1] if parts[-1:] == ["__init__"] and len(parts) > 1 else parts)


def library_matcher(library: str, code: UserCode) -> Callable[[str], bool]:
    """Whether a file belongs to `library`, which is a name or a path.

    - A name without a slash is a whole component of the path: `flow` is in `pkg/flow/net.py` and in `flow.py`, and not
      in `workflow.py`. A dotted name is a module: `pkg.flow` is `pkg/flow/...` or `pkg/flow.py`.
    - With a slash it is the beginning of the path, or consecutive components of it. A path that samplers shortened is
      also tried in full where it is one of the user's.

    The ending `.py` may be left out in all of them; with it, only that file is meant and no folder of its name.
    """
    wanted = library.replace("\\", "/").removeprefix("./").rstrip("/")
    if "/" in wanted:
        spellings = {tuple(_components(wanted.strip("/")))}
    else:
        spellings = {(_stem(wanted),), tuple(_stem(wanted).split("."))}
    at_start, at_end = wanted.startswith("/"), wanted != _stem(wanted)

    def matches(file: str) -> bool:
        if not file or file.startswith("<"):
            return False
        names = {file, code.resolve(file) or file}
        return any(
            _contains(_components(name), spelling, at_start, at_end) and (not at_start or name.startswith("/"))
            for name in names
            for spelling in spellings
        )

    return matches


def _contains(parts: list[str], wanted: tuple[str, ...], at_start: bool, at_end: bool) -> bool:
    places = range(len(parts) - len(wanted) + 1)
    return any(
        tuple(parts[at : at + len(wanted)]) == wanted
        for at in places
        if (not at_start or at == 0) and (not at_end or at == places[-1])
    )


def _components(path: str) -> list[str]:
    parts = [part for part in path.replace("\\", "/").split("/") if part and part != "."]
    if parts:
        parts[-1] = _stem(parts[-1])
    return parts


def _stem(name: str) -> str:
    return re.sub(r"\.pyx?$", "", name)
