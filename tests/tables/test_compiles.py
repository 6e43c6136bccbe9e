"""The table of compilations from journals: recordings of torch 2.6, 2.9 and 2.13, and events no one should write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.read.raw import Losses, RawRank, RawRun
from stepscope.tables import build
from stepscope.tables.compile_reasons import CAUSES
from stepscope.tables.schema import SCHEMAS, Tables

DATA = Path(__file__).resolve().parents[1] / "data" / "compiles"
T0 = 1_750_000_000_000_000_000
MS = 1_000_000
SCRIPT = "/home/user/train/compile_causes.py"


def run(events: list[dict[str, Any]], steps: list[dict[str, Any]] | None = None) -> Tables:
    """Tables of one process with this journal; times and steps are null where an event has none."""
    journal = tuple({"time_ns": T0, "duration_ns": None, "step": None, **event} for event in events)
    rows = tuple({**dict.fromkeys(SCHEMAS["steps"]), "kind": "train", **row} for row in steps or [])
    rank = RawRank("rank-0", 0, None, rows, journal, ())
    return build(RawRun(Path("/nowhere"), (), (rank,), Losses()))


def recorded(version: str) -> Tables:
    """The recording of the script of causes by one version of torch."""
    events = [json.loads(line) for line in (DATA / f"torch-{version}.jsonl").read_text("utf-8").splitlines()]
    head, *lines = (
        json.loads(line) for line in (DATA / f"torch-{version}.steps.jsonl").read_text("utf-8").splitlines()
    )
    return run(events, [dict(zip(head["columns"], line, strict=True)) for line in lines if isinstance(line, list)])


def compile_event(**fields: Any) -> dict[str, Any]:
    """A forward compilation as torch 2.13 tells it."""
    usual = {"kind": "compile", "backend": "torch.compile", "count": 1, "direction": "forward", "graph": "0/0"}
    return {**usual, "function": "forward", "guarded": True, "is_forward": True, "cache_entries": 0, **fields}


def recompile_event(number: int, guard: str, **fields: Any) -> dict[str, Any]:
    return compile_event(
        graph=f"0/{number}", cache_entries=number, recompile_reason=f"0/{number - 1}: {guard}", **fields
    )


def only(tables: Tables) -> dict[str, Any]:
    assert tables.compiles.height == 1
    return tables.compiles.row(0, named=True)


@pytest.mark.parametrize("version", ["2.9", "2.13"])
class TestFullRecordings:
    def test_every_cause_has_its_own_line(self, version: str):
        table = recorded(version).compiles
        causes = table.filter(pl.col("kind") == "recompile").select("cause", "subject", "line").unique()
        assert set(causes.rows()) == {
            ("tensor_read", None, 18),
            ("float_argument", "scale", 17),
            ("int_attribute", "self.calls", 21),
            ("shape", "x.size(0)", None),
            ("shape", "rows.size(0)", None),
        }
        assert set(table["file"].drop_nulls()) == {SCRIPT}
        breaks = table.filter(pl.col("kind") == "graph_break").select("cause", "line", "function").unique()
        assert set(breaks.rows()) == {("item", 18, "forward"), ("print", 20, "forward")}

    def test_the_limit_names_the_function_and_since_when(self, version: str):
        limits = recorded(version).compiles.filter(pl.col("kind") == "limit_hit")
        columns = ["step", "graph", "function", "def_line", "cause", "old", "limit"]
        assert limits.select(columns).rows() == [
            (8, "2/8", "torch_dynamo_resume_in_forward_at_20", 20, "int_attribute", "7", 8),
            (8, "3/8", "mean", 35, "shape", "8", 8),
        ]

    def test_a_growing_size_step_by_step(self, version: str):
        own = pl.col("function") == "mean"
        grown = recorded(version).compiles.filter((pl.col("kind") == "recompile") & own)
        assert grown.select("step", "old", "new").rows() == [(n, str(n), str(n + 1)) for n in range(1, 8)]
        assert grown["call_line"].unique().to_list() == [33]
        assert grown["def_line"].unique().to_list() == [35]


def test_recording_without_reasons():
    """torch 2.6 tells no reason and no step: the steps come from the times, the causes stay null."""
    tables = recorded("2.6")
    table = tables.compiles.filter(pl.col("kind") != "graph_break")
    assert table.filter(pl.col("kind") == "compile")["graph"].to_list() == ["0/0", "1/0", "2/0", "3/0"]
    assert set(table["step_source"]) == {"time"}
    assert table["cause"].null_count() == table.height
    limit = table.filter(pl.col("kind") == "limit_hit").row(0, named=True)
    assert (limit["step"], limit["function"], limit["def_line"]) == (8, "mean", 35)
    assert not [note for note in tables.quality.notes if note.source == "torch.compile"]


class TestKinds:
    def test_an_id_counts_attempts_not_versions(self):
        """A frame that failed once has id 0/1 at its first version; the size of its cache tells."""
        assert only(run([compile_event(graph="0/1", cache_entries=0)]))["kind"] == "compile"
        assert only(run([compile_event(graph="0/1", cache_entries=None)]))["kind"] == "recompile"

    def test_failures(self):
        event = compile_event(
            guarded=False, fail_type="Unsupported", fail_reason="Data-dependent branching\n  Explanation: ...",
            fail_file="/home/u/t.py", fail_line=4, recompile_reason="0/0: n == 3",
        )  # fmt: skip
        row = only(run([event]))
        assert (row["kind"], row["cause"], row["file"], row["line"]) == ("failure", "data_dependent", "/home/u/t.py", 4)


class TestFilledFromOthers:
    def test_a_value_from_a_call_that_read_no_tensor_is_a_plain_constant(self):
        reason = "___stack0 == 17.5  # y = x * t  # me/u/t.py:6 in torch_dynamo_resume_in_f_at_5"
        stopped = "Graph break in user code at /home/u/t.py:5\nReason: Unsupported: {}\n"
        clock = {"kind": "graph_break", "reason": stopped.format("Graph break due to unsupported builtin time.time. X")}
        read = {"kind": "graph_break", "reason": stopped.format("Tensor.item")}
        event = recompile_event(1, reason, def_file="/home/u/t.py", function="torch_dynamo_resume_in_f_at_5")
        columns = ["cause", "subject", "line"]
        assert run([clock, event]).compiles.select(columns).row(1) == ("constant", "time.time()", 5)
        assert run([read, event]).compiles.select(columns).row(1) == ("tensor_read", None, 5)
        assert run([event]).compiles.select(columns).row(0) == ("tensor_read", None, 5)


class TestSteps:
    STEPS = ({"step": 0, "start_ns": T0, "wall_ns": 10 * MS}, {"step": 1, "start_ns": T0 + 10 * MS, "wall_ns": 10 * MS})

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"time_ns": T0 + 12 * MS}, (1, "time")),
            ({"time_ns": T0 + 20 * MS}, (None, None)),  # the end is outside
            ({"time_ns": T0 + 9 * MS, "step": 1, "step_source": "context"}, (1, "context")),  # clocks differ by a ms
            ({"time_ns": T0 + 5 * MS, "step": 1, "step_source": "context"}, (0, "time")),
            ({"time_ns": T0 + 5 * MS, "step": 7, "step_source": "poll"}, (7, "poll")),
            ({"time_ns": T0 + 90 * MS, "step": 1, "step_source": "context"}, (1, "context")),
        ],
    )
    def test_by_time_where_the_event_does_not_know(self, fields: dict[str, Any], expected: tuple[int, str]):
        row = only(run([compile_event(**fields)], list(self.STEPS)))
        assert (row["step"], row["step_source"]) == expected


class TestXla:
    def test_compiles_and_transfers(self):
        where = {"backend": "torch_xla", "file": "/home/u/x.py", "line": 28}
        events = [
            {"kind": "compile", "cause_text": "user torch_xla.sync", "graph": "abc", "duration_ns": 5, **where},
            {"kind": "transfer", "cause_text": "most likely user code trying to access tensor value", **where},
            {"kind": "transfer", "operator": "aten::_local_scalar_dense", "count": 3, "bytes": 12, **where},
            {"kind": "transfer", "backend": "torch_xla"},
        ]
        table = run(events).compiles
        assert table["cause"].to_list() == ["user_sync", "read_value", "item", None]
        assert table["direction"].to_list() == [None, *["device_to_host"] * 3]
        assert table["line"].to_list() == [28, 28, 28, None]
        assert table["count"].to_list() == [1, 1, 3, 1]


class TestDrift:
    def test_unknown_wordings_are_counted_and_kept(self):
        events = [
            recompile_event(1, "the stars are wrong"),
            recompile_event(2, "n == 3"),
            {"kind": "compile", "backend": "torch_xla", "cause_text": "the stars again"},
            {"kind": "compile_unknown", "what": "a field", "count": 2},
        ]
        tables = run(events)
        assert tables.compiles["cause"].to_list() == ["unknown", "constant", "unknown"]
        assert "the stars are wrong" in tables.compiles["reason"][0]
        assert tables.compiles["kind"][0] == "recompile"
        (note,) = [note for note in tables.quality.notes if note.source == "torch.compile"]
        assert note.level == "warning"
        assert note.text.startswith("4 compiler messages in words")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=1),
)  # fmt: skip
FIELDS = [
    "backend", "count", "step_source", "direction", "graph", "function", "def_file", "def_line", "guarded",
    "is_forward", "cache_entries", "limit", "recompile_reason", "fail_type", "fail_reason", "fail_file", "fail_line",
    "restarts", "call_file", "call_line", "reason", "cause_text", "file", "line", "operator", "bytes", "source",
]  # fmt: skip
KINDS = st.sampled_from(["compile", "graph_break", "transfer", "fallback", "compile_unknown", "counters"])
EVENTS = st.lists(
    st.builds(lambda kind, fields: {**fields, "kind": kind}, KINDS, st.dictionaries(st.sampled_from(FIELDS), JUNK)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_wrong_types_never_raise(events: list[dict[str, Any]]):
    tables = run(events, list(TestSteps.STEPS))
    assert tables.compiles.height == sum(event["kind"] not in ("compile_unknown", "counters") for event in events)
    assert dict(tables.compiles.schema) == SCHEMAS["compiles"]
    assert set(tables.compiles["cause"].drop_nulls()) <= set(CAUSES)
    assert tables.compiles["kind"].null_count() == 0
