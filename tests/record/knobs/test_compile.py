"""compile, compile.mode and compile.dynamic on real processes: whether compiled frames run, and whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.record.agent.processes import line_of

from .recorded import recorded

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """
import json, pickle, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x):
        return self.inner(x).tanh()

graphs = []

def counting(graph, _inputs):
    graphs.append(graph)
    return graph.forward

torch.manual_seed(0)
model = Net()
net = model
if sys.argv[1] == "own":
    net = torch.compile(model, backend=counting)
elif sys.argv[1] == "inductor":
    net = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(5):
    loss = net(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
pickle.loads(pickle.dumps(model))(torch.ones(4, 8))
counters = sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else None
config = net.get_compiler_config() if hasattr(net, "get_compiler_config") else {}
print(json.dumps({
    "graphs": len(graphs),
    "frames": counters["frames"]["ok"] if counters else 0,
    "losses": losses,
    "keys": list(model.state_dict()),
    "wrapped": type(net).__name__,
    "config": {name: str(value) for name, value in (config or {}).items()},
}))
"""


def test_the_model_is_compiled_in_place_after_its_first_step(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "compile=true", "compile.dynamic=false", arguments=("plain",))
    seen = done.printed()
    assert (seen["frames"] > 0, seen["wrapped"], seen["keys"]) == (True, "Net", ["inner.weight", "inner.bias"])
    row = done.knob("compile")
    assert row["applied"]
    assert row["observed"].startswith("Net compiled in place: ")
    assert row["line"] == line_of(SCRIPT, "loss = net(")
    assert done.knob("compile.dynamic")["applied"]
    assert seen["losses"] == sorted(seen["losses"], reverse=True)  # it learns as before


@pytest.mark.thorough
def test_what_the_script_compiles_gets_the_mode(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "compile.mode=reduce-overhead", arguments=("inductor",))
    seen = done.printed()
    assert seen["config"]["triton.cudagraphs"] == "True"
    assert seen["frames"] > 0
    row = done.knob("compile.mode")
    assert row["applied"]
    assert row["line"] == line_of(SCRIPT, "net = torch.compile(model)")


def test_what_the_script_compiles_runs_as_it_is_written(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "compile=false", arguments=("own",))
    seen = done.printed()
    assert (seen["graphs"], seen["frames"], seen["wrapped"]) == (0, 0, "OptimizedModule")
    row = done.knob("compile")
    assert row["applied"]
    assert row["line"] == line_of(SCRIPT, "net = torch.compile(model, backend=counting)")


@pytest.mark.thorough
def test_a_script_that_compiles_is_not_compiled_again(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "compile=true", "compile.mode=max-autotune", arguments=("own",))
    assert done.printed()["graphs"] == 1
    for name in ("compile", "compile.mode"):
        row = done.knob(name)
        assert not row["applied"]
        assert "backend" in row["reason"]


def test_a_compiler_that_fails_ends_no_training(tmp_path: Path) -> None:
    environ = {"CXX": "/bin/false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = recorded(tmp_path, SCRIPT, "compile=default", arguments=("plain",), environ=environ)
    assert done.status == 0
    assert len(done.printed()["losses"]) == 5
    row = done.knob("compile")
    assert (row["applied"], row["reason"]) == (False, "Dynamo compiled no frame")
