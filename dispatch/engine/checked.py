"""Each captured variant against an eager step with the default, before requests are served.

Both run on rows that lie on the reserved page alone, filled with random numbers, so that no request's cache is read or
written. What is checked is that the graph sees each row's own length; that kernels find their pages, and numbers
themselves, was the gate's to check, on pages of the bench's own.

Rows of one length write their new token to one slot. Where the engine's buffers hold something else in each row, chance
decides whose token stays there: the eager step runs twice, and rows that differ between the two are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import BuiltStep
from dispatch.engine.graphs import Work
from dispatch.engine.output import tensors

# ||difference|| / ||eager|| of a row of the step's output: attention's own rounding (2^-6 of bf16, dispatch.gate) goes
# through a model's layers, and comes out a few times larger. A row of another length is off by more.
TOLERANCE = 0.1
TOLERANCE_FP8_KV = 0.3  # kernels differ by 0.04 where some quantise Q and others do not (smoke/results/h200/facts.json)


def disagreement(built: BuiltStep, replay: Work, eager: BuiltStep, buffers: StepBuffers, longest: Sequence[int]) -> str:
    """ "" if the graph's output is that of the eager step for rows up to each of these lengths; else what is wrong."""
    is_fp8 = any(group.spec.kv_dtype == "fp8_e4m3" for group in eager.groups)
    tolerance = TOLERANCE_FP8_KV if is_fp8 else TOLERANCE
    found_wrong = ""
    for length in longest:  # all of them, whatever one shows: the ranks of a model must make the same calls
        lengths = row_lengths(eager, length)
        fill_reserved(eager, buffers.reserved_page)
        expected = _outputs(eager, eager.work, buffers, lengths)
        again = _outputs(eager, eager.work, buffers, lengths)
        found = _outputs(built, replay, buffers, lengths)
        if not found_wrong and (wrong := _differ(found, expected, again, tolerance)):
            found_wrong = f"with a row of length {lengths[0]}: {wrong}"
    return found_wrong


def _outputs(step: BuiltStep, run: Work, buffers: StepBuffers, lengths: Sequence[int]) -> list[torch.Tensor]:
    """What the step returns for these rows, in memory of its own."""
    buffers.reserve(step.bucket, lengths)
    step.plan()
    return [t.clone() for t in tensors(run())]


def row_lengths(step: BuiltStep, longest: int) -> list[int]:
    """The first row nearly of the longest, and short ones of several lengths.

    Rows of different lengths write their new token to different slots of the page: the first to one in its second half
    (and not to its end, so that a kernel that stops at a whole page is off), the others in its first half. Rows of the
    same length write the same.
    """
    half = min(group.spec.page_size for group in step.groups) // 2
    if half < 2:
        return [longest] * step.bucket
    first = max(1, longest // (2 * half) * (2 * half) - half // 2)
    return [first, *(1 + i % half for i in range(step.bucket - 1))]


def fill_reserved(step: BuiltStep, page: int) -> None:
    """Random numbers in the reserved page of every layer that the step has shown."""
    for layer, kv_cache in step.kv_caches.items():
        for i, pages in enumerate(kv_cache):
            random = torch.Generator().manual_seed(2 * layer + i)
            values = torch.randn(pages[page].shape, generator=random)
            pages[page].copy_(values.to(pages.device).to(pages.dtype))


def _differ(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], again: Sequence[torch.Tensor], tolerance: float
) -> str:
    """ "" or what is wrong. Only numbers are compared: of tokens, for one, the best of two near logits may differ."""
    for mine, first, second in zip(found, expected, again, strict=True):
        if not first.is_floating_point():
            continue
        off, size = _distance(mine, first), _distance(first, torch.zeros_like(first))
        # an engine's own output on its reserved page may be anything
        comparable = size.isfinite() & (_distance(second, first) <= tolerance / 2 * size)
        wrong = ~(off <= tolerance * size) & comparable
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            return f"row {row} is off by {float(off[row] / size[row]):.3g}, allowed {tolerance}"
    return ""


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The norm of each row's difference."""
    norms: torch.Tensor = torch.linalg.vector_norm((a.float() - b.float()).reshape(len(a), -1), dim=1)
    return norms
