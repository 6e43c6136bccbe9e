"""`stepscope.profile` around a compiled loop, twice; prints what Dynamo holds of ours before, during and after."""

import json
import logging
import sys

import torch
import torch._dynamo.utils as dynamo

import stepscope

LOGGER = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")


def state():
    hooks = getattr(dynamo, "get_hook_for_recompile_user_context", lambda: None)()
    return [len(hooks or ()), LOGGER.level, len(LOGGER.filters), LOGGER.propagate, dynamo._compilation_metrics.maxlen]


def forward(x, scale):
    return (x * parameter * scale).sum()


parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.01)
compiled = torch.compile(forward, backend="eager", dynamic=False)
compiled(torch.ones(4), 9.0)
states, folders = [state()], []
for turn in range(2):
    with stepscope.profile(out=sys.argv[1] + str(turn)) as prof:
        states.append(state())
        for step in range(4):
            compiled(torch.ones(4), 9.0 - 2 * turn - step // 2)
            optimizer.step()
            prof.step()
    states.append(state())
    folders.append(prof.run_folder)
print(json.dumps({"states": states, "folders": folders}))
