"""What the readers of sampled stacks share: what a file says of itself, its lines, and its frames by their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.read.raw import Frame, FrameNames
from stepscope.read.streams import Limits, LineRules
from stepscope.read.text import clean

MAX_PROCESSES = 100_000
START_PROCESS = re.compile(r'process \d{1,18}:"')
START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")

# A command line ends at the first quote that another prefix follows; it may itself hold quotes and semicolons.
_PROCESS = re.compile(r'process (\d{1,18}):"(.*?)"(?:;(?=process \d{1,18}:"|thread \()|\Z)', re.DOTALL)
# Without thread prefixes it ends at the first quote that a semicolon follows.
_PROCESS_BARE = re.compile(r'process (\d{1,18}):"(.*?)"(?:;|\Z)', re.DOTALL)
_THREAD = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ]([^;]*))?(?:;|\Z)")


class Prefixes(NamedTuple):
    """What stands before the frames; `pids` lists ancestors first."""

    pids: tuple[int, ...]
    thread: str | None
    name: str | None


NO_PREFIXES = Prefixes((), None, None)


def split_prefixes(text: str, hints: dict[int, str]) -> tuple[Prefixes, int] | None:
    """The prefixes of a record (none at all, perhaps) and where they end; None when one is cut off. Fills `hints`."""
    pids: list[int] = []
    above = ""
    position = 0
    while START_PROCESS.match(text, position):
        match = _PROCESS.match(text, position) or _PROCESS_BARE.match(text, position)
        if match is None:
            return None
        pids.append(int(match[1]))
        hint = hint_of(match[2], above)
        if hint is not None and len(hints) < MAX_PROCESSES:
            hints.setdefault(pids[-1], hint)
        above, position = match[2], match.end()
    match = _THREAD.match(text, position)
    if match is None:
        return Prefixes(tuple(pids), None, None), position
    return Prefixes(tuple(pids), match[1], match[2]), match.end()


_HELPERS = re.compile(r"from multiprocessing\.(?:resource_tracker|semaphore_tracker|forkserver) import")
_PYTHON = r"(?:python|pypy)[\d.]*(?:-dbg|t|w)?(?:\.exe)?"
# Options, without the one that names a module (-m, -Im) or holds the program itself (-c).
_OPTIONS = r"(?:\s+(?:(?:-X|-W|--check-hash-based-pycs)\s+\S+|-(?![XWc]\s|-check-hash-based-pycs\s|(?!-)\S*m\s)\S*))*"
_PROGRAMS = "|".join(
    (
        *("torchrun", "torchrun.py", "accelerate", "accelerate-launch", "deepspeed", "deepspeed.py", "composer"),
        *("horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun", "hydra_pmi_proxy"),
        *("srun", "sbatch", "salloc", "jsrun", "aprun", "flux", "colossalai", "stepscope"),
    )
)
_MODULES = (
    r"(?:torch\.distributed\.(?:run|launch|elastic)|accelerate\.(?:commands|launch)|deepspeed\.launcher"
    r"|horovod\.runner|composer\.cli|colossalai\.cli|mpi4py\.run|stepscope)(?:\.\S*)?"
)
_PROGRAM = rf"(?:(?:\S*[/\\])?(?:{_PROGRAMS})|\S*torch[/\\]distributed[/\\](?:run|launch)\.py)"
_LAUNCHER = re.compile(
    rf"\s*(?:{_PROGRAM}|(?:\S*[/\\])?(?i:{_PYTHON}){_OPTIONS}\s+(?:{_PROGRAM}|-(?!-)\S*m\s+{_MODULES}))(?:\s|\Z)"
)
_MAX_CHARS = 4096


def hint_of(command: str, above: str = "") -> str | None:
    """ "launcher", "helper", "spawned", or None where the command line says none of these.

    `above` is the parent's: a process with the same one was forked from it and does not do its parent's work. What
    a fork server forks was spawned.
    """
    text = command[:_MAX_CHARS]
    if "--multiprocessing-fork" in text or "from multiprocessing.spawn import" in text:
        return "spawned"
    if _HELPERS.search(text):
        return "spawned" if command == above else "helper"
    return "launcher" if command != above and _LAUNCHER.match(text) else None


MICROSECONDS = "us"
BYTES = "bytes"
MAX_COUNT_DIGITS = 15
MAX_SAMPLES = 10**15  # of one stack; sums of thousands of these still fit 64 bits
MAX_FRAMES = 20_000  # of one stack
MAX_DISTINCT_FRAMES = 500_000  # the largest projects have some ten thousand lines that call
MAX_FRAME_CHARS = 64 * 2**20
# Stacks repeat themselves, deep ones pack to a hundredth, and files may be long. What packs better than any of ours is
# read as far as costs some seconds.
LINES = LineRules(Limits(unpacked_bytes=256 * 2**30, ratio_from_bytes=2**27), 16 * 2**20, "skipped_records")
# Stands for every frame beyond these bounds: a file of nothing but different frames must not fill the memory.
MORE_FRAMES = Frame("(more different frames than are kept)", "", None)

_LINE = re.compile(r":(-?[0-9]{1,9})\Z")


def count_of(digits: str) -> int | None:
    if digits.isdigit() and digits.isascii() and len(digits) <= MAX_COUNT_DIGITS:
        return int(digits)
    return None


class FrameTexts:
    """Numbers of frames by their text, which `frame_of` takes apart once.

    `known` holds frames that are one piece between two semicolons, and nothing else.
    """

    def __init__(self, names: FrameNames, frame_of: Callable[[str], Frame]) -> None:
        self.known: dict[str, int] = {}
        self._odd: dict[str, int] = {}  # without a closing parenthesis, or with a semicolon inside
        self._names = names
        self._frame_of = frame_of
        self._files: dict[str, str] = {}
        self._chars = 0

    def frames(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Frames of the pieces between semicolons; a piece that does not end in a parenthesis goes on in the next."""
        frames: list[int] = []
        pending: list[str] = []
        last = len(pieces) - 1
        for index, piece in enumerate(pieces):
            closed = piece.endswith(")")
            if closed and not pending:
                frames.append(self.number(piece))
                continue
            pending.append(piece)
            if closed or index == last:
                frames.append(self._number(";".join(pending), self._odd))
                pending.clear()
        return tuple(frames)

    def number(self, piece: str) -> int:
        return self._number(piece, self.known)

    def _number(self, text: str, known: dict[str, int]) -> int:
        number = known.get(text)
        if number is None:
            self._chars += len(text)
            if len(self.known) + len(self._odd) >= MAX_DISTINCT_FRAMES or self._chars > MAX_FRAME_CHARS:
                return self._names.number(MORE_FRAMES)
            function, file, line = self._frame_of(text)
            number = known[text] = self._names.number(Frame(function, self._files.setdefault(file, file), line))
        return number


def pyspy_frame(text: str) -> Frame:
    """Split `NAME (FILE:LINE)`; names and files may both hold parentheses, colons and spaces."""
    opening = _opening(text) if text.endswith(")") else -1
    if opening < 0:
        return Frame(clean(text), "", None)
    inside = text[opening + 2 : -1]
    match = _LINE.search(inside)
    file, line = (inside[: match.start()], int(match[1])) if match else (inside, None)
    return Frame(clean(text[:opening]), clean(file), line)


def _opening(text: str) -> int:
    """Where the ` (` stands that the last character closes; the last one when parentheses do not pair up."""
    last = text.rfind(" (")
    if text.find(" (") == last:
        return last
    depth = 0
    for index in range(len(text) - 1, 0, -1):
        if text[index] == ")":
            depth += 1
        elif text[index] == "(":
            depth -= 1
            if depth == 0:
                return index - 1 if text[index - 1] == " " else last
    return last
