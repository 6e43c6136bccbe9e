"""From the line a trace gives a function to the line to name: of a call, or where the function begins."""

from __future__ import annotations

import pytest

from stepscope.engine.source_lines import Lines

SOURCE = """\
def helper(x):
    return x


@decorated
def train(model, batches):
    for batch in batches:
        loss = model(batch)
        helper(loss)
        loss.backward()
"""
LINES = Lines(None, {"/t/train.py": SOURCE})


@pytest.mark.parametrize("line", [5, 6, 8, 10])
def test_a_function_begins_at_its_decorator_wherever_it_was_when_the_recording_began(line: int) -> None:
    assert LINES.definition("/t/train.py", "train", line) == 5


@pytest.mark.parametrize(
    ("file", "function", "line"),
    [
        *(("/t/other.py", "train", 8), ("/t/train.py", "evaluate", 8), ("/t/train.py", "train", 2)),
        ("/t/train.py", "<module>", 8),
    ],
)
def test_nothing_is_said_of_what_the_source_does_not_hold(file: str, function: str, line: int) -> None:
    assert LINES.definition(file, function, line) is None


def test_the_only_call_of_a_name_is_its_line_also_from_within() -> None:
    assert LINES.only_line("/t/train.py", "train", 8, "helper") == 9
