"""What a plan was tuned for, out of its key, and whether that is here."""

from __future__ import annotations

from pathlib import Path

from dispatch.backends import Registry
from dispatch.config import DispatchConfig
from dispatch.device import DeviceFingerprint, current_device
from dispatch.errors import PlanFileError
from dispatch.key import differences
from dispatch.obtain import mismatch
from dispatch.plainjson import each, field, mapping, text, whole
from dispatch.plan import StoredPlan
from dispatch.request import TuneRequest
from dispatch.traits import EngineTraits


def is_for_cpu(plan: StoredPlan) -> bool:
    """Whether the plan was tuned on a CPU, as far as its key says at all."""
    device = plan.key.get("device")
    return isinstance(device, dict) and device.get("kind") == "cpu"


def device_of(plan: StoredPlan, path: Path, registry: Registry) -> DeviceFingerprint:
    """The device that the plan of the file `path` is for, which is this one.

    Times hang on the device and on the backends' versions. With which rule and for which trace it was decided is what
    a comparison is about. Raises PlanFileError that names the fields in which it is for another machine.
    """
    here = current_device("cpu" if is_for_cpu(plan) else None)
    backends = {name: registry.version(name) for name in registry.names()}
    differing = differences(plan.key, {**plan.key, "device": here.to_json(), "backends": backends})
    if differing:
        raise PlanFileError(mismatch(path, differing))
    return here


def request_of(plan: StoredPlan, path: Path, buckets: tuple[int, ...]) -> TuneRequest:
    """What the plan of the file `path` was tuned for, as far as these buckets go. Raises PlanFileError, ConfigError."""
    key = dict(plan.key)
    try:
        return TuneRequest(
            plan.spec,
            buckets,
            field(key, "max_seq_len", whole),
            field(key, "capacity", whole),
            DispatchConfig(exclude=field(key, "exclude", lambda names: each(names, text))),
            field(key, "default", text),
            traits=field(key, "engine", lambda engine: EngineTraits(**mapping(engine))),
        )
    except (TypeError, ValueError) as error:
        raise PlanFileError(f"{path}: key: {error}") from None
