"""A tiny training loop whose result depends on nothing but its arguments."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from plain_sgd import PlainSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(steps: int, pause_s: float, tell: bool) -> float:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    done = 0
    while done < steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if pause_s:
                time.sleep(pause_s)
            if tell:
                print(f"step {done}: {loss.item():.9f}", flush=True)
            if done == steps:
                break
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep in each step")
    parser.add_argument("--tell", action="store_true")
    args = parser.parse_args()
    print(f"result {train(args.steps, args.pause, args.tell):.12f}", flush=True)
    print("a line for stderr", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
