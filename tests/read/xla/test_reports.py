"""Reports of met.metrics_report(): saved alone, or among what a script prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.read.xla.files import read_xla_files
from stepscope.read.xla.report import Report, ReportReader
from tests.read.xla.texts import SCALAR, counter, counts, events, metric, read, recorded, report, time_text, total_ns


def reports_of(text: str) -> tuple[list[Report], int]:
    found: list[Report] = []
    reader = ReportReader(found.append)
    for line in text.split("\n"):
        reader.feed(line)
    reader.cut()
    return found, reader.bad_lines


def test_a_report_is_one_event_of_each_kind_without_a_step(tmp_path: Path) -> None:
    run = read(tmp_path, report__txt=report(15, compiles=16, transfers=30, operators={SCALAR: 30, "aten::median": 2}))
    assert run.hosts == ()
    (rank,) = run.ranks
    assert (rank.name, rank.rank, rank.steps, rank.traces) == ("rank-0", 0, (), ())
    assert rank.info is not None
    assert rank.info["device"] == "xla"
    (compiled,) = events(run, "compile")
    assert [compiled[name] for name in ("count", "duration_ns", "step", "time_ns")] == [16, 16 * 10**8, None, None]
    assert compiled["backend"] == "torch_xla"
    assert "report.txt" in compiled["source"]
    (transfer,) = events(run, "transfer")
    assert (transfer["count"], transfer["bytes"], transfer["duration_ns"]) == (30, 120, 30 * 10**6)
    assert (transfer["operator"], transfer["direction"]) == (SCALAR, "device_to_host")
    assert counts(run, "fallback", "operator") == {"aten::median": 2}
    (standing,) = events(run, "counters")
    assert standing["counters"]["MarkStep"] == 15
    assert standing["metrics"]["CompileTime"]["unit"] == "ns"
    assert standing["metrics"]["InboundData"]["unit"] == "bytes"
    assert run.losses.counts == {}


def test_transfers_of_other_operators_than_reading_a_value_are_told_apart(tmp_path: Path) -> None:
    run = read(tmp_path, report__txt=report(15, transfers=30, operators={SCALAR: 10}))
    assert counts(run, "transfer", "operator") == {SCALAR: 10, None: 20}
    assert total_ns(events(run, "transfer")) == 30 * 10**6
    assert sum(event["bytes"] for event in events(run, "transfer")) == 120


def test_rates_and_any_percentiles_are_kept(tmp_path: Path) -> None:
    block = metric(
        "CompileTime",
        16,
        "05s089ms084.194us",
        percentiles="0.1%=134ms847.097us; 50%=336ms640.953us; 99.9%=01m01s000ms000.000us",
        rates=("965ms670.604us", "3.03291"),
    )
    run = read(tmp_path, report__txt=block)
    told = events(run, "counters")[0]["metrics"]["CompileTime"]
    assert told["samples_per_second"] == 3.03291
    assert told["value_per_second"] == 964_670_604.0
    assert told["percentiles"] == {"0.1": 133_847_097.0, "50": 335_640_953.0, "99.9": 61_000_000_000.0}


def test_old_reports_are_read_too(tmp_path: Path) -> None:
    text = (
        "Metric: TransferFromServerTime\n  TotalSamples: 2200\n  Counter: 02s052ms000.000us\n"
        "  Mean: 001ms000.000us\n  StdDev: 000.500us\n  ValueRate: 01s100ms000.000us / second\n  Rate: 3.5 / second\n"
        "  Percentiles: 25%=001.000us; 75%=002.000us\nCounter: CachedSyncTensors\n  Value: 395\n"
        "Metric: TransferToServerTime\n  TotalSamples: 1\n  Counter: 001.000us\n"
    )
    run = read(tmp_path, report__txt=text)
    (transfer,) = events(run, "transfer")
    assert (transfer["count"], transfer["duration_ns"]) == (2200, 2_052_000_000)
    (standing,) = events(run, "counters")
    assert set(standing["metrics"]) == {"TransferFromDeviceTime", "TransferToDeviceTime"}
    assert standing["renamed"]["TransferFromDeviceTime"] == "TransferFromServerTime"
    assert standing["counters"] == {"CachedSyncTensors": 395}
    assert run.losses.counts == {}


def test_a_report_stands_among_prints_progress_bars_and_prefixes(tmp_path: Path) -> None:
    noise = "loss 2.3\nMetric: accuracy 0.5\nRate: fast\n\r 10%|#   | 1/10\r 20%|##  | 2/10\rValue: none of ours\n"
    prefixed = "".join(f"[rank0]: {line}\n" for line in report(12, compiles=3).splitlines())
    run = read(tmp_path, stdout__txt=noise + prefixed + "done: 100%\n" + noise)
    assert counts(run, "compile", "step") == {None: 3}
    assert events(run, "counters")[0]["counters"]["MarkStep"] == 12


def test_of_several_reports_the_highest_counts(tmp_path: Path) -> None:
    early, late = report(5, compiles=6, transfers=10), report(15, compiles=16, transfers=30)
    short = metric("CompileTime", 16, time_text(16 * 10**8)) + counter("MarkStep", 15)
    run = read(tmp_path, stdout__txt=early + "epoch 1\n" + late + "short\n" + short, early__txt=early)
    assert counts(run, "compile", "step") == {None: 16}
    assert counts(run, "transfer", "step") == {None: 30}


def test_blocks_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = "Metric: ExecuteTime\n  TotalSamples: many\n  Accumulator: ?\nCounter: X\n  Value: -1\nMetric: ExecuteTi"
    run = read(tmp_path, report__txt=report(15, compiles=16) + odd)  # and cut off in a block
    assert counts(run, "compile", "step") == {None: 16}
    assert run.losses.counts["bad_lines"] >= 2
    assert "ExecuteTime" not in events(run, "counters")[0]["metrics"]


def test_a_script_that_prints_nothing_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="no report or debug log of torch_xla"):
        read(tmp_path, stdout__txt="loss 2.3\nMetric: accuracy\n  Value: 3\n")


names = st.from_regex(r"[A-Z][A-Za-z]{1,20}", fullmatch=True).filter(lambda name: "Server" not in name)
not_tied = st.integers(0, 10**15).filter(
    lambda ns: all(2 * (ns % unit) != unit for unit in (86_400 * 10**9, 3_600 * 10**9, 60 * 10**9, 10**9, 10**6))
)


@settings(max_examples=60)
@given(
    metrics=st.dictionaries(names, st.tuples(st.integers(1, 10**9), not_tied), max_size=8),
    figures=st.dictionaries(names, st.integers(1, 10**12), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_a_written_report_reads_back(
    metrics: dict[str, tuple[int, int]], figures: dict[str, int], order: object
) -> None:
    blocks = [metric(name, samples, time_text(ns)) for name, (samples, ns) in metrics.items()]
    blocks += [counter(name, value) for name, value in figures.items()]
    order.shuffle(blocks)  # type: ignore[attr-defined]
    found, bad = reports_of("".join(blocks))
    assert bad == 0
    assert len(found) == (1 if blocks else 0)
    for one in found:
        written = {name: (value, value) for name, value in figures.items()} | metrics  # no name is of both kinds
        assert {name: (entry.samples, entry.total) for name, entry in one.figures.items()} == written


@pytest.mark.parametrize(
    ("name", "compiles", "transfers"), [("good", 1, 0), ("bad", 16, 30), ("item", 2, 15), ("fallback", 3, 30)]
)
def test_recorded_reports_hold_what_was_counted(name: str, compiles: int, transfers: int) -> None:
    for what in ("step14.metrics.txt", "short.txt", "stdout.txt"):
        run = read_xla_files([recorded(f"{name}.{what}")])
        assert sum(event["count"] for event in events(run, "compile")) == compiles
        assert sum(event["count"] for event in events(run, "transfer")) == transfers
        assert run.losses.counts == {}
