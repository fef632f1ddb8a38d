"""A variant without the engine's layers around it, before the engine's step runs with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dispatch.dtypes import TORCH_DTYPES
from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import BuiltStep
from dispatch.engine.checked import row_lengths


def rehearse(built: BuiltStep, shown: BuiltStep, buffers: StepBuffers, longest: Sequence[int]) -> None:
    """Plan, begin and attend once in a layer of each group, for rows up to each of these lengths, the longest last.

    The engine's step makes collective calls: what a backend raises within it, on one rank, leaves the others waiting
    there. Here it costs the variant, and nobody waits. `shown`: a step that has run, and knows the layers' caches; only
    their reserved page is read. Afterwards the buffers hold the longest rows. Raises what a backend raises.
    """
    device = buffers.lengths.device
    first = {built.group_of[layer]: layer for layer in sorted(shown.kv_caches, reverse=True)}
    for length in longest:
        buffers.reserve(built.bucket, row_lengths(built, length))
        built.plan()
        for group, layer in first.items():
            spec, impl = built.groups[group].spec, built.impls[group]
            dtype = TORCH_DTYPES[spec.dtype]
            q = torch.zeros(built.bucket, spec.num_qo_heads, spec.head_dim_qk, dtype=dtype, device=device)
            out = torch.empty(built.bucket, spec.num_qo_heads, spec.head_dim_vo, dtype=dtype, device=device)
            sinks = torch.zeros(spec.num_qo_heads, device=device) if spec.has_sinks else None
            impl.begin_step(built.inputs[group])
            impl.forward(q, shown.kv_caches[layer], out, sinks)
