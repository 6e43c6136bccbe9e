"""`stepscope.profile`: torch's keywords and methods, a run folder of its own, nothing when it is switched off."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepscope
from tests.record.agent.processes import SOURCE
from tests.record.agent.window_harness import read_events, read_steps, read_trace, recorded

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
CPU = torch.profiler.ProfilerActivity.CPU


def work() -> None:
    (torch.ones(4, 8, requires_grad=True) @ torch.ones(8, 2)).sum().backward()


def manifest(run: str) -> dict[str, Any]:
    (path,) = Path(run).glob("host-*/manifest.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("variable", [None, ("STEPSCOPE_DISABLED", "1"), ("STEPSCOPE", "0")])
def test_disabled_it_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if variable is not None:
        monkeypatch.setenv(*variable)
    with stepscope.profile(enabled=variable is not None, with_stack=True) as prof:
        work()
        prof.step()
        prof.add_metadata("a", "b")
        prof.toggle_collection_dynamic(True, [CPU])
    assert prof.run_folder is None
    assert (prof.step_num, prof.current_action) == (0, None)
    assert prof.key_averages(group_by_input_shape=True).table(sort_by="cpu_time_total", row_limit=5) == ""
    assert list(prof.events()) == []
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    prof.export_stacks(str(tmp_path / "stacks"), "self_cpu_time_total")
    prof.export_memory_timeline(str(tmp_path / "memory.html"), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_disabled_it_imports_nothing() -> None:
    code = (
        "import sys, stepscope\n"
        "with stepscope.profile(enabled=False) as prof:\n    prof.step()\n"
        "heavy = ('torch', 'numpy', 'polars', 'json', 'stepscope.record.agent')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_it_has_every_keyword_and_name_of_torchs_profiler() -> None:
    ours = inspect.signature(stepscope.profile).parameters
    known = ("activities", "schedule", "on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops")
    assert {*known, "with_modules", "acc_events", "experimental_config"} <= set(ours)
    assert ours["later"].kind is inspect.Parameter.VAR_KEYWORD
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours.values())
    needed = "step start stop key_averages events export_chrome_trace export_stacks export_memory_timeline add_metadata"
    names = {*needed.split(), "add_metadata_json", "toggle_collection_dynamic", "step_num", "current_action"}
    assert names <= set(dir(stepscope.profile(enabled=False)))


ALONE = """
import os, torch, stepscope
with stepscope.profile(name="mine") as prof:
    for _ in range(10):
        (torch.ones(4, 8, requires_grad=True) @ torch.ones(8, 2)).sum().backward()
        prof.step()
assert prof.step_num == 10
assert "KINETO_LOG_LEVEL" not in os.environ
with open("folder", "w") as file:
    file.write(prof.run_folder)
"""


def test_alone_it_records_a_run(tmp_path: Path) -> None:
    # A process of its own: Kineto writes to stderr for good where something else has started it before.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    run = Path((tmp_path / "folder").read_text())
    assert run.parent == tmp_path / "stepscope-runs"
    facts = manifest(str(run))
    assert (facts["schema"], facts["name"]) == ("stepscope.run/1", "mine")
    assert facts["ended_ns"] > facts["started_ns"]
    steps = read_steps(run)
    assert [step["step"] for step in steps] == list(range(10))
    assert {step["kind"] for step in steps} == {"train"}
    assert read_events(run, "exit")


def test_torch_records_by_the_schedule_given(tmp_path: Path) -> None:
    ready: list[tuple[int, bool]] = []

    def on_trace_ready(profiler: Any) -> None:
        ready.append((profiler.step_num, isinstance(profiler, torch.profiler.profile)))
        profiler.export_chrome_trace(str(tmp_path / f"at-{profiler.step_num}.json"))

    with stepscope.profile(
        out=str(tmp_path / "run"),
        activities=[CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=on_trace_ready,
        with_stack=True,
    ) as prof:
        assert prof.current_action == torch.profiler.ProfilerAction.NONE
        for _ in range(10):
            work()
            prof.step()
    assert ready == [(4, True), (8, True)]
    run = tmp_path / "run"
    first, second = read_events(run, "window")
    assert (first["first_step"], first["steps"], first["owner"]) == (2, 2, "user")
    assert (second["first_step"], second["steps"]) == (6, 2)
    assert not read_events(run, "user_trace", "suspended")
    for window, name in ((first, "at-4.json"), (second, "at-8.json")):
        kept = read_trace(run / "rank-0" / window["trace"])
        assert kept == read_trace(tmp_path / name)
        assert sum(event.get("name") == "aten::mm" and event.get("cat") == "cpu_op" for event in kept) >= 2
    assert len(read_steps(run)) == 10


def test_everything_is_recorded_without_a_schedule_and_exported_afterwards(tmp_path: Path) -> None:
    with stepscope.profile(out=str(tmp_path / "run"), activities=[CPU], record_shapes=True) as prof:
        for _ in range(3):
            work()
            prof.step()
    assert any(average.key == "aten::mm" and average.count >= 3 for average in prof.key_averages())
    assert "aten::mm" in {event.name for event in prof.events()}
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    prof.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    (window,) = read_events(tmp_path / "run", "window")
    assert (window["first_step"], window["steps"]) == (0, 3)
    kept = read_trace(tmp_path / "run" / "rank-0" / window["trace"])
    assert kept == read_trace(tmp_path / "trace.json")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"] == kept


def test_a_packed_export_of_the_script_is_kept_packed(tmp_path: Path) -> None:
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path / "board"), use_gzip=True)
    with stepscope.profile(out=str(tmp_path / "run"), activities=[CPU], on_trace_ready=handler) as prof:
        work()
        prof.step()
    (board,) = (tmp_path / "board").iterdir()
    (window,) = read_events(tmp_path / "run", "window")
    kept = tmp_path / "run" / "rank-0" / window["trace"]
    assert kept.name.endswith(".pt.trace.json.gz")
    assert gzip.decompress(kept.read_bytes()) == gzip.decompress(board.read_bytes())


def test_start_and_stop_without_a_with_block(tmp_path: Path) -> None:
    prof = stepscope.profile(out=str(tmp_path / "run"))
    prof.step()  # not started: nothing
    prof.start()
    prof.start()
    work()
    prof.step()
    prof.stop()
    prof.stop()
    assert len(read_steps(tmp_path / "run")) == 1


def test_a_taken_folder_is_never_written_to(tmp_path: Path) -> None:
    folders = []
    for _ in range(2):
        with stepscope.profile(out=str(tmp_path / "run")) as prof:
            work()
            prof.step()
        folders.append(prof.run_folder)
    assert folders == [str(tmp_path / "run"), str(tmp_path / "run-2")]
    assert len(read_steps(tmp_path / "run")) == len(read_steps(tmp_path / "run-2")) == 1


def test_what_the_block_raises_passes_through(tmp_path: Path) -> None:
    def fail() -> None:
        with stepscope.profile(out=str(tmp_path / "run"), with_stack=True) as prof:
            work()
            prof.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert manifest(str(tmp_path / "run"))["ended_ns"] is not None
    assert read_events(tmp_path / "run", "exit")
    assert not torch.autograd._profiler_enabled()


def test_what_torch_refuses_is_refused_and_nothing_stays_behind(tmp_path: Path) -> None:
    from stepscope.record.agent import core

    with pytest.raises(TypeError, match="no_such_keyword"):
        stepscope.profile(out=str(tmp_path / "run"), no_such_keyword=1).start()
    assert core.current() is None


def test_a_folder_that_cannot_be_made_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with stepscope.profile(out=str(tmp_path / "file" / "run"), activities=[CPU]) as prof:
        work()
        prof.step()
    assert prof.run_folder is None
    assert any(average.key == "aten::mm" for average in prof.key_averages())


def test_inside_a_recorded_run_it_joins_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with recorded(run, mode="off") as agent:
        with stepscope.profile(out=str(tmp_path / "other"), activities=[CPU]) as prof:
            work()
            prof.step()
            work()
            prof.step()
        assert prof.run_folder == str(run)
        from stepscope.record.agent import core

        assert core.current() is agent
    assert not (tmp_path / "other").exists()
    (window,) = read_events(run, "window")
    assert window["owner"] == "user"
    assert {step["signal"] for step in read_steps(run)} == {"user"}


def test_ranks_of_one_launch_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with stepscope.profile(out=str(tmp_path / "run")) as prof:
            work()
            prof.step()
        assert prof.run_folder == str(tmp_path / "run")
    assert (tmp_path / "run" / "rank-0").is_dir()
    assert (tmp_path / "run" / "rank-1").is_dir()
