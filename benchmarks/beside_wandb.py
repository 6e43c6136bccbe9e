"""A script that logs to W&B offline by itself, alone and recorded: `python benchmarks/beside_wandb.py [--runs 100]`.

Recorded means with the tap of its log calls, with `--metrics-port`, and with W&B reading that address once a second. Of
every run the whole offline file is read back and compared with that of the script alone, but for what has another value
in every run anyway: times, what W&B measures of the machine, and addresses in the run's own folder. Another exit status
and other output of the script count as a difference too. The result goes between the markers "beside-wandb" of
RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import RESULTS, machine, put_between_markers  # noqa: E402
from tests.wandb_file import records  # noqa: E402

TOKEN = "of-the-benchmark"
STEPS = 40
TRAINING = f"""
import time, torch, wandb
torch.manual_seed(0)
settings = wandb.Settings(x_stats_sampling_interval=1.0)
run = wandb.init(project="p", id="theirs01", mode="offline", dir=".", config={{"lr": 0.25}}, settings=settings)
run.define_metric("val/*", step_metric="number")
data = torch.utils.data.TensorDataset(torch.randn({4 * STEPS}, 8), torch.randint(0, 2, ({4 * STEPS},)))
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.25)
for number, (inputs, labels) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    run.log({{"loss": loss.item(), "number": number}}, step=10 * number)
    if number % 10 == 9:
        run.log({{"val/loss": loss.item() / 2, "never": float("nan")}}, step=10 * number)
run.summary["best"] = 1.5
run.finish()
print("final", loss.item())
"""
# Of another value in every run of the script alone.
TIMES = {"_timestamp", "_runtime", "_wandb.runtime"}
MEASURED = {"stats", "telemetry", "environment", "output_raw", "output"}  # kinds of records


def main() -> None:
    parser = argparse.ArgumentParser(description="compare W&B's offline files of a script alone and recorded")
    parser.add_argument("--runs", type=int, default=100)
    asked = parser.parse_args()
    ignored = different = scraped = 0
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        alone = made(Path(name) / "alone", recorded=False)
        again = made(Path(name) / "again", recorded=False)
        assert told(alone) == told(again), "the script alone does not repeat itself"
        for number in range(asked.runs):
            found = made(Path(name) / f"run-{number}", recorded=True)
            ignored += "ignored" in found[1]
            different += told(found) != told(alone)
            scraped += any("openmetrics.stepscope." in item.key for each in found[2] for item in each.stats.item)
            print(f"{number + 1}: {ignored} ignored, {different} different, {scraped} scraped", flush=True)
    about = ", ".join(f"{key} {value}" for key, value in machine("torch", "stepscope", "wandb").items())
    text = f"""{asked.runs} runs of a script that logs {STEPS} steps to W&B offline, recorded, its log calls tapped and
the endpoint read by W&B once a second ({about}):
a step was ignored in {ignored}; W&B's file, the script's output or its exit status differed from those of the script
alone in {different}, times and readings of the machine left out; {scraped} files hold `openmetrics.stepscope.*`."""
    put_between_markers(RESULTS, "beside-wandb", text)


def made(folder: Path, *, recorded: bool) -> tuple[str, str, list[Any], int]:
    """(what the script printed, all that was said, the records of its file, its exit status)."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    line = [sys.executable, "train.py"]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "STEPSCOPE_METRICS_TOKEN": TOKEN}
    if recorded:
        port = free_port()
        address = f"http://127.0.0.1:{port}/metrics?token={TOKEN}"
        environment["WANDB_X_STATS_OPEN_METRICS_ENDPOINTS"] = json.dumps({"stepscope": address})
        ours = ["-m", "stepscope", "run", "--no-report", "--metrics-port", str(port), "--out", "ours", "--"]
        line = [sys.executable, *ours, *line]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout, done.stderr, list(records(folder / "wandb")), done.returncode


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def told(found: tuple[str, str, list[Any], int]) -> tuple[str, int, list[str]]:
    """What must be the same in every run: output, status, and the records as text."""
    stdout, _, kept, status = found
    return stdout, status, [text for record in kept for text in plain(record)]


def plain(record: Any) -> Iterator[str]:
    """A record without what is of this run alone; nothing of one that is measured."""
    kind = record.WhichOneof("record_type")
    if kind in MEASURED:
        return
    for field in ("num", "control", "uuid", "_info"):
        if field in record.DESCRIPTOR.fields_by_name:
            record.ClearField(field)
    part = getattr(record, kind)
    for field in ("start_time", "runtime", "host"):
        if field in part.DESCRIPTOR.fields_by_name:
            part.ClearField(field)
    items = next((getattr(part, name) for name in ("item", "update") if name in part.DESCRIPTOR.fields_by_name), [])
    kept = sorted(
        f"{name} = {item.value_json}" for item in items if (name := item.key or ".".join(item.nested_key)) not in TIMES
    )
    if kind in ("history", "summary"):  # W&B puts items in any order
        if kept:
            yield f"{kind}: {kept}"
    else:
        yield re.sub(r"offline-run-\d{8}_\d{6}", "offline-run", f"{kind}: {part}")


if __name__ == "__main__":
    main()
