"""Meters of energy as telemetry read them: what each has counted, whose it is, and what of it cannot be told.

A counter is right between any two readings, however far apart, unless it fell (the driver was loaded anew), may have
begun anew more than once, or grew by more than the device can draw; such a stretch is a hole, and a time with a hole in
it has no figure. Within a stretch the growth is spread evenly. Where there is no counter, power sampled once a second
is summed instead, and that is said; between samples that lie apart nothing is known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.intervals import Intervals
from stepscope.engine.journal import event_data
from stepscope.read.text import string
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.schema import RankInfo, Tables

GPU, PACKAGE, DRAM = "gpu", "package", "dram"
COUNTER, RAPL, SAMPLED = "counter", "RAPL", "sampled power"
GPU_ENERGY, CPU_ENERGY = "gpu_energy_mj", "cpu_energy_uj"
_JOULES = {GPU_ENERGY: 1e-3, CPU_ENERGY: 1e-6}
_RANGE, _AFTER, _POWER, _PROCESS = "cpu_energy_range_uj", "energy_after_ns", "gpu_power_w", "gpu_process"
_LIMITS = ("gpu_power_limit_w", "gpu_power_default_w")
_METRICS = (*_JOULES, _RANGE, _AFTER, _POWER, _PROCESS, *_LIMITS)
_MOST_DIGITS = 9  # of the number of a device
_LATEST_AFTER_NS = 60 * 10**9  # of a reading after the time of its row: more is no time

# What no device draws. Boards stay near the limit in force, on average over a second; where it is not known, ten times
# that of the largest board sold. The largest processors are built for 500 W, and their memory draws less.
OVER_LIMIT = 1.5
MOST_BOARD_W, MOST_PROCESSOR_W = 10_000.0, 1_000.0
UPDATE_S = 1.0  # a counter is brought up to date now and then: its growth may be of longer than lies between readings
GAP_S = 5.0  # readings come once a second: a longer stretch is said, and of sampled power a hole

FELL, JUMPED, UNSEEN = 1, 2, 3  # kinds of holes
_HOLES = {
    FELL: "its counter fell back, as when the driver is loaded anew",
    JUMPED: "its counter grew by more than the device can draw",
    UNSEEN: "too long without a reading",
}


class Series(NamedTuple):
    """What a meter has counted since its first reading."""

    times_ns: Int64  # ascending, each once
    joules: Floats  # what a hole holds is left out
    holes: Int64  # of each stretch between two readings the kind of hole, 0 of one that is known

    @property
    def ends_ns(self) -> tuple[int, int]:
        """The first and the last reading."""
        return int(self.times_ns[0]), int(self.times_ns[-1])

    def drawn(self, times: Intervals) -> tuple[float, float]:
        """(J, s) of these times, as far as they lie between the first and the last reading."""
        first, last = self.ends_ns
        starts, ends = (np.clip(each, first, last) for each in times)
        edges = (self.times_ns - first) / 1e9
        at = [np.interp((each - first) / 1e9, edges, self.joules) for each in (starts, ends)]
        return float((at[1] - at[0]).sum()), float((ends - starts).sum()) / 1e9

    def hole(self, times: Intervals) -> str | None:
        """Why the energy of these times is not known, None where it is."""
        bad = np.flatnonzero(self.holes)
        for start, end, kind in zip(self.times_ns[bad], self.times_ns[bad + 1], self.holes[bad], strict=True):
            if ((times.starts < end) & (times.ends > start)).any():
                return _HOLES[int(kind)]
        return None

    def readings(self, start_ns: int, end_ns: int) -> int:
        return int(((self.times_ns >= start_ns) & (self.times_ns <= end_ns)).sum())

    def longest_gap_s(self, times: Intervals) -> float:
        """Between two readings of which one lies in these times."""
        if not len(times.starts) or len(self.times_ns) < 2:
            return 0.0
        near = (self.times_ns[1:] > times.starts[0]) & (self.times_ns[:-1] < times.ends[-1])
        return float(np.diff(self.times_ns)[near].max(initial=0)) / 1e9


def counted(times_ns: Int64, joules: Floats, most_w: float, highest_j: float | None = None) -> Series | None:
    """A counter; `highest_j` is where it begins anew, `most_w` what the device can draw. None of a single reading."""
    times_ns, joules = _ordered(times_ns, joules)
    if len(times_ns) < 2:
        return None
    grown, seconds = np.diff(joules), np.diff(times_ns) / 1e9
    holes = np.zeros(len(grown), np.int64)
    if highest_j is not None:
        grown = np.where(grown < 0, grown + highest_j, grown)
        holes[seconds * most_w >= highest_j] = UNSEEN
    holes[(grown > most_w * (seconds + UPDATE_S)) & (holes == 0)] = JUMPED
    holes[grown < 0] = FELL
    return Series(times_ns, np.append(0.0, np.cumsum(np.where(holes, 0.0, grown))), holes)


def sampled(times_ns: Int64, watts: Floats, most_w: float) -> Series | None:
    """Sampled power, summed: the mean of two neighbours over the time between them."""
    there = (watts >= 0) & (watts <= most_w)
    times_ns, watts = _ordered(times_ns[there], watts[there])
    if len(times_ns) < 2:
        return None
    seconds = np.diff(times_ns) / 1e9
    holes = np.where(seconds > GAP_S, UNSEEN, 0)
    drawn = np.where(holes, 0.0, (watts[1:] + watts[:-1]) / 2 * seconds)
    return Series(times_ns, np.append(0.0, np.cumsum(drawn)), holes)


def _ordered(times_ns: Int64, values: Floats) -> tuple[Int64, Floats]:
    """In order of time; of several values at one moment the highest, as a counter never falls."""
    order = np.lexsort((values, times_ns))
    times_ns, values = times_ns[order], values[order]
    last = np.append(np.diff(times_ns) > 0, True)[: len(times_ns)]
    return times_ns[last], values[last]


class Meter(Struct, frozen=True):
    """One board, package or memory of a machine, once, however many telemetries read it.

    `shared` says whether others used it, None where nobody tells; `why` gives the reason.
    """

    machine: str
    device: str
    kind: str
    name: str | None
    counter: Series | None
    sampled: Series | None
    shared: bool | None
    why: str | None

    @property
    def label(self) -> str:
        return self.device if self.name is None else f"{self.device} ({self.name})"

    def during(self, times: Intervals) -> tuple[Series | None, str, str | None]:
        """(what tells of these times, what that is, why it is not the counter)."""
        of_counter = COUNTER if self.kind == GPU else RAPL
        why = None if self.counter is None else self.counter.hole(times)
        if self.counter is not None and why is None:
            return self.counter, of_counter, None
        if self.sampled is None:
            return None, of_counter, why or "no energy was read"
        hole = self.sampled.hole(times)
        said = why or "the driver gives no energy counter"
        return (self.sampled, SAMPLED, said) if hole is None else (None, SAMPLED, f"{said}; {hole}")


class Meters(Struct, frozen=True):
    """The meters of a run's machines. `unknown` says why it is not known which boards are the run's, or what they draw.

    `boards` counts those of the run, None where they are not known; `others` boards that it did not use.
    """

    meters: tuple[Meter, ...]
    machine_of: Mapping[str, str]  # process of the training -> machine
    boards: int | None
    unknown: str | None
    others: int = 0


class _Readings(NamedTuple):
    times_ns: Int64
    values: Floats
    pids: Sequence[int | None]


_By = Mapping[tuple[str, str], Mapping[str, _Readings]]  # (host, device) -> metric -> readings


def meters(tables: Tables) -> Meters:
    """The boards that the run used, and the processors of its machines."""
    by = _readings(tables)
    manifests = _manifests(tables)
    machines = {host: string(manifest.get("host")) or host for host, manifest in manifests.items()}
    machine_of = {rank.process: machines.get(rank.host, rank.host) for rank in tables.ranks}
    boards, count, unknown, others = _boards(tables, by, manifests, machines)
    return Meters((*boards, *_processors(by, manifests, machines)), machine_of, count, unknown, others)


def _readings(tables: Tables) -> _By:
    if tables.system.is_empty():
        return {}
    own = tables.system.filter(pl.col("metric").is_in(_METRICS) & pl.col("value").is_finite())
    own = own.drop_nulls(["time_ns", "device", "host"])
    found: dict[tuple[str, str], dict[str, _Readings]] = {}
    for (host, device, metric), rows in own.partition_by("host", "device", "metric", as_dict=True).items():
        read = _Readings(rows["time_ns"].to_numpy(), rows["value"].to_numpy(), rows["pid"].to_list())
        found.setdefault((str(host), str(device)), {})[str(metric)] = read
    return found


def _manifests(tables: Tables) -> dict[str, Mapping[str, Any]]:
    """By the name that a host has in the tables."""
    hosts = tables.run.hosts
    if len(hosts) == len(tables.manifests):
        return dict(zip(hosts, tables.manifests, strict=True))
    named = {string(one.get("host")): one for one in tables.manifests}  # a second launcher of a host is `NAME.2`
    return {host: named.get(host) or named.get(host.rpartition(".")[0]) or {} for host in hosts}


def _hardware(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    found = manifest.get("hardware")
    return found if isinstance(found, dict) else {}


def _listed(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The manifest's boards by device."""
    gpus = _hardware(manifest).get("gpus")
    rows = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return {f"gpu:{gpu['index']}": gpu for gpu in rows if isinstance(gpu.get("index"), int)}


def _own_times(by_metric: Mapping[str, _Readings], metric: str) -> Int64:
    """When a counter was read: the time of its row, and how much later it came to be its turn."""
    read = by_metric[metric]
    after = by_metric.get(_AFTER)
    if after is None:
        return read.times_ns
    order = np.argsort(after.times_ns, kind="stable")
    at = np.searchsorted(after.times_ns, read.times_ns, sorter=order)
    found = order[np.minimum(at, len(order) - 1)]
    later = after.values[found]
    known = (after.times_ns[found] == read.times_ns) & (later >= 0) & (later < _LATEST_AFTER_NS)
    return read.times_ns + np.where(known, later, 0.0).astype(np.int64)


def _highest(metrics: Mapping[str, _Readings]) -> float | None:
    """Where a counter of a processor begins anew, in J."""
    highest = metrics[_RANGE].values.max() * _JOULES[CPU_ENERGY] if _RANGE in metrics else 0.0
    return float(highest) if highest > 0 else None


def _longest(found: Iterable[Series | None]) -> Series | None:
    """Of several readers of one device the one that watched longest: their times are not exact enough to be mixed."""
    return max(filter(None, found), key=lambda one: one.ends_ns[1] - one.ends_ns[0], default=None)


# ---- processors ------------------------------------------------------------------------------------------------------


def _processors(by: _By, manifests: Mapping[str, Mapping[str, Any]], machines: Mapping[str, str]) -> list[Meter]:
    found: dict[tuple[str, str], list[Series | None]] = {}
    for (host, device), metrics in sorted(by.items()):
        if CPU_ENERGY in metrics:
            joules = metrics[CPU_ENERGY].values * _JOULES[CPU_ENERGY]
            one = counted(_own_times(metrics, CPU_ENERGY), joules, MOST_PROCESSOR_W, _highest(metrics))
            found.setdefault((machines.get(host, host), device), []).append(one)
    whole = {machines.get(host, host): _part_of_machine(manifest) for host, manifest in manifests.items()}
    return [
        Meter(
            machine=machine,
            device=device,
            kind=DRAM if device.endswith("-dram") else PACKAGE,
            name=None,
            counter=_longest(series),
            sampled=None,
            shared=True if whole.get(machine) else None,
            why=whole.get(machine) or "counted for the whole machine, whoever used it",
        )
        for (machine, device), series in found.items()
    ]


def _part_of_machine(manifest: Mapping[str, Any]) -> str | None:
    """Said where the run may use only some of the processors: the others' energy is not the run's."""
    hardware = _hardware(manifest)
    cores, allowed, limit = (hardware.get(name) for name in ("logical_cores", "affinity", "cgroup_cpu_limit"))
    own = min(
        len(allowed) if isinstance(allowed, list) and allowed else np.inf,
        limit if isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit > 0 else np.inf,
    )
    if not isinstance(cores, int) or own >= cores:
        return None
    return f"the run may use {own:g} of {cores} processors, and all of them are counted"


# ---- boards ----------------------------------------------------------------------------------------------------------


def _boards(
    tables: Tables, by: _By, manifests: Mapping[str, Mapping[str, Any]], machines: Mapping[str, str]
) -> tuple[list[Meter], int | None, str | None, int]:
    """(meters of the run's boards, how many these are, what is not known of them, boards that are not the run's)."""
    pids: dict[str, set[int]] = {}
    for rank in tables.ranks:
        pids.setdefault(machines.get(rank.host, rank.host), set()).add(rank.pid)
    for host, pid in tables.processes.select("host", "pid").drop_nulls().rows() if tables.processes.height else ():
        pids.setdefault(machines.get(host, host), set()).add(pid)
    on_device = _device_numbers(tables)
    used: dict[tuple[str, str], list[tuple[str, str]]] = {}  # board -> (host, device), one for each that read it
    every: set[tuple[str, str]] = set()
    unknown = None
    for host in dict.fromkeys((*manifests, *(host for host, _ in by))):
        manifest = manifests.get(host, {})
        machine, listed = machines.get(host, host), _listed(manifest)
        devices = sorted({*listed, *(name for at, name in by if at == host and name.startswith("gpu:"))}, key=_natural)
        keys = {device: (machine, string(listed.get(device, {}).get("uuid")) or device) for device in devices}
        every.update(keys.values())
        own = {pid for pid in pids.get(machine, ()) if pid > 0}
        seen = [device for device in devices if own & set(_listed_pids(by, host, device))]
        ranks = [rank for rank in tables.ranks if rank.host == host]
        chosen, why = (seen, None) if seen else _visible(devices, listed, manifest, ranks, on_device)
        unknown = unknown or why
        for device in chosen:
            used.setdefault(keys[device], []).append((host, device))
    trained = Counter(machines.get(rank.host, rank.host) for rank in tables.ranks)
    made = [
        _board(machine, places, by, manifests, pids.get(machine, set()), trained[machine])
        for (machine, _), places in used.items()
    ]
    if unknown is None and not made and any(_on_accelerator(rank) for rank in tables.ranks):
        unknown = "the driver tells of no GPU of the run (NVML)"
    return made, len(made) if unknown is None else None, unknown, len(every - set(used))


def _natural(device: str) -> tuple[int, str]:
    number = device.rpartition(":")[2]
    return (int(number) if number.isdecimal() and len(number) < _MOST_DIGITS else 0), device


def _listed_pids(by: _By, host: str, device: str) -> list[int]:
    read = by.get((host, device), {}).get(_PROCESS)
    return [] if read is None else [pid for pid in read.pids if pid is not None]


def _on_accelerator(rank: RankInfo) -> bool:
    return rank.device is not None and rank.device.partition(":")[0] != "cpu"


def _device_numbers(tables: Tables) -> dict[str, set[int]]:
    """By process the numbers of CUDA devices on which torch held memory."""
    found: dict[str, set[int]] = {}
    for row, data in event_data(tables, "memory"):
        match = re.fullmatch(r"cuda:(\d{1,4})", string(data.get("device")) or "")
        if match is not None:
            found.setdefault(str(row["process"]), set()).add(int(match[1]))
    return found


def _visible(
    devices: Sequence[str],
    listed: Mapping[str, Mapping[str, Any]],
    manifest: Mapping[str, Any],
    ranks: Sequence[RankInfo],
    on_device: Mapping[str, set[int]],
) -> tuple[list[str], str | None]:
    """(the boards of a host's training processes, why they are not known) where the driver lists none of its processes:
    by the numbers of their CUDA devices among those that CUDA_VISIBLE_DEVICES names."""
    training = [rank for rank in ranks if _on_accelerator(rank) or rank.process in on_device]
    if not training or not devices:
        return [], None
    order, why = _cuda_order(devices, listed, manifest)
    numbers = set().union(*(on_device.get(rank.process, ()) for rank in training))
    if why is None and numbers and max(numbers) < len(order):
        return [order[number] for number in sorted(numbers)], None
    if why is None and not numbers and len(order) in (1, len(training)):
        return list(order), None
    return [], why or f"which of {len(devices)} GPUs the run used is not known: the driver lists no process of it"


def _cuda_order(
    devices: Sequence[str], listed: Mapping[str, Mapping[str, Any]], manifest: Mapping[str, Any]
) -> tuple[list[str], str | None]:
    """(boards in the order in which CUDA counts them, why it is not known)."""
    environment = manifest.get("environment")
    given = environment if isinstance(environment, dict) else {}
    text, by_bus = string(given.get("CUDA_VISIBLE_DEVICES")), given.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    names = {string(listed.get(device, {}).get("name")) for device in devices}
    counted = "CUDA may count GPUs of different kinds in another order than the driver; set CUDA_DEVICE_ORDER"
    alike = by_bus or len(names) == 1
    if text is None:
        return list(devices), None if alike else f"{counted}=PCI_BUS_ID"
    order: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word.startswith("MIG"):
            return [], "the run used a part of a GPU (MIG), and energy is counted for whole boards"
        by_uuid = [device for device in devices if word and _uuid(listed, device).startswith(word)]
        if word.startswith("GPU-") and len(by_uuid) == 1:
            order.append(by_uuid[0])
        elif word.isdecimal() and len(word) < _MOST_DIGITS and f"gpu:{int(word)}" in devices:
            if not alike:
                return [], f"{counted}=PCI_BUS_ID"
            order.append(f"gpu:{int(word)}")
        else:
            break  # as CUDA does
    return order, None


def _uuid(listed: Mapping[str, Mapping[str, Any]], device: str) -> str:
    return string(listed.get(device, {}).get("uuid")) or ""


def _board(
    machine: str,
    places: Sequence[tuple[str, str]],
    by: _By,
    manifests: Mapping[str, Mapping[str, Any]],
    own: set[int],
    ranks: int,
) -> Meter:
    counters, powers = [], []
    for place in places:
        metrics = by.get(place, {})
        limits = [metrics[name].values.max() for name in _LIMITS if name in metrics]
        most_w = OVER_LIMIT * max(limits) if limits and max(limits) > 0 else MOST_BOARD_W
        if GPU_ENERGY in metrics:
            joules = metrics[GPU_ENERGY].values * _JOULES[GPU_ENERGY]
            counters.append(counted(_own_times(metrics, GPU_ENERGY), joules, most_w))
        if _POWER in metrics:
            powers.append(sampled(metrics[_POWER].times_ns, metrics[_POWER].values, most_w))
    host, device = places[0]
    facts = _listed(manifests.get(host, {})).get(device, {})
    shared, why = _shared(places, by, facts, own, ranks)
    return Meter(
        machine=machine,
        device=device,
        kind=GPU,
        name=string(facts.get("name")),
        counter=_longest(counters),
        sampled=_longest(powers),
        shared=shared,
        why=why,
    )


def _shared(
    places: Sequence[tuple[str, str]], by: _By, facts: Mapping[str, Any], own: set[int], ranks: int
) -> tuple[bool | None, str | None]:
    """(whether others used the board, None where nobody tells; why)."""
    if facts.get("mig") is True:
        return True, "it is divided (MIG), and the counter is of the whole board"
    if "vg" in (string(facts.get("virtualization")) or ""):
        return True, "it is divided (vGPU), and the counter is of the whole board"
    listed = {pid for place in places for pid in _listed_pids(by, *place)}
    strangers = len(listed - own)
    if listed & own:
        said = "another process" if strangers == 1 else f"{strangers} other processes"
        return (True, f"{said} used it too, and the counter is of the whole board") if strangers else (False, None)
    at_once = Counter(
        time for place in places[:1] if (read := by.get(place, {}).get(_PROCESS)) for time in read.times_ns.tolist()
    )
    most = max(at_once.values(), default=0)
    if most > max(1, ranks):  # whatever numbers they have here
        return True, f"{most} processes used it, and the run trains in {ranks}; the counter is of the whole board"
    return None, "the driver lists no process of the run on it, so others may have used it too"


def as_telemetry(tables: Tables) -> pl.DataFrame | None:
    """Mean power since the reading before, and energy since the first one, as rows of the table of the system.

    Of all devices that were read, whoever used them; None where no counter was.
    """
    parts = []
    for (host, device), metrics in _readings(tables).items():
        for metric, (power, energy) in _TELEMETRY.items():
            if metric not in metrics:
                continue
            joules = metrics[metric].values * _JOULES[metric]
            most_w = MOST_BOARD_W if metric == GPU_ENERGY else MOST_PROCESSOR_W
            series = counted(_own_times(metrics, metric), joules, most_w, _highest(metrics))
            shown = np.unique(metrics[metric].times_ns)
            if series is None or len(shown) != len(series.times_ns):
                continue
            since = np.searchsorted(shown, shown - _SHORTEST_NS, side="right") - 1  # the reading before
            holes = np.append(0, np.cumsum(series.holes != 0))
            at = np.flatnonzero((since >= 0) & (holes == holes[np.maximum(since, 0)]))
            seconds = (series.times_ns[at] - series.times_ns[since[at]]) / 1e9
            watts = (series.joules[at] - series.joules[since[at]]) / seconds
            for name, unit, times, values in ((energy, "J", shown, series.joules), (power, "W", shown[at], watts)):
                known = {"host": host, "device": device, "metric": name, "unit": unit, "pid": None}
                made = pl.DataFrame({"time_ns": times, "value": values})
                made = made.with_columns(**{key: pl.lit(value) for key, value in known.items()})
                parts.append(made.select(pl.col(key).cast(kind) for key, kind in tables.system.schema.items()))
    return pl.concat(parts) if parts else None


_TELEMETRY = {GPU_ENERGY: ("gpu_counted_power_w", "gpu_energy_j"), CPU_ENERGY: ("power_w", "energy_j")}
TELEMETRY = tuple(name for names in _TELEMETRY.values() for name in names)
_SHORTEST_NS = 500_000_000  # the counters of boards are brought up to date several times a second, no more
