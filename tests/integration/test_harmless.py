"""200 runs, of 20 scripts each with ten ways in which our hooks fail: the training ends as it does without us."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import PYTHON, SCRIPTS, plain, record

pytest.importorskip("torch")  # the scripts are imported, for their names
from tests.integration.scripts.harmless import SCRIPTS as NAMES

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.thorough]

FAULTS = (
    *("*", "autograd optimizer", "loader collector", "module_forward scaler", "window user_profiler", "sites saves"),
    *("sampler memory_log", "metrics source_log", "children nvtx compiles", "frameworks framework_seams step exit"),
)


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, bytes]]:
    """(status, standard output) of a script without us."""

    @functools.cache
    def run(name: str) -> tuple[int, bytes]:
        done = plain([PYTHON, str(SCRIPTS / "harmless.py"), name], cwd=tmp_path_factory.mktemp(name))
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_hooks_that_fail_change_nothing(
    tmp_path: Path, name: str, faults: str, unrecorded: Callable[[str], tuple[int, bytes]]
) -> None:
    expected = unrecorded(name)
    assert expected[0] == 3
    assert expected[1].count(b"\n") > 12
    line = [PYTHON, str(SCRIPTS / "harmless.py"), name]
    window = ["--window", "wait=1,warmup=1,active=3,repeat=2"]
    options = [*window, "--no-report", "--quiet"]
    recorded = record(tmp_path / "run", line, options=options, env={"STEPSCOPE_FAULTS": faults})
    assert (recorded.status, recorded.stdout) == expected, recorded.text
