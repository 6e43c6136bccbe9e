"""Lines of real recordings against the truth: small training scripts run once under torch's profiler, and once with
each operator asked for the line that called it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from stepscope import api
from stepscope.engine import attribution

STEPS = 10
HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
net, tanh, third = nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid()
act, sine = F.relu, (lambda x: x.sin())
opt = torch.optim.SGD(net.parameters(), 0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
"""
LOOP = """
for i in range(16):
    body(torch.ones(2, 4), i).sum().backward()
    opt.step()
"""
# With each how many of its lines at least are to be known; none may be named for another.
SCRIPTS = {
    "module_level": (
        "for i in range(16):\n    x = torch.ones(2, 4)\n    opt.zero_grad()\n    y = net(x)\n    z = third(tanh(y))\n"
        "    z.abs().mean().backward()\n    nn.utils.clip_grad_norm_(net.parameters(), 1)\n    opt.step()\n"
        "    sched.step()\n",
        4,
    ),
    "twice_in_a_loop": (
        "for i in range(16):\n    y = net(torch.ones(2, 4))\n    a = tanh(y)\n    b = tanh(y.detach())\n"
        "    c = third(b)\n    (a + c).sum().backward()\n    opt.step()\n",
        4,
    ),
    # a function among the modules: neither is told by its turn
    "callables": (
        "def body(x, i, first=sine, second=net):\n    for _ in range(2):\n        x = first(x)\n        x = second(x)\n"
        "    for m in (net, tanh):\n        x = m(x)\n        x = first(x)\n    return x\n" + LOOP,
        1,
    ),
    "aliases": (
        "def body(x, i):\n    y = act(net(x))\n    z = F.relu(\n        y)\n"
        "    return act(z) if i % 2 else F.relu(\n        z)\n" + LOOP,
        1,
    ),
    "branches": (
        "def body(x, i):\n    if i > 99:\n        return net(x)\n    if i % 2:\n        x = tanh(x)\n    else:\n"
        "        x = net(x)\n"
        "    for _ in range(3):\n        x = third(x)\n    return net(\n        x) if (x > 0).all() else tanh(x)\n"
        + LOOP,
        2,
    ),
    "hidden": (
        "class Net(nn.Module):\n    @property\n    def part(self):\n        return net\n    def forward(self, x, i):\n"
        "        x = self.part(x)\n        x = self.other(act(x))\n        return list(map(tanh, [x]))[0]\n"
        "body = Net(); body.other = third\n" + LOOP,
        0,
    ),
    "several_lines": (
        "def body(x, i):\n    out = {'a': tanh(\n        net(\n            x)),\n        'b': third(x)}\n"
        "    if (n := out['a'].norm()) > 0:\n        out['b'] = out['b'] / n\n    q, r = torch.linalg.qr(out['a'].T)\n"
        "    rows = [third(v)\n        for v in r]\n"
        "    return torch.stack(rows).sum() + (out['b'] @ q).sum()\n" + LOOP,
        5,
    ),
    "one_attribute": (
        "class Bag: pass\nbag = Bag(); bag.__dict__['norm'] = third\n"
        "def body(x, i):\n    x = net(x)\n    n = x.norm()\n    x = bag.norm(x)\n    y = sine(x)\n    return y * n\n"
        + LOOP,
        3,
    ),
}
RECORD = f"""\
import json, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

class Truth(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        line, backward, frame = None, False, sys._getframe(1)
        while frame is not None:
            backward = backward or frame.f_code.co_name == "_engine_run_backward"
            if line is None and frame.f_code.co_filename == script:
                line = frame.f_lineno
            frame = frame.f_back
        rows.append((operator.name().split(".")[0], None if backward else line))
        return operator(*args, **(kwargs or {{}}))

def record(begin, end):
    count = [0]
    def stepped(*_):
        count[0] += 1
        (begin if count[0] == 3 else end if count[0] == 3 + {STEPS} else int)()
    hook = register_optimizer_step_post_hook(stepped)
    runpy.run_path(script)
    hook.remove()

for script in sys.argv[1:]:
    rows, truth = [], Truth()
    record(truth.__enter__, lambda: truth.__exit__(None, None, None))
    json.dump(rows, open(script.replace(".py", ".json"), "w"))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True)
    record(profiler.start, profiler.stop)
    profiler.export_chrome_trace(script.replace(".py", ".pt.trace.json"))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    for name, (text, _) in SCRIPTS.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    scripts = [str(folder / f"{name}.py") for name in SCRIPTS]
    done = subprocess.run([sys.executable, "-c", RECORD, *scripts], capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("name", SCRIPTS)
def test_no_line_that_is_named_is_another(recorded: Path, name: str) -> None:
    truth: dict[str, list[int | None]] = defaultdict(list)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for operator, line in json.loads((recorded / f"{name}.json").read_text()):
        truth[operator].append(line)
    options = api.ReadOptions(cache=False, keep=False, source_roots=(recorded,))
    base = api.open_run(recorded / f"{name}.pt.trace.json", options=options)._context.base
    (span,) = base.spans
    rows = np.flatnonzero(span.is_operator)
    found = attribution.trace_linked(base, span, rows)
    calls = attribution.calls(base, span, found.called)
    for at in np.lexsort((-span.duration_ns[rows], span.start_ns[rows])).tolist():
        rows_of[span.names.values[span.names.codes[rows[at]]]].append(at)
    named: dict[int, set[int | None]] = defaultdict(set)
    for operator, ats in rows_of.items():
        if len(ats) == len(truth[operator]):  # torch's own modes do not see what operators call of themselves
            for at, line in zip(ats, truth[operator], strict=True):
                if line is not None and found.place[at] >= 0:
                    origin = attribution.exact(base, int(found.place[at]), int(calls[at]))
                    if origin.exact:
                        named[line].add(origin.line)
    assert {line: {line} for line in named} == named
    assert len(named) >= SCRIPTS[name][1]
