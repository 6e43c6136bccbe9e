"""Matrix products whose sizes do not fit the tiles of tensor cores: what a kernel computes to fill them up is lost."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.diagnose.thresholds import TENSOR_CORES
from stepscope.model import Analysis, Evidence, Finding
from stepscope.model.device_losses import TILES, DeviceLosses, Loss

RULE = "compute.sizes_off_tiles"
LEARN = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"


def sizes_off_tiles(analysis: Analysis) -> list[Finding]:
    """One finding when filling up tiles costs more than the floor."""
    return [_sizes_off_tiles(analysis, *one) for one in basis.seen(analysis, TILES)]


def _sizes_off_tiles(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source = basis.trace_source(losses)
    kernels, unaligned = loss.details.get("kernels_ns", 0.0), loss.details.get("unaligned_ns", 0.0)
    top = next(iter(loss.parts), "?")
    words = Words(
        title=f"Matrix products do not fit the tiles of tensor cores: {cost / 1e6:.1f} ms per step only fill them up, "
        f"longest for {top}{basis.first_at(loss)}",
        fix="Choose sizes (hidden and head sizes, vocabulary, tokens per batch) that are multiples of 8, better of 64 "
        "or 128: pad an embedding or output layer by rows that are never used, and sequences to few lengths",
        caveat="A lower bound: kernels for rows that begin at any element are slower besides, and the last wave of "
        "tiles seldom fills the device. Sizes are rows x columns x depth of a product; which of them can change is "
        "for you to say.",
        falsified_by="With these sizes padded to the next multiple of 64 the products take as long as before",
        learn=LEARN,
    )
    evidence = (
        ms("products that only fill up tiles, nothing beside them", loss.ns_per_step, source),
        ms("all time of these kernels", kernels, source),
        ms("of it in kernels for rows that begin at any element", unaligned, source),
        ms("all products in 16 bits", loss.details.get("products_ns", 0.0), source),
        Evidence("such products per step", round(loss.calls_per_step, 1), "kernels", source),
        *basis.parts_evidence(loss, source, "lost at {}"),
    )
    ceiling = cost + unaligned * (1 - 1 / TENSOR_CORES.gain)
    return basis.finding(analysis, losses, Claim(RULE, "compute", loss, cost, ceiling, words, evidence, most="medium"))
