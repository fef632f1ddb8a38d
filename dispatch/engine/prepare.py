"""prepare_fmha_impl: the plan's implementation for a step, or the default."""

from __future__ import annotations

from bisect import bisect_left

import torch

from dispatch import _core
from dispatch._core import BackendPlan
from dispatch.backends.base import DecodeImpl
from dispatch.candidate import Candidate
from dispatch.engine.counts import Counts
from dispatch.step import StepInputs

OUTSIDE = "lengths outside what was measured"
ABOVE_BUCKETS = "a batch above the largest bucket"
NO_ROWS = "a batch without live rows"


class BuiltImpls(Counts):
    """What an engine has built for its buckets, and how often each step found what it looked for."""

    def __init__(self, default: Candidate) -> None:
        """`default`: what the engine's default implementation is; a box that it won is a hit."""
        super().__init__()
        self.default = default
        self._built: dict[tuple[int, Candidate], DecodeImpl] = {}

    def add(self, bucket: int, candidate: Candidate, impl: DecodeImpl) -> None:
        """Have `impl` serve the candidate in a bucket."""
        self._built[bucket, candidate] = impl

    def get(self, bucket: int, candidate: Candidate) -> DecodeImpl | None:
        """What was built, or None."""
        return self._built.get((bucket, candidate))


def batch_of(lengths_host: torch.Tensor) -> tuple[int, int, int, int]:
    """What a plan is asked: live rows, their mean KV length (rounded up), the skew; and the longest. int32 [live]."""
    return _core.batch_of(lengths_host.numpy())


def prepare_fmha_impl(inputs: StepInputs, plan: BackendPlan, impls: BuiltImpls, default: DecodeImpl) -> DecodeImpl:
    """The implementation for this step: the plan's where it has an entry and the engine has built it, else `default`.

    Reads inputs.lengths_host[:num_live] on the host; waits for no device. Never raises because of the plan's
    contents. `plan` is frozen.
    """
    live = inputs.num_live
    if live < 1:
        impls.missed(0, NO_ROWS)
        return default
    entry = plan.lookup(*batch_of(inputs.lengths_host[:live])[:3])
    if entry is None:
        buckets = plan.buckets
        place = bisect_left(buckets, live)
        impls.missed(*((buckets[place], OUTSIDE) if place < len(buckets) else (0, ABOVE_BUCKETS)))
        return default
    candidate = Candidate(entry.backend, entry.tactic)
    impl = default if candidate == impls.default else impls.get(entry.bucket, candidate)
    if impl is None:
        impls.missed(entry.bucket, f"{candidate} is planned and not available")
        return default
    impls.hit(entry.bucket, str(candidate))
    return impl
