"""skorch's classifier, which gives its optimizer a closure, with its own split for validation."""

from __future__ import annotations

from typing import Any

import torch
from control import Control, Vectors, network
from skorch import NeuralNetClassifier
from skorch.dataset import ValidSplit

BATCH = 64


class Timed(NeuralNetClassifier):
    """Counts and times what it does."""

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        result = super().initialize_optimizer(*args, **kwargs)
        control.optimizer(self.optimizer_)
        return result

    def infer(self, x: Any, **kwargs: Any) -> Any:
        with control.phase("forward"):
            return super().infer(x, **kwargs)

    def get_loss(self, *args: Any, **kwargs: Any) -> Any:
        with control.phase("forward"):
            loss = super().get_loss(*args, **kwargs)
        if self.module_.training:
            control.loss(loss)
            own = loss.backward
            loss.backward = control.timed(own, "backward")
        return loss

    def train_step_single(self, batch: Any, **kwargs: Any) -> Any:
        control.batch(len(batch[1]))
        return super().train_step_single(batch, **kwargs)

    def validation_step(self, batch: Any, **kwargs: Any) -> Any:
        control.evaluated(len(batch[1]))
        with control.evaluation():
            return super().validation_step(batch, **kwargs)


control = Control()


def main() -> None:
    torch.manual_seed(0)
    data = Vectors(40 * BATCH)
    net = Timed(
        network(),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-4,
        max_epochs=2,
        batch_size=BATCH,
        train_split=ValidSplit(4, stratified=False),
        iterator_train__collate_fn=control.timed(torch.utils.data.default_collate, "data"),
        verbose=0,
    )
    net.fit(data.inputs.numpy(), data.labels.numpy())
    control.tell(loss=net.history[-1, "train_loss"])


if __name__ == "__main__":
    main()
