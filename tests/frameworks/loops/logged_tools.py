"""A loop that logs with W&B, TensorBoard, tensorboardX, MLflow and Trackio; tells what it logged, and what their files
hold of it."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

PLACE = tempfile.TemporaryDirectory()  # some read their settings when they are imported
os.environ.update(TRACKIO_DIR=PLACE.name + "/trackio", MLFLOW_ALLOW_FILE_STORE="true", WANDB_SILENT="true")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_ERROR_REPORTING="false")

import mlflow  # noqa: E402
import tensorboardX  # noqa: E402
import torch  # noqa: E402
import trackio  # noqa: E402
import wandb  # noqa: E402
from control import TRUTH, Vectors, network  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from wandb.proto import wandb_internal_pb2  # noqa: E402

BATCH, EPOCHS = 64, 2


def main() -> None:
    torch.manual_seed(0)
    folder = Path(PLACE.name)
    mlflow.set_tracking_uri(f"file://{folder}/mlflow")
    run = wandb.init(mode="offline", dir=folder, project="p", settings=wandb.Settings(x_disable_stats=True))
    writers = (
        SummaryWriter(folder / "train"),
        SummaryWriter(folder / "held_out"),
        tensorboardX.SummaryWriter(folder / "x"),
    )
    trackio.init(project="p", name="r", embed=False)
    logged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with mlflow.start_run():
        train(run, writers, logged)
    run.finish()
    trackio.finish()
    for writer in writers:
        writer.close()
    files = {"tensorboard": events(folder), "wandb": history(folder), "mlflow": mlflow_files(folder), "trackio": rows()}
    if TRUTH in os.environ:
        Path(os.environ[TRUTH]).write_text(json.dumps({"logged": logged, "files": files}))


def train(run: Any, writers: Any, logged: dict[str, dict[str, list[float]]]) -> None:
    """Train, and log in every step and after every epoch."""
    train_writer, held_out_writer, other_writer = writers
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(Vectors(10 * BATCH), batch_size=BATCH)
    held_out = DataLoader(Vectors(4 * BATCH), batch_size=BATCH)

    def told(source: str, name: str, value: Any) -> None:
        logged[source][name].append(torch.as_tensor(value).item())

    step = 0
    for _ in range(EPOCHS):
        for inputs, labels in train:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wandb.log({"train": {"loss": loss, "step": step}, "text": "none", "bars": wandb.Histogram([1, 2])})
            told("wandb", "train/step", step)
            told("wandb", "train/loss", loss)
            train_writer.add_scalar("loss", loss, step)
            other_writer.add_scalar("loss", loss.item(), step)
            mlflow.log_metric("loss", loss.item(), step=step)
            trackio.log({"loss": loss.item()})
            for source in ("tensorboard", "tensorboard x", "mlflow", "trackio"):
                told(source, "loss", loss)
            step += 1
        with torch.inference_mode():
            losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in held_out]
            validation = sum(losses) / len(losses)
            run.log({"val/loss": validation, "nothing": float("nan")}, step=None)
            held_out_writer.add_scalar(tag="loss", scalar_value=validation, global_step=step)
            train_writer.add_scalars("both", {"a": step, "b": validation}, step)
        mlflow.log_metrics({"validation": validation.item()}, step=step)
        for source, name in (("wandb", "val/loss"), ("tensorboard held_out", "loss"), ("tensorboard", "both/b")):
            told(source, name, validation)
        told("tensorboard", "both/a", step)
        told("mlflow", "validation", validation)


def events(folder: Path) -> Any:
    """Of each folder of event files, its scalars, without times."""
    found = {}
    for place in sorted({path.parent for path in folder.rglob("events.out.tfevents*")}):
        files = EventAccumulator(str(place), {"scalars": 0}).Reload()
        tags = {tag: [(one.step, one.value) for one in files.Scalars(tag)] for tag in files.Tags()["scalars"]}
        found[str(place.relative_to(folder))] = tags
    return found


def history(folder: Path) -> Any:
    """The rows of W&B's offline file, without times."""
    (path,) = folder.rglob("run-*.wandb")
    data, position, record, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32_768 - position % 32_768 < 7:  # the end of a block is filled up
            position += 32_768 - position % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b""
            items = {item.key or "/".join(item.nested_key): item.value_json for item in parsed.history.item}
            if items:
                found.append({name: text for name, text in items.items() if name not in ("_timestamp", "_runtime")})
    return found


def mlflow_files(folder: Path) -> Any:
    """The metrics of MLflow's files: value and step of each line."""
    found = {}
    for path in sorted((folder / "mlflow").glob("*/*/metrics/*")):
        found[path.name] = [line.split()[1:3] for line in path.read_text().splitlines()]
    return found


def rows() -> Any:
    """What Trackio's database holds."""
    (path,) = Path(os.environ["TRACKIO_DIR"]).glob("p*.db")
    with sqlite3.connect(path) as database:
        return [list(row) for row in database.execute("select step, cast(metrics as text) from metrics order by step")]


if __name__ == "__main__":
    with PLACE:
        main()
