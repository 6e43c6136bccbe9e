"""Runs to look at and a dashboard that shows them, each made once per session.

`served(NAME)` is the ID of one of `NAMES` in the session's `dashboard`; what it needs is made when it is first asked
for, and its test skips where that cannot be had:

    demo        the example with pictures, recorded in a real training (the only one that costs seconds)
    small       a recorded run of two ranks, made of plain values, with stacks, telemetry and a window of a GPU
    fuzzed      one whose names are markup, terminal controls and paths
    growing     a run that goes on (`Growing` adds steps to it and ends it)
    empty       a run that never made a step
    cpu, gpu    traces of torch.profiler without and with a device
    tb_plugin   a log folder of the TensorBoard plugin       (real; from ../shared)
    h100        a trace of an H100                           (real; from ../shared)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard import served_runs as runs
from tests.dashboard.client import Dashboard
from tests.dashboard.made_up import show_made_up
from tests.dashboard.opened import fabricated, nothing, slow, small, workers

# fixtures that stand beside what reads their pages
__all__ = ["fabricated", "nothing", "show_made_up", "slow", "small", "workers"]

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
NAMES = ("demo", "small", "fuzzed", "growing", "empty", "cpu", "gpu", "tb_plugin", "h100")
TRACE = ".pt.trace.json"  # how traces are found in a folder
RECORDED = "demo"
RECORDING_FIXTURES = ("demo_run",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at the recorded demo needs what recording it needs."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        values = getattr(item, "callspec", None)
        used = getattr(item, "fixturenames", ())
        if any(name in used for name in RECORDING_FIXTURES) or (
            values is not None and RECORDED in [value for value in values.params.values() if isinstance(value, str)]
        ):
            item.add_marker(pytest.mark.process)
            item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that the session's dashboard shows; runs appear in it as tests ask for them."""
    return tmp_path_factory.mktemp("dashboard") / "runs"


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the recorded demo; shared with tests/integration, not to be written into."""
    from tests.recordings import demo

    recorded = demo(tmp_path_factory)
    assert recorded.status == 0, recorded.text
    return recorded.folder


def _recorded(make: Callable[[Path], Path]) -> Any:
    return pytest.fixture(scope="session")(lambda runs_folder: make(runs_folder))


small_run, fuzzed_run, empty_run = map(_recorded, (runs.small, runs.fuzzed, runs.empty))


@pytest.fixture(scope="session")
def growing_run(runs_folder: Path) -> Iterator[runs.Growing]:
    """A run that goes on for the whole session. To end one, make your own: `runs.Growing(tmp_path)`."""
    growing = runs.Growing(runs_folder)
    yield growing
    growing.close()


@pytest.fixture(scope="session")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.cpu_trace(tmp_path_factory.mktemp("cpu") / "cpu.pt.trace.json")


@pytest.fixture(scope="session")
def gpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.gpu_trace(tmp_path_factory.mktemp("gpu") / "gpu.pt.trace.json.gz")


@pytest.fixture(scope="session")
def tb_plugin() -> Path:
    return _shared("kineto_tb_plugin/resnet50_num_workers_4")


@pytest.fixture(scope="session")
def h100_trace() -> Path:
    return _shared("tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz")


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


@pytest.fixture(scope="session")
def dashboard(runs_folder: Path, small_run: Path) -> Iterator[Dashboard]:
    """The session's server, as `stepscope view RUNS --no-browser` starts it, with a token."""
    assert small_run.parent == runs_folder
    with Dashboard.start(runs_folder) as shown:
        yield shown


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, dashboard: Dashboard, runs_folder: Path) -> Callable[[str], str]:
    """The ID of a run by its name, one of `NAMES`."""
    fixtures = {"tb_plugin": "tb_plugin", **{name: f"{name}_trace" for name in ("cpu", "gpu", "h100")}}

    def run_id(name: str) -> str:
        made = request.getfixturevalue(fixtures.get(name, f"{name}_run"))
        if name == "growing":
            made = made.folder
        if made.parent != runs_folder:
            runs.link(made, runs_folder / (name if made.is_dir() else f"{name}{TRACE}"))
        return dashboard.id(name)

    return run_id


@pytest.fixture
def dashboard_of() -> Iterator[Callable[..., Dashboard]]:
    """Starts further dashboards, of the paths given (settings by name), and ends them with the test."""
    started: list[Dashboard] = []

    def start(*paths: Path, **settings: object) -> Dashboard:
        started.append(Dashboard.start(*paths, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()
