"""What an engine tells the runner of its model and of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.errors import ConfigError
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


def check_layers(groups: Sequence[LayerGroup]) -> None:
    """Raises ConfigError unless there is a group, and every layer is in one only."""
    layers = [layer for group in groups for layer in group.layers]
    if not layers:
        raise ConfigError("a runner needs a layer group with layers")
    if len(set(layers)) != len(layers):
        raise ConfigError("a layer is in two groups")
