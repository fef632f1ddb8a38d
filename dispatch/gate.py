"""The gate: a candidate's numbers are compared with a float32 reference before it may be timed.

It runs what is timed: the timer's own recording (on a GPU, the captured graph), over the bench's own buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, Chain, PagedPool, raw_bits
from dispatch.bench.timer import Recording
from dispatch.gate_checks import compare, count
from dispatch.gate_inputs import first_visible, gate_pages, only_visible, row_lengths
from dispatch.reference import reference_decode
from dispatch.step import StepInputs

LARGE_LOGIT = 40.0  # exp(40) overflows fp16, and without a running maximum, soon float32


@dataclass(frozen=True, eq=False)
class _Case:
    """What to load into the buffers, and how to check the live rows of the output."""

    name: str
    q: torch.Tensor
    kv_cache: KVCache
    inputs: StepInputs
    check: Callable[[torch.Tensor], str]


class Gate:
    """The cases for one bucket, made once for all of its candidates, which share `inputs` and `chain`.

    Only the first layer's cache is written to; `restore` brings back what was there.
    """

    def __init__(self, pool: PagedPool, inputs: StepInputs, chain: Chain, longest: int) -> None:
        self.spec, self.pool, self.inputs, self.chain = pool.spec, pool, inputs, chain
        self.bucket = len(inputs.lengths_host)
        self.num_pages = gate_pages(self.spec, self.bucket, longest)
        self.rng = np.random.default_rng(0)
        self.q = chain.q.clone()
        k, v = (pages[: self.num_pages + 1].clone() for pages in chain.kv_caches[0])
        self.kv = k, v
        lengths = row_lengths(self.spec, self.bucket, longest)
        first, turned = lengths["first"], lengths["turned"]
        self.cases = [
            self._random("random", first),
            self._probe(first),
            self._probe(turned),
            self._probe(lengths["short"]),
            self._random("large logits", turned, self._large_logit_scale()),
        ]
        if self.bucket > 1:
            self.cases += self._padding(first)
        self.cases.append(replace(self.cases[0], name="random, run again"))
        self._load(self.cases[0])

    def check(self, recording: Recording) -> str:
        """ "" if every case's numbers are right; otherwise which case, row, length and head were not, in a line."""
        padded: list[torch.Tensor] = []
        out = self.chain.outs[0]
        for case in self.cases:
            self._load(case)
            out.fill_(float("nan"))
            recording.run()
            live = out[: case.inputs.num_live]
            wrong = case.check(live)
            if wrong:
                return f"{case.name}: {wrong}"
            if case.inputs.num_live < self.bucket:
                padded.append(live.clone())
        if padded and not torch.equal(padded[0], padded[1]):
            return "padding: live rows change with what the padding rows hold"
        return ""

    def restore(self) -> None:
        """Put back the bench's own queries and pages."""
        self._write(self.q, self.kv)

    def _load(self, case: _Case) -> None:
        self._write(case.q, case.kv_cache)
        self.inputs.lengths_host.copy_(case.inputs.lengths_host)
        self.inputs.lengths.copy_(case.inputs.lengths)
        self.inputs.block_table.copy_(case.inputs.block_table)

    def _write(self, q: torch.Tensor, kv_cache: KVCache) -> None:
        self.chain.q.copy_(q)
        for mine, theirs in zip(self.chain.kv_caches[0], kv_cache, strict=True):
            raw_bits(mine)[: self.num_pages + 1].copy_(raw_bits(theirs))

    def _step(self, lengths: Sequence[int], num_live: int) -> StepInputs:
        inputs = replace(
            self.inputs,
            num_live=num_live,
            lengths_host=self.inputs.lengths_host.clone(),
            lengths=self.inputs.lengths.clone(),
            block_table=self.inputs.block_table.clone(),
        )
        self.pool.load(inputs, lengths, self.rng, self.num_pages)
        inputs.block_table[num_live:] = RESERVED_PAGE
        return inputs

    def _random(self, name: str, lengths: Sequence[int], q_scale: float = 1.0, padding: int = 0) -> _Case:
        """Random data; slots that no row may read hold NaN. The last `padding` rows are padding."""
        inputs = self._step(lengths, self.bucket - padding)
        q = self.q * q_scale
        kv = only_visible(self.spec, self.kv, inputs)
        expected = reference_decode(self.spec, q, kv, inputs, self.chain.sinks)
        return _Case(name, q, kv, inputs, lambda out: compare(self.spec, out, expected, inputs))

    def _probe(self, lengths: Sequence[int]) -> _Case:
        """q = 0, and V a one at a place that codes its position, row and head: the output counts the keys read."""
        spec, inputs = self.spec, self._step(lengths, self.bucket)
        k, v = (pages.clone() for pages in self.kv)
        counts = torch.zeros(self.bucket, spec.num_kv_heads, spec.head_dim_vo)
        for row, length in enumerate(inputs.lengths_host.tolist()):
            tokens = torch.arange(length)
            page, slot = inputs.block_table[row].cpu().long()[tokens // spec.page_size], tokens % spec.page_size
            for head in range(spec.num_kv_heads):
                place = (tokens + 7 * head + row) % spec.head_dim_vo
                code = torch.nn.functional.one_hot(place, spec.head_dim_vo)
                counts[row, head] = code[first_visible(spec, length) :].sum(dim=0)
                at = (page, slot, head) if spec.kv_layout == "NHD" else (page, head, slot)
                raw_bits(v)[at] = raw_bits(code.to(v.dtype)).to(v.device)
        counts = counts.repeat_interleave(spec.group_size, dim=1)
        weight = counts.sum(dim=-1, keepdim=True)
        if self.chain.sinks is not None:
            weight = weight + torch.exp(self.chain.sinks.float().cpu())[None, :, None]

        def check(out: torch.Tensor) -> str:
            return count(out.float().cpu() * weight / spec.v_scale, counts, inputs)

        kv = only_visible(spec, (k, v), inputs)
        return _Case("uniform probe", torch.zeros_like(self.q), kv, inputs, check)

    def _padding(self, lengths: Sequence[int]) -> list[_Case]:
        """The last rows as padding, and the same with other contents in the page that padding reads."""
        padding = max(1, self.bucket // 4)
        case = self._random("padding", [*lengths[:-padding], *[1] * padding], padding=padding)
        k, v = (pages.clone() for pages in case.kv_cache)
        for pages, value in ((k, -3.0), (v, 7.0)):
            raw_bits(pages)[RESERVED_PAGE] = raw_bits(torch.full_like(self.q[0, 0, :1], value).to(pages.dtype))
        q = case.q.clone()
        q[-padding:] = 5.0
        return [case, replace(case, q=q, kv_cache=(k, v))]

    def _large_logit_scale(self) -> float:
        """What to multiply q by for logits of about 40, or of five times the soft cap."""
        spec = self.spec
        wanted = LARGE_LOGIT if spec.logits_soft_cap is None else 5 * spec.logits_soft_cap
        typical = spec.scale * spec.k_scale * math.sqrt(spec.head_dim_qk)  # of q k^T of unit normals
        return wanted / (4 * typical)  # the largest of a few thousand normals is about 4
