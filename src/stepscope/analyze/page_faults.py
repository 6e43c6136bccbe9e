"""How many pages of memory steady training steps had the system map, and what that took on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analyze.readings import growths
from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.machine import PageFaultFacts
from stepscope.tables.schema import Tables

_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_",
             "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")  # fmt: skip
_USUAL_PAGE_BYTES = 4096


def facts(tables: Tables, labelled: LabelledSteps, training: pl.DataFrame | None) -> PageFaultFacts | None:
    """None where no steady step tells its faults."""
    steady = labelled.steady().drop_nulls(["minor_faults", "wall_ns"])
    if steady.is_empty():
        return None
    own_ns = mean(steady["wall_ns"] - steady["data_wait_ns"].fill_null(0))
    pids = [rank.pid for rank in tables.ranks]
    faults = mean(steady["minor_faults"])
    told = [_object(manifest, "page_faults") for manifest in tables.manifests]
    costs = [_object(one, "cost") for one in told]
    alone, beside, returned = (_worst(costs, name) for name in ("ns_alone", "ns_beside", "ns_returned"))
    threads = int(_worst(costs, "threads") or 1)
    page_bytes = int(_worst(costs, "page_bytes") or _USUAL_PAGE_BYTES)
    share, kept = _shares(training, pids, page_bytes)
    again = faults * (1.0 - (kept or 0.0))
    cost = at_most = None
    if alone is not None and beside is not None and returned is not None:
        of_a_fault = _critical_ns(share, threads, alone, beside) + returned
        cost = min(again * of_a_fault, own_ns) / 1e6
        at_most = max(cost, min(again * (max(alone, beside) + returned), own_ns) / 1e6)
    environment = [_object(manifest, "environment") for manifest in tables.manifests][:1] or [{}]
    return PageFaultFacts(
        steps=steady.height,
        minor_per_step=faults,
        main_share=share,
        kept_share=kept,
        page_bytes=page_bytes,
        threads=threads,
        ns_alone=alone,
        ns_beside=beside,
        ns_returned=returned,
        cost_ms_per_step=cost,
        at_most_ms_per_step=at_most,
        libc=_text(told, "libc"),
        preloaded=str(environment[0]["LD_PRELOAD"]) if environment[0].get("LD_PRELOAD") else None,
        settings={name: str(environment[0][name]) for name in _SETTINGS if name in environment[0]},
        huge_pages=_text(told, "huge_pages"),
        installed=tuple(str(name) for one in told[:1] for name in one.get("installed") or ()),
        largest_bytes=_largest(tables),
    )


def _critical_ns(share: float | None, threads: int, alone: float, beside: float) -> float:
    """Of a mean fault what the training thread pays: its own ones among those shared evenly, and all of the others."""
    if threads < 2:
        return alone
    least = 1.0 / threads
    shared = 1.0 if share is None else min(1.0, max(0.0, (1.0 - share) / (1.0 - least)))
    return shared * least * beside + (1.0 - shared) * alone


def _shares(training: pl.DataFrame | None, pids: list[int], page_bytes: int) -> tuple[float | None, float | None]:
    """Of the ranks' faults, by telemetry: those of their main threads, and those whose pages the processes kept."""
    if training is None:
        return None, None
    faults, own, held = (growths(training, name, pids) for name in ("minor_faults", "main_minor_faults", "rss_bytes"))
    both = [pid for pid in faults if pid in own]
    total = sum(faults[pid] for pid in both)
    if total <= 0:
        return None, None
    kept = sum(held.get(pid, 0.0) for pid in both) / page_bytes / total
    return min(1.0, sum(own[pid] for pid in both) / total), min(1.0, kept)


def _largest(tables: Tables) -> int | None:
    """Of what was allocated in windows that recorded memory."""
    sizes = tables.memory.filter((pl.col("bytes") > 0) & (pl.col("device").fill_null("cpu") == "cpu"))["bytes"]
    return int(max(sizes.to_list())) if len(sizes) else None


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _worst(costs: list[Mapping[str, Any]], name: str) -> float | None:
    """Of the hosts, since ranks wait for the slowest; None unless each tells it."""
    found = [cost.get(name) for cost in costs]
    known = [float(value) for value in found if isinstance(value, (int, float)) and value >= 0]
    return max(known) if known and len(known) == len(found) else None


def _text(told: list[Mapping[str, Any]], name: str) -> str | None:
    value = told[0].get(name) if told else None
    return value if isinstance(value, str) else None
