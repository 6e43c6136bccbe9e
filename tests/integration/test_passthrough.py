"""The command's own status, streams and results come through as if we were not there, however it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.api import open_run
from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    plain,
    record,
    step_rows,
)

pytestmark = pytest.mark.process

LOOP = [PYTHON, str(SCRIPTS / "loop.py")]


@pytest.mark.torch
def test_a_recorder_that_raises_everywhere_changes_nothing(tmp_path: Path, loop_result: bytes) -> None:
    recorded = record(tmp_path / "run", LOOP, env={"STEPSCOPE_FAULTS": "*"})
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == loop_result
    assert loop_result.startswith(b"result ")
    assert "Traceback" not in recorded.text


@pytest.mark.torch
def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / "healthy.py")])
    assert recorded.status == 0, recorded.text
    assert [finding["rule"] for finding in recorded.findings if finding["severity"] != "info"] == []
    text, rest = " ".join(recorded.text.lower().split()), recorded.report["unexplained"]
    if rest["large"]:  # other tests have the cores meanwhile: that is said instead, and nothing else
        assert "no finding explains" in text
        assert all("others on the machine" in part["what"] for part in rest["parts"]), rest
    elif recorded.findings or rest["unseen"]:  # a small loss to other tests, or too few readings beside them
        assert "nothing worth fixing" not in text
    else:
        assert "nothing worth fixing above" in text, (recorded.text, rest)


@pytest.mark.parametrize("script", ["no_torch.py", "never_steps.py"])
def test_without_steps_there_is_a_clear_line(tmp_path: Path, script: str) -> None:
    recorded = record(tmp_path / "run", [PYTHON, str(SCRIPTS / script)], options=NO_WINDOW)
    assert recorded.status == 0, recorded.text
    assert "Traceback" not in recorded.text
    assert "step" in recorded.text
    assert 1 <= len(recorded.text.strip().splitlines()) <= 30, recorded.text


ALONE = """import time, torch
model = torch.nn.Linear(4, 1)
for batch in torch.utils.data.DataLoader(torch.ones(640, 4), batch_size=16):
    model(batch).sum().backward()
    time.sleep(0.05)
"""  # needs nothing that lies beside it


def test_shell_script(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f'#!/bin/sh\nset -e\necho starting\n"{PYTHON}" "{SCRIPTS / "steps.py"}" "$@"\necho ended\nexit 4\n'
    )
    script.chmod(0o755)
    recorded = record(tmp_path / "run", [str(script), "30", "0"], options=[*NO_WINDOW, "--no-report"])
    assert recorded.status == 4, recorded.text
    assert recorded.stdout.endswith(b"step 29:\nresult of all\nended\n")
    assert len(step_rows(tmp_path / "run" / "rank-0")) == 30


def test_python_dash_m(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [PYTHON, "-m", "pkgmod"], options=NO_WINDOW, cwd=SCRIPTS)
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == b"trained 30 steps\n"
    assert len(step_rows(tmp_path / "run" / "rank-0")) == 30
    assert str(SCRIPTS) in " ".join(recorded.report["run"]["user_roots"])


@pytest.mark.torch
@pytest.mark.parametrize(
    "way",
    ["isolated", pytest.param("ignored environment", marks=pytest.mark.thorough), "overwritten PYTHONPATH"],
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


@pytest.mark.torch
def test_a_users_own_sitecustomize_runs_in_the_command_and_not_beside_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran.txt"
    theirs = f"import os, sys\nos.environ['SEEN'] = 'theirs ran'\nprint(sys.orig_argv, file=open({str(ran)!r}, 'a'))\n"
    (tmp_path / "sitecustomize.py").write_text(theirs)
    code = "import os; print(os.environ.get('SEEN'))"
    options = [*NO_WINDOW, "--no-report"]
    recorded = record(tmp_path / "run", [PYTHON, "-c", code], options=options, env={"PYTHONPATH": str(tmp_path)})
    assert recorded.stdout == b"theirs ran\n"
    lines = ran.read_text().splitlines()
    assert sum("import os; print" in line and "'stepscope'" not in line for line in lines) == 1
    assert not any("telemetry" in line for line in lines)


# Four libraries, each with the class and the method that we tap, failing behind it as theirs may.
LIBRARY = """
import sys, time
FAULT = sys.argv[1]

def send(values):
    if FAULT == "raises":
        raise OSError(28, f"No space left on device for {sorted(values)}")
    if FAULT == "hangs":
        time.sleep(0.2)
    return len(values)
"""
LIBRARIES = {
    "wandb/sdk/wandb_run.py": "class Run:\n    def _log(self, data, step=None):\n        return send(data)\n",
    "mlflow/tracking/fluent.py": "def log_metric(key, value, step=None):\n    return send({key: value})\n",
    "trackio/run.py": "class Run:\n    def log(self, metrics, step=None):\n        return send(metrics)\n",
    "tensorboardX/writer.py": """class SummaryWriter:
    logdir = "logs"
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        return send({tag: scalar_value})
""",
}
TRAINING = """
import sys, torch
from plain_sgd import PlainSGD
if sys.argv[1] == "absent":
    for name in ("wandb", "mlflow", "trackio", "tensorboardX"):
        sys.modules[name] = None
sinks = []
try:
    import wandb.sdk.wandb_run, mlflow.tracking.fluent, trackio.run, tensorboardX.writer
    sinks = [
        lambda loss, step: wandb.sdk.wandb_run.Run()._log({"loss": loss}, step=step),
        lambda loss, step: mlflow.tracking.fluent.log_metric("loss", loss, step=step),
        lambda loss, step: trackio.run.Run().log({"loss": loss}),
        lambda loss, step: tensorboardX.writer.SummaryWriter().add_scalar("loss", loss, step),
    ]
except ImportError as error:
    print(error)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = PlainSGD(model.parameters(), 0.25)
for step in range(6):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 2, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for sink in sinks:
        try:
            print(sink(loss.item(), step))
        except OSError as error:
            print("not logged:", error)
            if step == 5:
                raise
    print(step, loss.item().hex())
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "status", "tapped"),
    [
        ("raises", 1, set()),
        pytest.param("hangs", 0, {"wandb", "mlflow", "trackio", "tensorboard"}, marks=pytest.mark.thorough),
        pytest.param("absent", 0, set(), marks=pytest.mark.thorough),
    ],
)
def test_losses_output_and_status_are_those_without_us(
    fault: str, status: int, tapped: set[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    for name, text in LIBRARIES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.parents:
            if folder != tmp_path and folder.is_relative_to(tmp_path):
                (folder / "__init__.py").touch()
        path.write_text(LIBRARY + text)
    command = [PYTHON, "train.py", fault]
    alone = plain(command, cwd=tmp_path)
    ours = record(
        tmp_path / "run", command, options=["--no-report", "--no-window", "--metrics-port", "0"], cwd=tmp_path
    )
    assert (ours.status, alone.returncode) == (status, status), ours.text
    assert ours.stdout == alone.stdout
    assert alone.stdout.count(b"0x") == (5 if status else 6)
    assert (b"No space left" in alone.stderr) == (fault == "raises")
    kept = open_run(tmp_path / "run").tables.metrics
    assert set(kept.filter(kept["name"] == "loss")["source"]) == tapped
