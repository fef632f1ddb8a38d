"""Weights from a seed, the same numbers on every machine, and a rank's share of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from smoke.sizes import Sizes

# Queries are longer than keys by this factor, so that a token attends to few others and not to the
# mean of all, and which ones they are decides its output.
Q_GAIN = 1.5
# The attention's share of a layer's output: larger than the MLP's, so that a wrong attention shows in the logits.
OUTPUT_GAIN = 2.0
# Spreads the experts' shares, so that the last one chosen counts little: in bf16 it may be another one than in float32.
ROUTER_GAIN = 2.0


@dataclass(frozen=True)
class Layer:
    """[outputs, inputs] each. `qkv`: the heads of Q, of K, of V. `gate_up`: [experts, 2, middle, hidden].

    `down`: [experts, hidden, middle]. `router`: [experts, hidden]; None where there is one expert, taken by all.
    `first_expert`: index among all experts of the first that this rank has.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    router: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    first_expert: int = 0


@dataclass(frozen=True)
class Weights:
    """`embedding`, `head`: [vocab, hidden]; every rank has the whole of them."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """All tensors on the device in the dtype."""

        def moved(part: Weights | Layer) -> dict[str, torch.Tensor]:
            tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
            return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}

        return replace(self, **moved(self), layers=tuple(replace(layer, **moved(layer)) for layer in self.layers))


def make_weights(sizes: Sizes) -> Weights:
    """Float32 numbers that bf16 can hold, so that a bf16 model and the float32 reference have the same weights."""
    draw = _Draw(sizes.seed)
    dim, hidden, middle = sizes.head_dim, sizes.hidden, sizes.middle

    def layer() -> Layer:
        return Layer(
            attention_norm=draw.norm(hidden),
            qkv=draw.matrix((sizes.qo_heads + 2 * sizes.kv_heads) * dim, hidden),
            q_norm=draw.norm(dim, Q_GAIN),
            k_norm=draw.norm(dim),
            output=draw.matrix(hidden, sizes.qo_heads * dim, gain=OUTPUT_GAIN),
            mlp_norm=draw.norm(hidden),
            router=draw.matrix(sizes.experts, hidden, gain=ROUTER_GAIN) if sizes.experts > 1 else None,
            gate_up=draw.matrix(sizes.experts, 2, middle, hidden),
            down=draw.matrix(sizes.experts, hidden, middle),
        )

    embedding = draw.matrix(sizes.vocab, hidden, gain=math.sqrt(hidden))  # unit numbers in the first layer
    layers = tuple(layer() for _ in range(sizes.layers))
    return Weights(embedding, layers, draw.norm(hidden), draw.matrix(sizes.vocab, hidden))


def shard(weights: Weights, sizes: Sizes, rank: int, world: int) -> Weights:
    """A rank's heads, and its experts, or its part of the one MLP; the rest is every rank's."""
    return replace(weights, layers=tuple(_shard_layer(layer, sizes, rank, world) for layer in weights.layers))


def _shard_layer(layer: Layer, sizes: Sizes, rank: int, world: int) -> Layer:
    def mine(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(world, dim)[rank].contiguous()

    heads = [count * sizes.head_dim for count in (sizes.qo_heads, sizes.kv_heads, sizes.kv_heads)]
    experts = sizes.experts > 1
    return replace(
        layer,
        qkv=torch.cat([mine(part, 0) for part in layer.qkv.split(heads)]),
        output=mine(layer.output, 1),
        gate_up=mine(layer.gate_up, 0 if experts else 2),
        down=mine(layer.down, 0 if experts else 2),
        first_expert=rank * sizes.experts // world if experts else 0,
    )


class _Draw:
    """Uniform numbers of unit variance: numpy promises that this stream never changes, as it does for no normals."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        """Unit numbers in give numbers of size `gain` out."""
        return _rounded(self._unit(*shape) * (gain / math.sqrt(shape[-1])))

    def norm(self, size: int, gain: float = 1.0) -> torch.Tensor:
        """Weights of a norm, about `gain`."""
        return _rounded(gain * (1 + 0.2 * self._unit(size)))

    def _unit(self, *shape: int) -> np.ndarray:
        return (self.random.random_sample(shape) - 0.5) * math.sqrt(12)


def _rounded(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(torch.bfloat16).float()
