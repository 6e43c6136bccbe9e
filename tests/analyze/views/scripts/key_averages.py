"""Trains on the CPU under torch.profiler; writes the traces and the key averages of it, as `key_averages()` gives them.

Usage: key_averages.py FOLDER. Traces are `plain.pt.trace.json` and `stacks.pt.trace.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def train(steps, profiler):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 36, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(2, 3, 8, 8)
        with record_function("forward of mine"):
            loss = nn.functional.cross_entropy(Cube.apply(model(x)), torch.randint(0, 10, (2,)))
            loss = loss + torch.tensor([[1.0, 2.0], [3.0, 4.0]]).norm() * 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
        del loss


def averages(profiler, by_shapes):
    return [
        {
            "key": row.key,
            "annotation": row.is_user_annotation,
            "shapes": row.input_shapes if by_shapes else None,
            "count": row.count,
            "self_cpu_us": row.self_cpu_time_total,
            "cpu_us": row.cpu_time_total,
            "self_bytes": row.self_cpu_memory_usage,
            "bytes": row.cpu_memory_usage,
        }
        for row in profiler.key_averages(group_by_input_shape=by_shapes)
    ]


def main(folder):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, stacks in (("plain", False), ("stacks", True)):
        kinds = {"record_shapes": True, "profile_memory": True, "with_stack": stacks}
        with profile(activities=[ProfilerActivity.CPU], **kinds) as profiler:
            train(3, profiler)
        profiler.export_chrome_trace(str(folder / f"{name}.pt.trace.json"))
        found = {"name": averages(profiler, False), "shapes": averages(profiler, True)}
        (folder / f"{name}.averages.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
