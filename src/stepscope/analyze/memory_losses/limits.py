"""The limit that holds for a process: of the device, of its share, of what others leave, of the cgroup.

What a process can have of a device is what is free and what its allocator holds already; the driver counts both on the
device the process sees, which of a partitioned GPU is the slice. So other processes need not be seen themselves.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from stepscope.analyze.memory_losses.readings import Readings
from stepscope.analyze.windows import event_data
from stepscope.model import Place
from stepscope.model.memory import MemoryLimit
from stepscope.tables.schema import Tables

# The driver takes some hundred MiB for each process, which no allocator gets. More than that, and more than this share
# of the device, belongs to others.
DRIVER_BYTES = 1 << 30
DRIVER_SHARE = 0.05


def of_device(own: Readings, device: str, set_fraction: tuple[float, Place | None] | None) -> MemoryLimit | None:
    """None where the driver was not asked.

    Args:
        set_fraction: what the script set for this device, with the line.
    """
    rows = own.all_rows.filter(pl.col("device") == device)
    asked = rows.drop_nulls(["free_bytes", "total_bytes", "reserved_bytes"])
    if asked.is_empty():
        return None
    total = int(asked["total_bytes"][-1])
    within_reach = asked["free_bytes"] + asked["reserved_bytes"]
    reach = int(within_reach.sort()[0])
    others = max(0, total - reach)
    place = set_fraction[1] if set_fraction is not None else None
    told = rows["fraction"].drop_nulls()
    fraction = float(told[-1]) if len(told) else set_fraction[0] if set_fraction is not None else None
    if fraction is not None and fraction < 1 and int(fraction * total) <= reach:
        return MemoryLimit(int(fraction * total), "fraction", total, others, fraction, place)
    if others > max(DRIVER_BYTES, DRIVER_SHARE * total):
        return MemoryLimit(reach, "others", total, others, fraction, place)
    return MemoryLimit(reach, device_reason(_name(rows)), total, others, fraction, place)


def device_reason(name: str | None) -> str:
    """`slice` of a GPU that is partitioned, as the driver names it ("NVIDIA A100-SXM4-40GB MIG 1g.5gb")."""
    return "slice" if name is not None and re.search(r"\bMIG\b", name) else "device"


def _name(rows: pl.DataFrame) -> str | None:
    names = rows["device_name"].drop_nulls()
    return str(names[-1]) if len(names) else None


def fractions(tables: Tables) -> dict[str, tuple[float, Place | None]]:
    """By process what the script's last `set_per_process_memory_fraction` set, of whatever device."""
    found = {}
    for row, data in event_data(tables, "site"):
        arguments = data.get("arguments")
        if data.get("what") != "set_per_process_memory_fraction" or not isinstance(arguments, dict):
            continue
        text = str(arguments.get("fraction", ""))
        if re.fullmatch(r"0?\.\d{1,17}|[01](\.\d{1,17})?", text):
            file, line = data.get("file"), data.get("line")
            place = Place(file, line if isinstance(line, int) else None) if isinstance(file, str) else None
            found[str(row["process"])] = (float(text), place)
    return found


def of_host(tables: Tables, host: str | None) -> MemoryLimit | None:
    """What all processes of the run on a host may hold together; None where the manifest does not tell."""
    manifest = next((one for one in tables.manifests if host is None or one.get("host") == host), None)
    hardware: Any = manifest.get("hardware") if manifest is not None else None
    if not isinstance(hardware, dict):
        return None
    machine, cgroup = (_size(hardware.get(name)) for name in ("memory_bytes", "cgroup_memory_limit_bytes"))
    if cgroup is not None and (machine is None or cgroup < machine):
        return MemoryLimit(cgroup, "cgroup", machine)
    return MemoryLimit(machine, "machine", machine) if machine is not None else None


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
