"""Jobs on gloo that hang: `gloo_hang.py WORLD FOLDER HOW:PORT ...`; each rank dumps its flight recorder in FOLDER/HOW.

HOW: `left_out` (rank 1 leaves a call out), `loader` (rank 1 stands in its loader), `none`. All ranks are forked from
one process, so that torch is imported once.
"""

import datetime
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

RANK, WORLD, FOLDER, HOW, PORT = -1, int(sys.argv[1]), sys.argv[2], "", ""
ODD, LATE = 1, 3  # the rank and the step in which it happens
TIMEOUT_S = 3


def dump():
    recorder = torch._C._distributed_c10d
    pickled = recorder._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    for name, data in ((f"pickles/fr_rank_{RANK}", pickled), (f"json/fr_{RANK}.json", recorder._dump_fr_trace_json())):
        with open(os.path.join(FOLDER, HOW, name), "wb") as file:
            file.write(data)


def next_batch(step):
    if HOW == "loader" and RANK == ODD and step == LATE:
        time.sleep(60)  # LOADER
    return torch.ones(8)


def train_step(step):
    batch = next_batch(step)
    dist.all_reduce(batch)  # GRADIENTS
    if not (HOW == "left_out" and RANK == ODD and step == LATE):
        dist.all_reduce(batch)  # NORM
    dist.broadcast(batch, 0)  # STATE
    return batch


for job in sys.argv[3:]:
    for rank in range(WORLD):
        if RANK < 0 and os.fork() == 0:
            RANK, (HOW, PORT) = rank, job.split(":")
if RANK < 0:
    for _ in range(WORLD * len(sys.argv[3:])):
        os.wait()
    sys.exit()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(RANK), WORLD_SIZE=str(WORLD))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
threading.Timer(TIMEOUT_S + 4, lambda: (dump(), os._exit(0))).start()
try:
    for step in range(5):
        train_step(step)
except RuntimeError as error:
    print(error, file=sys.stderr)
if HOW == "none":
    dist.barrier()
    dump()
    os._exit(0)
time.sleep(60)
