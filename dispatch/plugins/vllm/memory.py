"""GPU memory that vLLM leaves free, and what of it is not to be had: its activations come and go while it serves."""

from __future__ import annotations

from typing import Any

import torch

MIB = 1 << 20
SPARE_MIB = 512  # beside the activations: for fragments, and for what torch does not allocate

GRAPH_MIB = 24
"""Of each of vLLM's own graphs, which come after kernels are built, and for which its V2 runner reserves nothing: eight
took 0.17 GiB on an H200, for 36 layers (smoke/results/h200/vllm/start-up.txt)."""

PEAK = "decode_dispatch_activations_mib"
"""Of a model runner, from its profiling run on."""


def free_mib() -> float:
    """When torch has given back what nobody uses."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / MIB


def note_activations(runner: Any) -> None:
    """Right after the profiling run of the longest prefill: what it took is free while graphs are captured, and wanted
    again by the first long prompt.

    With `kv_cache_memory_bytes` vLLM does not set torch's peak back before it, and loading the model counts too.
    """
    setattr(runner, PEAK, (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / MIB)


def spare_mib(runner: Any) -> float | None:
    """What is to be left free; None where vLLM did not profile."""
    peak: float | None = getattr(runner, PEAK, None)
    return None if peak is None else SPARE_MIB + peak
