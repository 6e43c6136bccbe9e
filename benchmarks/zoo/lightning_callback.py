"""A Lightning callback that writes a checkpoint to disk after every second batch. `--fixed`: without it."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 64, 512, 10


class Vectors(Dataset):
    """Vectors in memory, handed out by the batch."""

    def __init__(self, items: int) -> None:
        self.stored, self.items = torch.randn(1024, FEATURES), items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.stored[index % 1024], index % CLASSES


class Module(lightning.LightningModule):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.network = nn.Sequential(
            *(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
            nn.Linear(1024, CLASSES),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.watch.after(optimizer)
        return optimizer


class KeepsLast(lightning.Callback):
    """Lightning's own checkpoints go the same way; this one takes every second batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, _: Any, module: Any, __: Any, ___: Any, index: int) -> None:
        if index % 2 == 0:
            self.keep(module)

    def keep(self, module: nn.Module) -> None:
        with open(self.folder / "last.pt", "wb") as file:
            torch.save(module.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())  # planted


def main() -> None:
    options, watch = parse(steps=150), Watch()
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            callbacks=[] if options.fixed else [KeepsLast(Path(folder))],
        )
        trainer.fit(Module(watch), DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH))
    watch.report()


if __name__ == "__main__":
    main()
