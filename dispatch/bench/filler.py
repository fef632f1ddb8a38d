"""What surrounds attention in a model's layer, so that attention is timed among the kernels that it is served among.

A product alone is not enough: on an H200, with a 64 MiB matrix-vector product between the layers, XQA took 7 us a layer
less than in a stack of real layers (both seem to overlap, by programmatic dependent launch), and cuDNN 6 us more beside
FA3. With what is here, differences between backends are those of a stack (`bench truth`).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, rms_norm

HIDDEN, HEADS, HEAD_DIM, KV_HEADS = 4096, 32, 128, 8


class Filler:
    """The rest of a layer of middle size, for a batch; plain torch in bf16.

    64 MiB of weights: of the two products beside attention, the one before it as large as the one behind it.
    """

    def __init__(self, weights: FillerWeights, batch: int) -> None:
        device, dtype = weights.qkv.device, weights.qkv.dtype
        self.weights = weights
        self.attended = torch.ones(batch, HIDDEN, dtype=dtype, device=device)
        self.hidden = torch.ones(batch, HIDDEN, dtype=dtype, device=device)
        self.cache = torch.zeros(batch, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
        self.slots = (torch.arange(batch, device=device),)

    def before(self) -> None:
        """Norm, product, rotation, and a write where a KV cache would be."""
        product = linear(rms_norm(self.hidden, (HIDDEN,), self.weights.norm), self.weights.qkv)
        a, b = product.view(-1, HEADS, HEAD_DIM).chunk(2, dim=-1)
        rotated = torch.cat((a * 0.8 - b * 0.6, b * 0.8 + a * 0.6), dim=-1)
        self.cache.index_put_(self.slots, rotated[:, :KV_HEADS])

    def after(self) -> None:
        """The output product, and what it is added to."""
        torch.add(self.attended, linear(self.attended, self.weights.output), out=self.hidden)

    def layers(self, count: int) -> None:
        """So many layers without their attention."""
        for _ in range(count):
            self.before()
            self.after()


class FillerWeights:
    """The weights that all layers and batch sizes share."""

    def __init__(self, device: torch.device) -> None:
        shape = (HIDDEN, HIDDEN)
        self.qkv, self.output = (torch.full(shape, 1 / HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
