"""Time by module of traces that PyTorch wrote: against what a model really called, and against other tools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope import api
from stepscope.analyze.views import modules
from tests.analyze import shared_traces
from tests.analyze.views.module_traces import US, base_of

H100 = "tracelens/h100/"
SCRIPT = """\
import json, sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


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


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


running, called, handles = [], [], []
for module in net.modules():
    def enter(module, _):
        running.append(module)
        called.append([[type(outer).__name__, id(outer)] for outer in running])
    handles.append(module.register_forward_pre_hook(enter))
    handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
step()
for handle in handles:
    handle.remove()
json.dump(called, open(sys.argv[1], "w"))
with profile(
    activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True,
    schedule=schedule(wait=0, warmup=1, active=3),
    on_trace_ready=lambda done: done.export_chrome_trace(sys.argv[2]),
) as profiler:
    for _ in range(4):
        step()
        profiler.step()
"""


@pytest.mark.process
@pytest.mark.torch
def test_the_tree_is_the_models_own(tmp_path: Path) -> None:
    """The paths a model's hooks see, as often as they see them, and nothing else."""
    called, trace = tmp_path / "called.json", tmp_path / "worker0.pt.trace.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, called, trace], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    found = modules.tree(base_of(api.open_run(trace, options=api.ReadOptions(cache=False)).tables))
    assert found is not None
    assert found.steps == 3
    expected: Counter[tuple[tuple[str, int], ...]] = Counter()
    for way in json.loads(called.read_text()):
        expected[tuple(map(tuple, way))] += 1
    # instances are numbered by the profiler in its own way: one number for one instance, by class
    seen: dict[tuple[str, ...], int] = {}
    for node in found.nodes:
        seen[tuple(node.path.split("/"))] = node.calls
        assert node.calls_per_step == node.calls / 3
    classes = Counter({tuple(name.rsplit("_", 1)[0] for name in way): 0 for way in seen})
    for way, calls in seen.items():
        classes[tuple(name.rsplit("_", 1)[0] for name in way)] += calls
    wanted: Counter[tuple[str, ...]] = Counter()
    for objects, calls in expected.items():
        wanted[tuple(name for name, _ in objects)] += calls * 3
    assert classes == wanted
    assert len(seen) == len(expected)
    assert len({way[-1] for way in seen}) == len({objects[-1] for objects in expected})
    nodes = {node.path: node for node in found.nodes}
    for node in found.nodes:
        inside = [other for path, other in nodes.items() if path.rpartition("/")[0] == node.path]
        assert node.host_total_ns >= sum(other.host_total_ns for other in inside)
        assert node.host_self_ns > 0
        assert node.device_total_ns is None
    linear = [node for node in found.nodes if node.module == "Linear"]
    assert all((node.backward_host_self_ns or 0) > 0 and node.operators == node.calls for node in linear)
    assert found.backward_linked_share is not None
    assert 0.5 < found.backward_linked_share < 1  # sums of gradients belong to no module


def one_of(beginning: str) -> str:
    names = [name for name in shared_traces.files() if name.startswith(beginning)]
    assert len(names) == 1, names
    return names[0]


# from torch-tb-profiler 0.4.3 on the same files: calls, operators called directly, µs on the host
PLUGIN = {
    "gaunernst_bert": {
        "BertLMHeadModel_0": (1, 0, 4216.941),
        "BertModel_0": (1, 3, 3910.787),
        "BertEmbeddings_0": (1, 4, 426.236),
        "BertEncoder_0": (1, 0, 3230.337),
        "BertLMPredictionHead_0": (1, 0, 189.993),
        "Linear_25": (1, 1, 47.651),
    },
}


@shared_traces.needs_traces
@pytest.mark.parametrize("name", ["gaunernst_bert", "Qwen_Qwen1.5", "facebook_timesformer"])
def test_modules_of_real_traces_take_all_that_they_launched(name: str) -> None:
    base = base_of(shared_traces.run_of(one_of(H100 + name)).tables)
    found = modules.tree(base)
    assert found is not None
    (span,) = base.spans
    outside = 0
    for event, launch in span.links.select("event", "launch").iter_rows():
        row = launch
        while row >= 0 and not span.names.values[span.names.codes[row]].startswith("nn.Module: "):
            row = int(span.parent[row])
        outside += int(span.duration_ns[event]) if row < 0 else 0
    assert found.unattributed_device_ns == outside
    parts = sum((node.device_self_ns or 0) + (node.backward_device_self_ns or 0) for node in found.nodes)
    assert parts + found.unattributed_device_ns == found.device_ns
    for above, node in pairwise(found.nodes):
        assert node.depth <= above.depth + 1
    expected = PLUGIN.get(name, {})
    known = {node.name: node for node in found.nodes}
    for instance, (calls, operators, host_us) in expected.items():
        node = known[instance]
        assert (node.calls, node.operators) == (calls, operators)
        assert node.host_total_ns == pytest.approx(host_us * US, abs=US)
