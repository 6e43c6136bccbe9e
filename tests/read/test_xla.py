"""Files of torch_xla: which they are and which are one run; reports, logs with steps and debug logs, in any mixture.

First small texts as torch_xla writes them, and where the recorded ones lie.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRun, Row
from stepscope.read.xla_files import is_xla_file, read_xla_files
from stepscope.read.xla_text import Report, ReportReader, time_ns, value

RECORDED = Path(__file__).parents[2] / ".." / "shared" / "traces" / "torch_xla"
SCALAR = "aten::_local_scalar_dense"

_PARTS = (("d", 86_400 * 10**9), ("h", 3_600 * 10**9), ("m", 60 * 10**9), ("s", 10**9), ("ms", 10**6))


def recorded(name: str) -> Path:
    """A file of the recorded runs; skips where they are not there."""
    if not RECORDED.is_dir():
        pytest.skip("the recorded torch_xla runs are not there")
    return RECORDED / name


def time_text(ns: int) -> str:
    """A time as torch_xla writes it: every part is rounded, and its whole number is taken off what follows."""
    rest, text = ns, ""
    for suffix, unit in _PARTS:
        if rest >= unit or text:
            text += f"{rest / unit:0{3 if suffix == 'ms' else 2}.0f}{suffix}"
            rest -= rest // unit * unit
    return text + f"{rest / 1000:07.3f}us"


def metric(name: str, samples: int, total: str, *, percentiles: str = "", rates: tuple[str, str] | None = None) -> str:
    """A block of a metric; `rates` are those of the value and of the samples."""
    lines = [f"Metric: {name}", f"  TotalSamples: {samples}", f"  Accumulator: {total}"]
    if rates is not None:
        lines += [f"  ValueRate: {rates[0]} / second", f"  Rate: {rates[1]} / second"]
    return "\n".join([*lines, f"  Percentiles: {percentiles or f'1%={total}; 99%={total}'}"]) + "\n"


def counter(name: str, value: int) -> str:
    """A block of a counter."""
    return f"Counter: {name}\n  Value: {value}\n"


def report(steps: int, compiles: int = 0, transfers: int = 0, operators: Mapping[str, int] | None = None) -> str:
    """A report of a run in which a compilation takes 100 ms and a transfer 1 ms and 4 bytes."""
    text = metric("LazyTracing", 10 * (steps + 1), time_text(123_456 * (steps + 1)))
    text += counter("CachedCompile", steps + 1)
    if compiles:
        text += metric("CompileTime", compiles, time_text(compiles * 100_000_000))
    if transfers:
        text += metric("InboundData", transfers, f"{4 * transfers}.00B")
        text += metric("TransferFromDeviceTime", transfers, time_text(transfers * 1_000_000))
    text += counter("MarkStep", steps) if steps else ""
    return text + "".join(counter(name, count) for name, count in (operators or {}).items() if count)


def section(step: int, text: str) -> str:
    """A section of a log of XLA_METRICS_FILE."""
    return f"[MetricsData; step={step}]\n{text}\n"


def analysis(
    kind: str, cause: str, graph: str = "abc", frames: Sequence[str] = ("<module> (/home/me/train.py:28)",)
) -> str:
    """An analysis of a debug log; `kind` is Compilation or Execution."""
    lines = [
        *("=" * 80, f"{kind} Cause", f"  {cause}", "Graph Info: ", f"  Graph Hash: {graph}"),
        *("  Number of Graph Inputs: 6", "  Number of Graph Outputs: 1", "Python Frame Triggered Execution: "),
        *(f"  {frame}" for frame in frames),
        *("-" * 80, "=" * 80),
    ]
    return "\n" + "".join(f"{kind} Analysis: {line}\n" for line in lines)


SYNC = "user torch_xla.sync"
READ = "most likely user code trying to access tensor value before torch_xla.sync"
SYNC_FRAMES = ("sync (/venv/lib/python3.11/site-packages/torch_xla/torch_xla.py:87)", "loop (/home/me/train.py:29)")


def post_analysis() -> str:
    """What follows a compilation."""
    lines = ("=" * 80, "Graph input size: 0.000044 GB", "-" * 80, "=" * 80)
    return "\nComputation hash: 5ee6\n\n" + "".join(f"Post Compilation Analysis: {line}\n" for line in lines)


def table(*rows: tuple[int, str], calls: int | None = None) -> str:
    """The table of frames that a debug log ends with: (count, frame)."""
    blocks = [f'FRAME (count={calls}):\nUnlowered Op: "xla_fallback"\n\n\n'] if calls is not None else []
    blocks += [f"FRAME (count={count}):\n  {frame}\n\n\n" for count, frame in rows]
    head = "Unlowered Op usage summary (more of these ops, lower performance)\n"
    note = "Note: _local_scalar_dense typically indicates CPU context access\n"
    return "=" * 80 + "\n" + head + note + "-" * 80 + "\n" + "".join(blocks) + "=" * 80 + "\n"


def read(folder: Path, **texts: str) -> RawRun:
    """The run of files with these texts; `__` in a name stands for a dot."""
    paths = []
    for name, text in texts.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text)
    return read_xla_files(paths)


def events(run: RawRun, kind: str, rank: int = 0) -> list[Row]:
    """Events of a kind."""
    return [event for event in run.ranks[rank].journal if event["kind"] == kind]


def counts(run: RawRun, kind: str, by: str) -> dict[Any, int]:
    """Counts of a kind by one field."""
    found: Counter[Any] = Counter()
    for event in events(run, kind):
        found[event[by]] += event["count"]
    return dict(found)


def total_ns(found: Iterable[Row]) -> int:
    """The sum of what is known of durations."""
    return sum(event["duration_ns"] or 0 for event in found)


LOG = section(0, report(1, 1, 0)) + section(1, report(2, 2, 0))
DEBUG = analysis("Compilation", READ) + analysis("Execution", SYNC) + table((3, "f (/a/b.py:3)"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 2.5\nMetric: accuracy\nValue: 3\n",
        "thread (0x7F);main (train.py:3);forward (model.py:9) 12\n",
        "a;b;c 12\n",
        '{"traceEvents": [{"ph": "X", "name": "pt-xla-profiler: x", "args": {"t": "Compilation Analysis: y"}}]}',
        '{"kind":"xla_warning","text":"pt-xla-profiler: CompileTime too frequent"}\n',
        "if line.startswith('pt-xla-profiler: '):\n    pass\n",
        "\0\1\2 pt-xla-profiler: binary",
        "Metric: loss\n  Value: 3\nCounter: epochs\n  Value: 2\n",
    ],
)
def test_other_files_are_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    assert not is_xla_file(path)
    with pytest.raises(UnreadableInputError, match="no report or debug log"):
        read_xla_files([path])


def test_a_folder_is_read_as_one_run_and_the_rest_of_it_counted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "metrics.txt").write_text(LOG)
    (tmp_path / "sub" / "debug.log.gz").write_bytes(gzip.compress(DEBUG.encode()))
    (tmp_path / "notes.md").write_text("# nothing")
    run = read_xla_files([tmp_path])
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert events(run, "xla_executions")
    assert dict(run.losses.counts) == {"foreign_files": 1}
    again = read_xla_files([tmp_path, tmp_path / "metrics.txt"])
    assert counts(again, "compile", "step") == {0: 1, 1: 1}


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=report(15, compiles=16), b__txt=report(20, compiles=2))
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=LOG, b__txt=LOG)
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read(tmp_path, a__txt=DEBUG, b__txt=DEBUG)


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="no such file"):
        read_xla_files([tmp_path / "none.txt"])
    with pytest.raises(UnreadableInputError, match="no report or debug log"):
        read_xla_files([tmp_path])


def test_a_packed_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = "".join(f"step {os.urandom(8).hex()}\n" for _ in range(30_000))
    packed = gzip.compress((LOG + noise + report(2, 2, 5)).encode())
    (tmp_path / "log.gz").write_bytes(packed[: len(packed) * 3 // 4])
    run = read_xla_files([tmp_path / "log.gz"])
    assert counts(run, "compile", "step") == {0: 1, 1: 1}
    assert run.losses.counts["cut_off_files"] == 1


def test_very_long_lines_are_passed_over(tmp_path: Path) -> None:
    run = read(tmp_path, out__txt="[" * 3_000_000 + "\n" + report(5, 2) + "Metric: " + "(" * 200_000)
    assert counts(run, "compile", "step") == {None: 2}
    assert run.losses.counts["bad_lines"] >= 1


def test_the_recorded_runs_together_are_refused() -> None:
    with pytest.raises(UnreadableInputError, match="one run at a time"):
        read_xla_files([recorded("good.stdout.txt").parent])
    for one, other in (("good", "bad"), ("good", "item"), ("bad", "fallback"), ("item", "fallback"), ("bad", "item")):
        with pytest.raises(UnreadableInputError, match="one run at a time"):
            read_xla_files([recorded(f"{one}.step14.metrics.txt"), recorded(f"{other}.step14.metrics.txt")])


@pytest.mark.parametrize("name", ["good", "bad", "item", "fallback"])
def test_all_recorded_files_of_a_run_are_one(name: str) -> None:
    paths = [path for path in sorted(recorded("").glob(f"{name}.*")) if is_xla_file(path)]
    others = [path.name for path in sorted(recorded("").glob(f"{name}.*")) if path not in paths]
    assert others == [f"{name}.stderr.txt", f"{name}.steps.json"]
    run = read_xla_files(paths)
    assert [rank.name for rank in run.ranks] == ["rank-0"]
    assert run.losses.counts == {}


TRAIN = "/home/me/train.py"
FREQUENT = "pt-xla-profiler: CompileTime too frequent: {} counts during {} steps\n"


def step(number: int, *, warned: bool = False) -> str:
    """A step that reads a value at line 28, and compiles its own graph at line 29."""
    graph = f"graph{number}"
    text = analysis("Compilation", READ, "read") + post_analysis() if number == 0 else ""
    text += analysis("Execution", READ, "read")
    text += analysis("Compilation", SYNC, graph, SYNC_FRAMES) + post_analysis()
    text += analysis("Execution", SYNC, graph, SYNC_FRAMES) + f"loss {number}.5\n"
    return text + (FREQUENT.format(number + 2, number + 1) if warned else "")


def whole(steps: int = 4, *, warned: bool = False) -> str:
    return "".join(step(number, warned=warned) for number in range(steps))


def test_compilations_have_cause_line_graph_and_size(tmp_path: Path) -> None:
    run = read(tmp_path, debug__log=whole())
    first, second, *others = events(run, "compile")
    assert (first["cause_text"], first["file"], first["line"], first["function"]) == (READ, TRAIN, 28, "<module>")
    assert (second["cause_text"], second["file"], second["line"], second["function"]) == (SYNC, TRAIN, 29, "loop")
    assert (first["graph"], first["inputs"], first["outputs"], first["count"]) == ("read", 6, 1, 1)
    assert [event["graph"] for event in others] == ["graph1", "graph2", "graph3"]
    assert {event["duration_ns"] for event in events(run, "compile")} == {None}
    assert counts(run, "xla_executions", "line") == {28: 4, 29: 4}
    assert {event["time_ns"] for event in run.ranks[0].journal} == {None}


def test_a_log_without_steps_of_its_own(tmp_path: Path) -> None:
    run = read(tmp_path, debug__log=whole() + FREQUENT.format(20, 19))  # its warnings count other steps
    assert counts(run, "compile", "step") == {None: 5}
    assert events(run, "counters")[0]["counters"] == {"MarkStep": 19}
    run = read(tmp_path, debug__log=analysis("Compilation", SYNC, "a") + analysis("Compilation", SYNC, "b"))
    assert counts(run, "compile", "step") == {None: 2}  # without executions


def test_warnings_are_told_once_with_their_repeats(tmp_path: Path) -> None:
    lowered = "pt-xla-profiler: Op(s) not lowered: aten::median, aten::special_i0e,  Please open a GitHub issue\n"
    bar = "\r 50%|#####     | 5/10 [00:01<00:01]"
    text = "".join(bar + FREQUENT.format(count + 1, count) + lowered for count in range(11, 16))
    run = read(tmp_path, stdout__txt=text)
    told = {event["text"]: event["repeats"] for event in events(run, "xla_warning")}
    assert told == {FREQUENT.format(16, 15).strip(): 5, lowered.strip(): 5}
    told = {event["operator"]: event["count"] for event in events(run, "fallback")}
    assert told == dict.fromkeys(("aten::median", "aten::special_i0e"))


def test_the_table_at_exit_gives_transfers_their_lines(tmp_path: Path) -> None:
    rows = [(15, f"<module> ({TRAIN}:28)"), (10, "log (/home/me/my (old) files/log.py:31)")]
    run = read(tmp_path, debug__log=whole() + table(*rows, calls=25))
    told = [(event["file"], event["line"], event["count"], event["operator"]) for event in events(run, "transfer")]
    assert told == [(TRAIN, 28, 15, SCALAR), ("/home/me/my (old) files/log.py", 31, 10, SCALAR)]


@pytest.mark.parametrize("prefix", ["WARNING:pt-xla-profiler:", "pt-xla-profiler: ", "[rank0]: "])
def test_the_table_may_come_through_a_logger(tmp_path: Path, prefix: str) -> None:
    rows = table((15, f"<module> ({TRAIN}:28)"), calls=15)
    text = "".join(f"{prefix}{line}\n" for line in rows.splitlines()) + "later (not a frame.py:3)\n"
    run = read(tmp_path, debug__log=whole() + text)
    told = [(event["file"], event["line"], event["function"], event["count"]) for event in events(run, "transfer")]
    assert told == [(TRAIN, 28, "<module>", 15)]
    assert events(run, "xla_warning") == []


def test_a_table_that_names_operators_is_believed(tmp_path: Path) -> None:
    text = table((7, f'Unlowered Op: "_local_scalar_dense"\nPython Frames:\n  train ({TRAIN}:28)\n  main ({TRAIN}:90)'))
    run = read(tmp_path, debug__log=whole() + text)
    (transfer,) = events(run, "transfer")
    assert (transfer["operator"], transfer["line"], transfer["count"]) == (SCALAR, 28, 7)


def test_without_a_table_the_last_warning_counts_transfers(tmp_path: Path) -> None:
    line = "pt-xla-profiler: TransferFromDeviceTime too frequent: 29 counts during 15 steps\n"
    run = read(tmp_path, stdout__txt=line)
    assert [(event["count"], event["line"]) for event in events(run, "transfer")] == [(29, None)]


ONE, OTHER = analysis("Compilation", READ, "one"), analysis("Compilation", SYNC, "other", SYNC_FRAMES)
MIXED = [line for pair in zip_longest(ONE.split("\n"), OTHER.split("\n"), fillvalue="") for line in (*pair, "loss 1.5")]
PACKAGES = ("f (/v/lib/python3.11/site-packages/a/b.py:1)", "g (/v/lib/python3.11/site-packages/c.py:2)")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n".join(MIXED), [("one", READ, 28), ("other", SYNC, 29)]),  # lines of two processes
        (ONE + OTHER[: OTHER.index("Number of Graph Inputs")], [("one", READ, 28), ("other", SYNC, None)]),  # cut off
        (analysis("Compilation", READ, "one", PACKAGES), [("one", READ, None)]),  # a frame of a package is nobody's
    ],
)
def test_analyses_in_any_state(tmp_path: Path, text: str, told: list[tuple[str, str, int | None]]) -> None:
    run = read(tmp_path, debug__log=text)
    assert [(event["graph"], event["cause_text"], event["line"]) for event in events(run, "compile")] == told


def metrics(steps: int) -> str:
    """The log with steps of the same run: two compilations in the first step, then one; reads at two lines."""
    reads = [max(0, 2 * at + 1) for at in range(steps)]
    return "".join(section(at, report(at + 1, at + 2, reads[at], {SCALAR: reads[at]})) for at in range(steps))


def test_causes_join_the_steps_of_the_other_file_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    run = read(tmp_path, debug__log=whole(), metrics__txt=metrics(4))
    told = [(event["step"], event["line"], event["graph"], event["count"]) for event in events(run, "compile")]
    assert told == [(0, 28, "read", 1), *((at, 29, f"graph{at}", 1) for at in range(4))]
    assert total_ns(events(run, "compile")) == 5 * 10**8
    source = events(run, "compile")[0]["source"]
    assert "metrics.txt" in source
    assert "debug.log" in source


def test_a_log_that_tells_more_or_fewer_causes_keeps_all_counts(tmp_path: Path) -> None:
    run = read(tmp_path, debug__log=whole(5), metrics__txt=metrics(4))
    assert counts(run, "compile", "step") == {0: 2, 1: 1, 2: 1, 3: 1, None: 1}
    run = read(tmp_path, debug__log=whole(2), metrics__txt=metrics(4))
    assert counts(run, "compile", "step") == {0: 2, 1: 1, 2: 1, 3: 1}
    assert counts(run, "compile", "line") == {28: 1, 29: 2, None: 2}


def test_transfers_have_steps_and_lines(tmp_path: Path) -> None:
    rows = table((4, f"<module> ({TRAIN}:28)"), (4, f"<module> ({TRAIN}:31)"), calls=8)
    run = read(tmp_path, debug__log=whole() + rows, metrics__txt=metrics(4), end__txt=report(4, 5, 8, {SCALAR: 8}))
    assert counts(run, "transfer", "step") == {0: 1, 1: 2, 2: 2, 3: 2, None: 1}
    assert counts(run, "transfer", "line") == {28: 4, 31: 4}
    assert total_ns(events(run, "transfer")) == 8 * 10**6


def test_the_only_line_of_the_table_is_that_of_the_operators(tmp_path: Path) -> None:
    rows = table((8, f"<module> ({TRAIN}:20)"), calls=8)
    text = report(4, 3, 8, {"aten::median": 4, "aten::special_i0e": 4})
    run = read(tmp_path, debug__log=whole() + rows, report__txt=text)
    told = {event["operator"]: event["line"] for event in events(run, "fallback")}
    assert told == dict.fromkeys(("aten::median", "aten::special_i0e"), 20)
    assert counts(run, "transfer", "line") == {20: 8}


@pytest.mark.parametrize(
    ("name", "compiles", "executions", "lines"),
    [("good", 1, 15, {29}), ("bad", 16, 30, {28, 29}), ("item", 2, 30, {28, 29}), ("fallback", 3, 45, {20, 29})],
)
def test_recorded_logs_hold_what_was_counted(name: str, compiles: int, executions: int, lines: set[int]) -> None:
    run = read_xla_files([recorded(f"{name}.debug.log")])
    assert sum(counts(run, "compile", "line").values()) == compiles
    assert sum(counts(run, "xla_executions", "line").values()) == executions
    assert set(counts(run, "compile", "line")) == lines
    assert events(run, "counters")[0]["counters"]["MarkStep"] == 15
    texts = [event["text"] for event in events(run, "xla_warning")]
    assert ("pt-xla-profiler: CompileTime too frequent: 16 counts during 15 steps" in texts) is (name == "bad")
    assert bool(texts) is (name != "good")
    alone = [read_xla_files([recorded(f"{name}.{what}")]) for what in ("metricsfile.txt", "short.txt")]
    together = read_xla_files([recorded(f"{name}.{what}") for what in ("metricsfile.txt", "short.txt", "debug.log")])
    assert {sum(counts(one, "compile", "line").values()) for one in [*alone, together]} == {compiles}
    assert None not in counts(together, "compile", "line")
    assert None not in counts(together, "transfer", "line")
    assert sum(counts(together, "transfer", "line").values()) == sum(counts(alone[1], "transfer", "line").values())


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
