"""All that is shown of an input, as named parts of text: report, terminal, pages, tables, a comparison."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console

from stepscope.analyze.views.select import TABLES
from stepscope.api import ReadOptions, Run, open_run
from stepscope.dashboard import single
from stepscope.errors import StepscopeError
from stepscope.report import html, terminal
from stepscope.report.values import plain_value
from stepscope.tables.schema import SCHEMAS

OPTIONS = ReadOptions(cache=False, keep=False, workers=1)
HERE = "/INPUT"  # for the folder in which the inputs lie
MAX_WHOLE = 200_000  # characters of a part that is kept as it is
_WRITTEN = re.compile(r'"(read_s|seconds|generated|version|recorder_version)": [^,\n}]+')  # differs between readings


def parts_of(paths: Sequence[Path], root: Path) -> dict[str, str]:
    """Every part by its name; in texts `root` is `HERE`, and what no two readings have in common is left out."""
    run = open_run(*paths, options=OPTIONS)
    found = dict(_parts(run))
    return {name: _WRITTEN.sub(r'"\1": 0', text.replace(str(root), HERE)) for name, text in found.items()}


def digests(parts: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of each part, in hexadecimal, its first 16 digits."""
    return {
        name: hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16] for name, text in parts.items()
    }


def _parts(run: Run) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    try:
        report = run.report()
    except StepscopeError as error:
        return [("refused", str(error))]
    for key, value in dataclasses.asdict(report).items():
        if key == "views":
            found += [(f"report/views/{name}", _text(view)) for name, view in value.items()]
        else:
            found.append((f"report/{key}", _text(value)))
    found.append(("terminal", _shown(lambda console: terminal.render(report, console))))
    found.append(("html", html.render(report)))
    found += [(f"page/{path}", _text(document)) for path, document in single.documents(run, report).items()]
    found += [(f"table/{name}", _attempt(lambda name=name: _text(plain_value(run.table(name))))) for name in TABLES]
    found += [(f"parquet/{name}", _frame(getattr(run.tables, name))) for name in SCHEMAS]
    return found


def _shown(render: Callable[[Console], None]) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        render(console)
    return captured.get()


def _attempt(make: Callable[[], str]) -> str:
    try:
        return make()
    except StepscopeError as error:
        return f"refused: {error}"


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=False, default=str)


def _frame(frame: pl.DataFrame) -> str:
    """The schema and all rows of a table."""
    schema = ", ".join(f"{name} {kind}" for name, kind in frame.schema.items())
    return f"{schema}\n{frame.height} rows\n{frame.write_ndjson()}"
