"""ignite's Engine with a training function of one's own and an evaluator after each of two epochs."""

from __future__ import annotations

from typing import Any

import torch
from control import Control, Vectors, network
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


def main() -> None:
    torch.manual_seed(0)
    control, model = Control(), network()
    optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    held_out = DataLoader(Vectors(10 * BATCH), batch_size=BATCH)

    def update(_: Engine, batch: Any) -> float:
        model.train()
        inputs, labels = batch
        control.batch(len(labels))
        optimizer.zero_grad()
        with control.phase("forward"):
            loss = F.cross_entropy(model(inputs), labels)
        control.loss(loss)
        with control.phase("backward"):
            loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})

    @evaluator.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine) -> None:
        control.evaluated(len(engine.state.batch[1]))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(_: Engine) -> None:
        with control.evaluation():
            evaluator.run(held_out)
        print(f"accuracy {evaluator.state.metrics['accuracy']:.4f}")

    trainer.run(DataLoader(Vectors(30 * BATCH, control), batch_size=BATCH, shuffle=True), max_epochs=2)
    control.tell(loss=trainer.state.output, framework_step=trainer.state.iteration)


if __name__ == "__main__":
    main()
