"""The processes of the run, and what to do about those in which the agent never reported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.engine.journal import event_data, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place, ProcessFacts
from stepscope.model.machine import Child, ChildrenFacts, CpuFacts
from stepscope.tables.processes import OTHER
from stepscope.tables.schema import Tables

_TRAINING_ROLES = ("rank", "root", "other")  # launchers, workers and helpers need no agent of their own
_ISOLATED = re.compile(r"(^|\s)-[a-zA-Z]*[IES][a-zA-Z]*(\s|$)")


def processes(tables: Tables) -> tuple[ProcessFacts, ...]:
    """Every process seen from outside; a torch process without an agent has `reported` False and a remedy."""
    found = []
    for row in tables.processes.sort("start_ns", "pid").iter_rows(named=True):
        role, command = row["role"] or "other", row["command"] or ""
        silent = bool(row["torch"]) and not row["reported"] and role in _TRAINING_ROLES
        found.append(
            ProcessFacts(
                pid=row["pid"] if row["pid"] is not None else -1,
                role=role,
                command=command,
                reported=not silent,
                remedy=_remedy(command) if silent else None,
            )
        )
    return tuple(found)


def _remedy(command: str) -> str:
    arguments = command.split(" ")
    flags = []
    for argument in arguments[1:]:
        if not argument.startswith("-"):
            break
        flags.append(argument)
    isolating = [flag for flag in flags if _ISOLATED.search(flag)]
    if isolating:
        return f"Python ran with {isolating[0]} and ignores PYTHONPATH: drop the flag, or use stepscope.profile() in it"
    return (
        "the agent never started in it: keep PYTHONPATH and STEPSCOPE_RECORD in its environment (a cleaned one, a "
        "container or a script that overwrites PYTHONPATH loses them), or use stepscope.profile() in the script"
    )


# From the call that starts a process to its first instruction, and back by a tick of the kernel's clock.
_AFTER_NS, _BEFORE_NS = 2_000_000_000, 20_000_000
_MOST_GENERATIONS = 16
QUICKEST = 0.01  # quantile of the steady steps: the least step alone may be one that was cut wrong


def children(
    tables: Tables, labelled: LabelledSteps, readings: pl.DataFrame | None, cpu: CpuFacts | None, mean_ms: float | None
) -> ChildrenFacts | None:
    """None without telemetry of the training time.

    Args:
        readings: of the training time, as `readings.training` gives them.
    """
    if readings is None:
        return None
    used = _cores(readings)
    groups: dict[tuple[str, Place | None, str | None], list[float]] = defaultdict(list)
    starts = _Starts(tables)
    for row in tables.processes.filter(pl.col("role") == OTHER).iter_rows(named=True):
        cores = used.get((row["host"], row["pid"]), 0.0)
        if cores > 0:
            event = starts.of(row)
            groups[_named(row, event)].append(cores)
    found = [Child(command, how, place, len(cores), sum(cores)) for (command, place, how), cores in groups.items()]
    found.sort(key=lambda child: (-child.cores, child.command))
    total = sum(child.cores for child in found)
    cost = most = None
    if cpu is not None and mean_ms is not None and found:
        cost, most = (share * mean_ms for share in _lost(cpu, total))
        quickest = labelled.steady()["wall_ns"].quantile(QUICKEST)
        if quickest is not None and cost > 0 and _others(cpu) < total:
            # between two turns of another process short steps run as they would without it
            most = max(most, mean_ms - quickest / 1e6)
    return ChildrenFacts(tuple(found), total, cost, most)


def _lost(cpu: CpuFacts, children: float) -> tuple[float, float]:
    """(cost, at most) as shares of the step.

    While the main thread was ready without a core, others had the cores: each in proportion to what it used.
    """
    pool = cpu.pool
    main = pool.main_cpu_share if pool is not None else max(0.0, 1.0 - cpu.run_delay_share)
    beside = max(children, cpu.own_cores - main * cpu.ranks_on_host + _others(cpu))
    waited = max(0.0, cpu.run_delay_share - (cpu.throttled_share or 0.0))
    most = waited
    if pool is not None and cpu.ranks_on_host == 1:
        ready = min(1.0, pool.ready_threads / max(1, (cpu.threads or 2) - 1))
        asleep = min(max(0.0, pool.main_off_share - pool.other_waits_share), ready)  # until the pool had a core
        waited += asleep
        most += asleep + main * ready  # it may have looked for work instead of sleeping
    return waited * children / beside if beside > 0 else 0.0, min(1.0, most)


def _others(cpu: CpuFacts) -> float:
    """Cores that processes of others used; 0 where nothing tells."""
    return (cpu.pool.others_cores or 0.0) if cpu.pool is not None else 0.0


def _cores(readings: pl.DataFrame) -> dict[tuple[str, int], float]:
    """Processor use by (host, pid), mean over all readings of that host: none while the process was not there."""
    counts = readings.group_by("host").agg(pl.col("time_ns").n_unique().alias("readings"))
    cpu = readings.filter((pl.col("metric") == "cpu_pct") & pl.col("pid").is_not_null())
    sums = cpu.group_by("host", "pid").agg(pl.col("value").sum()).join(counts, on="host")
    return {(host, pid): value / 100.0 / count for host, pid, value, count in sums.rows()}


class _Starts:
    """Which line started a process."""

    def __init__(self, tables: Tables) -> None:
        known = set(tables.processes["pid"].drop_nulls().to_list())
        self._by_pid: dict[int, dict[str, Any]] = {}
        self._loose: list[tuple[int, dict[str, Any]]] = []
        for row, data in event_data(tables, "child"):
            pid = data.get("pid")
            if isinstance(pid, int) and pid in known:
                self._by_pid[pid] = data
            else:
                self._loose.append((row["time_ns"], data))
        self._parents = {row["pid"]: row for row in tables.processes.iter_rows(named=True)}

    def of(self, process: dict[str, Any]) -> dict[str, Any] | None:
        """The event of its start, or of that of its nearest ancestor with one."""
        for each in self._ancestry(process):
            if each["pid"] in self._by_pid:
                return self._by_pid[each["pid"]]
        for each in self._ancestry(process):
            if each["role"] == OTHER and each["start_ns"] is not None:
                near = [
                    (abs(each["start_ns"] - time_ns), data)
                    for time_ns, data in self._loose
                    if -_BEFORE_NS <= each["start_ns"] - time_ns <= _AFTER_NS
                ]
                if near:
                    return min(near, key=lambda pair: pair[0])[1]
        return None

    def _ancestry(self, process: dict[str, Any]) -> Iterator[dict[str, Any]]:
        current: dict[str, Any] | None = process
        for _ in range(_MOST_GENERATIONS):
            if current is None:
                return
            yield current
            current = self._parents.get(current["ppid"])


def _named(row: dict[str, Any], event: dict[str, Any] | None) -> tuple[str, Place | None, str | None]:
    """(command, place, how). A copy of the training process has its command line: what it was made to run says more."""
    command = row["command"] or "?"
    if event is None:
        return command, None, None
    how = event.get("how")
    if how == "multiprocessing.Process" and event.get("pid") == row["pid"]:
        command = f"Process({event.get('command')})"
    return command, place_of(event), str(how) if how is not None else None
