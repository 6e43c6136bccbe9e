"""A loop of one's own with Accelerate: accumulation over four micro-batches, two epochs, each with an evaluation."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


def main() -> None:
    set_seed(0)
    control = Control()
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = network()
    optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    train = DataLoader(Vectors(42 * BATCH, control), batch_size=BATCH, shuffle=True)  # the epoch's last update has two
    held_out = DataLoader(Vectors(10 * BATCH), batch_size=BATCH)
    model, optimizer, train, held_out, schedule = accelerator.prepare(model, optimizer, train, held_out, schedule)
    for epoch in range(2):
        model.train()
        for inputs, labels in train:
            with accelerator.accumulate(model):
                control.batch(len(labels))
                with control.phase("forward"):
                    loss = F.cross_entropy(model(inputs), labels)
                control.loss(loss, 4)
                with control.phase("backward"):
                    accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with control.evaluation(), torch.no_grad():
            total = 0.0
            for inputs, labels in held_out:
                total += F.cross_entropy(model(inputs), labels).item()
                control.evaluated(len(labels))
        accelerator.print(f"epoch {epoch} evaluation {total:.6f}")
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
