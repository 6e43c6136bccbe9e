"""Ceilings of what the main thread and the loader lose, and predictions: bounds that hold, one finding per loss."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Diagnosis, Finding
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
from tests.builders import MS, T0, make_tables, rank_info, step_rows
from tests.diagnose.judged import values
from tests.records import replace

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
