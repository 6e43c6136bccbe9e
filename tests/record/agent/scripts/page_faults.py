"""Each step maps a number of pages of its own; argument: what cuts the steps (loader, optimizer, marks)."""

import mmap
import sys

import torch
from plain_sgd import PlainSGD

import stepscope

KIND, STEPS, UNIT = sys.argv[1], 30, 2000
model = torch.nn.Linear(4, 2)
optimizer = PlainSGD(model.parameters(), lr=0.01)


def touch(pages: int) -> None:
    with mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(memory, "madvise") and hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:: mmap.PAGESIZE] = b"x" * pages


def step(number: int, batch: torch.Tensor) -> None:
    touch(UNIT * (number % 3 + 1))
    loss = model(batch).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if KIND == "marks":
        stepscope.step()


data = torch.randn(STEPS * 8, 4)
if KIND == "loader":
    for number, (batch,) in enumerate(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)):
        step(number, batch)
else:
    for number in range(STEPS):
        step(number, data[number * 8 : number * 8 + 8])
