"""A data-parallel loop with gloo whose last rank takes longer over its samples; under torchrun or srun."""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from plain_sgd import PlainSGD
from torch import nn


def prepare(features: torch.Tensor, busy_s: float) -> torch.Tensor:
    """Work on the processor for `busy_s` seconds."""
    end = time.perf_counter() + busy_s
    while time.perf_counter() < end:
        features = features.sin().cos()
    return features


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--busy", type=float, default=0.0, help="seconds a step of the last rank")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    for _ in range(args.steps):
        features = torch.randn(16, 16)
        if args.busy and rank == size - 1:
            features = prepare(features, args.busy)
        loss = nn.functional.mse_loss(model(features), features)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # by hand: DistributedDataParallel imports the compiler
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    print(f"rank {rank} of {size} done", flush=True)
    # gloo's threads outlive a group that a model still holds, and now and then a process then aborts at its exit
    loss = model = optimizer = None
    gc.collect()
    dist.barrier()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
