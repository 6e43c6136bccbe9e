"""GPUs through NVML, where there are any. Every query is guarded alone: drivers refuse some and answer the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

Metric = tuple[str, str, float, int | None, str | None]  # name, unit, value, pid, device

_SM_CLOCK = 1  # NVML_CLOCK_SM
_PROCESSES_EVERY = 5  # readings: the driver takes longer over this list than over all else
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])")


class Gpus:
    """An open NVML session; without a driver it is empty and says why in `reason`."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._limits: list[tuple[float | None, float | None]] = []
        self._readings = 0
        self.reason: str | None = None

    def __enter__(self) -> Gpus:
        try:
            import pynvml
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return self
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError, OSError) as error:
            self.reason = str(error)
            return self
        self._nvml = pynvml
        handles = [
            self._query("nvmlDeviceGetHandleByIndex", at) for at in range(self._query("nvmlDeviceGetCount") or 0)
        ]
        self._handles = [handle for handle in handles if handle is not None]
        self._limits = [self._fixed_limits(handle) for handle in self._handles]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._nvml is not None:
            self._query("nvmlShutdown")
            self._nvml = None
            self._handles = []

    def _query(self, name: str, *arguments: Any) -> Any:
        """The answer, or None when this driver or device does not give it."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError, OSError, ValueError):
            return None

    def describe(self) -> list[dict[str, Any]]:
        """`{"index", "name", "memory_bytes", "uuid", "numa_node"}` per device, with its highest clock and power."""
        devices = []
        for index, handle in enumerate(self._handles):
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            clock_mhz, power_w = self._limits[index]
            devices.append(
                {
                    "index": index,
                    "name": _text(self._query("nvmlDeviceGetName", handle)),
                    "memory_bytes": None if memory is None else int(memory.total),
                    "uuid": _text(self._query("nvmlDeviceGetUUID", handle)),
                    "numa_node": numa_node(_text(getattr(self._query("nvmlDeviceGetPciInfo", handle), "busId", None))),
                    "sm_clock_max_mhz": clock_mhz,
                    "power_default_w": power_w,
                }
            )
        return devices

    def driver_version(self) -> str | None:
        return None if self._nvml is None else _text(self._query("nvmlSystemGetDriverVersion"))

    def metrics(self) -> list[Metric]:
        """One reading of every device; `device` is the NVML index as `cuda:N` is not known from outside."""
        found: list[Metric] = []
        with_processes = self._readings % _PROCESSES_EVERY == 0
        self._readings += 1
        for index, handle in enumerate(self._handles):
            device = f"gpu:{index}"
            utilization = self._query("nvmlDeviceGetUtilizationRates", handle)
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            power = self._query("nvmlDeviceGetPowerUsage", handle)
            clock_mhz, power_w = self._limits[index]
            readings = (
                ("gpu_util_pct", "%", None if utilization is None else utilization.gpu),
                ("gpu_memory_bytes", "bytes", None if memory is None else memory.used),
                ("gpu_power_w", "W", _watts(power)),
                ("gpu_power_limit_w", "W", _watts(self._query("nvmlDeviceGetEnforcedPowerLimit", handle))),
                ("gpu_power_default_w", "W", power_w),
                ("gpu_temperature_c", "C", self._query("nvmlDeviceGetTemperature", handle, 0)),
                ("gpu_sm_clock_mhz", "MHz", self._query("nvmlDeviceGetClockInfo", handle, _SM_CLOCK)),
                ("gpu_sm_clock_max_mhz", "MHz", clock_mhz),
                ("gpu_clock_reasons", "bitmask", self._query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
            )
            found += [(name, unit, float(value), None, device) for name, unit, value in readings if value is not None]
            if with_processes:
                found += self._processes(handle, device)
        return found

    def _fixed_limits(self, handle: Any) -> tuple[float | None, float | None]:
        """(highest SM clock in MHz, power limit as delivered in W)."""
        clock = self._query("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK)
        power = self._query("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        return None if clock is None else float(clock), _watts(power)

    def _processes(self, handle: Any, device: str) -> Iterator[Metric]:
        """Who computes on a device, whoever started it; the driver may hide how much memory each has."""
        for process in self._query("nvmlDeviceGetComputeRunningProcesses", handle) or ():
            used = getattr(process, "usedGpuMemory", None)
            yield ("gpu_process", "count", 1.0, int(process.pid), device)
            if used is not None:
                yield ("gpu_process_bytes", "bytes", float(used), int(process.pid), device)


def numa_node(bus_id: str | None, folder: Path = _PCI_DEVICES) -> int | None:
    """The node whose memory is next to a PCI device; None where the machine has one node or does not tell."""
    match = _BUS_ID.fullmatch((bus_id or "").strip("\0 "))
    if match is None:
        return None
    try:
        node = int((folder / f"{match[1][-4:]}:{match[2]}".lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None
