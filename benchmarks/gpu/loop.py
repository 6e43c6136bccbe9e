"""A loop whose steps are all alike, for what recording adds: `loop.py --mode eager|graph|reduce-overhead`.

Prints one line of JSON: the median step in µs by the host's clock, the device waited for once at the end, and whether a
graph was replayed (None where the mode has none).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from turn import end_turn, have_core_alone, take_turn, warm_up


def captured(graph: torch.cuda.CUDAGraph, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The output of the model, as `graph` makes it anew of `inputs`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(inputs)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph), torch.no_grad():
        out: torch.Tensor = model(inputs)
    return out


def main() -> None:
    """Train, and say how long a step took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="eager", choices=("eager", "graph", "reduce-overhead"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    warm_up(options.device)
    take_turn()
    width = 1024 if on_gpu else 64
    model: nn.Module = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(64, width, device=options.device)
    call: Callable[[torch.Tensor], torch.Tensor] = model
    replayed: bool | None = None
    if options.mode == "reduce-overhead" and on_gpu:
        call = torch.compile(model, mode="reduce-overhead")
    graph = torch.cuda.CUDAGraph() if options.mode == "graph" and on_gpu else None
    out = inputs
    if graph is not None:
        out = captured(graph, model, inputs)
    for _ in range(3):  # compiles, on all cores, and starts autograd's thread
        call(inputs).square().mean().backward()
    have_core_alone()
    ends = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        if graph is not None:
            graph.replay()
        call(inputs).square().mean().backward()
        optimizer.step()
        ends.append(time.perf_counter())
    if on_gpu:
        torch.cuda.synchronize()
    if graph is not None:
        before = out.clone()
        inputs.mul_(2.0)
        graph.replay()
        replayed = not torch.equal(before, out)
    steps = sorted(end - begin for begin, end in pairwise(ends[5:]))
    end_turn()
    print(json.dumps({"us": steps[len(steps) // 2] * 1e6, "replayed": replayed}))


if __name__ == "__main__":
    main()
