"""ignite's supervised trainer with a running average of the loss, data in memory."""

from __future__ import annotations

import torch
from common import Watch, parse
from ignite.engine import create_supervised_trainer
from ignite.metrics import RunningAverage
from perceptron import BATCH, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    options, watch = parse(steps=80), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch.after(optimizer)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    RunningAverage(output_transform=float).attach(trainer, "loss")
    trainer.run(DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True), max_epochs=1)
    watch.report()


if __name__ == "__main__":
    main()
