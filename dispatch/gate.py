"""The gate: candidates' numbers are compared with a float32 reference before they may be timed.

It runs what is timed: the timer's own recordings (on a GPU, captured graphs), over the bench's own buffers. Case by
case all candidates run in turn, so that each also runs on the scratch that the others of its family have used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.phases import Phases
from dispatch.bench.pool import RESERVED_PAGE, Chain, PagedPool, raw_bits
from dispatch.bench.timer import Recording
from dispatch.dtypes import E4M3_MAX, TORCH_DTYPES
from dispatch.errors import one_line
from dispatch.gate_checks import compare, count
from dispatch.gate_inputs import gate_pages, only_visible, position_code, reserved, row_sets
from dispatch.reference import reference_decode
from dispatch.step import StepInputs

LARGE_LOGIT = 40.0  # exp(40) overflows fp16, and without a running maximum, soon float32
REPEATS = 8  # of the padding case, to tell a row that depends on padding from one that does not repeat its own bits


@dataclass(frozen=True, eq=False)
class _Case:
    """What to load into the buffers, and how to check the live rows of the first `layers` outputs."""

    name: str
    q: torch.Tensor
    kv_cache: KVCache
    inputs: StepInputs
    check: Callable[[torch.Tensor], str]
    layers: int = 1


class Gate:
    """The cases for one bucket and requests of up to `longest` tokens, over the buffers that all candidates share.

    Writes to the pool's first pages; `restore` makes them random again.
    """

    def __init__(
        self,
        pool: PagedPool,
        inputs: StepInputs,
        chain: Chain,
        longest: int,
        finite_kv: bool = False,
        phases: Phases | None = None,
    ) -> None:
        """`finite_kv`: what no row may read is large, as EngineTraits says, instead of NaN."""
        self.spec, self.pool, self.inputs, self.chain = pool.spec, pool, inputs, chain
        self.finite_kv, self.phases = finite_kv, phases or Phases()
        self.bucket = len(inputs.lengths_host)
        self.num_pages = gate_pages(self.spec, self.bucket, longest)
        self.sets = row_sets(self.spec, self.bucket, longest)
        self.q = chain.q.clone()
        k, v = (pages[: self.num_pages + 1].clone() for pages in chain.kv_caches[0])
        self.kv = k, v

    def load_first(self) -> None:
        """Set the lengths that a candidate is recorded with: the longest row and others; all change afterwards."""
        self.pool.load(self.inputs, self.sets[0], self.num_pages)

    def check(self, recordings: Mapping[str, Recording]) -> dict[str, str]:
        """What was wrong with each candidate, in a line: the case, row, length and head; "" if nothing was."""
        wrong = dict.fromkeys(recordings, "")
        order = list(recordings)
        cases = self._cases()
        while (case := self._next(cases)) is not None:
            order.reverse()
            for name in order:
                if not wrong[name]:
                    with self.phases("gate: candidates"):
                        wrong[name] = self._run(case, recordings[name])
        if self.bucket > 1:
            pair = self._padding(self.sets[0])
            for name in (name for name in order if not wrong[name]):
                with self.phases("gate: candidates"):
                    wrong[name] = self._run(pair[0], recordings[name]) or self._padding_matters(pair, recordings[name])
        return wrong

    def _padding_matters(self, pair: tuple[_Case, _Case], recording: Recording) -> str:
        """Whether live rows change with what padding rows hold: "" if each gives the same bits with both contents.

        Some kernels (cuDNN's) do not always repeat their own bits, so a difference counts only in rows that repeat
        theirs with either content.
        """
        live = pair[0].inputs.num_live
        outs: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for _ in range(REPEATS):
            for case, seen in zip(pair, outs, strict=True):
                if wrong := self._run(case, recording):
                    return wrong
                seen.append(self.chain.outs[0][:live].clone())
            if torch.equal(outs[0][0], outs[1][0]):
                return ""
        repeats = [torch.stack([(out == seen[0]).flatten(1).all(1) for out in seen]).all(0) for seen in outs]
        changed = (outs[0][0] != outs[1][0]).flatten(1).any(1) & repeats[0] & repeats[1]
        return "padding: live rows change with what the padding rows hold" if bool(changed.any()) else ""

    def _next(self, cases: Iterator[_Case]) -> _Case | None:
        with self.phases("gate: cases"):
            return next(cases, None)

    def restore(self) -> None:
        """Queries as they were, and random pages."""
        self.chain.q.copy_(self.q)
        self.pool.randomise(self.num_pages + 1)

    def _run(self, case: _Case, recording: Recording) -> str:
        self._load(case)
        for whole in self.chain.guarded_outs:
            whole.fill_(float("nan"))
        try:
            recording.run(case.layers)
        except Exception as error:  # whatever a backend raises, it loses itself alone
            return f"{case.name}: {one_line(error)}"
        if changed := self._changed(case):
            return f"{case.name}: {changed} was written to"
        for layer in range(case.layers):
            if wrong := case.check(self.chain.outs[layer][: case.inputs.num_live]):
                return f"{case.name}: {wrong}" + (f" (layer {layer})" if layer else "")
        return ""

    def _changed(self, case: _Case) -> str:
        """What a candidate has written to besides its output."""
        buffers = {
            "q": (self.chain.q, case.q),
            "the lengths": (self.inputs.lengths, case.inputs.lengths),
            "the block table": (self.inputs.block_table, case.inputs.block_table),
        }
        for name, mine, theirs in zip(("K", "V"), self.chain.kv_caches[0], case.kv_cache, strict=True):
            buffers[f"the {name} cache"] = raw_bits(mine[: self.num_pages + 1]), raw_bits(theirs)
        for name, (mine, theirs) in buffers.items():
            if not _same_bits(mine, theirs):
                return name
        for whole in self.chain.guarded_outs:
            if not (whole[0].isnan().all() and whole[-1].isnan().all()):
                return "memory around the output"
        return ""

    def _load(self, case: _Case) -> None:
        self.chain.q.copy_(case.q)
        for cache in self.chain.kv_caches[: case.layers]:
            for mine, theirs in zip(cache, case.kv_cache, strict=True):
                raw_bits(mine)[: self.num_pages + 1].copy_(raw_bits(theirs))
        self.inputs.num_live = case.inputs.num_live
        self.inputs.lengths_host.copy_(case.inputs.lengths_host)
        self.inputs.lengths.copy_(case.inputs.lengths)
        self.inputs.block_table.copy_(case.inputs.block_table)

    def _cases(self) -> Iterator[_Case]:
        """One at a time, since each holds a copy of the pages."""
        layers = len(self.chain.outs)
        yield replace(self._random("random", self.sets[0]), layers=layers)
        for lengths in self.sets[1:]:
            yield self._random("random", lengths)
        for lengths in self.sets:
            yield self._probe(lengths)
        yield self._random("large logits", self.sets[-1], self._large_q())
        yield replace(self._random("random, at the end", self.sets[0]), layers=layers)

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

    def _random(self, name: str, lengths: Sequence[int], q: torch.Tensor | None = None, padding: int = 0) -> _Case:
        """Random data; slots that no row may read hold NaN, or what is large. The last `padding` rows are padding."""
        spec, inputs = self.spec, self._step(lengths, self.bucket - padding)
        q = self.q if q is None else q
        kv = only_visible(spec, self.kv, inputs, self.finite_kv)
        expected = reference_decode(spec, q, kv, inputs, self.chain.sinks)
        return _Case(name, q, kv, inputs, lambda out: compare(spec, out, expected, inputs))

    def _probe(self, lengths: Sequence[int]) -> _Case:
        """q = 0, so that the output is the mean of the V that were read: it counts the keys."""
        spec, inputs = self.spec, self._step(lengths, self.bucket)
        coded, counts = position_code(spec, self.kv[1], inputs)
        counts = counts.repeat_interleave(spec.group_size, dim=1)
        keys = inputs.lengths if spec.sliding_window is None else inputs.lengths.clamp(max=spec.sliding_window)
        visible = keys.float()[:, None, None]
        weight = visible if self.chain.sinks is None else visible + torch.exp(self.chain.sinks.float())[None, :, None]
        kv = only_visible(spec, (self.kv[0], coded), inputs, self.finite_kv)
        scale = weight / spec.v_scale
        check = lambda out: count(out.float() * scale, counts, inputs)  # noqa: E731
        return _Case("uniform probe", torch.zeros_like(self.q), kv, inputs, check)

    def _padding(self, lengths: Sequence[int]) -> tuple[_Case, _Case]:
        """The last rows as padding, and the same with other contents in the page that padding reads."""
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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, where NaN equals itself."""
    if a.is_floating_point():
        width = {2: torch.int16, 4: torch.int32}[a.element_size()]
        a, b = a.view(width), b.view(width)
    return torch.equal(a, b)
