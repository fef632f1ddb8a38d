"""Workspaces: one scratch a backend family, sized before anything is captured, and never regrown."""

from __future__ import annotations

import torch

from dispatch.errors import MeasureError


class Workspaces:
    """Scratch memory for the backends of one owner (the bench, or an engine; never shared between the two).

    Kernels leave counters in their scratch and expect them at zero, so a family has its own, zeroed once. A graph
    points into it, so it never moves: `reserve` after the first `get` of a family raises MeasureError.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sizes: dict[str, int] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def reserve(self, family: str, size_bytes: int) -> None:
        """Make the family's scratch at least so large."""
        if family in self._scratch:
            if size_bytes > self._sizes[family]:
                raise MeasureError(
                    f"workspace of {family}: {size_bytes} bytes asked for after {self._sizes[family]} were given out"
                )
            return
        self._sizes[family] = max(size_bytes, self._sizes.get(family, 0))

    def get(self, family: str) -> torch.Tensor:
        """The family's scratch, uint8, allocated at the first call."""
        if family not in self._scratch:
            size = self._sizes.get(family, 0)
            self._scratch[family] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._scratch[family]
