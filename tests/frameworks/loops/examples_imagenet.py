"""The loop of pytorch/examples' imagenet: two loader workers, meters with `.item()`, validation and a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from control import Control, Vectors
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 16


class Pictures(Vectors):
    def item(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 48, 48, generator=torch.Generator().manual_seed(index)), index % 10


class Loader(DataLoader):
    """What the loop waits for is timed where it asks: workers make the batches."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        batches = super().__iter__()
        for _ in range(len(self)):
            with control.phase("data"):
                batch = next(batches)
            yield batch
        next(batches, None)  # the end, at which workers are stopped, is of no step


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count


def network() -> nn.Module:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*layer(3, 64), *layer(64, 128), *layer(128, 256)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def train(loader: DataLoader, model: nn.Module, optimizer: torch.optim.Optimizer) -> Meter:
    losses, top1 = Meter(), Meter()
    model.train()
    for images, target in loader:
        control.batch(len(target))
        with control.phase("forward"):
            output = model(images)
            loss = F.cross_entropy(output, target)
        top1.update(output.argmax(1).eq(target).float().mean().item(), len(target))
        losses.update(loss.item(), len(target))
        optimizer.zero_grad()
        control.loss(loss)
        with control.phase("backward"):
            loss.backward()
        optimizer.step()
    return losses


def validate(loader: DataLoader, model: nn.Module) -> float:
    top1 = Meter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            top1.update(model(images).argmax(1).eq(target).float().mean().item(), len(target))
            control.evaluated(len(target))
    return top1.total / top1.count


control = Control()


def main() -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = control.optimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4))
    train_loader = Loader(Pictures(25 * BATCH), batch_size=BATCH, shuffle=True, num_workers=2)
    validation_loader = Loader(Pictures(6 * BATCH), batch_size=BATCH, num_workers=2)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(2):
            losses = train(train_loader, model, optimizer)
            with control.evaluation():
                print(f"epoch {epoch} accuracy {validate(validation_loader, model):.4f}")
                torch.save({"epoch": epoch, "state_dict": model.state_dict()}, Path(folder) / "checkpoint.pth.tar")
    control.tell(loss=losses.total / losses.count)


if __name__ == "__main__":
    main()
