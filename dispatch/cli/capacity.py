"""How many KV tokens a server holds here, where nobody says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dispatch.device import DeviceFingerprint
    from dispatch.spec import AttentionSpec


def default_capacity(
    model: str, tp: int, device: DeviceFingerprint, groups: tuple[AttentionSpec, ...], wanted: int
) -> tuple[int, str]:
    """KV tokens of all layers that a server holds, at most `wanted`, and what limits them, for a person to read.

    On a GPU they share nine tenths of its memory with the weights; on a CPU they take what is free. Raises ConfigError
    where the weights leave no room for a page.
    """
    import torch

    from dispatch.bench.memory import SERVER_SHARE, free_bytes, server_bytes
    from dispatch.errors import ConfigError, ModelError
    from dispatch.hf_weights import weight_bytes
    from dispatch.models import load_fields

    here = torch.device(device.kind)
    token_bytes = sum(spec.kv_bytes_per_token * spec.num_layers for spec in groups)
    room, limit = free_bytes(here), "what fits into free memory"
    if device.kind == "cuda":
        usable = server_bytes(here)
        room, limit = usable, f"what fits into {SERVER_SHARE:.0%} of the memory"
        try:
            weights = weight_bytes(load_fields(model)[1], groups, tp)
        except ModelError as error:
            click.echo(f"no weights are subtracted from the KV capacity: {error}", err=True)
        else:
            room, limit = usable - weights, f"what fits beside {_gib(weights)} of weights"
            if room < groups[0].page_size * token_bytes:
                raise ConfigError(
                    f"{_gib(weights)} of weights a rank leave no room for a KV page in the {_gib(usable)} that a server"
                    f" takes here, {SERVER_SHARE:.0%} of the memory: pass --tp or --kv-capacity"
                )
    fits = max(1, room // token_bytes)
    return (fits, limit) if fits < wanted else (wanted, "every request at its longest")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
