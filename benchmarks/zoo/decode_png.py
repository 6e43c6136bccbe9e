"""A small CNN on PNG files that are opened and decoded in the training process. `--fixed`: decoded once, beforehand."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Watch, parse
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, PICTURES, SIZE, CLASSES = 32, 256, 96, 4


def write_pictures(folder: Path) -> list[Path]:
    """Smooth colours with some noise, so that decoding has something to do."""
    generator = np.random.default_rng(0)
    ramp = np.linspace(0, 200, SIZE)
    paths = []
    for number in range(PICTURES):
        shade = np.add.outer(ramp * (number % CLASSES) / CLASSES, ramp)[..., None] / 2
        pixels = np.clip(shade + generator.normal(20, 12, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
        paths.append(folder / f"{number:04}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


class Pictures(Dataset):
    """`steps * BATCH` items drawn from the files."""

    def __init__(self, paths: list[Path], items: int, *, cached: bool) -> None:
        self.paths, self.items = paths, items
        self.cache = [self.decode(path) for path in paths] if cached else None

    def __len__(self) -> int:
        return self.items

    def decode(self, path: Path) -> torch.Tensor:
        pixels = np.asarray(Image.open(path).convert("RGB"))  # planted
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index % len(self.paths)
        image = self.decode(self.paths[number]) if self.cache is None else self.cache[number]
        left, top = random.randrange(32), random.randrange(32)
        return image[:, top : top + 64, left : left + 64].float() / 255, number % CLASSES


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=180), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pictures = Pictures(write_pictures(Path(folder)), options.steps * BATCH, cached=options.fixed)
        model = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
            *(nn.Flatten(), nn.Linear(16 * 4 * 4, CLASSES)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for images, labels in DataLoader(pictures, batch_size=BATCH, shuffle=True):
            with watch.step(model):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
