"""Two ranks on the CPU with gloo, each profiled as the tutorials do it: gloo_ddp.py FOLDER."""

import gc
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

SIZE = 2
STEPS = 2
LATE_S = 0.03


def work(rank: int, folder: str, port: int) -> None:
    """Train; rank 1 sleeps before each forward pass."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=SIZE)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        record_shapes=True,
        on_trace_ready=tensorboard_trace_handler(folder, worker_name=f"host_{rank}", use_gzip=True),
    ) as recorder:
        for _ in range(STEPS + 2):  # DistributedDataParallel settles its buckets in the first two
            dist.barrier()
            time.sleep(LATE_S * rank)
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    # gloo's threads outlive a group that a model still holds, and the process may then abort at its exit
    del model, optimizer
    gc.collect()
    dist.barrier()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    # forked, so that torch is imported once
    multiprocessing.start_processes(work, args=(sys.argv[1], free_port()), nprocs=SIZE, start_method="fork")
