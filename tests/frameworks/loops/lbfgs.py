"""L-BFGS, which calls its closure several times for each step: on the whole data set, or `--loader`."""

from __future__ import annotations

import argparse

import torch
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, EPOCHS = 128, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    control = Control(loader=options.loader, evaluation_seen=options.loader)
    model = network(width=256)
    optimizer = control.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=5))
    data = Vectors(8 * BATCH, control if options.loader else None)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with control.phase("forward"):
                loss = F.cross_entropy(model(inputs), labels)
            if not evaluated:  # what it evaluates again is no other loss
                control.loss(loss)
            evaluated.append(loss.item())
            with control.phase("backward"):
                loss.backward()
            return loss

        evaluated: list[float] = []
        control.batch(len(labels))
        return optimizer.step(closure).item()

    if options.loader:
        for _ in range(EPOCHS):
            for inputs, labels in DataLoader(data, batch_size=BATCH, shuffle=True):
                loss = step(inputs, labels)
    else:
        for index in range(8 * EPOCHS):
            loss = step(data.inputs[:256], data.labels[:256])
            if index % 10 == 0:
                with control.evaluation(), torch.no_grad():
                    print("loss", F.cross_entropy(model(data.inputs[256:]), data.labels[256:]).item())
    control.tell(loss=loss)


if __name__ == "__main__":
    main()
