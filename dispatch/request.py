"""TuneRequest: what is to be served, checked, and the key that it gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dispatch.backends import Registry
from dispatch.bench.profiles import PlannedCell, Profile, default_profiles, plan_cells
from dispatch.bench.trace import Trace
from dispatch.config import DispatchConfig
from dispatch.decision import Rule
from dispatch.device import DeviceFingerprint
from dispatch.errors import ConfigError
from dispatch.grid import check_buckets, kv_grid
from dispatch.key import RULE_VERSION
from dispatch.spec import AttentionSpec
from dispatch.traits import EngineTraits


@dataclass(frozen=True, eq=False)
class TuneRequest:
    """One layer group and how it will be served.

    `buckets`: captured batch sizes, ascending. `max_seq_len`: tokens of the longest request. `capacity`: KV tokens
    that the server can hold; larger cells are not measured. `default`: the backend that candidates must beat;
    None: the first eligible one in priority order. `traits`: what the engine declares of itself. Raises ConfigError
    for sizes that cannot be served.
    """

    spec: AttentionSpec
    buckets: tuple[int, ...]
    max_seq_len: int
    capacity: int
    config: DispatchConfig = field(default_factory=DispatchConfig)
    default: str | None = None
    traces: tuple[Trace, ...] = ()
    traits: EngineTraits = field(default_factory=EngineTraits)

    def __post_init__(self) -> None:
        check_buckets(self.buckets)
        if self.max_seq_len < self.spec.page_size:
            raise ConfigError(f"max sequence length {self.max_seq_len} is below a page ({self.spec.page_size} tokens)")
        if self.capacity < self.spec.page_size:
            raise ConfigError(f"KV capacity {self.capacity} tokens is below a page ({self.spec.page_size} tokens)")

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """How lengths may spread: the general profiles, and the user's traces."""
        return default_profiles(self.traces)

    @property
    def rule(self) -> Rule:
        """The deciding rule with the user's threshold and margin."""
        return Rule(self.config.threshold, self.config.cluster_margin)

    def planned(self, bucket: int, rounds: int) -> tuple[PlannedCell, ...]:
        """The cells of a bucket."""
        return plan_cells(bucket, kv_grid(self.max_seq_len), self.profiles, self.max_seq_len, self.capacity, rounds)

    def key(self, device: DeviceFingerprint, registry: Registry, default: str) -> dict[str, Any]:
        """Everything that could change the answer.

        The capacity only roughly: an engine that is started again can hold some pages more or fewer, and no batch is
        served otherwise for that.
        """
        return {
            "device": device.to_json(),
            "backends": {name: registry.version(name) for name in registry.names()},
            "priority": list(registry.priority(device)),
            "default": default,
            "exclude": sorted(self.config.exclude),
            "spec": self.spec.to_json(),
            "buckets": list(self.buckets),
            "grid": list(kv_grid(self.max_seq_len)),
            "max_seq_len": self.max_seq_len,
            "capacity": _roughly(self.capacity),
            "profiles": [profile.name for profile in self.profiles],
            "traces": {trace.name: trace.digest for trace in self.traces},
            "engine": asdict(self.traits),
            "threshold": self.config.threshold,
            "cluster_margin": self.config.cluster_margin,
            "rule_version": RULE_VERSION,
        }


def _roughly(tokens: int) -> int:
    """Rounded down to four binary digits: by 12% at most."""
    unit = 1 << max(0, tokens.bit_length() - 4)
    return tokens // unit * unit
