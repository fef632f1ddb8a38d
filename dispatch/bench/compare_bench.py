"""Timing every candidate on snapshots of traffic, with the harness's pages, builds and rounds. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from dispatch.bench import harness
from dispatch.bench.arm import Arm
from dispatch.bench.harness import Bench
from dispatch.bench.rounds import Rounds
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import MeasureError, one_line
from dispatch.gate_inputs import row_sets
from dispatch.samples import TWIN, step_of

# After two rounds, a candidate that took more than twice the default's time in both is not timed there any more.
DROPS = {2: math.log(2.0)}


class CompareBench(Bench):
    """The harness, with a snapshot for each of its cells. What it times has passed the gate when the plan was made."""

    def compare(
        self, bucket: int, candidates: Sequence[str], progress: Callable[[int], None]
    ) -> tuple[NDArray[np.float64], tuple[str, ...]]:
        """Microseconds of a step, [candidate, snapshot, round], and a line for each thing that failed.

        `candidates`: the default first, then its twin. `progress` is told how many samples are done. Raises
        MeasureError if the default cannot be built.
        """
        cells = self.planned[bucket]
        inputs, chain = self.pool.inputs(bucket, self.max_kv), self.pool.chain(bucket)
        arms: list[Arm] = []
        failed: list[str] = []
        for i, name in enumerate(candidates):
            candidate = Candidate.parse(candidates[0] if name == TWIN else name)
            limit = candidate.max_kv or self.max_kv
            self.pool.load(inputs, row_sets(self.spec, bucket, limit)[0])  # captured as the harness captures
            try:
                with self.phases(f"build, compile, capture: {candidate.backend}"):
                    arms.append(
                        Arm(i, name, self.timer.record(self.proving.build(bucket, candidate), inputs, chain), limit)
                    )
            except Exception as error:  # whatever a backend raises, it loses itself alone
                if i < 2:
                    raise MeasureError(f"the default {candidates[0]} at batch {bucket}: {one_line(error)}") from error
                failed.append(f"batch {bucket}: {name}: {one_line(error)}")
        self.pool.load(inputs, cells[0].lengths[0])
        end = monotonic() + harness.WARM_UP_S  # for each bucket: the device was idle while it was built
        while monotonic() < end:
            arms[0].recording.run(len(self.pool.kv_caches))
        hidden = self.traits.plan_hidden
        rounds = Rounds(self.pool, self.timer, inputs, arms, len(candidates), cells, hidden, self.phases, DROPS)
        rounds.run(math.inf, progress)
        for e in rounds.exclusions:
            if e.cell is not None and e.reason is Reason.FAILED:
                cell = cells[e.cell].cell
                failed.append(f"batch {bucket}, {cell.profile}, mean KV {cell.mean_kv}: {e.candidate}: {e.detail}")
        return step_of(rounds.times, self.spec.num_layers), tuple(failed)
