"""Taps of log calls: what the script logs is kept as it knows it, and nothing of its logging changes."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from stepscope.record.agent.probes.frameworks import TAPS, Tap, TapsProbe  # noqa: E402 - after the check for torch

from .fake_agent import WithProbe  # noqa: E402
from .processes import line_of  # noqa: E402

pytestmark = pytest.mark.torch

# Compiled as a file of an installed package: its frames are not the user's.
LIBRARY = """
class Run:
    def __init__(self):
        self.rows = []

    def log(self, data, step=None):
        if "bad" in data:
            raise ValueError("bad")
        self.rows.append((dict(data), step))
        return len(self.rows)

class Trainer:
    def __init__(self, run, callbacks=(), filter=False):
        self.run, self.callbacks, self.args = run, callbacks, type("Args", (), {"filter": filter})

    def log(self, logs):
        logs["epoch"] = 1.5
        for callback in self.callbacks:
            callback(logs)
        self.run.log({"train/" + name: value for name, value in logs.items()})
        return "logged"

class Writer:
    def __init__(self, folder):
        self.folder = folder

    def add(self, tag, value):
        pass

class Hidden:
    log = (lambda function: lambda *args, **kwargs: function(*args, **kwargs))(lambda self, values, step=None: values)

def log_metric(key, value):
    return Run().log({key: value})
"""


def pair(key: Any, value: Any, _: Any = None) -> Any:
    return {key: value}


TABLE = (
    Tap("tool", "fakelog", "Run", "log", "data"),
    Tap("tool", "fakelog", "Run", "log_of_another_version", "data"),
    Tap("frame", "fakelog", "Trainer", "log", "logs", filtered="args.filter"),
    Tap("writer", "fakelog", "Writer", "add", "tag value self", pair, apart=lambda _tag, _value, own: own.folder),
    Tap("plain", "fakelog", "", "log_metric", "key value", pair),
    Tap("hidden", "fakelog", "Hidden", "log", "values"),
    Tap("renamed", "fakelog.other", "Other", "log", "data"),
)


@pytest.fixture
def library() -> Any:
    module = ModuleType("fakelog")
    exec(compile(LIBRARY, "/lib/site-packages/fakelog.py", "exec"), vars(module))
    return module


@pytest.fixture
def record(tmp_path: Path, library: Any) -> Iterator[Any]:
    made: list[WithProbe] = []
    sys.modules["fakelog"] = library

    def make(**options: Any) -> WithProbe:
        made.append(WithProbe(tmp_path, lambda agent: TapsProbe(agent, TABLE), **options))
        return made[-1]

    yield make
    for each in made:
        each.leave()
    del sys.modules["fakelog"]


def test_numbers_are_kept_under_the_script_s_own_names(record: Any, library: Any) -> None:
    recorded, run = record(), library.Run()
    loss = torch.tensor(0.25, requires_grad=True) * 3
    logged = {
        "loss": loss,
        "val": {"loss": 0.5, "top": {"1": 7}},
        "lr": numpy.float64(1e-4),
        "half": numpy.float32(0.1),
        "row": numpy.array([2.5]),
        "bits": torch.tensor([True]),
        "nan": math.nan,
        "inf": numpy.float64(-math.inf),
        "large": 10**400,
        "text": "0.5",
        "none": None,
        "list": [1.0],
        "matrix": torch.ones(2, 2),
        "picture": numpy.zeros((2, 2)),
        "table": SimpleNamespace(value=1),
        3: 4,
    }
    before = dict(logged)
    with torch.inference_mode():
        assert run.log(logged, step=5) == 1
    assert run.log(step=6, data={"loss": 1}) == 2
    with pytest.raises(ValueError, match="bad"):
        run.log({"bad": 1.0})
    assert run.rows == [(before, 5), ({"loss": 1}, 6)]
    assert run.rows[0][0]["loss"] is loss
    kept = recorded.kept()
    assert {source for source, _ in kept} == {"tool"}
    assert {name: values for (_, name), values in kept.items()} == {
        "loss": [0.75, 1.0],
        "val/loss": [0.5],
        "val/top/1": [7.0],
        "lr": [1e-4],
        "half": [float(numpy.float32(0.1))],
        "row": [2.5],
        "bits": [1.0],
        "nan": ["nan"],
        "inf": ["-inf"],
        "3": [4.0],
    }


def test_what_a_framework_passes_on_counts_once_and_a_callback_of_the_user_s_for_itself(
    record: Any, library: Any
) -> None:
    recorded, run = record(), library.Run()

    def callback(logs: Any) -> None:
        run.log(logs)
        run.log({"mine": 3.0, "epoch": 9.0})

    assert library.Trainer(run, [callback], filter=True).log({"loss": 0.5}) == "logged"
    assert library.Trainer(run).log({"loss": 0.25}) == "logged"
    assert len(run.rows) == 4
    library.log_metric("metric", 2.0)
    run.log({"after": 1.0})
    assert recorded.kept() == {
        ("frame", "loss"): [0.5, 0.25],
        ("frame", "epoch"): [1.5, 1.5],
        ("tool", "mine"): [3.0],
        ("plain", "metric"): [2.0],
        ("tool", "after"): [1.0],
    }
    assert [one[:2] for one in recorded.curves() if one[3].get("filtered")] == [("frame", "loss")]


def test_calls_and_their_time_are_told_by_line(record: Any, library: Any) -> None:
    recorded, run = record(), library.Run()
    source = Path(__file__).read_text()
    for _ in range(10):
        run.log({"loss": 1.0})  # ten times
        library.Trainer(run).log({"loss": 1.0})  # with what it passes on
    with pytest.raises(ValueError, match="bad"):
        run.log({"bad": 1.0})  # once, in vain
    recorded.kept()
    calls: dict[Any, int] = {}
    for event in recorded.of("region"):
        assert (event["name"], event["file"]) == ("logging", __file__)
        assert event["duration_ns"] > 0
        calls[event["source"], event["line"]] = calls.get((event["source"], event["line"]), 0) + event.get("count", 1)
    lines = [line_of(source, "# " + text) for text in ("ten times", "with what it passes on", "once, in vain")]
    assert calls == {("tool", lines[0]): 10, ("frame", lines[1]): 10, ("tool", lines[2]): 1}


def test_parameters_that_a_decorator_hides_and_calls_of_another_version(record: Any, library: Any) -> None:
    recorded = record()
    sys.modules["fakelog.other"] = ModuleType("fakelog.other")
    recorded.probe.module_imported("fakelog.other")
    del sys.modules["fakelog.other"]
    assert library.Hidden().log({"loss": 0.5}, step=1) == {"loss": 0.5}
    library.Hidden().log(values={"loss": 0.25})
    assert recorded.kept() == {("hidden", "loss"): [0.5, 0.25]}
    (mark,) = recorded.of("mark")
    assert mark["name"] == "metrics: what is logged with this version of renamed is not recorded"


def test_writers_to_several_folders_are_told_apart(record: Any, library: Any) -> None:
    recorded = record()
    for value, folder in enumerate(["/runs/1/train", Path("/runs/1/val"), "/runs/1/train", "/runs/1/test/"]):
        library.Writer(folder).add("loss", value=value)
    assert recorded.kept() == {
        ("writer", "loss"): [0.0, 2.0],
        ("writer val", "loss"): [1.0],
        ("writer test", "loss"): [3.0],
    }


def test_another_thread_s_values_are_kept_and_its_time_is_not_the_training_s(record: Any, library: Any) -> None:
    recorded, run = record(), library.Run()
    recorded.agent.accepts(strong=True)

    def callback(_: Any) -> None:  # inside a call, but not of this thread
        thread = threading.Thread(target=run.log, args=({"other": 1.0},))
        thread.start()
        thread.join()

    library.Trainer(run, [callback]).log({"loss": 0.5})
    assert recorded.kept()["tool", "other"] == [1.0]
    assert {event["source"] for event in recorded.of("region")} == {"frame"}


@pytest.mark.parametrize("fault", ["taps", "a value that cannot be read"])
def test_a_tap_that_raises_leaves_the_logging_alone(record: Any, library: Any, fault: str) -> None:
    recorded, run = record(faults="taps" if fault == "taps" else None), library.Run()
    writer = library.Writer("/runs/1")
    if fault != "taps":
        del writer.folder
    for number in range(3):
        writer.add("loss", 0.5)
        assert run.log({"loss": 0.5}) == 2 * number + 1
        assert library.Trainer(run).log({"loss": 0.5}) == "logged"
    with pytest.raises(ValueError, match="bad"):
        run.log({"bad": 1.0})
    assert recorded.kept() == {}
    assert [event["probe"] for event in recorded.of("probe_error")] == ["taps"]


def test_everything_is_left_as_found(record: Any, library: Any) -> None:
    places = (library, library.Run, library.Trainer, library.Writer)
    before = [dict(vars(place)) for place in places]
    recorded, run = record(), library.Run()
    bound, function = run.log, library.log_metric  # as `from mlflow import log_metric` binds it
    assert [dict(vars(place)) for place in places] != before
    recorded.probe.uninstall()
    assert [dict(vars(place)) for place in places] == before
    bound({"out": 1.0})
    function("out", 1.0)
    recorded.probe.install()
    bound({"in": 1.0})
    function("in", 1.0)
    assert recorded.kept() == {("tool", "in"): [1.0], ("plain", "in"): [1.0]}


def test_the_table_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = [[part.strip() for part in line.strip("| ").split(" | ")] for line in text.splitlines() if "| `" in line]
    told = {row[0]: row[1] for row in rows}
    for tap in TAPS:
        if tap.source != "torchtitan":
            assert f"`{tap.owner + '.' if tap.owner else ''}{tap.name}`" in told[f"`{tap.source}`"], tap
