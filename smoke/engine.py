"""Puts a smoke engine together: a model's decoder, and the runner that serves it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dispatch.config import DispatchConfig
from dispatch.dtypes import TORCH_DTYPES
from dispatch.engine.groups import LayerGroup
from dispatch.engine.runner import DecodeGraphRunner
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.traits import EngineTraits
from smoke.golden import MODELS
from smoke.model import Decoder
from smoke.pages import RESERVED_PAGE, PagedCache
from smoke.sizes import BUCKETS, MAX_SEQ_LEN
from smoke.weights import make_weights, shard

CAPACITY_TOKENS = BUCKETS[-1] * MAX_SEQ_LEN
TRAITS = EngineTraits(finite_kv=True)  # PagedCache zeroes its pages


def make_decoder(name: str, device: torch.device, dtype: str = "bf16", rank: int = 0, world: int = 1) -> Decoder:
    """The model of a golden file, or a rank's part of it, over an empty cache."""
    sizes, kv_dtype = MODELS[name]
    spec = sizes.spec(dtype if kv_dtype == "bf16" else kv_dtype, world, dtype)
    weights = shard(make_weights(sizes), sizes, rank, world).to(device, TORCH_DTYPES[dtype])
    cache = PagedCache(spec, CAPACITY_TOKENS // sizes.page_size, device)
    return Decoder(sizes, weights, cache, BUCKETS[-1], world)


def make_runner(
    decoder: Decoder, config: DispatchConfig, cpu_group: dist.ProcessGroup | None = None
) -> DecodeGraphRunner:
    """A runner that has captured, on every rank of the group."""
    spec, device = decoder.cache.spec, decoder.cache.device
    runner = DecodeGraphRunner(
        decoder.step,
        [LayerGroup(spec, tuple(range(spec.num_layers)))],
        BUCKETS,
        MAX_SEQ_LEN,
        CAPACITY_TOKENS,
        config,
        reserved_page=RESERVED_PAGE,
        traits=TRAITS,
        device=device.type,
        cpu_group=cpu_group,
    )
    runner.trigger_init_capture()
    return runner


def request_of(spec: AttentionSpec, config: DispatchConfig) -> TuneRequest:
    """What that runner asks for a plan with."""
    return TuneRequest(spec, BUCKETS, MAX_SEQ_LEN, CAPACITY_TOKENS, config, traits=TRAITS)
