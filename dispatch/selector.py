"""select_stable: samples in, decision out. Pure; needs numpy alone.

Every comparison is r = log(t candidate) - log(t default) of the same round, so that drift cancels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dispatch.candidate import Candidate
from dispatch.decision import Decision, Reason, Rule, Verdict
from dispatch.samples import TWIN, BucketSamples, Exclusion, log_of_times

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """A bucket's samples, prepared once for the many boxes that a partition tries.

    `log_step` is [candidate, cell, round]; row 0 is the default. `priority` lists backends, best first.
    """

    candidates: tuple[str, ...]
    log_step: Floats
    priority: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()

    @classmethod
    def of(cls, samples: BucketSamples, num_layers: int, priority: Sequence[str]) -> Evidence:
        """From raw samples."""
        log_step = log_of_times(samples.step_us(num_layers))
        return cls(samples.candidates, log_step, tuple(priority), samples.exclusions)

    @cached_property
    def r(self) -> Floats:
        """Paired log ratio to the default, [candidate, cell, round]."""
        ratio: Floats = self.log_step - self.log_step[0]
        return ratio

    @cached_property
    def rounds(self) -> NDArray[np.int64]:
        """Valid rounds, [candidate, cell]."""
        valid: NDArray[np.int64] = np.isfinite(self.r).sum(axis=2)
        return valid

    @cached_property
    def medians(self) -> Floats:
        """Median over rounds of r, [candidate, cell]; NaN without a valid round."""
        return median_of_rounds(self.r)

    @cached_property
    def aa_spread(self) -> Floats:
        """|median r| of the default's twin in each cell; where it was not measured, nothing can clear the noise."""
        if TWIN not in self.candidates:
            return np.full(self.r.shape[1], np.inf)
        spread: Floats = np.abs(np.nan_to_num(self.medians[self.candidates.index(TWIN)], nan=np.inf))
        return spread

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Position in priority order of each candidate; tactics in the order in which the backend lists them."""
        known = {name: i for i, name in enumerate(self.priority)}
        order = sorted(
            self.candidates, key=lambda c: known.get(Candidate.parse(c).backend, len(known)) if c != TWIN else 0
        )
        return {name: i for i, name in enumerate(order)}

    @cached_property
    def halves(self) -> tuple[Evidence, Evidence]:
        """The same with the even rounds alone, and with the odd ones."""
        even, odd = (replace(self, log_step=self.log_step[:, :, first::2]) for first in (0, 1))
        return even, odd

    def delta(self, cells: Sequence[int], rule: Rule) -> float:
        """The gain that a decision over these cells must clear."""
        return max(rule.threshold, 2 * float(self.aa_spread[list(cells)].max()))


def median_of_rounds(r: Floats) -> Floats:
    """Median over the last axis without the NaN; NaN where nothing is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "All-NaN slice": that is a value here
        median: Floats = np.nanmedian(r, axis=-1)
    return median


def select_stable(evidence: Evidence, cells: Sequence[int], rule: Rule, incumbent: str | None = None) -> Decision:
    """The candidate that is stably fastest over `cells` (indices), or the default with the reason.

    Rules 1 to 5 of the design: enough rounds; faster than the default by delta on average, in no cell slower
    and in most rounds faster; the fastest wins, near ties by priority; an incumbent stays unless beaten by delta.
    """
    cells = list(cells)
    delta = evidence.delta(cells, rule)
    names = [name for name in evidence.candidates[1:] if name != TWIN]
    verdicts = {name: _judge(evidence, name, cells, rule, delta) for name in names}
    eligible = [v for v in verdicts.values() if v.reason is Reason.BEATEN]
    if incumbent == evidence.candidates[0]:  # a stored default yields to a clear gain only: see `over_stored`
        eligible = [v for v in eligible if _mean(v) <= -over_stored(delta, rule)]
    held = verdicts.get(incumbent or "")
    if held is not None and still_good(held, evidence, cells):
        challengers = [v for v in eligible if _beats(evidence, v.candidate, held.candidate, cells, delta)]
        if not challengers:
            for v in eligible:
                verdicts[v.candidate] = replace(v, detail="does not beat the stored choice by delta")
            return _decision(held.candidate, Reason.INCUMBENT, verdicts, evidence, cells, delta)
        eligible = challengers
    if not eligible:
        closest = min(verdicts.values(), key=lambda v: np.inf if v.mean_r is None else v.mean_r, default=None)
        reason = Reason.NOT_MEASURED if closest is None else closest.reason
        return _decision(evidence.candidates[0], reason, verdicts, evidence, cells, delta)
    fastest = min(_mean(v) for v in eligible)
    near = [v for v in eligible if _mean(v) <= fastest + rule.cluster_margin]
    for v in near:
        verdicts[v.candidate] = replace(v, reason=Reason.LOWER_PRIORITY)
    chosen = min(near, key=lambda v: evidence.ranks[v.candidate])
    reason = Reason.FASTEST if _mean(chosen) == fastest else Reason.PRIORITY
    return _decision(chosen.candidate, reason, verdicts, evidence, cells, delta)


def over_stored(delta: float, rule: Rule) -> float:
    """The gain that a stored default, or a stored partition, yields to.

    More than delta: a candidate whose true gain is delta passes it in half of the runs, and would flip.
    """
    return delta + rule.cluster_margin


def _judge(evidence: Evidence, name: str, cells: list[int], rule: Rule, delta: float) -> Verdict:
    """Rules 1 and 2 for one candidate. BEATEN: eligible, until it is chosen."""
    i = evidence.candidates.index(name)
    for e in evidence.exclusions:
        if e.candidate == name and (e.cell is None or e.cell in cells):
            return Verdict(name, e.reason, detail=e.detail)
    fewest = int(evidence.rounds[i, cells].min())
    if fewest == 0:
        return Verdict(name, Reason.NOT_MEASURED)
    medians = evidence.medians[i, cells]
    r = evidence.r[i, cells]
    valid = np.isfinite(r)
    counted = valid.any(axis=0)
    by_round = np.where(valid, r, 0.0).sum(axis=0)[counted] / valid.sum(axis=0)[counted]
    won_in_cells = (r < 0).sum(axis=1) / valid.sum(axis=1)
    worst = int(medians.argmax())
    mean_r, worst_r, win_share = float(medians.mean()), float(medians[worst]), float((by_round < 0).mean())
    detail = ""
    if fewest < rule.min_rounds:
        reason, detail = Reason.TOO_FEW_ROUNDS, f"{fewest} of {rule.min_rounds}"
    elif mean_r > -delta:
        reason = Reason.NOT_FASTER
    elif worst_r > 0 or win_share < rule.win_share or won_in_cells.min() < rule.cell_win_share:
        reason = Reason.INCONSISTENT
    else:
        reason = Reason.BEATEN
    return Verdict(name, reason, mean_r, worst_r, cells[worst], win_share, detail)


def still_good(held: Verdict, evidence: Evidence, cells: list[int]) -> bool:
    """Whether an incumbent was measured and is not slower than the default.

    A cell counts as slower only beyond the A/A spread: a tie with the default must not flip a stored choice.
    """
    if held.mean_r is None or held.worst_r is None or held.reason is Reason.TOO_FEW_ROUNDS:
        return False
    return held.mean_r <= 0 and held.worst_r <= float(evidence.aa_spread[cells].max())


def _beats(evidence: Evidence, name: str, other: str, cells: list[int], delta: float) -> bool:
    a, b = (evidence.log_step[evidence.candidates.index(n)][cells] for n in (name, other))
    return float(median_of_rounds(a - b).mean()) <= -delta


def _mean(verdict: Verdict) -> float:
    assert verdict.mean_r is not None
    return verdict.mean_r


def _decision(
    name: str, reason: Reason, verdicts: dict[str, Verdict], evidence: Evidence, cells: list[int], delta: float
) -> Decision:
    if name in verdicts:
        verdicts[name] = replace(verdicts[name], reason=reason)
    spread = float(evidence.aa_spread[cells].max())
    return Decision(name, reason, delta, spread, tuple(verdicts.values()))
