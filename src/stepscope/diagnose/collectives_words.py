"""What to do about communication that nothing hides."""

from __future__ import annotations

from stepscope.diagnose.thresholds import COLLECTIVES
from stepscope.model import Analysis


def exposed_fix(waiting: float | None, sync_batch_norms: float) -> str:
    """By the part of it that is waiting for other ranks, None where unknown, and SyncBatchNorm layers per step."""
    return _moves(waiting) + _sync_fix(sync_batch_norms)


def _moves(waiting: float | None) -> str:
    moves = (
        "Overlap it with computation (larger or earlier buckets, bucket_cap_mb and gradient_as_bucket_view of "
        "DistributedDataParallel, prefetching in FSDP), or move less: gradients in half precision "
        "(bf16_compress_hook), gradient accumulation, fewer and larger messages"
    )
    if waiting is None:
        return f"{moves}. Record two ranks or more to see what of it is waiting for a slower rank"
    if waiting >= COLLECTIVES.waiting:
        return f"Most of it is waiting for other ranks: give all ranks equal work first. What is left: {moves}"
    return moves


def _sync_fix(layers: float) -> str:
    if layers <= COLLECTIVES.sync_batch_norms:
        return ""
    return (
        f". {layers:.0f} SyncBatchNorm layers exchange statistics forward and backward, and nothing can hide it: keep "
        "them only where a rank's batch is too small for statistics of its own"
    )


def exposed_caveat(analysis: Analysis, waiting: float | None) -> str:
    """What the traces of the ranks at hand do not tell."""
    view = analysis.views.distributed if analysis.views is not None else None
    if waiting is None:
        return "One rank's trace does not tell a transfer from waiting for another rank."
    if view is not None and view.missing_ranks:
        return "Not all ranks were recorded: waiting for one that was not counts as transfer."
    return "Compressed gradients change the numbers; larger buckets take memory."
