"""Reports of met.metrics_report(): saved alone, or among what a script prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.read.xla_files import read_xla_files
from stepscope.read.xla_text import Report, ReportReader, time_ns, value
from tests.read.xla.texts import (
    SCALAR,
    counter,
    counts,
    events,
    metric,
    read,
    recorded,
    report,
    section,
    time_text,
    total_ns,
)


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


names = st.from_regex(r"[A-Z][A-Za-z]{1,20}", fullmatch=True).filter(lambda name: "Server" not in name)
not_tied = st.integers(0, 10**15).filter(
    lambda ns: all(2 * (ns % unit) != unit for unit in (86_400 * 10**9, 3_600 * 10**9, 60 * 10**9, 10**9, 10**6))
)


@settings(max_examples=30)
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


# ---- times, sizes and numbers of reports


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("085.582us", 85_582),
        ("000.059us", 59),
        ("053ms484.827us", 53_484_827),
        ("05s089ms084.194us", 5_089_084_194),
        ("001ms32.778us", 1_032_778),
        # 4.874804665 s: seconds and milliseconds are both rounded up by their writer
        ("05s875ms804.665us", 4_874_804_665),
        # 46 minutes 59.6 s, where seconds are rounded up to sixty
        ("47m60s600ms000.000us", 46 * 60 * 10**9 + 59_600_000_000),
        ("47m60s8ms", 47 * 60 * 10**9 + 60_008_000_000 - 60 * 10**9),
        ("01d02h03m04s005ms006.000us", (((24 + 2) * 60 + 3) * 60 + 4) * 10**9 + 5_006_000),
        # no rounding writer writes a first part of one with more than a half behind it
        ("01s600ms000.000us", 1_600_000_000),
        ("02m00s900ms000.000us", 120_900_000_000),
    ],
)
def test_times_are_what_the_writer_had(text: str, ns: int) -> None:
    assert time_ns(text) == ns


@pytest.mark.parametrize(
    ("text", "unit", "figure"),
    [
        ("120.00B", "bytes", 120.0),
        ("161.29KB", "bytes", 161.29 * 1024),
        ("4.84MB", "bytes", 4.84 * 2**20),
        ("2.00GB", "bytes", 2.0 * 2**30),
        ("1.50TB", "bytes", 1.5 * 2**40),
        ("60.00", "count", 60.0),
        ("1.2e+06", "count", 1.2e6),
        (" 001.000us ", "ns", 1000.0),
    ],
)
def test_values_have_their_unit(text: str, unit: str, figure: float) -> None:
    assert value(text) == (unit, figure)


@pytest.mark.parametrize("text", ["nan", "inf", "B", "12XB", "one", "1e999", "0x10", "1_000"])
def test_what_is_no_value_is_none(text: str) -> None:
    assert value(text) is None
    for other in ("", "s", "5s3d", "1.5s", "-5s", "1e3us", "9" * 70 + "us", "5 s"):
        assert value(other) is None


# ---- logs of XLA_METRICS_FILE: what each step did, from totals that only grow, or were cleared


def log(*steps: tuple[int, int], first_step: int = 0, marks: int = 0) -> str:
    """A log; of each step, the totals of compilations and transfers."""
    return "".join(
        section(first_step + at, report(marks + at + 1, compiles, transfers, {SCALAR: transfers}))
        for at, (compiles, transfers) in enumerate(steps)
    )


def test_totals_become_what_each_step_did(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((2, 1), (3, 3), (3, 5), (5, 5)))
    assert counts(run, "compile", "step") == {0: 2, 1: 1, 3: 2}
    assert counts(run, "transfer", "step") == {0: 1, 1: 2, 2: 2}
    assert {event["step_source"] for event in events(run, "compile")} == {"file"}
    assert [event["duration_ns"] for event in events(run, "compile")] == [2 * 10**8, 10**8, 2 * 10**8]
    (standing,) = events(run, "counters")
    assert (standing["step"], standing["counters"]["MarkStep"]) == (3, 4)


def test_totals_that_were_cleared_count_anew(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((5, 0), (6, 8), marks=0) + log((0, 0), (1, 2), first_step=2))
    assert counts(run, "compile", "step") == {0: 5, 1: 1, 3: 1}
    assert counts(run, "transfer", "step") == {1: 8, 3: 2}
    whole = events(run, "counters")[0]["metrics"]
    assert (whole["CompileTime"]["samples"], whole["CompileTime"]["total"]) == (7, 7e8)


def test_a_log_of_several_runs_is_read_as_its_last(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt=log((9, 9), (9, 9), (9, 9)) + log((1, 0), (2, 0)))
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert run.losses.counts["earlier_runs"] == 1


def test_the_ordinal_of_a_file_is_its_rank(tmp_path: Path) -> None:
    run = read(tmp_path, metrics__txt__0=log((1, 0)), metrics__txt__1=log((4, 0)), metrics__txt__10=log((7, 0)))
    assert [(rank.name, rank.rank) for rank in run.ranks] == [("rank-0", 0), ("rank-1", 1), ("rank-10", 10)]
    assert [events(run, "compile", at)[0]["count"] for at in range(3)] == [1, 4, 7]


def test_a_cut_section_loses_what_it_lacks_and_no_more(tmp_path: Path) -> None:
    text = log((2, 1), (3, 3), (9, 9))
    run = read(tmp_path, metrics__txt=text[: text.rindex("Metric: CompileTime")])
    assert counts(run, "compile", "step") == {0: 2, 1: 1}
    assert events(run, "counters")[0]["metrics"]["CompileTime"]["samples"] == 3


@pytest.mark.parametrize("name", ["good", "bad", "item", "fallback"])
def test_recorded_steps_are_those_that_were_polled(name: str) -> None:
    polled = json.loads(recorded(f"{name}.steps.json").read_text())
    run = read_xla_files([recorded(f"{name}.metricsfile.txt")])
    compiled = counts(run, "compile", "step")
    lengths = {event["step"]: event["duration_ns"] for event in events(run, "compile")}
    before = before_ns = 0
    for row in polled:
        now = row["metrics"]["CompileTime"]
        assert compiled.get(row["step"], 0) == now["total"] - before
        assert lengths.get(row["step"], 0) == round(now["acc_ns"]) - before_ns
        before, before_ns = now["total"], round(now["acc_ns"])
    # The log is written inside the sync; what the script reads after the last one is in no section.
    last = polled[-1]["metrics"]["TransferFromDeviceTime"] or {"total": 0}
    transfers = sum(counts(run, "transfer", "step").values())
    assert transfers == last["total"] - (1 if name == "bad" else 0)
    assert total_ns(events(run, "transfer")) <= last.get("acc_ns", 0)
    assert set(counts(run, "fallback", "operator")) == set(polled[-1]["fallback"]) - {SCALAR}
