"""Trains in forked children: by `os.fork` and by multiprocessing, one after the other; the parent trains nothing."""

import multiprocessing
import os
import sys

import torch
from plain_sgd import PlainSGD
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def train(updates: int) -> None:
    model = torch.nn.Linear(16, 4)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(TensorDataset(torch.randn(8 * updates, 16), torch.randn(8 * updates, 4)), 8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


for updates in (3, 5):
    child = os.fork()
    if child == 0:
        train(updates)
        sys.exit(updates)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
process = multiprocessing.get_context("fork").Process(target=train, args=(7,))
process.start()
process.join()
idle = os.fork()
if idle == 0:
    os._exit(0)
os.waitpid(idle, 0)
print("status", process.exitcode)
