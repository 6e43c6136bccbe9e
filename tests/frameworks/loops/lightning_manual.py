"""Lightning's manual optimisation: a GAN whose generator is trained in every second iteration."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from control import FEATURES, Control, Vectors, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, LATENT = 256, 64  # of 64, `toggle_optimizer` between forward and backward is 5 % of a step


class Gan(lightning.LightningModule):
    def __init__(self, control: Control) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(LATENT, FEATURES, 512), network(FEATURES, 1, 512)
        self.control = control
        self.last = 0.0

    def training_step(self, batch: Any, index: int) -> None:
        of_generator, of_critic = self.optimizers()
        real = batch[0]
        self.control.batch(len(real))
        with self.control.phase("forward"):
            fake = self.generator(torch.randn(len(real), LATENT)).detach()
            loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        self.control.loss(loss)
        self._update(of_critic, loss)
        if index % 2:
            with self.control.phase("forward"):
                loss = F.softplus(-self.critic(self.generator(torch.randn(len(real), LATENT)))).mean()
            self._update(of_generator, loss)
        self.last = loss.item()
        self.control.step()

    def _update(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        with self.control.phase("backward"):
            self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [self._optimizer(self.generator), self._optimizer(self.critic)]

    def _optimizer(self, part: nn.Module) -> torch.optim.Optimizer:
        return self.control.optimizer(torch.optim.Adam(part.parameters(), lr=1e-4), cuts=False)


def main() -> None:
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    control = Control()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = Gan(control)
    trainer.fit(module, DataLoader(Vectors(20 * BATCH, control), batch_size=BATCH, shuffle=True))
    control.tell(loss=module.last, framework_step=trainer.global_step)


if __name__ == "__main__":
    main()
