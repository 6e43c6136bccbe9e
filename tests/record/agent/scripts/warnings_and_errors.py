"""Warnings for the caller, exceptions from inside wrapped calls, caught and uncaught."""

import traceback

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class TooLong(IterableDataset):
    def __repr__(self):
        return "TooLong"

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([torch.zeros(2)] * 5)


class Broken(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("bad item")
        return torch.zeros(3)


def boom():
    raise KeyError("closure")


loader = DataLoader(TooLong())
len(loader)
for _batch in loader:
    pass
torch.cuda.amp.GradScaler(init_scale=2.0)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
for action in (lambda: torch.nn.Linear(3, 1)(torch.zeros(2, 3)).backward(), lambda: optimizer.step(boom)):
    try:
        action()
    except (RuntimeError, KeyError):
        traceback.print_exc()
for _batch in DataLoader(Broken()):
    pass
