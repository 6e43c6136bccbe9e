"""Which files are the user's own: what lies below the roots, but neither what is installed nor what records."""

from __future__ import annotations

import pytest

from stepscope.engine.user_code import UserCode

ROOT = "/home/me/project"
RECORDER = f"{ROOT}/src/stepscope/record/agent/steps.py"  # the run was recorded by a checkout below the user's root


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (f"{ROOT}/train.py", f"{ROOT}/train.py"),
        ("train.py", f"{ROOT}/train.py"),
        (f"{ROOT}/.venv/lib/python3.11/site-packages/rich/text.py", None),
        ("/elsewhere/train.py", None),
        (RECORDER, None),
        ("stepscope/record/agent/steps.py", None),
        ("steps.py", f"{ROOT}/steps.py"),
        ("somelib/core.py", None),  # shortened in a trace; stacks name its package in full
        ("int", None),  # `int (int)`, as py-spy shows a call of C now and then
    ],
)
def test_whose_file_it_is(file: str, found: str | None) -> None:
    installed = "/opt/lib/python3.12/site-packages/somelib/util.py"
    code = UserCode([ROOT], [f"{ROOT}/train.py", RECORDER, installed], f"{ROOT}/train.py")
    assert code.resolve(file) == found
