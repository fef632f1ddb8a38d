"""Builds what serves a bucket, over scratch that is sized before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch.backends import DecodeImpl, KVCache, Registry
from dispatch.candidate import Candidate
from dispatch.engine.groups import LayerGroup
from dispatch.engine.variants import Variant
from dispatch.errors import ConfigError
from dispatch.step import StepInputs
from dispatch.workspace import Workspaces

Attend = Callable[..., None]
"""attend(layer, q, kv_cache, out, sinks=None): one layer's attention, written to out, as DecodeImpl.forward has it."""
Step = Callable[[tuple[StepInputs, ...], Attend], Any]
"""The engine's decode step over its own static buffers: StepInputs of each layer group, and what to attend with."""


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """An engine's step with an implementation for each layer group, over one bucket's buffers.

    `kv_caches`: by layer, as the engine's step has handed them over.
    """

    step: Step
    impls: tuple[DecodeImpl, ...]
    inputs: tuple[StepInputs, ...]
    groups: Sequence[LayerGroup]
    group_of: Mapping[int, int]
    kv_caches: dict[int, KVCache] = field(default_factory=dict)

    @property
    def bucket(self) -> int:
        """Rows that it is built for."""
        return len(self.inputs[0].lengths_host)

    def plan(self) -> None:
        """The host's work before every run, where the implementations have any."""
        for impl, inputs in zip(self.impls, self.inputs, strict=True):
            if impl.needs_plan:
                impl.plan(inputs)

    def work(self) -> Any:
        """Everything on the device: once a step, then the engine's layers."""
        for impl, inputs in zip(self.impls, self.inputs, strict=True):
            impl.begin_step(inputs)
        return self.step(self.inputs, self._attend)

    def _attend(
        self, layer: int, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        group = self.group_of.get(layer)
        if group is None:
            raise ConfigError(f"layer {layer} is in no layer group")
        if (sinks is not None) != self.groups[group].spec.has_sinks:
            given = "without its sinks" if sinks is None else "with sinks, which its AttentionSpec does not have"
            raise ConfigError(f"layer {layer} attends {given}")
        self.kv_caches[layer] = kv_cache
        self.impls[group].forward(q, kv_cache, out, sinks)


class Builder:
    """Makes BuiltSteps. Its scratch is the engine's, and shared by what runs one after the other."""

    def __init__(
        self, step: Step, groups: Sequence[LayerGroup], max_seq_len: int, backends: Registry, device: torch.device
    ) -> None:
        self.step, self.groups, self.max_seq_len, self.backends = step, groups, max_seq_len, backends
        self.device = device
        self.group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self.workspaces = Workspaces(device)

    def longest(self, candidate: Candidate) -> int:
        """Tokens of the longest request that it serves."""
        return candidate.max_kv or self.max_seq_len

    def reserve(self, wanted: Iterable[tuple[int, Variant]]) -> None:
        """Size every family's scratch for the largest need of these (bucket, variant)."""
        for bucket, variant in wanted:
            for group, candidate in zip(self.groups, variant, strict=True):
                backend = self.backends.get(candidate.backend)
                size = backend.workspace_bytes(group.spec, bucket, self.longest(candidate))
                self.workspaces.reserve(backend.family, size)

    def build(self, bucket: int, variant: Variant, inputs: tuple[StepInputs, ...]) -> BuiltStep:
        """Raises what a backend raises."""
        impls = []
        for group, candidate in zip(self.groups, variant, strict=True):
            backend = self.backends.get(candidate.backend)
            scratch = self.workspaces.get(backend.family)
            impls.append(backend.build(group.spec, bucket, self.longest(candidate), scratch, candidate.knobs))
        return BuiltStep(self.step, tuple(impls), inputs, self.groups, self.group_of)
