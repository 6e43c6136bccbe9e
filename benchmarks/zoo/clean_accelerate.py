"""A loop of one's own with Accelerate: a schedule, clipped gradients, data in memory."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import Watch, parse
from perceptron import BATCH, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    options, watch = parse(steps=80), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator, model = Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    loader = DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for inputs, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    watch.report()


if __name__ == "__main__":
    main()
