"""Settings of a project: `stepscope.toml`, or `[tool.stepscope]` in `pyproject.toml`, of the folder or one above it.

    [ignore]                                   # in pyproject.toml: [tool.stepscope.ignore]
    "input.loader_bound" = "the data set is made on the fly on purpose"

    [watch]                                    # monitors in every recorded run
    on = true
    percent = 0.5                              # of a run's time that they may take: 1 by default and at most

    [energy]                                   # prices of every report, in your currency
    price_kwh = 0.30
    gpu_hour = 1.80
    co2_kwh = 380                              # grams of CO2 of a kWh

The nearest file that says something of stepscope decides, as for other tools of a project.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.record.agent.config import WATCH_SHARE, watch_asked

if TYPE_CHECKING:
    from stepscope.model.machine import Prices

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
