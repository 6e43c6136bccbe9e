"""A compiled model with five habits that compile it again or break its graph; tests look for the marked lines.

Backend eager, so that a version costs milliseconds.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.layer(x) * scale  # a changing float
        if y.abs().max().item() > 100:  # a value read from a tensor
            y = y / 10
        print("rows", len(y))  # printed in compiled code
        self.calls += 1  # a counter
        return y * (1 + self.calls / 1000)


torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, x in enumerate(DataLoader(torch.randn(24 * 4, 4), batch_size=4)):
    rows = x.repeat(2 if step >= 3 else 1, 1)  # a batch that grows
    scale = 1.0 if step < 6 else 0.5
    loss = compiled(rows, scale).square().mean()  # where it is called
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
