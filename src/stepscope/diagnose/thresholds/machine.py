"""Losses to the machine: pauses, cores, clocks, storage, memory."""

from __future__ import annotations

from msgspec import Struct

from stepscope.diagnose.thresholds.shares import REPORT_FLOOR


class Pauses(Struct, frozen=True):
    """When garbage collections count."""

    floor: float = REPORT_FLOOR
    count: int = 3  # fewer in a whole run are no rhythm
    one_line: float = 0.9  # of their time at one line: it asks for them, since automatic ones strike anywhere
    lines_shown: int = 3


class Cores(Struct, frozen=True):
    """When a main thread that waits for a core counts. Others need more: our own recorder is among them, with up to
    2 %, and a scheduler makes any thread wait a few percent."""

    floor: float = REPORT_FLOOR
    others_floor: float = 0.10
    others_readings: int = 30  # half a minute: a shorter burst of others says nothing of the next run
    readings_for_high: int = 30
    child_cores: float = 0.1  # of what all children use: those below are not named
    shared_core: float = 0.4  # of its own time a thread may lose to a busy sibling on its core, and to cold caches: two
    # hyperthreads of one core do 1.2 to 1.3 times the work of one; 15 ms of a step beside three processes were 10 alone
    command_shown: int = 60  # characters of a child's command in a title
    away: float = 0.5  # of the readings on another node than the GPU: then binding is worth a try


class Clocks(Struct, frozen=True):
    """When a GPU below its highest clock counts."""

    floor: float = REPORT_FLOOR
    readings: int = 10  # in which it was not idle: ten seconds, more than a board takes to find its clock


class Storage(Struct, frozen=True):
    """When reads are worth telling beside a slow loader, and when they reach a device rather than the page cache."""

    bytes_per_s: float = 1e6  # below it a page cache and any disk are alike
    faults_per_s: float = 10.0  # of a millisecond each they would take 1 %
    readings: int = 20  # of the state of a process: 5 points per look
    cold: float = 0.5  # of the bytes asked for; chosen, untuned
    warm: float = 0.1  # the same in the last third; chosen, untuned


class MemoryPressure(Struct, frozen=True):
    """When the machine runs out of memory during steps."""

    floor: float = REPORT_FLOOR
    faults_per_step: float = 1.0  # that read a disk; below it pressure is that of others; chosen, untuned


class Memory(Struct, frozen=True):
    """When memory costs, or may end a run. How growth is told from noise stands in `analyze/memory_losses`."""

    floor: float = REPORT_FLOOR
    near: float = 0.92  # of the limit, in tensors at the peak; TraceML warns there
    full: float = 0.97  # TraceML calls it critical
    fragmented: float = 2.0  # held by what tensors took, both at their peaks; TraceML's
    held: float = 0.8  # of the limit: a process far below it may hold what it likes; chosen, untuned
    grown_bytes: int = 64 << 20  # of the host: one arena of glibc's allocator, which may fill for reasons of its own
    grown_device_bytes: int = 16 << 20  # torch counts exactly; a smaller sum may be one new shape; chosen, untuned
    confirmed_bytes: int = 1 << 30  # where no limit is known; TraceML's to call growth confirmed
    traced_bytes: int = 1 << 20  # per step, seen in a trace alone: as much in a thousand steps
    horizon_s: float = 86_400  # few jobs run longer than some days, and a slower growth than full in one is no haste
    soon_s: float = 3_600
    readings_for_high: int = 30
    traced_steps: int = 6  # levels that rise six times in a row do so by chance once in 720 traces
    lines_shown: int = 3


class PageFaults(Struct, frozen=True):
    """When pages mapped anew in every step count."""

    floor: float = REPORT_FLOOR
    faults_per_step: float = 256.0  # 1 MiB of pages: fewer are Python's and torch's own small change; chosen, untuned


PAUSES = Pauses()
PAGE_FAULTS = PageFaults()
CORES = Cores()
CLOCKS = Clocks()
STORAGE = Storage()
MEMORY_PRESSURE = MemoryPressure()
MEMORY = Memory()
