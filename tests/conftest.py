"""Settings all tests share: no test inherits a recording or a colourful terminal, and PyTorch tests need PyTorch."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.browser_page", "tests.dashboard.browser"]
FEWER = 4  # in `make test` properties are tried with one in so many of their examples,
AT_LEAST = 10  # and none with fewer than these
START = Path(__file__).parent / "start"


def pytest_configure(config: pytest.Config) -> None:
    # A busy machine takes 200 ms now and then, and time is no property of what is tested.
    for profile in ("some", "all"):
        hypothesis.settings.register_profile(profile, deadline=None, max_examples=50)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile") or "some")
    gc.disable()  # until all is imported and collected; in a process that only hands out tests, to its end
    if str(START) not in sys.path:  # a worker has it from its parent
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(START), os.environ.get("PYTHONPATH")]))
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        if not name.startswith("STEPSCOPE_TEST_"):  # these are meant for the tests
            del os.environ[name]
    # A shell starts background jobs with these ignored, children inherit that, and stepscope leaves ignored what is.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: tests of processes wait for a good part of their time."""
    return (yield) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `torch` where PyTorch is not installed, saying so.

    Files with tests that start training processes or a browser come first, so that none of them is left to one worker
    alone in the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("process") or "chromium" in _fixtures(item)}
    items.sort(key=lambda item: item.path not in slow)
    if hypothesis.settings.get_current_profile_name() == "some":
        _try_fewer_examples(items)
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look at it again and again."""
    gc.freeze()
    gc.enable()


def _fixtures(item: pytest.Item) -> list[str]:
    names: list[str] = getattr(item, "fixturenames", [])
    return names


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    functions = [getattr(item, "obj", None) for item in items]
    properties = {getattr(function, "__func__", function) for function in functions}  # those of classes are bound
    for test in filter(hypothesis.is_hypothesis_test, properties):
        own = test._hypothesis_internal_use_settings  # what `@settings` sets, which has no public name
        fewer = min(own.max_examples, max(AT_LEAST, own.max_examples // FEWER))
        test._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=fewer)
