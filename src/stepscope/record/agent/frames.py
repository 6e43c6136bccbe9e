"""Which line of the user's code is calling: the innermost frame outside torch, stepscope and installed packages.

What the user's source files held when they ran is written as hashes (`sources` events): a report quotes a line only
where the reader's file still has that content, or lies in the reader's own folders, for a run folder that came from
elsewhere names files as it likes. Written when the first loop starts and, for modules loaded since, when recording
ends. A file that was changed after the process began may not be what ran, and gets none.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Tuple

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MARKERS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TORCH = "torch" + os.sep
_FRAME_LIMIT = 300

Place = Tuple[str, int, str]


def _library_prefixes() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        paths.add(os.path.dirname(torch))
    return (_PACKAGE, "<frozen ", *(path + os.sep for path in paths if path))


user_files: dict[str, bool] = {}  # file name -> it is the user's
_prefixes: tuple[str, ...] = ()


def is_user_file(path: str) -> bool:
    """Whether `path` is neither the standard library, an installed package, torch nor stepscope."""
    known = user_files.get(path)
    if known is None:
        global _prefixes
        _prefixes = _prefixes or _library_prefixes()
        # "<string>" and the like are generated code; cells of a notebook are the user's.
        generated = path.startswith("<") and not path.startswith(("<ipython", "<stdin>"))
        known = not generated and not path.startswith(_prefixes) and not any(marker in path for marker in _MARKERS)
        if len(user_files) < 10_000:
            user_files[path] = known
    return known


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost user frame, from `frame` on; None when there is none."""
    for _ in range(_FRAME_LIMIT):
        if frame is None or is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def user_place(skip: int = 1) -> Place | None:
    """(file, line, function) of the innermost user frame, `skip` frames up at least; None when there is none."""
    places = user_places(skip + 1, 1)
    return places[0] if places else None


def user_places(skip: int, most: int) -> list[Place]:
    """(file, line, function) of the `most` innermost user frames, `skip` frames up at least."""
    places: list[Place] = []
    frame: FrameType | None = sys._getframe(skip)
    for _ in range(_FRAME_LIMIT):
        if frame is None or len(places) == most:
            break
        if is_user_file(frame.f_code.co_filename):
            places.append(place_of(frame))
        frame = frame.f_back
    return places


def caller(skip: int = 1) -> tuple[Place | None, str | None]:
    """`user_place`, and the file of the installed package that its line called into, from its folder on.

    The second is None where the line calls torch itself: `DataLoader(...)` in the user's file, not in a framework's.
    """
    frame: FrameType | None = sys._getframe(skip)
    via: str | None = None
    for _ in range(_FRAME_LIMIT):
        if frame is None:
            break
        path = frame.f_code.co_filename
        if is_user_file(path):
            return place_of(frame), via
        for marker in _MARKERS:
            _, found, name = path.rpartition(marker)
            if found and not name.startswith(_TORCH) and not path.startswith(_PACKAGE):
                via = name
        frame = frame.f_back
    return None, via


def place_of(frame: FrameType) -> Place:
    """Where `frame` is now."""
    code = frame.f_code
    file = code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename)
    return file, frame.f_lineno, getattr(code, "co_qualname", code.co_name)


def place_fields(place: Place | None) -> dict[str, Any]:
    """`file`, `line`, `function` as events carry them, each None when unknown."""
    return dict(zip(("file", "line", "function"), place or (None, None, None)))


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
