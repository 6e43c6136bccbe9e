"""Option types that several commands share, so that one name means one thing everywhere, and what their text means."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.api import Progress, ReadOptions


class OptionGroup(Struct, frozen=True):
    """Options that belong together, each declared once: its fields. A command that has a parameter of such a type has
    these options in its place, and is handed what was given for them as one."""


def ungrouped(function: Any) -> Any:
    """`function` as the parser takes it: with the options of its groups as parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, OptionGroup)}
    if not groups:
        return function
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = inspect.Parameter.empty if field.default is NODEFAULT else field.default
            parameters.append(parameter.replace(name=field.name, annotation=types[field.name], default=default))

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return function(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="The run folder, new or empty; stepscope-runs/<time>-<script> by default."
    ),
]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write what is shown as JSON; - is stdout.")
]
HtmlFile = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write the report as a page; - is stdout.")
]
Rate = Annotated[float, typer.Option("--rate", metavar="HZ", help="Stack samples per second.")]
Rows = Annotated[
    str | None,
    typer.Option("--rows", metavar="N|all", help="Rows to show; 10 on a terminal, all in files by default."),
]
NoSource = Annotated[bool, typer.Option("--no-source", help="Quote no line of source text anywhere.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing of ours.")]
SourceRoot = Annotated[
    list[Path] | None,
    typer.Option(
        "--source-root",
        metavar="DIR",
        help="A folder of your code, by default all that is no known library; repeatable.",
    ),
]
PathMap = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="OLD=NEW", help="Paths in the trace that begin with OLD lie in NEW; repeatable."),
]
Library = Annotated[
    list[str] | None,
    typer.Option("--library", metavar="NAME", help="A module or folder that is not your code; repeatable."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Keep no tables of traces.")]
Steps = Annotated[str | None, typer.Option("--steps", metavar="A:B", help="Read steps A to B of traces only.")]
CsvFile = Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV; - is stdout.")]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="CHECK",
        help="End with status 1 if the run holds one, with 4 if nothing could tell: recompile, graph-break; "
        "repeatable, or with commas.",
    ),
]
Phase = Annotated[
    str | None,
    typer.Option(
        "--phase",
        metavar="NAME",
        help="Only main threads in this phase: data_wait, forward, backward, optimizer, other or startup.",
    ),
]
OneRank = Annotated[int | None, typer.Option("--rank", metavar="N", help="Only this rank and its workers.")]
ProcessKind = Annotated[
    str, typer.Option("--process", metavar="KIND", help="Only main processes or loader workers: main, workers, all.")
]
Parked = Annotated[bool, typer.Option("--parked", help="Keep helper threads that are parked in a wait.")]

CHECKS = ("recompile", "graph-break")  # of `stepscope.analyze.compilers`, which takes long to import

LARGE_BYTES = 48 * 2**20  # of packed traces: some 600 MB unpacked
_STEPS = re.compile(r"(\d{1,18})(?::(\d{1,18}))?")


def spare_memory(paths: Sequence[Path]) -> None:
    """Let Polars give back at once what it frees if the files are large; before it is imported. 3 % of the time."""
    with contextlib.suppress(OSError):  # who opens them says what is wrong with them
        if sum(path.stat().st_size for path in paths if path.is_file()) >= LARGE_BYTES:
            os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")


class Reading(OptionGroup, frozen=True):
    """How a command reads what it is given."""

    source_root: SourceRoot = None
    map_: PathMap = None
    library: Library = None
    steps: Steps = None
    tables: Annotated[
        Path | None,
        typer.Option("--tables", metavar="DIR", help="Keep the tables of traces there, not in the user cache."),
    ] = None
    no_cache: NoCache = False

    def options(self, progress: Progress | None = None, *, judged: bool = False, keep: bool = True) -> ReadOptions:
        """Raises `UsageError`. `judged`: rules are, but for those that the project's settings ignore."""
        from stepscope.api import ReadOptions
        from stepscope.cli.settings import ignored_rules

        if self.tables is not None and self.no_cache:
            raise UsageError("--tables and --no-cache contradict each other; give one of them")
        return ReadOptions(
            tables=self.tables,
            cache=not self.no_cache,
            steps=parse_steps(self.steps),
            source_roots=tuple(self.source_root or ()),
            maps=_parse_maps(self.map_),
            libraries=tuple(self.library or ()),
            progress=progress,
            ignored=ignored_rules() if judged else {},
            keep=keep,
        )


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """ "10:20" or "10" as (first, last); raises `UsageError`."""
    if text is None:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--steps {text}: not a range of steps; give the first and the last, e.g. --steps 10:20")
    return int(match[1]), int(match[2] or match[1])


def _parse_maps(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    """ "OLD=NEW" texts as pairs; raises `UsageError`."""
    pairs = []
    for text in texts or ():
        old, separator, new = text.partition("=")
        if not separator or not old or not new:
            raise UsageError(
                f"--map {text}: not OLD=NEW; give two beginnings of paths, e.g. --map /build/src=/home/me/src"
            )
        pairs.append((old, new))
    return tuple(pairs)


def parse_checks(texts: list[str] | None) -> tuple[str, ...]:
    """Names of checks, each once, several in a text separated by commas; raises `UsageError`."""
    names = [name.strip().replace("_", "-") for text in texts or () for name in text.split(",")]
    unknown = next((name for name in names if name not in CHECKS), None)
    if unknown is not None:
        raise UsageError(f"--fail-on {unknown or '(nothing)'}: no such check; there are {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(names))
