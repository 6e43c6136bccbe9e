"""An Accelerate loop whose model normalises and projects its channels one after the other. `--fixed`: all at once."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, CHANNELS, FEATURES, CLASSES = 64, 96, 64, 10


class Signals(Dataset):
    """Signals of many channels in memory."""

    def __init__(self, items: int) -> None:
        self.stored, self.items = torch.randn(256, CHANNELS, FEATURES), items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.stored[index % 256], index % CLASSES


class Channels(nn.Module):
    """The same layer for each channel."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.at_once = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 32), at_once

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        if self.at_once:
            return F.gelu(self.layer(self.norm(signals))).flatten(1)
        return self.one_by_one(signals)

    def one_by_one(self, signals: torch.Tensor) -> torch.Tensor:
        parts = [F.gelu(self.layer(self.norm(channel))) for channel in signals.unbind(1)]  # planted
        return torch.stack(parts, 1).flatten(1)


def main() -> None:
    options, watch = parse(steps=200), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(Channels(options.fixed), nn.Linear(CHANNELS * 32, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Signals(options.steps * BATCH), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for signals, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(signals), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    watch.report()


if __name__ == "__main__":
    main()
