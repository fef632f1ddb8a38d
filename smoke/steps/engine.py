"""A model of real sizes, served by runners that share its weights, its KV cache and its buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.bench.model_stack import ModelStack
from dispatch.bench.pool import RESERVED_PAGE, PagedPool
from dispatch.config import DispatchConfig
from dispatch.engine.builder import Attend
from dispatch.engine.groups import LayerGroup
from dispatch.engine.runner import DecodeGraphRunner
from dispatch.hf_dense import DenseSizes
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from dispatch.traits import EngineTraits

TRAITS = EngineTraits(finite_kv=True)  # the pool is filled with random numbers


class StackEngine:
    """One rank's layers in plain torch, random weights, and a KV cache for each layer; no embedding, no sampling."""

    def __init__(
        self, spec: AttentionSpec, sizes: DenseSizes, rows: int, longest: int, tokens: int, device: torch.device
    ) -> None:
        """`rows`: of the largest batch. `tokens`: KV tokens of each layer's cache."""
        self.spec, self.longest, self.tokens, self.device = spec, longest, tokens, device
        self.stack = ModelStack(spec, sizes, spec.num_layers, longest, device)
        self.pool = PagedPool(spec, tokens // spec.page_size, spec.num_layers, device)
        self.hidden = self.stack.hidden(1).repeat(rows, 1)  # alike, as the runner wants it when it captures

    def step(self, inputs: tuple[StepInputs, ...], attend: Attend) -> torch.Tensor:
        """Hidden states after the last layer, [rows, hidden_size]."""
        (only,) = inputs
        hidden = self.hidden[: len(only.lengths_host)]
        return self.stack.step(attend, only, self.pool.kv_caches, hidden)

    def runner(self, buckets: Sequence[int], config: DispatchConfig) -> DecodeGraphRunner:
        """One that has captured nothing yet."""
        return DecodeGraphRunner(
            self.step,
            [LayerGroup(self.spec, tuple(range(self.spec.num_layers)))],
            buckets,
            self.longest,
            self.tokens,
            config,
            reserved_page=RESERVED_PAGE,
            traits=TRAITS,
            device=self.device.type,
        )

    def table(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """A block table that gives every row pages of its own, in random order: int32 [rows, pages of the longest]."""
        inputs = self.pool.inputs(len(lengths), int(lengths.max()))
        self.pool.load(inputs, lengths)
        return inputs.block_table
