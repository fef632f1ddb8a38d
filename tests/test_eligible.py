"""Who may serve: plain torch gives way to kernels on a GPU, and an engine's own traits refuse or admit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dispatch.tuner
from dispatch.config import DispatchConfig
from dispatch.device import DeviceFingerprint
from dispatch.eligible import eligible
from dispatch.request import TuneRequest
from dispatch.traits import EngineTraits
from dispatch.tuner import tune
from tests.fakes import CPU, ScriptedTimer, backend, registry_of, spec_of

GPU = DeviceFingerprint("cuda", "test", (9, 0), 132, "580.0", "13.0", "2.11.0")


def request(default=None, num_layers=2, **traits):
    return TuneRequest(
        spec_of(num_layers=num_layers),
        (4,),
        512,
        10_000,
        DispatchConfig(isolation="none"),
        default=default,
        traits=EngineTraits(**traits),
    )


def named(*names):
    return registry_of(*(backend(name) for name in names))


@pytest.mark.parametrize(
    ("device", "names", "default", "able"),
    [
        (GPU, ("kernel", "torch_sdpa", "torch_chunked"), None, ["kernel"]),
        (GPU, ("torch_sdpa", "torch_chunked"), None, ["torch_sdpa", "torch_chunked"]),
        (GPU, ("kernel", "torch_sdpa", "torch_chunked"), "torch_sdpa", ["torch_sdpa", "kernel"]),
        (CPU, ("kernel", "torch_sdpa"), None, ["kernel", "torch_sdpa"]),
    ],
)
def test_plain_torch_is_measured_on_a_gpu_only_where_no_kernel_serves_or_where_it_is_named(
    device, names, default, able
):
    found = eligible(request(default), device, named(*names))
    assert list(found.tactics) == able
    assert set(found.refused) == set(names) - set(able)
    assert all("a fallback" in why for why in found.refused.values())


def test_a_backend_that_needs_exact_lengths_is_refused_by_an_engine_that_knows_only_bounds():
    exact = backend("exact")
    exact.needs_exact_lengths = True
    registry = registry_of(backend("a"), exact)
    assert list(eligible(request(), CPU, registry).tactics) == ["a", "exact"]
    found = eligible(request(exact_lengths=False), CPU, registry)
    assert list(found.tactics) == ["a"]
    assert "upper bounds" in found.refused["exact"]


def winner(monkeypatch, ask, *backends, plan_us=0.0):
    """Of 100 us a layer for the first, and 80 for the second, which also plans."""
    names = [cls.name for cls in backends]
    timer = ScriptedTimer(
        lambda name, lengths, sample: 100.0 if name == names[0] else 80.0,
        lambda name: 0.0 if name == names[0] else plan_us,
    )
    monkeypatch.setattr(dispatch.tuner, "timer_for", lambda device: timer)
    plan, _ = tune(ask, CPU, registry_of(*backends))
    return {decided.box.candidate for decided in plan.boxes}


def test_a_plan_that_the_engine_hides_does_not_count(monkeypatch):
    ask, both = request(), (backend("a"), backend("b"))  # 200 us against 160 + 150
    assert winner(monkeypatch, ask, *both, plan_us=150.0) == {"a"}
    assert winner(monkeypatch, replace(ask, traits=EngineTraits(plan_hidden=True)), *both, plan_us=150.0) == {"b"}


def test_a_kernel_that_lets_nan_through_from_behind_a_row_wins_only_where_there_is_none(monkeypatch):
    def multiplies_what_it_masked(impl, q, kv_cache, sinks):
        return q + kv_cache[1].float().sum() * 0, kv_cache, sinks

    both = backend("a"), backend("b", before=multiplies_what_it_masked)
    assert winner(monkeypatch, request(), *both) == {"a"}
    assert winner(monkeypatch, request(finite_kv=True), *both) == {"b"}
