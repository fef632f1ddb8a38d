"""When vLLM's KV cache is declared to hold finite numbers alone: where nothing else can be written into a page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from dispatch.plugins.vllm.finite import is_finite

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
FP8 = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float8_e4m3fn)
MAMBA = MambaSpec(block_size=16, shapes=((2, 64),), dtypes=(torch.bfloat16,))


def cache(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    "specs", [(FULL,), (FP8,), (FULL, WINDOW), (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"one": FULL}),)]
)
def test_groups_of_one_dtype_write_finite_numbers(config, specs):
    assert is_finite(config(), cache(*specs))


@pytest.mark.parametrize(
    "specs",
    [
        (WINDOW, FP8),
        (FULL, MAMBA),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"one": WINDOW, "other": FP8}),),
    ],
)
def test_a_page_may_be_read_as_what_it_was_not_written(config, specs):
    """A bf16 number of any layer is two bytes, of which one in some hundred is a NaN of fp8."""
    assert not is_finite(config(), cache(*specs))


def connected(config):
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


def with_embedded_images(config):
    config.model_config.multimodal_config = SimpleNamespace(enable_mm_embeds=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.model_config, "enable_sleep_mode", True),
        lambda config: setattr(config.model_config, "enable_prompt_embeds", True),
        with_embedded_images,
        connected,
    ],
)
def test_what_did_not_come_of_tokens_of_this_engine_may_be_anything(config, change):
    its = config()
    change(its)
    assert not is_finite(its, cache(FULL))
