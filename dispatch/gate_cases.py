"""The gate's cases: what candidates are run on, and how the result is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, Chain, PagedPool
from dispatch.dtypes import E4M3_MAX, TORCH_DTYPES
from dispatch.gate_checks import Errors, compare, count
from dispatch.gate_inputs import gate_pages, only_visible, position_code, reserved, row_sets
from dispatch.reference import reference_decode
from dispatch.step import StepInputs

LARGE_LOGIT = 40.0  # exp(40) overflows fp16, and without a running maximum, soon float32

SOME_LAYERS = 2  # in one of the cases, so that of recordings of one, of some and of all layers each runs


@dataclass(frozen=True, eq=False)
class Case:
    """What to load into the buffers, and how to check the live rows of the first `layers` outputs.

    `check` takes [layers, row, head, head_dim_vo].
    """

    name: str
    q: torch.Tensor
    kv_cache: KVCache
    inputs: StepInputs
    check: Callable[[torch.Tensor], Errors]
    layers: int = 1


class Cases:
    """The cases for one bucket and requests of up to `longest` tokens, over the first `num_pages` of a pool.

    `sets`: the rows' lengths, one set after the other. `q`: the chain's, as they were.
    """

    def __init__(
        self, pool: PagedPool, inputs: StepInputs, chain: Chain, longest: int, finite_kv: bool, most_tokens: int
    ) -> None:
        self.spec, self.pool, self.inputs, self.finite_kv = pool.spec, pool, inputs, finite_kv
        self.sinks, self.num_layers = chain.sinks, len(chain.outs)
        self.bucket = len(inputs.lengths_host)
        self.num_pages = gate_pages(self.spec, self.bucket, longest, most_tokens)
        self.sets = row_sets(self.spec, self.bucket, longest, most_tokens)
        self.q = chain.q.clone()
        k, v = (pages[: self.num_pages + 1].clone() for pages in chain.kv_caches[0])
        self.kv = k, v

    def full(self, name: str) -> Case:
        """Random data in every layer."""
        return replace(self._random(name, self.sets[0]), layers=self.num_layers)

    def each(self) -> Iterator[Case]:
        """Full batches, one at a time, since each holds a copy of the pages."""
        yield self.full("random")
        for lengths in self.sets[1:]:
            yield self._random("random", lengths)
        for lengths in self.sets:
            yield self._probe(lengths)
        large = self._random("large logits", self.sets[-1], self._large_q())
        yield replace(large, layers=min(SOME_LAYERS, self.num_layers))

    def _step(self, lengths: Sequence[int], num_live: int) -> StepInputs:
        inputs = replace(
            self.inputs,
            lengths_host=self.inputs.lengths_host.clone(),
            lengths=self.inputs.lengths.clone(),
            block_table=self.inputs.block_table.clone(),
        )
        self.pool.load(inputs, lengths, self.num_pages)
        inputs.num_live = num_live
        inputs.block_table[num_live:] = RESERVED_PAGE
        return inputs

    def _random(self, name: str, lengths: Sequence[int], q: torch.Tensor | None = None, padding: int = 0) -> Case:
        """Random data; slots that no row may read hold NaN, or what is large. The last `padding` rows are padding."""
        spec, inputs = self.spec, self._step(lengths, self.bucket - padding)
        q = self.q if q is None else q
        kv = only_visible(spec, self.kv, inputs, self.finite_kv)
        expected = reference_decode(spec, q, kv, inputs, self.sinks)
        return Case(name, q, kv, inputs, lambda out: compare(spec, out, expected, inputs))

    def _probe(self, lengths: Sequence[int]) -> Case:
        """q = 0, so that the output is the mean of the V that were read: it counts the keys."""
        spec, inputs = self.spec, self._step(lengths, self.bucket)
        coded, counts = position_code(spec, self.kv[1], inputs)
        counts = counts.repeat_interleave(spec.group_size, dim=1)
        keys = inputs.lengths if spec.sliding_window is None else inputs.lengths.clamp(max=spec.sliding_window)
        visible = keys.float()[:, None, None]
        weight = visible if self.sinks is None else visible + torch.exp(self.sinks.float())[None, :, None]
        kv = only_visible(spec, (self.kv[0], coded), inputs, self.finite_kv)
        scale = weight / spec.v_scale
        check = lambda out: count(out.float() * scale, counts, inputs)  # noqa: E731
        return Case("uniform probe", torch.zeros_like(self.q), kv, inputs, check)

    def padding(self) -> tuple[Case, Case]:
        """The last rows as padding, and the same with other contents in the page that padding reads."""
        lengths = self.sets[0]
        padding = max(1, self.bucket // 4)
        case = self._random("padding", [*lengths[:-padding], *[1] * padding], padding=padding)
        k, v = case.kv_cache
        q = case.q.clone()
        q[-padding:] = 5.0
        return case, replace(case, q=q, kv_cache=(reserved(k, -3.0), reserved(v, 7.0)))

    def _large_q(self) -> torch.Tensor:
        """q for logits of about 40, or of five times the soft cap.

        Over an fp8 cache, rounded to what e4m3 holds: a kernel may quantise Q, which at such logits would cost more
        than what this case is to find.
        """
        spec = self.spec
        wanted = LARGE_LOGIT if spec.logits_soft_cap is None else 5 * spec.logits_soft_cap
        typical = spec.scale * spec.k_scale * math.sqrt(spec.head_dim_qk)  # of q k^T of unit normals
        q = self.q * (wanted / (4 * typical))  # the largest of a few thousand normals is about 4
        if spec.kv_dtype == "fp8_e4m3":
            q = q.clamp(-E4M3_MAX, E4M3_MAX).to(TORCH_DTYPES[spec.kv_dtype]).to(q.dtype)
        return q
