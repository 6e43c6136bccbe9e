"""Data parallel training over gloo in which one rank has one slow line; under torchrun."""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from plain_sgd import PlainSGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def augment(features: torch.Tensor, busy_s: float) -> torch.Tensor:
    end = time.perf_counter() + busy_s
    while time.perf_counter() < end:
        features = features.sin().cos()
    return features


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=int, default=2, help="the rank")
    parser.add_argument("--busy", type=float, default=0.06, help="seconds a step of that rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    busy_s = args.busy if int(os.environ["RANK"]) == args.slow else 0.0
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
    optimizer = PlainSGD(model.parameters(), lr=0.01)
    data = torch.randn(args.steps * 16 * dist.get_world_size(), 64)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    for features in loader:
        loss = model(augment(features, busy_s)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # gloo's threads outlive a group that a model still holds, and now and then a process then aborts at its exit
    loss = model = optimizer = None
    gc.collect()
    dist.barrier()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
