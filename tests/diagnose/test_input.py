"""The loader in traces without a journal, beside an accelerator, in waves, and started anew for every epoch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze import analyze
from stepscope.diagnose import diagnose, gains
from stepscope.diagnose.gains import PIPELINE
from stepscope.model import Analysis, Diagnosis, Finding
from stepscope.model.device_losses import DeviceLosses
from stepscope.tables.schema import Tables
from tests.analyze.scenes import (
    ITEM,
    LOADER_FRAMES,
    LOOP_SOURCE,
    TORCH,
    TRAIN,
    Trace,
    loader_tables,
    loop_tables,
    stack,
)
from tests.analyze.test_calls import DESCRIBE, MAIN, TRAINING, main, tables
from tests.analyze.test_machine import epochs_tables, wave_tables
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import MS, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import judged, values
from tests.gpu_traces import STEP_US, host, write
from tests.records import blank, replace

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


PYTHON_RULE = "host.python_on_critical_path"
IO_RULE = "io.blocking_in_step"


def only(made: Tables | Analysis, rule: str, sources: dict[str, str] | None = None) -> Finding:
    analysis = made if isinstance(made, Analysis) else analyze(made, sources)
    findings = [finding for finding in diagnose(analysis).findings if finding.rule == rule]
    assert len(findings) == 1
    return findings[0]


def test_a_call_with_its_comprehension_and_libraries_is_one_finding() -> None:
    finding = only(tables([*TRAINING, *DESCRIBE]), PYTHON_RULE)
    assert "describe (train.py:22)" in finding.title
    # 60 samples in json; whose are the lines on top without a callee, no window says
    assert finding.cost_ms_per_step == pytest.approx(50 * 60 / 250)
    # its lists, its operators and what chance may add to 150 samples of 250
    assert finding.gain_ceiling == pytest.approx(0.3 + 1.96 * 0.5 * (0.6 * 0.4 / 250) ** 0.5, abs=0.004)


def test_a_window_with_slow_writes_is_not_believed_against_the_steady_steps() -> None:
    """The window saw 80 ms of fsync per step; of the steady steps' samples a fifth stands there."""
    steps = step_rows(40, data_wait_ms=0, forward_ms=40, backward_ms=40, optimizer_ms=10, other_ms=10)
    trace = Trace()
    for row in steps[10:12]:
        row["in_window"] = True
        trace.add("train.py(1): log", row["start_ns"], 90 * MS, step=row["step"])
        trace.add("<built-in function fsync>", row["start_ns"] + MS, 80 * MS, step=row["step"])
    stacks = [*TRAINING, stack([MAIN, main(50), f"log ({TRAIN}:2)"], 50)]
    made = make_tables(steps=steps, events=trace.rows, stacks=stacks)
    finding = only(made, IO_RULE, {TRAIN: "def log(handle):\n    os.fsync(handle)\n"})
    assert finding.cost_ms_per_step == pytest.approx(50 * 50 / 150)


def test_one_call_over_all_items_is_predicted_with_an_interval() -> None:
    finding = only(loop_tables(), "host.per_item_loop", {TRAIN: LOOP_SOURCE})
    assert finding.expected_gain is not None
    # in the window 256 items ran operators of 5, 5 and 80 us
    assert finding.expected_gain.low == pytest.approx((40 - 256 * 0.09) / 100)
    assert finding.expected_gain.high == pytest.approx(0.72 * 255 / 256)
    assert finding.expected_gain.high <= finding.gain_ceiling


def small_files(reading: int, decoding: int) -> Tables:
    read = f"Folder.__getitem__ ({TRAIN}:30)"
    stacks = [
        stack([*LOADER_FRAMES, read, "load (/venv/lib/python3.11/site-packages/numpy/lib/_npyio_impl.py:4)"], reading),
        stack([*LOADER_FRAMES, f"Folder.__getitem__ ({TRAIN}:31)"], decoding),
    ]
    rows: list[dict[str, Any]] = [{**row, "phase": "data_wait"} for row in stacks]
    rows.append(stack([f"train ({TRAIN}:82)", f"Module._call_impl ({TORCH}/nn/modules/module.py:1)"], 80))
    base = loader_tables()
    return make_tables(
        steps=base.steps.to_dicts(), journal=base.journal.to_dicts(), manifests=base.manifests, stacks=rows
    )


def test_many_small_files_are_named_and_packing_is_the_advice() -> None:
    finding = only(small_files(90, 30), "input.loader_bound")
    figures = values(finding)
    assert figures["loading time in opening and reading files"] == pytest.approx(0.75)
    assert "WebDataset" in finding.fix
    assert "shards" in finding.caveat


def test_items_of_one_file_are_packed_already() -> None:
    """The window saw one file opened for 64 items."""
    made = small_files(90, 30)
    steps = made.steps.to_dicts()
    trace = Trace()
    for row in steps[10:12]:
        row["in_window"] = True
        trace.add("train.py(80): train", row["start_ns"], 100 * MS, step=row["step"])
        trace.add("torch/utils/data/dataloader.py(733): __next__", row["start_ns"], 60 * MS, step=row["step"])
        trace.add("train.py(29): __getitem__", row["start_ns"], 60 * MS, step=row["step"])
        trace.add("<built-in function open>", row["start_ns"], 5 * MS, step=row["step"])
    opened = make_tables(steps=steps, events=trace.rows, journal=made.journal.to_dicts(), manifests=made.manifests)
    finding = only(replace(made, steps=opened.steps, events=opened.events, traces=opened.traces), "input.loader_bound")
    figures = values(finding)
    assert figures["files opened per item"] == pytest.approx(1 / 64, abs=0.001)
    assert "WebDataset" not in finding.fix


def test_workers_are_promised_what_real_cores_can_do() -> None:
    """60 of 100 ms loading, 40 computing on all threads: 16 logical cores are 8 at least, of two nothing is sure."""
    many, two = (only(loader_tables(affinity=cores), "input.loader_bound").expected_gain for cores in (16, 2))
    assert many is not None
    assert many.low == pytest.approx(1 - ((40 * 16 + 60) / 8 + 6 + 1) / 100)
    assert two is None  # a gain from nothing on is no prediction; what is most stands in the ceiling


def small_step(
    content: dict[str, int] | None, *, items: bool = False, framework: bool = False, **arguments: str
) -> Diagnosis:
    """A step of 0.9 ms, a third of it for its batch, which library code makes, or with `items` the user's."""
    steps = step_rows(400, data_wait_ms=0.3, forward_ms=0.6, backward_ms=0, optimizer_ms=0, other_ms=0)
    via = {"via": "skorch/net.py"} if framework else {}
    journal: list[dict[str, Any]] = [
        {"kind": "site", "what": "DataLoader", "file": TRAIN, "line": 75, "id": 1, "dataset": 2, **via}
        | {"arguments": {"dataset": "TensorDataset", "batch_size": "32", **arguments}},
        {"kind": "loader", "id": 1, "dataset": 2, "num_workers": 0, "batch_size": 32, "time_ns": T0 - MS},
    ]
    if content is not None:
        looks = [steps[at]["start_ns"] for at in (1, 2, 3, 64)]
        journal += [{"kind": "batch", "id": 1, "time_ns": at, "duration_ns": 300_000, **content} for at in looks]
    stacks = [
        stack([*LOADER_FRAMES, ITEM] if items else LOADER_FRAMES, 40, phase="data_wait"),
        stack([f"train ({TRAIN}:82)"], 80, phase="forward"),
    ]
    hardware = {"logical_cores": 64, "affinity": list(range(16))}
    return diagnose(
        analyze(make_tables(steps=steps, stacks=stacks, journal=journal, manifests=[{"hardware": hardware}]))
    )


SMALL = {"tensors": 2, "bytes": 8448, "objects": 1}


def loader_findings(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.rule == "input.loader_bound"]


def test_tensors_in_memory_are_not_sent_through_workers_but_taken_by_the_batch() -> None:
    (finding,) = loader_findings(small_step(SMALL, shuffle="True"))
    assert "workers" not in finding.fix
    assert (
        "sampler=BatchSampler(RandomSampler(data), 32, drop_last=False), batch_size=None) at train.py:75" in finding.fix
    )
    assert finding.try_ == ()
    assert finding.expected_gain is None
    evidence = values(finding)
    assert evidence["bytes of a batch"] == 8448
    (in_order,) = loader_findings(small_step(SMALL))
    assert "SequentialSampler" in in_order.fix


def test_without_a_look_at_its_batches_nothing_is_known_against_workers() -> None:
    (finding,) = loader_findings(small_step(None))
    assert "num_workers=" in finding.fix


def test_where_nothing_else_can_be_said_the_rule_is_silent() -> None:
    assert loader_findings(small_step(SMALL, framework=True)) == []
    assert loader_findings(small_step(SMALL, dataset="Subset")) == []


def test_the_users_own_work_is_the_advice_where_workers_gain_nothing() -> None:
    (finding,) = loader_findings(small_step(SMALL, items=True))
    assert finding.fix.startswith("Shorten the work at train.py:30")
    assert "workers" not in finding.fix


def test_what_handing_over_takes_is_no_gain_of_workers() -> None:
    """60 of 100 ms loading: 40 tensors and 40 MB take 14.1 ms to hand over, ten times as many all of the gain."""
    content = {"tensors": 40, "bytes": 40_000_000, "objects": 1}
    (heavy, without) = (loader_findings(big_step(each))[0] for each in (content, None))
    assert heavy.expected_gain is not None
    assert without.expected_gain is not None
    assert without.expected_gain.high - heavy.expected_gain.high == pytest.approx(0.141)
    assert without.gain_ceiling - heavy.gain_ceiling == pytest.approx(0.141)
    assert "num_workers" in heavy.fix
    assert loader_findings(big_step({name: 10 * count for name, count in content.items()})) == []


def big_step(content: dict[str, int] | None) -> Diagnosis:
    """A step of 100 ms on a GPU that waits 60 ms for what library code makes."""
    journal = [{"kind": "loader", "id": 1, "num_workers": 0, "batch_size": 32, "time_ns": T0 - MS}]
    for at in (1, 2) if content is not None else ():
        journal.append({"kind": "batch", "id": 1, "time_ns": T0 + at * 100 * MS, "duration_ns": MS, **(content or {})})
    steps = step_rows(40, data_wait_ms=60, forward_ms=40, backward_ms=0, optimizer_ms=0, other_ms=0)
    stacks = [stack(LOADER_FRAMES, 60, phase="data_wait"), stack([f"train ({TRAIN}:82)"], 40, phase="forward")]
    hardware = {"logical_cores": 64, "affinity": list(range(64))}
    gpu = [rank_info(device="cuda")]
    made = make_tables(steps=steps, stacks=stacks, journal=journal, manifests=[{"hardware": hardware}], ranks=gpu)
    return diagnose(analyze(made))


def one_rank(**more: Any) -> Analysis:
    """Steps of 100 ms whose main thread has a core at any time, with more than it needs; `more` is of the pipeline."""
    analysis = analyze(make_tables(steps=step_rows(40, data_wait_ms=10, forward_ms=90, backward_ms=0)))
    assert analysis.pipeline is not None
    quiet: dict[str, Any] = {"mean_ms": 100.0, "cores": 8.0, "contended_ms": 0.0}
    return replace(analysis, pipeline=replace(analysis.pipeline, **{**quiet, **more}))


def ranks(*phases: tuple[float, ...]) -> Analysis:
    rows = [row for rank, each in enumerate(phases) for row in rank_rows(rank, each)]
    return analyze(make_tables(steps=rows, journal=sites(len(phases))))


def test_workers_that_need_as_long_bound_the_gain() -> None:
    analysis = one_rank(workers=2, workers_ms=160.0)  # 80 ms for a batch
    assert gains.without_main(analysis, 10.0) == pytest.approx(10 + PIPELINE.cold_ms)
    assert gains.without_main(analysis, 60.0) == pytest.approx(100 - PIPELINE.certain * 80)


def test_behind_work_on_tensors_the_rest_loads_its_own_again() -> None:
    """A part of the shorter of both: a short call displaces little, and a short rest has little to load."""
    analysis, cold = one_rank(), PIPELINE.cold_tensors
    assert gains.without_main(analysis, 60.0, behind=cold) == pytest.approx(60 + cold * 40)
    assert gains.without_main(analysis, 10.0, behind=cold) == pytest.approx(10 + cold * 10)
    assert gains.without_main(analysis, 0.1, behind=cold) == pytest.approx(0.1 + PIPELINE.cold_ms)
    assert gains.without_main(replace(analysis, devices=("cuda",)), 60.0, behind=cold) == pytest.approx(60)


@pytest.mark.parametrize("more", [{"cores": 2.0}, {"contended_ms": None}, {"contended_ms": 5.0}])
def test_no_bound_where_cores_may_be_short(more: dict[str, Any]) -> None:
    assert gains.without_main(one_rank(workers=2, workers_ms=160.0, **more), 60.0) >= 60


def test_less_work_leaves_cores_to_the_rest() -> None:
    """20 ms of waiting for a core, of which the part outside the loss may go with it."""
    assert gains.without_main(one_rank(contended_ms=20.0), 40.0) == pytest.approx(40 + 20 * 0.6, abs=0.5)


def test_the_device_works_off_what_it_was_given() -> None:
    losses = blank(DeviceLosses, has_steps=True, compute_ns_per_step=70e6)
    analysis = replace(one_rank(), device_losses=(losses,))
    assert gains.without_main(analysis, 50.0) == pytest.approx(100 - PIPELINE.certain * 70)


def test_the_rank_that_waits_longest_for_data_makes_the_step() -> None:
    analysis = ranks((0, 20, 40, 0, 0), (30, 20, 10, 0, 0))
    assert gains.without_wait(analysis) == pytest.approx(30, abs=0.5)


def test_the_lead_of_all_slow_ranks_ends_at_the_next() -> None:
    analysis = ranks((0, 10, 40, 0, 0), (0, 30, 20, 0, 0), (0, 33, 17, 0, 0), (0, 12, 38, 0, 0))
    assert analysis.ranks is not None
    assert analysis.ranks.slow == (1, 2)
    assert gains.without_lead(analysis, analysis.ranks) == pytest.approx(33 - 12)


def test_without_training_steps_there_is_no_pipeline() -> None:
    analysis = analyze(make_tables())
    assert analysis.pipeline is None
    assert gains.without_main(analysis, 5.0) == 5.0
    assert gains.without_wait(analysis) is None
