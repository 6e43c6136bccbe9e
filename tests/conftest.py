"""Settings all tests share: no test inherits a recording or a colourful terminal, and PyTorch tests need PyTorch."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytest_plugins = ["tests.browser_page"]


def pytest_configure() -> None:
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `torch` where PyTorch is not installed, saying so."""
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))
