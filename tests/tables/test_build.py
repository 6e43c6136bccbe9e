"""A whole small run folder to tables: every column of every table, joins, clocks, notes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope import tables
from stepscope.read import read_run
from stepscope.schema import TABLES_SCHEMA
from stepscope.tables.build import write
from stepscope.tables.links import METHODS, STATES
from stepscope.tables.schema import SCHEMAS, Tables
from tests.builders import MS, T0, make_tables, step_rows
from tests.run_folders import make_run_folder

RAW = 'process 100:"python";thread (100): MainThread;<module> (train.py:3);f (a;b.py:4) 7\n'
SYSTEM = [
    {"time_ns": T0, "metrics": [["cpu_pct", "%", 150.5, 100, None], ["load_1m", "1", 2]]},
    {"time_ns": T0 + MS, "metrics": [["gpu_util_pct", "%", 3, None, "0"], ["x", "1", None], 7, ["y"]]},
    {"time_ns": "?", "metrics": []},
]
EVENTS = [
    {
        "kind": "metrics",
        "series": [
            {"name": "loss", "source": "log", "start_ns": T0, "after_ns": [0, 4], "values": [0.5, "nan"]},
            {"name": "loss", "source": "log", "start_ns": T0, "after_ns": [0, 4], "values": [0.5]},
        ],
    },
    {"kind": "compile", "count": 2, "step": 1, "duration_ns": 5 * MS},
    {"kind": "device_step", "step": 2, "steps": [2, "x"], "device_ns": [9 * MS, 1]},
    {"kind": "gc", "generation": 2, "file": "/x/é\n.py", "line": 3},
]


def build(tmp_path: Path, **parts: Any) -> Tables:
    return tables.build(read_run(make_run_folder(tmp_path, **parts)))


def trace(*slices: dict[str, Any], base: int = 0) -> bytes:
    events = [{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, **row} for row in slices]
    return json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode()


def test_a_rank_whose_journal_is_lost_has_the_steps_of_its_trace_beside_metrics_and_stacks(tmp_path: Path) -> None:
    marks = [{"name": f"ProfilerStep#{n}", "cat": "user_annotation", "ts": 1000 * n, "dur": 900} for n in range(4)]
    parts = {"events": EVENTS, "stacks_raw": RAW, "traces": {"trace-0.pt.trace.json": trace(*marks, base=T0)}}
    built = build(tmp_path, steps=[], **parts)
    assert built.steps["step"].to_list() == [0, 1, 2, 3]
    assert built.steps["fetches"].null_count() == 4
    assert built.metrics["name"].to_list() == ["loss", "loss"]


def notes(result: Tables) -> str:
    return "\n".join(note.text for note in result.quality.notes)


def test_every_table_has_its_schema_empty_or_not(tmp_path: Path):
    full = build(
        tmp_path,
        stacks_raw=RAW,
        system=SYSTEM,
        events=EVENTS,
        traces={"trace-0.json": trace({"name": "a", "ts": 1, "dur": 1})},
    )
    bare = build(tmp_path, steps=[], name="bare", processes=[], agents=[])
    for result in (full, bare):
        for name, schema in SCHEMAS.items():
            assert dict(getattr(result, name).schema) == schema, name
    for name in ("steps", "journal", "events", "stacks", "system", "processes", "compiles", "metrics"):
        assert getattr(full, name).height > 0, name


@pytest.mark.parametrize("drift_ms", [0, 3, -40])
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("count", [2, 6])
def test_clock_of_the_trace_is_moved_to_the_journals(tmp_path: Path, count: int, stopped: bool, drift_ms: int):
    """The optimizer's step in which the profiler was stopped lasts long, and is no sign of a clock."""
    steps = step_rows(count, in_window=True)
    ends = [row["start_ns"] + row["wall_ns"] + drift_ms * MS for row in steps]
    slices = [
        {"name": "Optimizer.step#SGD.step", "cat": "user_annotation", "ts": (end - T0) / 1000 - 500, "dur": 490}
        for end in ends
    ]
    slices[-1]["dur"] = 155_000 if stopped else 490
    result = build(tmp_path, steps=steps, traces={"trace-0.json": trace(*slices, base=T0)})
    assert result.events["step"].to_list() == list(range(count))
    assert ("clock" in notes(result)) is (drift_ms != 0)
    moved = 10_000 - drift_ms * MS if drift_ms else 0
    assert result.events["start_ns"].to_list() == [end - 500_000 + moved for end in ends]


@pytest.mark.parametrize(
    ("lasts_us", "behind_us", "held_up_us", "is_moved"),
    [(1_900, 1_400, 0, False), (60_000, 40_000, 0, True), (1_900, 1_400, 8_000, False)],
)
def test_hooks_that_take_long_under_a_profiler_are_no_sign_of_a_clock(
    tmp_path: Path, lasts_us: int, behind_us: int, held_up_us: int, is_moved: bool
):
    """On a slow host they end 1.4 ms behind the boundary: moved by as much, copies would lie in no step.

    That it lies within a long update says nothing, and neither does a step whose hooks had to wait for a core.
    """
    steps = step_rows(3, in_window=True)
    slices = [
        {
            "name": "Optimizer.step#SGD.step",
            "cat": "user_annotation",
            "ts": (end - T0) / 1000 + behind_us - lasts_us,
            "dur": lasts_us + held_up_us * (number == 1),
        }
        for number, end in enumerate(row["start_ns"] + row["wall_ns"] for row in steps)
    ]
    result = build(tmp_path, steps=steps, traces={"trace-0.json": trace(*slices, base=T0)})
    assert ("clock" in notes(result)) is is_moved


def test_steps_that_begin_with_their_annotations_are_on_one_clock(tmp_path: Path):
    """On a busy machine every hook may have to wait for a core."""
    steps = step_rows(3, in_window=True)
    updates = [(row["optimizer_ns"] or 0) + (row["other_ns"] or 0) for row in steps]
    slices = [
        {
            "name": "Optimizer.step#SGD.step",
            "cat": "user_annotation",
            "ts": (row["start_ns"] + row["wall_ns"] - update - T0) / 1000,
            "dur": update / 1000 + 24_000,
        }
        for row, update in zip(steps, updates, strict=True)
    ]
    result = build(tmp_path, steps=steps, traces={"trace-0.json": trace(*slices, base=T0)})
    assert "clock" not in notes(result)


def test_missing_manifest_and_rank_json(tmp_path: Path):
    folder = make_run_folder(tmp_path)
    (folder / "host-a" / "manifest.json").unlink()
    (folder / "rank-0" / "rank.json").unlink()
    result = tables.build(read_run(folder))
    assert (result.run.name, result.run.exit_status, result.run.started_ns) == ("run", None, None)
    assert (result.run.hardware, result.run.user_roots) == ({}, ())
    assert (result.ranks[0].pid, result.ranks[0].host, result.ranks[0].device) == (100, "a", None)
    assert "no manifest" in notes(result)


def test_a_process_of_the_script_is_no_loader_worker_though_it_looks_like_one(tmp_path: Path):
    """Forked or spawned by multiprocessing it has the same look; the journal and the fork itself know better."""
    process = {"time_ns": T0, "python": True, "start_ns": T0, "torch": True, "ppid": 100, "command": "train.py"}
    processes = [
        {**process, "pid": 100, "ppid": 1, "role": "rank"},
        *({**process, "pid": pid, "role": "loader_worker"} for pid in (201, 202, 203)),
        *({**process, "pid": pid, "role": "helper", "torch": False} for pid in (204, 205)),  # forked by a fork server
    ]
    agents = [
        {"time_ns": T0, "pid": 100, "folder": "rank-0"},
        *({"time_ns": T0, "pid": pid, "role": role} for pid, role in ((201, "worker"), (202, "fork"), (203, "worker"))),
    ]
    child = {"kind": "child", "how": "multiprocessing.Process", "command": "work"}
    result = build(tmp_path, processes=processes, agents=agents, events=[{**child, "pid": 203}, {**child, "pid": 205}])
    assert dict(result.processes.select("pid", "role").rows()) == {
        100: "rank", 201: "loader_worker", 202: "other", 203: "other", 204: "helper", 205: "other",
    }  # fmt: skip


def test_launcher_workers_and_helpers(tmp_path: Path):
    process = {"time_ns": T0, "python": True, "start_ns": T0, "torch": True}
    processes = [
        {**process, "pid": 1, "ppid": 0, "role": "root", "command": "torchrun train.py"},
        {**process, "pid": 100, "ppid": 1, "role": "other", "command": "train.py"},
        {**process, "pid": 201, "ppid": 100, "role": "loader_worker", "command": "train.py"},
        {**process, "pid": 202, "ppid": 100, "role": "other", "torch": False, "command": "tracker"},
        {**process, "pid": 201, "ended_ns": T0 + MS},
        {**process, "pid": 201, "ppid": 100, "role": "other", "start_ns": T0 + 5000 * MS, "torch": None},  # another
    ]
    result = build(tmp_path, processes=processes)
    rows = result.processes.sort("start_ns", "pid").select("pid", "role", "reported", "process").rows()
    assert rows == [
        (1, "launcher", False, None),
        (100, "rank", True, "rank-0"),
        (201, "loader_worker", False, None),
        (202, "other", False, None),
        (201, "other", False, None),
    ]
    assert "never reported" not in notes(result)


def test_notes_name_what_was_lost(tmp_path: Path):
    events = [
        {"kind": "probe_error", "probe": "gc", "error": "boom"},
        {"kind": "window", "status": "dropped", "reason": "the user's profiler started"},
        {"kind": "window", "status": "kept", "trace": "trace-7.json"},
        {"kind": "window_skipped", "reason": "torch.compile was busy"},
        {"kind": "suspended", "reason": "with_stack"},
    ]
    manifest = {"ended_ns": None, "sampler": {"source": "agent", "reason": "ptrace is refused"}}
    folder = make_run_folder(
        tmp_path,
        events=events,
        manifest=manifest,
        stacks_raw=[RAW, ""],
        stacks_index=[{"errors": 3}, {"status": "failed", "errors": None}],
    )
    with (folder / "rank-0" / "steps.jsonl").open("a") as file:
        file.write('[99,"tra')
    result = tables.build(read_run(folder))
    text = notes(result)
    words = "probe gc failed|boom|trace-7.json|dropped|torch.compile was busy|suspended|never ended|ptrace is refused"
    assert [said for said in f"{words}|1 of 2 stack segments|cut off".split("|") if said not in text] == []
    expected = {"torn_lines": 1, "probe_errors": 1, "segments": 2, "segments_failed": 1, "stack_errors": 3}
    assert expected.items() | {("steps_read", 10), ("stack_samples", 7)} <= result.quality.counts.items()
    levels = [note.level for note in result.quality.notes]
    assert levels == sorted(levels, reverse=True)


def test_healthy_run_has_no_notes(tmp_path: Path):
    assert build(tmp_path, stacks_raw=RAW).quality.notes == ()


@pytest.mark.parametrize(("errors", "said"), [(5, False), (6, True)])
def test_many_failed_samples_are_said_to_hide_python_code(tmp_path: Path, errors: int, said: bool):
    raw = RAW.replace(" 7\n", " 100\n")
    notes = build(tmp_path, stacks_raw=raw, stacks_index=[{"errors": errors}]).quality.notes
    assert any(f"{errors} of {100 + errors} samples could not be taken" in note.text for note in notes) is said


@pytest.mark.parametrize(
    ("torch", "reported", "said", "unsaid"),
    [
        (True, True, "no step was seen", "never reported"),
        (True, False, "never reported", "no step was seen"),
        (False, False, "imported torch", "never reported"),
        (None, False, "nor whether", "never reported"),
    ],
)
def test_runs_without_steps(tmp_path: Path, torch: bool | None, reported: bool, said: str, unsaid: str):
    process = {"time_ns": T0, "pid": 100, "ppid": 1, "role": "root", "python": True, "torch": torch}
    agents = [{"time_ns": T0, "pid": 100, "role": "torch"}] if reported else []
    folder = make_run_folder(tmp_path, steps=[], agents=agents, processes=[process])
    shutil.rmtree(folder / "rank-0")
    result = tables.build(read_run(folder))
    assert said in notes(result)
    assert unsaid not in notes(result)
    assert result.steps.height == 0


def test_a_module_of_the_scripts_by_our_name_is_said_to_keep_us_out(tmp_path: Path):
    agents = [{"time_ns": T0, "pid": 100, "torch": "", "foreign": "/home/me/stepscope.py"}]
    folder = make_run_folder(tmp_path, steps=[], agents=agents)
    shutil.rmtree(folder / "rank-0")
    said = notes(tables.build(read_run(folder)))
    assert "/home/me/stepscope.py has the name" in said
    assert "-I" not in said


def test_a_run_within_its_own_profiler_says_why_no_step_is_known(tmp_path: Path):
    said = notes(build(tmp_path, steps=[], events=[{"kind": "suspended", "reason": "user profiler records stacks"}]))
    assert "leave out with_stack" in said
    assert "stepscope.step()" not in said


def test_store_round_trip(tmp_path: Path):
    content = trace({"name": "é\x1b[31m", "ts": 1, "dur": 1})
    built = build(tmp_path, stacks_raw=RAW, system=SYSTEM, events=EVENTS, traces={"trace-0.json": content})
    where = write(built, tmp_path / "run")
    assert where == tmp_path / "run" / "tables"
    write(built, tmp_path / "run")  # over an older one
    for name in SCHEMAS:
        again = pl.read_parquet(where / f"{name}.parquet")
        assert again.schema == SCHEMAS[name]
        assert again.equals(getattr(built, name)), name
    index = json.loads((where / "tables.json").read_bytes())
    assert index.pop("schema") == TABLES_SCHEMA
    rest = {name: getattr(built, name) for name in ("run", "quality", "ranks", "manifests")}
    assert index == json.loads(msgspec.json.encode(rest))
    assert read_run(tmp_path / "run").losses.counts  # the folder still reads as a run


def test_hostile_values_everywhere(tmp_path: Path):
    odd: list[Any] = [None, True, -1, 2**70, 1e400, "x", [], {}, {"a": []}, "\ud800", "\x00"]
    for number, value in enumerate(odd):
        rows = [
            {"pid": 100, **dict.fromkeys(["ppid", "role", "command", "start_ns", "torch", "folder", "argv"], value)}
        ]
        names = "name tags command cwd exit hardware noise git user_roots sampler ended_ns python"
        manifest = dict.fromkeys(names.split(), value)
        info = dict.fromkeys(("rank", "pid", "host", "world_size", "device", "main_file", "versions", "argv"), value)
        kinds = ("window", "site", "scalar", "compile", "device_step", "user_trace", "probe_error", "suspended", value)
        fields = ("name", "value", "reason", "status", "path", "device_ns", "file", "line", "duration_ns", "step")
        result = build(
            tmp_path,
            name=str(number),
            processes=rows,
            agents=rows,
            manifest=manifest,
            rank_json=info,
            events=[{"kind": kind, **dict.fromkeys(fields, value)} for kind in kinds],
            system=[{"time_ns": T0, "metrics": value}, {"time_ns": T0, "metrics": [[value] * 5]}],
            stacks_raw=RAW,
            stacks_index=[
                dict.fromkeys(["segment", "source", "pid", "start_ns", "rate_hz", "idle", "errors", "status"], value)
            ],
        )
        assert result.steps.height == 10
        write(result, tmp_path / str(number))
        assert pl.read_parquet(tmp_path / str(number) / "tables" / "steps.parquet").equals(result.steps)


@pytest.mark.parametrize(
    ("before", "after", "steps", "told"),
    [
        ((15_000,), 6_000, 30, True),
        ((15_000,), 14_700, 30, False),
        ((15_000,), 6_000, 14, False),
        ((15_000,), None, 30, False),
        ((15_000, 0), 6_000, 30, False),  # up and down as it was
    ],
)
def test_page_faults_that_changed_at_a_window_are_told(
    tmp_path: Path, before: tuple[int, ...], after: int | None, steps: int, told: bool
) -> None:
    rows = [
        {
            **row,
            "minor_faults": before[row["step"] % len(before)] if row["step"] < 10 else after,
            "in_window": 10 <= row["step"] < 13,
        }
        for row in step_rows(steps)
    ]
    window = {"kind": "window", "status": "dropped", "first_step": 10, "steps": 3, "reason": "a test"}
    result = build(tmp_path, steps=rows, events=[window])
    notes = [note.text for note in result.quality.notes if "page faults" in note.text]
    assert [("15,000" in text, "6,000" in text) for text in notes] == [(True, True)] * told


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tables.md").read_text()


def test_every_table_and_column():
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(SCHEMAS) <= set(sections)
    for table, schema in SCHEMAS.items():
        documented = re.findall(r"^\| `(\w+)` \| (\S+) \|", sections[table], re.MULTILINE)
        assert documented == [(name, str(dtype)) for name, dtype in schema.items()], table
    assert TABLES_SCHEMA in PAGE
    assert [word for word in (*METHODS, *STATES) if f"`{word}`" not in PAGE] == []


def test_polars_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = {"category": "kernel", "track": "0/7", "duration_ns": 3 * MS}
    built = make_tables(
        events=[{"name": "aten::mm"}, {"name": "gemm", **kernel}, {"name": "add", **kernel}],
        links=[{"event": 1, "launch": 0, "operator": 0}, {"event": 2}],
    )
    write(built, tmp_path)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    seen: list[pl.DataFrame] = []
    exec(example, {"print": seen.append})
    (frame,) = seen
    assert set(frame.rows()) == {("linked", "correlation", 1, 3.0), ("before_recording", None, 1, 3.0)}
