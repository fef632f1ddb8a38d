"""How much memory the bench may use, and how much a server would."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

RESERVE_BYTES = 3 << 29  # 1.5 GiB stay free for scratch, graphs and whatever else runs
# Engines' usual share of all memory: for long the default of vLLM's gpu_memory_utilization. Not of what is free, which
# is never twice the same: the capacity is part of a stored plan's key.
SERVER_SHARE = 0.9


def free_bytes(device: torch.device) -> int:
    """Memory that the bench's pages may take on this device."""
    return max(0, available_bytes(device) - RESERVE_BYTES)


def available_bytes(device: torch.device) -> int:
    """Memory of this device that is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def give_back(device: torch.device) -> None:
    """Free what nobody uses any more: torch would keep it for itself, and an engine counts what is reserved."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def server_bytes(device: torch.device) -> int:
    """Memory that a server takes for its weights and its KV cache on this CUDA device."""
    _, total = torch.cuda.mem_get_info(device)
    return int(total * SERVER_SHARE)
