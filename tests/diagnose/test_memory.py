"""Rules on memory: a measured loss is a finding, all else a risk that is ranked nowhere and shown all the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.errors import UsageError
from stepscope.model import Risk
from stepscope.report.document import build, read_report, report_bytes
from stepscope.tables.schema import Tables
from tests.analyze.memory_scenes import GIB, HARDWARE, MIB, STEPS, memory_tables, readings, struck_steps
from tests.analyze.test_memory_losses import leaking
from tests.builders import T0, make_tables, step_rows
from tests.dashboard.plain_pages import page_of
from tests.diagnose.judged import judged
from tests.integration.harness import PYTHON, TIMEOUT_S, environment, finish, started
from tests.on_terminal import on_terminal

RETRIES = "memory.allocator_retries"


def only(tables: Tables) -> Risk:
    (risk,) = judged(tables).risks
    assert risk.evidence
    assert all(row.source for row in risk.evidence)
    assert risk.fix
    assert risk.caveat
    assert risk.falsified_by
    assert risk.learn.startswith("https://")
    return risk


def risks(**device: Any) -> list[str]:
    return [risk.rule for risk in judged(memory_tables(readings(device=lambda _: device))).risks]


def missing(tables: Tables, *rules: str) -> dict[str, tuple[str, bool]]:
    return {one.rule: (one.needs, one.quiet) for one in judged(tables).abstained if one.rule in rules}


def test_growth_tells_when_memory_is_full() -> None:
    risk = only(memory_tables(readings(lambda step: 4 * GIB + step * MIB)))
    assert risk.rule == "memory.growth"
    assert risk.severity == "critical"  # 60 GiB at 100 MiB/s
    assert risk.title == "Memory of the process grows by 1 MiB in every step, and is full in 10 min at this rate"
    assert "--window-memory" in risk.fix
    assert risk.ranks == (0,)


def test_a_trace_alone_tells_growth_with_less_confidence() -> None:
    risk = only(leaking(5))
    assert risk.confidence == "low"
    assert "a few steps" in risk.caveat


@pytest.mark.parametrize(
    ("per_step", "hardware"),
    [
        (MIB // 8, HARDWARE),  # 47 MiB in all: an allocator's own
        (MIB, {**HARDWARE, "memory_bytes": 16_000 * GIB}),  # full in two days
        (MIB, {}),  # no limit known, and less than a GiB so far
    ],
    ids=["little", "far", "unknown"],
)
def test_growth_that_ends_no_job_is_no_risk(per_step: int, hardware: dict[str, Any]) -> None:
    found = judged(memory_tables(readings(lambda step: 4 * GIB + step * per_step), hardware=hardware))
    assert found.risks == ()
    assert missing(memory_tables(readings(lambda _: 4 * GIB)), "memory.growth") == {}


def test_growth_of_steps_and_of_memory_are_linked() -> None:
    steps, clock = [], T0
    for number in range(STEPS):
        steps += step_rows(1, first_step=number, start_ns=clock, forward_ms=3 + number / 100)
        clock += steps[-1]["wall_ns"]
    found = judged(memory_tables(readings(lambda step: 4 * GIB + step * MIB), steps=steps))
    drift = next(finding for finding in found.findings if finding.rule == "host.step_drift")
    assert found.risks[0].explains == (drift.id,)


@pytest.mark.parametrize(
    ("device", "severity", "title", "fix"),
    [
        (
            {"peak_allocated_bytes": 61.5 * GIB, "fraction": 0.8},
            "warning",
            "tensors take 61.5 GiB of 64 GiB at the peak, all that the fraction of 0.8 leaves to this process",
            "set_per_process_memory_fraction",
        ),
        (
            {"peak_allocated_bytes": 49 * GIB, "peak_reserved_bytes": 49 * GIB, "free_bytes": 20 * GIB},
            "critical",
            "that others leave, who hold 30 GiB",
            "nvidia-smi",
        ),
    ],
    ids=["the script's fraction", "what others leave"],
)
def test_tensors_near_the_limit_of_their_process(device: dict[str, Any], severity: str, title: str, fix: str) -> None:
    risk = only(memory_tables(readings(device=lambda _: device)))
    assert (risk.rule, risk.severity) == ("memory.near_limit", severity)
    assert title in risk.title
    assert fix in risk.fix


def test_fragmentation_matters_near_the_limit_only() -> None:
    assert risks(peak_allocated_bytes=4 * GIB, peak_reserved_bytes=30 * GIB) == []
    assert risks(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=70 * GIB) == ["memory.fragmentation"]
    assert risks(peak_allocated_bytes=40 * GIB, peak_reserved_bytes=70 * GIB) == []
    assert risks(peak_allocated_bytes=10 * GIB, peak_reserved_bytes=30 * GIB, retries=1) == [
        "memory.near_limit",
        "memory.fragmentation",
    ]


def test_retries_that_cost_time_are_a_finding_and_the_full_device_explains_it() -> None:
    steps, journal = struck_steps(20)
    found = judged(memory_tables(journal, steps=steps))
    (finding,) = [one for one in found.findings if one.rule == RETRIES]
    assert finding.share == pytest.approx(20 / 4 / 15, rel=0.1)
    assert finding.gain_ceiling >= finding.share
    assert finding.cost_ms_per_step == pytest.approx(5, rel=0.1)
    assert finding.confidence == "medium"
    assert finding.try_[0].value == "expandable_segments:True"
    assert [risk.explains for risk in found.risks if risk.rule == "memory.near_limit"] == [(finding.id,)]


@pytest.mark.parametrize(("more_ms", "every"), [(0, 4), (1, 4), (20, 1)], ids=["free", "below floor", "all struck"])
def test_retries_without_a_measured_loss_are_no_finding(more_ms: float, every: int) -> None:
    steps, journal = struck_steps(more_ms, every=every)
    assert [one.rule for one in judged(memory_tables(journal, steps=steps)).findings if one.rule == RETRIES] == []


def test_rules_abstain_by_name_without_their_inputs() -> None:
    device = ("memory.near_limit", "memory.fragmentation", RETRIES)
    plain = make_tables(steps=step_rows(40))
    assert missing(plain, "memory.growth") == {
        "memory.growth": (
            "ten readings of memory between training steps, or a trace with allocations over three of them",
            False,
        )
    }
    assert {rule: quiet for rule, (_, quiet) in missing(plain, *device).items()} == dict.fromkeys(device, True)
    with_device = memory_tables([{"kind": "memory", "step": 3, "device": "cuda:0"}])
    named = missing(with_device, "memory.near_limit", "memory.fragmentation")
    assert not any(quiet for _, quiet in named.values())
    assert len(named) == 2


def test_risks_are_ignored_by_name() -> None:
    analysis = analyze(memory_tables(readings(lambda step: 4 * GIB + step * MIB)))
    found = diagnose(analysis, ignored={"memory.growth": "a cache, on purpose"})
    assert found.risks == ()
    assert [one.rule for one in found.ignored] == ["memory.growth"]
    with pytest.raises(UsageError, match=r"memory\.growth"):
        diagnose(analysis, ignored={"memory.grow": "x"})


def test_a_risk_is_shown_everywhere_and_ranked_nowhere() -> None:
    analysis = analyze(memory_tables(readings(lambda step: 4 * GIB + step * MIB)))
    report = build(analysis, diagnose(analysis), source=False)
    assert report.findings == ()
    (row,) = report.risks
    assert not {"cost_ms_per_step", "share", "gain_ceiling"} & set(row)
    assert read_report(report_bytes(report)) == report
    text = on_terminal(report, 200)
    assert text.index("explains 10") < text.index("Risks, without a measured cost") < text.index(row["title"])
    assert f"<h3>{row['title']}</h3>" in page_of(report, analysis)


def test_a_hostile_name_stays_text() -> None:
    device = {"peak_allocated_bytes": 79 * GIB, "device": "cuda:0<script>\x1b[2J"}
    analysis = analyze(memory_tables(readings(device=lambda _: device)))
    report = build(analysis, diagnose(analysis), source=False)
    assert report.risks
    assert "\x1b[2J" not in on_terminal(report, 200)
    assert "<script>" not in page_of(report, analysis)


# real processes: a script that keeps its losses with their graph, and the same with numbers

SCRIPT = """\
import sys, time
import torch
from plain_sgd import PlainSGD

torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = PlainSGD(model.parameters(), lr=0.01)
leaks = sys.argv[1] == "leak"
losses = []


def train(batch):
    scaled = batch * 2.0
    loss = model(scaled).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=leaks)
    optimizer.step()
    losses.append(loss if leaks else loss.item())


def run(steps, pause):
    for _ in range(steps):
        train(torch.ones(512, 256))
        time.sleep(pause)


"""
RECORDED = SCRIPT + "run(320, 0.04)\n"
TRACED = SCRIPT + (
    "from torch.profiler import profile, ProfilerActivity, schedule\n"
    "with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True,\n"
    "             schedule=schedule(wait=1, warmup=1, active=6),\n"
    "             on_trace_ready=lambda prof: prof.export_chrome_trace(sys.argv[2])) as prof:\n"
    "    for _ in range(8):\n"
    "        run(1, 0)\n"
    "        prof.step()\n"
)
TRAIN_LINE = SCRIPT.splitlines().index("def train(batch):") + 1
MODES = ("leak", "clean")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """report.json of both, recorded side by side: they mostly sleep, for the readings need ten seconds."""
    folder = tmp_path_factory.mktemp("growth")
    (folder / "train.py").write_text(RECORDED)
    lines = {mode: [PYTHON, "train.py", mode] for mode in MODES}
    with (
        started(folder / "leak", lines["leak"], options=["--no-window"]) as leak,
        started(folder / "clean", lines["clean"], options=["--no-window"]) as clean,
    ):
        done = {"leak": finish(leak, folder / "leak"), "clean": finish(clean, folder / "clean")}
    assert {mode: one.status for mode, one in done.items()} == dict.fromkeys(MODES, 0), done
    return {mode: one.report for mode, one in done.items()}


def traced(folder: Path, mode: str) -> tuple[Risk, ...]:
    (folder / "train.py").write_text(TRACED)
    trace = folder / f"{mode}.pt.trace.json"
    line = [PYTHON, "train.py", mode, str(trace)]
    subprocess.run(line, cwd=folder, env=environment(), check=True, timeout=TIMEOUT_S, capture_output=True)
    assert json.loads(trace.read_text())["traceEvents"]
    return stepscope.open_run(trace).diagnosis.risks


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.thorough
def test_losses_with_their_graph_grow(reports: dict[str, dict[str, Any]]) -> None:
    (risk,) = reports["leak"]["risks"]
    assert risk["rule"] == "memory.growth"
    per_step = next(row["value"] for row in risk["evidence"] if row["metric"] == "growth per step")
    # the batch times 2 and the model's output live on: half a MiB each (autograd keeps both); on a busy machine the
    # allocator takes memory from the system in other portions
    assert per_step == pytest.approx(1 << 20, rel=0.5)


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.thorough
def test_numbers_in_their_place_do_not(reports: dict[str, dict[str, Any]]) -> None:
    assert reports["clean"]["risks"] == []
    assert reports["clean"]["views"]["memory_losses"]["logged"]


@pytest.mark.torch
@pytest.mark.process
def test_a_trace_with_allocations_names_the_function(tmp_path: Path) -> None:
    (risk,) = traced(tmp_path, "leak")
    place = risk.where[0]  # where only the trace is at hand, a function is named by the line it begins at
    assert (Path(place.file).name, place.function, place.line) == ("train.py", "train", TRAIN_LINE)
    assert "aten::" in next(row.metric for row in risk.evidence if row.metric.startswith("still there"))


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.thorough
def test_a_trace_without_a_leak_names_nothing(tmp_path: Path) -> None:
    assert traced(tmp_path, "clean") == ()
