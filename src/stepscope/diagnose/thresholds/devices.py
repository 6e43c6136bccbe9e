"""Losses of the devices in profiled steps, and of what they exchange."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.thresholds.shares import REPORT_FLOOR


class Device(Struct, frozen=True):
    """When a loss of the devices in profiled steps counts. The limits of a gap stand in `analyze/device_losses`."""

    floor: float = REPORT_FLOOR
    recurring: float = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
    steps_for_median: int = 3  # of fewer steps the median says nothing else than the mean
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    lines_shown: int = 3


class Replayed(Struct, frozen=True):
    """When a replay tells so much less than the cost that it is worth a word."""

    close: float = 0.01  # of the step: titles and shares are shown to a percent
    unexplained: float = 0.10  # of the step, as much as makes a finding a warning; sound traces stay below 0.05


class Launch(Struct, frozen=True):
    """When the device waits for launches. Kernels count as short when the host takes longer to launch one."""

    gaps: float = 20  # launches per step that the device waited for; fewer are no pattern; chosen, untuned
    filling: float = 0.5  # of the kernels' time with a block for every multiprocessor: below it the device has room
    mostly: float = 0.5  # of an optimizer's launches: the way it updates most of its parameters


class TensorCores(Struct, frozen=True):
    """What mixed precision gives. NVIDIA reports 1.5 to 3 times for whole training steps."""

    gain: float = 2.0  # of products in 16 bits at least: half of the bytes, and from Volta on twice the rate or more
    peak: float = 16.0  # tensor cores by ordinary ones in 32 bits, data sheets of A100 and H100
    peak_volta: float = 8.0  # the same of V100 and T4
    bytes: float = 2.0  # what 16 bits can give all other kernels, which move data


class Layout(Struct, frozen=True):
    """Whose layout is converted."""

    at_input: float = 0.8  # of the conversions at a step's first convolution: the rest of the model agrees with itself


class Collectives(Struct, frozen=True):
    """When communication costs more than it has to."""

    floor: float = REPORT_FLOOR
    exposed: float = 0.10  # of the step, where PyTorch's TensorBoard plugin begins to warn
    waiting: float = 0.5  # of the communication: then it is the ranks' unequal work, not the network
    small_bytes: int = 1 << 20  # DistributedDataParallel's first bucket; smaller messages do not fill a link
    calls: int = 10  # per step; buckets of the smallest models and a few reduced metrics are fewer; chosen, untuned
    sync_batch_norms: float = 20  # layers per step, from which Ascend's msprof-analyze advises to have fewer
    steps_for_high: int = 3  # profiled steps from which a mean over them is no accident
    kinds_shown: int = 3


DEVICE = Device()
REPLAY = Replayed()
LAUNCH = Launch()
TENSOR_CORES = TensorCores()
LAYOUT = Layout()
COLLECTIVES = Collectives()
