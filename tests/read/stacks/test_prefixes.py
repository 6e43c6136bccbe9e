"""What command lines say of their processes."""

from __future__ import annotations

import pytest

from stepscope.read.stacks.source import hint_of

SPAWNED = "python -B -c from multiprocessing.spawn import spawn_main; spawn_main(11) --multiprocessing-fork"
SERVER = "python -B -c from multiprocessing.forkserver import main; main(8, 9)"
LAUNCHERS = (
    "torchrun --nproc_per_node 2 train.py",
    "/opt/venv/bin/python3 /opt/venv/bin/torchrun --nproc_per_node 2 train.py",
    "python3.11 -u -X dev -m torch.distributed.run train.py",
    "python -Im torch.distributed.launch train.py",
    "/usr/bin/python /usr/lib/python3/site-packages/torch/distributed/run.py train.py",
    "python -m accelerate.commands.launch train.py",
    "deepspeed --num_gpus 2 train.py",
    "srun --mpi=pmix python train.py",
    "python.exe C:\\venv\\Scripts\\torchrun train.py",
)
PROGRAMS = (
    "",
    "python",
    "python train.py --deepspeed ds.json",
    "python -u train.py torchrun",
    "python -X torchrun train.py",
    "python -m mypackage.train accelerate",
    "python -c import torchrun",
    "python /home/u/deepspeed_examples/train.py",
    "./train.sh torchrun",
)


@pytest.mark.parametrize(
    ("command", "above", "hint"),
    [
        *((command, "", "launcher") for command in LAUNCHERS),
        *((command, "", None) for command in PROGRAMS),
        ("python -B -c from multiprocessing.resource_tracker import main;main(5)", "python train.py", "helper"),
        ("python -B -c from multiprocessing.semaphore_tracker import main", "python train.py", "helper"),
        (SERVER, "python train.py", "helper"),
        (SERVER, SERVER, "spawned"),
        (SPAWNED, "", "spawned"),
        ("torchrun train.py", "torchrun train.py", None),  # a fork of a launcher
    ],
)
def test_hints(command: str, above: str, hint: str | None):
    assert hint_of(command, above) == hint


def test_hostile_command_lines_do_not_hang():
    for text in ("python" + " -X" * 5000, "python" + " -m" * 5000, "/" * 5000, "python -" + "m" * 5000):
        assert hint_of(text) is None
