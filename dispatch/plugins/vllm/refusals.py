"""Why vLLM, as it was configured, keeps its attention backend."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dispatch.config import DispatchConfig
from dispatch.errors import ConfigError
from dispatch.plainjson import shown

SETTINGS = "dynamic_decode"
"""Of additional_config: settings by the names of DispatchConfig's fields. The switch is the environment's."""

SPLITS = 32
"""What vLLM's full decode graphs are captured with, unless the user sets another number."""


def settings(config: Any) -> DispatchConfig:
    """The environment's, and over them those of additional_config. Raises ConfigError."""
    additional = config.additional_config
    given = additional.get(SETTINGS, {}) if isinstance(additional, dict) else {}
    known = [field.name for field in fields(DispatchConfig) if field.name != "enabled"]
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise ConfigError(f"additional_config {SETTINGS}={shown(given)}: settings are {', '.join(known)}")
    return DispatchConfig.from_env(**given)


def refusal(config: Any) -> str:
    """ "" or the reason, for a person to read."""
    from vllm import envs

    if config.model_config is None:
        return "no model"
    attention, parallel = config.attention_config, config.parallel_config
    named = [*([attention.backend] if attention.backend else []), *attention.backend_per_kind.values()]
    named = [backend.name for backend in named if backend.name != "CUSTOM"]
    if named:
        return f"the user named the attention backend: {', '.join(named)}"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is on"
    if config.model_config.use_mla:
        return "latent attention (MLA)"
    if config.speculative_config is not None:
        return "speculative decoding: more than one token of a request in a decode step"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        return "experts over data-parallel ranks, which must capture alike"
    if not config.use_v2_model_runner:
        return "vLLM's V1 model runner serves this model"
    if attention.flash_attn_version not in (None, 3):
        return f"flash_attn_version={attention.flash_attn_version}"
    if attention.flash_attn_max_num_splits_for_cuda_graph != SPLITS:
        return f"flash_attn_max_num_splits_for_cuda_graph={attention.flash_attn_max_num_splits_for_cuda_graph}"
    if config.cache_config.cache_dtype.startswith("fp8") and _fuses_quantisation(config.compilation_config):
        apart = 'compilation_config={"custom_ops": ["+quant_fp8"]} keeps it a kernel of its own'
        return f"over an fp8 KV cache torch.compile fuses the quantisation of Q with other kernels; {apart}"
    if config.model_config.enforce_eager:
        return "enforce_eager: no decode graphs"
    return ""


def _fuses_quantisation(compilation: Any) -> bool:
    """Whether a layer's quantisation of Q is part of other kernels, and would be a kernel more if it were ours."""
    from vllm.config.compilation import CompilationMode

    return compilation.mode != CompilationMode.NONE and not compilation.is_custom_op_enabled("quant_fp8")
