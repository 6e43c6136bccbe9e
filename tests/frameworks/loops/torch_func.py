"""Gradients by `torch.func` and parameters replaced by new ones: no backward call, no optimizer; `[--loader]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
import torch._dynamo  # torch.func imports it when it is first used, which is no phase of a step
from control import Control, Vectors, network
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, EPOCHS = 256, 2  # of 64, what functorch does around the pass and counts by hand as backward is 6 % of a step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    control = Control(loader=options.loader, evaluation_seen=options.loader)
    model = network()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    data = Vectors(25 * BATCH, control if options.loader else None)

    def loss_of(values: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with control.phase("forward"):
            return F.cross_entropy(functional_call(model, values, (inputs,)), labels)

    for _ in range(EPOCHS):
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]] = DataLoader(data, batch_size=BATCH, shuffle=True)
        if not options.loader:
            batches = zip(data.inputs.split(BATCH), data.labels.split(BATCH), strict=True)
        for inputs, labels in batches:
            control.batch(len(labels))
            with control.phase("backward"):
                gradients, loss = grad_and_value(loss_of)(parameters, inputs, labels)
            with control.phase("other"):  # an update written by hand is nobody's phase
                parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
            control.step()
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
