"""The timer interface, and its implementation with a monotonic clock for a CPU.

A GPU timer is a second implementation: it captures the chain in a CUDA graph, flushes the cache and subtracts filler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from dispatch.backends.base import DecodeImpl
from dispatch.bench.pool import Chain
from dispatch.step import StepInputs


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds: the host's plan(), begin_step, and one layer's forward."""

    plan_us: float
    begin_us: float
    layer_us: float


class Recording(Protocol):
    """A candidate over fixed buffers, ready to run again and again with lengths set through them."""

    def run(self, layers: int) -> None:
        """One step as it is served: plan if needed, begin_step, the first `layers` of the chain, or more.

        Returns when outputs are there.
        """
        ...

    def start(self, layers: int) -> Callable[[], StepTime]:
        """Begin a timed step over `layers` of the chain: one of the timer's `chain_layers`, or all there are.

        What is returned waits for its end. A step is of the lengths and pages that are set when it begins: others may
        be set, and other steps begun, of this recording too, before it is read.
        """
        ...


class Timer(Protocol):
    """How steps are run and timed on one kind of device."""

    chain_layers: tuple[int, ...]
    """Layers, each with a KV cache of its own, to run back to back where memory allows: most of short ones, down to the
    longest."""

    peak_bytes_per_s: float | None
    """What the device's memory can be read with at most; a sample that implies more is an error. None: not known."""

    def record(self, impl: DecodeImpl, inputs: StepInputs, chain: Chain) -> Recording:
        """Make a candidate ready; `inputs` and `chain` are the buffers it will always use."""
        ...


class CpuTimer:
    """Eager calls and a monotonic clock."""

    peak_bytes_per_s: float | None = None
    # by the time that a layer comes again, the other one has passed through the cache
    chain_layers: tuple[int, ...] = (2,)

    def record(self, impl: DecodeImpl, inputs: StepInputs, chain: Chain) -> Recording:
        return _Eager(impl, inputs, chain)


@dataclass(frozen=True)
class _Eager:
    impl: DecodeImpl
    inputs: StepInputs
    chain: Chain

    def run(self, layers: int) -> None:
        self.start(layers)

    def start(self, layers: int) -> Callable[[], StepTime]:
        impl, inputs, chain = self.impl, self.inputs, self.chain
        start = perf_counter_ns()
        if impl.needs_plan:
            impl.plan(inputs)
        planned = perf_counter_ns()
        impl.begin_step(inputs)
        begun = perf_counter_ns()
        for kv_cache, out in zip(chain.kv_caches[:layers], chain.outs[:layers], strict=True):
            impl.forward(chain.q, kv_cache, out, chain.sinks)
        layer_ns = (perf_counter_ns() - begun) / layers
        time = StepTime((planned - start) / 1e3, (begun - planned) / 1e3, layer_ns / 1e3)
        return lambda: time
