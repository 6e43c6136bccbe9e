"""A loop on torch_xla, `static`, `growing`, `item` or `fallback`; prints what torch_xla itself has counted, as JSON."""

import json
import sys

import torch
import torch_xla
import torch_xla.debug.metrics as met

KIND = sys.argv[1]
NAMES = ("CompileTime", "TransferFromDeviceTime")
device = torch_xla.device()
model = torch.nn.Linear(8, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = torch.zeros(0, device=device)
per_step = []
for _step in range(12):
    loss = model(torch.ones(4, 8).to(device)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if KIND == "growing":
        seen = torch.cat([seen, loss.detach().reshape(1)])
    if KIND == "fallback":
        loss = torch.special.i0e(loss.detach()) + torch.median(torch.ones(3, device=device))
    if KIND in ("growing", "item"):
        loss.item()
    torch_xla.sync()
    per_step.append([(met.metric_data(name) or (0,))[0] for name in NAMES])
totals = {name: (met.metric_data(name) or (0, 0.0))[:2] for name in NAMES}
counters = {name: met.counter_value(name) for name in met.counter_names()}
print(json.dumps({"per_step": per_step, "totals": totals, "counters": counters}))
