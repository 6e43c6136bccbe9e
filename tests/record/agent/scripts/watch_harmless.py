"""Trains three models, copying and pickling them in every step; prints hashes, calls that wait, what is left over."""

import copy
import gc
import hashlib
import io
import json
import pickle
import sys

import torch
from torch import nn
from torch.nn.modules import module as modules

torch.manual_seed(0)
waits = {"item": 0, "cpu": 0, "hooks": 0}


def counting(name):
    original = getattr(torch.Tensor, name)

    def call(self, *args, **kwargs):
        waits[name] += 1
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, call)


counting("item")
counting("cpu")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.end = nn.GRU(6, 10, batch_first=True), nn.Linear(10, 6)

    def forward(self, x):
        return self.end(nn.functional.dropout(self.cells(x)[0], 0.2, self.training))


def models():
    mlp = nn.Sequential(nn.Linear(6, 20), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(20, 6))
    yield mlp, torch.optim.Adam(mlp.parameters(), lr=0.01), (4, 6)
    net = nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3, padding=1))
    yield net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), (4, 6, 5)
    cells = Recurrent()
    yield cells, torch.optim.Adadelta(cells.parameters()), (4, 3, 6)


def whole():
    for model, optimizer, shape in models():
        digest = hashlib.sha256()
        batches = (torch.randn(shape) for _ in range(120))
        if not isinstance(optimizer, torch.optim.SGD):  # without a loader, a step ends inside the optimizer's hooks
            batches = torch.utils.data.DataLoader(list(batches), batch_size=None)
        for x in batches:
            out = model(x)
            copy.deepcopy(model)
            pickle.dumps(model)
            loss = (out - x).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().numpy().tobytes())
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        yield digest.hexdigest()


def compiled():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fast = torch.compile(model, backend="eager")
    for _ in range(100):
        x = torch.randn(4, 6)
        (fast(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    yield hashlib.sha256(buffer.getvalue()).hexdigest()
    yield torch._dynamo.utils.counters["stats"]["unique_graphs"]


told = list(compiled() if "--compiled" in sys.argv else whole())
gc.collect()
waits["tensors"] = sum(isinstance(one, torch.Tensor) and one.numel() >= 16 for one in gc.get_objects())
waits["hooks"] = len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)
print(json.dumps([told, waits]))
