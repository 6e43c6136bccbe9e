"""skorch's classifier, whose optimizer takes a closure, on vectors in memory."""

from __future__ import annotations

import torch
from common import Watch, parse
from perceptron import BATCH, Vectors, network
from skorch import NeuralNetClassifier
from torch import nn


def main() -> None:
    options, watch = parse(steps=80), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = NeuralNetClassifier(
        network(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.01,
        max_epochs=1,
        batch_size=BATCH,
        train_split=None,
        verbose=0,
    )
    net.initialize()
    watch.after(net.optimizer_)
    net.partial_fit(Vectors(options.steps * BATCH), None)
    watch.report()


if __name__ == "__main__":
    main()
