"""The gate lets real backends through, and catches every kind of wrong number that is known from elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dispatch.backends import registry
from dispatch.bench.pool import PagedPool
from dispatch.bench.timer import CpuTimer
from dispatch.candidate import Candidate
from dispatch.gate import Gate
from dispatch.gate_inputs import gate_pages
from dispatch.reference import reference_decode
from tests.fakes import CPU, backend, device, spec_of

MAX_KV = 80


class Bench:
    """The gate's surroundings: a pool with two layers, and the buffers of a bucket."""

    def __init__(self, spec, bucket):
        self.spec, self.bucket = spec, bucket
        self.pool = PagedPool(spec, gate_pages(spec, bucket, MAX_KV) + 3, 2, device())
        self.inputs, self.chain = self.pool.inputs(bucket, MAX_KV), self.pool.chain(bucket)

    def check(self, cls, tactic=""):
        gate = Gate(self.pool, self.inputs, self.chain, MAX_KV)
        scratch = torch.zeros(0, dtype=torch.uint8)
        impl = cls().build(self.spec, self.bucket, MAX_KV, scratch, Candidate(cls.name, tactic).knobs)
        wrong = gate.check(CpuTimer().record(impl, self.inputs, self.chain))
        gate.restore()
        return wrong


LAYERS = {
    "fp32": {},
    "bf16": {"dtype": "bf16", "kv_dtype": "bf16"},
    "fp16, soft cap": {"dtype": "fp16", "kv_dtype": "fp16", "logits_soft_cap": 30.0},
    "window": {"sliding_window": 10},
    "window of one page": {"sliding_window": 4},
    "sinks": {"has_sinks": True},
    "HND": {"kv_layout": "HND"},
    "one head a group": {"num_qo_heads": 2},
    "V narrower than K": {"head_dim_vo": 8},
    "fp8 KV with scales": {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "strided pages": {"kv_strides": (4 * 2 * 40, 2 * 40, 40)},
    "pages of one token": {"page_size": 1},
    "another softmax scale": {"sm_scale": 0.5},
}


@pytest.mark.parametrize("bucket", [1, 3, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_built_in_backend_that_serves_a_layer_is_right(layer, bucket):
    spec = spec_of(**LAYERS[layer])
    bench = Bench(spec, bucket)
    for name in registry.names():
        if registry.support(name, spec, CPU).ok:
            for tactic in registry.get(name).tactics(spec, bucket):
                assert bench.check(type(registry.get(name)), tactic) == ""


def fault(name, layer=None, bucket=8, **how):
    return pytest.param(name, layer or {}, bucket, how, id=name)


def without(**features):
    """The kernel drops a feature that the layer has."""
    return {"spec_of_kernel": lambda spec: replace(spec, **features)}


def more_tokens(count):
    """The kernel sees rows `count` tokens longer than they are."""

    def before(impl, q, kv_cache, sinks):
        lengths = impl.inputs.lengths
        impl.inner.inputs = replace(impl.inputs, lengths=(lengths + count).clamp_min(1))
        return q, kv_cache, sinks

    return {"before": before}


def tables_rotated(impl, q, kv_cache, sinks):
    impl.inner.inputs = replace(impl.inputs, block_table=impl.inputs.block_table.roll(1, 0))
    return q, kv_cache, sinks


def heads_swapped(impl, q, kv_cache, sinks):
    return q, tuple(pages.flip(2) for pages in kv_cache), sinks


def first_lengths_kept(impl, q, kv_cache, sinks):
    """Replays with the schedule of the lengths that it was captured with."""
    if not hasattr(impl, "kept"):
        impl.kept = impl.inputs.lengths.clone()
    impl.inner.inputs = replace(impl.inputs, lengths=torch.minimum(impl.kept, impl.inputs.lengths))
    return q, kv_cache, sinks


def last_row_unwritten(impl, q, out):
    out[-1] = impl.previous[-1]


def no_running_maximum(impl, q, out):
    """What exp() without a maximum gives in half precision: infinity over infinity, where a logit is above 11."""
    if q.abs().max() > 8:
        out.fill_(float("nan"))


def batch_wide_scale(impl, q, out):
    """A scale taken over the whole batch: another content of the padding changes the live rows, slightly."""
    out.mul_(1 + 1e-6 * q.abs().max())


def drifting(impl, q, out):
    """Leaves something in its scratch: right for the seven cases of a bucket, two layers each, and then no more."""
    impl.runs = getattr(impl, "runs", 0) + 1
    if impl.runs > 14:
        out.mul_(1.01)


def nan_times_zero(impl, q, kv_cache, sinks):
    """Multiplies masked slots by zero: with NaN in them, the result is NaN."""
    poison = kv_cache[1].reshape(-1).float().sum() * 0
    return q + poison, kv_cache, sinks


def behind_the_window(impl, q, kv_cache, sinks):
    """Reads what a window has left behind, and multiplies it by zero."""
    firsts = kv_cache[1][impl.inputs.block_table[:, 0].long(), 0]
    return q + firsts.sum() * 0, kv_cache, sinks


def wrong_when_short(impl, q, out):
    out[impl.inputs.lengths < 20] *= 2


FAULTS = [
    fault("NaN that a window left behind", {"sliding_window": 10}, before=behind_the_window),
    fault("wrong for short rows, batch 1", None, 1, after=wrong_when_short),
    fault("soft cap dropped", {"logits_soft_cap": 2.0}, **without(logits_soft_cap=None)),
    fault("window dropped", {"sliding_window": 10}, **without(sliding_window=None)),
    fault("window one too wide", {"sliding_window": 10}, **without(sliding_window=11)),
    fault("window one too narrow", {"sliding_window": 10}, **without(sliding_window=9)),
    fault("k_scale dropped", {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "k_scale": 0.25}, **without(k_scale=1.0)),
    fault("v_scale dropped", {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "v_scale": 0.5}, **without(v_scale=1.0)),
    fault("softmax scale of another head dim", {"sm_scale": 0.5}, **without(sm_scale=0.25)),
    fault("sinks dropped", {"has_sinks": True}, before=lambda impl, q, kv, sinks: (q, kv, None)),
    fault("one token too many", **more_tokens(1)),
    fault("one token too few", **more_tokens(-1)),
    fault("pages of another row", before=tables_rotated),
    fault("KV heads swapped", before=heads_swapped),
    fault("schedule of the captured lengths", before=first_lengths_kept),
    fault("last row unwritten", after=last_row_unwritten),
    fault("no running maximum", after=no_running_maximum),
    fault("scale over the batch", after=batch_wide_scale),
    fault("numbers that drift between runs", after=drifting),
    fault("NaN in slots that are masked", before=nan_times_zero),
    fault("one token too many, bf16", {"dtype": "bf16", "kv_dtype": "bf16"}, **more_tokens(1)),
    fault("one token too many, fp8 KV", {"dtype": "bf16", "kv_dtype": "fp8_e4m3"}, **more_tokens(1)),
    fault("one token too many, batch 1", None, 1, **more_tokens(1)),
]


@pytest.mark.parametrize(("name", "layer", "bucket", "how"), FAULTS)
def test_wrong_numbers_are_caught(name, layer, bucket, how):
    assert Bench(spec_of(**layer), bucket).check(backend("wrong", **how)) != ""


def test_the_finding_names_the_case_the_row_its_length_and_the_error():
    def half(impl, q, out):
        out[2, 1] *= 0.5

    wrong = Bench(spec_of(), 8).check(backend("wrong", after=half))
    assert wrong == "random: row 2 of length 2, head 1: relative error 0.5, allowed 0.0001"


def test_a_row_that_is_not_written_is_called_so():
    wrong = Bench(spec_of(), 8).check(backend("wrong", after=last_row_unwritten))
    assert wrong.endswith("NaN, or not written")


def test_the_uniform_probe_sees_one_key_more_where_random_data_within_fp8_tolerance_does_not():
    # the last of 80 keys read twice: 1 / 80 is far below the tolerance for fp8, and exactly one key to the probe
    spec = spec_of(dtype="bf16", kv_dtype="fp8_e4m3")

    def last_key_twice(impl, q, out):
        kv_cache = impl.seen
        for row, length in enumerate(impl.inputs.lengths_host.tolist()):
            page = impl.inputs.block_table[row, (length - 1) // spec.page_size]
            v = kv_cache[1][page, (length - 1) % spec.page_size].float().repeat_interleave(spec.group_size, 0)
            if length > 60:
                out[row] = ((out[row].float() * length + v) / (length + 1)).to(out.dtype)

    def remember(impl, q, kv_cache, sinks):
        impl.seen = kv_cache
        return q, kv_cache, sinks

    wrong = Bench(spec, 2).check(backend("wrong", before=remember, after=last_key_twice))
    assert wrong.startswith("uniform probe: ")


def test_the_gate_leaves_the_benchs_pages_and_queries_as_they_were():
    bench = Bench(spec_of(), 3)
    before = [pages.clone() for cache in bench.chain.kv_caches for pages in cache], bench.chain.q.clone()
    assert bench.check(backend("right")) == ""
    after = [pages for cache in bench.chain.kv_caches for pages in cache]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after, strict=True))
    assert torch.equal(before[1], bench.chain.q)


def test_the_reference_agrees_with_softmax_attention_computed_in_float64_by_hand():
    spec = spec_of(logits_soft_cap=3.0, has_sinks=True, sliding_window=5)
    bench = Bench(spec, 2)
    import numpy as np

    bench.pool.load(bench.inputs, [9, 3], np.random.default_rng(1))
    kv_cache, sinks = bench.chain.kv_caches[0], torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = reference_decode(spec, bench.chain.q, kv_cache, bench.inputs, sinks)
    for row, length in enumerate((9, 3)):
        seen = range(max(0, length - 5), length)
        places = [(int(bench.inputs.block_table[row, t // 4]), t % 4) for t in seen]
        for head in range(4):
            k, v = (torch.stack([pages[p, s, head // 2] for p, s in places]).double() for pages in kv_cache)
            logits = 3.0 * torch.tanh((k @ bench.chain.q[row, head].double()) / 4.0 / 3.0)  # 1 / sqrt(16)
            weights = torch.exp(logits)
            expected = (weights[:, None] * v).sum(0) / (weights.sum() + torch.exp(sinks[head].double()))
            torch.testing.assert_close(found[row, head].double(), expected, rtol=1e-5, atol=1e-6)
