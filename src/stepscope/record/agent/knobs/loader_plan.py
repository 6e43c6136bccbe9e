"""Which arguments a DataLoader gets when knobs are set: a pure decision, torch's own rules included.

torch refuses prefetching, persistent workers, a timeout or a start method where there are no workers. A knob that would
be refused is left out, with the reason, so that the loader is made as the script wanted it.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Tuple

NUM_WORKERS = "num_workers"
PREFETCH = "prefetch_factor"
PIN = "pin_memory"
PERSISTENT = "persistent_workers"

_NO_WORKERS = "this loader has no workers"
# What has a meaning with workers only, and what it is without.
_WORKERS_ONLY: dict[str, Any] = {PREFETCH: None, PERSISTENT: False, "timeout": 0, "multiprocessing_context": None}


class Given(NamedTuple):
    """What the script gives a loader, and what the process allows."""

    num_workers: int
    iterable: bool  # of an IterableDataset
    start_method: str  # of worker processes
    daemon: bool  # this process may have no children
    pins: bool  # there is an accelerator that memory can be pinned for


Plan = Tuple[Dict[str, Any], Dict[str, str]]


def plan(wishes: Mapping[str, Any], given: Given) -> Plan:
    """(arguments to change, reason for every wish that is left out). `wishes` are converted values by argument."""
    changes: dict[str, Any] = {}
    refused: dict[str, str] = {}
    workers = given.num_workers
    if NUM_WORKERS in wishes:
        reason = _why_no_workers(given) if wishes[NUM_WORKERS] > 0 else None
        if reason is None:
            workers = changes[NUM_WORKERS] = wishes[NUM_WORKERS]
        else:
            refused[NUM_WORKERS] = reason
    if workers == 0 and given.num_workers > 0:
        changes.update(_WORKERS_ONLY)
    for name in (PREFETCH, PERSISTENT):
        if name not in wishes:
            continue
        if workers > 0 or wishes[name] is False:
            changes[name] = wishes[name]
        else:
            refused[name] = _NO_WORKERS
    if PIN in wishes:
        if given.pins or not wishes[PIN]:
            changes[PIN] = wishes[PIN]
        else:
            refused[PIN] = "there is no accelerator to pin memory for"
    return changes, refused


def _why_no_workers(given: Given) -> str | None:
    """Why a loader that has no workers cannot be given some; None where it can or has some already."""
    if given.num_workers > 0:
        return None
    if given.iterable:
        return "its IterableDataset would be read in full by every worker, unless it asks get_worker_info"
    if given.daemon:
        return "it is made in a process that may not start others"
    if given.start_method != "fork":
        return f"this process starts others by {given.start_method}, for which script and data set must be prepared"
    return None
