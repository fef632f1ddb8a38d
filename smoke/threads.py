"""How many threads the host computes with."""

from __future__ import annotations

import torch


def one_thread() -> None:
    """Tensors here are so small that threads cost more than they save; where something else runs too, 20 times more."""
    torch.set_num_threads(1)
