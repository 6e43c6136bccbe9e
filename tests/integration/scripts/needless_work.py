"""Trains a small network, validates it in line, copies it and computes one layer twice, in every step."""

from __future__ import annotations

import copy
import time

import torch
from plain_sgd import PlainSGD
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SECONDS = 4.0  # of processor time: on a busy machine there are as many steps


def train() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)]
    first, last = nn.Sequential(*layers), nn.Linear(64, 8)
    model = nn.ModuleDict({"first": first, "last": last})
    model.register_buffer("bank", torch.randn(16_000_000))
    optimizer = PlainSGD(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(512, 128), torch.randint(8, (512,))
    held, held_labels = torch.randn(512, 128), torch.randint(8, (512,))
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        hidden = checkpoint(first, inputs, use_reentrant=False)
        loss = F.cross_entropy(last(hidden), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = copy.deepcopy(model)
        scores = first(held)
        (scores.argmax(1) == held_labels).float().mean().item()
        assert kept is not model


if __name__ == "__main__":
    train()
