"""The loader in traces without a journal, beside an accelerator, in waves, and started anew for every epoch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median

import pytest

from stepscope import api
from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Diagnosis, Finding
from tests.analyze.scenes import TRAIN, loader_tables
from tests.analyze.test_machine import epochs_tables, wave_tables
from tests.builders import rank_info
from tests.diagnose.judged import judged, values
from tests.gpu_traces import STEP_US, host, write
from tests.records import replace

RULE = "input.loader_bound"
PAIR = Path(__file__).resolve().parents[3] / "shared" / "traces" / "kineto_tb_plugin"
needs_pair = pytest.mark.skipif(not PAIR.is_dir(), reason=f"the real traces are not at {PAIR}")


def input_findings(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.category == "input"]


def opened(path: Path) -> api.Run:
    return api.open_run(path, options=api.ReadOptions(cache=False))


def test_a_trace_without_a_journal_names_its_loader(tmp_path: Path) -> None:
    run = opened(write(tmp_path / "worker0.pt.trace.json", steps=4))
    (finding,) = input_findings(run.diagnosis)
    assert finding.rule == RULE
    views = run.analysis.views
    assert views is not None
    (overview,) = (span.overview for span in views.spans)
    assert overview is not None
    mean_ms = overview.wall.mean_ns / 1e6
    assert finding.share == pytest.approx(finding.cost_ms_per_step / mean_ms)
    assert finding.gain_ceiling == finding.share
    assert finding.title.startswith("The training process loads every batch itself: the device idles for it")
    assert [(Path(place.file).name, place.line) for place in finding.where] == [("train.py", 7)]
    assert "num_workers=2" in finding.fix
    figures = values(finding)
    assert figures["device idle while the host loads, per step"] == pytest.approx(0.2, abs=0.01)
    assert figures["num_workers"] == "0"


def test_a_loader_behind_a_busy_device_costs_nothing(tmp_path: Path) -> None:
    """The kernels of a step run until the next batch is there."""
    run = opened(write(tmp_path / "worker0.pt.trace.json", steps=4))
    busy = opened(write(tmp_path / "busy" / "worker0.pt.trace.json", steps=4, gemm_us=STEP_US - 1))
    assert input_findings(run.diagnosis)
    (overview,) = [span.overview for span in busy.analysis.views.spans]  # type: ignore[union-attr]
    assert overview is not None
    loading = overview.parts["idle_data"].share
    assert loading < 0.1
    assert all(finding.share == pytest.approx(loading) for finding in input_findings(busy.diagnosis))


def test_a_trace_without_a_loader_abstains(tmp_path: Path) -> None:
    path = tmp_path / "worker0.pt.trace.json"
    write(path, steps=4)
    path.write_text(path.read_text().replace("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "prepare"))
    diagnosis = opened(path).diagnosis
    assert input_findings(diagnosis) == []
    assert "DataLoader" in {each.rule: each.needs for each in diagnosis.abstained}[RULE]


def test_the_name_of_the_iterator_tells_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "worker0.pt.trace.json"
    write(path, steps=4)
    path.write_text(path.read_text().replace("_SingleProcess", "_MultiProcessing"))
    (finding,) = input_findings(opened(path).diagnosis)
    assert "workers do not keep up" in finding.title
    assert finding.try_ == ()


def test_the_users_lines_below_the_loader_come_first(tmp_path: Path) -> None:
    below = [
        host("/app/data.py(30): __getitem__", number * STEP_US + 5, 150, "python_function") for number in range(1, 5)
    ]
    inner = [host("/app/data.py(12): decode", number * STEP_US + 9, 90, "python_function") for number in range(1, 5)]
    path = write(tmp_path / "worker0.pt.trace.json", steps=4, more=below + inner)
    (finding,) = input_findings(opened(path).diagnosis)
    first = finding.where[0]
    assert (Path(first.file).name, first.function) == ("data.py", "__getitem__")
    assert first.share == pytest.approx(0.75)
    assert [place.function for place in finding.where] == ["__getitem__", "train"]


def test_beside_an_accelerator_without_a_window_the_wait_is_an_upper_bound() -> None:
    (finding,) = input_findings(judged(loader_tables(ranks=[rank_info(device="cuda")])))
    assert finding.confidence == "low"
    assert "cuda may be working" in finding.caveat
    assert finding.cost_ms_per_step == pytest.approx(60)


def test_beside_an_accelerator_with_a_window_only_its_idle_time_counts(tmp_path: Path) -> None:
    views = opened(write(tmp_path / "worker0.pt.trace.json", steps=4)).analysis.views
    recorded = analyze(loader_tables(ranks=[rank_info(device="cuda")]))
    (finding,) = input_findings(diagnose(replace(recorded, views=views)))
    idle = values(finding)["device idle while the host loads"]
    assert isinstance(idle, float)
    assert 0.15 < idle < 0.25
    assert finding.cost_ms_per_step == pytest.approx(idle * 100, rel=1e-3)  # of a steady step of 100 ms
    assert finding.share == finding.gain_ceiling == pytest.approx(idle, rel=1e-3)
    assert "may be working" not in finding.caveat


def test_waves_are_told_as_waves_and_only_once() -> None:
    (finding,) = input_findings(judged(wave_tables()))
    assert finding.rule == "input.prefetch_waves"
    assert finding.title.startswith("One step in 4 waits 100 ms")
    (slow,) = input_findings(judged(wave_tables(7)))
    assert slow.rule == RULE


def test_workers_started_anew_for_every_epoch() -> None:
    (finding,) = input_findings(judged(epochs_tables()))
    assert finding.rule == "input.first_batch"
    total_ms = (5 * 9 * 10 + 5 * 30 + 4 * 50) / 50
    assert finding.cost_ms_per_step == pytest.approx(4)
    assert finding.share == pytest.approx(4 / total_ms)
    assert finding.gain_ceiling == pytest.approx((4 + 4 * 20 / 50) / total_ms)  # the first steps take 20 ms longer
    assert [(place.file, place.line) for place in finding.where] == [(TRAIN, 75)]
    assert "persistent_workers=True" in finding.fix
    assert [(each.knob, each.value) for each in finding.try_] == [("loader.persistent_workers", "true")]


@cache
def of_pair(workers: int) -> api.Run:
    return opened(PAIR / f"resnet50_num_workers_{workers}")


def interior_ms(analysis: Analysis) -> list[float]:
    """Steps of all spans but each span's first and last, which the profiler's start and end touch."""
    views = analysis.views
    assert views is not None
    return [step.wall_ns / 1e6 for span in views.spans if span.overview for step in span.overview.steps[1:-1]]


@needs_pair
def test_the_ceiling_bounds_what_four_workers_gained() -> None:
    before, after = (median(interior_ms(of_pair(workers).analysis)) for workers in (0, 4))
    gain = 1 - after / before
    (finding,) = input_findings(of_pair(0).diagnosis)
    assert gain <= finding.gain_ceiling <= gain + 0.15
