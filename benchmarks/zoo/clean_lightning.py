"""Lightning's automatic optimisation of an MLP whose data is in memory, with a logged loss."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 128, 512, 10


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
            *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.watch.after(optimizer)
        return optimizer


def main() -> None:
    options, watch = parse(steps=150), Watch()
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
    trainer.fit(Module(watch), DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True))
    watch.report()


if __name__ == "__main__":
    main()
