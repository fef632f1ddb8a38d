"""What an engine tells the runner of its model and of itself."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one attention layout and one block table.

    layers: their indices in the model. default: the backend that the engine would use for them, where it is another
    than the runner's.
    """

    spec: AttentionSpec
    layers: tuple[int, ...]
    default: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What speaks against switching at all, in this engine as it was started.

    named_backend: the attention backend that the user named with the engine's own flag; it always wins.
    deterministic: a deterministic or batch-invariant mode. mla: latent attention. query_tokens: of a request in a
    decode step; more than one where drafts are verified.
    """

    named_backend: str | None = None
    deterministic: bool = False
    mla: bool = False
    query_tokens: int = 1
