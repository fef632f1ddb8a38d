"""The device that a command measures on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.device import DeviceFingerprint


def device_to_measure(kind: str | None) -> DeviceFingerprint:
    """The device of this kind. A CPU computes with one thread from now on, here and in child processes, unless
    OMP_NUM_THREADS says otherwise: one layer is little work, and where other programs run too, threads wait for one
    another several times as long as they compute. Raises MeasureError for a kind that is absent.
    """
    import torch

    from dispatch.device import current_device

    device = current_device(kind)
    if device.kind != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return device
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    return current_device(kind)
