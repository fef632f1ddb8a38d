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


def disagreement(
    built: BuiltStep, captured: Captured, eager: BuiltStep, buffers: StepBuffers, lengths: Sequence[int]
) -> str:
    """ "" if the graph's output is that of the eager step with a row of each of these lengths; else what is wrong."""
    bucket = len(eager.inputs[0].lengths_host)
    for length in lengths:
        buffers.reserve(bucket, length)
        eager.plan()
        expected = [t.clone() for t in tensors(eager.work())]
        buffers.reserve(bucket, length)
        built.plan()
        found = tensors(captured.replay())
        for mine, theirs in zip(found, expected, strict=True):
            if wrong := _differ(mine, theirs):
                return f"with a row of length {length}: {wrong}"
    return ""


def tensors(output: Any) -> tuple[torch.Tensor, ...]:
    """A step's output, one tensor or several."""
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _differ(found: torch.Tensor, expected: torch.Tensor) -> str:
    mine, theirs = found.flatten(1), expected.flatten(1)
    if not mine.is_floating_point():  # tokens, for one: the best of two near logits may differ
        return ""
    error = (mine.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1)
    comparable = theirs.isfinite().all(dim=1)  # an engine's own output on its reserved page may be anything
    if bool(((error <= TOLERANCE) | ~comparable).all()):
        return ""
    row = int((~(error <= TOLERANCE) & comparable).int().argmax())
    return f"row {row} is off by {float(error[row]):.3g}, allowed {TOLERANCE}"
