"""`stepscope export` of several hosts: their events stand on one clock where collectives tell it, to a stated bound."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.export import export as merge
from tests.export.traces import BASE_NS, export, load, of, save, slice_, timed

MS = 1_000_000
KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
STEPS = 10


class Job:
    """Traces as Kineto writes them of hosts with wrong clocks: two ranks each, two small collectives in each step."""

    def __init__(self, offsets_ns: Sequence[int], *, per_host: int = 2, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.offsets, self.per_host = offsets_ns, per_host
        self.ranks = range(len(offsets_ns) * per_host)
        self.events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in self.ranks}
        self.step_ns, self.numbered, self.elements = 50 * MS, True, 128
        self.transfer_ns = 30_000
        self.stepped: tuple[int, int, int] | None = None  # host, from which step on, ns
        self.split = 0  # ranks from here on are a group of their own

    def record(self) -> Job:
        sequence = dict.fromkeys(self.ranks, 0)
        for step in range(STEPS):
            for place, (name, kernel) in enumerate(KERNELS.items()):
                at = step * self.step_ns + (place + 1) * 15 * MS
                for group in self._groups():
                    start = at + self.rng.integers(0, 2 * MS, len(group))
                    end = start.max() + self.transfer_ns + self.rng.integers(0, 20_000, len(group))
                    for rank, begun, ended in zip(group, start.tolist(), end.tolist(), strict=True):
                        self._call(rank, step, name, kernel, (begun, ended), group, sequence[rank])
                        sequence[rank] += 1
            for rank in self.ranks:
                ts = self._shown(rank, step, step * self.step_ns)
                marks = slice_(f"ProfilerStep#{step}", ts / 1000, self.step_ns / 1000 - 1, "user_annotation")
                self.events[rank].append(marks)
        return self

    def _groups(self) -> list[list[int]]:
        ranks = list(self.ranks)
        return [ranks[: self.split], ranks[self.split :]] if self.split else [ranks]

    def _shown(self, rank: int, step: int, true_ns: int) -> int:
        host = rank // self.per_host
        later = self.stepped is not None and self.stepped[0] == host and step >= self.stepped[1]
        return true_ns + self.offsets[host] + (self.stepped[2] if self.stepped is not None and later else 0) + 500 * MS

    def _call(
        self, rank: int, step: int, name: str, kernel: str, times: tuple[int, int], group: list[int], sequence: int
    ) -> None:
        correlation = 1000 * step + 10 * sequence + 1
        launch = self._shown(rank, step, times[0] - 50_000)
        start, end = (self._shown(rank, step, time) for time in times)
        args = {
            "correlation": correlation, "device": rank % 8, "stream": 20, "Collective name": name,
            "In msg nelems": self.elements, "Out msg nelems": self.elements, "Group size": len(group), "dtype": "Float",
            "Process Group Name": str(min(group)), "Process Group Description": "default_pg",
            "Process Group Ranks": str(group), **({"Seq": sequence} if self.numbered else {}),
        }  # fmt: skip
        launching = slice_("cudaLaunchKernelExC", launch / 1000, 5.5, "cuda_runtime", args={"correlation": correlation})
        self.events[rank] += [
            launching,
            slice_(kernel, start / 1000, (end - start) / 1000, "kernel", pid=rank % 8, tid=20, args=args),
        ]

    def save(self, folder: Path, hosts: Sequence[str] | None = None) -> Path:
        """As `tensorboard_trace_handler` names them: by host and process."""
        folder.mkdir()
        for rank, events in self.events.items():
            host = rank // self.per_host
            name = hosts[host] if hosts is not None else f"node{host}"
            content = {
                "schemaVersion": 1,
                "distributedInfo": {"rank": rank, "world_size": len(self.ranks), "backend": "nccl"},
                "baseTimeNanoseconds": BASE_NS - 500 * MS,
                "traceEvents": events,
            }
            save(folder / f"{name}_{4000 + rank}.17908570{rank:02}.pt.trace.json", content)
        return folder


def merged(job: Job, folder: Path, *options: Any) -> tuple[str, Any]:
    """What `export` says of the job's traces, and the export."""
    done = export(job.record().save(folder / "traces"), *options, "-o", folder / "out.json")
    return done, load(folder / "out.json")


def test_nothing_but_the_start_of_an_event_changes_and_of_a_source_all_by_the_same(tmp_path: Path) -> None:
    content = merged(Job([0, 7 * MS]), tmp_path)[1]
    (clock,) = content["stepscopeClocks"]
    ahead = {0: 0, 1: 0, 2: clock["moved_ns"][0], 3: clock["moved_ns"][1]}
    expected = []
    for rank, path in enumerate(sorted((tmp_path / "traces").glob("node*"))):
        expected += [(phase, name, start - ahead[rank], length) for phase, name, start, length in timed(load(path))]
    assert sorted(timed(content)) == sorted(expected)


@pytest.mark.parametrize("hosts", [["node0", "node0"], None])
def test_what_shows_no_other_clock_stays(tmp_path: Path, hosts: list[str] | None) -> None:
    folder, out = (
        Job([0, 0 if hosts is None else 7 * MS]).record().save(tmp_path / "traces", hosts),
        tmp_path / "out.json",
    )
    sources = [timed(load(path)) for path in folder.glob("node*")]
    done = export(folder, "-o", out)
    assert sorted(timed(load(out))) == sorted(event for source in sources for event in source)
    if hosts is None:
        assert "node1 (ranks 2, 3): left on its own clock" in done
        assert "less than the ±" in done
    else:
        assert "the clock of" not in done
        assert "stepscopeClocks" not in load(out)


def test_a_host_of_which_nothing_is_known_is_named(tmp_path: Path) -> None:
    job = Job([0, 7 * MS, 9 * MS])
    job.split = 4
    done, content = merged(job, tmp_path)
    assert re.search(r"node1 \(ranks 2, 3\): moved by -(7\.0|6\.9)", done)
    assert "node2 (ranks 4, 5): left on its own clock" in done
    (left,) = (one for one in content["stepscopeClocks"] if one["host"] == "node2")
    assert left["moved_ns"] == []
    assert left["bound_ns"] is None
    assert left["reason"]


def test_a_clock_that_steps_within_a_trace_cannot_be_moved(tmp_path: Path) -> None:
    job = Job([0, 7 * MS])
    job.stepped = (1, 5, 5 * MS)
    done = merged(job, tmp_path)[0]
    assert "left on its own clock" in done
    assert "its clock stepped by +" in done


def test_large_collectives_alone_move_nothing(tmp_path: Path) -> None:
    job = Job([0, 7 * MS])
    job.elements, job.transfer_ns = 2**26, 10 * MS
    done = merged(job, tmp_path)[0]
    assert "no small collectives with the reference" in done
    assert "moved by" not in done


def test_a_cut_is_made_on_the_common_clock(tmp_path: Path) -> None:
    folder, out = Job([0, 200 * MS]).record().save(tmp_path / "traces"), tmp_path / "out.json"
    export(folder, "--range", "100ms:150ms", "-o", out)
    steps = [event for event in of(load(out), "X") if event["name"].startswith("ProfilerStep")]
    assert sum(event["name"] == "ProfilerStep#2" for event in steps) == 4
    assert len({event["name"] for event in steps}) <= 2
    export(folder, "--steps", "3", "--force", "-o", out)
    starts = [float(event["ts"]) for event in of(load(out), "X") if event["name"] == "ProfilerStep#3"]
    assert len(starts) == 4
    assert max(starts) - min(starts) < 500


def test_hosts_of_a_run_folder_are_those_that_recorded_it(tmp_path: Path) -> None:
    job = Job([0, 12 * MS], per_host=1).record()
    run = tmp_path / "run"
    for rank, host in enumerate(("alpha", "beta")):
        folder = run / f"rank-{rank}"
        folder.mkdir(parents=True)
        (folder / "rank.json").write_text(json.dumps({"rank": rank, "host": host, "world_size": 2}))
        content = {"baseTimeNanoseconds": BASE_NS - 500 * MS, "traceEvents": job.events[rank]}
        save(folder / "trace-0.pt.trace.json.gz", content)
    done = export(run, "-o", tmp_path / "out.json")
    assert re.search(r"beta \(rank 1\): moved by -(12\.0|11\.9)", done)
    assert "the clock of" not in export(run, "--rank", "1", "-o", tmp_path / "one.json")


def test_odd_arguments_of_collectives_are_passed_over(tmp_path: Path) -> None:
    job = Job([0, 7 * MS]).record()
    odd = [
        {"Seq": 2**70},
        {"Seq": "x"},
        {"Process Group Ranks": [[1], {}]},
        {"dtype": 7},
        {"In msg nelems": -1},
        {"Seq": None},
    ]
    for rank, events in job.events.items():
        for more in odd:
            events.append(slice_(KERNELS["allreduce"], 600_000 + rank, 10, "kernel", pid=0, tid=9, args=more))
        events.append(slice_(KERNELS["allreduce"], 600_050, 10, ["kernel"], pid=0, tid=9))  # type: ignore[arg-type]
        events.append(slice_("ncclKernel", 600_100, 10, "kernel", pid=0, tid=9, args="text"))
    job.save(tmp_path / "traces")
    done = merge([tmp_path / "traces"], tmp_path / "out.json")
    assert [one.host for one in done.moves] == ["node1"]
    assert done.moves[0].moved_ns
