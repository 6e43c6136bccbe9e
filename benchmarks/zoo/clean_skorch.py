"""skorch's classifier, whose optimizer takes a closure, on arrays in memory."""

from __future__ import annotations

import torch
from common import Watch, parse
from skorch import NeuralNetClassifier
from torch import nn

BATCH, FEATURES, CLASSES = 128, 512, 10


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
        *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)),
    )


def main() -> None:
    options, watch = parse(steps=150), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    items = options.steps * BATCH
    inputs, labels = torch.randn(items, FEATURES), torch.randint(0, CLASSES, (items,))
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
    net.partial_fit(inputs.numpy(), labels.numpy())
    watch.report()


if __name__ == "__main__":
    main()
