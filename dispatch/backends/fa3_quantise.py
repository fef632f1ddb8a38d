"""Q over an fp8 cache, as FlashAttention-3 takes it."""

from __future__ import annotations

import torch

from dispatch.dtypes import E4M3_MAX


class Quantise:
    """Q to e4m3 with a scale of 1, as engines do without a calibrated one; what is too large becomes the largest."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self.quantised = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        large = torch.full((1,), 2 * E4M3_MAX, dtype=torch.bfloat16, device=device)
        # some versions of torch turn what is too large into NaN: those need a clamp before it, one kernel more
        self.saturates = bool(large.to(torch.float8_e4m3fn).float() == E4M3_MAX)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        return self.quantised.copy_(q if self.saturates else q.clamp(-E4M3_MAX, E4M3_MAX))
