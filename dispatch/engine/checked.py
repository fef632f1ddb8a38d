"""Each captured variant against an eager step with the default, before requests are served.

Both run on rows that lie on the reserved page alone, so that no request's cache is read or written: one long row and
others of length 1, which all write the same token there, while the engine's own buffers hold the same in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import BuiltStep
from dispatch.engine.graphs import Captured

# ||difference|| / ||eager|| of a row of the step's output: attention's own rounding (2^-6 of bf16, dispatch.gate) goes
# through a model's layers, and comes out a few times larger. A wrong page or length is off by about 1.
TOLERANCE = 0.1
TOLERANCE_FP8_KV = 0.3  # kernels differ by 0.04 where some quantise Q and others do not (smoke/results/h200/facts.json)


def disagreement(
    built: BuiltStep, captured: Captured, eager: BuiltStep, buffers: StepBuffers, lengths: Sequence[int]
) -> str:
    """ "" if the graph's output is that of the eager step with a row of each of these lengths; else what is wrong."""
    is_fp8 = any(group.spec.kv_dtype == "fp8_e4m3" for group in buffers.groups)
    tolerance = TOLERANCE_FP8_KV if is_fp8 else TOLERANCE
    bucket, found_wrong = len(eager.inputs[0].lengths_host), ""
    for length in lengths:  # all of them, whatever one shows: the ranks of a model must make the same calls
        buffers.reserve(bucket, length)
        eager.plan()
        expected = [t.clone() for t in tensors(eager.work())]
        buffers.reserve(bucket, length)
        built.plan()
        found = tensors(captured.replay())
        for mine, theirs in zip(found, expected, strict=True):
            if not found_wrong and (wrong := _differ(mine, theirs, tolerance)):
                found_wrong = f"with a row of length {length}: {wrong}"
    return found_wrong


def tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """A step's output, one tensor or several."""
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _differ(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if not expected.is_floating_point():  # tokens, for one: the best of two near logits may differ
        return ""
    mine, theirs = (t.float().reshape(len(t), -1) for t in (found, expected))
    off, size = (mine - theirs).norm(dim=1), theirs.norm(dim=1)
    comparable = size.isfinite()  # an engine's own output on its reserved page may be anything
    wrong = ~(off <= tolerance * size) & comparable
    if not bool(wrong.any()):
        return ""
    row = int(wrong.int().argmax())
    return f"row {row} is off by {float(off[row] / size[row]):.3g}, allowed {tolerance}"
