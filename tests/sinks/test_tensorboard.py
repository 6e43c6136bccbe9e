"""Event files hold every value once with its step and time, for TensorBoard's reader and ours, whatever happened."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.sinks import tensorboard
from tests.cli.calls import call
from tests.integration.harness import PYTHON, record
from tests.run_folders import make_run_folder
from tests.sinks import expected

Points = Counter[tuple[int, str]]
SCRIPT = """
import torch
from plain_sgd import PlainSGD
model = torch.nn.Linear(8, 1)
optimizer = PlainSGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
for step in range(25):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
"""


def theirs(folder: Path) -> tuple[Points, dict[str, dict[str, list[Any]]]]:
    """What TensorBoard reads: all points, and by process and tag its events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found, by_tag = Points(), {}
    for process in sorted(path for path in folder.iterdir() if path.is_dir()):
        read = EventAccumulator(str(process), size_guidance={"scalars": 0})
        read.Reload()
        tags = by_tag.setdefault(process.name, {tag: read.Scalars(tag) for tag in read.Tags()["scalars"]})
        found.update(expected.key(expected.micro(e.wall_time), e.value) for events in tags.values() for e in events)
    return found, by_tag


def ours(folder: Path) -> Points:
    return Points(expected.key(row["time_ns"], row["value"]) for row in api.open_run(folder).table("metrics").rows)


@pytest.mark.torch
def test_a_real_run_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = record(tmp_path / "run", [PYTHON, "train.py"], options=["--no-window", "--no-report"], cwd=tmp_path).folder
    assert call("export", run, "--to", "tensorboard", "--out", "tb") == 0
    truth = expected.values(run, single=True)
    found, tags = theirs(Path("tb"))
    assert found == truth
    assert ours(Path("tb")) == truth
    told = [row for row in expected.table(run) if row["name"] in ("train/loss", "perf/step_ms", "train/lr/0")]
    for name in ("train/loss", "perf/step_ms", "train/lr/0"):
        assert [e.step for e in tags["rank-0"][name]] == [row["step"] for row in told if row["name"] == name]
    assert api.open_run("tb").analysis.metrics.series  # a report can be made of it
    assert b"stepscope/findings" in next(Path("tb").rglob("*tfevents*")).read_bytes()


def test_all_that_is_hard(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    said = capfd.readouterr().err
    assert "single precision" in said
    assert "beyond its largest number" in said
    truth = expected.values(odd_run, single=True)
    found, tags = theirs(Path("tb"))
    assert found == truth
    assert ours(Path("tb")) == truth
    assert {e.step for e in tags["rank-0"]["early"]} == {-1}  # before the first step
    assert {"train/loss", "train/loss (wandb)", "..", "=1+1", "ünï/☃ (a)"} <= set(tags["rank-0"])
    assert set(tags) == {"rank-0", "rank-1"}
    told = next(Path("tb/rank-0").glob("*tfevents*")).read_bytes().decode(errors="replace")
    assert "Load in worker processes" in told
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert rows[0] == "| Title | Cost | Place | Evidence | Fix |"
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1  # a cell holds no bar of its own
    assert '"finding/input.loader_bound_ms_per_step"' in told
    told = {row["step"] for row in api.open_run("tb").table("metrics").rows if row["name"] == "early"}
    assert told == {None}


def test_a_second_export_adds_what_is_missing(odd_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    files = {path: path.read_bytes() for path in Path("tb").rglob("*tfevents*")}
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    assert "No new value" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in Path("tb").rglob("*tfevents*")} == files
    for path, data in files.items():  # killed in the middle of a record
        path.write_bytes(data[: len(data) * 2 // 3 + 5])
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    assert theirs(Path("tb"))[0] == expected.values(odd_run, single=True)
    assert all(path.read_bytes() == data[: len(data) * 2 // 3 + 5] for path, data in files.items())


def test_another_run_is_not_mixed_in(odd_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = make_run_folder(tmp_path, manifest={"started_ns": 5, "host": "b"}, name="other")
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 0
    assert call("export", other, "--to", "tensorboard", "--out", "tb") == 2
    assert "another run" in capfd.readouterr().err
    Path("tb/stepscope.json").unlink()
    assert call("export", odd_run, "--to", "tensorboard", "--out", "tb") == 2
    assert "event files of others" in capfd.readouterr().err


def test_follows_a_run_until_it_ends(growing: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = growing(0), []  # nothing trains yet: telemetry may be of a process that is not known

    def later(_: float) -> None:
        assert call("export", run, "--to", "tensorboard", "--out", "tb") == 2  # one at a time
        seen.append(sum(theirs(Path("tb"))[0].values()) if Path("tb").exists() else 0)
        growing(4, last=len(seen) == 4)

    monkeypatch.setattr(tensorboard.time, "sleep", later)
    assert call("export", run, "--to", "tensorboard", "--out", "tb", "--follow") == 0
    assert sorted(set(seen)) == seen  # more each time
    assert len(seen) == 4
    assert seen[0] == 0
    assert theirs(Path("tb"))[0] == expected.values(run, single=True)
    assert len(list(Path("tb").rglob("*tfevents*"))) == 1


def test_ctrl_c_ends_following_with_what_is_there(
    growing: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensorboard.time, "sleep", interrupted)
    run = growing(3)
    assert call("export", run, "--to", "tensorboard", "--out", "tb", "--follow") == 0
    assert theirs(Path("tb"))[0] == expected.values(run, single=True)
    assert b"stepscope/findings" not in next(Path("tb").rglob("*tfevents*")).read_bytes()
    growing(2, last=True)
    assert call("export", run, "--to", "tensorboard", "--out", "tb") == 0
    assert theirs(Path("tb"))[0] == expected.values(run, single=True)
    assert json.loads(Path("tb/stepscope.json").read_text())["texts"]
