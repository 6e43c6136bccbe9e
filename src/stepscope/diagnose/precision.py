"""Work in float64, where models are trained in float32 or less."""

from __future__ import annotations

from stepscope.diagnose import pass_basis as basis
from stepscope.diagnose.common import clip_share
from stepscope.diagnose.pass_basis import Claim, Words
from stepscope.diagnose.thresholds import DOUBLES
from stepscope.model import Analysis, Evidence, Finding
from stepscope.model.device_losses import Doubles, PassFacts
from stepscope.model.trace import GpuProperties

DOUBLE_RULE = "compute.double_precision"
LEARN_CPU = "https://pytorch.org/docs/stable/notes/numerical_accuracy.html"
LEARN_GPU = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"
_OTHER_MAKERS = ("AMD", "Radeon", "Instinct")  # their numbers have the form of a capability and mean something else


def double_precision(analysis: Analysis) -> list[Finding]:
    """One finding per run whose steps would surely be shorter in float32, by more than the floor."""
    found = []
    for run in basis.runs(analysis):
        doubles = run.doubles
        if doubles is not None and basis.worth(run, _cost(doubles)):
            found.append(_finding(analysis, run, doubles))
    return found


def _cost(doubles: Doubles) -> float:
    return doubles.conversion_ms_per_step + DOUBLES.saved * doubles.compute_ms_per_step


def _finding(analysis: Analysis, run: PassFacts, doubles: Doubles) -> Finding:
    cost = _cost(doubles)
    slow = run.on_device and any(slow_in_double(gpu) for gpu in run.gpus)
    most = DOUBLES.most_slow if slow else DOUBLES.most
    ceiling = doubles.conversion_ms_per_step + most * doubles.compute_ms_per_step
    where = basis.places(doubles.lines, cost)
    whole = clip_share(doubles.conversion_ms_per_step + doubles.compute_ms_per_step, run.step_ms)
    source = basis.source(run)
    names = ", ".join(list(doubles.parts)[:3])
    gpus = ", ".join(sorted({f"{gpu.name or 'GPU'} ({gpu.capability})" for gpu in run.gpus if gpu.capability}))
    evidence = [
        Evidence("mean step", round(run.step_ms, 3), "ms", source),
        basis.ms("operators on float64, per step", doubles.compute_ms_per_step, source),
        basis.ms("conversions from and to float64, per step", doubles.conversion_ms_per_step, source),
        Evidence("operators on float64 per step", round(doubles.operators_per_step, 1), "operators", source),
        Evidence("conversions per step", round(doubles.conversions_per_step, 1), "conversions", source),
        *(basis.ms(f"{name} on float64", value, source) for name, value in list(doubles.parts.items())[:3]),
    ]
    if gpus:
        evidence.append(Evidence("GPU (compute capability)", gpus, "", source))
    words = Words(
        title=f"Float64 takes {whole:.0%} of the step{basis.at(where)}; in float32 it would take half or less",
        fix=f"Keep these tensors in float32 ({names}): convert inputs once when they are loaded (NumPy makes float64), "
        "write dtype=torch.float32, and leave out .double() and torch.set_default_dtype(torch.float64)",
        caveat="Some methods need float64: sums of many small numbers, differences of nearly equal ones, "
        "ill-conditioned linear algebra. Compare losses over some hundred steps.",
        falsified_by="With these operators in float32 the mean step does not get shorter",
        learn=LEARN_GPU if run.on_device else LEARN_CPU,
    )
    claim = Claim(DOUBLE_RULE, "compute", cost, ceiling, where, tuple(evidence), words)
    return basis.finding(analysis, run, claim)


def slow_in_double(gpu: GpuProperties) -> bool:
    """Whether it is an NVIDIA GPU that does 32 or 64 operations in float32 for one in float64."""
    if gpu.capability is None or any(maker in (gpu.name or "") for maker in _OTHER_MAKERS):
        return False
    return gpu.capability not in DOUBLES.fast_capabilities
