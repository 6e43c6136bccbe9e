"""An experiment as document: the keys of the schema, reading back, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.dashboard.blocks import Alone
from stepscope.dashboard.pages import experiments
from stepscope.errors import UnreadableInputError
from stepscope.report import experiment_report
from tests.report.fabricate_experiment import (
    experiment,
    screening,
    self_test,
    shown,
)

GOLDEN = Path(__file__).with_name("golden_experiment.json")


@pytest.mark.parametrize("make", [experiment, screening, self_test])
def test_the_file_reads_back(make: Any) -> None:
    data = experiment_report.dumps(make())

    assert experiment_report.dumps(experiment_report.loads(data)) == data


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and index of a document."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


ODD = (None, -1, 0.0, 1e308, "x", [], {}, True, [[]], [None], {"knob": None}, ["a", "b"])


def test_whatever_is_in_a_file_it_is_refused_or_shown() -> None:
    golden = GOLDEN.read_text()
    draw = random.Random(4)
    paths = list(places_in(json.loads(golden)))
    refused = 0
    for _ in range(300):
        document = json.loads(golden)
        path = draw.choice(paths)
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = draw.choice(ODD)
        try:
            found = experiment_report.loads(json.dumps(document).encode())
        except UnreadableInputError:
            refused += 1
            continue
        assert shown(found)
        assert list(experiments.build(Alone(), experiment_report.experiment_document(found)))
    assert 0 < refused < 300


def test_keys_of_a_later_version_are_left_out() -> None:
    document = json.loads(experiment_report.dumps(experiment()))
    document["weather"] = "fine"
    document["candidates"][0]["effects"]["mean_ms"]["mood"] = 3
    found = experiment_report.loads(json.dumps(document).encode())

    assert experiment_report.experiment_document(found) == experiment_report.experiment_document(experiment())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema": "stepscope.experiment/1"}',
        b'{"schema": "stepscope.report/1"}',
        b'{"schema": ["stepscope.experiment/1"]}',
        b"[" * 5000,
    ],
)
def test_what_is_no_experiment_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableInputError):
        experiment_report.loads(data)


def test_a_folder_without_an_experiment_has_no_view(tmp_path: Path) -> None:
    assert experiment_report.view(tmp_path) is None
    with pytest.raises(UnreadableInputError, match=r"experiment\.json"):
        experiment_report.load(tmp_path)
