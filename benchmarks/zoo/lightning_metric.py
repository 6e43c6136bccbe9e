"""A LightningModule that takes edit distances of its predictions in Python. `--fixed`: without that metric."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, LENGTH, SYMBOLS, WIDTH = 32, 40, 32, 128


class Sequences(Dataset):
    def __init__(self, items: int) -> None:
        self.rows = torch.randint(0, SYMBOLS, (items, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class EditDistance:
    """Mean edit distance of all pairs seen so far."""

    def __init__(self) -> None:
        self.total, self.pairs = 0, 0

    def update(self, predicted: torch.Tensor, wanted: torch.Tensor) -> None:
        for ours, theirs in zip(predicted.tolist(), wanted.tolist(), strict=True):  # planted
            row = list(range(LENGTH + 1))
            for at, symbol in enumerate(ours, 1):
                corner, row[0] = row[0], at
                for column, other in enumerate(theirs, 1):
                    kept = corner + (symbol != other)
                    corner, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, kept)
            self.total += row[-1]
            self.pairs += 1


class Module(lightning.LightningModule):
    def __init__(self, watch: Watch, metric: EditDistance | None) -> None:
        super().__init__()
        self.watch, self.metric = watch, metric
        self.network = nn.Sequential(
            nn.Embedding(SYMBOLS, WIDTH),
            *(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, SYMBOLS),
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        logits = self.network(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        if self.metric is not None:
            self.metric.update(logits.argmax(-1), batch)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.watch.after(optimizer)
        return optimizer


def main() -> None:
    options, watch = parse(steps=200), Watch()
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    metric = None if options.fixed else EditDistance()
    trainer.fit(Module(watch, metric), DataLoader(Sequences(options.steps * BATCH), batch_size=BATCH))
    watch.report()


if __name__ == "__main__":
    main()
