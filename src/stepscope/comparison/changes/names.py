"""Names of files as both sides can share them: relative to the run's own folder, libraries from their name on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python\d+\.\d+t?)/")


def relative_to(roots: Sequence[str]) -> Callable[[str], str]:
    """Makes the name of a file below one of `roots`, or of an installed library, the same on any machine."""
    known = sorted({root.rstrip("/") + "/" for root in roots if root.strip("/")}, key=len, reverse=True)

    def name(file: str) -> str:
        installed = _INSTALLED.sub("", file)
        if installed != file:
            return installed
        return next((file[len(root) :] for root in known if file.startswith(root)), file)

    return name
