"""Decode steps of one layer group: which kernel serves the next one, and the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from dispatch._core import BackendPlan, batch_of
from dispatch.backends import DecodeImpl, KVCache
from dispatch.candidate import Candidate
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.engine.serving import ONE_STEP_S
from dispatch.errors import one_line
from dispatch.plugins.vllm import log
from dispatch.plugins.vllm.layers import scales_of
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs


def kv_pages(kv_cache: torch.Tensor, spec: AttentionSpec) -> KVCache:
    """K and V pages as the spec lays them out, out of vLLM's [blocks, kv_heads, block, 2 x head_dim]."""
    pages = kv_cache.transpose(1, 2) if spec.kv_layout == "NHD" else kv_cache
    if spec.kv_dtype == "fp8_e4m3":
        pages = pages.view(torch.float8_e4m3fn)
    k, v = pages[..., : spec.head_dim_qk], pages[..., spec.head_dim_qk :]
    return canonicalize_singleton_dim_strides(k), canonicalize_singleton_dim_strides(v)


class DecodeStep:
    """A kernel, built for a bucket, in the place of FlashAttention in the layers of a group.

    A captured graph points at `inputs`: at vLLM's own block table, and at lengths that are set at the first layer: rows
    that are padding have length 0 in vLLM's, and 1 for our kernels.
    """

    def __init__(self, impl: DecodeImpl, spec: AttentionSpec, bucket: int) -> None:
        self.impl, self.spec, self.begun = impl, spec, False
        self.lengths_host = torch.ones(bucket, dtype=torch.int32)
        self.lengths_written: NDArray[np.int32] = self.lengths_host.numpy()
        self.inputs: StepInputs | None = None

    def prepare(self, metadata: Any, lengths: NDArray[np.int32]) -> None:
        """Before a replay, or a capture. `metadata`: vLLM's, of the whole bucket. `lengths`: int32 [live].

        Raises what the kernel's plan() raises.
        """
        live = len(lengths)
        self.lengths_written[:live], self.lengths_written[live:] = lengths, 1
        if self.inputs is None:
            self.given = metadata.seq_lens
            inner = torch.ones_like(self.given)
            self.inputs = StepInputs(live, self.lengths_host, inner, metadata.block_table_tensor)
        self.inputs.num_live, self.begun = live, False
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """A layer's attention; what comes once a step comes before the first layer's."""
        assert self.inputs is not None
        if not self.begun:
            self.begun = True
            torch.clamp_min(self.given, 1, out=self.inputs.lengths)
            self.impl.begin_step(self.inputs)
        self.impl.forward(q, kv_pages(kv_cache, self.spec), out)


@dataclass
class Decoder:
    """Of one layer group. `steps`: by bucket and candidate, the default's not among them.

    `ranks`: those that must serve a step alike. `layers`: those over an fp8 cache, whose scales are in the kernels.
    `chosen`: what serves the step that was prepared last; None: the default. `schedule`: computes what was left out of
    that step's metadata, as only the default reads it. Until it `serves`, graphs are captured: with what is `forced`.
    """

    table: BackendPlan
    default: Candidate
    steps: dict[tuple[int, Candidate], DecodeStep]
    ranks: Ranks = ALONE
    layers: Sequence[Any] = ()
    chosen: Candidate | None = None
    forced: Candidate | None = None
    serves: bool = False
    schedule: Callable[[], Any] | None = None

    def serve(self, captured: Iterable[tuple[int, Candidate | None]]) -> None:
        """From now on, with what graphs were captured of."""
        kept = set(captured)
        self.steps = {key: step for key, step in self.steps.items() if key in kept}
        self.serves = True

    def step(self, common_prefix_len: int, metadata: Any) -> DecodeStep | None:
        """What attends in the place of FlashAttention in the step of this CommonAttentionMetadata, or None."""
        self.chosen = self.schedule = None
        is_decode = metadata.max_query_len == 1 and metadata.num_actual_tokens == metadata.num_reqs
        if not is_decode or common_prefix_len or metadata.causal is not True:
            return None
        bucket = metadata.num_reqs
        if self.serves:
            lengths = metadata.seq_lens_cpu_upper_bound.numpy()[:bucket]
            lengths = lengths[: np.count_nonzero(lengths)]  # padding, of length 0, lies behind the live rows
            candidate = self._planned(bucket, lengths)
        else:
            lengths, candidate = np.ones(bucket, dtype=np.int32), self.forced
        if candidate is None or (bucket, candidate) not in self.steps:
            return None
        step = self.steps[bucket, candidate]
        if self._rescaled(step.spec):
            return None
        try:
            step.prepare(metadata, lengths)
        except Exception as error:
            if not self.serves:
                raise
            self._leave_out(bucket, candidate, error)
            return None
        self.chosen = candidate
        return step

    def _rescaled(self, spec: AttentionSpec) -> bool:
        """Whether weights were reloaded with other scales than kernels were built with: then these serve no more."""
        built = (1.0, spec.k_scale, spec.v_scale)
        if all(scales_of(layer) == built for layer in self.layers):
            return False
        self.steps.clear()
        log.warning("decode-dispatch: the default serves every step: weights were reloaded with other scales")
        return True

    def _leave_out(self, bucket: int, candidate: Candidate, error: Exception) -> None:
        """A kernel that cannot plan is not used again, and the default serves; it has launched nothing yet."""
        # What plan() refuses, it mostly refuses on all ranks alike, in this same step: they meet here, and in no other.
        # One rank with another graph would be wrong: an all-reduce may read buffers of the graphs captured with it.
        self.ranks.share(f"bucket {bucket}: {candidate} could not plan", None, ONE_STEP_S)
        del self.steps[bucket, candidate]
        log.warning("decode-dispatch: bucket %d keeps the default: %s: %s", bucket, candidate, one_line(error))

    def _planned(self, bucket: int, lengths: NDArray[np.int32]) -> Candidate | None:
        if not len(lengths):
            return None
        entry = self.table.lookup(*batch_of(lengths)[:3])
        if entry is None or entry.bucket != bucket:
            return None
        return Candidate(entry.backend, entry.tactic)  # the default is not among the steps
