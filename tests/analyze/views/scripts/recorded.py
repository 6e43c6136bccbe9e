"""Trains on the CPU under torch.profiler and writes what torch tells of it: traces, key averages, memory, module calls.

Usage: recorded.py FOLDER. Traces are `plain.pt.trace.json` and `stacks.pt.trace.json`, with `key_averages()` of each.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from pathlib import Path

import torch
from torch import nn
from torch.cuda._memory_viz import _profile_to_snapshot
from torch.profiler import ProfilerActivity, profile, record_function, schedule


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


def operators(folder):
    for name, stacks in (("plain", False), ("stacks", True)):
        kinds = {"record_shapes": True, "profile_memory": True, "with_stack": stacks}
        with profile(activities=[ProfilerActivity.CPU], **kinds) as profiler:
            train(3, profiler)
        profiler.export_chrome_trace(str(folder / f"{name}.pt.trace.json"))
        found = {"name": averages(profiler, False), "shapes": averages(profiler, True)}
        (folder / f"{name}.averages.json").write_text(json.dumps(found))


def memory(folder):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
    for name in ("m.json", "m.json.gz", "m.raw.json.gz"):
        profiler.export_memory_timeline(str(folder / name), device="cpu")
    with contextlib.suppress(UnicodeDecodeError):  # names of built-in functions may lie in memory that was released
        (folder / "snapshot.pickle").write_bytes(pickle.dumps(_profile_to_snapshot(profiler)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), inner)

    def forward(self, x):
        return x + self.body(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(16, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.two(self.one(self.one(x))))


def modules(folder):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    running, called, handles = [], [], []

    def enter(module, _):
        running.append(module)
        called.append([[type(outer).__name__, id(outer)] for outer in running])

    def step():
        optimizer.zero_grad()
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    for module in net.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    step()
    for handle in handles:
        handle.remove()
    (folder / "called.json").write_text(json.dumps(called))
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        with_modules=True,
        schedule=schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / "modules.pt.trace.json")),
    ) as profiler:
        for _ in range(4):
            step()
            profiler.step()


torch.manual_seed(0)
torch.set_num_threads(1)
for write in (operators, memory, modules):
    write(Path(sys.argv[1]))
