"""The table of compilations: events of journals, spans and copies of traces, and what the messages of compilers mean.

`messages.jsonl` holds texts that torch 2.6, 2.9 and 2.13 wrote, each wording once, and guards of torch's source
("source"), each with what it says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.read import read_paths
from stepscope.read.raw import Frame, Losses, RawRank, RawRun
from stepscope.tables import build, phases
from stepscope.tables.compile_reasons import is_limit_hit, known_words, parse_graph_break, parse_recompile, xla_cause
from stepscope.tables.schema import SCHEMAS, Tables
from tests.records import replace

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
        own = "___stack2 == 0.25  # (_dynamo/output_graph.py:3375 in remove_tensorify_specialized_graphargs)"
        event = recompile_event(1, own, def_file="/home/u/t.py", def_line=5, function="torch_dynamo_resume_in_f_at_5")
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
    assert set(tables.compiles["cause"].drop_nulls()) <= set(known_words().causes)
    assert tables.compiles["kind"].null_count() == 0


def slice_(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if cat.startswith("gpu") else {"pid": 1, "tid": tid}
    return {"ph": "X", **where, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float = 1000) -> dict[str, Any]:
    return slice_(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def compiles(folder: Path, events: list[dict[str, Any]]) -> pl.DataFrame:
    path = folder / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return build(read_paths([path])).compiles


def frame(ts: float, dur: float) -> list[dict[str, Any]]:
    """A frame compiled as torch 2.13 records it: each phase twice, one inside the other."""
    names = ["dynamo", "entire_frame_compile", "_compile.compile_inner (dynamo_timed)", "backend_compile"]
    names += ["OutputGraph.call_user_compiler (dynamo_timed)", "inductor_compile"]
    return [slice_(name, ts + i, dur - 2 * i) for i, name in enumerate(names)]


def test_the_union_not_the_sum(tmp_path: Path):
    table = compiles(tmp_path, [step(0, 0, 1000), *frame(100, 500), step(1, 1000, 1000), *frame(1200, 300)])
    assert table.select("step", "duration_ns", "kind", "direction").rows() == [
        (0, 498_000, "compile", "forward"),
        (1, 298_000, "compile", "forward"),
    ]
    assert set(table["step_source"]) == {"trace"}
    assert set(table["backend"]) == {"torch.compile"}


def test_overlap_on_another_thread_counts_once(tmp_path: Path):
    events = [
        step(0, 0, 1000),
        slice_("entire_frame_compile", 100, 300),
        slice_("backward._backward_impl (dynamo_timed)", 300, 300, "user_annotation", tid=2),
    ]
    table = compiles(tmp_path, events)
    assert table.select("time_ns", "duration_ns", "direction").rows() == [
        (100_000, 300_000, "forward"),
        (400_000, 200_000, "backward"),
    ]


def test_journals_that_tell_of_compiling_are_not_doubled(tmp_path: Path):
    path = tmp_path / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [step(0, 0, 1000), *frame(100, 500)]}))
    raw = read_paths([path])
    told = {"kind": "compile", "time_ns": 0, "duration_ns": 7, "step": 0, "graph": "0/0"}
    other = {"kind": "graph_break", "time_ns": 0, "duration_ns": None, "step": 0, "reason": "x"}

    def rows(event: dict[str, Any]) -> list[tuple[Any, ...]]:
        ranks = tuple(replace(rank, journal=(event,)) for rank in raw.ranks)
        return build(replace(raw, ranks=ranks)).compiles.select("kind", "step_source").rows()

    assert rows(told) == [("compile", "poll")]
    assert rows({**told, "backend": "torch_xla"}) == [("compile", "poll"), ("compile", "trace")]
    assert rows(other) == [("graph_break", "poll"), ("compile", "trace")]


COLUMNS = ["step", "count", "operator", "cause", "duration_ns", "bytes"]


def copy(
    ts: float, correlation: int, *, call: float, wait: float | None, name: str = "Pageable", size: int | None = 4
) -> list[dict[str, Any]]:
    """A copy to the host: the runtime call at `ts`, the wait behind it, and the slice on the device at the end."""
    sized = {} if size is None else {"bytes": size}
    number = {"correlation": correlation}
    device = {**number, "device": 0, "stream": 7, **sized}
    found = [
        slice_("cudaMemcpyAsync", ts, call, "cuda_runtime", **number),
        slice_(f"Memcpy DtoH (Device -> {name})", ts + call, 1, "gpu_memcpy", **device),
    ]
    return found if wait is None else [*found, slice_("cudaStreamSynchronize", ts + call + 1, wait, "cuda_runtime")]


def item(ts: float, correlation: int, *, call: float = 20, wait: float = 10) -> list[dict[str, Any]]:
    inside = copy(ts + 2, correlation, call=call, wait=wait)
    names = ("aten::item", "aten::_local_scalar_dense")
    return [*(slice_(name, ts + i, 50 - 2 * i) for i, name in enumerate(names)), *inside]


def to_host(ts: float, correlation: int, **cost: Any) -> list[dict[str, Any]]:
    names = ("aten::to", "aten::_to_copy", "aten::copy_")
    return [*(slice_(name, ts + i, 80 - 2 * i) for i, name in enumerate(names)), *copy(ts + 3, correlation, **cost)]


def test_what_waited_is_the_call_and_its_synchronisation(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *item(300, 2, call=30, wait=5), step(1, 1000), *item(1100, 3)]
    table = compiles(tmp_path, events)
    assert table.select(COLUMNS).rows() == [
        (0, 2, "aten::_local_scalar_dense", "item", 65_000, 8),
        (1, 1, "aten::_local_scalar_dense", "item", 30_000, 4),
    ]
    assert set(table.select("kind", "backend", "direction", "step_source").rows()) == {
        ("transfer", "cuda", "device_to_host", "trace")
    }


def test_waits_of_others_are_not_charged(tmp_path: Path):
    """A copy nobody waits for costs its call; a wait in another operator, or before the copy, is not its own."""
    events = [
        step(0, 0),
        slice_("cudaStreamSynchronize", 90, 5, "cuda_runtime"),
        *to_host(100, 1, call=6, wait=None, name="Pinned"),
        slice_("aten::mm", 200, 100),
        slice_("cudaStreamSynchronize", 210, 50, "cuda_runtime"),
    ]
    assert compiles(tmp_path, events).select(COLUMNS).rows() == [(0, 1, "aten::to", "copy", 6_000, 4)]


def test_a_size_that_is_missing_is_not_zero(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *to_host(300, 2, call=5, wait=5, size=None)]
    assert compiles(tmp_path, events).select("operator", "bytes").rows() == [
        ("aten::_local_scalar_dense", 4),
        ("aten::to", None),
    ]


def test_the_innermost_function_of_the_users(tmp_path: Path):
    functions = [
        slice_("train.py(12): main", 10, 900, "python_function"),
        slice_("train.py(40): log", 90, 300, "python_function"),
        slice_("contextlib.py(75): inner", 91, 200, "python_function"),
        slice_("torch/_tensor.py(30): wrapper", 92, 190, "python_function"),
        slice_("<built-in method item of Tensor object at 0x7f>", 93, 180, "python_function"),
    ]
    table = compiles(tmp_path, [step(0, 0), *functions, *item(100, 1)])
    row = table.row(0, named=True)
    assert (row["file"], row["function"], row["def_file"], row["def_line"]) == ("train.py", "log", "train.py", 40)
    assert row["line"] is None  # the trace knows where the function begins, not which line of it read the value


MESSAGES = [json.loads(line) for line in (DATA / "messages.jsonl").read_text("utf-8").splitlines()]
CALLED = "0/0: n == 3  # y  # m.py:3 in call\nUser stack trace:\n"
OWN = '  File "/home/u/train.py", line 9, in step\n    z\n'
LIBRARY = '  File "/env/lib/python3.11/site-packages/transformers/m.py", line 3, in call\n    y'
CASES = "/home/user/train/cases.py"  # 2.9 shortens it to "ome/user/train/cases.py"


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row['kind']}-{row['torch']}-{row['case']}") for row in MESSAGES]
)
def test_messages_of_every_version(row: dict[str, Any]):
    """What needs a line of the user's names it; where the code that checks a value is torch's own, none is named."""
    known = row["kind"] == "recompile"
    found = parse_recompile(row["text"], [CASES]) if known else parse_graph_break(row["text"])
    assert {name: found.get(name) for name in row["expected"]} == row["expected"]
    if not known:
        assert found["cause"] != "unknown"
        assert not found["reason"].startswith(("Encountered", "Failed to handle"))  # what leads in to the reason


def test_a_break_names_the_page_on_it_and_the_compilers_advice():
    wanted = ("graph_break", "2.13", "item")
    row = next(row for row in MESSAGES if (row["kind"], row["torch"], row["case"]) == wanted)
    found = parse_graph_break(row["text"])
    assert found["hint"].startswith("Set `torch._dynamo.config.capture_scalar_outputs = True`")
    assert found["hint"].endswith(" https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0124.html")
    assert found["reason"].startswith("Unsupported Tensor.item() call with capture_scalar_outputs=False\n")
    assert "User code traceback" not in found["reason"]


def test_a_kind_of_break_that_is_new_is_still_one():
    found = parse_graph_break("Graph break in user code at /home/u/t.py:3\nGraph Break Reason: Brand new limitation\n")
    assert (found["cause"], found["reason"], found["line"]) == ("unsupported", "Brand new limitation", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a closure variable is the subject
        (
            "0/0: fn.__closure__[0].cell_contents.scale == 2.0  # return x * c.scale  # m/t.py:9 in inner "
            '(HINT: guard on "c".scale)',
            {"subject": "c.scale"},
        ),
        # torch's own files are nobody's line
        ("0/0: self.lr == 0.1  # for g in x:  # optim/sgd.py:118 in step", {"file": None, "line": None}),
        # a library is named only without the user's code
        (f"{CALLED}{OWN}{LIBRARY}", {"line": 9}),
        (f"{CALLED}{LIBRARY}", {"line": 3}),
    ],
)
def test_subjects_and_places(text: str, expected: dict[str, Any]):
    found = parse_recompile(text, ["/home/u/train.py"])
    assert {name: found[name] for name in expected} == expected


def test_the_limit_by_structure_whatever_the_wording():
    event = {"graph": "2/8", "recompile_reason": "2/7: s.calls == 7", "guarded": None, "is_forward": None}
    assert is_limit_hit({**event, "fail_type": "SomethingNew", "fail_reason": "no more versions, please"})
    assert not is_limit_hit({**event, "guarded": True, "is_forward": True})
    assert not is_limit_hit({**event, "guarded": False, "is_forward": True, "fail_type": "Unsupported"})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("RecompileLimitExceeded", "cache_size_limit reached"),  # 2.6
        ("RecompileLimitExceeded", "recompile_limit reached"),  # 2.9
        ("Unsupported", "Dynamo recompile limit exceeded\n  Explanation: ..."),  # 2.13
        ("FailOnRecompileLimitHit", "accumulated_recompile_limit reached"),
    ],
)
def test_the_limit_by_wording_where_the_structure_is_missing(kind: str, reason: str):
    assert is_limit_hit({"graph": "3/8", "fail_type": kind, "fail_reason": reason})


MARKS = (
    "L['", "']", "  # ", "(HINT: ", "\n", "tensor '", "' size mismatch at index ", "User stack trace:", 'File "',
    "Graph break in user code at ", "Reason:", "not ", "(" * 50, "0/0: ", " == ", "\ud800",
)  # fmt: skip
PIECES = st.sampled_from([*(row["text"] for row in MESSAGES[::17]), *MARKS])
TEXTS = st.one_of(st.text(max_size=300), st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=12).map("".join))


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_nothing_raises_and_causes_are_words(text: str):
    found = parse_recompile(text, ["/home/u/train.py"])
    assert found["cause"] is None or found["cause"] in known_words().causes
    assert parse_graph_break(text)["cause"] in known_words().causes
    for value in (found["subject"], found["old"], found["new"]):
        assert value is None or 0 < len(value) <= 200
    assert xla_cause(text) is None or xla_cause(text) in known_words().causes


@pytest.mark.parametrize(
    "piece",
    ["a", "(", "'", "L['", 'File "', "tensor '", "0/0: ", "  # ", "x.size()[0]", "Graph break in user code at ", "\n"],
)
def test_megabytes_of_anything_are_cut(piece: str):
    text = piece * (3_000_000 // len(piece))
    assert len(parse_recompile(text)["subject"] or "") <= 200
    assert len(parse_graph_break(text).get("reason") or "") <= 2_000
    assert not is_limit_hit({"graph": "0/0", "fail_reason": text})


# Sampled with py-spy while torch 2.13 compiled a model (inductor and aot_eager), and while the compiled model trained.
COMPILING = [
    ("ConvertFrame.__call__", "torch/_dynamo/convert_frame.py"),
    ("_compile.<locals>.compile_inner", "torch/_dynamo/convert_frame.py"),
    ("InstructionTranslatorBase.step", "torch/_dynamo/symbolic_convert.py"),
    ("OutputGraph.call_user_compiler", "/opt/venv/lib/python3.11/site-packages/torch/_dynamo/output_graph.py"),
    ("aot_module_simplified", "torch/_functorch/aot_autograd.py"),
    ("_AutogradBackwardCompiler.get_or_compile", "torch/_functorch/_aot_autograd/runtime_wrappers.py"),
    ("_compile_fx_main.<locals>.fw_compiler_base", "torch/_inductor/compile_fx.py"),
    ("compile_fx_inner", "C:\\venv\\Lib\\site-packages\\torch\\_inductor\\compile_fx.py"),
    ("Scheduler.codegen", "torch/_inductor/scheduler.py"),
    ("CachingAutotuner.precompile", "torch/_inductor/runtime/triton_heuristics.py"),
    ("ASTSource.make_ir", "triton/compiler/compiler.py"),
    ("_jit_compile", "torch/utils/cpp_extension.py"),
]
RUNNING = [
    ("_TorchDynamoContext.__call__.<locals>.compile_wrapper", "torch/_dynamo/eval_frame.py"),
    ("DisableContext.__call__.<locals>._fn", "torch/_dynamo/eval_frame.py"),
    ("GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS.<locals>.fn", "torch/_dynamo/guards.py"),
    ("aot_module_simplified.<locals>.forward", "torch/_functorch/aot_autograd.py"),
    ("_create_runtime_wrapper.<locals>.runtime_wrapper", "torch/_functorch/_aot_autograd/runtime_wrappers.py"),
    ("CompiledFunction.backward", "torch/_functorch/_aot_autograd/jit_compile_runtime_wrappers.py"),
    ("CompiledFxGraph.__call__", "torch/_inductor/output_code.py"),
    ("cudagraphify.<locals>.run", "torch/_inductor/compile_fx.py"),
    ("CachingAutotuner.run", "torch/_inductor/runtime/triton_heuristics.py"),
    ("JITFunction.run", "triton/runtime/jit.py"),
    ("CompiledKernel.launch_metadata", "triton/compiler/compiler.py"),
    ("Runner.call", "cbjasnbqreg52zebzcuno7peivyieghymsuwo2ihwkmi74mdgv54.py"),
    ("boxed_nop.<locals>.run", "torch/_dynamo/backends/debugging.py"),
    ("compile", "myproject/compiler.py"),
    ("step", "mytorch/_dynamo/symbolic_convert.pyc"),
    ("__call__", "nottorch/_dynamo/convert_frame.py"),
    ("<module>", "torch/_inductor/scheduler.py"),
    ("<module>", "train.py"),
    ("", ""),
]


@pytest.mark.parametrize(
    ("function", "file", "expected"), [*((*one, True) for one in COMPILING), *((*one, False) for one in RUNNING)]
)
def test_compilers_are_told_from_what_compiled_code_passes_through(function: str, file: str, expected: bool) -> None:
    assert phases.compiles(Frame(function, file, None)) is expected
