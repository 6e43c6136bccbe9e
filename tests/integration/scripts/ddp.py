"""Two ranks on the CPU with gloo; started by torchrun."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 16))
sampler = DistributedSampler(data)
model = DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done", flush=True)
# gloo's threads outlive a group that a model still holds, and about every fifth process then aborts at its exit
loss = model = optimizer = None
gc.collect()
dist.barrier()
dist.barrier()  # leaving while another rank still sends may end in an abort
dist.destroy_process_group()
