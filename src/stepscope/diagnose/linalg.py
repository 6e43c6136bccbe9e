"""Linear algebra that a GPU does matrix by matrix: many tiny decompositions, or algorithms that run on the host too."""

from __future__ import annotations

from stepscope.diagnose import device_basis as basis
from stepscope.diagnose.device_basis import Claim, Words, ms
from stepscope.model import Analysis, Evidence, Finding, Try
from stepscope.model.device_losses import LINALG, DeviceLosses, Loss

RULE = "compute.serial_linalg"
LEARN = "https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cuda.preferred_linalg_library"


def serial_linalg(analysis: Analysis) -> list[Finding]:
    """One finding when calls of linear algebra that leave the device mostly empty cost more than the floor."""
    return [_serial_linalg(analysis, *one) for one in basis.seen(analysis, LINALG)]


def _serial_linalg(analysis: Analysis, losses: DeviceLosses, loss: Loss, cost: float) -> Finding:
    source, at = basis.trace_source(losses), basis.first_at(loss)
    operator = next(iter(loss.parts), "linear algebra")
    launches, matrices = loss.details.get("launches", 0.0), loss.details.get("matrices", 0.0)
    rows = loss.details.get("matrix_rows", 0.0) / matrices if matrices else 0.0
    sizes = f" for {matrices:.0f} matrices with {rows:.0f} rows" if matrices else ""
    words = Words(
        title=f"{basis.clipped(operator)} on the GPU is serial: {cost / 1e6:.1f} ms per step and {launches:.0f} "
        f"launches{sizes}, and the device mostly waits{at}",
        fix=f"Do it on the CPU in one batch{at} (x.cpu(), the decomposition, and back), or on the device with "
        "batched products: for small matrices written out (Gram-Schmidt, Cholesky of the Gram matrix for QR), or "
        "torch.backends.cuda.preferred_linalg_library('magma') or 'cusolver', whichever is not in use",
        caveat="The cost is all time of these calls in which nothing else runs; what takes their place takes time "
        "too, and on the CPU a copy each way. Other algorithms have other rounding errors: Cholesky of the Gram matrix "
        "squares the condition number. Large single matrices belong on the GPU.",
        falsified_by="With the same decomposition done on the CPU, copies included, the mean step does not get shorter",
        learn=LEARN,
        tries=(Try("cuda.linalg_library", "magma"), Try("cuda.linalg_library", "cusolver")),
    )
    evidence = [
        ms("linear algebra with nothing beside it", loss.ns_per_step, source),
        ms("of it the device idles", loss.details.get("idle_ns", 0.0), source),
        Evidence("calls per step", round(loss.calls_per_step, 2), "calls", source),
        Evidence("launches in them per step", round(launches, 1), "launches", source),
        *basis.parts_evidence(loss, source),
    ]
    if matrices:
        evidence.append(Evidence("matrices per step", round(matrices, 1), "matrices", source))
        evidence.append(Evidence("rows of a matrix", round(rows, 1), "rows", source))
    claim = Claim(RULE, "compute", loss, cost, cost, words, tuple(evidence), most="medium")
    return basis.finding(analysis, losses, claim)
