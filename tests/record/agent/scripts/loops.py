"""A training loop with workers, validation, an overflow, a checkpoint and a hand-made set of marks."""

import contextlib
import gc
import os
import sys
import time

import torch
from plain_sgd import PlainSGD
from torch.utils.data import DataLoader, TensorDataset

import stepscope

how = sys.argv[1]
torch.manual_seed(0)
torch.set_num_threads(1)
with contextlib.suppress(Exception):  # a torch without CUDA refuses; that it was asked is noted all the same
    torch.cuda.set_per_process_memory_fraction(0.5)
model = torch.nn.Linear(16, 4)
if how == "whole":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    optimizer = PlainSGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
data = TensorDataset(torch.randn(32, 16), torch.randn(32, 4))
loader = DataLoader(data, batch_size=8, num_workers=2 if how == "whole" else 0)
validation = DataLoader(data, batch_size=16)


def main() -> None:
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            with stepscope.region("forward"):
                loss = ((model(x) - y) ** 2).mean()
            loss = loss * float("inf") if number == 1 and epoch == 0 else loss
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == 2:
                with torch.no_grad():
                    for x, _ in validation:
                        model(x)
            stepscope.log("loss", loss)
            if how == "os_exit" and epoch == 1 and number == 1:
                print("leaving", flush=True)
                os._exit(5)
            if how == "raise" and epoch == 1 and number == 1:
                raise ValueError("out of the loop")
    torch.save(model.state_dict(), "model.pt")
    gc.collect()
    if how == "whole":
        child = os.fork()
        if child == 0:
            model(data.tensors[0]).sum().backward()
            optimizer.step()
            os._exit(7)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for _ in range(5):  # no loader
            time.sleep(0.004)
            model(data.tensors[0]).sum().backward()
            optimizer.step()
        for _ in range(3):
            stepscope.step()
            stepscope.mark("tick")
    print(how, sum(float(p.detach().sum()) for p in model.parameters()), os.path.dirname(stepscope.__file__))


main()
