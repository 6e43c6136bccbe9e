"""Option types that several commands share, so that one name means one thing everywhere, and what their text means."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from stepscope.cli import say
from stepscope.errors import EnvironmentRefusal, StepscopeError, UsageError

if TYPE_CHECKING:
    from stepscope.api import Progress, ReadOptions, Run
    from stepscope.model.machine import Prices
    from stepscope.report.words import Shortener


def shortener(run: Run) -> Shortener:
    """Writes paths of a run as people do: relative to where it ran."""
    from stepscope.report.words import Shortener

    facts = run.tables.run
    return Shortener({"cwd": facts.cwd or str(run.folder), "user_roots": facts.user_roots})


class OptionGroup(Struct, frozen=True):
    """Options that belong together, each declared once: its fields. A command that has a parameter of such a type has
    these options in its place, and is handed what was given for them as one."""


def ungrouped(function: Any) -> Any:
    """`function` as the parser takes it: with the options of its groups as parameters of their own."""
    # not `get_type_hints`: before Python 3.11 that makes another type of what is None by default
    signature = inspect.signature(function, eval_str=True)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, OptionGroup)}
    if not groups:
        return function
    parameters = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter)
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


def option(spelled: str, help: str | None, **more: Any) -> Any:
    """An option, spelled as its help shows it: its names, and behind them what it takes (`--out -o FILE`)."""
    words = spelled.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=help, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


RunFolder = Annotated[
    Path | None, option("--out DIR", "The run folder, new or empty; stepscope-runs/<time>-<script> by default.")
]
JsonFile = Annotated[str | None, option("--json FILE", "Write what is shown as JSON; - is stdout.")]
HtmlFile = Annotated[str | None, option("--html FILE", "Write the report as a page; - is stdout.")]
Rate = Annotated[float, option("--rate HZ", "Stack samples per second.")]
Rows = Annotated[str | None, option("--rows N|all", "Rows to show; 10 on a terminal, all in files by default.")]
NoSource = Annotated[bool, option("--no-source", "Quote no line of source text anywhere.")]
Force = Annotated[bool, option("--force", "Overwrite existing files.")]
Quiet = Annotated[bool, option("--quiet", "Print nothing of ours.")]
SourceRoot = Annotated[
    list[Path] | None,
    option("--source-root DIR", "A folder of your code, by default all that is no known library; repeatable."),
]
PathMap = Annotated[
    list[str] | None, option("--map OLD=NEW", "Paths in the trace that begin with OLD lie in NEW; repeatable.")
]
Library = Annotated[list[str] | None, option("--library NAME", "A module or folder that is not your code; repeatable.")]
NoCache = Annotated[bool, option("--no-cache", "Keep no tables of traces.")]
Steps = Annotated[str | None, option("--steps A:B", "Read steps A to B only.")]
CsvFile = Annotated[str | None, option("--csv FILE", "Write the table as CSV; - is stdout.")]
FailOn = Annotated[
    list[str] | None,
    option(
        "--fail-on CHECK",
        "End with status 1 if the run holds one, with 4 if nothing could tell: recompile, graph-break; "
        "repeatable, or with commas.",
    ),
]
Phase = Annotated[
    str | None,
    option(
        "--phase NAME", "Only main threads in this phase: data_wait, forward, backward, optimizer, other or startup."
    ),
]
OneRank = Annotated[int | None, option("--rank N", "Only this rank and its workers.")]
ProcessKind = Annotated[str, option("--process KIND", "Only main processes or loader workers: main, workers, all.")]
Parked = Annotated[bool, option("--parked", "Keep helper threads that are parked in a wait.")]

CHECKS = ("recompile", "graph-break")  # of `stepscope.analyze.compilers`, which takes long to import

_STEPS = re.compile(r"(\d{1,18})(?::(\d{1,18}))?")


class Reading(OptionGroup, frozen=True):
    source_root: SourceRoot = None
    map_: PathMap = None
    library: Library = None
    steps: Steps = None
    tables: Annotated[
        Path | None, option("--tables DIR", "Keep the tables of traces there, not in the user cache.")
    ] = None
    no_cache: NoCache = False

    def start(self, paths: Sequence[Path]) -> None:
        """Let the child that was begun read the one trace, if it is one, beside the imports of what analyses it."""
        from stepscope import workers
        from stepscope.api import TRACES
        from stepscope.files import default_folder

        if len(paths) == 1 and self.steps is None and paths[0].name.endswith(TRACES) and paths[0].is_file():
            workers.start(paths[0], paths[0], None if self.no_cache else self.tables or default_folder())
        else:
            workers.dismiss()

    def options(
        self,
        progress: Progress | None = None,
        *,
        judged: bool = False,
        keep: bool = True,
        priced: Priced | None = None,
        rank: int | None = None,
    ) -> ReadOptions:
        """Raises `UsageError`. `judged`: rules are, but for those that the project's settings ignore.

        Of a run of many ranks that was reduced `rank` is read in full, beside those that the verdict points at.
        """
        from stepscope.api import ReadOptions
        from stepscope.model.machine import NO_PRICES

        if self.tables is not None and self.no_cache:
            raise UsageError("--tables and --no-cache contradict each other; give one of them")
        maps = [text.partition("=") for text in self.map_ or ()]
        odd = next(("".join(parts) for parts in maps if not all(parts)), None)
        if odd is not None:
            example = "give two beginnings of paths, e.g. --map /build/src=/home/me/src"
            raise UsageError(f"--map {odd}: not OLD=NEW; {example}")
        return ReadOptions(
            tables=self.tables,
            cache=not self.no_cache,
            ranks=() if rank is None else (rank,),
            steps=parse_steps(self.steps),
            source_roots=tuple(self.source_root or ()),
            maps=tuple((old, new) for old, _, new in maps),
            libraries=tuple(self.library or ()),
            progress=progress,
            ignored=ignored_rules() if judged else {},
            keep=keep,
            prices=(priced or Priced()).prices() if judged else NO_PRICES,
        )


class Priced(OptionGroup, frozen=True):
    price_kwh: Annotated[
        float | None, option("--price-kwh X", "What a kWh costs you; says what the run cost, in your currency.")
    ] = None
    gpu_hour: Annotated[float | None, option("--gpu-hour X", "What a GPU costs you for an hour.")] = None
    co2_kwh: Annotated[float | None, option("--co2-kwh G", "Grams of CO2 that a kWh of yours stands for.")] = None

    def prices(self) -> Prices:
        """As given, else as the project's settings say; raises `UsageError`."""
        from stepscope.model.machine import Prices

        given = {"--price-kwh": self.price_kwh, "--gpu-hour": self.gpu_hour, "--co2-kwh": self.co2_kwh}
        for name, value in given.items():
            if value is not None and not 0 <= value < inf:
                raise UsageError(f"{name} {value}: not a price; give a number, 0 or more, e.g. {name} 0.30")
        usual = prices()
        return Prices(
            kwh=usual.kwh if self.price_kwh is None else self.price_kwh,
            gpu_hour=usual.gpu_hour if self.gpu_hour is None else self.gpu_hour,
            co2_g_per_kwh=usual.co2_g_per_kwh if self.co2_kwh is None else self.co2_kwh,
        )


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """ "10:20" or "10" as (first, last); raises `UsageError`."""
    if text is None:
        return None
    match = _STEPS.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--steps {text}: not a range of steps; give the first and the last, e.g. --steps 10:20")
    return int(match[1]), int(match[2] or match[1])


def parse_checks(texts: list[str] | None) -> tuple[str, ...]:
    """Names of checks, each once, several in a text separated by commas; raises `UsageError`."""
    names = [name.strip().replace("_", "-") for text in texts or () for name in text.split(",")]
    unknown = next((name for name in names if name not in CHECKS), None)
    if unknown is not None:
        raise UsageError(f"--fail-on {unknown or '(nothing)'}: no such check; there are {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(names))


OWN_FILE = "stepscope.toml"
SHARED_FILE = "pyproject.toml"
PRICES = ("price_kwh", "gpu_hour", "co2_kwh")


def ignored_rules(folder: Path | None = None) -> dict[str, str]:
    """Rules not to judge, each with the reason, as the settings that hold in `folder` (the working directory by
    default) say.

    Raises UsageError for a file that cannot be read or says something that stepscope does not know.
    """
    table, file = _nearest(folder)
    return _checked(table, file)


def watch_share(folder: Path | None = None, *, asked: bool = False) -> float:
    """The share of a run's time that monitors may take, 0 where none are wanted: `asked` for, or as the environment or
    else the settings say. Raises UsageError as `ignored_rules`.
    """
    from stepscope.record.agent.config import WATCH_SHARE, watch_asked

    table, file = _nearest(folder)
    watch = table.get("watch", {})
    _checked(table, file)
    told = watch_asked()
    wanted = asked or (watch.get("on", False) if told is None else told)
    return float(watch.get("percent", 100 * WATCH_SHARE)) / 100 if wanted else 0.0


def prices(folder: Path | None = None) -> Prices:
    """Of energy and GPUs, as the settings say. Raises UsageError as `ignored_rules`."""
    from stepscope.model.machine import Prices

    table, file = _nearest(folder)
    _checked(table, file)
    told = table.get("energy", {})
    return Prices(*(None if told.get(name) is None else float(told[name]) for name in PRICES))


def _nearest(folder: Path | None) -> tuple[dict[str, Any], Path]:
    start = (folder or Path.cwd()).absolute()
    for place in (start, *start.parents):
        for file in (place / OWN_FILE, place / SHARED_FILE):
            table = _table(file)
            if table is not None:
                return table, file
    return {}, start


def _table(file: Path) -> dict[str, Any] | None:
    """What the file says of stepscope; None where it does not exist or says nothing."""
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); mend it or move it away") from None
    import msgspec.toml

    try:
        content = msgspec.toml.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        if file.name == SHARED_FILE and "tool.stepscope" not in text:
            return None  # broken, and no business of ours
        raise UsageError(f"{file}: no valid TOML ({error}); mend it") from None
    if file.name == OWN_FILE:
        return content
    tools = content.get("tool")
    table = tools.get("stepscope") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{file}: tool.stepscope is no table; write [tool.stepscope.ignore]")
    return table


def _checked(table: dict[str, Any], file: Path) -> dict[str, str]:
    from stepscope.diagnose import RISKS, RULES

    unknown = next((key for key in table if key not in ("ignore", "watch", "energy")), None)
    if unknown is not None:
        raise UsageError(f"{file}: {unknown}: no such setting; there are ignore, watch and energy, three tables")
    _check_watch(table.get("watch", {}), file)
    _check_energy(table.get("energy", {}), file)
    ignored = table.get("ignore", {})
    if not isinstance(ignored, dict):
        raise UsageError(f'{file}: ignore is a table of rules and reasons; write [ignore] and "rule" = "reason" below')
    names = {*(rule.name for rule in RULES), *(rule.name for rule in RISKS)}
    for rule, reason in ignored.items():
        if rule not in names:
            raise UsageError(f"{file}: ignore: no rule is called {rule}; the rules are in docs/findings.md")
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f'{file}: ignore: say why; write "{rule}" = "the reason"')
    return dict(ignored)


def _check_watch(watch: Any, file: Path) -> None:
    from stepscope.record.agent.config import WATCH_SHARE

    known = isinstance(watch, dict) and set(watch) <= {"on", "percent"}
    if not known or not isinstance(watch.get("on", True), bool):
        raise UsageError(f"{file}: watch is a table of on and percent; write [watch] and on = true (or false) below")
    percent = watch.get("percent", 1)
    if isinstance(percent, bool) or not isinstance(percent, (int, float)) or not 0 < percent <= 100 * WATCH_SHARE:
        raise UsageError(f"{file}: watch: percent lies between 0 and {100 * WATCH_SHARE:g}, of the run's time")


def _check_energy(told: Any, file: Path) -> None:
    if not isinstance(told, dict) or not set(told) <= set(PRICES):
        raise UsageError(
            f"{file}: energy is a table of {', '.join(PRICES)}; write [energy] and price_kwh = 0.30, say, below"
        )
    for name, value in told.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
            raise UsageError(f"{file}: energy: {name} is a number, 0 or more")


PASSED = 0
FAILED = StepscopeError.exit_code
NOT_JUDGED = EnvironmentRefusal.exit_code
OUTCOMES = {FAILED: "check failed", NOT_JUDGED: "check not judged", PASSED: "check passed"}  # the first one decides


def judge(run: Run, names: Sequence[str], *, quiet: bool = False, source: bool = True) -> int:
    """Check `run`, say one line for each of `names`, and return the exit status; `source` False quotes no line."""
    if not names:
        return PASSED
    from stepscope.analyze.compilers import checks
    from stepscope.report.document import without_quotes
    from stepscope.report.escape import plain_mapping
    from stepscope.report.words import Shortener

    facts = run.analysis
    # without steps, the recorder did not get into the process, and there was nobody to see a compilation
    found = checks(facts.compilers, names, recorded=run.recorded and bool(facts.steps))
    shorten = Shortener(plain_mapping(facts.run))
    states = set()
    for check in found:
        state = NOT_JUDGED if not check.judged else FAILED if check.failed else PASSED
        states.add(state)
        where = f" ({shorten(check.place.file, check.place.line)})" if check.place else ""
        if not quiet:
            say(f"{OUTCOMES[state]}: {check.name}: {check.text if source else without_quotes(check.text)}{where}")
    return next(state for state in OUTCOMES if state in states)
