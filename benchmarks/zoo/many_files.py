"""Regression on samples that lie in a file each, opened again whenever they are drawn. `--fixed`: one packed file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, SAMPLES, FEATURES = 128, 2000, 128


class Samples(Dataset):
    """`items` draws from SAMPLES rows on disk; the last column is what is to be predicted."""

    def __init__(self, folder: Path, items: int, *, packed: bool) -> None:
        self.items = items
        rows = np.random.default_rng(0).standard_normal((SAMPLES, FEATURES + 1)).astype(np.float32)
        if packed:
            np.save(folder / "all.npy", rows)
        else:
            for number, row in enumerate(rows):
                np.save(folder / f"{number}.npy", row)
        self.folder = folder
        self.packed = np.load(folder / "all.npy", mmap_mode="r") if packed else None

    def __len__(self) -> int:
        return self.items

    def row(self, number: int) -> np.ndarray:
        if self.packed is not None:
            return np.array(self.packed[number])
        return np.load(self.folder / f"{number}.npy")  # planted

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.from_numpy(self.row(index % SAMPLES))
        return values[:-1], values[-1:]


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=250), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(Path(folder), options.steps * BATCH, packed=options.fixed)
        model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for values, targets in DataLoader(samples, batch_size=BATCH, shuffle=True):
            with watch.step(model):
                loss = F.mse_loss(model(values), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
