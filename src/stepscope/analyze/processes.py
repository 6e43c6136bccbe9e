"""The processes of the run, and what to do about those in which the agent never reported."""

from __future__ import annotations

import re

from stepscope.model import ProcessFacts
from stepscope.tables.schema import Tables

_TRAINING_ROLES = ("rank", "root", "other")  # launchers, workers and helpers need no agent of their own
_ISOLATED = re.compile(r"(^|\s)-[a-zA-Z]*[IES][a-zA-Z]*(\s|$)")


def facts(tables: Tables) -> tuple[ProcessFacts, ...]:
    """Every process seen from outside; a torch process without an agent has `reported` False and a remedy."""
    found = []
    for row in tables.processes.sort("start_ns", "pid").iter_rows(named=True):
        role, command = row["role"] or "other", row["command"] or ""
        silent = bool(row["torch"]) and not row["reported"] and role in _TRAINING_ROLES
        found.append(
            ProcessFacts(
                pid=row["pid"] if row["pid"] is not None else -1,
                role=role,
                command=command,
                reported=not silent,
                remedy=_remedy(command) if silent else None,
            )
        )
    return tuple(found)


def _remedy(command: str) -> str:
    arguments = command.split(" ")
    flags = []
    for argument in arguments[1:]:
        if not argument.startswith("-"):
            break
        flags.append(argument)
    isolating = [flag for flag in flags if _ISOLATED.search(flag)]
    if isolating:
        return f"Python ran with {isolating[0]} and ignores PYTHONPATH: drop the flag, or use stepscope.profile() in it"
    return (
        "the agent never started in it: keep PYTHONPATH and STEPSCOPE_RECORD in its environment (a cleaned one, a "
        "container or a script that overwrites PYTHONPATH loses them), or use stepscope.profile() in the script"
    )
