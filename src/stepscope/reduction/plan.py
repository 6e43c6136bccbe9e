"""What is there to reduce: of a run folder the parts of each machine, of a folder of traces those of each host.

Nothing of it is opened yet but what says whose a rank's folder is. Plans are plain paths and names, so that any
process on any machine that sees the file system can be handed one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from stepscope import __version__
from stepscope.errors import UnreadableInputError, UsageError, readable
from stepscope.read import streams
from stepscope.read.kineto import host_of_name, read_traces
from stepscope.read.raw import Losses, RawRun
from stepscope.read.run_folder import machines_of, parts_of, read_rank_traces
from stepscope.schema import REDUCED_SCHEMA

LAYOUT = 1  # of what is kept; a change reduces every run again
UNKNOWN_HOST = "unknown"  # of traces whose names tell no host


class TracePlan(Struct, frozen=True):
    """A trace of a rank. `process` is the rank's folder, or its name where the trace is of no run of ours."""

    process: str
    path: str
    name: str
    owner: str
    rank: int = 0  # where there is no folder of the rank that says it


class HostPlan(Struct, frozen=True):
    """The part of a run that one machine recorded. `processes` are folders of ranks, one for each rank.

    `left_out` says what of the machine's is not reduced. `source` changes where any of the files does.
    """

    host: str
    run: str
    recorded: bool
    launchers: tuple[str, ...]
    processes: tuple[str, ...]
    source: str
    left_out: tuple[str, ...] = ()
    others: tuple[TracePlan, ...] = ()  # traces of no run of ours

    def traces(self) -> tuple[TracePlan, ...]:
        """All traces of the machine's ranks, as their journals name them."""
        return self.others + tuple(
            TracePlan(folder.name, str(ref.path), ref.name, ref.owner)
            for folder in (Path(self.run) / name for name in self.processes if self.recorded)
            for ref in read_rank_traces(folder)
        )

    def sizes(self) -> list[int]:
        """Bytes of the traces that lie in the run, which is told without reading a journal."""
        own = (file for name in self.processes for file in sorted(Path(self.run, name).glob("trace-*")))
        files = own if self.recorded else (Path(trace.path) for trace in self.others)
        return [_size(file) for file in files]


def plans(run: Path, hosts: Iterable[str] = ()) -> list[HostPlan]:
    """A plan for each machine in order of their names, or for those of `hosts`, whose other parts are not looked at.

    Raises UnreadableInputError for what is neither a run folder nor a folder of traces, and `UsageError` for a host
    that there is not.
    """
    with readable(run, "check its permissions"):
        if not run.is_dir():
            raise UnreadableInputError(f"{run}: no such folder; give the folder that `stepscope run` printed")
        wanted = tuple(hosts)
        names = parts_of(run)
        if any(name.startswith("host-") for name in names):
            return _recorded(run, names, wanted)
        if any((run / name / "steps.jsonl").is_file() for name in names):
            raise UnreadableInputError(f"{run}: nothing in it says which host recorded it; its host-* folders are gone")
        return _of_others(run, wanted)


def hosts_of(run: Path) -> list[str]:
    """The machines that recorded into a run folder; empty of any other folder."""
    with readable(run, "check its permissions"):
        return sorted(set(machines_of(parts_of(run)).values())) if run.is_dir() else []


def _recorded(run: Path, names: list[str], wanted: tuple[str, ...]) -> list[HostPlan]:
    machines = machines_of(names)
    # who is asked for by the name of one of several launchers on a machine means the machine
    chosen = {machines.get(f"host-{host}", host) for host in wanted} or set(machines.values())
    for host in sorted(chosen - set(machines.values())):
        there = ", ".join(sorted(set(machines.values()))[:8])
        raise UsageError(f"--host {host}: recorded nothing of {run}; there are {there}")
    claims: dict[str, set[str]] = {}
    for launcher in machines:
        if machines[launcher] in chosen:
            rows = streams.read_rows(run / launcher / "agents.jsonl", Losses(), launcher)
            claims[launcher] = {row["folder"] for row in rows if isinstance(row.get("folder"), str)}
    ranks = {name for name in names if name.startswith("rank-")}
    unclaimed = ranks.difference(*claims.values())
    alone = len(set(machines.values())) == 1
    by_host: dict[str, list[str]] = {host: [] for host in chosen}
    for launcher, claimed in claims.items():
        by_host[machines[launcher]] += [name for name in claimed if name in ranks]
    # claims are those of the chosen machines: what another has claimed is none of theirs
    looked_at = unclaimed if alone or len(chosen) == len(set(machines.values())) or not any(claims.values()) else ()
    for name in sorted(looked_at):
        told = (streams.read_object(run / name / "rank.json", Losses(), name) or {}).get("host")
        host = next(iter(chosen)) if alone else machines.get(f"host-{told}", str(told))
        if host in chosen:
            by_host[host].append(name)
    return [_plan_of(run, host, machines, sorted(set(by_host[host])), ranks) for host in sorted(chosen)]


def _plan_of(run: Path, host: str, machines: dict[str, str], mine: list[str], ranks: set[str]) -> HostPlan:
    launchers = tuple(sorted(name for name, machine in machines.items() if machine == host))
    parts: dict[str, list[str]] = {}  # of a rank: that of its first process, and those that were started again
    for name in ranks:
        parts.setdefault(name.partition(".")[0], []).append(name)
    kept, left_out = [], []
    for name in mine:
        longest = max(
            parts[name.partition(".")[0]],
            key=lambda other: (_size(run / other / "steps.jsonl"), len(other), other),
        )
        if longest == name:
            kept.append(name)
        else:
            left_out.append(f"{name}: {longest} is the longer part of the same rank, which was started again")
    there = (path for name in (*launchers, *kept) for path in sorted((run / name).iterdir()))
    files = [path for path in there if path.is_file() and not path.is_symlink()]
    return HostPlan(host, str(run), True, launchers, tuple(kept), _source(run, files), tuple(left_out))


def _of_others(run: Path, wanted: tuple[str, ...]) -> list[HostPlan]:
    below = [child for child in sorted(run.iterdir()) if child.is_dir() and machines_of(parts_of(child))]
    if below:
        raise UnreadableInputError(f"{run}: holds {len(below)} runs, name one of them, e.g. {below[-1]}")
    raw: RawRun = read_traces([run])
    by_host: dict[str, list[TracePlan]] = {}
    for rank in raw.ranks:
        told = [host for ref in rank.traces if (host := host_of_name(ref.path.name)) is not None]
        traces = [TracePlan(rank.name, str(ref.path), ref.name, ref.owner, rank.rank) for ref in rank.traces]
        by_host.setdefault(told[0] if told else UNKNOWN_HOST, []).extend(traces)
    for host in wanted:
        if host not in by_host:
            raise UsageError(f"--host {host}: no trace in {run} is of it; there are {', '.join(list(by_host)[:8])}")
    return [
        HostPlan(
            host=host,
            run=str(run),
            recorded=False,
            launchers=(),
            processes=tuple(dict.fromkeys(trace.process for trace in traces)),
            source=_source(run, [Path(trace.path) for trace in traces]),
            left_out=tuple(in_words(raw.losses)),
            others=tuple(traces),
        )
        for host, traces in sorted(by_host.items())
        if not wanted or host in wanted
    ]


def in_words(losses: Losses) -> list[str]:
    """What reading cost, a line for each kind."""
    return [
        f"{count:,} {kind.replace('_', ' ')} ({', '.join(losses.files[kind][:3])}"
        f"{' …' if len(losses.files[kind]) > 3 else ''})"
        for kind, count in sorted(losses.counts.items())
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _source(run: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{REDUCED_SCHEMA} {LAYOUT} {__version__}".encode())
    for file in files:
        known = file.stat()
        digest.update(f"\0{os.path.relpath(file, run)}\0{known.st_size}\0{known.st_mtime_ns}".encode(errors="replace"))
    return digest.hexdigest()
