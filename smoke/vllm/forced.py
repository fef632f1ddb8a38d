"""A plan that timing did not make: another kernel in each bucket, so that each is seen at work."""

from __future__ import annotations

from typing import Any

from dispatch.backends import Registry
from dispatch.decision import Reason
from dispatch.device import DeviceFingerprint
from dispatch.eligible import eligible
from dispatch.obtain import Obtained
from dispatch.plan import DecidedBox, StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import Box

ROUND = (
    "flashinfer_xqa",
    "flashinfer_fa2_tc",
    "vllm_fa3[balanced=1]",
    "flashinfer_fa2",
    "vllm_fa3[balanced=1,num_splits=1]",
)


def force() -> None:
    """Have the adapter's plans name these backends for buckets in turn, with nothing measured: here, and in what is
    forked from here, as vLLM's workers for several GPUs are."""
    from dispatch.engine import choose

    choose.obtain_plan = obtain


def obtain(request: TuneRequest, device: DeviceFingerprint, registry: Registry, *_: Any, **__: Any) -> Obtained:
    """In the place of dispatch.obtain.obtain_plan."""
    default = eligible(request, device, registry).default
    boxes = tuple(
        DecidedBox(Box(bucket, 1, 1 << 20, 1000, 1 << 20, ROUND[i % len(ROUND)]), Reason.FASTEST, 1.0)
        for i, bucket in enumerate(request.buckets)
    )
    plan = StoredPlan(
        request.key(device, registry, default), "2026-11-30T00:00:00+00:00", default, request.buckets, boxes
    )
    return Obtained(plan, None, None, "forced")
