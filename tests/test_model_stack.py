"""The plain stack of layers: it computes a transformer, over a paged cache, in operations that a graph can capture."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch.backends import DecodeImpl
from dispatch.backends.torch_sdpa import TorchSdpa
from dispatch.bench.model_stack import EPSILON, ROPE_BASE, Attend, Layer, ModelStack
from dispatch.bench.pool import PagedPool
from dispatch.hf_dense import DenseSizes
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from tests.fakes import spec_of

CPU = torch.device("cpu")
SIZES = DenseSizes(hidden_size=32, intermediate_size=48)
MAX_KV = 12  # 3 pages of 4
LAYERS = 2


def begun(impl: DecodeImpl, inputs: StepInputs) -> Attend:
    impl.begin_step(inputs)
    return lambda _, *layer: impl.forward(*layer)


class Model:
    """A stack, pages, and an attention to run it with."""

    def __init__(self, batch: int, **changes: Any) -> None:
        self.spec = spec_of(**changes)
        self.pool = PagedPool(self.spec, batch * 3, LAYERS, CPU)
        self.stack = ModelStack(self.spec, SIZES, LAYERS, MAX_KV, CPU)
        self.inputs = self.pool.inputs(batch, MAX_KV)
        self.impl = TorchSdpa().build(self.spec, batch, MAX_KV, torch.empty(0), {})
        order = torch.randperm(batch * 3, generator=torch.Generator().manual_seed(1))
        self.inputs.block_table.copy_(order.view(batch, 3) + 1)

    def step(self, lengths: list[int], hidden: torch.Tensor) -> torch.Tensor:
        self.inputs.lengths_host.copy_(torch.tensor(lengths))
        self.inputs.lengths.copy_(self.inputs.lengths_host)
        self.impl.plan(self.inputs)
        return self.stack.step(begun(self.impl, self.inputs), self.inputs, self.pool.kv_caches, hidden)


# --- numbers


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def rope(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, d]: element j and j + d/2 are a complex number, turned by position * base^(-2j/d)."""
    half = x.shape[-1] // 2
    turn = torch.arange(len(x))[:, None, None] * ROPE_BASE ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((turned.real, turned.imag), dim=-1)


def whole_sequence(spec: AttentionSpec, layers: tuple[Layer, ...], x: torch.Tensor) -> torch.Tensor:
    """Every token of one sequence at once, x [tokens, hidden_size], with a causal mask and no cache."""
    tokens = len(x)
    for w in layers:
        q, k, v = (w.qkv.float() @ rms_norm(x, w.attention_norm).T).T.split(
            [
                spec.num_qo_heads * spec.head_dim_qk,
                spec.num_kv_heads * spec.head_dim_qk,
                spec.num_kv_heads * spec.head_dim_vo,
            ],
            dim=1,
        )
        q = rope(q.reshape(tokens, spec.num_qo_heads, -1))
        k = rope(k.reshape(tokens, spec.num_kv_heads, -1))
        v = v.reshape(tokens, spec.num_kv_heads, -1)
        heads = []
        for head in range(spec.num_qo_heads):
            kv_head = head // spec.group_size
            logits = q[:, head] @ k[:, kv_head].T * spec.scale
            logits = logits.masked_fill(torch.ones(tokens, tokens).triu(1) > 0, -math.inf)
            heads.append(logits.softmax(-1) @ v[:, kv_head])
        x = x + torch.cat(heads, dim=1) @ w.output.T
        gate, up = (rms_norm(x, w.mlp_norm) @ w.gate_up.T).split(SIZES.intermediate_size, dim=1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w.down.T
    return x


# fp8: K and V err by up to 1/16, which averages over keys; a scale left out would change them by a factor of 2 or 4
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-5),
        ({"kv_layout": "HND"}, 1e-5),
        ({"kv_strides": (256, 64, 32)}, 1e-5),
        ({"head_dim_vo": 24}, 1e-5),
        ({"kv_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}, 0.03),
    ],
)
def test_token_after_token_it_computes_what_the_whole_sequence_at_once_gives(changes, tolerance):
    # each row begins two steps after the one before it, and repeats its first token until then
    tokens = torch.randn(3, MAX_KV, SIZES.hidden_size, generator=torch.Generator().manual_seed(2))
    model = Model(batch=3, **changes)
    expected = [whole_sequence(model.spec, model.stack.layers, row) for row in tokens]
    for step in range(MAX_KV):
        lengths = [max(1, step + 1 - 2 * row) for row in range(3)]
        out = model.step(lengths, torch.stack([tokens[row, n - 1] for row, n in enumerate(lengths)]))
        right = torch.stack([expected[row][n - 1] for row, n in enumerate(lengths)])
        assert float((out - right).norm() / right.norm()) < tolerance


def test_activations_keep_their_size_over_many_layers():
    spec = spec_of(dtype="bf16", kv_dtype="bf16")
    pool, stack = PagedPool(spec, 6, 16, CPU), ModelStack(spec, SIZES, 16, MAX_KV, CPU)
    inputs = pool.inputs(2, MAX_KV)
    pool.load(inputs, [9, 4])
    impl = TorchSdpa().build(spec, 2, MAX_KV, torch.empty(0), {})
    impl.plan(inputs)
    out = stack.step(begun(impl, inputs), inputs, pool.kv_caches, stack.hidden(2))
    # each product adds about a unit normal to the residual at most: a variance of 1 + 2 x 16 layers
    assert 1 < float(out.float().std()) < 2 * math.sqrt(1 + 2 * 16)


# --- the cache


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_new_token_of_each_row_is_written_at_its_position_and_nowhere_else_in_each_layer(layout):
    model = Model(batch=4, kv_layout=layout)
    before = [tuple(pages.clone() for pages in cache) for cache in model.pool.kv_caches]
    lengths = [1, 4, 5, 12]  # the first slot of the first page, its last one, the next page's first, the last of all
    model.step(lengths, model.stack.hidden(4))
    table = model.inputs.block_table.tolist()
    wanted = {(table[0][0], 0), (table[1][0], 3), (table[2][1], 0), (table[3][2], 3)}
    slot_dim = 1 if layout == "NHD" else 2
    for old, new in zip(before, model.pool.kv_caches, strict=True):
        for a, b in zip(old, new, strict=True):
            changed = (a != b).movedim(slot_dim, 1)  # [page, slot, head, element]
            assert {tuple(at) for at in changed.any(-1).any(-1).nonzero().tolist()} == wanted
            assert bool(changed[tuple(zip(*wanted, strict=True))].all())  # every head and element of them


def test_each_layer_has_weights_of_its_own_and_writes_a_cache_of_its_own():
    model = Model(batch=1)
    first, second = model.stack.layers
    for name in ("qkv", "output", "gate_up", "down"):
        assert not torch.equal(getattr(first, name), getattr(second, name))
    model.step([1], model.stack.hidden(1))
    page = int(model.inputs.block_table[0, 0])
    (k0, v0), (k1, v1) = (tuple(pages[page, 0] for pages in cache) for cache in model.pool.kv_caches)
    assert not torch.equal(k0, k1)
    assert not torch.equal(v0, v1)


def test_a_stack_and_caches_of_different_counts_are_refused():
    model = Model(batch=1)
    with pytest.raises(ValueError, match="zip"):
        model.stack.step(begun(model.impl, model.inputs), model.inputs, model.pool.kv_caches[:1], model.stack.hidden(1))


# --- as a graph captures it


class Recorded:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer, q, kv_cache, out) -> None:
        assert q.is_contiguous()  # XQA would copy another; the harness's is contiguous
        assert out.is_contiguous()
        self.layers.append(layer)
        out.fill_(1.0)


def test_a_step_attends_once_a_layer_in_order_and_leaves_its_input_as_it_was():
    model, recorded = Model(batch=2), Recorded()
    hidden = model.stack.hidden(2)
    before = hidden.clone()
    model.stack.step(recorded.attend, model.inputs, model.pool.kv_caches, hidden)
    assert recorded.layers == list(range(LAYERS))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("changes", [{}, {"kv_layout": "HND"}, {"kv_dtype": "fp8_e4m3"}])
def test_no_operation_of_a_step_needs_a_number_on_the_host_or_has_a_shape_that_depends_on_one(changes):
    model = Model(batch=2, **changes)
    hidden = model.stack.hidden(2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # raises where a value would have to be known
        inputs = StepInputs(
            2,
            model.inputs.lengths_host,
            mode.from_tensor(model.inputs.lengths),
            mode.from_tensor(model.inputs.block_table),
        )
        out = model.stack.step(Recorded().attend, inputs, model.pool.kv_caches, hidden)
    assert tuple(out.shape) == (2, SIZES.hidden_size)
