"""A small training loop; argv[1] says what happens in it. The agent is started as the launcher would."""

import atexit
import ctypes
import os
import sys

import torch
from plain_sgd import PlainSGD

from stepscope.record.agent import core

core.start()
what = sys.argv[1]
length = 6 if what == "short" else 14
data = torch.utils.data.TensorDataset(torch.randn(length * 4, 8), torch.randn(length * 4, 2))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = PlainSGD(model.parameters(), lr=0.01)
for index, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if what == "raise" and index == 5:
        raise SystemExit(3)
if what == "fork":
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        atexit.register(print, "child's own exit handler")
        ctypes.CDLL(None).puts(b"child's C stream")
        sys.exit(4)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("done")
