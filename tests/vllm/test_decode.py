"""Decode steps over vLLM's packed cache: the spec of its layers, the numbers, and when a step is served at all."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from dispatch._core import BackendPlan
from dispatch.backends import registry
from dispatch.candidate import Candidate
from dispatch.errors import SpecError
from dispatch.plugins.vllm.check import difference
from dispatch.plugins.vllm.decode import Decoder, DecodeStep, kv_pages
from dispatch.plugins.vllm.layers import spec_of
from dispatch.reference import reference_decode
from dispatch.step import StepInputs

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, MAX_PAGES = 8, 2, 64, 16, 40, 8
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
DEFAULT, OTHER = Candidate("vllm_fa3"), Candidate("torch_sdpa")


def packed(layout="NHD", dtype=torch.bfloat16):
    """A layer's cache as vLLM binds it: logically [blocks, kv_heads, block, 2 x head_dim]."""
    if layout == "NHD":
        return torch.randn(BLOCKS, BLOCK, KV_HEADS, 2 * DIM).to(dtype).transpose(1, 2)
    return torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * DIM).to(dtype)


def layer(kv_cache=None, **changes):
    impl = {
        "attn_type": "decoder",
        "alibi_slopes": None,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_size": DIM,
        "scale": 0.125,
        "sliding_window": (-1, -1),
        "logits_soft_cap": 0,
        "sinks": None,
        "kv_cache_dtype": "auto",
        "vllm_flash_attn_version": 3,
        "q_stride": None,
    }
    own = {name: changes.pop(name) for name in list(changes) if name not in impl}
    return SimpleNamespace(
        **{
            "impl": SimpleNamespace(**{**impl, **changes}),
            "kv_cache": packed() if kv_cache is None else kv_cache,
            "dtype": torch.bfloat16,
            "kv_sharing_target_layer_name": None,
            "calculate_kv_scales": False,
            "_q_scale_float": 1.0,
            "_k_scale_float": 1.0,
            "_v_scale_float": 1.0,
            "_k_scale": torch.ones(()),
            "_v_scale": torch.ones(()),
            **own,
        }
    )


def spec(layout="NHD", **changes):
    layers = {name: layer(packed(layout), **changes) for name in LAYERS}
    return spec_of(layers, LAYERS, BLOCK, layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_k_and_v_are_views_of_the_packed_cache_as_the_spec_says(layout):
    its, cache = spec(layout), packed(layout)
    assert (its.num_qo_heads, its.num_kv_heads, its.page_size, its.num_layers, its.scale) == (8, 2, 16, 2, 0.125)
    assert its.is_packed
    k, v = kv_pages(cache, its)
    for pages, first in ((k, 0), (v, DIM)):
        assert pages.stride()[:3] == its.kv_strides
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        for block, head, token in ((0, 0, 0), (7, 1, 3), (39, 1, 15)):
            at = (block, token, head) if layout == "NHD" else (block, head, token)
            assert torch.equal(pages[at], cache[block, head, token, first : first + DIM])


def test_a_window_counts_the_current_token():
    assert spec(sliding_window=(1023, 0)).sliding_window == 1024
    assert spec().sliding_window is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"alibi_slopes": torch.ones(8)}, "ALiBi"),
        ({"kv_sharing_target_layer_name": "another"}, "share a KV cache"),
        ({"sliding_window": (7, 7)}, "a window to both sides"),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "calculated at run time"),
        ({"dtype": torch.float32}, "neither bf16 nor fp16"),
        ({"sinks": torch.ones(8)}, "attention sinks"),
        ({"vllm_flash_attn_version": 2}, "FlashAttention 2 serves the layer"),
        ({"kv_cache_dtype": "fp8", "_k_scale": torch.ones(2)}, "a scale for each head"),
        ({"kv_cache_dtype": "fp8", "_q_scale_float": 0.5}, "a scale of 0.5 for Q"),
        ({"num_kv_heads": 4}, "a KV cache that is not"),
    ],
)
def test_what_no_candidate_serves_is_refused_with_its_reason(changes, why):
    with pytest.raises(SpecError, match=why):
        spec(**changes)


def test_layers_that_differ_are_no_group():
    layers = {LAYERS[0]: layer(), LAYERS[1]: layer(scale=1.0)}
    with pytest.raises(SpecError, match="2 layers of one group differ"):
        spec_of(layers, LAYERS, BLOCK, "NHD")


def metadata(lengths, bucket, prefill=False, **changes):
    """vLLM's, of a decode step with padding behind the live rows."""
    live = len(lengths)
    padded = torch.tensor([*lengths, *[0] * (bucket - live)], dtype=torch.int32)
    table = torch.zeros(bucket, MAX_PAGES, dtype=torch.int32)
    order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)).to(torch.int32) + 1
    for row, length in enumerate(lengths):
        pages = -(-length // BLOCK)
        table[row, :pages], order = order[:pages], order[pages:]
    given = {
        "query_start_loc": torch.arange(bucket + 1, dtype=torch.int32),
        "query_start_loc_cpu": torch.arange(bucket + 1, dtype=torch.int32),
        "seq_lens": padded.clone(),
        "seq_lens_cpu_upper_bound": padded,
        "num_reqs": bucket,
        "num_actual_tokens": bucket + (7 if prefill else 0),
        "max_query_len": 8 if prefill else 1,
        "max_seq_len": max([*lengths, 1]),
        "block_table_tensor": table,
        "slot_mapping": torch.zeros(bucket, dtype=torch.int64),
        **changes,
    }
    return CommonAttentionMetadata(**given)


def decoder(bucket=4, boxes=((1, 64, 1000, 4000),)):
    table = BackendPlan([bucket], [str(DEFAULT), str(OTHER)])
    for box in boxes:
        table.set(bucket, *box, backend="torch_sdpa")
    table.freeze()
    its = spec()
    impl = registry.get("torch_sdpa").build(its, bucket, MAX_PAGES * BLOCK, torch.empty(0), {})
    steps = {(bucket, OTHER): DecodeStep(impl, its, bucket)}
    return Decoder(table, DEFAULT, steps, serves=True)


@pytest.mark.parametrize("lengths", [(1, 33, 100), (17, 16, 48, 5)])
def test_live_rows_are_attended_over_their_own_pages(lengths):
    given = metadata(lengths, 4)
    step = decoder().step(0, given)
    q = torch.randn(4, HEADS, DIM).to(torch.bfloat16)
    rows = torch.tensor(lengths, dtype=torch.int32)
    inputs = StepInputs(len(lengths), rows, rows, given.block_table_tensor)
    for _ in LAYERS:
        cache, out = packed(), torch.full((4, HEADS, DIM), float("nan"), dtype=torch.bfloat16)
        step.attend(q, cache, out)
        expected = reference_decode(step.spec, q, kv_pages(cache, step.spec), inputs, None)
        assert (out[: len(lengths)].float() - expected).abs().max() < 0.02
        assert out.isfinite().all()  # padding too: it goes through the layers behind


def test_the_next_step_is_read_from_the_same_buffers():
    serving = decoder()
    first = metadata((5, 60), 4)
    step = serving.step(0, first)
    step.attend(torch.randn(4, HEADS, DIM).to(torch.bfloat16), packed(), torch.empty(4, HEADS, DIM))
    pointed = step.inputs.lengths.data_ptr(), step.inputs.block_table.data_ptr()
    second = metadata((9, 64, 30), 4)
    first.seq_lens.copy_(second.seq_lens)  # vLLM refreshes its buffers in place
    first.block_table_tensor.copy_(second.block_table_tensor)
    assert serving.step(0, second) is step
    step.attend(torch.randn(4, HEADS, DIM).to(torch.bfloat16), packed(), torch.empty(4, HEADS, DIM))
    assert step.inputs.lengths.tolist() == [9, 64, 30, 1]
    assert step.inputs.num_live == 3
    assert (step.inputs.lengths.data_ptr(), step.inputs.block_table.data_ptr()) == pointed


def test_what_plans_on_the_host_sees_padding_as_rows_of_one_token(monkeypatch):
    serving = decoder()
    planned = []
    impl = serving.steps[4, OTHER].impl
    monkeypatch.setattr(impl, "needs_plan", True, raising=False)
    monkeypatch.setattr(impl, "plan", lambda inputs: planned.append(inputs.lengths_host.tolist()), raising=False)
    serving.step(0, metadata((5, 60, 7, 8), 4))
    serving.step(0, metadata((9, 64), 4))
    assert planned == [[5, 60, 7, 8], [9, 64, 1, 1]]


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        (metadata((5, 60), 4, prefill=True), 0),
        (metadata((5, 60), 4), 16),  # cascade attention
        (metadata((5, 60), 4, causal=False), 0),
        (metadata((100, 120), 4), 0),  # a mean above the box
        (metadata((5, 60), 3), 0),  # no bucket
        (metadata((), 4), 0),
    ],
)
def test_what_is_no_decode_step_or_outside_the_plan_is_the_defaults(given, prefix):
    serving = decoder()
    serving.chosen = OTHER
    assert serving.step(prefix, given) is None
    assert serving.chosen is None


def test_graphs_are_captured_with_what_is_forced_and_with_the_default_otherwise():
    capturing = decoder()
    capturing.serves = False
    one = metadata((1, 1, 1, 1), 4)
    assert capturing.step(0, one) is None
    capturing.forced = OTHER
    assert capturing.step(0, one) is capturing.steps[4, OTHER]
    assert capturing.chosen == OTHER
    capturing.forced = Candidate("flashinfer_xqa")  # not built for this bucket
    assert capturing.step(0, one) is None


def test_a_kernel_that_cannot_plan_is_not_used_again(monkeypatch, caplog):
    serving = decoder()
    monkeypatch.setattr(serving.steps[4, OTHER].impl, "plan", lambda inputs: 1 / 0)
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert serving.step(0, metadata((5, 60), 4)) is None
    assert serving.steps == {}
    assert serving.chosen is None
    assert "bucket 4 keeps the default: torch_sdpa: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("scale", ["_q_scale_float", "_k_scale_float", "_v_scale_float"])
def test_after_weights_are_reloaded_with_other_scales_the_default_serves(caplog, scale):
    serving = decoder()
    serving.layers = [layer(), layer()]
    assert serving.step(0, metadata((5, 60), 4)) is not None
    setattr(serving.layers[1], scale, 0.5)
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert serving.step(0, metadata((5, 60), 4)) is None
        assert serving.step(0, metadata((5, 60), 4)) is None
    assert serving.chosen is None
    assert [record.message for record in caplog.records] == [
        "decode-dispatch: the default serves every step: weights were reloaded with other scales"
    ]


# --- over vLLM's own cache


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("bucket", [1, 4, 20])
def test_a_kernel_that_is_right_is_off_by_nothing_and_leaves_the_cache_as_it_was(layout, bucket):
    its, its_layer = spec(layout), layer(packed(layout))
    its_layer.kv_cache[0] = 0
    before = its_layer.kv_cache.clone()
    impl = registry.get("torch_sdpa").build(its, bucket, MAX_PAGES * BLOCK, torch.empty(0), {})
    step = DecodeStep(impl, its, bucket)
    assert difference(step, its_layer, MAX_PAGES * BLOCK) == ""
    assert torch.equal(its_layer.kv_cache, before)
    assert step.inputs is None


@pytest.mark.parametrize("changes", [{"sm_scale": 0.25}, {"kv_layout": "HND", "kv_strides": (4096, 2048, 128)}])
def test_a_kernel_that_reads_the_cache_otherwise_is_told(changes):
    impl = registry.get("torch_sdpa").build(replace(spec(), **changes), 4, MAX_PAGES * BLOCK, torch.empty(0), {})
    step = DecodeStep(impl, spec(), 4)
    if "kv_layout" in changes:  # K and V of one token of all heads, taken for tokens of a head
        forward = impl.forward
        impl.forward = lambda q, kv, out: forward(q, tuple(t.reshape(BLOCKS, KV_HEADS, BLOCK, DIM) for t in kv), out)
    assert "relative error" in difference(step, layer(), MAX_PAGES * BLOCK)
