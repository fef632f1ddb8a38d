"""From a request to a plan, with scripted times. The default takes 100 us a layer unless said otherwise."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import dispatch.tuner
from dispatch.backends import Support
from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.errors import ConfigError, MeasureError, RegistryError
from dispatch.obtain import obtain_plan, plan_from_file
from dispatch.plan import TIME_BUDGET_OVER
from dispatch.planfile import write_plans
from dispatch.request import TuneRequest
from dispatch.samples import Box, skew_of
from dispatch.samplesfile import read_samples, samples_path, write_samples
from dispatch.store import Store
from dispatch.tuner import ABOVE_CAPACITY, ONE_CANDIDATE, tune
from tests.fake_nvml import THERMAL, watch_of
from tests.fakes import CPU, ScriptedTimer, backend, registry_of, spec_of


def request(buckets=(1, 4), max_seq_len=512, capacity=10_000, spec=None, default=None, **config):
    return TuneRequest(
        spec or spec_of(), buckets, max_seq_len, capacity, DispatchConfig(**{"isolation": "none", **config}), default
    )


@pytest.fixture
def scripted(monkeypatch):
    """Tune with scripted times: scripted(times, *backends), where times are numbers or functions of lengths."""

    def run(times, *backends, ask=None, plan_us=None, **kwargs):
        def layer_us(name, lengths, sample):
            time = times[name]
            return time(lengths) if callable(time) else time

        timer = ScriptedTimer(layer_us, lambda name: (plan_us or {}).get(name, 0.0))
        monkeypatch.setattr(dispatch.tuner, "timer_for", lambda device: timer)
        registry = registry_of(*(backends or [backend(name) for name in times]))
        return tune(ask or request(), CPU, registry, lambda done, total, what: None, **kwargs)

    return run


def winners(plan):
    return {d.box.bucket: d.box.candidate for d in plan.boxes}


def test_the_fastest_backend_is_planned_for_every_bucket(scripted):
    plan, _ = scripted({"a": 100, "b": 80})
    assert winners(plan) == {1: "b", 4: "b"}
    assert plan.table().lookup(3, 200, skew_of(200, 250)).backend == "b"
    assert plan.unmeasured == {}


def test_a_winner_on_equal_lengths_that_loses_on_ragged_ones_is_not_planned_for_them(scripted):
    def spread(lengths):
        return 80 if max(lengths) == min(lengths) else 400

    plan, _ = scripted({"a": 100, "b": spread})
    assert plan.table().lookup(4, 200, skew_of(200, 300)).backend == "a"
    assert plan.table().lookup(1, 200, skew_of(200, 200)).backend == "b"


def test_the_cost_of_plan_counts_once_a_step_whatever_the_number_of_layers(scripted):
    # 2 layers: 200 us against 160 + 150. 64 layers: 6400 against 5120 + 150
    for layers, winner in ((2, "a"), (64, "b")):
        ask = request(buckets=(1,), spec=spec_of(num_layers=layers))
        plan, _ = scripted({"a": 100, "b": 80}, ask=ask, plan_us={"b": 150})
        assert winners(plan) == {1: winner}


def test_a_named_default_is_the_one_to_beat(scripted):
    plan, samples = scripted({"a": 100, "b": 80, "c": 79}, ask=request(default="b"))
    assert (plan.default, samples.buckets[0].candidates[0]) == ("b", "b")
    assert set(winners(plan).values()) == {"b"}  # c gains 1%


def test_an_excluded_backend_is_neither_measured_nor_planned_and_the_plan_says_why(scripted):
    plan, samples = scripted({"a": 100, "b": 50, "c": 90}, ask=request(exclude=("b",)))
    assert set(winners(plan).values()) == {"c"}
    assert "b" not in samples.buckets[0].candidates
    assert plan.refused == {"b": "excluded by DYN_DECODE_EXCLUDE"}


def test_an_unknown_name_to_exclude_is_an_error_that_lists_what_there_is(scripted):
    with pytest.raises(RegistryError, match="DYN_DECODE_EXCLUDE: no backend 'z'; there are a, b"):
        scripted({"a": 100, "b": 50}, ask=request(exclude=("z",)))


def test_a_default_that_is_excluded_is_an_error(scripted):
    with pytest.raises(ConfigError, match="--default b: excluded by DYN_DECODE_EXCLUDE"):
        scripted({"a": 100, "b": 50}, ask=request(exclude=("b",), default="b"))


def test_where_no_backend_serves_the_layer_the_error_lists_every_reason(scripted):
    with pytest.raises(MeasureError, match="no backend serves this layer \\(a: excluded"):
        scripted({"a": 100}, ask=request(exclude=("a",)))


RUDE = {
    "tactics that raise": {"tactics": lambda self, *a: 1 / 0},
    "no tactics": {"tactics": lambda self, *a: ()},
    "tactics that are None": {"tactics": lambda self, *a: None},
    "a first tactic that is not the plain one": {"tactics": lambda self, *a: ("splits=2", "")},
    "a tactic twice": {"tactics": lambda self, *a: ("", "splits=2", "splits=2")},
    "a tactic that is no text": {"tactics": lambda self, *a: ("", 3)},
    "a tactic that cannot be read": {"tactics": lambda self, *a: ("", "splits=two")},
    "a tactic as long as what is served": {"tactics": lambda self, *a: ("", "max_kv=512")},
    "a tactic for no tokens": {"tactics": lambda self, *a: ("", "max_kv=0")},
    "a workspace that raises": {"workspace_bytes": lambda self, *a: 1 / 0},
    "a workspace that is no number": {"workspace_bytes": lambda self, *a: "much"},
    "no family": {"family": None},
    "a family that is a list": {"family": ["x"]},
    "no distribution": {"distribution": None},
    "an empty distribution": {"distribution": ""},
    "support() that raises": {"support": lambda self, *a: 1 / 0},
    "support() that is a bool": {"support": lambda self, *a: True},
    "support() without a text": {"support": lambda self, *a: Support(False, None)},
    "an error while it is built": {"build": lambda self, *a: 1 / 0},
    "an implementation that is None": {"build": lambda self, *a: None},
}


@pytest.mark.parametrize("how", RUDE)
def test_a_backend_that_breaks_its_word_loses_itself_alone_and_the_plan_says_so(obtain, how):
    rude = backend("rude")
    for name, value in RUDE[how].items():
        setattr(rude, name, value)
    found = obtain({"a": 100, "b": 80, "rude": 1}, backends=[backend("a"), rude, backend("b")])
    assert set(winners(found.plan).values()) == {"b"}
    assert "rude" in found.plan.refused or {e.candidate for e in found.plan.excluded} == {"rude"}
    assert obtain({"a": 100, "b": 80, "rude": 1}, backends=[backend("a"), rude, backend("b")]).plan == found.plan


def test_something_that_is_no_backend_is_refused(obtain):
    registry = registry_of(backend("a"), backend("b"))
    registry.register("rude", lambda: dict)
    found = obtain({"a": 100, "b": 80}, registry=registry)
    assert "dict is not a dispatch.Backend" in found.plan.refused["rude"]


def test_one_candidate_is_not_measured_because_there_is_nothing_to_choose(scripted):
    plan, samples = scripted({"a": 100})
    assert (plan.boxes, samples.buckets) == ((), ())
    assert plan.unmeasured == {1: ONE_CANDIDATE, 4: ONE_CANDIDATE}
    assert plan.table().lookup(1, 200, skew_of(200, 200)) is None


def test_a_bucket_above_the_capacity_is_left_to_the_default_and_said_so(scripted):
    plan, _ = scripted({"a": 100, "b": 80}, ask=request(buckets=(1, 200), capacity=199))
    assert plan.unmeasured == {200: ABOVE_CAPACITY}
    assert not plan.is_partial


def test_tactics_compete_like_backends_and_the_plan_names_them(scripted, monkeypatch):
    class Split(ScriptedTimer):
        def record(self, impl, inputs, chain):
            impl.name = "split" if impl.tactic else impl.name
            return super().record(impl, inputs, chain)

    monkeypatch.setattr("tests.test_tuner.ScriptedTimer", Split)
    wide = backend("b", tactics=("", "splits=4"))
    plan, samples = scripted({"a": 100, "b": 95, "split": 80}, backend("a"), wide, ask=request(buckets=(1,)))
    assert samples.buckets[0].candidates[2:] == ("b", "b[splits=4]")
    assert winners(plan) == {1: "b[splits=4]"}
    assert plan.table().lookup(1, 200, skew_of(200, 200)).tactic == "splits=4"


def test_when_the_budget_ends_measured_buckets_are_planned_and_the_rest_is_resumed_later(scripted, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: next(clock))
    # one tick at the start, two a bucket: after three ticks the first bucket is done and the second is not begun
    ask = request(time_budget_s=2.5)
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.proving, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)
    plan, samples = scripted({"a": 100, "b": 80}, ask=ask)
    assert winners(plan) == {1: "b"}
    assert plan.unmeasured == {4: TIME_BUDGET_OVER}
    assert plan.is_partial
    monkeypatch.undo()
    later, all_samples = scripted({"a": 100, "b": 120}, ask=request(), stored=samples)
    assert winners(later) == {1: "b", 4: "a"}  # bucket 1 keeps what was measured first
    assert [b.bucket for b in all_samples.buckets] == [1, 4]


def test_a_default_with_wrong_numbers_stays_the_default_with_a_warning(scripted, caplog):
    wrong = backend("a", after=lambda impl, q, out: out.mul_(2))
    with caplog.at_level(logging.WARNING):
        plan, _ = scripted({"a": 100, "b": 50}, wrong, backend("b"))
    assert plan.boxes == ()
    assert all("wrong numbers: the default a: random: row " in reason for reason in plan.unmeasured.values())
    assert not plan.is_partial
    assert "bucket 1 keeps its default, which failed" in caplog.text


def test_a_candidate_with_wrong_numbers_is_never_planned_however_fast(scripted):
    wrong = backend("b", after=lambda impl, q, out: out.mul_(2))
    plan, _ = scripted({"a": 100, "b": 1, "c": 90}, backend("a"), wrong, backend("c"))
    assert set(winners(plan).values()) == {"c"}
    assert {(e.bucket, e.candidate, e.reason) for e in plan.excluded} == {
        (1, "b", Reason.GATE_FAILED),
        (4, "b", Reason.GATE_FAILED),
    }


def test_stored_choices_stay_against_a_challenger_that_does_not_beat_them_by_delta(scripted):
    before = [Box(1, 1, 512, 1000, 1000, "b")]
    plan, samples = scripted({"a": 100, "b": 90, "c": 88}, ask=request(buckets=(1,)), incumbent=before)
    assert winners(plan) == {1: "b"}
    assert samples.incumbent == tuple(before)


@pytest.fixture
def obtain(scripted, monkeypatch, tmp_path):
    """obtain_plan over a store of its own, with scripted times; counts the runs that measured."""
    measured = []
    real = dispatch.obtain.tune

    def run(times, ask=None, force=False, store=None, backends=None, registry=None):
        def layer_us(name, lengths, sample):
            return times[name]

        monkeypatch.setattr(dispatch.tuner, "timer_for", lambda device: ScriptedTimer(layer_us))
        monkeypatch.setattr(dispatch.obtain, "tune", lambda *a, **k: measured.append(1) or real(*a, **k))
        registry = registry or registry_of(*(backends or [backend(name) for name in times]))
        where = Store(tmp_path) if store is None else store
        return obtain_plan(ask or request(), CPU, registry, where, lambda *a: None, force)

    run.measured = measured
    return run


def test_a_second_run_with_the_same_key_reads_the_plan_and_measures_nothing(obtain):
    first = obtain({"a": 100, "b": 80})
    second = obtain({"a": 100, "b": 120})
    assert len(obtain.measured) == 1
    assert second.plan == first.plan
    assert re.fullmatch(r"read from the store in \d+\.\d ms", second.source)


def test_force_measures_again_with_the_stored_choices_as_incumbents(obtain):
    obtain({"a": 100, "b": 90, "c": 95})
    kept = obtain({"a": 100, "b": 90, "c": 88}, force=True)
    assert set(winners(kept.plan).values()) == {"b"}
    beaten = obtain({"a": 100, "b": 90, "c": 80}, force=True)
    assert set(winners(beaten.plan).values()) == {"c"}
    assert len(obtain.measured) == 3


@pytest.mark.parametrize(
    "change",
    [{"threshold": 0.05}, {"cluster_margin": 0.02}, {"exclude": ("c",)}, {"default": "b"}, {"capacity": 9_000}],
)
def test_another_setting_is_another_key(obtain, change):
    obtain({"a": 100, "b": 80, "c": 90})
    obtain({"a": 100, "b": 80, "c": 90}, ask=request(**change))
    assert len(obtain.measured) == 2


def test_a_partial_plan_is_resumed_by_the_next_run(obtain, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.proving, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)
    partial = obtain({"a": 100, "b": 80}, ask=request(time_budget_s=2.5))
    assert partial.plan.is_partial
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: 0)
    whole = obtain({"a": 100, "b": 120}, ask=request(time_budget_s=2.5))
    assert winners(whole.plan) == {1: "b", 4: "a"}


def test_what_another_process_stored_meanwhile_is_used_partial_as_it_is_and_measured_further_by_the_next_start(
    obtain, monkeypatch, tmp_path
):
    complete = obtain({"a": 100, "b": 80}).plan
    partial = replace(complete, boxes=complete.boxes[:1], unmeasured={4: TIME_BUDGET_OVER})
    lock = Store.lock

    def lock_after_another_has_stored(store, key):
        Store(tmp_path / "own").save(partial, None)
        return lock(store, key)

    monkeypatch.setattr(Store, "lock", lock_after_another_has_stored)
    first = obtain({"a": 100, "b": 80}, store=Store(tmp_path / "own"))
    assert (first.plan, first.source) == (partial, "measured by another process meanwhile")
    assert len(obtain.measured) == 1
    monkeypatch.setattr(Store, "lock", lock)
    assert not obtain({"a": 100, "b": 80}, store=Store(tmp_path / "own")).plan.is_partial
    assert len(obtain.measured) == 2


def test_force_whose_budget_ends_keeps_what_was_stored_of_the_buckets_that_it_did_not_reach(obtain, monkeypatch):
    obtain({"a": 100, "b": 80})
    clock = iter(range(10_000))
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.proving, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)
    again = obtain({"a": 100, "b": 120}, force=True, ask=request(time_budget_s=2.5))
    assert winners(again.plan) == {1: "a", 4: "b"}
    assert not again.plan.is_partial


@pytest.mark.parametrize(("rounds", "kept"), [(15, True), (14, False)])
def test_a_bucket_is_kept_when_the_budget_ends_after_all_of_its_rounds(scripted, monkeypatch, rounds, kept):
    ask = request(buckets=(1,), max_seq_len=8)
    cells = len(ask.planned(1, dispatch.bench.rounds.ROUNDS))  # a look at the clock in each
    clock = iter(range(10_000))
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dispatch.bench.harness, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.proving, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)  # one look at the clock
    looks = iter([0, 0, 0])  # the start, before the bucket, after it: the budget has ended by then
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: next(looks, 10_000))
    ask = replace(ask, config=DispatchConfig(time_budget_s=rounds * cells + 1.5, isolation="none"))
    looks = iter([0, 0])
    plan, _ = scripted({"a": 100, "b": 80}, ask=ask)
    assert (winners(plan) == {1: "b"}) is kept
    assert plan.is_partial is not kept


def test_a_default_that_cannot_run_now_is_tried_again_by_the_next_run(obtain, caplog):
    broken = [backend("a", build_error=RuntimeError("CUDA out of memory")), backend("b")]
    first = obtain({"a": 100, "b": 80}, backends=broken)
    assert first.plan.is_partial
    assert "CUDA out of memory" in caplog.text
    assert winners(obtain({"a": 100, "b": 80}).plan) == {1: "b", 4: "b"}


def test_a_candidate_that_fails_after_the_gate_costs_its_bucket_and_nothing_else(obtain):
    def later(impl, q, out):
        impl.count = getattr(impl, "count", 0) + 1
        if impl.count > 200:
            raise RuntimeError("illegal access")

    found = obtain({"a": 100, "b": 80}, backends=[backend("a"), backend("b", after=later)])
    assert found.plan.default == "a"


def test_memory_that_is_not_there_is_an_error_of_the_packages_own(obtain, monkeypatch):
    def full(*args):
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(dispatch.bench.harness, "PagedPool", full)
    with pytest.raises(MeasureError, match=r"no memory to measure with: CUDA out of memory\. Tried to allocate$"):
        obtain({"a": 100, "b": 80})


def test_a_default_that_has_no_valid_time_is_said_so(scripted):
    plan, _ = scripted({"a": 0.0, "b": 80})
    assert plan.boxes == ()
    assert set(plan.unmeasured.values()) == {"the default has no valid time"}


def test_force_measures_a_partial_plan_from_its_beginning(obtain, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dispatch.bench.rounds, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.proving, "monotonic", lambda: 0)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)
    assert obtain({"a": 100, "b": 80}, ask=request(time_budget_s=2.5)).plan.is_partial
    monkeypatch.setattr(dispatch.tuner, "monotonic", lambda: 0)
    whole = obtain({"a": 100, "b": 120}, ask=request(time_budget_s=2.5), force=True)
    assert winners(whole.plan) == {1: "a", 4: "a"}


def test_a_store_that_cannot_be_written_costs_a_warning_and_nothing_else(obtain, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        obtained = obtain({"a": 100, "b": 80}, store=Store(tmp_path / "file"))
    assert winners(obtained.plan) == {1: "b", 4: "b"}
    assert obtained.path is None
    assert "the plan was not stored" in caplog.text


@pytest.mark.parametrize("where", ["fsync", "mkdir", "open"])
def test_a_disk_that_is_full_costs_a_warning_and_nothing_else(obtain, monkeypatch, caplog, where):
    real = getattr(os, where)

    def full(path, flags=0, *rest, **more):
        if where == "open" and not flags & os.O_CREAT:  # nothing can be made; what is there can be opened
            return real(path, flags, *rest, **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, where, full)
    obtained = obtain({"a": 100, "b": 80}, ask=request(max_seq_len=8))
    monkeypatch.undo()
    assert winners(obtained.plan) == {1: "b", 4: "b"}
    assert obtained.path is None
    assert "the plan was not stored" in caplog.text and "No space left on device" in caplog.text


def test_a_file_system_without_locks_costs_a_warning_and_the_plan_is_stored_all_the_same(obtain, monkeypatch, caplog):
    def without_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    first = obtain({"a": 100, "b": 80}, ask=request(max_seq_len=8))
    assert "No locks available" in caplog.text
    assert obtain({"a": 100, "b": 120}, ask=request(max_seq_len=8)).plan == first.plan
    assert len(obtain.measured) == 1


OTHER_PROCESS = """
import os, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
    os.replace(sys.argv[2], sys.argv[3])
"""


def test_while_another_process_tunes_for_the_key_this_one_waits_and_then_reads(obtain, monkeypatch):
    first = obtain({"a": 100, "b": 80})
    elsewhere = first.path.with_name("elsewhere")
    first.path.rename(elsewhere)
    command = [sys.executable, "-c", OTHER_PROCESS, first.path.with_suffix(".lock"), elsewhere, first.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        lock = Store.lock

        def lock_while_the_other_ends(self, key):  # asked for after the first look into the store has missed
            other.stdin.write("\n")
            other.stdin.flush()
            return lock(self, key)

        monkeypatch.setattr(Store, "lock", lock_while_the_other_ends)
        second = obtain({"a": 100, "b": 80})
    assert second.plan == first.plan
    assert len(obtain.measured) == 1


def test_when_the_other_process_takes_too_long_the_error_says_so(obtain, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch.obtain, "SLACK_S", 0.0)
    first = obtain({"a": 100, "b": 80}, ask=request(time_budget_s=0.05))
    if first.path.exists():
        first.path.unlink()
    with Store(tmp_path).lock(dict(first.plan.key)), pytest.raises(MeasureError, match="tuning for too long"):
        obtain({"a": 100, "b": 80}, ask=request(time_budget_s=0.05))


@pytest.fixture
def from_file(obtain, tmp_path):
    """A plan file of a run, and plan_from_file for a request."""
    first = obtain({"a": 100, "b": 80})
    path = tmp_path / "plan.json"
    write_plans(path, [first.plan])
    write_samples(samples_path(path), [first.samples])

    def use(ask):
        registry = registry_of(backend("a"), backend("b"))
        return plan_from_file(path, ask, CPU, registry, Store(tmp_path / "other"))

    return first, use


def test_a_plan_file_that_fits_is_used_and_stored_with_its_samples(from_file):
    first, use = from_file
    used = use(request())
    assert used.plan == first.plan
    stored = read_samples(samples_path(used.path))[0]
    assert np.array_equal(stored.buckets[0].times, first.samples.buckets[0].times)


def test_a_plan_file_for_something_else_is_refused_with_the_fields_that_differ(from_file):
    _, use = from_file
    with pytest.raises(
        Exception, match=r"plan\.json does not fit here: spec\.num_layers: the plan has 2, here it is 3"
    ):
        use(request(spec=spec_of(num_layers=3)))


@pytest.fixture
def watched(monkeypatch):
    """Tune under a watch over a GPU that answers so."""

    def watch(**script):
        monkeypatch.setattr(dispatch.bench.sanity, "sleep", lambda seconds: None)
        clock = count()
        monkeypatch.setattr(dispatch.bench.sanity, "monotonic", lambda: next(clock))  # every look counts
        monkeypatch.setattr(dispatch.tuner, "watch_for", lambda device: watch_of(**script))

    return watch


def test_while_another_process_computes_nothing_is_measured_and_nothing_stored(obtain, watched, tmp_path):
    watched(busy=[90], pids={4711: 90})
    backends = [backend("a"), backend("b")]
    with pytest.raises(MeasureError, match=r"another process \(PID 4711\) computes on the GPU.*: tune when it is idle"):
        obtain({"a": 100, "b": 80}, backends=backends)
    assert backends[0].built == []
    assert list(tmp_path.glob("*.json")) == []


def test_a_stored_plan_is_used_whoever_computes(obtain, watched):
    first = obtain({"a": 100, "b": 80})
    watched(busy=[90])
    assert obtain({"a": 100, "b": 80}).plan == first.plan


def test_a_partial_plan_serves_as_it_is_where_nothing_can_be_measured_now(obtain, watched, caplog):
    ask = request(max_seq_len=8)
    watched(bits=[0] * (2 + 300 + 10) + [THERMAL])
    partial = obtain({"a": 100, "b": 80}, ask=ask).plan
    watched(busy=[99] * 100)
    again = obtain({"a": 100, "b": 70}, ask=ask)
    assert (winners(again.plan), again.plan.is_partial) == (winners(partial), True)
    assert again.source.startswith("read from the store; not measured: another process")
    assert "the stored plan is used as it is: another process" in caplog.text


def test_force_whose_clocks_throttle_keeps_what_was_stored(obtain, watched):
    ask = request(max_seq_len=8)
    watched()
    obtain({"a": 100, "b": 80}, ask=ask)
    watched(bits=[0] * (2 + 300 + 10) + [THERMAL])
    again = obtain({"a": 100, "b": 120}, ask=ask, force=True).plan
    assert (winners(again), again.unmeasured) == ({1: "a", 4: "b"}, {})


def test_clocks_that_begin_to_throttle_cost_their_bucket_which_the_next_run_measures(obtain, watched, caplog):
    ask = request(max_seq_len=8)  # bucket 1: four points, five profiles, 15 rounds; and 2 looks before
    watched(bits=[0] * (2 + 300 + 10) + [THERMAL])
    first = obtain({"a": 100, "b": 80}, ask=ask).plan
    assert winners(first) == {1: "b"}
    assert first.unmeasured == {4: "failed, to be tried again: clocks throttle: hardware thermal slowdown"}
    assert "bucket 4 keeps its default: clocks throttle: hardware thermal slowdown" in caplog.text
    watched()
    assert winners(obtain({"a": 100, "b": 70}, ask=ask).plan) == {1: "b", 4: "b"}


def test_where_the_driver_tells_nothing_tuning_goes_on_and_one_line_says_what_is_not_checked(scripted, caplog):
    with caplog.at_level(logging.INFO):
        plan, _ = scripted({"a": 100, "b": 80})
    assert winners(plan) == {1: "b", 4: "b"}
    assert [r.message for r in caplog.records if "checks" in r.message] == ["checks while tuning: none (on a CPU)"]


def test_a_backend_that_claims_more_than_the_memory_can_is_not_chosen(scripted, monkeypatch):
    monkeypatch.setattr(ScriptedTimer, "peak_bytes_per_s", 1e12)  # 256 bytes a token: 512 tokens take 0.135 us
    plan, _ = scripted({"a": 100, "b": 0.001, "c": 80}, ask=request(buckets=(1,)))
    assert winners(plan) == {1: "c"}


def test_a_cell_in_which_the_default_has_no_time_is_nobodys_and_no_box_of_another_spans_it(scripted, monkeypatch):
    monkeypatch.setattr(ScriptedTimer, "peak_bytes_per_s", 1e12)
    ask = request(buckets=(1,), max_seq_len=512)  # points 64, 128, 256, 512

    def is_untimed(lengths):
        return 181 < lengths[0] <= 362  # the rounds of 256: sqrt(128 * 256) = 181.02, sqrt(256 * 512) = 362.04

    times = {"a": lambda its: 0.001 if is_untimed(its) else 100, "b": lambda its: 1000 if is_untimed(its) else 80}
    plan, _ = scripted(times, ask=ask)
    table = plan.table()
    assert table.lookup(1, 64, skew_of(64, 64)).backend == "b"
    assert table.lookup(1, 512, skew_of(512, 512)).backend == "b"
    entry = table.lookup(1, 256, skew_of(256, 256))
    assert entry is None or entry.backend == "a"


def test_one_outlier_of_the_default_costs_no_cell(scripted, monkeypatch):
    monkeypatch.setattr(ScriptedTimer, "peak_bytes_per_s", 1e12)
    seen = []

    def default(lengths):
        seen.append(lengths)
        return 0.001 if len(seen) == 1 else 100

    plan, _ = scripted({"a": default, "b": 80}, ask=request(buckets=(1,)))
    assert winners(plan) == {1: "b"}
    assert len(plan.boxes) == 1
