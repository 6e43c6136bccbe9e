"""What torch_xla counts becomes events of the right steps; a torch_xla that only counts, and real ones where named.

STEPSCOPE_TEST_PYTHONS may name interpreters that have torch_xla, separated as in PATH.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.record.agent import marks  # noqa: E402 - after the check for torch

from .fake_agent import Captured  # noqa: E402
from .processes import PYTHONS, SCRIPTS, run_script  # noqa: E402

pytestmark = pytest.mark.torch

FAKE_XLA, FAKE_TORCH = SCRIPTS / "fake_xla", SCRIPTS / "fake_torch"
SCALAR = "aten::_local_scalar_dense"


class Recording(Captured):
    """An agent that is told of a torch_xla, and the events it writes."""

    def __init__(self, folder: Path, xla: Any) -> None:
        super().__init__(folder)
        self.xla = xla

    def counts(self, kind: str, by: str = "step") -> dict[Any, int]:
        found: Counter[Any] = Counter()
        for event in self.of(kind):
            found[event[by]] += event["count"]
        return dict(found)

    def steps(self) -> list[int]:
        """The steps that are cut from now on."""
        found: list[int] = []
        self.agent.add_step_listener(lambda row, _now: found.append(row.step) if row else None, "test")
        return found

    def late(self, folder: Path) -> Recording:
        """Another agent, as of now; the first one has left."""
        self.agent.probes.uninstall_all()
        other = Recording(folder, self.xla)
        other.agent.probes.install_all()
        return other


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    names = [name for name in sys.modules if name.split(".")[0] == "torch_xla"]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FAKE_XLA))
    xla = importlib.import_module("torch_xla")
    made = Recording(tmp_path, xla)
    agent = made.agent
    marks.activate(agent)
    agent.probes.install_all()
    yield made
    agent.finish("test")
    agent.probes.uninstall_all()
    agent.guard.stop()
    marks.deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_xla"]:
        del sys.modules[name]


def test_each_step_has_what_it_did(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    for step in range(6):
        for _ in range(2 if step == 3 else 0):
            xla.compiled()
        if step % 2:
            xla.read_value()
            xla.fetched(size=100)
        xla._XLAC.count("aten::median", step)
        xla.sync()
    assert recording.counts("compile") == {3: 2}
    assert recording.counts("transfer") == {1: 2, 3: 2, 5: 2}
    assert recording.counts("transfer", "operator") == {SCALAR: 3, None: 3}
    assert recording.counts("fallback") == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert sum(event["bytes"] for event in recording.of("transfer")) == 312
    assert sum(event["duration_ns"] for event in recording.of("transfer")) == 6_000_000
    for kind in ("compile", "transfer", "fallback"):
        assert {(event["backend"], event["step_source"]) for event in recording.of(kind)} == {("torch_xla", "poll")}
    assert recording.agent.last_compile_step == 3


def test_compilations_have_their_own_time_and_many_share_an_event(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    begun = recording.agent.clock.now()
    xla.compiled(ns=50_000)
    over = recording.agent.clock.now()
    xla.sync()
    for _ in range(100):
        xla.compiled(ns=1_000)
    xla.sync()
    xla._XLAC.post("EagerOpCompileTime", 7_000)
    xla.sync()
    events = recording.of("compile")
    assert [(event["count"], event["duration_ns"]) for event in events] == [(1, 50_000), (100, 100_000), (1, 7_000)]
    slack = 5_000_000  # two clocks are compared, one of them in seconds with fractions
    assert begun - slack <= events[0]["time_ns"] <= over + slack
    assert "torch_xla 2.9.0-fake" in events[0]["source"]
    assert "EagerOpCompileTime" in events[2]["source"]


def test_a_script_may_clear_everything(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    for step in range(6):
        if step == 3:
            xla.metrics.clear_all()
        xla.compiled()
        xla.read_value()
        xla._XLAC.count("aten::median")
        xla.sync()
    for kind in ("compile", "transfer", "fallback"):
        assert recording.counts(kind) == dict.fromkeys(range(6), 1)


def test_a_metric_that_is_slow_to_read_is_read_less_often_and_loses_nothing(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    for _ in range(xla.RING):
        xla.fetched(ns=1_000)
    xla._XLAC.slow_s = 0.002  # then no look for half a second
    xla.sync()
    xla._XLAC.slow_s = 0.0
    recording.seen.clear()
    looks = xla._XLAC.looks
    for step in range(1, 31):
        xla.read_value(ns=1_000)
        if step == 7:
            xla.compiled(ns=1_000)
        xla.sync()
    assert xla._XLAC.looks - looks <= 2 * 30 + 8  # compilations are looked at in every step, transfers are not
    for _ in range(3):  # samples that are kept no more are counted all the same
        for _ in range(1000):
            xla.fetched(ns=1_000)
        xla.sync()
    recording.finish()
    found = recording.counts("transfer")
    assert sum(found.values()) == 3030
    assert sum(event["duration_ns"] for event in recording.of("transfer")) == 3_030_000
    assert recording.counts("compile") == {7: 1}


def test_the_end_tells_how_everything_stands_once(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    for value in range(1, 101):
        xla._XLAC.post("ExecuteTime", value * 1000, end=1_700_000_000 + value)
    xla._XLAC.post("NobodyKnows", 5)
    xla.sync()
    xla.read_value()  # behind the last boundary
    recording.finish()
    recording.finish()
    (event,) = recording.of("counters")
    metric = event["metrics"]["ExecuteTime"]
    assert (metric["unit"], metric["samples"], metric["total"]) == ("ns", 100, 5_050_000.0)
    assert (metric["percentiles"]["50"], metric["percentiles"]["100"]) == (51_000.0, 100_000.0)
    assert metric["samples_per_second"] == pytest.approx(100 / 99)
    assert event["metrics"]["InboundData"]["unit"] == "bytes"
    assert "NobodyKnows" not in event["metrics"]
    assert event["counters"] == {"MarkStep": 2, SCALAR: 1}
    assert sum(recording.counts("transfer").values()) == 1


@pytest.mark.parametrize(
    ("missing", "kinds"),
    [
        (("_get_executed_fallback_ops",), {"compile", "transfer", "fallback", "counters"}),
        (("_get_executed_fallback_ops", "_xla_counter_names"), {"compile", "transfer", "counters"}),
        (("_xla_metric_names",), {"compile", "transfer", "fallback", "counters"}),
        (("_xla_metric_data", "_xla_counter_value"), {"compile", "transfer", "fallback", "counters"}),
        (("_xla_counter_value", "counter_value"), set()),
    ],
)
def test_what_a_version_lacks_is_left_out(
    tmp_path: Path,
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    kinds: set[str],
) -> None:
    xla = recording.xla
    xla.compiled()  # what is counted before we come is nobody's
    for name in missing:
        monkeypatch.setattr(type(xla._XLAC) if name.startswith("_") else xla.metrics, name, None)
    if "_xla_metric_data" in missing:  # then there are the public functions
        monkeypatch.setattr(xla.metrics, "metric_data", lambda name: _entry(xla._XLAC, name))
        monkeypatch.setattr(xla.metrics, "counter_value", lambda name: xla._XLAC.counters.get(name))
    late = recording.late(tmp_path)
    steps = late.steps()
    xla.sync()
    for _ in range(2):
        xla.compiled()
        xla.read_value()
        xla._XLAC.count("aten::median")
        xla.sync()
    assert steps == [0, 1]
    assert sum(late.counts("compile").values()) == (2 if kinds else 0)
    late.finish()
    assert {event["kind"] for event in late.seen} & {"compile", "transfer", "fallback", "counters"} == kinds
    assert late.of("probe_error") == []


def _entry(native: Any, name: str) -> Any:
    entry = native.metrics.get(name)
    return None if entry is None else (entry[0], entry[1], tuple(entry[2]))


def test_a_defect_in_reading_is_told_once_and_steps_go_on(recording: Recording) -> None:
    steps = recording.steps()
    recording.xla.sync()
    recording.xla._XLAC.metrics["CompileTime"] = ["no", "numbers", ()]
    for _ in range(4):
        recording.xla.sync()
    assert [event["probe"] for event in recording.of("probe_error")] == ["xla_counters"]
    assert len(steps) >= 3


def test_nothing_is_read_while_probes_are_suspended(recording: Recording) -> None:
    xla = recording.xla
    xla.sync()
    recording.agent.probes.suspend("the user's profiler")
    looks = xla._XLAC.looks
    for _ in range(3):
        xla.compiled()
        xla.sync()
    assert xla._XLAC.looks == looks
    recording.agent.probes.resume()
    xla.sync()
    xla.compiled()
    xla.sync()
    assert sum(recording.counts("compile").values()) == 4


# --------------------------------------------------------------------------------------------------- real processes


@pytest.mark.process
@pytest.mark.parametrize("python", PYTHONS)
def test_a_process_writes_its_events_and_its_totals_at_exit(tmp_path: Path, python: str) -> None:
    outcome = run_script(tmp_path, "xla_fake.py", path=(FAKE_XLA, FAKE_TORCH), python=python)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "done 11\n", "")
    counts: Counter[tuple[str, Any]] = Counter()
    for kind in ("compile", "transfer", "fallback"):
        for event in outcome.events(kind):
            counts[kind, event["step"]] += event["count"]
    assert counts["compile", None] == 1
    assert all(counts["compile", step] == counts["fallback", step] == 1 for step in range(10))
    assert all(counts["transfer", step] == 2 for step in range(10))
    assert sum(count for (kind, _), count in counts.items() if kind == "transfer") == 21
    (standing,) = outcome.events("counters")
    assert standing["counters"]["MarkStep"] == 11
    assert standing["metrics"]["CompileTime"]["samples"] == 11
    assert "xla_counters" not in [event["probe"] for event in outcome.events("probe_error")]
    faulty = run_script(tmp_path / "faulty", "xla_fake.py", path=(FAKE_XLA, FAKE_TORCH), faults="xla_counters")
    assert (faulty.status, faulty.stdout, faulty.stderr) == (0, "done 11\n", "")
    assert (len(faulty.steps()), faulty.events("compile")) == (10, [])


def _with_torch_xla() -> list[str]:
    named = filter(None, os.environ.get("STEPSCOPE_TEST_PYTHONS", "").split(os.pathsep))
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_xla') is None)"
    return [python for python in named if subprocess.run([python, "-c", look], check=False).returncode == 0]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["static", "growing", "item", "fallback"])
def test_a_real_torch_xla_counts_the_same(tmp_path: Path, kind: str) -> None:
    pythons = _with_torch_xla()
    if not pythons:
        pytest.skip("no interpreter with torch_xla is named by STEPSCOPE_TEST_PYTHONS")
    outcome = run_script(tmp_path, "xla_real.py", kind, python=pythons[0], environment={"PJRT_DEVICE": "CPU"})
    assert outcome.status == 0, outcome.stderr
    truth = json.loads(outcome.stdout)
    assert outcome.events("probe_error") == []
    for name, told in (("CompileTime", "compile"), ("TransferFromDeviceTime", "transfer")):
        events = outcome.events(told)
        samples, total = truth["totals"][name]
        assert sum(event["count"] for event in events) == samples
        assert sum(event["duration_ns"] for event in events) == pytest.approx(total, abs=len(events) + 1)
        by_step = Counter[Any]()
        for event in events:
            by_step[event["step"]] += event["count"]
        column = [row[name == "TransferFromDeviceTime"] for row in truth["per_step"]]
        # The script's first step comes before the first boundary and so is none of ours.
        assert by_step[None] == column[0]
        assert [by_step[step] for step in range(11)] == [now - before for before, now in itertools.pairwise(column)]
    operators: Counter[str] = Counter()
    for event in outcome.events("fallback"):
        operators[event["operator"]] += event["count"]
    counted = {name: count for name, count in truth["counters"].items() if "aten::" in name and name != SCALAR}
    assert dict(operators) == counted
    assert bool(counted) is (kind == "fallback")
    (standing,) = outcome.events("counters")
    assert standing["counters"]["MarkStep"] == truth["counters"]["MarkStep"] == 12
    compiled = standing["metrics"]["CompileTime"]
    assert [compiled["samples"], compiled["total"]] == truth["totals"]["CompileTime"]
