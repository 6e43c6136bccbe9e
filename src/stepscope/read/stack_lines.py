"""Sampled stacks as lines of text: collapsed ones (Austin's and Python's sampler's too), and py-spy's raw format.

Collapsed, `a;b;c 12`: a line per stack, root first, then its count. Frames are bare names, `name (file:line)`, or,
behind a `tid:`, the `file:function:line` of Python's own sampler. Austin writes that too, behind a process and a
thread, a line per sample, with microseconds or bytes for a count.

py-spy's, `process PID:"CMDLINE";thread (TID): NAME;frame (file:line);… COUNT`, escapes nothing. Semicolons and newlines
may stand in command lines, thread names, functions and files, so prefixes are read by grammar, frames from the right,
and records that a newline broke are joined again. What was read once is known by its text from then on: a record of
known pieces costs a look-up for each. What fits nothing is counted, never raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from stepscope.read.raw import Frame, FrameNames, Losses, Progress, RawStack, StackSource
from stepscope.read.streams import Limits, LineRules, read_lines
from stepscope.read.text import LONGEST_NS, clean

MAX_PROCESSES = 100_000
START_PROCESS = re.compile(r'process \d{1,18}:"')
START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")

# A command line ends at the first quote that another prefix follows; it may itself hold quotes and semicolons.
_PROCESS = re.compile(r'process (\d{1,18}):"(.*?)"(?:;(?=process \d{1,18}:"|thread \()|\Z)', re.DOTALL)
# Without thread prefixes it ends at the first quote that a semicolon follows.
_PROCESS_BARE = re.compile(r'process (\d{1,18}):"(.*?)"(?:;|\Z)', re.DOTALL)
_THREAD_PREFIX = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ]([^;]*))?(?:;|\Z)")


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
    match = _THREAD_PREFIX.match(text, position)
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

_LINE_END = re.compile(r":(-?[0-9]{1,9})\Z")


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
    match = _LINE_END.search(inside)
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


MAX_STACK_CHARS = 4 * 2**20
MAX_MERGED_STACKS = 200_000
MAX_MERGED_CHARS = 64 * 2**20

_THREAD = r"(?P<thread>\d{1,20}|0x[0-9A-Fa-f]{1,16})(?:;|\Z)"
_TACHYON = re.compile(rf"(?P<pid>)tid:{_THREAD}")
_AUSTIN = re.compile(rf"P(?P<pid>\d{{1,18}});T(?:(?:\d{{1,20}}|0x[0-9A-Fa-f]{{1,16}}):)?{_THREAD}")
_AUSTIN_FACT = re.compile(r"# (austin|interval|mode|duration|memory): (.{0,100})")
_DECIMAL = re.compile(r"\d{1,15}\.\d{1,20}")
_LINE = re.compile(r"-?[0-9]{1,9}")


def _colon_frame(text: str) -> Frame:
    """Split `file:function:line`; a Windows file holds a colon itself."""
    parts = text.rsplit(":", 2)
    if len(parts) < 3 or not parts[1] or not _LINE.fullmatch(parts[2]):
        return Frame(clean(text), "", None)
    return Frame(clean(parts[1]), clean(parts[0]), int(parts[2]) or None)


class Collapsed(StackSource):
    format = "collapsed"
    frame_of = staticmethod(pyspy_frame)  # `name (file:line)` or a name

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        texts = FrameTexts(names, self.frame_of)
        equal: dict[str, list[int]] = {}  # text of a stack -> the sum of its counts, and its first record
        chars = record = 0
        for lines in read_lines(self.path, self.label, losses, LINES, progress):
            for raw in lines:
                line = raw.rstrip("\r ")
                if not line or (line.startswith("# ") and self._note(line)):
                    continue
                text, space, count = line.rpartition(" ")
                samples = self._count(count)
                if samples is None or not space or len(text) > MAX_STACK_CHARS:
                    losses.add("skipped_records", self.label)
                    losses.add("skipped_samples", self.label, samples or 0)
                elif text in equal:
                    equal[text][0] += samples
                else:
                    equal[text] = [samples, record]
                    chars += len(text)
                record += 1
                if len(equal) >= MAX_MERGED_STACKS or chars > MAX_MERGED_CHARS:
                    yield from self._stacks(equal, texts, losses)
                    equal, chars = {}, 0
        yield from self._stacks(equal, texts, losses)

    def _stacks(self, equal: dict[str, list[int]], texts: FrameTexts, losses: Losses) -> Iterator[RawStack]:
        for text, (count, record) in equal.items():
            samples = min(count, MAX_SAMPLES)
            prefixes, used = self._prefixes(text)
            parts = text[used:].split(";") if text[used:] else []
            if len(parts) > MAX_FRAMES:
                losses.add("skipped_records", self.label)
                losses.add("skipped_samples", self.label, samples)
            else:
                yield RawStack(*prefixes, tuple(map(texts.number, parts)), samples, record)

    def _note(self, line: str) -> bool:  # noqa: ARG002 - which formats with comments read
        """Take in a comment; False for a line that is none."""
        return False

    def _count(self, text: str) -> int | None:
        return round(float(text)) if _DECIMAL.fullmatch(text) else count_of(text)

    def _prefixes(self, text: str) -> tuple[Prefixes, int]:
        """Who a stack is of, and how much of its text says so; here only py-spy's prefixes do."""
        found = split_prefixes(text, self.hints) if text.startswith(("process ", "thread (")) else None
        if found is None:
            return NO_PREFIXES, 0
        prefixes, used = found
        return prefixes._replace(name=clean(prefixes.name) if prefixes.name else None), used


class Tachyon(Collapsed):
    """What `python -m profiling.sampling --collapsed` writes: frames as `file:function:line`, behind a thread."""

    format = "collapsed, Python's sampler"
    frame_of = staticmethod(_colon_frame)
    prefix = _TACHYON

    def _prefixes(self, text: str) -> tuple[Prefixes, int]:
        match = self.prefix.match(text)
        if match is None:
            return NO_PREFIXES, 0
        return Prefixes((int(match["pid"]),) if match["pid"] else (), match["thread"], None), match.end()


class Austin(Tachyon):
    """Austin's text format. Times are microseconds, memory is bytes; `interval` is the time between samples."""

    format = "austin"
    prefix = _AUSTIN

    def __init__(self, path: Path, label: str | None = None, *, tool: str = "austin", head: str = "") -> None:
        super().__init__(path, label, tool=tool)
        self.unit = MICROSECONDS
        for line in head.split("\n"):
            if not line.startswith("#"):
                break
            self._note(line.rstrip("\r "))

    def _note(self, line: str) -> bool:
        match = _AUSTIN_FACT.fullmatch(line)
        if match is None:
            return line.startswith("# ")
        name, value = match[1], match[2].strip()
        number = count_of(value)
        if name == "mode":
            self.unit = BYTES if value == "memory" else MICROSECONDS
            self.idle = {"wall": True, "full": True, "cpu": False}.get(value)
        elif name == "interval" and number:
            self.rate_hz = 1e6 / number
        elif name == "duration" and number and number * 1000 <= LONGEST_NS:
            self.wall_ns = number * 1000
        return True

    def _count(self, text: str) -> int | None:
        # All metrics at once: microseconds, whether the thread was idle, bytes.
        return count_of(text.partition(",")[0])


MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_RECORD_LINES = 1000
MAX_PREFIX_PIECES = 200_000
MAX_PREFIX_LENGTHS = 64
MAX_PREFIX_CHARS = 32 * 2**20
_LOOKED_AT = 1000  # lines that tell whether records carry prefixes


class PySpyRaw(StackSource):
    format = "py-spy raw"

    def __init__(self, path: Path, label: str | None = None) -> None:
        super().__init__(path, label, tool="py-spy")

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks. Samples of stacks and `skipped_samples` are the file's own sum where counts are legible."""
        return self.parse(read_lines(self.path, self.label, losses, LINES, progress), names, losses)

    def parse(self, blocks: Iterable[list[str]], names: FrameNames, losses: Losses) -> Iterator[RawStack]:
        records = _Records(blocks)
        reader = _Reader(names, self.hints, prefixed=records.prefixed)
        for number, record in enumerate(records):
            stack = reader.stack(record, number)
            if stack is not None:
                yield stack
                continue
            losses.add("skipped_records", self.label)
            counts = (count_of(line[line.rfind(" ") + 1 :]) for line in record.split("\n"))
            losses.add("skipped_samples", self.label, sum(count or 0 for count in counts))


class _Reader:
    """Knows what records begin with by the pieces between semicolons; beyond the bounds grammar reads what is new."""

    def __init__(self, names: FrameNames, hints: dict[int, str], *, prefixed: bool) -> None:
        self._frames = FrameTexts(names, pyspy_frame)
        self._hints = hints
        self._prefixed = prefixed
        self._known: dict[tuple[str, ...], Prefixes] = {}
        self._lengths: list[int] = []  # numbers of pieces, the largest first
        self._pieces = self._chars = 0
        if not prefixed:
            self._learn([], NO_PREFIXES)

    def stack(self, record: str, number: int) -> RawStack | None:
        cut = record.rfind(" ")
        samples = count_of(record[cut + 1 :])
        if samples is None or cut < 0 or len(record) > MAX_RECORD_CHARS:
            return None
        pieces = record[:cut].split(";")
        for length in self._lengths:
            prefixes = self._known.get(tuple(pieces[:length]))
            if prefixes is not None:
                try:
                    frames = tuple(map(self._frames.known.__getitem__, pieces[length:]))
                except KeyError:  # something new, or a semicolon inside a name
                    break
                return RawStack(*prefixes, frames, samples, number)
        return self._new(record[:cut], pieces, samples, number)

    def _new(self, text: str, pieces: list[str], samples: int, number: int) -> RawStack | None:
        """A stack with something that was not met before, by the grammar."""
        found = split_prefixes(text, self._hints)
        if found is None:
            return None
        prefixes, position = found
        if self._prefixed and not prefixes.pids and prefixes.thread is None:
            return None
        rest = text[position:].split(";") if position < len(text) else []
        if prefixes.name is not None:
            name = prefixes.name
            # A thread's name may hold semicolons: what comes before the first frame is still the name.
            while rest and not rest[0].endswith(")"):
                name += ";" + rest.pop(0)
            prefixes = prefixes._replace(name=clean(name))
        if len(rest) > MAX_FRAMES:
            return None
        self._learn(pieces[: len(pieces) - len(rest)] if text else [], prefixes)
        return RawStack(*prefixes, self._frames.frames(rest), samples, number)

    def _learn(self, pieces: Sequence[str], prefixes: Prefixes) -> None:
        lengths = {*self._lengths, len(pieces)}
        self._pieces += len(pieces)
        self._chars += sum(map(len, pieces))
        bounded = self._pieces <= MAX_PREFIX_PIECES and self._chars <= MAX_PREFIX_CHARS
        if bounded and len(lengths) <= MAX_PREFIX_LENGTHS:
            self._known[tuple(pieces)] = prefixes
            self._lengths = sorted(lengths, reverse=True)


class _Records:
    """The records of blocks of lines, which a newline in a command line, a name or a path breaks in two.

    Where records carry a prefix (`prefixed`), one reaches to the next prefix, or to the line that ends in a count
    outside a command line. Without prefixes a line that ends in a count ends its record.
    """

    def __init__(self, blocks: Iterable[list[str]]) -> None:
        self._start: re.Pattern[str] | None = None
        iterator = iter(blocks)
        first = next((lines for lines in iterator if any(lines)), [])
        counted = sum(1 for line in first[:_LOOKED_AT] if _ends_in_count(line.rstrip("\r")))
        for start in (START_PROCESS, START_THREAD):
            met = sum(1 for line in first[:_LOOKED_AT] if start.match(line))
            if met and 2 * met >= counted:
                self._start = start
                break
        self._lines = (
            line[:-1] if line.endswith("\r") else line for lines in chain((first,), iterator) for line in lines
        )

    @property
    def prefixed(self) -> bool:
        return self._start is not None

    def __iter__(self) -> Iterator[str]:
        start = self._start
        parts: list[str] = []
        size = 0
        for line in self._lines:
            if parts and ((start is not None and start.match(line)) or size > MAX_RECORD_CHARS or not _goes_on(parts)):
                yield "\n".join(parts).rstrip("\n")  # trailing blank lines are of none
                parts = []
                size = 0
            if parts or line:
                parts.append(line)
                size += len(line)
        if parts:
            yield "\n".join(parts).rstrip("\n")


def _goes_on(parts: list[str]) -> bool:
    """Whether a line without a prefix belongs to the record before it."""
    if len(parts) >= MAX_RECORD_LINES:
        return False
    if not _ends_in_count(parts[-1]):
        return True
    # A count ends a record, unless it stands in a command line that is still open.
    if START_PROCESS.match(parts[0]) is None or parts[-1].rpartition(" ")[0].endswith('"'):
        return False
    return not any('";' in part for part in parts)


def _ends_in_count(line: str) -> bool:
    digits = line[line.rfind(" ") + 1 :]
    return digits.isdigit() and digits.isascii() and len(digits) < len(line)
