"""Two ranks that each read their own shard. One shard was written compressed, and its rank unpacks every record.

Fixed: all shards are written plain.
"""

from __future__ import annotations

import lzma

import torch
from common import Watch, parse
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BATCH, RECORDS, FEATURES = 64, 256, 4096


class Shard(Dataset[tuple[torch.Tensor, int]]):
    """Records in memory, as they would lie in a file."""

    def __init__(self, seed: int, packed: bool, length: int) -> None:
        made = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, 64, (RECORDS, FEATURES), generator=made, dtype=torch.uint8)
        self.records = [row.numpy().tobytes() for row in rows]
        if packed:
            self.records = [lzma.compress(record, preset=0) for record in self.records]
        self.packed, self.length = packed, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        record = self.records[index % RECORDS]
        if self.packed:
            record = lzma.decompress(record)  # planted
        pixels = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        return pixels.float() / 64, index % 10


def main() -> None:
    options, watch = parse(steps=160), Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shard = Shard(rank, packed=rank == 1 and not options.fixed, length=BATCH * options.steps)
    loader = DataLoader(shard, batch_size=BATCH)
    net = nn.Sequential(nn.Linear(FEATURES, 384), nn.ReLU(), nn.Linear(384, 10))
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
