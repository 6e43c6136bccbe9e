"""Copies of run folders, to change."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from stepscope.api import ReadOptions, open_run
from stepscope.diagnose import RULES
from stepscope.model import Diagnosis, Finding
from stepscope.report.document import report_bytes
from tests.builders import MS, PID, T0, step_rows
from tests.integration.harness import PYTHON, TIMEOUT_S, environment
from tests.records import replace
from tests.run_folders import make_run_folder


def without(run: Path, copy: Path, patterns: tuple[str, ...] = ()) -> Path:
    """A copy of a run folder in which nothing is derived, and no file that one of `patterns` matches."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tables", "report.*"))
    files = [file for pattern in patterns for file in copy.glob(pattern)]
    assert files or not patterns, patterns
    for file in files:
        file.unlink()
    return copy


CLEAR_SHARE = 0.1  # of the step: twice the smallest that is told

INPUTS = {
    "stacks": ("host-*/stacks*",),
    "trace": ("rank-*/trace-*",),
    "events": ("rank-*/events.jsonl",),
    "telemetry": ("host-*/system.jsonl",),
    "steps": ("rank-*/steps.jsonl",),
}

# What abstains by name in every run that has no such input.
ABSTAIN = {
    "stacks": {"host.python_on_critical_path"},
    "trace": {"host.per_item_loop"},
    "events": {"system.garbage_collection", "input.loader_bound"},
    "telemetry": {
        *("system.threads_beyond_cores", "system.cpu_throttled", "system.other_processes"),
        "system.swapping_or_faults",
    },
    "steps": {
        *("input.loader_bound", "host.python_on_critical_path", "io.blocking_in_step", "system.garbage_collection"),
        *("system.threads_beyond_cores", "system.cpu_throttled", "system.other_processes"),
    },
}

# Findings that stay without an input and lose what it adds to them: these may change, and no others.
ADDS = {
    "stacks": {
        "input.loader_bound",  # the lines below the loader, whether workers are busy
        "input.prefetch_waves",
        "host.per_item_loop",  # the exact line, its time in steady steps
        "io.blocking_in_step",  # times of lines; the window's stand in for them
        "host.step_drift",  # lines
        "host.model_copied_in_step",
        "host.evaluation_in_step",
        "system.threads_beyond_cores",  # how much of the step waits for something else than a core
    },
    "trace": {
        "io.blocking_in_step",  # times of calls; sampled ones stand in for them
        "host.python_on_critical_path",  # lines without a call of a library: Python or an operator
        "host.model_copied_in_step",
        "system.threads_beyond_cores",
    },
    "events": {
        "host.python_on_critical_path",  # the collector's time at a line is told as that line's Python
        "io.blocking_in_step",  # saves that were timed
        "host.per_item_loop",  # whose window it was
        "host.step_drift",
        "host.evaluation_in_step",
        "host.model_copied_in_step",
        "system.threads_beyond_cores",
        "system.other_processes",
    },
    "telemetry": {"input.loader_bound", "input.prefetch_waves"},  # cores in use, and with them what workers gain
    "steps": set(),
}


def judged(folder: Path) -> Diagnosis:
    return open_run(folder).diagnosis


def bare(finding: Finding) -> bytes:
    """All a finding says but which others it explains, which may be gone."""
    return msgspec.json.encode(replace(finding, explains=()))


def assert_only_named_changes(full: Diagnosis, less: Diagnosis, name: str) -> None:
    had, has = ({one.rule for one in side.abstained} for side in (full, less))
    assert had <= has, "a rule that lacks nothing new is judged all of a sudden"
    # A real disk's waits may lie at the floor, and another source on the other side of it.
    clear = {one.rule for one in full.findings if one.share >= CLEAR_SHARE}
    silent = clear - {one.rule for one in less.findings} - has
    assert silent == set(), "a finding is gone and its rule does not say why"
    assert all(one.needs for one in less.abstained)

    may_change = has | ADDS[name]
    before = {one.id: bare(one) for one in full.findings if one.rule not in may_change}
    after = {one.id: bare(one) for one in less.findings if one.rule not in may_change}
    assert after == before


def loses_in_many_ways(tmp_path: Path) -> Path:
    """A run folder made of plain values: a loader, Python, collections, and a machine with others on it."""
    steps = step_rows(80, data_wait_ms=40, forward_ms=53, other_ms=2)
    raw = f'process {PID}:"python train.py";thread ({PID}): MainThread;{{}} 100\n'
    frames = (
        "<module> (/home/user/project/train.py:90);main (/home/user/project/train.py:60);"
        "__next__ (torch/utils/data/dataloader.py:600);_next_data (torch/utils/data/dataloader.py:700);"
        "__getitem__ (/home/user/project/train.py:30)",
        "<module> (/home/user/project/train.py:90);main (/home/user/project/train.py:66);"
        "clean (/home/user/project/train.py:20);sub (re/__init__.py:180)",
    )
    events = [{"kind": "loader", "num_workers": 0, "batch_size": 8}]
    events += [
        {
            "kind": "gc",
            "time_ns": T0 + step * 100 * MS + 60 * MS,
            "duration_ns": 20 * MS,
            "step": step,
            "generation": 2,
            "collected": 5,
        }
        for step in range(20, 80, 2)
    ]
    readings = [
        {
            "time_ns": T0 + second * 1000 * MS,
            "metrics": [
                ["run_delay_ns", "ns", second * 300 * MS, PID, None],
                ["cpu_pct", "%", 40.0, PID, None],
                ["psi_memory_some_pct", "%", 30.0, None, None],
                ["major_faults", "count", second * 100, PID, None],
            ],
        }
        for second in range(1, 9)
    ]
    return make_run_folder(
        tmp_path, steps=steps, events=events, stacks_raw="".join(raw.format(one) for one in frames), system=readings
    )


@pytest.mark.parametrize("name", ["stacks", "events", "telemetry", "steps"])
def test_a_run_of_plain_values_without_an_input(name: str, tmp_path: Path) -> None:
    run = loses_in_many_ways(tmp_path)
    full = judged(without(run, tmp_path / "full"))
    less = judged(without(run, tmp_path / "less", INPUTS[name]))
    assert len(full.findings) >= 2
    assert ABSTAIN[name] <= {one.rule for one in less.abstained}
    assert_only_named_changes(full, less, name)


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("name", INPUTS)
def test_a_recorded_run_without_an_input(name: str, losses: Path, tmp_path: Path) -> None:
    full = judged(without(losses, tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "full")  # the copy has the same path: reports name it
    less = judged(without(losses, tmp_path / "run", INPUTS[name]))
    assert len({one.rule for one in full.findings}) >= 2
    assert ABSTAIN[name] <= {one.rule for one in less.abstained}
    assert_only_named_changes(full, less, name)


def test_the_tables_above_name_rules() -> None:
    known = {rule.name for rule in RULES}
    assert set().union(*ABSTAIN.values(), *ADDS.values()) <= known
    assert set(ABSTAIN) == set(ADDS) == set(INPUTS)


def document(path: Path) -> bytes:
    """report.json as this process makes it, read anew."""
    return report_bytes(open_run(path, options=ReadOptions(cache=False, workers=1)).report())


def elsewhere(path: Path, folder: Path) -> bytes:
    """report.json as a process of its own makes it, which hashes strings in another way."""
    out = folder / "report.json"
    line = [PYTHON, "-m", "stepscope", "analyze", str(path), "--no-cache", "--json", str(out)]
    env = environment({"PYTHONHASHSEED": "1"})
    done = subprocess.run(line, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return out.read_bytes()


def assert_same(path: Path, folder: Path) -> None:
    first = document(path)
    assert b'"findings": [' in first
    assert document(path) == first
    assert elsewhere(path, folder) == first


def test_a_run_of_plain_values(tmp_path: Path) -> None:
    assert_same(without(loses_in_many_ways(tmp_path), tmp_path / "copy"), tmp_path)


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.torch
def test_a_recorded_run(losses: Path, tmp_path: Path) -> None:
    assert_same(without(losses, tmp_path / "run"), tmp_path)
