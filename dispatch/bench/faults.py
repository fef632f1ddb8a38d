"""The fault matrix: the tuner, as it is, with one faulty backend beside two that are sound."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.backends import Backend, Registry
from dispatch.backends.torch_chunked import TorchChunked
from dispatch.backends.torch_sdpa import TorchSdpa
from dispatch.bench import faulty
from dispatch.config import DispatchConfig
from dispatch.device import DeviceFingerprint
from dispatch.errors import MeasureError
from dispatch.isolation.limits import Limits
from dispatch.request import TuneRequest
from dispatch.samples import TWIN
from dispatch.spec import AttentionSpec
from dispatch.tuner import tune

DEFAULT, FAULTY, OTHER = "steady", "faulty", "other"  # not the fallbacks' own names, which a GPU leaves out
HUNG_S = 8.0  # far above what a sound backend takes for these sizes, kernels loaded for the first time included
BUDGET_S = 120.0

FAULTS: dict[str, type[Backend]] = {
    "sleeps in build": faulty.SleepsInBuild,
    "hangs": faulty.Hangs,
    "raises in build": faulty.RaisesInBuild,
    "raises": faulty.Raises,
    "segfaults": faulty.Segfaults,
    "aborts": faulty.Aborts,
    "ends the process": faulty.Exits,
    "raises SystemExit": faulty.ExitsPolitely,
    "exhausts memory": faulty.ExhaustsMemory,
    "illegal access": faulty.IllegalAccess,
    "wrong numbers": faulty.WrongNumbers,
    "writes out of bounds": faulty.WritesOutOfBounds,
    "leaves rows unwritten": faulty.LeavesRowsUnwritten,
    "differs between runs": faulty.DiffersBetweenRuns,
    "wrong, forges reports": faulty.Forges,
}


@dataclass(frozen=True, slots=True)
class FaultResult:
    """`happened`: why the backend is not used, "" where it may be. `measured`: what the plan decided between.
    `seconds`: from the start of tuning to the plan."""

    fault: str
    happened: str
    measured: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the backend was refused, and cost the others nothing."""
        return bool(self.happened) and {DEFAULT, OTHER} <= set(self.measured) and FAULTY not in self.measured


def run_fault(fault: str, device: DeviceFingerprint) -> FaultResult:
    """Tune with one backend that has this fault."""
    registry = Registry()
    classes = {DEFAULT: TorchChunked, FAULTY: FAULTS[fault], OTHER: TorchSdpa}
    for name, cls in classes.items():
        registry.register(name, lambda cls=cls: cls)  # type: ignore[misc]
    dtype = "bf16" if device.kind == "cuda" else "fp32"
    spec = AttentionSpec(
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=16,
        num_layers=2,
        dtype=dtype,
        kv_dtype=dtype,
    )
    config = DispatchConfig(time_budget_s=BUDGET_S)
    request = TuneRequest(spec, (1, 4), 256, 1024, config, default=DEFAULT)
    limits = Limits(import_s=HUNG_S, first_s=HUNG_S, replay_s=HUNG_S)
    try:
        plan, samples = tune(request, device, registry, limits=limits)
    except MeasureError as error:
        return FaultResult(fault, str(error), (), 0.0)
    measured = {name for bucket in samples.buckets for name in bucket.candidates if name != TWIN}
    return FaultResult(fault, plan.refused.get(FAULTY, ""), tuple(sorted(measured)), plan.seconds)
