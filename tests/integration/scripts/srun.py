"""A stand-in for `srun`: starts the tasks of a job step at once, all on this machine, in the environment SLURM sets.

    python srun.py [--nodes N] [--tasks-per-node N] [--job N] [--step N] [--restart N] [--array JOB_TASK] COMMAND...

Nodes are this machine under several names. Signals are handed on to every task; the status is the highest of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType


def environment(args: argparse.Namespace, node: int, local: int) -> dict[str, str]:
    """What one task finds, named and shaped as SLURM does it."""
    tasks = args.nodes * args.tasks_per_node
    task = node * args.tasks_per_node + local
    nodes = f"node[1-{args.nodes}]" if args.nodes > 1 else "node1"
    per_node = f"{args.tasks_per_node}(x{args.nodes})" if args.nodes > 1 else str(args.tasks_per_node)
    first = node * args.tasks_per_node
    values: dict[str, object] = {
        "SLURM_JOB_ID": args.job,
        "SLURM_JOBID": args.job,
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_PARTITION": "cpu",
        "SLURM_CLUSTER_NAME": "cluster",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": args.nodes,
        "SLURM_NNODES": args.nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_CPUS_ON_NODE": os.cpu_count(),
        "SLURM_CPUS_PER_TASK": 1,
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_SUBMIT_HOST": "login1",
        "SLURM_STEP_ID": args.step,
        "SLURM_STEPID": args.step,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_NUM_NODES": args.nodes,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_LAUNCHER_PORT": 40123,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_SRUN_COMM_PORT": 40124,
        "SLURM_DISTRIBUTION": "block",
        "SLURM_TOPOLOGY_ADDR": f"node{node + 1}",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "SLURMD_NODENAME": f"node{node + 1}",
        "SLURM_NODEID": node,
        "SLURM_PROCID": task,
        "SLURM_LOCALID": local,
        "SLURM_GTIDS": ",".join(str(first + index) for index in range(args.tasks_per_node)),
        "SLURM_TASK_PID": os.getpid(),
        "SLURM_PRIO_PROCESS": 0,
        "SLURM_UMASK": "0022",
    }
    if args.restart:
        values["SLURM_RESTART_COUNT"] = args.restart
    if args.array:
        values["SLURM_ARRAY_JOB_ID"], values["SLURM_ARRAY_TASK_ID"] = args.array.split("_")
    return {**os.environ, **{name: str(value) for name, value in values.items()}}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks-per-node", type=int, default=1)
    parser.add_argument("--job", default="17")
    parser.add_argument("--step", default="0")
    parser.add_argument("--restart")
    parser.add_argument("--array")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for node in range(args.nodes):
        for local in range(args.tasks_per_node):
            # a session each, as on a node: a key press never reaches them by itself
            tasks.append(subprocess.Popen(args.command, env=environment(args, node, local), start_new_session=True))
    statuses = [task.wait() for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
