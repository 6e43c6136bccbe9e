"""Parts of pages: texts are harmless, numbers are finite, tables keep their definitions."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from stepscope.dashboard import blocks
from tests.dashboard import page_shapes

EVIL = "</script>\x1b[31m\u202ename\x00"


def texts(value: Any) -> list[str]:
    """Every text in a block, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in texts(part)]
    return []


def every_block(name: str) -> list[dict[str, Any]]:
    """One block of each kind with `name` wherever a text of a run can stand."""
    card = {
        "id": name,
        "title": name,
        "where": [
            {**blocks.place(name, 3, name, shown=name, code=name), "source": [{"line": 3, "text": name, "here": True}]}
        ],
        "evidence": [{"metric": name, "text": name, "source": name}],
        "share": math.nan,
    }
    return [
        blocks.text(name),
        blocks.empty(name, name, name, name),
        blocks.figures([blocks.figure(name, name, "text", note=name, missing=name, help=blocks.help_(name))], name),
        blocks.facts(name, [blocks.fact(name, name, name)]),
        blocks.choice(name, "with", name, [(name, name)]),
        blocks.table("t", name, [blocks.column("a", name)], [{"a": name}], limit=5, notes=[name]),
        blocks.chart(
            "c",
            name,
            "line",
            sentence=f"{name}.",
            x=(name, "text", [name]),
            y=(name, "ms"),
            series=[blocks.series(name, "ms", [1.0])],
            marks=[blocks.mark(name, name, name)],
        ),
        blocks.findings([card], [card], healthy=name, abstained=[{"rule": name, "needs": name}]),
        blocks.timeline(
            "time",
            from_ns=0,
            to_ns=1,
            steps=[{"step": 1, "process": name}],
            tracks=[{"key": name, "label": name}],
            window={"names": [name], "kinds": [], "tracks": []},
            sliceable=False,
        ),
        blocks.flame("f", {"names": [name], "files": [name], "trees": []}),
    ]


@pytest.mark.parametrize("at", range(10))
def test_no_text_of_a_run_keeps_a_control_character(at: int) -> None:
    block = every_block(EVIL)[at]
    found = [text for text in texts(block) if "name" in text and text not in page_shapes.KEYS[block["kind"]]]
    assert any("\\u202e" in text for text in found)
    assert not any(character in text for text in texts(block) for character in "\x00\x1b\u202e")
    json.dumps(block, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, 1),
        (3, 3),
        (1.5, 1.5),
        (math.nan, None),
        (math.inf, None),
        (np.int64(7), 7),
        (np.float64("nan"), None),
        ("7", None),
        (object(), None),
    ],
)
def test_numbers_are_finite_or_missing(value: Any, expected: Any) -> None:
    assert blocks.number(value) == expected


@pytest.mark.parametrize(
    ("key", "stated", "unit"),
    [
        ("utilization_pct", "percent", "pct"),
        ("bus_bytes_per_s", "bytes/s", "bytes_per_s"),
        ("samples_per_second", "1/s", "per_s"),
        ("cold_share", "share", "share"),
        ("own_cores", "cores", "number"),
        ("gpu_temperature_c", "", "celsius"),
        ("rank_rss_peak_bytes", "", "bytes"),
        ("wall_ms", "", "ms"),
        ("value", "as `unit`", "number"),
        ("load_1m", "", ""),
    ],
)
def test_units_come_from_definitions_else_from_names(key: str, stated: str, unit: str) -> None:
    assert blocks.unit_of(key, stated) == unit


def test_figures_of_the_model_bring_their_definition() -> None:
    from stepscope.model import FixedCosts

    (figure,) = blocks.measures(FixedCosts(4.5, None, None, None, None), "Paid once: total_s; First step: first_step_s")
    assert (figure["value"], figure["unit"]) == (4.5, "s")
    assert figure["help"]["text"]
    assert blocks.meaning("StepFacts", "no_such_figure") is None
