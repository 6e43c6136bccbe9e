"""On which node of memory the training processes' main threads ran, and which node their GPUs are next to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.model.machine import NumaFacts
from stepscope.tables.schema import Tables


def facts(tables: Tables, readings: pl.DataFrame | None) -> NumaFacts | None:
    """None on a machine with one node, without telemetry, or of several hosts that differ."""
    hardware = [found for m in tables.manifests if isinstance(found := m.get("hardware"), dict)]
    nodes = [_nodes(one) for one in hardware]
    if readings is None or not nodes or len(nodes[0]) < 2 or any(other != nodes[0] for other in nodes):
        return None
    of_cpu = {cpu: node for node, cpus in nodes[0].items() for cpu in cpus}
    pids = [rank.pid for rank in tables.ranks]
    seen = readings.filter((pl.col("metric") == "processor") & pl.col("pid").is_in(pids))
    at = [(int(pid), of_cpu.get(int(cpu))) for pid, cpu in seen.select("pid", "value").rows()]
    known = [(pid, node) for pid, node in at if node is not None]
    if not known:
        return None
    counts = Counter(node for _, node in known)
    return NumaFacts(
        nodes=len(nodes[0]),
        main_nodes={node: count / len(known) for node, count in sorted(counts.items())},
        away_share=_away(known, _nearest(readings, _gpus(hardware[0]))),
    )


def _nodes(hardware: Mapping[str, Any]) -> dict[str, list[int]]:
    """Nodes with processors; those with memory alone are of no thread."""
    nodes = hardware.get("numa_nodes")
    if not isinstance(nodes, dict):
        return {}
    return {str(node): cpus for node, cpus in nodes.items() if isinstance(cpus, list) and cpus}


def _gpus(hardware: Mapping[str, Any]) -> dict[str, int]:
    gpus = hardware.get("gpus")
    found = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return {f"gpu:{gpu.get('index')}": gpu["numa_node"] for gpu in found if isinstance(gpu.get("numa_node"), int)}


def _nearest(readings: pl.DataFrame, gpus: Mapping[str, int]) -> dict[int, set[str]]:
    """Nodes next to the GPUs that a process computes on."""
    listed = readings.filter((pl.col("metric") == "gpu_process") & pl.col("pid").is_not_null())
    found: dict[int, set[str]] = {}
    for pid, device in listed.select("pid", "device").unique().rows():
        if device in gpus:
            found.setdefault(int(pid), set()).add(str(gpus[device]))
    return found


def _away(known: list[tuple[int, str]], nearest: Mapping[int, set[str]]) -> float | None:
    with_gpu = [node not in nearest[pid] for pid, node in known if pid in nearest]
    return sum(with_gpu) / len(with_gpu) if with_gpu else None
