"""A small convolutional network on images that are in memory: all of its time is convolution and its gradient."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 96, 3, stride=2, padding=1), nn.BatchNorm2d(96), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(96, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


def main() -> None:
    options, watch = parse(steps=200), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.randn(8 * BATCH, 3, 40, 40)
    labels = torch.randint(0, 10, (len(images),))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in watch.steps(options.steps):
        with watch.step(model):
            rows = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
