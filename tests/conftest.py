"""Settings all tests share: no test inherits a recording or a colourful terminal, and PyTorch tests need PyTorch."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.browser_page", "tests.dashboard.browser"]


def pytest_configure() -> None:
    # A busy machine takes 200 ms now and then, and time is no property of what is tested.
    # Half of the usual number of examples, where a test does not say otherwise: there are more than a hundred of them.
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=50)
    hypothesis.settings.load_profile("untimed")
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        if not name.startswith("STEPSCOPE_TEST_"):  # these are meant for the tests
            del os.environ[name]
    # A shell starts background jobs with these ignored, children inherit that, and stepscope leaves ignored what is.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `torch` where PyTorch is not installed, saying so.

    Where tests run side by side, those of a folder that start training processes form one group: they share what was
    recorded, and run one after the other.
    """
    for item in items:
        if item.get_closest_marker("process") is not None:
            item.add_marker(pytest.mark.xdist_group(f"processes of {_folder(item)}"))
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


def _folder(item: pytest.Item) -> str:
    """The folder below tests/ whose recordings a test looks at."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return "integration" if folder == "dashboard" else folder  # which shows the demo that is recorded there


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups that are not kept would make every recording twice and let recordings disturb each other, silently."""
    alone = [item for item in session.items if item.get_closest_marker("process") and "@" not in item.nodeid]
    if alone and getattr(session.config.option, "loadgroup", False):
        raise pytest.UsageError("this pytest-xdist does not group tests with this pytest; install pytest below 9.2")
