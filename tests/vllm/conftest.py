"""vLLM as it finds itself on an H200, on a machine without a GPU: its compiled parts are stubs."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    kernels = types.ModuleType("vllm.vllm_flash_attn")
    kernels.flash_attn_varlen_func = kernels.get_scheduler_metadata = lambda *args, **kwargs: None
    kernels.fa_version_unsupported_reason = lambda version: None
    kernels.is_fa_version_supported = lambda version: version == 3
    kernels.compile_flash_attn_varlen_func_from_specs = None
    sys.modules["vllm.vllm_flash_attn"] = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"] = kernels

    import torch

    ops = torch.library.Library("_C", "DEF")  # asked while modules are imported
    for name in (
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_group_gemm_supported",
    ):
        ops.define(f"{name}(int capability) -> bool")
        ops.impl(name, lambda capability: False, "CompositeExplicitAutograd")

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

    vllm.platforms._current_platform = Hopper()

    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True  # it is installed, and counts only where there is a driver

    from vllm.model_executor.models import registry as models

    # Models are inspected in a process of its own, which imports them; this is what it would say of a dense one.
    known = {"architecture": "Qwen3ForCausalLM", "is_text_generation_model": True, "supports_pp": True}
    fields = {field.name: known.get(field.name, False) for field in dataclasses.fields(models._ModelInfo)}
    models._LazyRegisteredModel.inspect_model_cls = lambda self: models._ModelInfo(**fields)

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def registry():
    """vLLM's registry as it was, and nothing cached or said."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dispatch.plugins.vllm import selected

    places = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM)
    for clear in (selector._cached_get_attn_backend.cache_clear, selected._said.clear):
        clear()
    yield
    for place in places:
        place.clear_override()


@pytest.fixture
def config(tmp_path):
    """Makes a VllmConfig of a small Qwen3, with these arguments of the engine."""
    from vllm.engine.arg_utils import EngineArgs

    def made(**given):
        (tmp_path / "config.json").write_text(json.dumps(QWEN3))
        args = {"max_model_len": 4096, "skip_tokenizer_init": True, "load_format": "dummy", **given}
        return EngineArgs(model=str(tmp_path), **args).create_engine_config()

    return made
