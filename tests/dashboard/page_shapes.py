"""Pages as tests ask for them, each checked to be what the front end can draw: what web/src/lib/types.ts says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from stepscope import api
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext, Scope

LARGEST = 2**53  # of whole numbers that a browser can hold
UNITS = {
    *("ns", "us", "ms", "s", "bytes", "share", "pct", "count", "per_s", "bytes_per_s", "celsius", "W", "MHz"),
    *("number", "text", ""),
}
CHARTS = {"line", "stacked_area", "stacked_bars", "bars", "histogram", "scatter", "interval"}
KEYS = {
    "text": {"text", "tone"},
    "empty": {"title", "why", "record", "command"},
    "figures": {"title", "items"},
    "facts": {"title", "rows"},
    "table": {"id", "title", "columns", "rows", "total", "sorted_by", "notes"},
    "chart": {"id", "title", "type", "sentence", "x", "y", "series", "marks", "help", "notes", "sync", "select"},
    "findings": {"findings", "risks", "healthy", "abstained", "ignored"},
    "timeline": {"id", "from_ns", "to_ns", "steps", "tracks", "window", "notes", "sliceable", "details"},
    "flame": {"id", "document", "first"},
    "choice": {"label", "param", "value", "options"},
}


def page(run: api.Run, key: str, *, limit: int = 1_000, **given: Any) -> dict[str, Any]:
    """A checked page. Scope, catalog and `embedded` by name, everything else is a parameter."""
    scope = Scope(given.pop("worker", None), given.pop("span", None), given.pop("steps", None))
    own = {name: given.pop(name) for name in ("catalog", "embedded", "base", "source") if name in given}
    context = PageContext(run, own.pop("base", run), scope, params=given, limit=limit, **own)
    document = pages.page(context, key)
    check(document)
    return document


def parts(document: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in document["blocks"] if block["kind"] == kind]


def part(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    (found,) = [block for block in document["blocks"] if block.get("id") == id]
    return found


def is_empty(run: api.Run, key: str) -> bool:
    return pages.PAGES[key].empty(PageContext(run, run))


def check(document: Mapping[str, Any]) -> None:
    """Every block has the keys of its kind, every number can be shown, and no id is there twice."""
    json.dumps(document, allow_nan=False)
    assert document["schema"] == "stepscope.page/1"
    ids = [block["id"] for block in document["blocks"] if "id" in block]
    assert len(ids) == len(set(ids))
    for block in document["blocks"]:
        kind = block["kind"]
        extra = {"tree", "open_depth"} if kind == "table" else set()
        assert KEYS[kind] <= set(block) - {"kind"} <= KEYS[kind] | extra, block
        if kind == "table":
            _table(block)
        elif kind == "chart":
            _chart(block)
        elif kind == "figures":
            assert all(item["unit"] in UNITS for item in block["items"])
        elif kind == "choice":
            assert block["value"] in {option["value"] for option in block["options"]}


def _table(block: Mapping[str, Any]) -> None:
    keys = [column["key"] for column in block["columns"]]
    assert len(keys) == len(set(keys))
    labels = [column["label"] for column in block["columns"]]
    assert len(labels) == len(set(labels)), labels
    assert all(column["unit"] in UNITS for column in block["columns"])
    assert len(block["rows"]) <= block["total"]
    assert block["sorted_by"] is None or block["sorted_by"] in keys
    for row in block["rows"]:
        for column in block["columns"]:
            value = row.get(column["key"])
            if column["numeric"] and value is not None:
                assert isinstance(value, (int, float)), (column["key"], value)
                assert abs(value) < LARGEST, (column["key"], value)
    if block.get("tree"):
        depths = [row["depth"] for row in block["rows"]]
        assert depths[0] == 0
        assert all(after <= before + 1 for before, after in pairwise(depths))


def _chart(block: Mapping[str, Any]) -> None:
    assert block["type"] in CHARTS
    assert block["sentence"].endswith(".")
    along = block["x"]["values"]
    assert along
    assert all(not isinstance(value, int) or abs(value) < LARGEST for value in along)
    assert block["series"]
    for series in block["series"]:
        assert len(series["values"]) == len(along)
        assert series["unit"] in UNITS
        assert all(value is None or abs(value) < LARGEST for value in series["values"])
