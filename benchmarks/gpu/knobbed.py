"""Trainings for knobs of CUDA, and the same changes by hand: `knobbed.py MODEL [--hand KNOB=VALUE …] [--steps N]`.

`--hand` makes the change that the knob of that name stands for as its documentation says to write it in a script; what
it gains, by the script's own clock, is what an experiment with the knob must find.
"""

from __future__ import annotations

import argparse
import gc
import json
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from turn import DeviceClock, end_turn, take_turn, warm_up

CPU = {"mlp": (32, 2, 8), "conv": (8, 2, 2)}  # sizes for a try


def network(model: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    """(the model, a batch of its inputs on the host)."""
    if model == "conv":
        channels, depth, batch = (256, 8, 64) if device != "cpu" else CPU[model]
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1))
        return net, torch.randn(batch, 3, 32, 32)
    width, depth, batch = (4096, 3, 2048) if device != "cpu" else CPU[model]
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*parts, nn.Linear(width, 1)), torch.randn(batch, width)


def train(model: str, device: str, steps: int, hand: str) -> float:
    """Mean ms of a step, with the knob's change by hand; "=" is none."""
    knob, _, value = hand.partition("=")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(value if knob == "matmul_precision" else "highest")
    torch.backends.cudnn.allow_tf32 = (knob, value) != ("cudnn.allow_tf32", "false")
    torch.backends.cudnn.benchmark = (knob, value) == ("cudnn.benchmark", "true")
    net, inputs = network(model, device)
    net = net.to(device)
    if knob == "memory_format":
        net = net.to(memory_format=getattr(torch, value))
    elif knob.startswith("compile"):
        net.compile(mode=None if value == "true" else value)
    more: dict[str, Any] = {"fused": True} if knob == "optimizer.fused" else {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, **more)
    scaler = torch.amp.GradScaler(device, enabled=(knob, value) == ("amp.dtype", "fp16"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(value) if knob == "amp.dtype" else None
    clock = DeviceClock(steps, device)
    batches: Any = [(inputs, torch.zeros(len(inputs), 1))] * steps
    for batch, targets in DataLoader(batches, batch_size=None, pin_memory=knob == "loader.pin_memory"):
        batch, targets = (one.to(device, non_blocking=True) for one in (batch, targets))
        optimizer.zero_grad()
        with nullcontext() if dtype is None else torch.autocast(device, dtype):
            loss = F.mse_loss(net(batch).float(), targets)
        if knob != "amp.dtype":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        clock.after_step()
    return clock.mean_ms()


def main() -> None:
    """Train; by hand with each change named, one after the other, and say as JSON what their steps took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("mlp", "conv"))
    parser.add_argument("--hand", nargs="+", metavar="KNOB=VALUE", default=["="])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    warm_up(options.device)
    take_turn()
    said = {}
    for hand in options.hand:
        said[hand] = train(options.model, options.device, options.steps, hand)
        torch._dynamo.reset()
        gc.collect()
    print(json.dumps(said))
    end_turn()


if __name__ == "__main__":
    main()
