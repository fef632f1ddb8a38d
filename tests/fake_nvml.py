"""A stand-in for pynvml that answers from a script."""

from __future__ import annotations

from types import SimpleNamespace

from dispatch.bench.nvml import Nvml
from dispatch.bench.sanity import GpuWatch

THERMAL, POWER_CAP, IDLE, APPLICATION_CLOCKS, SYNC_BOOST, HARDWARE = 0x40, 0x04, 0x01, 0x02, 0x10, 0x08


class NVMLError(Exception):
    """As pynvml has it."""


class FakeNvml:
    """One GPU, an H200 unless said otherwise. `busy`, `bits`: answers in turn, the last one again and again.

    `pids`: {PID: smUtil}. None, for any of them: not supported.
    """

    def __init__(self, busy=(0,), bits=(0,), pids=None, clock_mhz=3201, bus_bits=6144):
        self.busy, self.bits = (None if script is None else list(script) for script in (busy, bits))
        self.pids, self.clock_mhz, self.bus_bits = pids, clock_mhz, bus_bits
        self.looks = 0

    def nvmlDeviceGetUtilizationRates(self, gpu):
        self.looks += 1
        return SimpleNamespace(gpu=self._next(self.busy), memory=0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self._next(self.bits)

    def nvmlDeviceGetProcessUtilization(self, gpu, since):
        known(self.pids)
        return [SimpleNamespace(pid=pid, smUtil=sm, timeStamp=since + 1) for pid, sm in self.pids.items()]

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        assert kind == 2  # memory
        return known(self.clock_mhz)

    def nvmlDeviceGetMemoryBusWidth(self, gpu):
        return known(self.bus_bits)

    def _next(self, script):
        known(script)
        return script.pop(0) if len(script) > 1 else script[0]


def known(answer):
    """The answer, if there is one."""
    if answer is None:
        raise NVMLError("Not Supported")
    return answer


def watch_of(**script):
    """A watch over a GPU that answers so."""
    return GpuWatch(Nvml(FakeNvml(**script), "gpu"))
