"""The view of compilers as the document carries it: plain values, lists of bounded length.

A list that was cut says so beside itself (`causes_total`). A compiler's reason can quote the line that it stopped at:
where no source is wanted, what it quotes is left out.
"""

from __future__ import annotations

from typing import Any

from stepscope.model.compilers import CompilersView
from stepscope.report.values import field_names, plain_value

MAX_ROWS = 100
MAX_OF = {"points": 1_000, "metrics": 1_000}
MAX_INSIDE = 64  # of a list in a row: changes, steps, percentiles
MAX_TEXT = 1_000  # characters
MAX_VALUE = 200  # characters of a text in a row of a row: a value that changed
COMMENT = "#"  # what follows it in a reason is where, with the line's text


def compilers_document(view: CompilersView | None, *, source: bool) -> dict[str, Any] | None:
    """The view; `source` False leaves out what reasons quote."""
    if view is None:
        return None
    found: dict[str, Any] = {}
    for name in field_names(view):
        rows = getattr(view, name)
        limit = MAX_OF.get(name, MAX_ROWS)
        found[name] = [_bounded(plain_value(row)) for row in rows[:limit]]
        if len(rows) > limit:
            found[f"{name}_total"] = len(rows)
    if not source:
        for cause in found["causes"]:
            cause["text"] = without_quotes(cause["text"])
    return found


def without_quotes(reason: str) -> str:
    """A compiler's reason without the line of source that it names at its end."""
    return reason.partition(COMMENT)[0].rstrip()


def _bounded(value: Any, text: int = MAX_TEXT) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text else value[: text - 1] + "…"
    if isinstance(value, list):
        return [_bounded(item, MAX_VALUE) for item in value[:MAX_INSIDE]]
    return {key: _bounded(item, text) for key, item in value.items()} if isinstance(value, dict) else value
