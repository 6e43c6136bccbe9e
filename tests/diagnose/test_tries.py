"""What findings propose to try: knobs that exist, with values they take, whichever rule proposes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope.diagnose
from stepscope.record.agent.knobs import check
from stepscope.schema import Knob

FOLDER = Path(stepscope.diagnose.__file__).parent
# What stands for a part that is computed: all it can be, or numbers at both ends.
COMPUTED = {
    "knob": ("fused", "foreach"),
    "library": ("jemalloc", "tcmalloc"),
    "str(fits)": ("1", "64"),
    "str(wanted)": ("1", "16"),
    "str(loader.suggested_workers)": ("1", "64"),
}


def texts(node: ast.expr) -> Iterator[str]:
    """All that an argument of `Try` can be."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            found = [start + end for start in found for end in texts(inner)]
        yield from found
    else:
        yield from COMPUTED[ast.unparse(node)]  # a new one: say what it can be


def proposals() -> list[tuple[str, str]]:
    found = set()
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Try":
                knob, value = node.args
                found |= {(name, text) for name in texts(knob) for text in texts(value)}
    return sorted(found)


@pytest.mark.parametrize(("knob", "value"), proposals())
def test_it_is_a_knob_that_takes_the_value(knob: str, value: str) -> None:
    check(Knob(knob, value))


def test_all_families_are_found() -> None:
    assert {knob.partition(".")[0] for knob, _ in proposals()} >= {"loader", "optimizer", "compile", "amp", "torch"}
