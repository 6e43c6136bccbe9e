"""Opens the user's browser without showing the token to other users of the machine.

The command line of a process can be read by everyone, so what a browser is given is a file of ours that only its user
can read, and that leads on to the address. It is removed at the end.
"""

from __future__ import annotations

import contextlib
import html
import os
import tempfile
from pathlib import Path


class Opener:
    """Opens one address, once."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def open(self, address: str) -> bool:
        """Whether a browser was started. Nothing fails where there is none."""
        import webbrowser

        from stepscope.cached import default_folder

        folder = default_folder()  # in the user's home: browsers in a sandbox see no temporary files of others
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(".html", "view-", folder)
        except OSError:
            return False
        self._file = Path(name)
        target = html.escape(address, quote=True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">')
            file.write(f'<title>stepscope</title><p><a href="{target}">stepscope</a></p>\n')
        try:
            return webbrowser.open(self._file.as_uri())
        except webbrowser.Error:
            return False

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None
