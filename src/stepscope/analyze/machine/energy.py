"""What a run drew, in joules: by device, by step and by sample; and what that costs at the user's prices.

A counter is right between any two readings, however far apart, unless it fell (the driver was loaded anew), may have
begun anew more than once, or grew by more than the device can draw; such a stretch is a hole, and a time with a hole in
it has no figure. Within a stretch the growth is spread evenly. Where there is no counter, power sampled once a second
is summed instead, and that is said; between samples that lie apart nothing is known.

A sum holds every device of the run once, and there is none where one of its boards is shared or not known: a part of
the energy under the name of all would be wrong. What is left out is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.machine.readings import FEW_READINGS, mapping
from stepscope.engine.intervals import Intervals
from stepscope.engine.journal import event_data
from stepscope.engine.step_labels import times_of
from stepscope.model import DeviceTime, StepFacts
from stepscope.model.counted import things
from stepscope.model.machine import EnergyCost, EnergyDomain, EnergyFacts, Prices, StepEnergy
from stepscope.read.text import string
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.schema import RankInfo, Tables

GPU, PACKAGE, DRAM = "gpu", "package", "dram"
_WORDS = {GPU: "GPU", PACKAGE: "processors", DRAM: "memory"}  # in the order of sums
COUNTER, RAPL, SAMPLED = "counter", "RAPL", "sampled power"
GPU_ENERGY, CPU_ENERGY = "gpu_energy_mj", "cpu_energy_uj"
_JOULES = {GPU_ENERGY: 1e-3, CPU_ENERGY: 1e-6}
_RANGE, _AFTER, _POWER, _PROCESS = "cpu_energy_range_uj", "energy_after_ns", "gpu_power_w", "gpu_process"
_LIMITS = ("gpu_power_limit_w", "gpu_power_default_w")
_METRICS = (*_JOULES, _RANGE, _AFTER, _POWER, _PROCESS, *_LIMITS)
_CURVES = {GPU_ENERGY: ("gpu_counted_power_w", "gpu_energy_j"), CPU_ENERGY: ("power_w", "energy_j")}
TELEMETRY = tuple(name for names in _CURVES.values() for name in names)  # what `as_telemetry` makes
_MOST_DIGITS = 9  # of the number of a device
_LATEST_AFTER_NS = 60 * 10**9  # of a reading after the time of its row: more is no time

# What no device draws. Boards stay near the limit in force, on average over a second; where it is not known, ten times
# that of the largest board sold. The largest processors are built for 500 W, and their memory draws less.
OVER_LIMIT = 1.5
MOST_BOARD_W, MOST_PROCESSOR_W = 10_000.0, 1_000.0
UPDATE_S = 1.0  # a counter is brought up to date now and then: its growth may be of longer than lies between readings
GAP_S = 5.0  # readings come once a second: a longer stretch is said, and of sampled power a hole
_SHORTEST_NS = 500_000_000  # the counters of boards are brought up to date several times a second, no more
_AGREE = 0.1  # of the energy: sampled power that differs more is said (arXiv 2312.02741: some boards sample a quarter)
_AGREE_READINGS = 10  # of fewer the mean moves by that much by itself where load comes and goes
_REACHED = 0.9  # of the run: what readings do not reach over is said below it; the recorder needs a moment to start

FELL, JUMPED, UNSEEN = 1, 2, 3  # kinds of holes
_HOLES = {
    FELL: "its counter fell back, as when the driver is loaded anew",
    JUMPED: "its counter grew by more than the device can draw",
    UNSEEN: "too long without a reading",
}
_J_PER_KWH, _J_PER_WH = 3.6e6, 3.6e3
NO_TELEMETRY = "no telemetry was recorded"
NO_STEPS = "no training step lies between two readings of energy"
_NOT_TOLD = "this recording does not tell why; stepscope doctor says what this machine allows"


# ---- one meter -------------------------------------------------------------------------------------------------------


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


def _sampled(times_ns: Int64, watts: Floats, most_w: float) -> Series | None:
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


class Meter(NamedTuple):
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


# ---- what telemetry read ---------------------------------------------------------------------------------------------


_Metrics = Mapping[str, pl.DataFrame]  # metric -> its readings: time_ns, own_ns (when a counter was read), value, pid


class _Host(NamedTuple):
    """A host by its manifest; two launchers of one machine are two hosts. `gpus` and `readings` are by device."""

    machine: str
    hardware: Mapping[str, Any]
    environment: Mapping[str, Any]
    gpus: Mapping[str, Mapping[str, Any]]
    readings: Mapping[str, _Metrics]

    def uuid(self, device: str) -> str:
        return string(self.gpus.get(device, {}).get("uuid")) or ""

    def pids(self, device: str) -> list[int]:
        """Of the processes that the driver listed on a board."""
        read = self.readings.get(device, {}).get(_PROCESS)
        return [] if read is None else read["pid"].drop_nulls().to_list()


def _readings(tables: Tables) -> dict[str, dict[str, dict[str, pl.DataFrame]]]:
    """host -> device -> metric -> readings."""
    found: dict[str, dict[str, dict[str, pl.DataFrame]]] = {}
    if tables.system.is_empty():
        return found
    keys = ["host", "device", "time_ns"]
    own = tables.system.filter(pl.col("metric").is_in(_METRICS) & pl.col("value").is_finite()).drop_nulls(keys)
    # how much later than the time of its row it came to be a counter's turn
    later = own.filter((pl.col("metric") == _AFTER) & pl.col("value").is_between(0, _LATEST_AFTER_NS, "left"))
    later = later.select(*keys, after=pl.col("value").cast(pl.Int64)).unique(keys, keep="first", maintain_order=True)
    own = own.join(later, on=keys, how="left", maintain_order="left")
    own = own.with_columns(own_ns=pl.col("time_ns") + pl.col("after").fill_null(0))
    for (host, device, metric), rows in own.partition_by("host", "device", "metric", as_dict=True).items():
        found.setdefault(str(host), {}).setdefault(str(device), {})[str(metric)] = rows
    return found


def _hosts(tables: Tables) -> dict[str, _Host]:
    """By the name that a host has in the tables."""
    names, read = tables.run.hosts, _readings(tables)
    manifests: dict[str, Mapping[str, Any]] = dict(zip(names, tables.manifests, strict=False))
    if len(names) != len(tables.manifests):
        named = {string(one.get("host")): one for one in tables.manifests}  # a second launcher of a host is `NAME.2`
        manifests = {host: named.get(host) or named.get(host.rpartition(".")[0]) or {} for host in names}
    found = {}
    for host in dict.fromkeys((*manifests, *read)):
        manifest = manifests.get(host, {})
        hardware = mapping(manifest, "hardware")
        listed = hardware.get("gpus")
        gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
        found[host] = _Host(
            machine=string(manifest.get("host")) or host,
            hardware=hardware,
            environment=mapping(manifest, "environment"),
            gpus={f"gpu:{gpu['index']}": gpu for gpu in gpus if isinstance(gpu.get("index"), int)},
            readings=read.get(host, {}),
        )
    return found


def _counter(metrics: _Metrics, metric: str, most_w: float) -> Series | None:
    read = metrics[metric]
    highest_j = None
    if metric == CPU_ENERGY and _RANGE in metrics:  # where it begins anew
        highest_j = max(float(metrics[_RANGE]["value"].to_numpy().max()), 0.0) * _JOULES[CPU_ENERGY] or None
    return counted(read["own_ns"].to_numpy(), read["value"].to_numpy() * _JOULES[metric], most_w, highest_j)


def _longest(found: Iterable[Series | None]) -> Series | None:
    """Of several readers of one device the one that watched longest: their times are not exact enough to be mixed."""
    return max(filter(None, found), key=lambda one: one.ends_ns[1] - one.ends_ns[0], default=None)


def as_telemetry(tables: Tables) -> pl.DataFrame | None:
    """Mean power since the reading before, and energy since the first one, as rows of the table of the system.

    Of all devices that were read, whoever used them; None where no counter was.
    """
    parts = []
    every = [(host, device, one) for host, own in _readings(tables).items() for device, one in own.items()]
    for host, device, metrics in every:
        for metric, (power, energy) in _CURVES.items():
            if metric not in metrics:
                continue
            series = _counter(metrics, metric, MOST_BOARD_W if metric == GPU_ENERGY else MOST_PROCESSOR_W)
            shown = np.unique(metrics[metric]["time_ns"].to_numpy())
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


# ---- whose devices they are ------------------------------------------------------------------------------------------


def _processors(hosts: Mapping[str, _Host]) -> list[Meter]:
    found: dict[tuple[str, str], list[Series | None]] = {}
    parts: dict[str, str | None] = {}
    for _, host in sorted(hosts.items()):
        for device, metrics in sorted(host.readings.items()):
            if CPU_ENERGY in metrics:
                series = _counter(metrics, CPU_ENERGY, MOST_PROCESSOR_W)
                found.setdefault((host.machine, device), []).append(series)
        # where the run may use only some of the processors, the others' energy is not the run's
        cores, allowed, limit = (host.hardware.get(key) for key in ("logical_cores", "affinity", "cgroup_cpu_limit"))
        own = min(
            len(allowed) if isinstance(allowed, list) and allowed else np.inf,
            limit if isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0 else np.inf,
        )
        if isinstance(cores, int) and own < cores:
            parts[host.machine] = f"the run may use {own:g} of {cores} processors, and all of them are counted"
    return [
        Meter(
            machine=machine,
            device=device,
            kind=DRAM if device.endswith("-dram") else PACKAGE,
            name=None,
            counter=_longest(series),
            sampled=None,
            shared=True if machine in parts else None,
            why=parts.get(machine) or "counted for the whole machine, whoever used it",
        )
        for (machine, device), series in found.items()
    ]


def _boards(tables: Tables, hosts: Mapping[str, _Host]) -> tuple[list[Meter], str | None, int]:
    """(meters of the run's boards, what is not known of them, how many boards are not the run's)."""
    machine_of = {name: host.machine for name, host in hosts.items()}
    trained = Counter(machine_of.get(rank.host, rank.host) for rank in tables.ranks)
    pids: dict[str, set[int]] = {}
    known = [(rank.host, rank.pid) for rank in tables.ranks]
    for name, pid in [*known, *tables.processes.select("host", "pid").drop_nulls().rows()]:
        pids.setdefault(machine_of.get(name, name), set()).add(pid)
    on_device: dict[str, set[int]] = {}  # by process the numbers of CUDA devices on which torch held memory
    for row, data in event_data(tables, "memory"):
        match = re.fullmatch(r"cuda:(\d{1,4})", string(data.get("device")) or "")
        if match is not None:
            on_device.setdefault(str(row["process"]), set()).add(int(match[1]))
    used: dict[tuple[str, str], list[tuple[_Host, str]]] = {}  # board -> (host, device), one for each that read it
    every: set[tuple[str, str]] = set()
    unknown = None
    for name, host in hosts.items():
        read = [device for device in host.readings if device.startswith("gpu:")]
        devices = sorted({*host.gpus, *read}, key=lambda device: (_number(device[4:]) or 0, device))
        keys = {device: (host.machine, host.uuid(device) or device) for device in devices}
        every.update(keys.values())
        own = {pid for pid in pids.get(host.machine, ()) if pid > 0}
        chosen = [device for device in devices if own & set(host.pids(device))]
        training = [
            one for one in tables.ranks if one.host == name and (_on_accelerator(one) or one.process in on_device)
        ]
        if not chosen and training and devices:
            numbers = sorted(set().union(*(on_device.get(rank.process, ()) for rank in training)))
            chosen, why = _visible(devices, host, numbers, len(training))
            unknown = unknown or why
        for device in chosen:
            used.setdefault(keys[device], []).append((host, device))
    made = [_board(places, pids.get(machine, set()), trained[machine]) for (machine, _), places in used.items()]
    if unknown is None and not made and any(map(_on_accelerator, tables.ranks)):
        unknown = "the driver tells of no GPU of the run (NVML)"
    return made, unknown, len(every - set(used))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else None


def _on_accelerator(rank: RankInfo) -> bool:
    return rank.device is not None and rank.device.partition(":")[0] != "cpu"


def _visible(
    devices: Sequence[str], host: _Host, numbers: Sequence[int], training: int
) -> tuple[list[str], str | None]:
    """(the boards of a host's training processes, why they are not known) where the driver lists none of its processes:
    by the `numbers` of their CUDA devices among those that CUDA_VISIBLE_DEVICES names, in the order of CUDA."""
    text = string(host.environment.get("CUDA_VISIBLE_DEVICES"))
    kinds = {string(host.gpus.get(device, {}).get("name")) for device in devices}
    alike = len(kinds) == 1 or host.environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    mixed = "CUDA may count GPUs of different kinds in another order than the driver; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if text is None and not alike:
        return [], mixed
    order = list(devices) if text is None else []
    for word in (part.strip() for part in (text or "").split(",")):
        if word.startswith("MIG"):
            return [], "the run used a part of a GPU (MIG), and energy is counted for whole boards"
        by_uuid = [device for device in devices if word and host.uuid(device).startswith(word)]
        number = _number(word)
        if word.startswith("GPU-") and len(by_uuid) == 1:
            order.append(by_uuid[0])
        elif number is None or f"gpu:{number}" not in devices:
            break  # as CUDA does
        elif not alike:
            return [], mixed
        else:
            order.append(f"gpu:{number}")
    if numbers and numbers[-1] < len(order):
        return [order[number] for number in numbers], None
    if not numbers and len(order) in (1, training):
        return order, None
    return [], f"which of {len(devices)} GPUs the run used is not known: the driver lists no process of it"


def _board(places: Sequence[tuple[_Host, str]], own: set[int], ranks: int) -> Meter:
    """A board as all that read it tell of it; `own`: processes of the run on its machine, `ranks`: that train there."""
    counters, powers = [], []
    for host, device in places:
        metrics = host.readings.get(device, {})
        limit = max((float(metrics[name]["value"].to_numpy().max()) for name in _LIMITS if name in metrics), default=0)
        most_w = OVER_LIMIT * limit if limit > 0 else MOST_BOARD_W
        if GPU_ENERGY in metrics:
            counters.append(_counter(metrics, GPU_ENERGY, most_w))
        if _POWER in metrics:
            read = metrics[_POWER]
            powers.append(_sampled(read["time_ns"].to_numpy(), read["value"].to_numpy(), most_w))
    host, device = places[0]
    facts = host.gpus.get(device, {})
    listed = {pid for host, device in places for pid in host.pids(device)}
    strangers = len(listed - own)
    processes = host.readings.get(device, {}).get(_PROCESS)
    at_once = 0 if processes is None else max(Counter(processes["time_ns"].to_list()).values())
    whole = "the counter is of the whole board"
    shared: bool | None = True
    if facts.get("mig") is True:
        why: str | None = f"it is divided (MIG), and {whole}"
    elif "vg" in (string(facts.get("virtualization")) or ""):
        why = f"it is divided (vGPU), and {whole}"
    elif listed & own and strangers:
        said = "another process" if strangers == 1 else f"{strangers} other processes"
        why = f"{said} used it too, and {whole}"
    elif listed & own:
        shared, why = False, None
    elif at_once > max(1, ranks):  # whatever numbers they have here
        why = f"{at_once} processes used it, and the run trains in {ranks}; {whole}"
    else:
        shared, why = None, "the driver lists no process of the run on it, so others may have used it too"
    name = string(facts.get("name"))
    return Meter(host.machine, device, GPU, name, _longest(counters), _longest(powers), shared, why)


# ---- what of it is the run's -----------------------------------------------------------------------------------------


class Counted:
    """The devices whose energy is the run's own, with what tells of each; or why there are none (`absent`).

    `boards` counts those of the run, None where they are not known; `others` boards that it did not use. `run` is from
    its start to its end; to the last reading of one that has no end. `told`: each meter with what tells of the run.
    """

    def __init__(self, tables: Tables) -> None:
        hosts = _hosts(tables)
        boards, self.absent, self.others = _boards(tables, hosts)
        self.boards = len(boards) if self.absent is None else None
        self.machine_of = {
            rank.process: hosts[rank.host].machine if rank.host in hosts else rank.host for rank in tables.ranks
        }
        meters = (*boards, *_processors(hosts))
        series = [one for meter in meters for one in (meter.counter, meter.sampled) if one is not None]
        edges = [edge for one in series for edge in one.ends_ns]
        start = tables.run.started_ns or min(edges, default=0)
        end = max(start, tables.run.ended_ns or max(edges, default=0))
        self.run = Intervals(np.array([start], np.int64), np.array([end], np.int64))
        self.told = [(meter, *meter.during(self.run)) for meter in meters]
        self.devices: list[tuple[Meter, Series]] = []
        processors: list[tuple[Meter, Series]] = []
        refused: list[tuple[Meter, str]] = []  # with the reason
        for meter, one, _, why in self.told:
            if meter.shared or one is None:
                refused.append((meter, f"{meter.label}: {meter.why if meter.shared else why}"))
            else:
                (self.devices if meter.kind == GPU else processors).append((meter, one))
        self.absent = self.absent or next((why for meter, why in refused if meter.kind == GPU), None)
        # processors only where every machine that trains has them and none of them is lacking: else the sum is of some
        machines = {meter.machine for meter, _ in processors if meter.kind == PACKAGE}
        lacking = any(meter.kind == PACKAGE for meter, _ in refused)
        if machines and {machine for machine in self.machine_of.values() if machine} <= machines and not lacking:
            self.devices += processors
        if self.absent is None and not self.devices:
            missing = "not every machine of the run tells the energy of its processors"
            self.absent = next((why for _, why in refused), missing) if meters else _no_source(tables)
        if self.absent is not None:
            self.devices = []

    @property
    def sources(self) -> tuple[str, ...]:
        """What is in a sum, in words that are equal where two sums may be compared."""
        found = {meter.device: source for meter, _, source, _ in self.told}
        kinds = {(meter.kind, found[meter.device]) for meter, _ in self.devices}
        order = list(_WORDS)
        return tuple(f"{_WORDS[kind]} by {how}" for kind, how in sorted(kinds, key=lambda pair: order.index(pair[0])))

    def of_steps(self, rows: pl.DataFrame) -> StepEnergy:
        """The mean of training steps: rows of the table of steps, or of those that a comparison measures."""
        if self.absent is not None:
            return StepEnergy(absent=self.absent)
        first = max(series.ends_ns[0] for _, series in self.devices)
        last = min(series.ends_ns[1] for _, series in self.devices)
        start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("wall_ns")
        inside = rows.filter((pl.col("wall_ns") > 0) & (start >= first) & (end <= last))
        if inside.is_empty():
            return StepEnergy(absent=NO_STEPS)
        times = times_of(inside)
        count = int(inside.group_by("rank").len()["len"].to_numpy().max())
        readings = min(series.readings(int(times.starts[0]), int(times.ends[-1])) for _, series in self.devices)
        if readings < FEW_READINGS:
            few = f"{things(readings, 'reading')} of energy in the training steps: too few to tell"
            return StepEnergy(steps=count, absent=few)
        of: Counter[str] = Counter()
        machine = pl.col("process").replace_strict(self.machine_of, default=None, return_dtype=pl.String)
        by_machine = inside.with_columns(machine=machine).partition_by("machine", as_dict=True)
        for meter, series in self.devices:
            own = by_machine.get((meter.machine,))
            of[meter.kind] += series.drawn(times if own is None else times_of(own))[0]  # type: ignore[assignment]
        by_rank = inside.filter(pl.col("samples").is_not_null()).group_by("rank").agg(pl.col("samples").mean())
        samples = float(by_rank["samples"].sum())
        per_step = float(sum(of[kind] for kind in _WORDS)) / count
        return StepEnergy(
            steps=count,
            joules_per_step=per_step,
            joules_per_sample=per_step / samples if samples > 0 else None,
            gpu_joules_per_step=of[GPU] / count if GPU in of else None,
        )


def _no_source(tables: Tables) -> str:
    """Why no energy was read, with the remedy where there is one."""
    if tables.system.is_empty():
        return NO_TELEMETRY
    told = [mapping(one, "hardware") for one in tables.manifests]
    of_cpu = [mapping(one, "cpu_energy") for one in told]
    reason, remedy = (
        next(filter(None, (string(one.get(key)) for one in of_cpu)), None) for key in ("reason", "remedy")
    )
    gpus = "" if any(one.get("gpus") for one in told) else "no GPU answers NVML, and "
    return f"{gpus}{reason or _NOT_TOLD}" + (f": {remedy}" if remedy else "")


# ---- the facts -------------------------------------------------------------------------------------------------------


def facts(
    tables: Tables, steady: pl.DataFrame, train: StepFacts | None, traced: Sequence[DeviceTime], prices: Prices
) -> EnergyFacts:
    """`steady` are the rows that the mean of the training step stands on, `traced` the device's time in windows."""
    found = Counted(tables)
    domains = tuple(_domain(found, *told) for told in found.told)
    per_step = found.of_steps(steady)
    own = [one for one in domains if one.counted]
    joules = sum(one.joules or 0.0 for one in own) if own else None
    idle_ns, total_ns = (
        sum(getattr(one, name) for one in traced if one.scope == "all") for name in ("idle_ns", "total_ns")
    )
    idle = idle_ns / total_ns if total_ns > 0 and per_step.gpu_joules_per_step is not None else None
    whole = tables.run.started_ns is not None and tables.run.ended_ns is not None
    run_s = float(found.run.ends[0] - found.run.starts[0]) / 1e9 if whole else None
    seconds = min((one.seconds for one in own), default=None)
    cost = of_1000 = None
    if prices:
        boards = found.boards
        cost = priced(prices, joules, None if run_s is None or boards is None else boards * run_s / 3600)
        if train is not None:
            hours = None if boards is None else boards * train.mean_ms / 3600
            of_step = per_step.joules_per_step
            of_1000 = priced(prices, None if of_step is None else 1000 * of_step, hours)
    return EnergyFacts(
        domains=domains,
        sources=found.sources,
        joules=joules,
        wh=None if joules is None else joules / _J_PER_WH,
        mean_w=sum(one.mean_w or 0.0 for one in own) if own else None,
        seconds=seconds,
        run_s=run_s,
        boards=found.boards,
        per_step=per_step,
        idle_share=idle,
        idle_joules_per_step=None if idle is None else idle * (per_step.gpu_joules_per_step or 0.0),
        absent=found.absent,
        warnings=tuple(_warnings(domains, seconds, run_s)),
        notes=tuple(_notes(found, domains)),
        prices=prices,
        cost=cost,
        cost_per_1000_steps=of_1000,
    )


def priced(prices: Prices, joules: float | None, gpu_hours: float | None) -> EnergyCost:
    kwh = None if joules is None else joules / _J_PER_KWH
    energy = None if kwh is None or prices.kwh is None else kwh * prices.kwh
    gpus = None if gpu_hours is None or prices.gpu_hour is None else gpu_hours * prices.gpu_hour
    parts = [part for price, part in ((prices.kwh, energy), (prices.gpu_hour, gpus)) if price is not None]
    return EnergyCost(
        cost=sum(part for part in parts if part is not None) if parts and None not in parts else None,
        energy=energy,
        gpus=gpus,
        gpu_hours=gpu_hours,
        co2_g=None if kwh is None or prices.co2_g_per_kwh is None else kwh * prices.co2_g_per_kwh,
    )


def _domain(found: Counted, meter: Meter, series: Series | None, source: str, why: str | None) -> EnergyDomain:
    joules, seconds = (None, 0.0) if series is None else series.drawn(found.run)
    joules = joules if seconds > 0 else None
    counted = any(meter is one for one, _ in found.devices)
    left_out = None if counted else (why if series is None else meter.why if meter.shared else found.absent)
    notes = [text for text in (left_out, why if series is not None else None, meter.why) if text]
    ratio = None  # sampled power by the counter, over the time that both tell of
    if source == COUNTER and meter.counter is not None and meter.sampled is not None:
        ends = [meter.counter.ends_ns, meter.sampled.ends_ns, (int(found.run.starts[0]), int(found.run.ends[0]))]
        start, end = max(each[0] for each in ends), min(each[1] for each in ends)
        both = Intervals(np.array([start], np.int64), np.array([end], np.int64))
        by_counter = meter.counter.drawn(both)[0] if end > start else 0.0
        known = not meter.sampled.hole(both) and meter.sampled.readings(start, end) >= _AGREE_READINGS
        ratio = meter.sampled.drawn(both)[0] / by_counter if by_counter > 0 and known else None
    return EnergyDomain(
        host=meter.machine,
        device=meter.device,
        kind=meter.kind,
        name=meter.name,
        source=source,
        joules=joules,
        wh=None if joules is None else joules / _J_PER_WH,
        mean_w=None if joules is None else joules / seconds,
        seconds=seconds,
        counted=counted,
        shared=meter.shared,
        why="; ".join(dict.fromkeys(notes)) or None,
        sampled_ratio=ratio,
        longest_gap_s=0.0 if series is None else series.longest_gap_s(found.run),
    )


def _warnings(domains: Sequence[EnergyDomain], seconds: float | None, run_s: float | None) -> Iterator[str]:
    for one in domains:
        of = one.device if one.name is None else f"{one.device} ({one.name})"
        if one.counted and one.longest_gap_s > GAP_S:
            yield f"{of}: {one.longest_gap_s:.0f} s without a reading; what its counter grew by is spread evenly"
        if one.sampled_ratio is not None and abs(one.sampled_ratio - 1) > _AGREE:
            more = f"{abs(one.sampled_ratio - 1) * 100:.0f} % {'more' if one.sampled_ratio > 1 else 'less'}"
            yield f"{of}: sampled power tells {more} than the counter, which is used"
    if seconds is not None and run_s is not None and seconds < _REACHED * run_s:
        yield f"readings of energy reach over {seconds:.1f} of {run_s:.1f} s of the run; nothing is added for the rest"


def _notes(found: Counted, domains: Sequence[EnergyDomain]) -> Iterator[str]:
    """What a reader has to know of the sums."""
    own = [one for one in domains if one.counted]
    if any(one.source == SAMPLED for one in own):
        yield "energy of GPUs without a counter is power sampled once a second, summed: less sure than a counter"
    left = [one.device for one in domains if not one.counted]
    if left and found.absent is None:
        yield f"not in the sum: {', '.join(left)}"
    if any(one.kind != GPU for one in own):
        yield "energy of processors and memory is of the whole machine, whoever used it"
    if any(one.kind == GPU and one.shared is None for one in own):
        yield "the driver lists no process of the run on its GPUs, so what others drew there would be counted too"
    if found.others:
        yield f"left out: GPUs of the machine that the run did not use, {found.others} of them"
