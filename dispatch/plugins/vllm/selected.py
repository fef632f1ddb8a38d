"""What vLLM's registry finds in the place of FLASH_ATTN: that backend itself, or ours where it may serve.

`Backend` is looked up each time that a layer asks for its backend, with the configuration at hand; it raises
ConfigError for settings that cannot be read.
"""

from __future__ import annotations

from typing import Any

from dispatch.plugins.vllm import leave_alone
from dispatch.plugins.vllm.refusals import refusal, settings

_said: set[str] = set()


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    config = get_current_vllm_config_or_none()
    if config is None:  # asked for what it can do, and not for a layer
        return FlashAttentionBackend
    settings(config)  # what cannot be read is told at start
    why = refusal(config)
    if why:
        if why not in _said:
            _said.add(why)
            leave_alone(why)
        return FlashAttentionBackend
    from dispatch.plugins.vllm.backend import DynamicBackend
    from dispatch.plugins.vllm.runner import hook

    hook()
    return DynamicBackend
