"""Messages of compilers. `messages.jsonl` holds texts that torch 2.6, 2.9 and 2.13 wrote, one per case and version, and
guards of torch's source ("source"), each with what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.tables.compile_reasons import CAUSES, is_limit_hit, parse_graph_break, parse_recompile, xla_cause

DATA = Path(__file__).resolve().parents[1] / "data" / "compiles"
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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("user torch_xla.sync", "user_sync"),
        ("user mark_step", "user_sync"),
        ("torch_xla.sync in parallel loader at step end", "loader_sync"),
        ("torch_xla.sync when exiting a profiler StepTrace region", "user_sync"),
        ("torch_xla.compile", "user_sync"),
        ("torch_xla.sync when dynamo processing input graphs", "dynamo"),
        ("dynamo is compiling a FX graph to HLO", "dynamo"),
        ("most likely user code trying to access tensor value before torch_xla.sync", "read_value"),
        ("the moon is full", "unknown"),
        (None, None),
    ],
)
def test_causes_of_torch_xla(text: str | None, cause: str | None):
    assert xla_cause(text) == cause


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
    assert found["cause"] is None or found["cause"] in CAUSES
    assert parse_graph_break(text)["cause"] in CAUSES
    for value in (found["subject"], found["old"], found["new"]):
        assert value is None or 0 < len(value) <= 200
    assert xla_cause(text) is None or xla_cause(text) in CAUSES


@pytest.mark.parametrize(
    "piece",
    ["a", "(", "'", "L['", 'File "', "tensor '", "0/0: ", "  # ", "x.size()[0]", "Graph break in user code at ", "\n"],
)
def test_megabytes_of_anything_are_cut(piece: str):
    text = piece * (3_000_000 // len(piece))
    assert len(parse_recompile(text)["subject"] or "") <= 200
    assert len(parse_graph_break(text).get("reason") or "") <= 2_000
    assert not is_limit_hit({"graph": "0/0", "fail_reason": text})
