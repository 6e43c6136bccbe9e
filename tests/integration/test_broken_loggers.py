"""Where what a script logs to raises, hangs or is not there, it trains and ends as it does without us."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.api import open_run
from tests.integration.harness import PYTHON, plain, record

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


@pytest.mark.process
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
