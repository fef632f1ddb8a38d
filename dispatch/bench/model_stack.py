"""A plain stack of decoder layers of a model's real sizes: what an attention kernel runs within when it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, silu

from dispatch.backends.base import KVCache
from dispatch.bench.pool import raw_bits
from dispatch.dtypes import TORCH_DTYPES
from dispatch.hf_dense import DenseSizes
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

EPSILON = 1e-6
ROPE_BASE = 10000.0

Attend = Callable[[int, torch.Tensor, KVCache, torch.Tensor], None]
Slots = tuple[torch.Tensor, torch.Tensor]
"""Of each row's new token: its page, and its place there; int64 [batch]."""


@dataclass(frozen=True)
class Layer:
    """A layer's weights in the activation dtype, [outputs, inputs]; of the norms, [hidden_size].

    `qkv`: the heads of Q, then of K, then of V. `gate_up`: the MLP's gate, then what it gates.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class ModelStack:
    """RMSNorm, QKV product, RoPE, cache write, attention, output product, MLP: so many layers, in plain torch.

    Each layer has weights of its own, random, and scaled so that activations neither grow nor vanish. It is what one
    rank computes, without the all-reduce of several. Not there, for no attention kernel's time depends on it: a
    model's own activation function, and norms beside the two.
    """

    def __init__(
        self, spec: AttentionSpec, sizes: DenseSizes, num_layers: int, max_kv: int, device: torch.device
    ) -> None:
        """`sizes` are this rank's. `max_kv`: tokens of the longest request."""
        self.spec, self.sizes, self.device, self.dtype = spec, sizes, device, TORCH_DTYPES[spec.dtype]
        self.random = torch.Generator(device).manual_seed(0)
        self.layers = tuple(self._layer() for _ in range(num_layers))
        half = spec.head_dim_qk // 2
        frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
        angle = torch.arange(max_kv, dtype=torch.float64, device=device)[:, None] * frequency
        self.cos, self.sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)  # [position, half]

    def hidden(self, batch: int) -> torch.Tensor:
        """Random hidden states to begin a step with: [batch, hidden_size] in the activation dtype."""
        return self._normal(batch, self.sizes.hidden_size)

    def step(
        self, attend: Attend, inputs: StepInputs, kv_caches: Sequence[KVCache], hidden: torch.Tensor
    ) -> torch.Tensor:
        """A whole step of one new token a row: every layer over the KV cache of its own.

        attend(layer, q, kv_cache, out) is the attention, begun for this step. Returns the last hidden states,
        [batch, hidden_size]; leaves `hidden` as it is. A CUDA graph can capture it: positions and pages are read on the
        device, so that a replay takes those that `inputs` then holds.
        """
        position = inputs.lengths.long() - 1
        column = position // self.spec.page_size
        slots = inputs.block_table.gather(1, column[:, None])[:, 0].long(), position % self.spec.page_size
        cos, sin = (table.index_select(0, position)[:, None] for table in (self.cos, self.sin))
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            normed = rms_norm(hidden, hidden.shape[1:], layer.attention_norm, EPSILON)
            q, k, v = self._heads(linear(normed, layer.qkv))
            self._write(kv_cache, slots, _rotated(k, cos, sin), v)
            attended = hidden.new_empty(len(hidden), self.spec.num_qo_heads, self.spec.head_dim_vo)
            attend(i, _rotated(q, cos, sin), kv_cache, attended)
            hidden = hidden + linear(attended.flatten(1), layer.output)
            normed = rms_norm(hidden, hidden.shape[1:], layer.mlp_norm, EPSILON)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        return hidden

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V, [batch, heads, head_dim] each."""
        spec = self.spec
        shapes = (
            (spec.num_qo_heads, spec.head_dim_qk),
            (spec.num_kv_heads, spec.head_dim_qk),
            (spec.num_kv_heads, spec.head_dim_vo),
        )
        parts = torch.split(qkv, [heads * dim for heads, dim in shapes], dim=1)
        q, k, v = (part.view(len(qkv), *shape) for part, shape in zip(parts, shapes, strict=True))
        return q, k, v

    def _write(self, kv_cache: KVCache, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put every row's new token, [batch, num_kv_heads, head_dim], where it belongs."""
        scales = (self.spec.k_scale, self.spec.v_scale)
        for pages, new, scale in zip(kv_cache, (k, v), scales, strict=True):
            tokens_first = pages if self.spec.kv_layout == "NHD" else pages.transpose(1, 2)
            stored = new if scale == 1.0 else new / scale
            raw_bits(tokens_first).index_put_(slots, raw_bits(stored.to(pages.dtype)))

    def _layer(self) -> Layer:
        spec, hidden, middle = self.spec, self.sizes.hidden_size, self.sizes.intermediate_size
        qk_heads = spec.num_qo_heads + spec.num_kv_heads
        norm = torch.ones(hidden, dtype=self.dtype, device=self.device)
        return Layer(
            attention_norm=norm,
            qkv=self._weights(qk_heads * spec.head_dim_qk + spec.num_kv_heads * spec.head_dim_vo, hidden),
            output=self._weights(hidden, spec.num_qo_heads * spec.head_dim_vo),
            mlp_norm=norm,
            gate_up=self._weights(2 * middle, hidden),
            down=self._weights(hidden, middle),
        )

    def _weights(self, outputs: int, inputs: int) -> torch.Tensor:
        return self._normal(outputs, inputs).div_(math.sqrt(inputs))  # unit normals in, unit normals out

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=self.dtype, device=self.device)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [batch, heads, head_dim], whose two halves are the pairs' parts; cos, sin: [batch, 1, head_dim / 2].

    The result is contiguous, as the attention kernels want it.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
