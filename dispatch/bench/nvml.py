"""NVML, the driver's own account of a GPU: how busy it is, what slows its clocks, how fast its memory can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from time import time
from typing import Any, TypeVar

import torch

from dispatch.errors import one_line

T = TypeVar("T")

MEMORY_CLOCK = 2  # NVML_CLOCK_MEM
# The bits with which a card says that it protects itself, for as long as it is too hot or its supply too weak. The
# other bits are the card as it will also serve: idle, application clocks and sync boost as set, held at its power cap.
# By number: newer drivers and libraries have new names for them.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
RECENT_US = 1_000_000  # no driver averages over longer periods


class Nvml:
    """Answers about one GPU; None to what its driver does not tell, or not here (MIG, containers, old drivers).

    `library`: pynvml. `gpu`: its handle. `absent`: why there are no answers at all.
    """

    def __init__(self, library: Any, gpu: Any, absent: str = "") -> None:
        self._library, self._gpu, self.absent = library, gpu, absent

    def peak_bytes_per_s(self) -> float | None:
        """What the memory's pins carry at two bits a clock: 4.92e12 on an H200, whose data sheet says 4.8e12.

        torch tells clock and width too, but only in its later releases.
        """
        clock_mhz = self._ask(float, "nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK)
        bus_bits = self._ask(int, "nvmlDeviceGetMemoryBusWidth")
        return clock_mhz * 1e6 * 2 * bus_bits / 8 if clock_mhz and bus_bits else None

    def busy_percent(self) -> int | None:
        """Share of the last sample period, 1/6 to 1 s, in which a kernel ran, whoever launched it."""
        return self._ask(lambda rates: int(rates.gpu), "nvmlDeviceGetUtilizationRates")

    def computing_pids(self) -> list[int]:
        """Other processes that computed lately, as far as the driver tells; a container may see the host's PIDs."""
        since = int(time() * 1e6) - RECENT_US
        pids = self._ask(_busy_pids, "nvmlDeviceGetProcessUtilization", since) or set()
        return sorted(pids - {0, os.getpid()})

    def slowdowns(self) -> tuple[str, ...] | None:
        """What the card protects itself from at this moment."""
        bits = self._ask(int, "nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # its name before driver 535
            bits = self._ask(int, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)

    def _ask(self, read: Callable[[Any], T], function: str, *args: Any) -> T | None:
        if self.absent:
            return None
        try:
            return read(getattr(self._library, function)(self._gpu, *args))
        except (
            Exception
        ):  # NVMLError: not supported, not permitted, no samples; others: an odd pynvml, or an odd answer
            return None


def _busy_pids(samples: Iterable[Any]) -> set[int]:
    return {int(s.pid) for s in samples if 0 < s.smUtil <= 100}  # stale entries hold anything


def open_nvml(device: torch.device) -> Nvml:
    """NVML for a device of torch's. Never raises."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
        # By UUID: NVML counts all devices in the order of the bus, CUDA those of CUDA_VISIBLE_DEVICES in an order of
        # its own.
        gpu = library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception as error:
        return Nvml(None, None, one_line(error))
    return Nvml(library, gpu)
