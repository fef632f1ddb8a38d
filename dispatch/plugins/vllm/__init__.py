"""decode-dispatch inside vLLM, switched on by ENABLE_DYNAMIC_DECODE_BACKEND=1.

vLLM loads `register` in its front end, its engine core and each worker, before there is a configuration. What it puts
into vLLM's registry is asked later, when a layer looks for its backend: see `selected`.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from dispatch.config import DispatchConfig

SUPPORTED = "0.26."
"""How a version of vLLM begins that this adapter is known to fit."""

SELECTED = "dispatch.plugins.vllm.selected.Backend"

# below vLLM's own logger, which has a handler and a format
log = logging.getLogger("vllm.decode_dispatch")


def register() -> None:
    """Entry point of `vllm.general_plugins`. A second call changes nothing.

    Raises ConfigError for a setting in the environment that cannot be read.
    """
    if not DispatchConfig.from_env().enabled:
        return
    found = version("vllm")
    if not found.startswith(SUPPORTED):
        log.warning("decode-dispatch leaves vLLM %s alone: it knows %s*", found, SUPPORTED)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    places = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM)
    for taken in places:
        if taken.is_overridden() and taken.get_path() != SELECTED:
            log.warning("decode-dispatch leaves vLLM alone: %s has taken the place of %s", taken.get_path(), taken.name)
            return
    for place in places:
        register_backend(place, SELECTED)
    _show_all()


def _show_all() -> None:
    """What the rest of the package logs is shown where vLLM's lines are, unless the user has seen to it."""
    rest, vllms = logging.getLogger("dispatch"), logging.getLogger("vllm")
    if vllms.handlers and not rest.handlers:
        rest.handlers, rest.propagate = list(vllms.handlers), False
        rest.setLevel(vllms.level)


def leave_alone(why: str) -> None:
    """Tell that vLLM attends as it would without us."""
    log.warning("decode-dispatch leaves attention alone: %s", why)
