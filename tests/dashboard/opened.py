"""Runs that are open, their pages as documents that the front end can draw, and what tests look for in these.

A page is checked to be what web/src/lib/types.ts says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope import api, comparing
from stepscope.comparison.profile import Profile
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext, Scope
from stepscope.errors import UsageError
from stepscope.model import Report
from stepscope.report import document
from stepscope.report.escape import plain
from tests import gpu_traces
from tests.comparison.run_sets import make_run
from tests.dashboard import served_runs
from tests.report import fabricate

OPTIONS = api.ReadOptions(cache=False)
OWN = ("base", "catalog", "embedded", "source", "boxes", "key", "limit")
LARGEST = 2**53  # of whole numbers that a browser can hold
UNITS = {
    *("ns", "us", "ms", "s", "bytes", "share", "pct", "count", "per_s", "bytes_per_s", "celsius", "W", "MHz"),
    *("scalar", "number", "text", ""),
}
CHARTS = {"line", "stacked_area", "stacked_bars", "bars", "histogram", "scatter", "interval", "heat", "multiples"}
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
    "overview": {"figures", "bar", "findings", "total", "risks", "healthy", "charts", "notes", "more_notes"},
    "choice": {"label", "param", "value", "options"},
    "parallel": {"id", "title", "sentence", "axes", "names", "shade", "more_is_better"},
}
EXTRA = {"table": {"tree", "open_depth"}, "text": {"link"}, "chart": {"lines", "points", "small"}}


@dataclass
class Runs:
    """A catalog of runs that are open already."""

    opened: Mapping[str, api.Run] = field(default_factory=dict)
    experiments: Mapping[str, Path] = field(default_factory=dict)

    def runs(self, text: str = "") -> Sequence[Mapping[str, Any]]:
        return [
            {"id": key, "name": f"run {key}", "kind": "run", "state": "finished", "mean_ms": 10.0}
            for key in self.opened
            if text in key
        ]

    def run(self, key: str) -> api.Run:
        if key not in self.opened:
            raise UsageError(f"{key}: no such run")
        return self.opened[key]

    def experiment(self, key: str) -> Path | None:
        return self.experiments.get(key)

    def of_script(self, key: str) -> Sequence[SimpleNamespace]:
        """Of one script are those that the same name begins."""
        same = [one for one in self.opened if one.partition("-")[0] == key.partition("-")[0]]
        return [SimpleNamespace(key=one, path=self.opened[one].paths[0]) for one in same]

    def profile(self, key: str) -> Profile:
        return comparing.profiled(self.run(key))


def page(run: api.Run, name: str, **given: Any) -> dict[str, Any]:
    """A checked page. Scope and what is in `OWN` by name, everything else is a parameter."""
    scope = Scope(given.pop("worker", None), given.pop("span", None), given.pop("steps", None))
    own = {"base": run, **{each: given.pop(each) for each in OWN if each in given}}
    document = pages.page(PageContext(run, scope=scope, params=given, **own), name)
    check(document)
    return document


def parts(document: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in document["blocks"] if block["kind"] == kind]


def part(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    (found,) = [block for block in document["blocks"] if block.get("id") == id]
    return found


def said(document: Mapping[str, Any], tone: str | None = None) -> str:
    return " ".join(block["text"] for block in parts(document, "text") if tone in (None, block["tone"]))


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    return {item["label"]: item for block in parts(document, "figures") for item in block["items"]}


def series(block: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {each["name"]: each["values"] for each in block["series"]}


def harmful(value: Any) -> list[str]:
    """The texts in a document, keys included, that a screen obeys."""
    if isinstance(value, str):
        return [] if plain(value, len(value) + 1) == value else [value]
    if isinstance(value, Mapping):
        value = list(value.items())
    return [text for item in value for text in harmful(item)] if isinstance(value, (list, tuple)) else []


def is_empty(run: api.Run, key: str) -> bool:
    return pages.PAGES[key].empty(PageContext(run, run))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Two ranks of 120 steps with a stall, telemetry, stacks and a window."""
    return api.open_run(served_runs.small(tmp_path_factory.mktemp("small") / "runs"), options=OPTIONS)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Traces of two workers that something else recorded."""
    return two_workers(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="session")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.open_run(served_runs.empty(tmp_path_factory.mktemp("nothing")), options=OPTIONS)


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, api.Run]:
    """A run and one whose loader takes longer."""
    folder = tmp_path_factory.mktemp("slow")
    made = {"before": make_run(folder / "before"), "after": make_run(folder / "after", data_wait_ms=4)}
    return {name: api.open_run(path, options=OPTIONS) for name, path in made.items()}


@pytest.fixture
def fabricated(tmp_path: Path) -> Report:
    fabricate.write_script(tmp_path)
    return document.build(fabricate.analysis(tmp_path), fabricate.diagnosis(tmp_path))


MIB = 2**20
OPERATOR = "aten::\x1b[31m</script>\u202e" + "long" * 200


def two_workers(folder: Path) -> api.Run:
    """Two steps each, the second worker with shorter matrix products."""
    for worker, gemm_us in (("worker0", 300), ("worker1", 150)):
        extra = [event for number in (1, 2) for event in _more(number)]
        gpu_traces.write(folder / f"{worker}.pt.trace.json", steps=2, gemm_us=gemm_us, more=extra)
    return api.open_run(folder, options=OPTIONS)


def _memory(at_us: float, size: int, address: int, total: int, *, device: int = 0) -> dict[str, Any]:
    args = {"Addr": address, "Bytes": size, "Device Type": 1, "Device Id": device}
    args |= {"Total Allocated": total, "Total Reserved": 64 * MIB}
    event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at_us}
    return {**event, "args": args}


def _module(name: str, start: float, duration: float, number: int) -> dict[str, Any]:
    args = {"Python id": 1_000 + number, "Python module id": number}
    return gpu_traces.host(f"nn.Module: {name}", start, duration, "python_function", **args)


def _more(number: int) -> list[dict[str, Any]]:
    """A model in step `number` of `gpu_traces`, and its allocations: 10 MiB before, 30 at the peak, 10 behind."""
    at = number * gpu_traces.STEP_US
    return [
        _module("Net_0", at + 205, 200, 0),
        _module("Linear_0", at + 208, 70, 1),
        _memory(at + 225, 20 * MIB, 0xA00, 30 * MIB),
        _memory(at + 365, -20 * MIB, 0xA00, 10 * MIB),
        gpu_traces.host(OPERATOR, at + 380, 5, **{"External id": number * 10 + 9}),
    ]


def check(document: Mapping[str, Any]) -> None:
    """Every block has the keys of its kind, every number can be shown, and no id is there twice."""
    json.dumps(document, allow_nan=False)
    assert document["schema"] == "stepscope.page/1"
    _each_once(block["id"] for block in document["blocks"] if "id" in block)
    for block in document["blocks"]:
        kind = block["kind"]
        assert KEYS[kind] <= set(block) - {"kind", "folded"} <= KEYS[kind] | EXTRA.get(kind, set()), block
        if kind == "table":
            _table(block)
        elif kind == "chart":
            _chart(block)
        elif kind == "figures":
            assert {item["unit"] for item in block["items"]} <= UNITS
        elif kind == "overview":
            for chart in block["charts"]:
                _chart(chart)
            assert len(block["findings"]) <= min(3, block["total"])
            assert len(block["notes"]) <= 3
        elif kind == "choice":
            assert block["value"] in {option["value"] for option in block["options"]}


def _each_once(given: Iterable[str]) -> None:
    found = list(given)
    assert len(found) == len(set(found)), found


def _table(block: Mapping[str, Any]) -> None:
    _each_once(column["key"] for column in block["columns"])
    _each_once(column["label"] for column in block["columns"])
    assert {column["unit"] for column in block["columns"]} <= UNITS
    assert len(block["rows"]) <= block["total"]
    assert block["sorted_by"] in (None, *(column["key"] for column in block["columns"]))
    numeric = [column["key"] for column in block["columns"] if column["numeric"]]
    for value in (row.get(key) for row in block["rows"] for key in numeric):
        assert value is None or (isinstance(value, (int, float)) and abs(value) < LARGEST), value
    if block.get("tree"):
        depths = [row["depth"] for row in block["rows"]]
        assert depths[0] == 0
        assert all(after <= before + 1 for before, after in pairwise(depths))


def _chart(block: Mapping[str, Any]) -> None:
    along = block["x"]["values"]
    assert block["type"] in CHARTS
    assert block["sentence"].endswith(".")
    assert along
    assert block["series"]
    assert {series["unit"] for series in block["series"]} <= UNITS
    assert {len(series["values"]) for series in block["series"]} == {len(along)}
    for series in block["series"]:
        assert {series["values"][at] for at, _ in series.get("odd", ())} <= {None}
    shown = [value for series in block["series"] for value in series["values"] if value is not None]
    assert all(abs(value) < LARGEST for value in (*shown, *(at for at in along if isinstance(at, int))))
