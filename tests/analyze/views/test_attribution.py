"""From rows of a trace to the user's lines."""

from __future__ import annotations

from posixpath import basename

import numpy as np

from stepscope.engine import attribution
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base
from tests.analyze.views.module_traces import Nested, base_of

FILE = "/home/user/project/train.py"


def lines_of(base: Base, rows: list[int], span: int = 0) -> list[str | None]:
    found = attribution.trace_back(base, base.spans[span], np.array(rows, np.int64)).place
    places = [attribution.place(base, int(index))[0] if index >= 0 else None for index in found]
    return [f"{basename(place.file)}:{place.line}" if place else None for place in places]


def test_the_innermost_function_of_the_users() -> None:
    trace = Nested()
    outer, inner = trace.python("train.py(1): <module>"), 0
    inner = trace.python("model.py(5): forward", outer)
    torch = trace.python("torch/nn/functional.py(9): linear", inner)
    operator = trace.operator("aten::linear", 0, 10, torch)
    alone = trace.operator("aten::mm", 20, 10)
    base = base_of(trace.tables())
    # any order, any number of times, and rows that are none
    assert lines_of(base, [operator, outer, alone, -1, operator]) == [
        "model.py:5",
        "train.py:1",
        None,
        None,
        "model.py:5",
    ]
    assert lines_of(base, []) == []


def test_a_library_stands_in_only_where_no_code_of_the_users_is() -> None:
    trace = Nested()
    library = trace.python("/x/site-packages/transformers/trainer.py(7): train")
    user = trace.python("train.py(2): hook", library)
    below = trace.python("/x/site-packages/transformers/model.py(3): forward", user)
    base = base_of(trace.tables())
    assert lines_of(base, [below, library]) == ["train.py:2", "trainer.py:7"]


def test_the_line_that_makes_the_call_where_the_source_tells() -> None:
    trace = Nested()
    layer = trace.python(f"{FILE}(1): layer")
    mm, relu = trace.operator("aten::mm", 0, 1, layer), trace.operator("aten::relu", 5, 1, layer)
    made = trace.tables()
    base = base_of(made)
    source = "def layer(x, w):\n    y = x.mm(w)\n    return y\n"
    base = Base(base.tables, base.spans, base.origins, Lines(None, {FILE: source}))
    found = attribution.heaviest_lines([(base, base.spans[0], np.array([mm, relu]), np.array([2, 1]))], 2)
    assert [(line.place.line, line.exact) for line in found] == [(2, True), (1, False)]
