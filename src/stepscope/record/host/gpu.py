"""GPUs through NVML, where there are any. Every query is guarded alone: drivers refuse some and answer the rest."""

from __future__ import annotations

from types import TracebackType
from typing import Any

Metric = tuple[str, str, float, int | None, str | None]  # name, unit, value, pid, device


class Gpus:
    """An open NVML session; without a driver it is empty and says why in `reason`."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
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
        for index in range(self._query("nvmlDeviceGetCount") or 0):
            handle = self._query("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                self._handles.append(handle)
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
        """`{"index", "name", "memory_bytes", "uuid"}` per device."""
        devices = []
        for index, handle in enumerate(self._handles):
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            devices.append(
                {
                    "index": index,
                    "name": _text(self._query("nvmlDeviceGetName", handle)),
                    "memory_bytes": None if memory is None else int(memory.total),
                    "uuid": _text(self._query("nvmlDeviceGetUUID", handle)),
                }
            )
        return devices

    def driver_version(self) -> str | None:
        return None if self._nvml is None else _text(self._query("nvmlSystemGetDriverVersion"))

    def metrics(self) -> list[Metric]:
        """One reading of every device; `device` is the NVML index as `cuda:N` is not known from outside."""
        found: list[Metric] = []
        for index, handle in enumerate(self._handles):
            device = f"gpu:{index}"
            utilization = self._query("nvmlDeviceGetUtilizationRates", handle)
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            power = self._query("nvmlDeviceGetPowerUsage", handle)
            readings = (
                ("gpu_util_pct", "%", None if utilization is None else utilization.gpu),
                ("gpu_memory_bytes", "bytes", None if memory is None else memory.used),
                ("gpu_power_w", "W", None if power is None else power / 1000.0),
                ("gpu_temperature_c", "C", self._query("nvmlDeviceGetTemperature", handle, 0)),
                ("gpu_sm_clock_mhz", "MHz", self._query("nvmlDeviceGetClockInfo", handle, 1)),
                ("gpu_clock_reasons", "bitmask", self._query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
            )
            found += [(name, unit, float(value), None, device) for name, unit, value in readings if value is not None]
        return found


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None
