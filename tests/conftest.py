"""Settings all tests share: no test inherits a recording or a colourful terminal, and PyTorch tests need PyTorch."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading

import pytest

pytest_plugins = ["tests.browser_page"]


def pytest_configure() -> None:
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        del os.environ[name]
    # A shell starts background jobs with these ignored, children inherit that, and stepscope leaves ignored what is.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `torch` where PyTorch is not installed, saying so.

    Where tests run side by side, those that start training processes form one group: they run one after the other.
    """
    for item in items:
        if item.get_closest_marker("process") is not None:
            item.add_marker(pytest.mark.xdist_group("processes"))
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))
