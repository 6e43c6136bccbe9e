"""Trains one module after another, each with another optimizer, and prints what every step's norms and zeros are."""

import json

import torch

torch.manual_seed(0)
STEPS = 40


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu, self.second = torch.nn.Linear(12, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1)

    def forward(self, x):
        self.kept = self.relu(self.first(x))
        return self.second(self.kept)


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(Part() for _ in MAKE)

    def forward(self, x, which):
        return self.parts[which](x)


optim = torch.optim
MAKE = [
    lambda p: optim.SGD(p, lr=0.01),
    lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    lambda p: optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, fused=True),
    lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=True),
    lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    lambda p: optim.SGD(p, lr=0.001, weight_decay=0.1, maximize=True),
    lambda p: optim.RMSprop(p, lr=0.01),
]
model = Parts()
truth = []


def norms(values):
    return {name: value.detach().double().pow(2).sum().sqrt().item() for name, value in values}


for which, make in enumerate(MAKE):
    part = model.parts[which]
    optimizer = make(part.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=which == 2)
    for x in torch.utils.data.DataLoader(torch.randn(STEPS * 8, 12), batch_size=8):
        loss = model(x, which).pow(2).mean()
        scaler.scale(loss).backward()
        before = {name: value.detach().clone() for name, value in part.named_parameters()}
        scale = scaler.get_scale()
        gradients = [(name, value.grad / scale) for name, value in part.named_parameters()]
        told = {"which": which, "grad_norm": norms(gradients), "weight_norm": norms(before.items())}
        scaler.step(optimizer)
        scaler.update()
        changes = [(name, value.double() - before[name].double()) for name, value in part.named_parameters()]
        told["update_norm"] = norms(changes)
        kept = part.kept.detach()
        told["zeros"] = (kept == 0).double().mean().item()
        told["largest"], told["mean_square"] = kept.abs().max().item(), kept.double().pow(2).mean().item()
        optimizer.zero_grad()
        truth.append(told)
print(json.dumps(truth))
