"""An engine's steps: the right variant for each, the default for the rest, and never an exception because of a plan."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch

import dispatch.bench.harness
import dispatch.obtain
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.engine import DecodeGraphRunner, EngineFacts, LayerGroup
from dispatch.engine.prepare import ABOVE_BUCKETS, OUTSIDE
from dispatch.errors import ConfigError
from dispatch.plan import TIME_BUDGET_OVER
from dispatch.samples import EVEN
from dispatch.traits import EngineTraits
from tests.engine import BUCKETS, MAX_KV, RESERVED, Engine, store_plan
from tests.fakes import backend, registry_of, spec_of

EVERYWHERE = [(bucket, 1, MAX_KV, EVEN, EVEN * MAX_KV, "b") for bucket in BUCKETS]
SHORT = [(bucket, 1, 20, EVEN, 3 * EVEN // 2, "b") for bucket in BUCKETS]


def runner_of(engine, tmp_path, *backends, boxes=(), **options):
    """With backends a (the default) and b, unless given, and a stored plan of these boxes."""
    backends = registry_of(*(backends or (backend("a"), backend("b"))))
    runner = engine.runner(tmp_path, backends=backends, **options)
    if boxes:
        store_plan(runner, boxes)
    return runner


def served_by(runner):
    return {(bucket, what): count for (bucket, what), count in runner.counts.hits.items()}


def eager(engine, lengths, **options):
    """What the default computes for these rows, without a runner: a fresh engine with the same seed."""
    twin = Engine(*engine.specs)
    runner = runner_of(twin, None, enabled=False, config=DispatchConfig(), **options)
    runner.trigger_init_capture()
    return runner.run(*twin.request(lengths))


# --- off


def test_switched_off_every_step_is_the_defaults_bit_for_bit_and_nothing_else_is_built(tmp_path):
    a, b, engine = backend("a"), backend("b"), Engine()
    runner = runner_of(engine, tmp_path, a, b, enabled=False)
    report = runner.trigger_init_capture()
    assert report.refusal == "switched off"
    assert len(a.built) == len(BUCKETS) and b.built == []
    direct = Engine()
    direct.request([9, 33])
    impl = a().build(direct.specs[0], 2, MAX_KV, torch.zeros(0, dtype=torch.uint8), {})
    inputs = runner.buffers.inputs(2)
    found = runner.run(*engine.request([9, 33]))
    impl.plan(inputs[0])
    impl.begin_step(inputs[0])
    assert torch.equal(found, direct.step(inputs, lambda layer, q, kv, out: impl.forward(q, kv, out)))
    assert list(tmp_path.iterdir()) == []  # no plan was looked for


# --- on


def test_a_step_inside_a_box_runs_the_planned_variant_and_one_outside_the_default(tmp_path, caplog):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=SHORT)
    runner.trigger_init_capture()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            runner.run(*engine.request([9, 30]))  # mean 19.5, which counts as 20, and skew 1.5: the box's corner
            runner.run(*engine.request([9, 33]))
    assert served_by(runner) == {(2, "b"): 3}
    assert runner.counts.misses == {(2, OUTSIDE): 3}
    assert [r.getMessage() for r in caplog.records] == [f"bucket 2: {OUTSIDE}: the default serves it"]


@pytest.mark.parametrize("lengths", [[1], [9, 33], [9, 33, 5], [64, 1, 64, 3]])
def test_padded_and_full_buckets_give_each_request_what_it_would_get_alone(tmp_path, lengths):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    runner.trigger_init_capture()
    found = runner.run(*engine.request(lengths))
    assert len(found) == len(lengths)
    torch.testing.assert_close(found, eager(engine, lengths), rtol=1e-5, atol=1e-5)


def test_a_batch_above_the_largest_bucket_runs_eagerly_with_the_default(tmp_path):
    engine, a, b = Engine(), backend("a"), backend("b")
    runner = runner_of(engine, tmp_path, a, b, boxes=EVERYWHERE)
    runner.trigger_init_capture()
    built = len(b.built)
    lengths = [5, 9, 64, 1, 17]
    found = runner.run(*engine.request(lengths))
    assert runner.counts.misses == {(0, ABOVE_BUCKETS): 1}
    assert len(b.built) == built
    wide = Engine(buckets=(8,))
    other = runner_of(wide, tmp_path, enabled=False)
    other.trigger_init_capture()
    torch.testing.assert_close(found, other.run(*wide.request(lengths)), rtol=1e-5, atol=1e-5)


def test_requests_grow_join_and_finish_over_buffers_that_never_move(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=SHORT)
    runner.trigger_init_capture()

    def addresses():
        tensors = [runner.buffers.lengths_host, runner.buffers.lengths, *runner.buffers.tables]
        tensors += [t for b in BUCKETS for i in runner.buffers.inputs(b) for t in (i.lengths, i.block_table)]
        return [t.data_ptr() for t in tensors]

    before, twin = addresses(), Engine()
    off = runner_of(twin, tmp_path, enabled=False)
    off.trigger_init_capture()
    for lengths in ([3], [4, 60], [5, 61, 9], [62, 10], [63, 11, 1, 1]):
        found = runner.run(*engine.request(lengths))
        torch.testing.assert_close(found, off.run(*twin.request(lengths)), rtol=1e-5, atol=1e-5)
        assert addresses() == before
    assert {what for _, what in served_by(runner)} == {"b"}
    assert sum(runner.counts.misses.values()) == 4  # all but the first: a mean above 20, or a request above 30


def test_plan_runs_before_every_step_and_begin_step_before_every_layer(tmp_path):
    engine, a, b = Engine(), backend("a"), backend("b")
    runner = runner_of(engine, tmp_path, a, b, boxes=EVERYWHERE)
    runner.trigger_init_capture()
    impl = next(impl for impl in b.built if impl is runner.serving.ready[2, (Candidate("b"),)].built.impls[0])
    impl.calls.clear()
    for _ in range(3):
        runner.run(*engine.request([9, 33]))
    assert impl.calls == ["plan", "begin_step", "forward"] * 3


def test_device_lengths_are_taken_where_the_host_knows_only_bounds(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE, traits=EngineTraits(exact_lengths=False))
    runner.trigger_init_capture()
    exact, tables = engine.request([9, 33])
    found = runner.run(exact + 4, tables, exact)
    torch.testing.assert_close(found, eager(engine, [9, 33]), rtol=1e-5, atol=1e-5)


def test_each_layer_group_has_a_plan_of_its_own(tmp_path):
    engine = Engine(spec_of(), spec_of(sliding_window=10))
    runner = runner_of(engine, tmp_path)
    store_plan(runner, SHORT, group=0)
    store_plan(runner, EVERYWHERE, group=1)
    runner.trigger_init_capture()
    short, long = runner.run(*engine.request([9, 9])).clone(), runner.run(*engine.request([40, 40]))
    assert served_by(runner) == {(2, "b"): 1}
    assert runner.counts.misses == {(2, OUTSIDE): 1}  # of the first group; the second has its own
    assert any(
        impl.calls.count("forward") for impl in runner.serving.ready[2, (Candidate("a"), Candidate("b"))].built.impls
    )
    torch.testing.assert_close(short, eager(engine, [9, 9]), rtol=1e-5, atol=1e-5)
    assert long.isfinite().all()


# --- when something is wrong


def test_a_planned_variant_whose_output_is_another_is_dropped_for_the_default(tmp_path, caplog):
    engine, wrong = Engine(), backend("b", after=lambda impl, q, out: out.mul_(1.5))
    runner = runner_of(engine, tmp_path, backend("a"), wrong, boxes=EVERYWHERE)
    with caplog.at_level(logging.WARNING):
        report = runner.trigger_init_capture()
    dropped = {v.bucket: v.dropped for v in report.variants if v.dropped}
    assert set(dropped) == set(BUCKETS)
    assert all(
        why.startswith("another output than the default's: with a row of length 7: row 0 is off by 0.5")
        for why in dropped.values()
    )
    torch.testing.assert_close(runner.run(*engine.request([9, 33])), eager(engine, [9, 33]))
    assert runner.counts.misses == {(2, "b is planned and not available"): 1}


def test_a_variant_that_is_wrong_only_at_length_is_dropped_too(tmp_path):
    def after(impl, q, out):
        if int(impl.inputs.lengths.max()) > 40:  # of 7, 31 and 63
            out.zero_()

    runner = runner_of(Engine(), tmp_path, backend("a"), backend("b", after=after), boxes=EVERYWHERE)
    dropped = [v.dropped for v in runner.trigger_init_capture().variants if v.dropped]
    assert len(dropped) == len(BUCKETS) and all("of length 63" in why for why in dropped)


def test_a_planned_backend_that_fails_to_build_costs_its_variant_alone(tmp_path):
    engine, broken = Engine(), backend("b", build_error=MemoryError("no room\nfor it"))
    runner = runner_of(engine, tmp_path, backend("a"), broken, boxes=EVERYWHERE)
    report = runner.trigger_init_capture()
    assert {v.dropped for v in report.variants if not v.is_default} == {"MemoryError: no room"}
    assert len(runner.run(*engine.request([9, 33]))) == 2


def test_a_planned_backend_that_is_gone_costs_its_variant_alone(tmp_path):
    engine = Engine()
    boxes = [(b, 1, MAX_KV, EVEN, EVEN * MAX_KV, "b[gone=1]") for b in BUCKETS]
    runner = runner_of(engine, tmp_path, boxes=boxes)
    runner.trigger_init_capture()
    assert len(runner.run(*engine.request([9, 33]))) == 2


def test_when_the_capture_budget_ends_buckets_keep_the_default(tmp_path):
    engine = Engine()
    config = DispatchConfig(enabled=True, cache_dir=tmp_path, capture_budget_s=1e-9)
    runner = runner_of(engine, tmp_path, config=config, boxes=EVERYWHERE)
    report = runner.trigger_init_capture()
    # the first extra begins before anything is spent; it is the largest bucket's
    extras = [(v.bucket, v.dropped) for v in report.variants if not v.is_default]
    assert extras == [(4, ""), (2, "the capture budget has ended")]


# of b, c, d, e: ranges of a factor of 2, 4, 3 and 2.7, all of the same gain
FOUR = [(1, 1), (2, 7), (8, 23), (24, MAX_KV)]
FOUR_BOXES = [(2, *means, EVEN, EVEN * MAX_KV, name) for means, name in zip(FOUR, "bcde", strict=True)]


def test_of_more_kernels_than_a_bucket_gets_graphs_those_for_the_widest_ranges_have_them(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, *map(backend, "abcde"), boxes=FOUR_BOXES)
    report = runner.trigger_init_capture()
    extras = [(v.variant, v.dropped) for v in report.variants if not v.is_default]
    assert extras == [("c", ""), ("d", ""), ("e", ""), ("b", "3 others of the bucket gain more")]
    for lengths in ([9, 9], [1, 1]):
        torch.testing.assert_close(runner.run(*engine.request(lengths)), eager(engine, lengths), rtol=1e-5, atol=1e-5)
    assert served_by(runner) == {(2, "d"): 1}
    assert runner.counts.misses == {(2, "b is planned and not available"): 1}


def test_the_next_one_has_the_graph_of_a_kernel_that_fails(tmp_path):
    backends = {name: backend(name) for name in "abde"} | {"c": backend("c", build_error=RuntimeError("no"))}
    runner = runner_of(Engine(), tmp_path, *backends.values(), boxes=FOUR_BOXES)
    report = runner.trigger_init_capture()
    extras = {v.variant: v.dropped for v in report.variants if not v.is_default}
    assert extras == {"c": "RuntimeError: no", "d": "", "e": "", "b": ""}


def test_nothing_but_the_reserved_page_is_written_before_requests_are_served(tmp_path):
    engine = Engine()
    before = [pages[:RESERVED].clone() for cache in engine.caches for pages in cache]
    runner_of(engine, tmp_path, boxes=EVERYWHERE).trigger_init_capture()
    after = [pages[:RESERVED] for cache in engine.caches for pages in cache]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_where_nothing_can_be_measured_the_default_serves_and_one_line_says_why(tmp_path, caplog, monkeypatch):
    def no_memory(*args, **kwargs):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("dispatch.tuner._bench", no_memory)
    engine = Engine()
    runner = runner_of(engine, tmp_path)
    with caplog.at_level(logging.WARNING):
        report = runner.trigger_init_capture()
    assert report.why_default == ["RuntimeError: out of memory"]
    assert len([r for r in caplog.records if "out of memory" in r.getMessage()]) == 1
    assert len(runner.run(*engine.request([9]))) == 1


def test_where_the_time_was_too_short_for_some_buckets_the_log_and_each_of_their_steps_say_so(
    tmp_path, caplog, monkeypatch
):
    measured = dispatch.obtain.tune

    def only_bucket_4(*args, **kwargs):
        plan, samples = measured(*args, **kwargs)
        return replace(
            plan, boxes=[b for b in plan.boxes if b.box.bucket == 4], unmeasured={2: TIME_BUDGET_OVER}
        ), samples

    monkeypatch.setattr(dispatch.obtain, "tune", only_bucket_4)
    monkeypatch.setattr(dispatch.bench.harness, "WARM_UP_S", 0)
    engine = Engine()
    runner = runner_of(engine, tmp_path)
    with caplog.at_level(logging.WARNING):
        runner.trigger_init_capture()
    (record,) = caplog.records
    assert record.getMessage().endswith(f": the default a serves bucket 2: {TIME_BUDGET_OVER}")
    runner.run(*engine.request([9]))
    assert runner.counts.misses == {(2, TIME_BUDGET_OVER): 1}
    assert repr(runner.counts) == f"Counts(hits={{}}, misses={{(2, {TIME_BUDGET_OVER!r}): 1}})"


def test_an_engines_own_mistakes_are_one_line(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, enabled=False)
    with pytest.raises(ConfigError, match=r"before trigger_init_capture\(\)"):
        runner.run(*engine.request([9]))
    runner.trigger_init_capture()
    with pytest.raises(ConfigError, match="without requests"):
        runner.run(torch.zeros(0, dtype=torch.int32), [torch.zeros(0, 16, dtype=torch.int32)])
    lengths, (table,) = engine.request([9])
    with pytest.raises(ConfigError, match=r"a block table of shape \[1, 17\]: must be \[1, 3 to 16 pages\]"):
        runner.run(lengths, [torch.nn.functional.pad(table, (0, 1))])
    with pytest.raises(ConfigError, match=r"shape \[1, 2\]: must be \[1, 3 to 16 pages\]"):  # 9 tokens, pages of 4
        runner.run(lengths, [table[:, :2]])
    with pytest.raises(ConfigError, match=r"shape \[1, 16\]: must be \[2, "):  # it would be broadcast
        runner.run(torch.tensor([9, 9], dtype=torch.int32), [table])
    with pytest.raises(ConfigError, match="a request of 65 tokens: captured for 64"):
        runner.run(lengths * 0 + 65, [table])
    with pytest.raises(ConfigError, match="EngineTraits say that the host's are exact"):
        runner.run(lengths, [table], lengths)
    runner.run(lengths, [table])
    with pytest.raises(ConfigError, match="requests are being served"):
        runner.trigger_init_capture()
    with pytest.raises(ConfigError, match="needs a layer group"):
        type(runner)(engine.step, [], (1,), 64, 100, DispatchConfig(), reserved_page=0)


@pytest.mark.parametrize(
    ("spec", "sinks", "why"),
    [
        (spec_of(has_sinks=True), None, "layer 0 attends without its sinks"),
        (spec_of(), torch.zeros(4), "layer 0 attends with sinks, which its AttentionSpec does not have"),
    ],
)
def test_sinks_that_are_forgotten_or_not_declared_are_an_error_at_start(tmp_path, spec, sinks, why):
    engine = Engine(spec)
    whole = engine.step
    engine.step = lambda inputs, attend: whole(inputs, lambda *args: attend(*args, sinks=sinks))
    with pytest.raises(ConfigError, match=why):
        runner_of(engine, tmp_path, enabled=False).trigger_init_capture()


@pytest.mark.parametrize(("returned", "kind"), [(None, "NoneType"), ({"logits": torch.zeros(2)}, "dict")])
def test_a_step_that_returns_something_else_than_tensors_is_an_error_at_start(tmp_path, returned, kind):
    engine = Engine()
    engine.step = lambda inputs, attend: returned
    with pytest.raises(ConfigError, match=f"the step returned {kind}: must be a tensor"):
        runner_of(engine, tmp_path, enabled=False).trigger_init_capture()


def test_what_the_engines_own_step_raises_is_the_engines_to_hear(tmp_path):
    engine = Engine()

    def step(inputs, attend):
        raise ZeroDivisionError("a mistake of the engine")

    engine.step = step
    with pytest.raises(ZeroDivisionError):
        runner_of(engine, tmp_path, enabled=False).trigger_init_capture()


def test_a_default_that_does_not_serve_a_group_is_an_error_and_a_group_may_have_its_own(tmp_path):
    capped = spec_of(logits_soft_cap=30.0)
    engine = Engine(capped)
    runner = engine.runner(tmp_path, enabled=False, default="torch_sdpa")
    with pytest.raises(ConfigError, match="--default torch_sdpa: logits soft cap"):
        runner.trigger_init_capture()
    both = Engine(spec_of(), capped)
    groups = [LayerGroup(spec_of(), (0,)), LayerGroup(capped, (1,), default="torch_chunked")]
    config = DispatchConfig(cache_dir=tmp_path)
    runner = DecodeGraphRunner(
        both.step, groups, BUCKETS, MAX_KV, 1000, config, reserved_page=RESERVED, default="torch_sdpa", device="cpu"
    )
    assert runner.trigger_init_capture().defaults == "torch_sdpa + torch_chunked"


def test_a_variant_that_cannot_plan_while_serving_is_not_used_again_and_the_default_serves(tmp_path):
    engine, b = Engine(), backend("b")
    runner = runner_of(engine, tmp_path, backend("a"), b, boxes=EVERYWHERE)
    runner.trigger_init_capture()

    def plan(inputs):
        raise RuntimeError("Buffer overflow, and more")

    runner.serving.ready[2, (Candidate("b"),)].built.impls[0].plan = plan
    for _ in range(2):
        torch.testing.assert_close(runner.run(*engine.request([9, 33])), eager(engine, [9, 33]))
    assert runner.counts.misses == {
        (2, "b could not plan: RuntimeError: Buffer overflow, and more"): 1,
        (2, "b is planned and not available"): 1,
    }


def test_engines_may_capture_in_inference_mode_and_serve_in_another(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    with torch.inference_mode():
        runner.trigger_init_capture()
    assert not runner.run(*engine.request([9, 33])).requires_grad


# What a captured graph may be wrong in, and the start check sees: each row's own length.
STALE = {
    "lengths of the capture": lambda impl: impl.first,
    "whole pages": lambda impl: (impl.inputs.lengths + 3) // 4 * 4,
    "one page": lambda impl: impl.inputs.lengths.clamp(max=4),
    "rows in another order": lambda impl: impl.inputs.lengths.flip(0),
}


@pytest.mark.parametrize("stale", STALE)
def test_a_variant_that_does_not_see_each_rows_own_length_is_dropped(tmp_path, stale):
    def before(impl, q, kv_cache, sinks):
        impl.first = getattr(impl, "first", impl.inputs.lengths.clone())
        impl.inner.inputs = replace(impl.inputs, lengths=STALE[stale](impl))
        return q, kv_cache, sinks

    runner = runner_of(Engine(), tmp_path, backend("a"), backend("b", before=before), boxes=EVERYWHERE)
    dropped = [v.dropped for v in runner.trigger_init_capture().variants if not v.is_default]
    assert all(why.startswith("another output") for why in dropped) and len(dropped) == len(BUCKETS)


def test_the_largest_bucket_is_captured_first_and_all_scratch_is_sized_before(tmp_path):
    order = []
    wide = backend("a")
    build = wide.build

    def recorded(self, spec, batch_size, max_kv, workspace, tactic):
        order.append((batch_size, workspace.numel()))
        return build(self, spec, batch_size, max_kv, workspace, tactic)

    wide.build = recorded
    wide.workspace_bytes = lambda self, spec, batch_size, max_kv: 16 * batch_size
    runner_of(Engine(), tmp_path, wide, backend("b"), enabled=False).trigger_init_capture()
    assert order == [(4, 64), (2, 64)]


def test_rows_of_requests_that_have_left_read_the_reserved_page_alone(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    runner.trigger_init_capture()
    for lengths in ([64, 64, 64], [9], [5, 6], [7]):
        runner.run(*engine.request(lengths))
        live, bucket = len(lengths), next(b for b in BUCKETS if b >= len(lengths))
        (inputs,) = runner.buffers.inputs(bucket)
        assert inputs.lengths.tolist() == inputs.lengths_host.tolist() == lengths + [1] * (bucket - live)
        assert (inputs.block_table[live:] == RESERVED).all()
        assert inputs.num_live == live


def test_a_second_trigger_does_nothing_more(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    report = runner.trigger_init_capture()
    steps = engine.steps
    assert runner.trigger_init_capture() is report
    assert engine.steps == steps


# --- guards


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"named_backend": "a"}, "the user named the backend a"),
        ({"deterministic": True}, "a deterministic mode"),
        ({"mla": True}, "latent attention"),
        ({"query_tokens": 4}, "4 query tokens a request"),
    ],
)
def test_what_speaks_against_switching_is_said_once_and_the_default_serves(tmp_path, caplog, facts, why):
    engine, b = Engine(), backend("b")
    runner = runner_of(engine, tmp_path, backend("a"), b, facts=EngineFacts(**facts))
    with caplog.at_level(logging.WARNING):
        report = runner.trigger_init_capture()
    assert report.refusal.startswith(why)
    assert [r.getMessage() for r in caplog.records] == [f"the default serves every step: {report.refusal}"]
    assert len(runner.run(*engine.request([9, 33]))) == 2
    assert b.built == []


def test_without_a_cuda_device_the_default_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = Engine()
    runner = runner_of(engine, tmp_path, device=None)
    assert runner.trigger_init_capture().refusal == "no CUDA device"
    assert len(runner.run(*engine.request([9, 33]))) == 2


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"prefill": True}, "prefill"),
        ({"query_tokens": 3}, "more than one query token a request"),
        ({"shared_prefix": True}, "a shared-prefix batch"),
    ],
)
def test_a_step_of_another_kind_is_the_engines_own_counted_and_logged_once(tmp_path, caplog, kind, why):
    runner = runner_of(Engine(), tmp_path, enabled=False)
    runner.trigger_init_capture()
    assert runner.serves()
    with caplog.at_level(logging.WARNING):
        assert [runner.serves(**kind) for _ in range(3)] == [False] * 3
    assert runner.counts.misses == {(0, why): 3}
    assert len(caplog.records) == 1


def test_a_layer_that_no_candidate_but_the_default_serves_is_not_measured(tmp_path):
    engine = Engine()
    runner = runner_of(engine, tmp_path, backend("a"))
    report = runner.trigger_init_capture()
    assert [v.is_default for v in report.variants] == [True] * len(BUCKETS)


@pytest.mark.parametrize("kind", ["tokens", "one number a row", "zeros"])
def test_what_a_step_returns_may_have_any_shape(tmp_path, kind):
    engine = Engine()
    whole = engine.step

    def step(inputs, attend):
        out = whole(inputs, attend)
        return {"tokens": out.argmax(1), "one number a row": out.sum(1), "zeros": out * 0}[kind]

    engine.step = step
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    assert [v.dropped for v in runner.trigger_init_capture().variants] == [""] * 4
    assert len(runner.run(*engine.request([9, 33, 5]))) == 3


def test_rows_in_which_two_eager_steps_differ_are_not_compared(tmp_path):
    """As where rows of different tokens write to one slot of the reserved page, and chance decides which stays."""
    engine, b = Engine(), backend("b")
    whole = engine.step

    def step(inputs, attend):
        out = whole(inputs, attend)
        out[1:] *= engine.steps % 4 - 1.5  # no two steps in turn alike
        return out

    engine.step = step
    runner = runner_of(engine, tmp_path, backend("a"), b, boxes=EVERYWHERE)
    assert [v.dropped for v in runner.trigger_init_capture().variants] == [""] * 4


@pytest.mark.parametrize("method", ["workspace_bytes", "build"])
def test_a_planned_backend_that_breaks_its_word_after_the_plan_was_stored_costs_its_variant_alone(tmp_path, method):
    engine, b = Engine(), backend("b")
    runner = runner_of(engine, tmp_path, backend("a"), b, boxes=EVERYWHERE)
    kept = getattr(b, method)

    def broken(self, *args):
        if method == "workspace_bytes" and not hasattr(runner, "buffers"):
            return kept(self, *args)  # while it is asked whether it serves
        raise ValueError("broken")

    setattr(b, method, broken)
    report = runner.trigger_init_capture()
    assert {v.dropped for v in report.variants if not v.is_default} == {"ValueError: broken"}
    assert len(runner.run(*engine.request([9, 33]))) == 2


def test_what_a_graph_points_at_lives_as_long_as_its_replay_and_no_longer(tmp_path):
    runner = runner_of(Engine(), tmp_path, backend("a"), backend("b"), boxes=EVERYWHERE)
    runner.trigger_init_capture()
    ready = runner.serving.ready[2, (Candidate("b"),)]
    impl = weakref.ref(ready.built.impls[0])
    for cls in (runner.backends.get("a"), runner.backends.get("b")):
        type(cls).built.clear()  # where the fake keeps what it has built
    del runner
    gc.collect()
    assert impl() is not None
    del ready
    gc.collect()
    assert impl() is None
