"""The pages on work as documents: what all of them have in common, operators, kernels and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stepscope import api
from stepscope.report.escape import plain as plain_text
from tests.dashboard import served_runs
from tests.dashboard.page_shapes import is_empty, page, part, parts
from tests.dashboard.worker_traces import two_workers
from tests.run_folders import make_run_folder

KEYS = ("operators", "kernels", "modules", "memory", "compiles", "gpu", "flame")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return two_workers(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recorded run without windows, stacks or compilers."""
    manifest = {"command": ["python", "my train.py"]}
    return api.open_run(make_run_folder(tmp_path_factory.mktemp("plain"), manifest=manifest))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recording in which everything that has a name has a hostile one."""
    return api.open_run(served_runs.fuzzed(tmp_path_factory.mktemp("fuzzed") / "runs"))


# ------------------------------------------------------------------------------------------------------- every page


@pytest.mark.parametrize("key", KEYS)
def test_every_page_says_why_it_is_empty_and_what_to_record(plain: api.Run, key: str):
    assert is_empty(plain, key)
    document = page(plain, key)
    (said,) = parts(document, "empty")
    assert said["why"].endswith(".")
    assert said["record"]
    assert said["command"].startswith("stepscope run ")
    assert said["command"].endswith("-- python 'my train.py'")


@pytest.mark.parametrize("key", ["operators", "kernels", "modules", "memory", "gpu"])
def test_a_trace_fills_the_pages_on_it(gpus: api.Run, key: str):
    assert not is_empty(gpus, key)
    document = page(gpus, key)
    assert not parts(document, "empty")
    assert parts(document, "table")
    assert parts(document, "chart")


@pytest.mark.parametrize("key", ["operators", "kernels", "modules", "memory", "gpu"])
def test_a_worker_without_a_trace_is_said(gpus: api.Run, key: str):
    (said,) = parts(page(gpus, key, worker="rank-7"), "empty")
    assert "all" in said["why"]


@pytest.mark.parametrize("key", KEYS)
def test_hostile_names_are_harmless_text(fuzzed: api.Run, key: str):
    document = page(fuzzed, key)
    assert all(plain_text(text, len(text) + 1) == text for text in texts(document))


def texts(value: Any) -> Iterator[str]:
    """Every text in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)


def test_steps_without_a_trace_name_those_that_have_one(gpus: api.Run):
    few = api.open_run(gpus.folder, options=api.ReadOptions(cache=False, steps=(50, 60)))
    for key in ("operators", "kernels", "modules", "memory", "gpu"):
        (said,) = parts(page(few, key, base=gpus, steps=(50, 60)), "empty")
        assert "steps 50 to 60" in said["why"]
        assert "between 1 and 2" in said["why"]


# ------------------------------------------------------------------------------------------------------- operators


def test_one_operator_shows_what_lies_behind_it(gpus: api.Run):
    document = page(gpus, "operators", operator="aten::mm")
    (stack,) = part(document, "stacks")["rows"]
    assert "train.py:7" in stack["stack"]
    (launched,) = part(document, "launched")["rows"]
    assert (launched["calls"], launched["total_ns"]) == (4, 900_000)


def test_the_operator_that_a_click_names_is_found_though_its_name_was_made_harmless(gpus: api.Run):
    rows = part(page(gpus, "operators"), "operators")["rows"]
    (shown,) = [row["name"] for row in rows if row["name"].startswith("aten::\\x1b")]
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    document = page(gpus, "operators", operator=shown)
    assert part(document, "stacks")["rows"]
