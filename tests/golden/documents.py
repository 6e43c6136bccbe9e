"""All that is shown of an input, as named parts of text: report, terminal, pages, tables, a comparison."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from stepscope import comparing
from stepscope.analyze.views.select import TABLES
from stepscope.api import ReadOptions, Run, open_run
from stepscope.dashboard import single, terminal
from stepscope.dashboard.pages import compare
from stepscope.errors import StepscopeError
from stepscope.report import comparison_report
from stepscope.report.escape import plain_value
from stepscope.tables.schema import SCHEMAS
from tests.golden.inputs import Input
from tests.on_terminal import rendered

OPTIONS = ReadOptions(cache=False, keep=False, workers=1)
HERE = "/INPUT"  # for the folder in which the inputs lie
_WRITTEN = re.compile(r'"(read_s|seconds|generated|version|recorder_version)": [^,\n}]+')  # differs between readings


def parts_of(given: Input, root: Path) -> dict[str, str]:
    """Every part by its name; in texts `root` is `HERE`, and what no two readings have in common is left out."""
    try:
        found = _parts(open_run(given.path, options=OPTIONS)) if given.against is None else _compared(given)
    except StepscopeError as error:
        found = [("refused", str(error))]
    return {name: _WRITTEN.sub(r'"\1": 0', text.replace(str(root), HERE)) for name, text in found}


def digests(parts: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of each part, in hexadecimal, its first 16 digits."""
    return {
        name: hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16] for name, text in parts.items()
    }


def _parts(run: Run) -> list[tuple[str, str]]:
    report = run.report()
    found: list[tuple[str, str]] = []
    for key, value in msgspec.structs.asdict(report).items():
        if key == "views":
            found += [(f"report/views/{name}", _text(view)) for name, view in value.items()]
        else:
            found.append((f"report/{key}", _text(value)))
    found.append(("terminal", rendered(lambda console: terminal.render(report, console))))
    documents = single.documents(run, report)
    found.append(("html", single.plain(report, documents)))
    found += [(f"page/{path}", _text(document)) for path, document in documents.items()]
    found += [(f"table/{name}", _attempt(lambda name=name: _text(plain_value(run.table(name))))) for name in TABLES]
    found += [(f"parquet/{name}", _frame(getattr(run.tables, name))) for name in SCHEMAS]
    return found


def _compared(given: Input) -> list[tuple[str, str]]:
    document = comparison_report.comparison_document(
        comparing.compare(given.path, str(given.against), options=OPTIONS), source=True
    )
    shown = rendered(lambda console: terminal.show_comparison(document, console, top=0))
    return [(f"document/{key}", _text(value)) for key, value in document.items()] + [
        ("terminal", shown),
        ("html", compare.render(document)),
    ]


def _attempt(make: Callable[[], str]) -> str:
    try:
        return make()
    except StepscopeError as error:
        return f"refused: {error}"


def _text(value: Any) -> str:
    return json.dumps(_rounded(value), indent=1, sort_keys=False, default=str)


def _rounded(value: Any) -> Any:
    """Floating-point figures with 9 significant digits: processors add up in other orders, and differ behind these."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _frame(frame: pl.DataFrame) -> str:
    """The schema and all rows of a table."""
    schema = ", ".join(f"{name} {kind}" for name, kind in frame.schema.items())
    return f"{schema}\n{frame.height} rows\n{frame.write_ndjson()}"
