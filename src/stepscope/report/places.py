"""Paths and commands, short enough to read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from stepscope.report.escape import plain

MAX_COMMAND = 160  # characters
_LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


class Shortener:
    """Shows files relative to the folder the run was started in or to its user roots, libraries from their name on."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        roots = [run.get("cwd"), *(run.get("user_roots") or ())]
        self._roots = [str(root).rstrip(os.sep) + os.sep for root in roots if root and root != os.sep]

    def __call__(self, file: str, line: int | None = None) -> str:
        """`file:line`, harmless to print."""
        inside = next((root for root in self._roots if file.startswith(root)), "")
        shown = _LIBRARY.sub("", file[len(inside) :])
        return plain(shown, 200) + (f":{line}" if line is not None else "")


def command_line(run: Mapping[str, Any]) -> str:
    """The recorded command as a shell would take it, cut where it is very long."""
    words = [str(word) for word in run.get("command") or ()]
    return plain(shlex.join(words), MAX_COMMAND) if words else ""
