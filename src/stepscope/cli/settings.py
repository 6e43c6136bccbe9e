"""Settings of a project: `stepscope.toml`, or `[tool.stepscope]` in `pyproject.toml`, of the folder or one above it.

    [ignore]                                   # in pyproject.toml: [tool.stepscope.ignore]
    "input.loader_bound" = "the data set is made on the fly on purpose"

The nearest file that says something of stepscope decides, as for other tools of a project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.errors import UsageError

OWN_FILE = "stepscope.toml"
SHARED_FILE = "pyproject.toml"


def ignored_rules(folder: Path | None = None) -> dict[str, str]:
    """Rules not to judge, each with the reason, as the settings that hold in `folder` (the working directory by
    default) say.

    Raises UsageError for a file that cannot be read or says something that stepscope does not know.
    """
    start = (folder or Path.cwd()).absolute()
    for place in (start, *start.parents):
        for file in (place / OWN_FILE, place / SHARED_FILE):
            table = _table(file)
            if table is not None:
                return _ignored(table, file)
    return {}


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


def _ignored(table: dict[str, Any], file: Path) -> dict[str, str]:
    from stepscope.diagnose import RISKS, RULES

    unknown = next((key for key in table if key != "ignore"), None)
    if unknown is not None:
        raise UsageError(f"{file}: {unknown}: no such setting; there is ignore, a table of rules and reasons")
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
