"""Graph breaks as torch 2.6, 2.9 and 2.13 told them, one per case and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.tables.compile_reasons import CAUSES, parse_graph_break

DATA = Path(__file__).resolve().parents[1] / "data" / "compiles"
_ALL = [json.loads(line) for line in (DATA / "messages.jsonl").read_text("utf-8").splitlines()]
MESSAGES = [row for row in _ALL if row["kind"] == "graph_break"]

# case -> (cause, operator, line) of the first break
BREAKS: dict[str, tuple[Any, ...]] = {
    "item": ("item", "aten::_local_scalar_dense", 269),
    "item_branch": ("item", "aten::_local_scalar_dense", 275),
    "loop_item": ("item", "aten::_local_scalar_dense", 310),
    "tolist": ("item", "aten::_local_scalar_dense", 338),
    "cpu_numpy": ("item", "aten::_local_scalar_dense", 381),
    "intf": ("item", "aten::_local_scalar_dense", 55),
    "slic": ("item", "aten::_local_scalar_dense", 59),
    "print": ("print", "print", 283),
    "print_tensor": ("print", "print", 290),
    "logging": ("print", None, 358),
    "nested": ("print", "print", 405),
    "ctx": ("print", "print", 23),
    "tr": ("print", "print", 30),
    "cust": ("print", "_warnings.warn", 388),
    "branch": ("data_dependent", None, 296),
    "branch_loop": ("data_dependent", None, 303),
    "assert": ("data_dependent", None, 365),
    "nonzero": ("data_dependent", "aten::nonzero", 332),
    "uniq": ("data_dependent", "aten::_unique2", 51),
    "numpy": ("unsupported_call", "time.sleep", 318),
    "gc": ("unsupported_call", "gc.collect", 395),
    "disable": ("unsupported_call", "disable.<locals>.q", 345),
    "manual": ("unsupported_call", None, 326),
    "backw": ("unsupported_call", None, 400),
    "optim": ("unsupported_call", None, 255),  # the break is in torch's code: the line that leads there
    "optim_adam": ("unsupported_call", None, 263),
    "sp": ("unsupported", None, 47),
    "clsdef": ("unsupported", None, 64),
}


def test_every_case_is_there():
    assert set(BREAKS) <= {row["case"] for row in MESSAGES}


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row['torch']}-{row['case']}") for row in MESSAGES])
def test_graph_breaks_of_every_version(row: dict[str, str]):
    found = parse_graph_break(row["text"])
    assert found.cause in CAUSES
    assert found.cause != "unknown"
    assert found.reason
    assert not found.reason.startswith(("Encountered", "Failed to handle"))  # what leads in to the reason
    if row["case"] in BREAKS:
        assert (found.cause, found.operator, found.line) == BREAKS[row["case"]]
        assert (found.file or "").startswith("/home/user/train/")


def test_a_break_names_its_function_and_the_page_on_it():
    row = next(
        row for row in MESSAGES if row["case"] == "item" and row["kind"] == "graph_break" and row["torch"] == "2.13"
    )
    found = parse_graph_break(row["text"])
    assert found.function == "h"
    assert found.doc_url == "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0124.html"
    assert (found.hint or "").startswith("Set `torch._dynamo.config.capture_scalar_outputs = True`")
    first, _, _ = (found.reason or "").partition("\n")
    assert first == "Unsupported Tensor.item() call with capture_scalar_outputs=False"
    assert "User code traceback" not in (found.reason or "")


def test_a_kind_of_break_that_is_new_is_still_one():
    found = parse_graph_break("Graph break in user code at /home/u/t.py:3\nGraph Break Reason: Brand new limitation\n")
    assert (found.cause, found.reason, found.line) == ("unsupported", "Brand new limitation", 3)
