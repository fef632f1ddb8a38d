"""Backends and a timer that inject faults and timings. Where numbers matter, they compute them with a real backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dispatch.backends import SUPPORTED, Backend, DecodeImpl, Registry
from dispatch.backends.torch_chunked import TorchChunked
from dispatch.bench.timer import StepTime
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec

CPU = DeviceFingerprint("cpu", "test", (0, 0), 2, "", "", "2.13.0")


def spec_of(**changes):
    """A small layer: 4/2 heads, d 16, pages of 4, float32."""
    values = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
        "page_size": 4,
        "num_layers": 2,
        "dtype": "fp32",
        "kv_dtype": "fp32",
    }
    return AttentionSpec(**{**values, **changes})


class Wrapped(DecodeImpl):
    """A real implementation with hooks around it."""

    def __init__(self, name: str, inner: DecodeImpl, before: Callable | None, after: Callable | None) -> None:
        self.name, self.inner, self.before, self.after = name, inner, before, after
        self.needs_plan = inner.needs_plan
        self.calls: list[str] = []

    def plan(self, inputs):
        self.calls.append("plan")
        self.inner.plan(inputs)

    def begin_step(self, inputs):
        self.calls.append("begin_step")
        self.inputs = inputs
        self.inner.begin_step(inputs)

    def forward(self, q, kv_cache, out, sinks=None):
        self.calls.append("forward")
        if self.before is not None:
            q, kv_cache, sinks = self.before(self, q, kv_cache, sinks)
        self.previous = out.clone()
        self.inner.forward(q, kv_cache, out, sinks)
        if self.after is not None:
            self.after(self, q, out)


def backend(
    name: str,
    before: Callable | None = None,
    after: Callable | None = None,
    tactics: tuple[str, ...] = ("",),
    build_error: Exception | None = None,
    spec_of_kernel: Callable[[AttentionSpec], AttentionSpec] = lambda spec: spec,
    family: str = "fake",
    workspace_bytes: int = 0,
) -> type[Backend]:
    """A backend class around torch_chunked. `spec_of_kernel`: what the kernel believes the layer to be."""

    class Fake(Backend):
        def support(self, spec, device):
            return SUPPORTED

        def tactics(self, spec, device, batch_size, max_kv):
            return tactics

        def workspace_bytes(self, spec, batch_size, max_kv):
            return workspace_bytes

        def build(self, spec, batch_size, max_kv, workspace, tactic):
            if build_error is not None:
                raise build_error
            inner = TorchChunked().build(spec_of_kernel(spec), batch_size, max_kv, workspace, {})
            impl = Wrapped(name, inner, before, after)
            impl.tactic, impl.max_kv, impl.workspace = dict(tactic), max_kv, workspace
            built.append(impl)
            return impl

    built: list[Wrapped] = []
    Fake.name, Fake.family, Fake.distribution, Fake.built = name, family, "torch", built
    return Fake


def registry_of(*backends: type[Backend]) -> Registry:
    """A registry of these alone, in priority order."""
    registry = Registry()
    for cls in backends:
        registry.register(cls.name, lambda cls=cls: cls)
    return registry


class ScriptedTimer:
    """Runs steps for real, so that the gate is real, and reports times from a script.

    `layer_us(name, lengths, sample)`: lengths are those of the step, sample counts the timed steps of a recording. A
    function that it returns is called when the step is read.
    """

    peak_bytes_per_s: float | None = None

    def __init__(self, layer_us: Callable, plan_us: Callable = lambda name: 0.0, chain_layers: int = 1) -> None:
        self.layer_us, self.plan_us, self.chain_layers = layer_us, plan_us, (chain_layers,)
        self.order: list[tuple[str, tuple[int, ...]]] = []
        self.events: list[tuple[str, str]] = []

    def record(self, impl, inputs, chain):
        return _Scripted(self, impl, inputs, chain)


class _Scripted:
    def __init__(self, timer, impl, inputs, chain):
        self.timer, self.impl, self.inputs, self.chain, self.sample = timer, impl, inputs, chain, 0

    def run(self, layers):
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        self.impl.begin_step(self.inputs)
        for kv_cache, out in zip(self.chain.kv_caches[:layers], self.chain.outs[:layers], strict=True):
            self.impl.forward(self.chain.q, kv_cache, out, self.chain.sinks)

    def start(self, layers):
        lengths = tuple(self.inputs.lengths_host.tolist())
        self.timer.order.append((self.impl.name, lengths))
        self.timer.events.append(("start", self.impl.name))
        layer_us = self.timer.layer_us(self.impl.name, lengths, self.sample)
        self.sample += 1

        def read():
            self.timer.events.append(("read", self.impl.name))
            return StepTime(self.timer.plan_us(self.impl.name), 0.0, layer_us() if callable(layer_us) else layer_us)

        return read


def device() -> torch.device:
    return torch.device("cpu")
