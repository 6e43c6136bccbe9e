"""Logs of PT_XLA_DEBUG: causes, lines, warnings, the table at exit, in whatever mixture."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from stepscope.read.xla_files import read_xla_files
from tests.read.xla.texts import (
    READ,
    SCALAR,
    SYNC,
    SYNC_FRAMES,
    analysis,
    counts,
    events,
    post_analysis,
    read,
    recorded,
    report,
    section,
    table,
    total_ns,
)

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


def test_the_syncs_of_a_log_are_its_steps(tmp_path: Path) -> None:
    run = read(tmp_path, debug__log=whole(warned=True))
    assert counts(run, "compile", "step") == {0: 2, 1: 1, 2: 1, 3: 1}
    assert events(run, "counters")[0]["counters"] == {"MarkStep": 4}


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
