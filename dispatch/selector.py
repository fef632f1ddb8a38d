"""select_stable: evidence in, decision out. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dispatch.decision import Decision, Reason, Rule, Verdict
from dispatch.evidence import Evidence, Floats, median_of_rounds, within_limit
from dispatch.held import beaten, held_everywhere
from dispatch.samples import TWIN

LOST_IN_CELL, LOST_IN_BOX = 2, 3  # lost batches that say nothing, for they may be outliers: one sample in 200 or fewer


def select_stable(evidence: Evidence, cells: Sequence[int], rule: Rule, incumbent: str | None = None) -> Decision:
    """The candidate that is stably fastest over `cells` (indices), or the default with the reason.

    Rules 1 to 5 of the design: enough rounds; faster than the default by delta on average, in no pair of bins slower
    and in most rounds faster; the fastest wins, near ties by priority; an incumbent stays unless beaten by delta.
    """
    cells = list(cells)
    delta = evidence.delta(cells, rule)
    names = [name for name in evidence.candidates[1:] if name != TWIN]
    verdicts = {name: _judge(evidence, name, cells, rule, delta) for name in names}
    eligible = [v for v in verdicts.values() if v.reason is Reason.BEATEN]
    if incumbent == evidence.candidates[0]:  # a stored default yields to a clear gain only: see `over_stored`
        eligible = [v for v in eligible if _mean(v) <= -over_stored(delta, rule)]
    stored = verdicts.get(incumbent or "")
    if stored is not None and still_good(stored, evidence, cells, rule):
        challengers = [v for v in eligible if _beats(evidence, v.candidate, stored.candidate, cells, delta)]
        if not challengers:
            for v in eligible:
                verdicts[v.candidate] = replace(v, detail="does not beat the stored choice by delta")
            return _decision(stored.candidate, Reason.INCUMBENT, verdicts, evidence, cells, delta)
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
    if not within_limit(evidence.limits[i], evidence.mean_range[1, cells].max(), evidence.skew_range[1, cells].max()):
        return Verdict(name, Reason.TOO_LONG)
    r, planned = evidence.r[i, cells], evidence.planned[cells]
    valid = np.isfinite(r)
    rounds = valid.sum(axis=1)
    needed = np.maximum(1, planned * rule.min_rounds // r.shape[1])
    if not rounds.any():
        return Verdict(name, Reason.NOT_MEASURED)
    if (rounds < needed).any():
        return _missing(evidence, name, cells, rule)
    by_round, counted = np.where(valid, r, 0.0).sum(axis=0), valid.sum(axis=0)
    win_share = float((by_round[counted > 0] < 0).mean())
    mean_r = float(np.average(evidence.medians[i, cells], weights=planned))
    (everywhere, pairs), detail = held_everywhere(evidence, i, cells, rule), ""
    if mean_r > -delta:
        reason = Reason.NOT_FASTER
    elif not everywhere or win_share < rule.win_share:
        reason = Reason.INCONSISTENT
    elif detail := _lost(evidence, r, cells, rule):
        reason = Reason.LOSES_SOME
    else:
        reason = Reason.BEATEN
    return Verdict(name, reason, mean_r, pairs.worst_r, pairs.worst_cell, win_share, detail)


def _missing(evidence: Evidence, name: str, cells: list[int], rule: Rule) -> Verdict:
    """Why too few rounds are there: they could not have changed anything, or they failed."""
    i, planned = evidence.candidates.index(name), evidence.planned[cells]
    group = np.unique(evidence.pair[cells], return_inverse=True)[1]
    lost = np.bincount(group, (evidence.r[i, cells] > rule.tie).sum(axis=1)).astype(int)
    of_group = np.bincount(group, planned).astype(int)
    for one in np.flatnonzero(beaten(lost, of_group, rule)).tolist():
        return Verdict(name, Reason.HOPELESS, detail=f"at least {lost[one]} of {of_group[one]}")
    rounds, needed = evidence.rounds[i, cells], np.maximum(1, planned * rule.min_rounds // evidence.r.shape[2])
    least = int((rounds - needed).argmin())
    return Verdict(name, Reason.TOO_FEW_ROUNDS, detail=f"{rounds[least]} of {needed[least]}")


def _lost(evidence: Evidence, r: Floats, cells: list[int], rule: Rule) -> str:
    """ "" or how many batches are lost, of the box's or of a cell's, beyond what the default loses to itself.

    r: [cell of the box, round].
    """
    limit = np.maximum(rule.loss, 3 * evidence.noise[cells])[:, None]
    lost, outliers = (r > limit).sum(axis=1), (np.abs(evidence.r[evidence.twin, cells]) > limit).sum(axis=1)
    planned, source = evidence.planned[cells], evidence.source[cells]
    limits = [(source >= 0, rule.lost_share, LOST_IN_BOX), *((source == one, 0.0, LOST_IN_CELL) for one in set(source))]
    for some, share, always in limits:
        if lost[some].sum() > outliers[some].sum() + max(always, int(share * planned[some].sum())):
            return f"{lost[some].sum()} of {planned[some].sum()}, by up to {np.expm1(np.nanmax(r[some])):.0%}"
    return ""


def still_good(stored: Verdict, evidence: Evidence, cells: list[int], rule: Rule) -> bool:
    """Whether an incumbent was measured and is not slower than the default.

    A pair of bins counts as slower only beyond the A/A spread and what makes a batch a lost one: the worst of a box's
    many pairs is as slow as that by noise alone, and must not flip a stored choice.
    """
    if stored.mean_r is None or stored.worst_r is None:
        return False
    return stored.mean_r <= 0 and stored.worst_r <= max(rule.loss, float(evidence.aa_spread[cells].max()))


def _beats(evidence: Evidence, name: str, other: str, cells: list[int], delta: float) -> bool:
    a, b = (evidence.log_step[evidence.candidates.index(n)][cells] for n in (name, other))
    return float(np.average(median_of_rounds(a - b), weights=evidence.planned[cells])) <= -delta


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
