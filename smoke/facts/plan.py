"""What plan() costs on the host, and which of its parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dispatch.backends import registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import PagedPool
from dispatch.step import StepInputs
from smoke.facts.stand import drawn, layer_of
from smoke.facts.table import Found, Row, listed

REPEATS = 50
UNCOUNTED = 5
BACKENDS = ("flashinfer_fa2", "flashinfer_fa2_tc")
BATCHES = (1, 8, 64, 256)
MEAN_KV, LONGEST = 2048, 40960
THEN = "fast 50 to 130, plan() 90 to 250 (DESIGN 2.6); plan() costs 50 to 80 more (2.2)"

Nothing = Callable[[], object]


def plan_cost(timer: CudaTimer) -> Found:
    """6: impl.plan() and its parts, and the wrapper's plan(): with the GPU idle, in a loop and between replays."""
    spec = layer_of(32, 8)
    pool = PagedPool(spec, 1, 1, timer.device)  # lengths are all that plan() looks at
    graph = timer.capture(partial(timer.filler(1).layers, 8), torch.cuda.graph_pool_handle())
    befores: dict[str, Nothing] = {"in a loop": lambda: None, "between replays": lambda: timer.replays_us([graph])}
    rows, found = [], {}
    for name in BACKENDS:
        backend = registry.get(name)
        size = max(backend.workspace_bytes(spec, batch, LONGEST) for batch in BATCHES)
        scratch = torch.zeros(size, dtype=torch.uint8, device=timer.device)
        for batch in BATCHES:
            impl: Any = backend.build(spec, batch, LONGEST, scratch, {})
            inputs = pool.inputs(batch, LONGEST)
            steps = torch.from_numpy(drawn(0.7, batch, MEAN_KV, LONGEST, UNCOUNTED + REPEATS)).int()
            impl.plan(inputs)  # the first one compiles and loads
            for how, before in befores.items():
                plan_us = _median_us(lambda impl=impl, inputs=inputs: impl.plan(inputs), inputs, steps, before)
                with _clocks(impl) as parts:
                    _median_us(lambda impl=impl, inputs=inputs: impl.plan(inputs), inputs, steps, before)
                parts_us = {part: statistics.median(us[UNCOUNTED:]) for part, us in parts.items() if us}
                full_us = _full_us(impl, inputs, steps, before)
                where = f"{name}, batch {batch}, {how}"
                rows.append(_row(where, plan_us, parts_us, full_us))
                found[where] = {"plan_us": plan_us, "parts_us": parts_us, "full_plan_us": full_us}
    return Found(tuple(rows), found)


def _row(where: str, plan_us: float, parts_us: dict[str, float], full_us: float | None) -> Row:
    now = f"impl.plan() {plan_us:.0f}"
    if full_us is not None:
        now += f"; wrapper.plan() {full_us:.0f}"
        if "fast_decode_plan" in parts_us:
            now += f", {full_us - parts_us['fast_decode_plan']:+.0f} to fast_decode_plan"
    return Row(f"6, 2b plan(): 32/8, {where}, us a step", THEN, now, listed(parts_us))


def _median_us(call: Nothing, inputs: StepInputs, steps: torch.Tensor, before: Nothing) -> float:
    """Of a call for each step's lengths, each with the GPU idle; the first few do not count."""
    times = []
    for lengths in steps:
        before()
        inputs.lengths_host.copy_(lengths)
        torch.cuda.synchronize()
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e6)
    torch.cuda.synchronize()  # the last copy reads what the next caller may overwrite
    return statistics.median(times[UNCOUNTED:])


def _full_us(impl: Any, inputs: StepInputs, steps: torch.Tensor, before: Nothing) -> float | None:
    """The wrapper's own plan(), over page lists made off the clock; None where the backend no longer has them."""
    with suppress(AttributeError):
        lists = (impl.on_host.indptr, impl.on_device.indices, impl.on_host.last_page_len)
        wrapper, constants, measure = impl.wrapper, impl.constants, impl.on_host.measure

        def ready() -> None:
            before()
            torch.cuda.synchronize()
            measure(inputs.lengths_host)

        return _median_us(lambda: wrapper.plan(*lists, **constants), inputs, steps, ready)
    return None


@contextmanager
def _clocks(impl: Any) -> Iterator[dict[str, list[float]]]:
    """Microseconds of each part of impl.plan(), one a call. Parts that are no longer there are left out."""
    parts: dict[str, list[float]] = {}

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        us = parts.setdefault(part, [])

        def clocked(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                us.append((perf_counter() - start) * 1e6)

        return clocked

    def event() -> SimpleNamespace:
        copied = impl.copied
        return SimpleNamespace(
            synchronize=timed("event.synchronize", copied.synchronize), record=timed("event.record", copied.record)
        )

    def module() -> SimpleNamespace:
        kernels = impl.wrapper._cached_module
        return SimpleNamespace(**{**vars(kernels), "plan": timed("of it the module's plan", kernels.plan)})

    def fast() -> Callable[..., Any]:
        return timed("fast_decode_plan", impl.decode.fast_decode_plan)

    places: tuple[tuple[Callable[[], Any], str, Callable[[], Any]], ...] = (
        (lambda: impl, "copied", event),
        (lambda: impl.on_host, "measure", lambda: timed("on_host.measure", impl.on_host.measure)),
        (lambda: impl.decode, "fast_decode_plan", fast),
        (lambda: impl.wrapper, "_cached_module", module),
    )
    with ExitStack() as undo:
        for owner, attribute, clocked in places:
            with suppress(AttributeError, TypeError):
                undo.enter_context(mock.patch.object(owner(), attribute, clocked()))
        yield parts
