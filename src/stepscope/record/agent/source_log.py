"""What the user's source files held when they ran, as hashes: `sources` events.

A report quotes a line only where the reader's file still has that content, or lies in the reader's own folders: a run
folder that came from elsewhere names files as it likes. Written when the first loop starts and, for modules loaded
since, when recording ends. A file that was changed after the process began may not be what ran, and gets none.
"""

from __future__ import annotations

import os
import stat
import sys
from types import ModuleType

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import is_user_file
from stepscope.record.agent.segments import StepRow

NAME = "source_log"
SUFFIXES = (".py", ".pyw", ".pyi", ".pyx")
MAX_FILES = 1000
MAX_BYTES = 1_000_000  # of one file: larger ones are not quoted either
MAX_ALL_BYTES = 20_000_000  # 20 ms


def attach(agent: Agent) -> None:
    """Hash the user's files of `agent`'s process."""
    log = SourceLog(agent)
    agent.add_step_listener(log, NAME)
    agent.add_finish_hook(log.write, NAME)


class SourceLog:
    """A step listener; every call but the first costs a comparison."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._begun = False
        self._seen: set[str] = set()
        self._left = MAX_ALL_BYTES

    def __call__(self, row: StepRow | None, now_ns: int) -> None:  # noqa: ARG002
        if not self._begun:
            self._begun = True
            self.write()

    def write(self) -> None:
        """Write the hashes of files that were not seen before; without a rank folder there is nothing to quote."""
        if self._agent.journal.folder is None:
            return
        # No attribute of a lazy module is asked for.
        modules = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        files = [namespace.get("__file__") for namespace in modules]
        hashes: dict[str, str | None] = {}
        for file in [os.path.abspath(file) for file in files if isinstance(file, str) and file.endswith(SUFFIXES)]:
            if file not in self._seen and is_user_file(file) and len(self._seen) < MAX_FILES:
                self._seen.add(file)
                hashes[file] = self._hash(file)
        known = {file: found for file, found in hashes.items() if found is not None}
        if known:
            self._agent.journal.write("sources", step=None, hashes=known)

    def _hash(self, file: str) -> str | None:
        import hashlib

        try:
            status = os.stat(file)
            changed = status.st_mtime_ns > self._agent.started_ns
            if changed or not stat.S_ISREG(status.st_mode) or status.st_size > min(MAX_BYTES, self._left):
                return None
            self._left -= status.st_size
            with open(file, "rb") as source:
                return hashlib.sha256(source.read(MAX_BYTES)).hexdigest()
        except OSError:
            return None
