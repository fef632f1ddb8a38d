"""Proving candidates: build, record, and let the gate check the numbers. In the engine's process, and in a child."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import monotonic

from dispatch.backends import DecodeImpl, Registry
from dispatch.bench.phases import Phases
from dispatch.bench.pool import Chain, PagedPool
from dispatch.bench.timer import Recording, Timer
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import one_line
from dispatch.gate import Gate
from dispatch.gate_inputs import MOST_TOKENS
from dispatch.samples import Exclusion
from dispatch.step import StepInputs
from dispatch.workspace import Workspaces

GATE_COPIES = 4  # of its pages, that the gate holds at a time

Stage = Callable[[Candidate, str], AbstractContextManager[None]]
"""Entered around what a candidate does: "build", then "capture", with its first run."""


class Proving:
    """What candidates are proven with: pages, scratch, and the timer whose recordings are checked.

    `max_kv`: the longest served, for which everything is built. `most_tokens`: of a batch beside its longest row.
    """

    def __init__(
        self,
        pool: PagedPool,
        workspaces: Workspaces,
        registry: Registry,
        timer: Timer,
        max_kv: int,
        finite_kv: bool,
        stage: Stage,
        phases: Phases | None = None,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self.pool, self.workspaces, self.registry, self.timer = pool, workspaces, registry, timer
        self.max_kv, self.finite_kv, self.stage = max_kv, finite_kv, stage
        self.phases, self.most_tokens = phases or Phases(), most_tokens

    def prove(
        self,
        candidates: Mapping[str, Candidate],
        inputs: StepInputs,
        chain: Chain,
        longest: int,
        deadline: float = float("inf"),
    ) -> tuple[dict[str, Recording], list[Exclusion]]:
        """The recordings of those whose numbers are right on rows of up to `longest` tokens, and what was wrong with
        the others.

        Nothing is proven where the deadline, on the monotonic clock, passes meanwhile: compiling may take minutes.
        """
        proven: dict[str, Recording] = {}
        exclusions: list[Exclusion] = []
        limits = {name: min(c.max_kv or self.max_kv, longest) for name, c in candidates.items()}
        for limit in dict.fromkeys(limits.values()):
            with self.phases("gate: cases"):
                gate = Gate(self.pool, inputs, chain, limit, self.finite_kv, self.phases, self.most_tokens)
            ready: dict[str, Recording] = {}
            for name in (name for name, its in limits.items() if its == limit):
                if monotonic() > deadline:
                    return {}, exclusions
                gate.load_first()
                try:
                    ready[name] = self._record(candidates[name], inputs, chain)
                except Exception as error:  # whatever a backend raises, it loses itself alone
                    exclusions.append(Exclusion(name, Reason.FAILED, one_line(error)))
            wrong = gate.check(ready)
            gate.restore()
            exclusions += [Exclusion(name, Reason.GATE_FAILED, why) for name, why in wrong.items() if why]
            proven |= {name: recording for name, recording in ready.items() if not wrong[name]}
        return proven, exclusions

    def build(self, bucket: int, candidate: Candidate) -> DecodeImpl:
        """A candidate for a bucket, over the scratch of its family. Raises whatever it raises."""
        backend = self.registry.get(candidate.backend)
        scratch = self.workspaces.get(backend.family)
        return backend.build(self.pool.spec, bucket, candidate.max_kv or self.max_kv, scratch, candidate.knobs)

    def _record(self, candidate: Candidate, inputs: StepInputs, chain: Chain) -> Recording:
        with self.stage(candidate, "build"):
            impl = self.build(len(inputs.lengths_host), candidate)
        with self.stage(candidate, "capture"):
            return self.timer.record(impl, inputs, chain)
