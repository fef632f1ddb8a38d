"""A small decoder over a paged KV cache: RMSNorm, QK norm, RoPE, attention, SwiGLU, dense or with experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from dispatch.step import StepInputs
from smoke.mlp import mlp
from smoke.pages import PagedCache, Slots
from smoke.sizes import EPSILON, MAX_SEQ_LEN, ROPE_BASE, Sizes
from smoke.weights import Layer, Weights

Attend = Callable[..., Any]
"""attend(layer, q [batch, heads, head_dim], kv_cache, out [batch, heads, head_dim]): of the engine's runner."""
_Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    """One rank's part of a model. `weights`: this rank's shard. `cache.spec`: this rank's heads.

    `tokens`: int64 [most rows], what `step` reads; fill it before each step. With `world` above 1, every rank makes
    the same calls, and what heads, MLP parts and experts give is summed over the default process group.
    """

    def __init__(self, sizes: Sizes, weights: Weights, cache: PagedCache, most_rows: int, world: int = 1) -> None:
        self.sizes, self.weights, self.cache, self.world = sizes, weights, cache, world
        self.tokens = torch.zeros(most_rows, dtype=torch.int64, device=cache.device)
        half = sizes.head_dim // 2
        frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(MAX_SEQ_LEN, dtype=torch.float64)[:, None] * frequency
        self.cos, self.sin = (table.float().to(cache.device) for table in (angle.cos(), angle.sin()))

    def step(self, inputs: tuple[StepInputs, ...], attend: Attend) -> torch.Tensor:
        """Logits after one new token a row: float32 [rows, vocab].

        A CUDA graph can capture it: shapes depend on the number of rows alone, and nothing waits for the device.
        """
        (only,) = inputs
        position = only.lengths.long() - 1
        page = only.block_table.gather(1, (position // self.sizes.page_size)[:, None])[:, 0].long()
        slots = page, position % self.sizes.page_size

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, slots, *self._stored(k, v))
            out = torch.empty_like(q)
            attend(layer, q, self.cache.layers[layer], out)
            return out

        return self._logits(self._layers(self.tokens[: len(position)], position, attention))

    def prefill(self, prompt: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
        """Writes a prompt's KV into its pages; logits after its last token, float32 [vocab]. Eager."""
        device, size = self.cache.device, self.sizes.page_size
        position = torch.arange(len(prompt), device=device)
        slots: Slots = torch.tensor(pages, device=device)[position // size], position % size
        spec = self.cache.spec

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            stored = self._stored(k, v)
            self.cache.write(layer, slots, *stored)
            scales = (spec.k_scale, spec.v_scale)  # attend to what a decode step will find, rounded as it is stored
            k, v = (
                (part.to(q.dtype) * scale).repeat_interleave(spec.group_size, dim=1).transpose(0, 1)
                for part, scale in zip(stored, scales, strict=True)
            )
            attended = scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True, scale=spec.scale)
            return attended.transpose(0, 1)

        hidden = self._layers(torch.tensor(prompt, device=device), position, attention)
        return self._logits(hidden[-1:])[0]

    def _layers(self, tokens: torch.Tensor, position: torch.Tensor, attention: _Attention) -> torch.Tensor:
        hidden = self.weights.embedding.index_select(0, tokens)
        cos, sin = (table.index_select(0, position)[:, None] for table in (self.cos, self.sin))
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._heads(layer, _normed(hidden, layer.attention_norm))
            q, k = (_rotated(_normed(part, norm), cos, sin) for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
            attended = attention(i, q, k, v).flatten(1)
            hidden = hidden + self._summed(linear(attended, layer.output))
            hidden = hidden + self._summed(mlp(layer, _normed(hidden, layer.mlp_norm), self.sizes.active))
        return hidden

    def _heads(self, layer: Layer, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V, [tokens, heads, head_dim] each."""
        spec = self.cache.spec
        counts = [spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads]
        heads = linear(normed, layer.qkv).unflatten(1, (sum(counts), spec.head_dim_qk))
        q, k, v = heads.split(counts, dim=1)
        return q, k, v

    def _stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.cache.spec
        return self.cache.stored(k, spec.k_scale), self.cache.stored(v, spec.v_scale)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; in float32, which every transport can add."""
        if self.world == 1:
            return part
        total = part.float()
        dist.all_reduce(total)
        return total.to(part.dtype)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(_normed(hidden, self.weights.norm), self.weights.head).float()


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, weight.shape, weight, EPSILON)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [tokens, heads, head_dim] in float32, whose halves are the pairs' parts; contiguous, in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
