"""What happens to the ranks of a toy engine: each case makes one rank's runner, with whatever is wrong in it.

The last rank is the one that is off, unless a case's name says that the leader is.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dispatch.bench.harness
import dispatch.engine.capture
import dispatch.engine.choose
import dispatch.engine.ranks
import dispatch.engine.serving
import dispatch.obtain
import dispatch.tuner
from dispatch.config import DispatchConfig
from dispatch.engine import DecodeGraphRunner
from dispatch.engine.graphs import EagerSteps
from dispatch.request import TuneRequest
from dispatch.samples import EVEN
from tests.engine import BUCKETS, MAX_KV, Engine, store_plan
from tests.fakes import ScriptedTimer, backend, registry_of

EVERYWHERE = [(bucket, 1, MAX_KV, EVEN, EVEN * MAX_KV, "b") for bucket in BUCKETS]


class Sharded(Engine):
    """Its step makes a collective call, as tensor-parallel layers do; what it returns is this rank's alone."""

    group: dist.ProcessGroup | None = None
    sums = 0

    def step(self, inputs, attend):
        out = super().step(inputs, attend)
        dist.all_reduce(out.clone(), group=self.group)
        self.sums += 1
        return out


@dataclass
class Rank:
    """One rank's parts. `happened`: counts that a test asks for."""

    rank: int
    world: int
    folder: Path
    a: Any = field(default_factory=lambda: backend("a"))
    b: Any = field(default_factory=lambda: backend("b"))
    engine: Sharded = field(default_factory=Sharded)
    happened: Counter = field(default_factory=Counter)

    def __post_init__(self):
        dispatch.bench.harness.WARM_UP_S = 0.0
        dispatch.tuner.timer_for = lambda device: ScriptedTimer(lambda name, *_: 10.0 if name == "a" else 8.0)
        tune = dispatch.obtain.tune

        def counted(*args, **kwargs):
            self.happened["tuned"] += 1
            return tune(*args, **kwargs)

        dispatch.obtain.tune = counted

    @property
    def is_last(self):
        return self.rank == self.world - 1

    @property
    def store(self):
        """Of its own, as on a host of its own."""
        return self.folder / f"store{self.rank}"

    def runner(self, *, without_group=False, store=None, enabled=True, **config) -> DecodeGraphRunner:
        settings = DispatchConfig(enabled=enabled, cache_dir=store or self.store, isolation="none", **config)
        group = None if without_group else self.engine.group or dist.new_group(backend="gloo")
        return self.engine.runner(None, config=settings, backends=registry_of(self.a, self.b), cpu_group=group)

    def planned(self, **options) -> DecodeGraphRunner:
        """The leader alone has the plan."""
        runner = self.runner(**options)
        if self.rank == 0:
            store_plan(runner, EVERYWHERE)
        return runner


def raising(error):
    def fault(*args, **kwargs):
        raise error

    return fault


def die(*args, **kwargs):
    time.sleep(0.3)  # until the others wait for it
    os._exit(9)


# --- the store


def warm(r):
    return r.planned()


def cold(r):
    return r.runner()


def warm_elsewhere(r):
    runner = r.runner()
    if r.is_last:
        store_plan(runner, EVERYWHERE)
    return runner


def corrupt(r):
    runner = r.planned()
    if r.is_last:
        _store_and_spoil(r, runner)
    return runner


def corrupt_leader(r):
    runner = r.runner()
    if r.rank == 0:
        _store_and_spoil(r, runner)
    return runner


def _store_and_spoil(r, runner):
    store_plan(runner, EVERYWHERE)
    (path,) = r.store.glob("plans/*.json")
    path.write_bytes(path.read_bytes()[:-100])


def replicas(r):
    """Pairs of ranks, or single ranks, that serve by themselves, with one store."""
    pairs = [dist.new_group([i, i + 1], backend="gloo") for i in range(0, r.world, 2)]
    if r.world == 2:
        r.engine.group = dist.new_subgroups(1)[0]
        return r.runner(without_group=True, store=r.folder / "store")
    r.engine.group = pairs[r.rank // 2]
    return r.runner(store=r.folder / "store")


# --- ranks that are not alike


def another_version(r):
    if r.is_last:
        r.b.version = lambda self: "0.0.1"
    return r.planned()


def another_registry(r):
    if r.is_last:
        r.b = backend("c")
    return r.planned()


def another_gpu(r):
    runner = r.planned()
    if r.is_last:
        runner.fingerprint = replace(runner.fingerprint, name="another")
    return runner


def refusing(r):
    if r.is_last:
        support = r.b.support
        r.b.support = lambda self, *args: replace(support(self, *args), ok=False, reason="it is Friday")
    return r.planned()


def switched_off(r):
    return r.planned(enabled=not r.is_last)


def late(r):
    runner = r.planned()
    if r.is_last:
        time.sleep(5)
    return runner


# --- a rank that raises


def raises_in_tuning_leader(r):
    if r.rank == 0:
        dispatch.obtain.tune = raising(RuntimeError("no luck\nat all"))
    return r.runner()


def raises_in_choosing(r):
    if r.is_last:
        TuneRequest.key = raising(RuntimeError("no key"))
    return r.planned()


def raises_in_reading(r):
    if r.is_last:
        dispatch.engine.choose.plan_from_json = raising(RuntimeError("unreadable"))
    return r.planned()


def raises_in_reserving(r):
    runner = r.planned()
    if r.is_last:
        r.b.workspace_bytes = lambda self, spec, batch_size, max_kv: 1 / (0 if hasattr(runner, "buffers") else 1)
    return runner


def raises_in_building(r):
    if r.is_last:
        r.b = backend("b", build_error=MemoryError("no room"))
    return r.planned()


def raises_in_planning(r):
    if r.is_last:
        r.b = _with_impl(plan=raising(RuntimeError("no plan")))
    return r.planned()


def raises_in_attending(r):
    if r.is_last:
        r.b = backend("b", before=raising(RuntimeError("no kernel image")))
    return r.planned()


def raises_in_capturing(r):
    if r.is_last:
        capture = EagerSteps.capture

        def broken(self, work):
            replay = capture(self, work)
            r.happened["captured"] += 1
            if r.happened["captured"] > len(BUCKETS):  # defaults come first
                raise RuntimeError("not permitted when capturing")
            return replay

        EagerSteps.capture = broken
    return r.planned()


def raises_in_checking(r):
    if r.is_last:
        disagreement = dispatch.engine.capture.disagreement

        def broken(built, replay, eager, *rest):
            wrong = disagreement(built, replay, eager, *rest)
            return wrong if built is eager else 1 / 0

        dispatch.engine.capture.disagreement = broken
    return r.planned()


def wrong_output(r):
    if r.is_last:
        r.b = backend("b", after=lambda impl, q, out: out.mul_(1.5))
    return r.planned()


def budget_ended(r):
    return r.planned(capture_budget_s=1e-9 if r.is_last else 60.0)


def default_not_captured(r):
    if r.is_last:
        EagerSteps.capture = _capture_then_raise(EagerSteps.capture)
    return r.runner(enabled=False)


def _capture_then_raise(capture):
    def broken(self, work):
        capture(self, work)
        raise RuntimeError("not permitted when capturing")

    return broken


# --- what the ranks cannot go on from


def default_not_built(r):
    if r.is_last:
        r.a = backend("a", build_error=MemoryError("no room"))
    return r.planned()


def no_default(r):
    if r.is_last:
        r.a.support = lambda self, *args: replace(backend("x")().support(*args), ok=False, reason="it is Friday")
    return r.planned()


def engine_step_raises(r):
    dispatch.engine.ranks.FAREWELL_S = 0.5  # the others do not listen: they are in the engine's step
    if r.is_last:
        r.engine.step = raising(ZeroDivisionError("a mistake of the engine"))
    return r.planned()


def elsewhere(r):
    if r.is_last:
        r.engine.buckets = (2, 8)
    return r.planned(enabled=False)


def never_comes(r):
    runner = r.planned()
    if r.is_last:
        end = time.monotonic() + 15
        while (
            not (r.folder / "rank0.json").exists() and time.monotonic() < end
        ):  # the other's report, once it has ended
            time.sleep(0.05)
        os._exit(9)
    runner.ranks.patience_s = 0.5
    return runner


def dies_before(r):
    runner = r.planned()
    return die() if r.is_last else runner


def dies_in_building(r):
    if r.is_last:
        r.b.build = die
    return r.planned()


def dies_in_checking(r):
    if r.is_last:
        dispatch.engine.capture.disagreement = die
    return r.planned()


def dies_in_tuning_leader(r):
    if r.rank == 0:
        dispatch.obtain.tune = die
    return r.runner()


# --- while serving


def cannot_plan(r):
    r.b = _with_impl(plan=_raises_while_serving)
    return r.planned()


def cannot_plan_alone(r):
    dispatch.engine.serving.ONE_STEP_S = 0.5
    if r.is_last:
        r.b = _with_impl(plan=_raises_while_serving)
    return r.planned()


def _raises_while_serving(impl, inputs):
    if inputs.num_live == 1 or int(inputs.lengths_host[0]) == 9:  # a batch of `rank_process`; none of the start check
        raise RuntimeError("Buffer overflow")


def _with_impl(**methods):
    """A backend b whose implementation has these methods in place of its own."""
    b = backend("b")
    build = b.build

    def built(self, *args):
        impl = build(self, *args)
        impl.needs_plan = True
        for name, method in methods.items():
            setattr(impl, name, lambda *rest, method=method: method(impl, *rest))
        return impl

    b.build = built
    return b
