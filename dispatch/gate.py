"""The gate: candidates' numbers are compared with a float32 reference before they may be timed.

It runs what is timed: the timer's own recordings (on a GPU, captured graphs), over the bench's own buffers. Case by
case (but for padding) all candidates run in turn, so that each also runs on the scratch that the others of its family
have used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dispatch.bench.phases import Phases
from dispatch.bench.pool import Chain, PagedPool, raw_bits
from dispatch.bench.timer import Recording
from dispatch.errors import one_line
from dispatch.gate_cases import Case, Cases
from dispatch.gate_inputs import MOST_TOKENS
from dispatch.step import StepInputs

AROUND = "memory around the output"
_WORD = torch.int64  # what pages are compared in: a quarter of the results of 16 bits each
REPEATS = 8  # of the padding case, to tell a row that depends on padding from one that does not repeat its own bits


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
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """`finite_kv`: what no row may read is large, as EngineTraits says, instead of NaN. `most_tokens`: of a batch
        beside its longest row."""
        self.spec, self.pool, self.inputs, self.chain = pool.spec, pool, inputs, chain
        self.phases = phases or Phases()
        self.cases = Cases(pool, inputs, chain, longest, finite_kv, most_tokens)
        self.num_pages = self.cases.num_pages
        self._backwards = False

    def load_first(self) -> None:
        """Set the lengths that a candidate is recorded with: the longest row and others; all change afterwards."""
        self.pool.load(self.inputs, self.cases.sets[0], self.num_pages)

    def check(self, recordings: Mapping[str, Recording]) -> dict[str, str]:
        """What was wrong with each candidate, in a line: the case, row, length and head; "" if nothing was.

        Full batches, then padded ones, then a full one again: whatever a candidate remembers shows there.
        """
        wrong = dict.fromkeys(recordings, "")
        cases = self.cases.each()
        while (case := self._next(cases)) is not None:
            self._run_all(case, recordings, wrong)
        if len(self.inputs.lengths_host) > 1:
            pair = self.cases.padding()
            for name in (name for name in recordings if not wrong[name]):
                with self.phases("gate: candidates"):
                    wrong[name] = self._padding_matters(pair, recordings[name])
        self._run_all(self.cases.full("random, at the end"), recordings, wrong)
        return wrong

    def _run_all(self, case: Case, recordings: Mapping[str, Recording], wrong: dict[str, str]) -> None:
        """The candidates in turn, in the other direction each time, as far as nothing was wrong with them so far."""
        self._backwards = not self._backwards
        for name in sorted(recordings, reverse=self._backwards):
            if not wrong[name]:
                with self.phases("gate: candidates"):
                    wrong[name] = self._run(case, recordings[name])

    def _padding_matters(self, pair: tuple[Case, Case], recording: Recording) -> str:
        """What is wrong with a padded batch, or whether live rows change with what padding rows hold.

        Some kernels (cuDNN's) do not always repeat their own bits, so a difference counts only in rows that repeat
        theirs with either content.
        """
        live = pair[0].inputs.num_live
        outs: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        while len(outs[0]) < REPEATS:
            for case, seen in zip(pair, outs, strict=True):
                if wrong := self._run(case, recording):
                    return wrong
                seen.append(self.chain.outs[0][:live].clone())
            if len(outs[0]) == 1 and torch.equal(outs[0][0], outs[1][0]):
                return ""
        repeats = [torch.stack([(out == seen[0]).flatten(1).all(1) for out in seen]).all(0) for seen in outs]
        changed = (outs[0][0] != outs[1][0]).flatten(1).any(1) & repeats[0] & repeats[1]
        return "padding: live rows change with what the padding rows hold" if bool(changed.any()) else ""

    def _next(self, cases: Iterator[Case]) -> Case | None:
        with self.phases("gate: cases"):
            return next(cases, None)

    def restore(self) -> None:
        """Queries as they were, and random pages."""
        self.chain.q.copy_(self.cases.q)
        self.pool.randomise(self.num_pages + 1)

    def _run(self, case: Case, recording: Recording) -> str:
        self._load(case)
        guarded = self.chain.guarded_outs[: case.layers]
        guarded.fill_(float("nan"))
        try:
            recording.run(case.layers)
        except Exception as error:  # whatever a backend raises, it loses itself alone
            return f"{case.name}: {one_line(error)}"
        intact = self._intact(case) | {AROUND: guarded[:, :: guarded.shape[1] - 1].isnan().all()}  # first and last row
        errors = case.check(guarded[:, 1 : 1 + case.inputs.num_live])
        *each_intact, within = torch.stack([*intact.values(), errors.within]).tolist()  # the one wait for the device
        for name, is_intact in zip(intact, each_intact, strict=True):
            if not is_intact:
                return f"{case.name}: {name} was written to"
        return "" if within else f"{case.name}: {errors.worst()}"

    def _intact(self, case: Case) -> dict[str, torch.Tensor]:
        """The inputs, and whether they are as they were: bool [], on the device."""
        buffers = {
            "q": (self.chain.q, case.q),
            "the lengths": (self.inputs.lengths, case.inputs.lengths),
            "the block table": (self.inputs.block_table, case.inputs.block_table),
        }
        for name, mine, theirs in zip(("K", "V"), self.chain.kv_caches[0], case.kv_cache, strict=True):
            buffers[f"the {name} cache"] = raw_bits(mine[: self.num_pages + 1]), raw_bits(theirs)
        return {name: _same_bits(mine, theirs) for name, (mine, theirs) in buffers.items()}

    def _load(self, case: Case) -> None:
        self.chain.q.copy_(case.q)
        for cache in self.chain.kv_caches[: case.layers]:
            for mine, theirs in zip(cache, case.kv_cache, strict=True):
                raw_bits(mine)[: self.num_pages + 1].copy_(raw_bits(theirs))
        self.inputs.num_live = case.inputs.num_live
        self.inputs.lengths_host.copy_(case.inputs.lengths_host)
        self.inputs.lengths.copy_(case.inputs.lengths)
        self.inputs.block_table.copy_(case.inputs.block_table)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether all are equal, where NaN equals itself: bool [], on the device."""
    if all(map(_is_words, (a, b))):
        a, b = (tensor.reshape(-1).view(_WORD) for tensor in (a, b))
    elif a.is_floating_point():
        width = {2: torch.int16, 4: torch.int32}[a.element_size()]
        a, b = a.view(width), b.view(width)
    return (a == b).all()


def _is_words(tensor: torch.Tensor) -> bool:
    """Whether its memory is a row of whole words."""
    ends = tensor.storage_offset(), tensor.numel()
    return tensor.is_contiguous() and all(end * tensor.element_size() % _WORD.itemsize == 0 for end in ends)
