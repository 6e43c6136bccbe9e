"""The names a user may rely on. A change here is a change users notice."""

from __future__ import annotations

import pytest

import stepscope

PUBLIC = [
    "ReadOptions",
    "Run",
    "__version__",
    "compare",
    "display",
    "log",
    "mark",
    "open_run",
    "profile",
    "reduce_run",
    "region",
    "step",
]


def test_the_public_names() -> None:
    assert sorted(stepscope.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_had_and_says_what_it_does(name: str) -> None:
    assert name in dir(stepscope)
    assert name.startswith("__") or (getattr(stepscope, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        stepscope.nonsense  # noqa: B018
