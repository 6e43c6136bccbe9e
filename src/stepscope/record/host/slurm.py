"""A batch script with recording switched on: `stepscope run --` in front of every program that trains.

Only insertions: taking them out again gives the script as it was. Whatever is not understood is left alone and named.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.record.host.command import PYTHON
from stepscope.record.host.slurm_shell import Command, UnclosedText, Word, commands

_SHEBANG = re.compile(r"#!\s*(\S+)(?:[ \t]+(\S+))?")
MOST_CHARACTERS = 1_000_000


class Starter(msgspec.Struct, frozen=True):
    """A program that starts the one after its options.

    Attributes:
        values: options followed by one word; `pairs` by two.
        operands: words between the options and the program.
        pins: whether it binds what it starts to processors or lowers its priority; the recorder stays outside then.
    """

    values: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    operands: int = 0
    pins: bool = False


class Programs(msgspec.Struct, frozen=True):
    """What is known of programs by their names, as `slurm_programs.json` has it."""

    shells: frozenset[str]
    task_starters: dict[str, Starter]  # start the tasks of a job: the recorder belongs behind them, once per task
    like_mpirun: frozenset[str]
    task_flags: frozenset[str]  # their options that take no value, though nothing about them says so
    starters: dict[str, Starter]
    containers: frozenset[str]
    container_options: Starter
    other_containers: frozenset[str]
    runners: frozenset[str]  # started with `run`, they find the interpreter; the recorder reaches what they start
    trainers: dict[str, tuple[str, ...]]  # programs that train, with the words that must come first; none takes any
    no_training_modules: frozenset[str]
    profilers: frozenset[str]
    profiler_modules: frozenset[str]
    harmless: frozenset[str]  # what scripts also do, with names of Python files in it or not


KNOWN = msgspec.json.decode(Path(__file__).with_name("slurm_programs.json").read_bytes(), type=Programs)
TASK_STARTERS = KNOWN.task_starters | dict.fromkeys(KNOWN.like_mpirun, KNOWN.task_starters["mpirun"])
PROGRAMS = KNOWN.shells.union(
    ("stepscope",), TASK_STARTERS, KNOWN.starters, KNOWN.containers, KNOWN.other_containers, KNOWN.runners,
    KNOWN.trainers, KNOWN.profilers,
)  # fmt: skip
SHELL_SCRIPT = re.compile(r".+\.(?:sh|bash|sbatch|slurm|job)")
MENTION = re.compile(
    r"\.py(?![\w.])|(?<![\w.-])(?:torchrun|deepspeed|horovodrun|accelerate launch|python[\d.]*)(?![\w.-])"
)


@dataclass(frozen=True)
class SwitchedOn:
    """`text` is the new script. `lines` were changed, `recorded` had been before, `left` may train and stay as is.

    Lines count from 1; of `left` and `remarks` each comes with what is to be said of it.
    """

    text: str
    lines: tuple[int, ...]
    recorded: tuple[int, ...]
    left: tuple[tuple[int, str], ...]
    remarks: tuple[tuple[int, str], ...]


def switch_on(script: str, *, program: str = "stepscope") -> SwitchedOn:
    """The script with `program run --` inserted where a training is started.

    Raises `UnreadableInputError` for what is no text, `UsageError` for a script of another shell and for one whose
    quotes never close.
    """
    if len(script) > MOST_CHARACTERS or "\0" in script:
        raise UnreadableInputError("this is no batch script; give the script that is handed to sbatch")
    shebang = _SHEBANG.match(script)
    if shebang is not None:
        shell = (shebang[2] if shebang[1].endswith("/env") and shebang[2] else shebang[1]).rpartition("/")[2]
        if shell not in KNOWN.shells:
            raise UsageError(
                f"this is a script for {shell}; put `stepscope run --` in front of its training command by hand"
            )
    if shlex.quote(program) != program:
        raise UsageError(f"--stepscope {program} needs quoting in a shell; give a path without blanks or special signs")
    ends = [match.start() for match in re.finditer("\n", script)]

    def line(offset: int) -> int:
        return bisect.bisect_left(ends, offset) + 1

    try:
        read = commands(script)
        finder = _Finder(Variables(read))
        found = [one for command in read for one in finder.command(command)]
    except UnclosedText as error:
        raise UsageError(
            f"line {line(error.offset)}: {error.what} is never closed; check the script with bash -n"
        ) from None
    except RecursionError:
        raise UsageError("quotes and brackets in it are nested too deeply; put the recorder in by hand") from None
    places = {one.offset: one.text for one in sorted(found, key=lambda one: one.offset) if one.what == PLACE}
    cuts = [0, *places, len(script)]
    return SwitchedOn(
        text=f"{program} run -- ".join(script[start:end] for start, end in itertools.pairwise(cuts)),
        lines=tuple(dict.fromkeys(line(offset) for offset in places)),
        recorded=tuple(dict.fromkeys(line(one.offset) for one in found if one.what == RECORDED)),
        left=tuple((line(one.offset), one.text) for one in found if one.what == LEFT),
        remarks=tuple((line(offset), note) for offset, note in places.items() if note),
    )


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_WHOLE_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_DECLARES = ("export", "declare", "typeset", "local", "readonly")
_DEEPEST = 5  # variables within variables, shells within shells

IN_CONTAINER = "it runs inside a container: stepscope must be installed in there too"


PLACE, LEFT, RECORDED = "place", "left", "recorded"


@dataclass(frozen=True)
class Found:
    """A command at `offset` that may start a training: the recorder goes in there, the command stays as it is because
    of `text`, or it is recorded already. Of a place `text` is a remark, empty without one."""

    what: str
    offset: int
    text: str = ""


@dataclass(frozen=True)
class _Part:
    """A word, or one of those that a known variable stands for; only the first of them can have something before it."""

    text: str
    word: Word
    first: bool = True

    @property
    def base(self) -> str:
        return os.path.basename(self.text)

    @property
    def unknown(self) -> bool:
        return self.text.startswith(("$", "`")) and self.base == self.text


@dataclass(frozen=True)
class _Way:
    """How a program was reached: inside a task, with the recorder to go before `anchor`, with a remark."""

    in_task: bool = False
    anchor: _Part | None = None
    note: str = ""
    depth: int = 0


class Variables:
    """Values of variables that a script sets to one value, as words."""

    def __init__(self, script: Iterable[Command]) -> None:
        self._values: dict[str, tuple[str, ...] | None] = {}
        for command in script:
            words = command.words[1:] if command.words[0].text in _DECLARES else command.words
            assigned = [(word, *word.assigned) for word in words if word.assigned is not None]
            if len(assigned) == len(words):
                for word, name, text in assigned:
                    value = tuple(text.split()) if word.elements is None else tuple(part.text for part in word.elements)
                    known = self._values.get(name, ())
                    if re.match(r"\w+\+=", word.text):
                        self._values[name] = None if known is None else known + value
                    else:
                        self._values[name] = value if name not in self._values or known == value else None

    def expand(self, text: str, *, whole: bool = False, depth: int = 0) -> list[str]:
        """The words `text` stands for; itself where that is not known. `whole` keeps a scalar in one word."""
        found = _WHOLE_VARIABLE.fullmatch(text)
        if found is None or depth > _DEEPEST:
            return [text]
        value = self._values.get(found[1] or found[2])
        if value is None and found[3]:
            value = tuple(found[3].split())
        if not value:
            return [text]
        if whole and "[" not in text:
            return [" ".join(value)]
        return [word for part in value for word in self.expand(part, depth=depth + 1)]


class _Finder:
    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def command(self, command: Command, way: _Way | None = None) -> list[Found]:
        parts: list[_Part] = []
        for word in command.words:
            texts = self._variables.expand(word.text, whole=word.quoted)
            parts += [_Part(text, word, first=index == 0) for index, text in enumerate(texts)]
        found = self._program(parts, way or _Way())
        if (
            not found
            and command.fed
            and any(part.base in KNOWN.shells or PYTHON.fullmatch(part.base) for part in parts)
        ):
            return _left(parts[0], "its program is a here-document")
        if command.piped:
            return [Found(LEFT, one.offset, "it reads from a pipe") if one.what == PLACE else one for one in found]
        return found

    def _program(self, parts: list[_Part], way: _Way) -> list[Found]:
        """`parts` begins with a program or with assignments to its environment."""
        while parts and _ASSIGNMENT.fullmatch(parts[0].text):
            parts = parts[1:]
        if not parts:
            return []
        base = parts[0].base
        for names, read in (
            (TASK_STARTERS, self._tasks),
            (KNOWN.starters, self._started),
            (KNOWN.containers, self._contained),
            (KNOWN.shells, self._shell),
        ):
            if base in names:
                return read(parts, way)
        if base in KNOWN.runners:
            later = any(_is_known(part.base) for part in parts[2:])
            return self._place(parts[0], way) if later and parts[1].text == "run" else []
        return self._last(parts, way)

    def _last(self, parts: list[_Part], way: _Way) -> list[Found]:
        head, base = parts[0], parts[0].base
        if base == "stepscope":
            return [Found(RECORDED, head.word.start)] if len(parts) > 1 and parts[1].text == "run" else []
        if PYTHON.fullmatch(base):
            return self._python(parts, way)
        if base in KNOWN.trainers:
            wanted = KNOWN.trainers[base]
            return self._place(head, way) if len(parts) > 1 and (not wanted or parts[1].text in wanted) else []
        if base in KNOWN.profilers:
            return _left(head, f"it runs under {base}, another profiler") if _mentions(parts[1:]) else []
        if base in KNOWN.other_containers:
            where = "put `stepscope run --` in front of the program inside"
            return _left(head, f"{base} starts a container; {where}") if _mentions(parts[1:]) else []
        if base.endswith(".py"):
            return self._place(head, way)
        if SHELL_SCRIPT.fullmatch(base):
            return self._other_script(head, way)
        if base in KNOWN.harmless:
            return []
        if head.unknown:
            return _left(head, f"what {head.text} stands for is not known here")
        return _left(head, f"how {base} starts a program is not known here") if _mentions(parts) else []

    def _tasks(self, parts: list[_Part], way: _Way) -> list[Found]:
        """`srun`, `mpirun`: every part between colons has options and a program of its own."""
        starter = TASK_STARTERS[parts[0].base]
        if any(part.text == "--multi-prog" for part in parts):
            return _left(parts[0], "its programs stand in the file given to --multi-prog")
        boxed = any(part.text.startswith("--container-image") for part in parts)
        inner = _Way(in_task=True, note=IN_CONTAINER if boxed else way.note, depth=way.depth)
        found: list[Found] = []
        rest = parts[1:]
        while rest:
            colon = next((index for index, part in enumerate(rest) if part.text == ":"), len(rest))
            task = rest[_after_options(rest[:colon], starter, guess=True) : colon]
            if task and task[0].unknown:
                # options in a variable that is set elsewhere; the program shows further on, or not at all
                known = next((index for index, part in enumerate(task) if _is_program(part.base)), 0)
                task = task[known:]
            found += self._program(task, inner)
            rest = rest[colon + 1 :]
        return found

    def _started(self, parts: list[_Part], way: _Way) -> list[Found]:
        base = parts[0].base
        starter = KNOWN.starters[base]
        if base == "taskset" and any(part.text in starter.values for part in parts[1:3]):
            starter = msgspec.structs.replace(starter, operands=0)  # a list of processors instead of a mask
        if base == "command" and len(parts) > 1 and parts[1].text in ("-v", "-V"):
            return []
        if starter.pins and way.anchor is None:
            way = replace(way, anchor=parts[0])
        return self._program(parts[1 + _after_options(parts[1:], starter) :], way)

    def _contained(self, parts: list[_Part], way: _Way) -> list[Found]:
        start = 1 + _after_options(parts[1:], KNOWN.container_options)
        action = parts[start].text if start < len(parts) else ""
        if action != "exec":
            odd = f"`{parts[0].base} {action}` starts what the image names; put `stepscope run --` into it"
            return _left(parts[0], odd) if action == "run" or _mentions(parts[start:]) else []
        image = start + 1 + _after_options(parts[start + 1 :], KNOWN.container_options)
        return self._program(parts[image + 1 :], replace(way, anchor=None, note=IN_CONTAINER))

    def _shell(self, parts: list[_Part], way: _Way) -> list[Found]:
        for index, part in enumerate(parts[1:], 1):
            if not re.fullmatch(r"-\w*c", part.text):
                if not part.text.startswith(("-", "+")):
                    return self._other_script(parts[0], way)
                continue
            text = parts[index + 1] if index + 1 < len(parts) else None
            if text is None or way.depth > _DEEPEST:
                return []
            word = text.word
            if text.text != word.text or not word.quoted or not word.origins or word.origins[0] == word.start:
                return _left(text, "the commands given to the shell are not one quoted text")
            try:
                inner = commands(word.text, (*word.origins, word.origins[-1] + 1))
            except UnclosedText:
                return _left(text, "the quoted commands cannot be understood")
            deeper = _Way(way.in_task, None, way.note, way.depth + 1)
            return [found for command in inner for found in self.command(command, deeper)]
        return []

    def _other_script(self, head: _Part, way: _Way) -> list[Found]:
        if way.in_task:
            return self._place(head, way)
        return _left(head, "it starts another script; switch that one on, or put `stepscope run --` in front")

    def _python(self, parts: list[_Part], way: _Way) -> list[Found]:
        index = 1
        while index < len(parts):
            text = parts[index].text
            if text.startswith("-m"):
                rest = [*([text[2:]] if text[2:] else []), *(part.text for part in parts[index + 1 :])]
                module = rest[0] if rest else ""
                if module == "stepscope":
                    return [Found(RECORDED, parts[0].word.start)] if rest[1:2] == ["run"] else []
                if module in KNOWN.profiler_modules:
                    return _left(parts[0], f"it runs under {module}, another profiler")
                return [] if module in KNOWN.no_training_modules or not module else self._place(parts[0], way)
            if text in ("-c", "-V", "-VV", "--version", "-h", "--help", "-"):
                return []
            if not text.startswith("-"):
                return [] if os.path.basename(text) == "setup.py" else self._place(parts[0], way)
            index += 2 if text in ("-W", "-X") else 1
        return []

    def _place(self, head: _Part, way: _Way) -> list[Found]:
        before = way.anchor or head
        if not before.first:
            where = f"put `stepscope run --` before {head.base} where {before.word.text} is set"
            return _left(before, f"{before.word.text} holds more than the program; {where}")
        return [Found(PLACE, before.word.start, way.note)]


def _left(part: _Part, reason: str) -> list[Found]:
    return [Found(LEFT, part.word.start, reason)]


def _after_options(parts: Sequence[_Part], starter: Starter, *, guess: bool = False) -> int:
    """The number of words before the program.

    With `guess`, an option that is not in the table takes the next word as its value unless that is a known program.
    """
    index = 0
    while index < len(parts) and parts[index].text.startswith("-"):
        text = parts[index].text
        if text == "--":
            index += 1
            break
        unknown = text.startswith("--") and not (text.startswith("--no-") or "=" in text or text in KNOWN.task_flags)
        if text in starter.pairs:
            index += 3
        elif text in starter.values:
            index += 2
        elif guess and unknown and index + 1 < len(parts):
            following = parts[index + 1]
            index += 1 if following.text.startswith("-") or _is_known(following.base) else 2
        else:
            index += 1
    return index + starter.operands


def _is_known(base: str) -> bool:
    return _is_program(base) or base.endswith(".py") or SHELL_SCRIPT.fullmatch(base) is not None


def _is_program(base: str) -> bool:
    return base in PROGRAMS or PYTHON.fullmatch(base) is not None


def _mentions(parts: Iterable[_Part]) -> bool:
    return MENTION.search(" ".join(part.text for part in parts)) is not None
