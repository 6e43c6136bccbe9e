"""Ultralytics' shape: loaders whose iterator never ends, made once; an epoch is so many batches, then validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


class Repeated:
    """A batch sampler that begins again for ever."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


def main() -> None:
    torch.manual_seed(0)
    control, model = Control(), network()
    optimizer = control.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    train = InfiniteDataLoader(Vectors(20 * BATCH, control), batch_size=BATCH, shuffle=True)
    held_out = InfiniteDataLoader(Vectors(12 * BATCH), batch_size=BATCH)
    for epoch in range(2):
        model.train()
        for _, (inputs, labels) in enumerate(train):
            control.batch(len(labels))
            with control.phase("forward"):
                loss = F.cross_entropy(model(inputs), labels)
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            control.clipped(norm, model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with control.evaluation(), torch.inference_mode():
            total = 0.0
            for inputs, labels in held_out:
                total += F.cross_entropy(model(inputs), labels).item()
                control.evaluated(len(labels))
        print(f"epoch {epoch} validation {total:.6f}")
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
