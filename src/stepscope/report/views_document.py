"""The views of traces as the document carries them: plain values, lists of bounded length, places with their source.

A list that was cut says so beside itself (`operators_total`); the whole of it comes with `analyze --table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.model.views import Views
from stepscope.report.values import field_names, plain_mapping, plain_value

MAX_ROWS = 300  # of a list: operators, kernels, lines of memory and so on
MAX_STEPS = 500  # of one span
MAX_SPANS = 64  # shown one by one; traces of more ranks are shown together
NAMES = (
    *("overview", "gpus", "operators", "kernels", "memory", "modules", "counters"),
    *("communication", "distributed", "tensorboard", "absent"),
)


def views_document(views: Views | None) -> dict[str, Callable[[], Any]]:
    """What makes each of `NAMES`; None or empty, with a reason in `absent`, where the traces do not give it."""
    if views is None:
        return {**{name: lambda: None for name in NAMES}, "absent": dict}
    return {
        "overview": lambda: _overviews(views),
        "gpus": lambda: [plain_mapping(gpu) for span in views.spans[:MAX_SPANS] for gpu in span.gpus],
        **_bounded("operators", lambda: views.operators),
        **_bounded("kernels", lambda: views.kernels),
        "memory": lambda: _parts(views.memory),
        "modules": lambda: _parts(views.modules),
        "counters": lambda: [plain_mapping(counter) for counter in views.counters],
        **_bounded("communication", lambda: views.communication),
        "distributed": lambda: _parts(views.distributed),
        "tensorboard": lambda: plain_value(views.tensorboard),
        "absent": lambda: dict(views.absent),
    }


def _overviews(views: Views) -> list[dict[str, Any]]:
    found = [plain_mapping(span.overview) for span in views.spans[:MAX_SPANS] if span.overview is not None]
    for item in found:
        item["steps"] = item["steps"][:MAX_STEPS]
    return found


def _bounded(name: str, rows: Callable[[], Sequence[Any]]) -> dict[str, Callable[[], Any]]:
    return {name: lambda: [plain_mapping(row) for row in rows()[:MAX_ROWS]], f"{name}_total": lambda: len(rows())}


def _parts(view: Any) -> dict[str, Any] | None:
    """A view whose fields are lists of rows, each bounded."""
    if view is None:
        return None
    found: dict[str, Any] = {}
    for name in field_names(view):
        part = getattr(view, name)
        if isinstance(part, tuple):
            found[name] = [plain_value(row) for row in part[:MAX_ROWS]]
            if len(part) > MAX_ROWS:
                found[f"{name}_total"] = len(part)
        else:
            found[name] = plain_value(part)
    return found
