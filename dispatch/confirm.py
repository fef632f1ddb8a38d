"""Whether a choice gains where it did not choose: halves of the rounds choose for each other. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dispatch.decision import Decision, Reason, Rule
from dispatch.evidence import Evidence
from dispatch.selector import select_stable, still_good

LEAST_ROUNDS = 20  # of a box: of fewer batches, some are fast by luck wherever one looks for them
# Unless so many are there and each gains delta: who wins two thirds of all batches wins 8 of 8 once in 26 times, and at
# least 16 of 20 once in 7.
CERTAIN_ROUNDS = 8


def decide_cells(evidence: Evidence, cells: Sequence[int], rule: Rule, incumbent: str | None = None) -> Decision:
    """What the rule selects for these cells, if they have rounds enough, and if there is a gain where each half of the
    rounds chooses for the other.

    Otherwise the incumbent, where it is still good, or the default.
    """
    decision = select_stable(evidence, cells, rule, incumbent)
    default = evidence.candidates[0]
    if decision.candidate == default or decision.reason is Reason.INCUMBENT:
        return decision
    rounds, needed = evidence.planned[list(cells)].sum(), min(LEAST_ROUNDS, evidence.planned.sum())
    few = rounds < needed and not _each_gains(evidence, decision, cells)
    if not few and cross_fitted_speedup(evidence, cells, rule) > 1.0:
        return decision
    why = Reason.TOO_FEW_ROUNDS if few else Reason.UNCONFIRMED
    detail = f"{rounds} of {needed}, or {CERTAIN_ROUNDS} where each gains" if few else ""
    verdicts = tuple(
        replace(v, reason=why, detail=detail) if v.candidate == decision.candidate else v for v in decision.verdicts
    )
    held = next((v for v in verdicts if v.candidate == incumbent != decision.candidate), None)
    if held is not None and still_good(held, evidence, list(cells), rule):
        return replace(decision, candidate=held.candidate, reason=Reason.INCUMBENT, verdicts=verdicts)
    return replace(decision, candidate=default, reason=why, verdicts=verdicts)


def _each_gains(evidence: Evidence, decision: Decision, cells: Sequence[int]) -> bool:
    """Whether there are some rounds of what is decided, and each is faster than the default's by delta."""
    r = evidence.r[evidence.candidates.index(decision.candidate), list(cells)]
    rounds = r[np.isfinite(r)]
    return len(rounds) >= CERTAIN_ROUNDS and bool((rounds <= -decision.delta).all())


def cross_fitted_speedup(evidence: Evidence, cells: Sequence[int], rule: Rule, incumbent: str | None = None) -> float:
    """Speed over the default of what the rule picks on one half of the rounds, scored on the other half.

    Rule 1 is not applied: a half has too few rounds for it. 1.0 where the default is picked. In a box of few rounds it
    says little: each of them had to gain.
    """
    gains = []
    for choose, score in (evidence.halves, evidence.halves[::-1]):
        choosing, scoring = ([c for c in cells if half.planned[c]] for half in (choose, score))
        gain = 0.0
        if choosing and scoring:
            pick = select_stable(choose, choosing, replace(rule, min_rounds=1), incumbent).candidate
            medians = np.nan_to_num(score.medians[score.candidates.index(pick), scoring])
            gain = float(np.average(medians, weights=score.planned[scoring]))
        gains.append(gain)
    return float(np.exp(-np.mean(gains)))
