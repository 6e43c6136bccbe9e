"""Planted hangs of many ranks: dumps as PyTorch's flight recorder writes them, what was planted beside them, and how
well and how fast `stepscope analyze` reads them.

    python benchmarks/hangs.py make FOLDER --hang never_arrives --ranks 1000 --absent 0.1
    python benchmarks/hangs.py run [--ranks 1000] [--entries 2000] [--quick]

A job is played, not written down: every rank has a program (tensor groups inside pipeline stages inside replicas: all
gathers and reduce scatters of a tensor group, sends and receives between stages, gradients of a data group, the norm of
all), puts calls on its device some way ahead, and a call is over when all of its group have reached it. The hang is
planted in one rank's program; who ends up waiting where follows from the play. Nothing here is shared with what judges
the dumps. The truth is written to another file than the dumps.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HANGS = (
    *("never_arrives", "loader", "left_out", "other_operation", "other_size", "other_type", "died", "crossed"),
    *("send_left_out", "none"),
)
TENSOR = 8  # ranks of a tensor group
STAGES = 5
SCRIPT = "/job/train.py"
LIBRARY = "/opt/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LINES = {
    "loader": (31, "next_batch"), "recv": (40, "forward"), "gather": (52, "attention"), "scatter": (58, "attention"),
    "send": (44, "forward"), "grads": (71, "train_step"), "params": (74, "train_step"), "norm": (77, "train_step"),
    "extra": (90, "log_loss"),
}  # fmt: skip
AHEAD = 12  # calls that a rank puts on its device before the first of them is over


@dataclass(slots=True)
class Call:
    kind: str
    group: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: str
    dtype: str = "BFloat16"
    peers: tuple[int, int] | None = None  # global ranks, from and to
    fence: bool = False  # the host waits for it
    sequence: int = 0
    p2p_sequence: int = 0
    state: str = "scheduled"
    created: int = 0


@dataclass
class Truth:
    hang: str
    ranks: list[int]
    group: str | None = None
    sequence: int | None = None
    line: int | None = None  # of the call that others wait in, or that differs
    dumps: int = 0
    absent: list[int] = field(default_factory=list)


class Job:
    """Ranks, their groups, and the play of their calls."""

    def __init__(self, ranks: int, entries: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks, self.entries = ranks, entries
        self.stages = STAGES if ranks >= 2 * TENSOR * STAGES else 1
        self.tensor = TENSOR if ranks >= 2 * TENSOR else 2
        self.replicas = ranks // (self.stages * self.tensor)
        self.ranks = self.replicas * self.stages * self.tensor
        self.groups: dict[str, list[int]] = {"0": list(range(self.ranks))}
        self.described = {"0": "default_pg"}
        self.of: dict[int, dict[str, str]] = defaultdict(dict)
        at = 1
        for kind, members in self._grids():
            name = str(at)
            at += 1
            self.groups[name], self.described[name] = members, kind
            for rank in members:
                self.of[rank][kind] = name

    def _grids(self) -> list[tuple[str, list[int]]]:
        def rank(replica: int, stage: int, slot: int) -> int:
            return (replica * self.stages + stage) * self.tensor + slot

        replicas, stages, slots = range(self.replicas), range(self.stages), range(self.tensor)
        found = [("TP", [rank(r, s, t) for t in slots]) for r in replicas for s in stages]
        found += [("PP", [rank(r, s, t) for s in stages]) for r in replicas for t in slots if self.stages > 1]
        return found + [("DP", [rank(r, s, t) for r in replicas]) for s in stages for t in slots]

    def step(self, rank: int) -> list[Call]:
        """The calls of one step of a rank."""
        stage = rank // self.tensor % self.stages
        tensor, data, pipeline = (self.of[rank].get(kind, "") for kind in ("TP", "DP", "PP"))
        layer = [
            Call("_all_gather_base", tensor, (64, 512), (64 * self.tensor, 512), "gather"),
            Call("_reduce_scatter_base", tensor, (64 * self.tensor, 512), (64, 512), "scatter"),
        ]
        calls: list[Call] = []
        for forward in (True, False):
            before, after = (
                (rank - self.tensor, rank + self.tensor) if forward else (rank + self.tensor, rank - self.tensor)
            )
            first, last = (0, self.stages - 1) if forward else (self.stages - 1, 0)
            if stage != first:
                calls.append(Call("recv", pipeline, (64, 512), (64, 512), "recv", peers=(before, rank)))
            calls += [
                Call(**{k: getattr(one, k) for k in ("kind", "group", "inputs", "outputs", "line")})
                for one in layer * 4
            ]
            if stage != last:
                calls.append(Call("send", pipeline, (64, 512), (64, 512), "send", peers=(rank, after)))
        calls.append(Call("_reduce_scatter_base", data, (4096 * self.replicas,), (4096,), "grads", "Float"))
        calls.append(Call("_all_gather_base", data, (4096,), (4096 * self.replicas,), "params"))
        calls.append(Call("all_reduce", "0", (1,), (1,), "norm", "Float", fence=True))
        return calls

    def play(self, hang: str) -> tuple[dict[int, list[Call]], Truth]:
        """All calls that each rank put on its device until nothing moves any more, and what was planted."""
        length = len(self.step(0))
        steps = self.entries // length + 4
        culprit = self.random.randrange(self.ranks)
        if hang == "send_left_out":  # of a stage that sends in its forward pass
            culprit -= (self.stages - 1) * self.tensor * (culprit // self.tensor % self.stages == self.stages - 1)
        planted = steps - 2
        programs = {rank: [one for _ in range(steps) for one in self.step(rank)] for rank in range(self.ranks)}
        truth = Truth(hang, [culprit])
        stop = self._plant(hang, programs, culprit, planted, truth)
        made = _Play(self, programs, stop).run()
        if truth.group is not None and truth.sequence is None and truth.line is not None:
            truth.sequence = self._next(made, culprit, truth)
        return made, truth

    def _plant(
        self, hang: str, programs: dict[int, list[Call]], culprit: int, planted: int, truth: Truth
    ) -> dict[int, int]:
        """Change the culprit's program; from the given position on a rank's host stands still."""
        length = len(self.step(culprit))
        begin, program = planted * length, programs[culprit]
        own = [at for at in range(begin, begin + length) if program[at].peers is None]
        at = {"loader": own[0], "crossed": own[0]}.get(hang, own[self.random.randrange(1, len(own) - 4)])
        call = program[at]
        if hang == "send_left_out":
            at = next(one for one in range(begin, begin + length) if program[one].kind == "send")
            del program[at]
            return {}
        if hang == "none":
            truth.ranks = []
            for rank, one in programs.items():
                del one[planted * len(self.step(rank)) :]
            return {}
        truth.group, truth.line = call.group, LINES[call.line][0]
        if hang in ("never_arrives", "loader", "died"):
            return {culprit: at}
        if hang == "left_out":
            del program[at]
        elif hang == "other_operation":
            program[at] = Call("broadcast", call.group, call.outputs, call.outputs, "extra")
        elif hang == "other_size":
            program[at] = Call(
                call.kind,
                call.group,
                (*call.inputs[:-1], call.inputs[-1] // 2),
                (*call.outputs[:-1], call.outputs[-1] // 2),
                "extra",
                call.dtype,
            )
        elif hang == "other_type":
            program[at] = Call(call.kind, call.group, call.inputs, call.outputs, "extra", "Half")
        elif hang == "crossed":
            # all of one tensor group call its group before the group of all, one of them the other way round
            mates = self.groups[self.of[culprit]["TP"]]
            for rank in mates:
                end = (planted + 1) * len(self.step(rank)) - 1
                mine = Call("all_reduce", self.of[rank]["TP"], (128,), (128,), "extra")
                programs[rank].insert(end + (rank == culprit), mine)
            truth.line = truth.group = None
        return {}

    def _next(self, made: dict[int, list[Call]], culprit: int, truth: Truth) -> int:
        numbers = [call.sequence for call in made[culprit] if call.group == truth.group and call.peers is None]
        if truth.hang in ("never_arrives", "loader", "died"):
            return max(numbers, default=0) + 1
        others = next(rank for rank in self.groups[truth.group or ""] if rank != culprit)
        lines = {
            call.sequence: (call.kind, call.inputs, call.dtype) for call in made[others] if call.group == truth.group
        }
        mine = {
            call.sequence: (call.kind, call.inputs, call.dtype) for call in made[culprit] if call.group == truth.group
        }
        return next((one for one in sorted(mine) if lines.get(one) != mine[one]), max(numbers, default=0) + 1)

    def dump(self, calls: list[Call]) -> dict[str, Any]:
        """What a rank's flight recorder holds: its last calls."""
        kept = calls[-self.entries :]
        own = {call.group for call in calls} | {"0"}
        frames = {
            line: [
                {"name": "wrapper", "filename": LIBRARY, "line": 83},
                {"name": function, "filename": SCRIPT, "line": number},
                {"name": "main", "filename": SCRIPT, "line": 120},
                {"name": "<module>", "filename": SCRIPT, "line": 130},
            ]
            for line, (number, function) in LINES.items()
        }
        first = len(calls) - len(kept)
        return {
            "version": "2.10",
            "comm_lib_version": "2.28.9",
            "pg_config": {
                name: {"name": name, "desc": self.described[name], "ranks": str(self.groups[name])}
                for name in sorted(own)
            },
            "pg_status": {},
            "entries": [self._entry(first + at, call, frames) for at, call in enumerate(kept)],
        }

    def _entry(self, number: int, call: Call, frames: dict[str, Any]) -> dict[str, Any]:
        name = f"nccl:{call.kind}"
        if call.peers is not None:
            members = self.groups[call.group]
            source, target = (members.index(peer) for peer in call.peers)
            name = f"nccl:send {source}->{target}" if call.kind == "send" else f"nccl:recv {target}<-{source}"
        over = call.created + 10**6 if call.state == "completed" else None
        return {
            "record_id": number,
            "pg_id": int(call.group),
            "process_group": (call.group, self.described[call.group]),
            "collective_seq_id": call.sequence,
            "p2p_seq_id": call.p2p_sequence,
            "op_id": number,
            "profiling_name": name,
            "time_created_ns": call.created,
            "input_sizes": [list(call.inputs)],
            "input_dtypes": [call.dtype],
            "output_sizes": [list(call.outputs)],
            "output_dtypes": [call.dtype],
            "state": call.state,
            "time_discovered_started_ns": over,
            "time_discovered_completed_ns": over,
            "retired": call.state == "completed",
            "timeout_ms": 600_000,
            "is_p2p": call.peers is not None,
            "frames": frames[call.line],
        }


class _Play:
    """The programs run against each other: hosts put calls on devices, devices do them in order, groups meet."""

    def __init__(self, job: Job, programs: dict[int, list[Call]], stop: dict[int, int]) -> None:
        self.job, self.programs, self.stop = job, programs, stop
        self.host = dict.fromkeys(programs, 0)  # the next call of the program
        self.device = dict.fromkeys(programs, 0)  # the next call that is not over
        self.sequences: dict[tuple[int, str], int] = defaultdict(int)
        self.p2p: dict[tuple[int, str], int] = defaultdict(int)
        self.pairs: dict[tuple[int, int, str, bool], int] = defaultdict(int)
        self.meeting: dict[Any, list[int]] = defaultdict(list)
        self.at: dict[int, Any] = {}  # where the device of a rank waits
        self.now = 1_790_000_000 * 10**9

    def run(self) -> dict[int, list[Call]]:
        ready = deque(self.programs)
        while ready:
            rank = ready.popleft()
            self._put(rank)
            ready.extend(self._meet(rank))
        return {rank: program[: self.host[rank]] for rank, program in self.programs.items()}

    def _put(self, rank: int) -> None:
        program = self.programs[rank]
        end = min(len(program), self.stop.get(rank, len(program)))
        while self.host[rank] < end and self.host[rank] - self.device[rank] < AHEAD:
            at = self.host[rank]
            if at and program[at - 1].fence and self.device[rank] < at:
                return
            call = program[at]
            self.now += 1_000
            call.created = self.now
            key = rank, call.group
            if call.peers is None:
                self.sequences[key] += 1
            else:
                self.p2p[key] += 1
            call.sequence, call.p2p_sequence = self.sequences[key], self.p2p[key]
            self.host[rank] += 1

    def _meet(self, rank: int) -> list[int]:
        """Put the first call that is not over to where its group meets; the ranks that go on."""
        at = self.device[rank]
        if at >= self.host[rank] or rank in self.at:
            return []
        call = self.programs[rank][at]
        if call.peers is not None:
            key = (*call.peers, call.kind == "send")
            place: Any = ("p2p", *call.peers, self.pairs[key])
            needed = 2
        else:
            # only calls that are alike can meet
            place = (call.group, call.sequence, call.kind, call.inputs, call.outputs, call.dtype)
            needed = len(self.job.groups[call.group])
        self.at[rank] = place
        self.meeting[place].append(rank)
        call.state = "started"
        if len(self.meeting[place]) < needed:
            return []
        there = self.meeting.pop(place)
        for one in there:
            call = self.programs[one][self.device[one]]
            call.state = "completed"
            if call.peers is not None:
                self.pairs[(*call.peers, call.kind == "send")] += 1
            self.device[one] += 1
            del self.at[one]
        return there


def make(folder: Path, hang: str, *, ranks: int, entries: int, absent: float, seed: int, form: str) -> Truth:
    """Write dumps to `folder`/dumps and the truth to `folder`/truth.json."""
    job = Job(ranks, entries, seed)
    calls, truth = job.play(hang)
    missing = set(job.random.sample(range(job.ranks), round(absent * job.ranks)))
    if hang == "died":
        missing.update(truth.ranks)
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    for rank, made in calls.items():
        if rank in missing:
            continue
        dump = job.dump(made)
        path = dumps / f"nccl_trace_rank_{rank}"
        data = json.dumps(dump).encode() if form == "json" else pickle.dumps(dump, protocol=2)
        path.write_bytes(data)
    truth.dumps, truth.absent = job.ranks - len(missing), sorted(missing)
    (folder / "truth.json").write_text(json.dumps(asdict(truth)))
    return truth


JUDGE = """
import json, resource, sys, time
from pathlib import Path
before = time.process_time()
import stepscope
run = stepscope.open_run(Path(sys.argv[1]))
found = run.report().views["hang"]
used = time.process_time() - before
print(json.dumps({"seconds": used, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "hang": found}))
"""


def judged(folder: Path) -> dict[str, Any]:
    """The verdict of a process of its own, with its processor time and peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(folder / "dumps")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_right(truth: Truth, view: dict[str, Any]) -> str:
    """What is wrong with the first cause; empty where it names rank, group, call and line."""
    if truth.hang == "none":
        return "" if not view["causes"] else f"a hang where there is none: {view['sentence']}"
    if not view["causes"]:
        return f"no cause: {view['sentence']}"
    cause = view["causes"][0]
    call = next(row for row in view["calls"] if row["number"] == cause["call"])
    culprit = truth.ranks[0]
    if truth.hang == "crossed":
        return "" if cause["kind"] == "crossed" and culprit in cause["ranks"] else f"not crossed: {view['sentence']}"
    if culprit in truth.absent:
        named = cause["kind"] in ("no_dump", "mismatch") and (culprit in cause["ranks"])
        return "" if named else f"rank {culprit} (no dump) is not named: {view['sentence']}"
    if truth.hang == "send_left_out":
        return (
            ""
            if culprit in cause["ranks"] or f" {culprit} ->" in f" {call['call'][9:]}"
            else f"rank {culprit}: {view['sentence']}"
        )
    if cause["ranks"] != [culprit]:
        return f"rank {culprit}, not {cause['ranks'][:8]}: {view['sentence']}"
    if call["group"].split(" ")[0] != truth.group or call["sequence"] != truth.sequence:
        return f"{truth.group} #{truth.sequence}, not {call['group']} #{call['sequence']}: {view['sentence']}"
    place = call["place"]
    if truth.hang not in ("left_out",) and (place is None or place["line"] not in (truth.line, LINES["extra"][0])):
        return f"line {truth.line}, not {place}"
    return ""


def run(ranks: int, entries: int, seeds: int) -> None:
    """Every hang, with all dumps and with a tenth of them absent, as JSON; and one of each kind as a pickle."""
    for form in ("json", "pickle"):
        for hang in HANGS if form == "json" else HANGS[:1]:
            for absent in (0.0, 0.1):
                for seed in range(seeds):
                    with tempfile.TemporaryDirectory() as name:
                        folder = Path(name)
                        began = time.process_time()
                        truth = make(folder, hang, ranks=ranks, entries=entries, absent=absent, seed=seed, form=form)
                        made = time.process_time() - began
                        size = sum(file.stat().st_size for file in (folder / "dumps").iterdir()) / 2**20
                        found = judged(folder)
                    wrong = is_right(truth, found["hang"])
                    print(
                        f"{form:6} {hang:16} absent {absent:.0%} seed {seed}: {found['seconds']:5.1f} s of processor, "
                        f"{found['rss_mb']:5.0f} MB, {size:5.0f} MB of dumps (made in {made:.0f} s): "
                        f"{wrong or 'right'}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sub = parser.add_subparsers(dest="command", required=True)
    one = sub.add_parser("make")
    one.add_argument("folder", type=Path)
    one.add_argument("--hang", choices=HANGS, default="never_arrives")
    one.add_argument("--absent", type=float, default=0.0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--format", choices=("json", "pickle"), default="json")
    every = sub.add_parser("run")
    every.add_argument("--seeds", type=int, default=1)
    every.add_argument("--quick", action="store_true", help="80 ranks of 400 calls")
    for each in (one, every):
        each.add_argument("--ranks", type=int, default=1_000)
        each.add_argument("--entries", type=int, default=2_000)
    given = parser.parse_args()
    if given.command == "make":
        print(
            make(
                given.folder,
                given.hang,
                ranks=given.ranks,
                entries=given.entries,
                absent=given.absent,
                seed=given.seed,
                form=given.format,
            )
        )
    elif given.quick:
        run(80, 400, given.seeds)
    else:
        run(given.ranks, given.entries, given.seeds)


if __name__ == "__main__":
    main()
