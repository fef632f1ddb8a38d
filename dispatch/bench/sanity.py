"""Is what is measured believable: nobody else computes, the clocks are not throttled, the memory could be so fast."""

from __future__ import annotations

import logging
from time import monotonic, sleep

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.bench.nvml import Nvml, open_nvml
from dispatch.device import DeviceFingerprint
from dispatch.errors import MeasureError
from dispatch.spec import AttentionSpec

_log = logging.getLogger(__name__)

REACHABLE = 0.97  # of what the memory's pins carry; the best kernels measured so far reach 0.92
QUIET_PERCENT = 5  # a desktop that draws itself is no reason not to tune
LOOK_S = 0.1
QUIET_LOOKS = 3  # in a row
LOOKS = 24  # two sample periods of the slowest driver: by then its figure no longer holds what this process did before


class GpuWatch:
    """Says when a GPU is not fit to measure on. What its driver does not tell is not held against it."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._slowed: tuple[str, ...] = ()
        self._looked = float("-inf")

    def refusal(self) -> str:
        """Why not to measure now, "" if nothing speaks against it. Nothing of this process may compute meanwhile.

        The driver's list of who computes is no help here: in a container this process may be in it under another PID.
        But while this process waits, whatever computes is not this process. It waits 0.2 s for an idle GPU, up to
        2.4 s for one that stays busy.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.throttling()
        quiet = 0
        for _ in range(LOOKS):
            busy = self._nvml.busy_percent()
            if busy is None:
                break
            quiet = quiet + 1 if busy <= QUIET_PERCENT else 0
            if quiet == QUIET_LOOKS:
                break
            sleep(LOOK_S)
        else:
            pids = ", ".join(map(str, self._nvml.computing_pids()))
            named = f" (PID {pids})" if pids else ""
            return f"another process{named} computes on the GPU, which is {busy}% busy: tune when it is idle"
        return self.throttling()

    def throttling(self) -> str:
        """What throttles the clocks, "" if nothing does: what this look and the one before it have both seen.

        One alone is not enough, because a hardware slowdown is also reported for a moment while clocks change. Looks
        are at least 0.1 s apart: between, nothing is seen.
        """
        if monotonic() - self._looked < LOOK_S:
            return ""
        self._looked = monotonic()
        now = self._nvml.slowdowns() or ()
        lasting = [slowdown for slowdown in now if slowdown in self._slowed]
        self._slowed = now
        return f"clocks throttle: {', '.join(lasting)}" if lasting else ""

    def describe(self) -> str:
        """One line: which checks there are here, and why not the others."""
        if self._nvml.absent:
            return f"none ({self._nvml.absent})"
        peak = self._nvml.peak_bytes_per_s()
        told = {
            f"bandwidth up to {peak / 1e12:.2f} TB/s" if peak else "bandwidth": peak is not None,
            "other processes": self._nvml.busy_percent() is not None,
            "throttled clocks": self._nvml.slowdowns() is not None,
        }
        untold = [check for check, there in told.items() if not there]
        checks = ", ".join(check for check, there in told.items() if there) or "none"
        return checks + (f" (not told by the driver: {', '.join(untold)})" if untold else "")


def watch_for(device: DeviceFingerprint) -> GpuWatch:
    """A watch over torch's current device of this kind."""
    if device.kind == "cpu":
        return GpuWatch(Nvml(None, None, "on a CPU"))
    return GpuWatch(open_nvml(torch.device(device.kind)))


def nominal_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that the device's memory can be read with at most; None if that is not known."""
    return open_nvml(device).peak_bytes_per_s()


def visible_bytes(spec: AttentionSpec, lengths: NDArray[np.int64]) -> int:
    """Bytes of a layer's KV cache that a step reads, of rows with so many tokens: of a sliding window, the last."""
    visible = lengths if spec.sliding_window is None else np.minimum(lengths, spec.sliding_window)
    return int(visible.sum()) * spec.kv_bytes_per_token


def check_bandwidth(
    spec: AttentionSpec, lengths: NDArray[np.int64], layer_us: float, peak_bytes_per_s: float | None
) -> None:
    """Raises MeasureError if a layer took less time than reading its KV cache must take.

    `lengths`: KV tokens of each row.
    """
    if peak_bytes_per_s is None:
        return
    read_bytes = visible_bytes(spec, lengths)
    if read_bytes > REACHABLE * peak_bytes_per_s * layer_us / 1e6:
        raise MeasureError(
            f"{read_bytes} bytes of KV read in {layer_us:.3f} us: a measurement error, above {REACHABLE:.0%} of the"
            f" {peak_bytes_per_s / 1e12:.2f} TB/s of the card's memory"
        )
