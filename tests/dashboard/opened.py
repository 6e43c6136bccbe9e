"""Runs that are open, their pages as checked documents, and what tests look for in these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope import api, report
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext, Scope
from stepscope.errors import UsageError
from stepscope.model import Report
from tests import gpu_traces
from tests.comparison.run_sets import make_run
from tests.dashboard import page_shapes, served_runs
from tests.report import fabricate

KEYS = ("findings", "steps", "system", "compare", "environment")
OPTIONS = api.ReadOptions(cache=False)
EVIL = "</script>\x1b[31m\u202ename"


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


def page(run: api.Run, key: str, *, limit: int = 1_000, **given: Any) -> dict[str, Any]:
    """A checked page. Scope, catalog, base, `embedded`, `source` and `own` by name, everything else is a parameter."""
    scope = Scope(given.pop("worker", None), given.pop("span", None), given.pop("steps", None))
    own = {name: given.pop(name) for name in ("catalog", "embedded", "source") if name in given}
    base, id_ = given.pop("base", run), given.pop("own", "this")
    context = PageContext(run, base, scope, params=given, limit=limit, key=id_, **own)
    document = pages.page(context, key)
    page_shapes.check(document)
    return document


def part(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    (found,) = [block for block in document["blocks"] if block.get("id") == id]
    return found


def kinds(document: Mapping[str, Any]) -> list[str]:
    return [block["kind"] for block in document["blocks"]]


def said(document: Mapping[str, Any], tone: str | None = None) -> str:
    return " ".join(b["text"] for b in document["blocks"] if b["kind"] == "text" and tone in (None, b["tone"]))


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        item["label"]: item for block in document["blocks"] if block["kind"] == "figures" for item in block["items"]
    }


def series(block: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {each["name"]: each["values"] for each in block["series"]}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Two ranks of 120 steps with a stall, telemetry, stacks and a window."""
    return api.open_run(served_runs.small(tmp_path_factory.mktemp("small") / "runs"), options=OPTIONS)


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Traces of two workers that something else recorded."""
    folder = tmp_path_factory.mktemp("traces")
    for worker in ("worker0", "worker1"):
        gpu_traces.write(folder / f"{worker}.pt.trace.json", steps=3)
    return api.open_run(folder, options=OPTIONS)


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
    return report.build(fabricate.analysis(tmp_path), fabricate.diagnosis(tmp_path))
