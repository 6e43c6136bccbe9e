"""Lightning's automatic optimisation with validation and its sanity check: `[--accumulation N]`."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning
import torch
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


class Module(lightning.LightningModule):
    def __init__(self, control: Control) -> None:
        super().__init__()
        self.network = network()
        self.control = control

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.control.batch(len(batch[1]))
        with self.control.phase("forward"):
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss)
        self.control.loss(loss, self.trainer.accumulate_grad_batches)
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with self.control.phase("backward"):
            super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Any, _: int) -> None:
        self.control.evaluated(len(batch[1]))
        self.log("validation_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        with self.control.evaluation():
            pass  # what follows is training again

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.control.optimizer(torch.optim.AdamW(self.parameters(), lr=1e-4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    control = Control()
    batches = 20 * options.accumulation + (2 if options.accumulation > 2 else 0)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=options.accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    train = DataLoader(Vectors(batches * BATCH, control), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(control), train, DataLoader(Vectors(10 * BATCH), batch_size=BATCH))
    control.tell(loss=trainer.callback_metrics["loss"].item(), framework_step=trainer.global_step)


if __name__ == "__main__":
    main()
