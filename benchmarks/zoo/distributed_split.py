"""Two ranks that share a data set by the number of files, not of rows: one draws three times the rows of the other.

Fixed: both draw as many.
"""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES = 640, 256


def main() -> None:
    options, watch = parse(steps=130), Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = BATCH if options.fixed else (BATCH // 2, 3 * BATCH // 2)[rank]
    data = TensorDataset(torch.randn(rows * options.steps, FEATURES), torch.randint(0, 10, (rows * options.steps,)))
    batches = torch.arange(len(data)).view(-1, rows).tolist()
    loader = DataLoader(data, sampler=batches, batch_size=None)  # planted
    net = nn.Sequential(
        *(nn.Linear(FEATURES, 512), nn.ReLU()),
        *(nn.Linear(512, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for features, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
