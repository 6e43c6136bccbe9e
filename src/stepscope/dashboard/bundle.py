"""Where the built front end lies: the files that the server sends and that a single-file report is made of.

They are built from `web/` when the package is installed (hatch_build.py). An installation that could not build them
works all the same, with plain reports; `missing` then says why.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from msgspec import Struct

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
NOT_BUILT = "not_built.txt"  # left by an installation that could not build, with the reason on one line
HOW = "install stepscope again where npm can be reached"
_REASON = 300  # characters of it that are shown

_SCRIPT = re.compile(r"<script\b[^>]*\bsrc=[\"']([^\"']+)[\"'][^>]*>\s*</script>", re.IGNORECASE)
_STYLE = re.compile(r"<link\b(?=[^>]*\brel=[\"']stylesheet[\"'])[^>]*\bhref=[\"']([^\"']+)[\"'][^>]*>", re.IGNORECASE)
_OTHERS = re.compile(r"<link\b[^>]*>\s*|<noscript\b.*?</noscript>\s*", re.IGNORECASE | re.DOTALL)


class Bundle(Struct, frozen=True):
    """The front end as texts: the page without scripts, links and words for browsers without scripts; and its parts."""

    page: str
    scripts: tuple[str, ...]
    styles: tuple[str, ...]


def folder() -> Path | None:
    """The folder of the built front end, None where it was not built."""
    return FOLDER if (FOLDER / INDEX).is_file() else None


def missing() -> str:
    """Why there is no front end and what to do, on one line, for users."""
    try:
        reason = (FOLDER / NOT_BUILT).read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
    except OSError:
        reason = ""
    said = f"this installation of stepscope has no dashboard{f' ({reason[:_REASON]})' if reason else ''}"
    return f"{said}; {HOW}"


@cache
def load() -> Bundle | None:
    """The front end to be inlined, None where it was not built or a part of it is missing."""
    root = folder()
    if root is None:
        return None
    try:
        page = (root / INDEX).read_text(encoding="utf-8")
        scripts = tuple(_part(root, name) for name in _SCRIPT.findall(page))
        styles = tuple(_part(root, name) for name in _STYLE.findall(page))
    except (OSError, UnicodeDecodeError):
        return None
    if not scripts:
        return None
    return Bundle(_OTHERS.sub("", _SCRIPT.sub("", page)), scripts, styles)


def _part(root: Path, name: str) -> str:
    return (root / name.removeprefix("./").lstrip("/")).read_text(encoding="utf-8")
