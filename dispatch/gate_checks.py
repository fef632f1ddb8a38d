"""How far a candidate's numbers may be from the reference's, and the one line that says where they are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

# Largest ||out - reference|| / ||reference|| of a row and head. Each is 4 units in the last place of the type that
# holds the output and, in most kernels, the softmax weights: 2^-8, 2^-11 and (with room for the order of sums) 2^-24.
TOLERANCE = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 1e-4}
# Kernels over an fp8 cache also quantise Q, and some the weights, to e4m3 (3 bits: up to 2^-4 of each value).
TOLERANCE_FP8_KV = 0.1
# A count of keys is read off the output to half a key, or to its rounding (bf16: 2^-8) where the count is above 64.
HALF_A_KEY = 0.5
COUNT_ROUNDING = 2.0**-8


@dataclass(frozen=True, eq=False)
class Errors:
    """How far off outputs are, [layer, row, head], on the device. `limit`: what is allowed; `what`: the name of it."""

    each: torch.Tensor
    limit: float
    what: str
    inputs: StepInputs

    @property
    def within(self) -> torch.Tensor:
        """Whether all are allowed: bool [], on the device. NaN is always over the limit."""
        return (self.each <= self.limit).all()

    def worst(self) -> str:
        """The worst row and head of the first layer where one is over the limit, or ""."""
        over = (~(self.each <= self.limit)).flatten(1).any(dim=1).tolist()
        if True not in over:
            return ""
        layer = over.index(True)
        error = self.each[layer]
        place = int(error.nan_to_num(nan=float("inf"), posinf=float("inf")).argmax())
        row, head = divmod(place, error.shape[1])
        value = float(error[row, head])
        size = "NaN, or not written" if value != value else f"{self.what} {value:.3g}, allowed {self.limit:.3g}"
        where = f"row {row} of length {int(self.inputs.lengths_host[row])}, head {head}"
        return f"{where}: {size}" + (f" (layer {layer})" if layer else "")


def compare(spec: AttentionSpec, out: torch.Tensor, expected: torch.Tensor, inputs: StepInputs) -> Errors:
    """Of `out` [layer, row, head, head_dim_vo] beside `expected`, which is the same in every layer."""
    limit = TOLERANCE_FP8_KV if spec.kv_dtype == "fp8_e4m3" else TOLERANCE[spec.dtype]
    error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return Errors(error, limit, "relative error", inputs)


def count(found: torch.Tensor, expected: torch.Tensor, inputs: StepInputs) -> Errors:
    """The same for counts of keys, [layer, row, head, place]."""
    error = ((found - expected).abs() - expected * COUNT_ROUNDING).amax(dim=-1)
    return Errors(error, HALF_A_KEY, "keys miscounted", inputs)
