"""Hosts over several runs: which of them keep being late, by the verdicts that the runs' reports hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct, field

from stepscope.files import decoded_small, read_small
from stepscope.model.comparison import HostHistory
from stepscope.read.run_folder import machines_of, ranks_in
from stepscope.read.streams import natural

MAX_BYTES = 256 * 2**20  # of a report
MOST_RANKS = 64  # whose hosts are looked up: runs that were read in full have fewer
OF_A_HOST = ("rank", "host", "link")  # kinds of lateness; a stage or a rotating cause is no host's
STRAGGLER = "communication.straggler"
_NOT_ENOUGH = "not_enough"


class RunOnHosts(Struct, frozen=True):
    """What a run says of its hosts. `judged` is empty where `reason` says why; `late` by host, largest cost first."""

    name: str
    started_ns: int | None
    hosts: tuple[str, ...]
    judged: tuple[str, ...] = ()
    late: Mapping[str, tuple[KeptLate, ...]] = {}
    reason: str = ""


class KeptLate(Struct):
    """What a report says of one thing that holds the others up."""

    kind: str
    cause: str
    cost_ms: float
    excess_ms: float
    hosts: list[str] = []


class _Verdict(Struct):
    verdict: str
    reason: str = ""
    stragglers: list[KeptLate] = []


class _Read(Struct):
    judged_hosts: list[str] = []


class _Views(Struct):
    many_ranks: _Verdict | None = None
    ranks_read: _Read | None = None


class _Finding(Struct):
    """Or a rule that was not judged."""

    rule: str
    cost_ms_per_step: float | None = None
    ranks: list[int] = []


class _Run(Struct):
    started_ns: int | None = None
    hosts: list[str] = []
    ranks: list[int] = []


class _Report(Struct):
    """The little of report.json that is needed; the rest is skipped."""

    run: _Run = field(default_factory=_Run)
    views: _Views = field(default_factory=_Views)
    findings: list[_Finding] = []
    abstained: list[_Finding] = []
    ignored: list[_Finding] = []


class _Rank(Struct):
    host: str | None = None


def run_on_hosts(folder: Path, name: str) -> RunOnHosts:
    """What RUN/report.json says of the run's hosts; of one without, its hosts alone."""
    machines = machines_of(path.name for path in sorted(folder.glob("host-*")) if path.is_dir())
    reduced = {path.name.removeprefix("host-") for path in folder.glob("reduced/host-*") if path.is_dir()}
    hosts = tuple(sorted({*machines.values(), *reduced}))
    try:
        report = msgspec.json.decode(read_small(folder / "report.json", MAX_BYTES), type=_Report)
    except FileNotFoundError:
        return RunOnHosts(name, None, hosts, reason="it has no report yet: stepscope analyze makes one")
    except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        return RunOnHosts(name, None, hosts, reason=f"its report.json cannot be read ({error})")
    found = RunOnHosts(name, report.run.started_ns, hosts)
    verdict, read = report.views.many_ranks, report.views.ranks_read
    if verdict is not None and read is not None:
        if verdict.verdict == _NOT_ENOUGH:
            return msgspec.structs.replace(found, reason=verdict.reason)
        return _judged(found, read.judged_hosts, verdict.stragglers)
    return _read_in_full(folder, found, report)


def _read_in_full(folder: Path, found: RunOnHosts, report: _Report) -> RunOnHosts:
    """By the rule that lays a few ranks side by side: the host is that of the late rank."""
    host_of = _hosts_of_ranks(folder)
    judged = sorted(set(host_of.values()))
    not_judged = {row.rule for row in (*report.abstained, *report.ignored)}
    if len(report.run.ranks) < 2 or len(judged) < 2:
        return msgspec.structs.replace(found, reason="one host alone: nothing to compare it with")
    if STRAGGLER in not_judged:
        return msgspec.structs.replace(found, reason=f"{STRAGGLER} was not judged")
    late = [
        KeptLate("rank", "unknown", row.cost_ms_per_step, row.cost_ms_per_step, [host_of[rank]])
        for row in report.findings
        if row.rule == STRAGGLER and row.cost_ms_per_step is not None
        for rank in row.ranks[:1]
        if rank in host_of
    ]
    return _judged(found, judged, late)


def _judged(found: RunOnHosts, judged: Iterable[str], stragglers: Iterable[KeptLate]) -> RunOnHosts:
    late: dict[str, list[KeptLate]] = defaultdict(list)
    for one in sorted(stragglers, key=lambda one: -one.cost_ms):
        for host in dict.fromkeys(one.hosts) if one.kind in OF_A_HOST else ():
            late[host].append(one)
    known = tuple(judged)
    return msgspec.structs.replace(
        found,
        hosts=tuple(sorted({*found.hosts, *known})),
        judged=known,
        late={host: tuple(rows) for host, rows in late.items() if host in known},
    )


def _hosts_of_ranks(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for rank in sorted(ranks_in(folder))[:MOST_RANKS]:
        told = decoded_small(folder / f"rank-{rank}" / "rank.json", MAX_BYTES, _Rank)
        if told is not None and told.host is not None:
            found[rank] = told.host
    return found


def table(runs: Iterable[RunOnHosts]) -> tuple[HostHistory, ...]:
    """A row for each host: those that were late in the largest part of their judged runs first."""
    by_host: dict[str, list[RunOnHosts]] = defaultdict(list)
    for run in runs:
        for host in run.hosts:
            by_host[host].append(run)
    rows = [_row(host, found) for host, found in by_host.items()]
    return tuple(
        sorted(rows, key=lambda row: (-(row.late_share or 0), -(row.cost_ms or 0), -row.judged, natural(row.host)))
    )


def _row(host: str, runs: list[RunOnHosts]) -> HostHistory:
    judged = [run for run in runs if host in run.judged]
    late = [run for run in judged if run.late.get(host)]
    # of each run what cost most there: several findings on one host may be of the same time
    worst = [run.late[host][0] for run in late]
    causes = Counter(one.cause for run in late for one in run.late[host])
    times = {name: [run.started_ns for run in some if run.started_ns is not None]
             for name, some in (("seen", runs), ("late", late))}  # fmt: skip
    return HostHistory(
        host=host,
        runs=len(runs),
        judged=len(judged),
        late=len(late),
        late_share=len(late) / len(judged) if judged else None,
        excess_ms=fmean(one.excess_ms for one in worst) if worst else None,
        cost_ms=fmean(one.cost_ms for one in worst) if worst else None,
        most_cost_ms=max((one.cost_ms for one in worst), default=None),
        causes=dict(causes.most_common()),
        last_seen_ns=max(times["seen"], default=None),
        last_late_ns=max(times["late"], default=None),
    )


def not_judged(runs: Iterable[RunOnHosts]) -> Iterator[tuple[str, str]]:
    """(run, why) of those that count for no host."""
    yield from ((run.name, run.reason) for run in runs if run.reason)
