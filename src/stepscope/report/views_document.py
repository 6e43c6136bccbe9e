"""The views of traces as the document carries them: plain values, lists of bounded length, places with their source.

A list that was cut says so beside itself (`operators_total`); the whole of it comes with `analyze --table`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stepscope.model.views import Views
from stepscope.report.values import plain_mapping, plain_value

MAX_ROWS = 300  # of a list: operators, kernels, lines of memory and so on
MAX_STEPS = 500  # of one span
MAX_SPANS = 64  # shown one by one; traces of more ranks are shown together
NAMES = (
    *("overview", "gpus", "operators", "kernels", "memory", "modules", "counters"),
    *("communication", "distributed", "tensorboard", "absent"),
)


def views_document(views: Views | None) -> dict[str, Any]:
    """One entry for each of `NAMES`; None or empty, with a reason in `absent`, where the traces do not give it."""
    if views is None:
        return {**dict.fromkeys(NAMES), "absent": {}}
    spans = views.spans[:MAX_SPANS]
    overviews = [plain_mapping(span.overview) for span in spans if span.overview is not None]
    for item in overviews:
        item["steps"] = item["steps"][:MAX_STEPS]
    document: dict[str, Any] = {
        "overview": overviews,
        "gpus": [plain_mapping(gpu) for span in spans for gpu in span.gpus],
        **_bounded("operators", views.operators),
        **_bounded("kernels", views.kernels),
        "memory": _parts(views.memory),
        "modules": _parts(views.modules),
        "counters": [plain_mapping(counter) for counter in views.counters],
        **_bounded("communication", views.communication),
        "distributed": _parts(views.distributed),
        "tensorboard": plain_value(views.tensorboard),
        "absent": dict(views.absent),
    }
    return document


def _bounded(name: str, rows: Sequence[Any]) -> dict[str, Any]:
    return {name: [plain_mapping(row) for row in rows[:MAX_ROWS]], f"{name}_total": len(rows)}


def _parts(view: Any) -> dict[str, Any] | None:
    """A view whose fields are lists of rows, each bounded."""
    if view is None:
        return None
    found: dict[str, Any] = {}
    for item in dataclasses.fields(view):
        part = getattr(view, item.name)
        if isinstance(part, tuple):
            found[item.name] = [plain_value(row) for row in part[:MAX_ROWS]]
            if len(part) > MAX_ROWS:
                found[f"{item.name}_total"] = len(part)
        else:
            found[item.name] = plain_value(part)
    return found
