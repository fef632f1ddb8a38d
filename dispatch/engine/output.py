"""What an engine's step returns: one tensor, or several, with the rows first."""

from __future__ import annotations

from typing import Any

import torch

from dispatch.errors import ConfigError


def tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """A step's output, one tensor or several. Raises ConfigError for anything else."""
    several = (output,) if isinstance(output, torch.Tensor) else output
    if not isinstance(several, (tuple, list)) or not all(isinstance(t, torch.Tensor) and t.ndim for t in several):
        raise ConfigError(f"the step returned {type(output).__name__}: must be a tensor of rows, or a tuple of them")
    return tuple(several)


def rows(output: Any, live: int) -> Any:
    """The first rows of one tensor, or of each of several."""
    return output[:live] if isinstance(output, torch.Tensor) else tuple(t[:live] for t in output)
