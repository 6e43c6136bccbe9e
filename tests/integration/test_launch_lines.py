"""Launch lines people use: a shell script, `python -m`, a child the agent never reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import PYTHON, SCRIPTS, record, step_rows

pytestmark = [pytest.mark.process, pytest.mark.torch]

ALONE = """import time, torch
model = torch.nn.Linear(4, 1)
for batch in torch.utils.data.DataLoader(torch.ones(640, 4), batch_size=16):
    model(batch).sum().backward()
    time.sleep(0.05)
"""  # needs nothing that lies beside it


def test_shell_script(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f'#!/bin/sh\nset -e\necho starting\n"{PYTHON}" "{SCRIPTS / "loop.py"}" "$@"\necho ended\nexit 4\n'
    )
    script.chmod(0o755)
    recorded = record(tmp_path / "run", [str(script), "--steps", "30"], options=[*NO_WINDOW, "--no-report"])
    assert recorded.status == 4, recorded.text
    assert recorded.stdout.startswith(b"starting\nresult ")
    assert len(step_rows(tmp_path / "run" / "rank-0")) in {29, 30}


def test_python_dash_m(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, "-m", "pkgmod"], options=NO_WINDOW, cwd=SCRIPTS)
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == b"trained 30 steps\n"
    assert len(step_rows(tmp_path / "run" / "rank-0")) in {29, 30}
    assert str(SCRIPTS) in " ".join(recorded.report["run"]["user_roots"])


@pytest.mark.parametrize(
    "way",
    [
        "isolated",
        pytest.param("ignored environment", marks=pytest.mark.thorough),
        "overwritten PYTHONPATH",
    ],
)
def test_a_child_the_agent_did_not_reach_is_named_with_the_remedy(tmp_path: Path, way: str) -> None:
    (tmp_path / "loop.py").write_text(ALONE)
    loop = [str(tmp_path / "loop.py")]
    lines = {
        "isolated": [PYTHON, "-I", *loop],
        "ignored environment": [PYTHON, "-E", *loop],
        "overwritten PYTHONPATH": ["env", f"PYTHONPATH={tmp_path}", PYTHON, *loop],
    }
    recorded = record(tmp_path / "run", lines[way], options=NO_WINDOW)
    assert recorded.status == 0, recorded.text
    unreached = [row for row in recorded.report["views"]["processes"] if row["remedy"]]
    assert unreached, recorded.report["views"]["processes"]
    assert unreached[0]["reported"] is False
    assert "loop.py" in unreached[0]["command"]
    said = " ".join(recorded.text.split())
    assert "never reported" in said
    assert {"isolated": "-I", "ignored environment": "-E", "overwritten PYTHONPATH": "PYTHONPATH"}[way] in said
    # stacks alone still say where it was
    stacks = recorded.report["views"]["stacks"]
    assert stacks["samples"] > 0
    assert recorded.report["steps"] is None


def test_a_users_own_sitecustomize_runs_in_the_command_and_not_beside_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran.txt"
    theirs = f"import os, sys\nos.environ['SEEN'] = 'theirs ran'\nprint(sys.orig_argv, file=open({str(ran)!r}, 'a'))\n"
    (tmp_path / "sitecustomize.py").write_text(theirs)
    code = "import os; print(os.environ.get('SEEN'))"
    options = [*NO_WINDOW, "--no-report"]
    recorded = record(tmp_path / "run", [PYTHON, "-c", code], options=options, env={"PYTHONPATH": str(tmp_path)})
    assert recorded.stdout == b"theirs ran\n"
    lines = ran.read_text().splitlines()
    assert sum("import os; print" in line and "stepscope" not in line for line in lines) == 1
    assert not any("telemetry" in line for line in lines)
