"""`stepscope doctor`: what this machine allows, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.cli.options import Force, option
from stepscope.errors import UsageError
from stepscope.report import outputs

if TYPE_CHECKING:
    from rich.console import Console

    from stepscope.record.host.doctor import Doctor

_STYLES = {"ok": "green", "limited": "yellow", "missing": "yellow", "unknown": "dim"}


def doctor(
    python: Annotated[str | None, option("--python FILE", "The training environment's interpreter.")] = None,
    json_file: Annotated[str | None, option("--json FILE", "Write the facts as JSON; - is stdout.")] = None,
    force: Force = False,
) -> None:
    """Say what this machine allows, and what each limit costs the report."""
    from stepscope.record.host.doctor import examine

    if json_file not in (None, outputs.STDOUT) and Path(str(json_file)).exists() and not force:
        raise UsageError(f"{json_file} exists; add --force to overwrite it")
    with outputs.progress("looking at this machine"):
        facts = examine(python)
    data = json.dumps(facts.for_json(), indent=1).encode() + b"\n"
    if json_file == outputs.STDOUT:
        sys.stdout.buffer.write(data)
        return
    render(facts, outputs.console(sys.stdout))
    if json_file is not None:
        outputs.write_file(Path(json_file), data, make_folder=True)


def render(facts: Doctor, console: Console) -> None:
    """One row per check; what a limit costs and how to lift it under it."""
    from rich.table import Table
    from rich.text import Text

    from stepscope.report.escape import plain

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in facts.checks:
        text = Text(plain(check.finding))
        for label, part in (("costs: ", check.cost), ("get it: ", check.remedy)):
            if part:
                text.append(f"\n{label}", style="dim").append(plain(part))
        table.add_row(Text(check.name, style="bold"), Text(check.state, style=_STYLES.get(check.state, "")), text)
    console.print(table)
    if facts.pinned_command:
        console.print(Text("\nFor steady measurements, whole cores with their sibling threads:"))
        console.print(Text(f"  {facts.pinned_command}"), soft_wrap=True)
