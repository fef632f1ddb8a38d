"""The gate lets real backends through, and catches every kind of wrong number that is known from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dispatch.backends import registry
from dispatch.bench.pool import PagedPool
from dispatch.bench.timer import CpuTimer
from dispatch.candidate import Candidate
from dispatch.gate import AROUND, Gate
from dispatch.gate_inputs import gate_pages, row_sets
from dispatch.reference import reference_decode
from tests.fakes import CPU, backend, device, spec_of

MAX_KV = 80


class Bench:
    """The gate's surroundings: a pool with two layers, and the buffers of a bucket."""

    def __init__(self, spec, bucket):
        self.spec, self.bucket = spec, bucket
        self.pool = PagedPool(spec, gate_pages(spec, bucket, MAX_KV) + 3, 2, device())
        self.inputs, self.chain = self.pool.inputs(bucket, MAX_KV), self.pool.chain(bucket)

    def check(self, cls, tactic="", finite_kv=False):
        gate = Gate(self.pool, self.inputs, self.chain, MAX_KV, finite_kv)
        scratch = torch.zeros(0, dtype=torch.uint8)
        impl = cls().build(self.spec, self.bucket, MAX_KV, scratch, Candidate("it", tactic).knobs)
        gate.load_first()
        wrong = gate.check({"it": CpuTimer().record(impl, self.inputs, self.chain)})
        gate.restore()
        return wrong["it"]


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
    "strided Q": {"q_stride": 4 * 16 + 2 * 2 * 16},
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
            for tactic in registry.get(name).tactics(spec, CPU, bucket, MAX_KV):
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


def q_taken_for_dense(impl, q, kv_cache, sinks):
    return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), kv_cache, sinks


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
    """Leaves something in its scratch: right the first time, and wrong when the same comes again."""
    impl.first = getattr(impl, "first", impl.inputs.block_table.clone())
    impl.others = getattr(impl, "others", 0) + (not torch.equal(impl.first, impl.inputs.block_table))
    if impl.others > 5 and int(impl.inputs.lengths[0]) == MAX_KV and impl.inputs.num_live == 8 and bool(q.any()):
        out.mul_(1.01)


def nan_times_zero(impl, q, kv_cache, sinks):
    """Multiplies masked slots by zero: with NaN in them, the result is NaN."""
    poison = kv_cache[1].reshape(-1).float().sum() * 0
    return q + poison, kv_cache, sinks


def behind_the_window(impl, q, kv_cache, sinks):
    """Gives what a window has left behind a weight of 0.1%."""
    impl.seen = kv_cache
    return q, kv_cache, sinks


def adds_behind_the_window(impl, q, out):
    firsts = impl.seen[1][impl.inputs.block_table[:, 0].long(), 0]
    long = (impl.inputs.lengths > 10).float()[:, None, None]
    out += 0.001 * long * firsts.repeat_interleave(2, dim=1)


def wrong_when_short(impl, q, out):
    out[impl.inputs.lengths < 20] *= 2


def where(rows, factor=2):
    """Wrong in the rows that `rows(impl)` marks."""

    def after(impl, q, out):
        out[rows(impl)] *= factor

    return {"after": after}


def later_layers(impl, q, out):
    impl.layer = getattr(impl, "layer", -1) + 1
    if impl.layer % 2:
        out *= 3


def padded_batch(impl, q, out):
    if impl.inputs.num_live < len(out):
        out *= 2


def zero_times_the_pages_behind(impl, q, kv_cache, sinks):
    """A tile of four pages: what lies behind a row's last page is multiplied by zero."""
    last = -(-impl.inputs.lengths.long() // impl.inner.spec.page_size)
    behind = impl.inputs.block_table.gather(1, last[:, None].clamp(max=impl.inputs.block_table.shape[1] - 1))
    return q + kv_cache[1][behind.long()].sum() * 0, kv_cache, sinks


def writes_to(what):
    def after(impl, q, out):
        inputs = impl.inputs
        if what == "q":
            q[0] += 1
        elif what == "lengths":
            inputs.lengths += 1
        elif what == "table":
            inputs.block_table[:, -1] += 1
        elif what == "kv":
            impl.seen[0][1, 0] = 0
        else:
            torch.as_strided(out, out.shape, out.stride(), out.storage_offset() - out.stride(0))[0] = 1

    def before(impl, q, kv_cache, sinks):
        impl.seen = kv_cache
        return q, kv_cache, sinks

    return {"after": after, "before": before}


FAULTS = [
    fault("Q taken for dense", {"q_stride": 4 * 16 + 2 * 2 * 16}, before=q_taken_for_dense),
    fault("zeros above a length", **where(lambda i: i.inputs.lengths > 60, 0)),
    fault("zeros between two lengths", None, 1, **where(lambda i: (i.inputs.lengths - 47).abs() < 13, 0)),
    fault("zeros for exactly one page", None, 1, **where(lambda i: i.inputs.lengths == 4, 0)),
    fault("zeros at length 1", None, 1, **where(lambda i: i.inputs.lengths == 1, 0)),
    fault("wrong with two long rows", **where(lambda i: (i.inputs.lengths > 40) & ((i.inputs.lengths > 40).sum() > 1))),
    fault("wrong in later layers", after=later_layers),
    fault("wrong in a padded batch", after=padded_batch),
    fault("zero times the pages behind the end", before=zero_times_the_pages_behind),
    *(fault(f"writes to {what}", **writes_to(what)) for what in ("q", "lengths", "table", "kv", "memory before out")),
    fault(
        "weight on what a window left behind",
        {"sliding_window": 10},
        before=behind_the_window,
        after=adds_behind_the_window,
    ),
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


def test_nan_behind_a_row_is_let_through_only_where_the_engine_never_has_any():
    wrong = backend("multiplies what it masked", before=nan_times_zero)
    assert Bench(spec_of(), 8).check(wrong) != ""
    assert Bench(spec_of(), 8).check(wrong, finite_kv=True) == ""


@pytest.mark.parametrize("how", [more_tokens(1), more_tokens(-1)])
def test_a_token_too_many_or_too_few_is_found_where_no_slot_is_nan_too(how):
    assert Bench(spec_of(), 8).check(backend("wrong", **how), finite_kv=True) != ""


def test_a_kernel_that_does_not_repeat_its_own_bits_is_right_within_the_tolerance():
    def flickering(impl, q, out):
        impl.calls_so_far = getattr(impl, "calls_so_far", 0) + 1
        out[impl.calls_so_far % 5] *= 1 + 1e-6  # 5: live rows, and another one with either padding in turn

    assert Bench(spec_of(), 8).check(backend("flickers", after=flickering)) == ""


def test_a_kernel_that_remembers_padding_is_caught_by_the_full_batch_after_it():
    def remembering(impl, q, out):
        impl.padded = getattr(impl, "padded", False) or impl.inputs.num_live < len(out)
        if impl.padded and impl.inputs.num_live == len(out):
            out.mul_(1.5)

    assert Bench(spec_of(), 8).check(backend("remembers", after=remembering)).startswith("random, at the end: ")


def test_a_kernel_over_an_fp8_cache_may_quantise_q():
    def quantises(impl, q, kv_cache, sinks):
        return q.to(torch.float8_e4m3fn).to(q.dtype), kv_cache, sinks

    layer = {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}
    assert Bench(spec_of(**layer), 8).check(backend("quantises", before=quantises)) == ""


def test_the_finding_names_the_case_the_row_its_length_and_the_error():
    def half(impl, q, out):
        out[0, 1] *= 0.5

    wrong = Bench(spec_of(), 8).check(backend("wrong", after=half))
    assert wrong == f"random: row 0 of length {MAX_KV}, head 1: relative error 0.5, allowed 0.0001"


def test_the_finding_names_the_first_layer_that_is_wrong_and_its_worst_row():
    def wrong_in_the_second(impl, q, out):
        later_layers(impl, q, out)
        if impl.layer % 2:
            out[1, 2] *= 2

    wrong = Bench(spec_of(), 8).check(backend("wrong", after=wrong_in_the_second))
    assert re.fullmatch(r"random: row 1 of length \d+, head 2: relative error 5, allowed 0.0001 \(layer 1\)", wrong)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("end", [-1, 1])
def test_memory_around_each_layers_output_is_guarded(layer, end):
    def beside(impl, q, out):
        if out.storage_offset() // ((len(out) + 2) * out.stride(0)) == layer:
            at = out.storage_offset() + (out.numel() if end > 0 else -out.stride(0))
            torch.as_strided(out, out.shape[1:], out.stride()[1:], at).fill_(0)

    assert Bench(spec_of(), 3).check(backend("wrong", after=beside)) == f"random: {AROUND} was written to"


def test_a_row_that_is_not_written_is_called_so():
    wrong = Bench(spec_of(), 8).check(backend("wrong", after=last_row_unwritten))
    assert wrong.endswith("NaN, or not written")


def test_the_uniform_probe_sees_one_key_more_where_random_data_within_fp8_tolerance_does_not(monkeypatch):
    # the last of 80 keys counted twice changes the mean by about 1 / 80, and the count by one
    monkeypatch.setattr("dispatch.gate_checks.TOLERANCE_FP8_KV", 0.3)
    spec = spec_of(dtype="bf16", kv_dtype="fp8_e4m3")

    def remember(impl, q, kv_cache, sinks):
        impl.seen = kv_cache
        return q, kv_cache, sinks

    def last_key_twice(impl, q, out):
        for row, length in enumerate(impl.inputs.lengths_host.tolist()):
            page = impl.inputs.block_table[row, (length - 1) // spec.page_size]
            v = impl.seen[1][page, (length - 1) % spec.page_size].float().repeat_interleave(spec.group_size, 0)
            if length > 60:
                out[row] = ((out[row].float() * length + v) / (length + 1)).to(out.dtype)

    wrong = Bench(spec, 2).check(backend("wrong", before=remember, after=last_key_twice))
    assert wrong.startswith("uniform probe: ")


def test_after_the_gate_pages_are_random_everywhere_again_and_queries_as_they_were():
    bench = Bench(spec_of(), 3)
    q = bench.chain.q.clone()
    assert bench.check(backend("right")) == ""
    assert torch.equal(q, bench.chain.q)
    for pages in (pages for cache in bench.chain.kv_caches for pages in cache):
        assert 0.8 < pages.std() < 1.2  # unit normals; NaN, zeros or position codes would not be


@pytest.mark.parametrize("bucket", [1, 4, 24, 300])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_the_rows_together_hold_the_longest_and_every_border(bucket, page):
    sets = row_sets(spec_of(page_size=page), bucket, 2048)
    seen = {n for lengths in sets for n in lengths}
    assert {1, 2, 17, 33, 2048, 2045, page, page + 1, 2 * page} <= seen
    assert all(1 <= n <= 2048 and len(lengths) == bucket for lengths in sets for n in lengths)
    assert sets[0][0] == 2048
    gaps = sorted(n for n in seen if 300 <= n <= 2048)
    assert all(b / a < 2 for a, b in pairwise(gaps))


def test_several_long_rows_are_in_a_set_together_but_not_more_tokens_than_are_cheap():
    (rows, _) = row_sets(spec_of(page_size=16), 256, 65536)
    assert sum(n > 8192 for n in rows) > 1
    assert sum(rows) < 65536 + 131072 + 256


def test_a_candidate_that_is_right_on_clean_scratch_only_is_caught_beside_one_of_its_family_that_dirties_it():
    bench = Bench(spec_of(), 4)
    scratch = torch.zeros(1)

    def dirties(impl, q, out):
        scratch.fill_(1)

    def needs_clean(impl, q, out):
        out += scratch

    gate, recordings = Gate(bench.pool, bench.inputs, bench.chain, MAX_KV), {}
    for name, after in (("needs clean", needs_clean), ("dirties", dirties)):
        gate.load_first()
        impl = backend(name, after=after)().build(bench.spec, 4, MAX_KV, torch.zeros(0, dtype=torch.uint8), {})
        recordings[name] = CpuTimer().record(impl, bench.inputs, bench.chain)
    assert gate.check({"needs clean": recordings["needs clean"]}) == {"needs clean": ""}
    found = gate.check(recordings)
    assert found["dirties"] == ""
    assert found["needs clean"] != ""


@pytest.mark.parametrize("layer", LAYERS)
def test_the_reference_of_a_row_is_the_same_whatever_rows_are_beside_it(layer):
    spec = spec_of(**LAYERS[layer])
    bench = Bench(spec, 6)
    lengths = [17, 5, 17, 1, 5, 17]
    bench.pool.load(bench.inputs, lengths)
    kv_cache, sinks = bench.chain.kv_caches[0], bench.chain.sinks
    together = reference_decode(spec, bench.chain.q, kv_cache, bench.inputs, sinks)
    for row in range(6):
        own = slice(row, row + 1)
        alone = replace(
            bench.inputs,
            num_live=1,
            lengths_host=bench.inputs.lengths_host[own],
            lengths=bench.inputs.lengths[own],
            block_table=bench.inputs.block_table[own],
        )
        expected = reference_decode(spec, bench.chain.q[own], kv_cache, alone, sinks)
        torch.testing.assert_close(together[own], expected, rtol=1e-5, atol=1e-6)


def test_the_reference_agrees_with_softmax_attention_computed_in_float64_by_hand():
    spec = spec_of(logits_soft_cap=3.0, has_sinks=True, sliding_window=5)
    bench = Bench(spec, 2)
    bench.pool.load(bench.inputs, [9, 3])
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
