"""Who may serve a layer: every backend is asked, and each refusal keeps its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dispatch.backends import Backend, Registry
from dispatch.backends.registry import FALLBACKS
from dispatch.candidate import Candidate
from dispatch.device import DeviceFingerprint
from dispatch.errors import ConfigError, MeasureError, one_line
from dispatch.request import TuneRequest


@dataclass(frozen=True, slots=True)
class Eligible:
    """What may serve a layer: backends in priority order, the default first; and who refuses, with the reason.

    `tactics`: of each backend, in each bucket. `workspace_bytes`: the scratch of each family, for the largest need.
    """

    default: str
    tactics: Mapping[str, Mapping[int, tuple[str, ...]]]
    workspace_bytes: Mapping[str, int]
    refused: Mapping[str, str]

    def candidates(self, bucket: int) -> list[str]:
        """Every backend with each of its tactics, the default without one first."""
        return [
            str(Candidate(name, tactic)) for name, by_bucket in self.tactics.items() for tactic in by_bucket[bucket]
        ]

    def without(self, refused: Mapping[str, str]) -> Eligible:
        """The same less these candidates, with the reasons; a backend's name stands for all of its tactics."""

        def left(name: str, tactics: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(t for t in tactics if refused.keys().isdisjoint((name, str(Candidate(name, t)))))

        tactics = {
            name: {bucket: left(name, offered) for bucket, offered in by_bucket.items()}
            for name, by_bucket in self.tactics.items()
        }
        return replace(self, tactics=tactics, refused={**self.refused, **refused})


def eligible(request: TuneRequest, device: DeviceFingerprint, registry: Registry) -> Eligible:
    """Ask every backend. Raises ConfigError for a named default that cannot serve, MeasureError if none can."""
    registry.check(request.config.exclude, "DYN_DECODE_EXCLUDE")
    tactics: dict[str, dict[int, tuple[str, ...]]] = {}
    workspace_bytes: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name in registry.priority(device):
        support = registry.support(name, request.spec, device)
        if name in request.config.exclude:
            refused[name] = "excluded by DYN_DECODE_EXCLUDE"
        elif not support.ok:
            refused[name] = support.reason
        elif registry.get(name).needs_exact_lengths and not request.traits.exact_lengths:
            refused[name] = "needs the exact lengths on the host, and this engine knows only upper bounds there"
        else:
            backend = registry.get(name)
            try:
                offered = {b: _tactics(backend, request, device, b) for b in request.buckets}
                sizes = [backend.workspace_bytes(request.spec, b, request.max_seq_len) for b in request.buckets]
                largest = max(int(size) for size in sizes)
            except Exception as error:  # it broke its word: it loses itself alone
                refused[name] = f"broken: {one_line(error)}"
            else:
                tactics[name] = offered
                workspace_bytes[backend.family] = max(largest, workspace_bytes.get(backend.family, 0))
    if device.kind != "cpu" and any(name not in FALLBACKS for name in tactics):
        for name in [name for name in tactics if name in FALLBACKS and name != request.default]:
            del tactics[name]
            refused[name] = "a fallback: not measured where a kernel library serves the layer"
    if request.default is not None:
        registry.check([request.default], "--default")
        if request.default in refused:
            raise ConfigError(f"--default {request.default}: {refused[request.default]}")
        tactics = {request.default: tactics.pop(request.default), **tactics}
    if not tactics:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise MeasureError(f"no backend serves this layer ({reasons})")
    return Eligible(next(iter(tactics)), tactics, workspace_bytes, refused)


def _tactics(backend: Backend, request: TuneRequest, device: DeviceFingerprint, bucket: int) -> tuple[str, ...]:
    """What the backend offers for a bucket. Raises ValueError or DispatchError where that breaks the contract."""
    offered = tuple(backend.tactics(request.spec, device, bucket, request.max_seq_len))
    if offered[:1] != ("",) or len(set(offered)) != len(offered):
        raise ValueError(f"tactics {offered}: must be '' first, then others, each once")
    for tactic in offered:
        limit = Candidate.parse(str(Candidate("x", tactic))).max_kv
        if limit is not None and not 0 < limit < request.max_seq_len:
            raise ValueError(f"tactic {tactic!r}: max_kv must be above 0 and below {request.max_seq_len}")
    return offered
