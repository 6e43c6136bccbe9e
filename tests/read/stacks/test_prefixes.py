"""What command lines say of their processes."""

from __future__ import annotations

import pytest

from stepscope.read.stacks.source import hint_of

HELPERS = (
    "resource_tracker import main;main(5)",
    "forkserver import main; main(8, 9)",
    "semaphore_tracker import main",
)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 2 train.py",
        "/opt/venv/bin/python3 /opt/venv/bin/torchrun --nproc_per_node 2 train.py",
        "python3.11 -u -X dev -m torch.distributed.run train.py",
        "python -Im torch.distributed.launch train.py",
        "/usr/bin/python /usr/lib/python3/site-packages/torch/distributed/run.py train.py",
        "python /opt/bin/accelerate launch train.py",
        "python -m accelerate.commands.launch train.py",
        "python -u -m deepspeed.launcher.launch --world_info=abc train.py",
        "deepspeed --num_gpus 2 train.py",
        "mpirun -np 4 python train.py",
        "srun --mpi=pmix python train.py",
        "python.exe C:\\venv\\Scripts\\torchrun train.py",
    ],
)
def test_launchers(command: str):
    assert hint_of(command) == "launcher"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "python train.py --deepspeed ds.json",
        "python -u train.py torchrun",
        "python -m mypackage.train accelerate",
        "python -c import torchrun",
        "python /home/u/deepspeed_examples/train.py",
        "./train.sh torchrun",
    ],
)
def test_programs(command: str):
    assert hint_of(command) is None


@pytest.mark.parametrize("what", HELPERS)
def test_helpers_of_multiprocessing(what: str):
    assert hint_of(f"python -B -c from multiprocessing.{what}", "python train.py") == "helper"


def test_children_of_multiprocessing():
    spawned = "python -B -c from multiprocessing.spawn import spawn_main; spawn_main(11) --multiprocessing-fork"
    assert hint_of(spawned) == "spawned"
    server = f"python -B -c from multiprocessing.{HELPERS[1]}"
    assert hint_of(server, server) == "spawned"


def test_a_fork_of_a_launcher_is_none():
    assert hint_of("torchrun train.py", "torchrun train.py") is None
