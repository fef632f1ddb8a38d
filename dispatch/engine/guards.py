"""When nothing is switched: each reason as a line for the log."""

from __future__ import annotations

from dispatch.config import DispatchConfig
from dispatch.engine.groups import EngineFacts


def start_refusal(config: DispatchConfig, facts: EngineFacts, has_cuda: bool) -> str:
    """Why this engine, as it was started, keeps its default everywhere; "" if nothing speaks against switching."""
    if not config.enabled:
        return "switched off"
    if not has_cuda:
        return "no CUDA device"
    if facts.named_backend is not None:
        return f"the user named the backend {facts.named_backend}, which wins"
    if facts.deterministic:
        return "a deterministic mode: another kernel rounds differently"
    if facts.mla:
        return "latent attention (MLA): no candidate serves it"
    if facts.query_tokens != 1:
        return f"{facts.query_tokens} query tokens a request, as where drafts are verified: candidates take one"
    return ""


def step_refusal(prefill: bool = False, query_tokens: int = 1, shared_prefix: bool = False) -> str:
    """Why a step is none for the runner, and belongs to the engine's own path; "" if it is one."""
    if prefill:
        return "prefill"
    if query_tokens != 1:
        return "more than one query token a request"
    if shared_prefix:
        return "a shared-prefix batch"
    return ""
