"""SwiGLU, dense or as experts, in fixed shapes: every expert computes every token, and most count with weight 0."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from smoke.weights import Layer


def mlp(layer: Layer, x: torch.Tensor, active: int) -> torch.Tensor:
    """This rank's part of the sum, for x [tokens, hidden]."""
    gate, up = torch.einsum("th,egmh->getm", x, layer.gate_up)
    each = torch.bmm(silu(gate) * up, layer.down.transpose(1, 2))  # [experts, tokens, hidden]
    if layer.router is None:
        return each[0]
    mine = expert_weights(layer.router, x, active)[:, layer.first_expert : layer.first_expert + len(each)]
    return torch.einsum("te,eth->th", mine, each.float()).to(x.dtype)


def expert_weights(router: torch.Tensor, x: torch.Tensor, active: int) -> torch.Tensor:
    """What each expert counts for each token, float32 [tokens, experts]: its softmax among all, or 0.

    Not scaled up to a sum of 1: an expert that is only just among the `active` then counts little.
    """
    shares = torch.softmax(x.float() @ router.float().T, dim=-1)
    kept, chosen = shares.topk(active, dim=-1)
    return torch.zeros_like(shares).scatter_(1, chosen, kept)
