"""A model with a sparse table, half precision, outputs in a dictionary, three optimizers, and NaN from step 60 on."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Embedding(50, 16, sparse=True), torch.nn.Linear(16, 16)])
        self.blocks[0].bias = torch.nn.Parameter(torch.zeros(16))
        self.blocks[1].to(torch.bfloat16)
        self.unused, self.end = torch.nn.Linear(3, 3), End()

    def forward(self, words):
        rows = self.blocks[0](words) + self.blocks[0].bias
        return self.end(self.blocks[1](rows.bfloat16()).float())["logits"]


class End(torch.nn.Linear):
    factor = 1.0

    def __init__(self):
        super().__init__(16, 50, bias=False)

    def forward(self, x):
        return {"name": "end", "logits": super().forward(x) * self.factor}


torch.manual_seed(0)
model = Model()
optimizers = [
    torch.optim.SparseAdam([model.blocks[0].weight]),
    torch.optim.AdamW([model.blocks[0].bias, *model.blocks[1].parameters(), *model.unused.parameters()]),
    torch.optim.Adagrad(model.end.parameters()),
]
for step in range(80):
    model.end.factor = 1.0 if step < 60 else float("nan")
    words = torch.randint(50, (8, 5))
    torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
