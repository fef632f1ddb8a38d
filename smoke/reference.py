"""The float32 eager reference: a request's own tokens at once, dense causal attention, no pages and no kernels of ours.

It shares the weights with the model, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from smoke.sizes import EPSILON, FP8_SCALES, ROPE_BASE, Sizes
from smoke.weights import Layer, Weights


class Reference:
    """`kv_dtype` "fp8_e4m3": K and V are rounded to it where a cache would store them; all else stays float32."""

    def __init__(self, sizes: Sizes, weights: Weights, kv_dtype: str = "bf16") -> None:
        self.sizes, self.weights, self.is_fp8 = sizes, weights, kv_dtype == "fp8_e4m3"

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After each token: float32 [tokens, vocab]."""
        x = self.weights.embedding[torch.tensor(tokens)]
        for layer in self.weights.layers:
            x = x + self._attention(layer, _norm(x, layer.attention_norm)) @ layer.output.T
            x = x + self._mlp(layer, _norm(x, layer.mlp_norm))
        return _norm(x, self.weights.norm) @ self.weights.head.T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow a prompt, each the best after all before it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _attention(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        counts = [sizes.qo_heads, sizes.kv_heads, sizes.kv_heads]
        q, k, v = (x @ layer.qkv.T).view(len(x), sum(counts), sizes.head_dim).split(counts, dim=1)
        q, k = _rope(_norm(q, layer.q_norm)), _rope(_norm(k, layer.k_norm))
        if self.is_fp8:
            k, v = _through_fp8(k, FP8_SCALES["k_scale"]), _through_fp8(v, FP8_SCALES["v_scale"])
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        group = sizes.qo_heads // sizes.kv_heads
        heads = []
        for head in range(sizes.qo_heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(sizes.head_dim)
            heads.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=1) @ v[:, head // group])
        return torch.cat(heads, dim=1)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if layer.router is None:
            return _swiglu(layer, 0, x)
        shares = torch.softmax(x @ layer.router.T, dim=1)
        chosen = shares.argsort(dim=1, descending=True)[:, : self.sizes.active]
        total = torch.zeros_like(x)
        for expert in range(self.sizes.experts):
            rows = (chosen == expert).any(dim=1)
            total[rows] += shares[rows, expert, None] * _swiglu(layer, expert, x[rows])
        return total


def _swiglu(layer: Layer, expert: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ matrix.T for matrix in layer.gate_up[expert])
    return (gate * torch.sigmoid(gate) * up) @ layer.down[expert].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _rope(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, d]: elements j and j + d/2 are a complex number, turned by position * base^(-2j/d)."""
    half = x.shape[-1] // 2
    turn = torch.arange(len(x))[:, None, None] * ROPE_BASE ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _through_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).to(torch.float8_e4m3fn).float() * scale
