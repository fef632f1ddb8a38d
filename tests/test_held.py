"""A box's candidate must hold its ground in each group of the box's rounds, and not only on average."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dispatch.decision import Rule
from dispatch.held import beaten, held, held_everywhere
from dispatch.samples import Cell
from tests.tables import DEFAULT, ROUNDS, bucket_of, prepared

XQA = "flashinfer_xqa"
ROW = 2  # of XQA, behind the default and its twin
RULE = Rule()
TIE, SLOWER, FASTER = 0.009, 0.011, -0.1  # log ratios; Rule.tie is 0.01
# Four means in bins of their own, which end at 1024, 1448, 2048 and 2896; skews in two bins that follow one another.
MEANS, SKEWS = (1000, 1400, 2000, 2800), (1.0, 1.4)
GRID = [Cell(mean, int(mean * skew), f"at {skew}") for mean in MEANS for skew in SKEWS]
EVERY = range(len(GRID))


def evidence(r, rounds=None):
    """r: [cell of GRID][round]. `rounds`: how many of each cell were planned."""
    r = np.broadcast_to(r, (len(GRID), ROUNDS))
    samples = bucket_of({DEFAULT: np.full(r.shape, 100.0), XQA: 100 * np.exp(r)}, GRID)
    if rounds is not None:
        planned = np.arange(ROUNDS) < np.asarray(rounds)[:, None]
        samples = replace(samples, longest=samples.longest * planned, means=samples.means * planned)
    return prepared(samples)


def at(cell, rounds, r, elsewhere=FASTER):
    table = np.full((len(GRID), ROUNDS), elsewhere)
    table[cell, :rounds] = r
    return table


def everywhere(found, cells=EVERY):
    return held_everywhere(found, ROW, cells, RULE)[0]


def in_pairs(found, cells=EVERY):
    return held(found, ROW, cells, found.pair, RULE)


@pytest.mark.parametrize(("r", "whether"), [(TIE, True), (SLOWER, False)])
def test_a_pair_of_bins_holds_if_it_is_at_most_a_tie(r, whether):
    found = in_pairs(evidence(at(3, ROUNDS, r)))
    assert found.in_cell.tolist() == [True] * 3 + [whether] + [True] * 4
    assert (found.worst_cell, found.worst_r) == (3, pytest.approx(r))


@pytest.mark.parametrize(("lost", "whether"), [(2, True), (3, False)])  # 0.85 of 15 are 12.75
def test_most_of_its_rounds_must_be_won_or_equal_however_fast_the_others_are(lost, whether):
    found = in_pairs(evidence(at(3, lost, SLOWER, elsewhere=-1.0)))
    assert found.in_cell[3] == whether
    assert found.in_cell.sum() == len(GRID) - (not whether)


@pytest.mark.parametrize(("planned", "whether"), [(2, True), (3, False)])
def test_a_pair_of_fewer_than_three_rounds_is_judged_with_others_alone(planned, whether):
    rounds = [ROUNDS] * len(GRID)
    rounds[3] = planned
    assert in_pairs(evidence(at(3, planned, SLOWER), rounds)).in_cell[3] == whether


def test_where_every_group_has_few_rounds_each_is_judged():
    assert in_pairs(evidence(at(3, 2, SLOWER), [2] * len(GRID))).in_cell.tolist() == [True] * 3 + [False] + [True] * 4


def test_a_group_without_a_valid_round_is_not_held():
    assert in_pairs(evidence(at(3, ROUNDS, np.nan))).in_cell.tolist() == [True] * 3 + [False] + [True] * 4


def test_nor_is_one_of_few_rounds():
    rounds = [ROUNDS] * len(GRID)
    rounds[3] = 2
    assert not in_pairs(evidence(at(3, ROUNDS, np.nan), rounds)).in_cell[3]


def test_only_the_cells_asked_for_are_looked_at():
    found = evidence(at(3, ROUNDS, SLOWER))
    assert not everywhere(found)
    assert everywhere(found, [i for i in range(len(GRID)) if i != 3])


def test_profiles_in_one_pair_are_one_group():
    half = [[FASTER] * ROUNDS, [SLOWER] * 4 + [FASTER] * 11]  # 4 of 30 are under 0.15; of 15 they would be too many
    both = [Cell(1000, 1000, "equal"), Cell(1000, 1000, "as equal")]
    found = prepared(bucket_of({DEFAULT: [100.0] * 2, XQA: 100 * np.exp(half)}, both))
    assert held(found, ROW, [0, 1], found.pair, RULE).in_cell.all()
    assert not held(found, ROW, [1], found.pair, RULE).in_cell.any()


@pytest.mark.parametrize("axis", ["mean", "skew"])
def test_pairs_of_few_rounds_are_judged_together_in_a_bin_of_either_axis(axis):
    """One lost round in each pair of a bin: neither a pair nor a square of them has three, the bin has four."""
    means, skews = (725, 1025, 1449, 2049), (1.0, 1.25, 1.5625, 1.96)  # each begins a bin, or lies in one
    grid = [Cell(mean, int(mean * skew) + 1, f"at {skew}") for mean in means for skew in skews]
    at_axis = [cell // 4 if axis == "mean" else cell % 4 for cell in range(16)]
    edge = np.array([where == 3 for where in at_axis])
    r = np.where(edge[:, None], SLOWER, np.full(ROUNDS, FASTER))
    samples = bucket_of({DEFAULT: np.full(r.shape, 100.0), XQA: 100 * np.exp(r)}, grid)
    planned = (np.arange(ROUNDS) < 1) | ~edge[:, None]
    found = prepared(replace(samples, longest=samples.longest * planned, means=samples.means * planned))
    of_bins = {"mean": found.mean_bin, "skew": found.skew_bin}
    every = range(len(grid))
    assert held(found, ROW, every, found.pair, RULE).in_cell.all()
    assert (held(found, ROW, every, of_bins[axis], RULE).in_cell == ~edge).all()
    assert not everywhere(found, every)


def test_pairs_of_few_rounds_that_touch_are_judged_together_in_a_square():
    """A corner of four pairs with two rounds each is lost, and its bins of mean and skew hold by what else is there."""
    skews = (1.0, 1.4, 1.7, 2.1)  # bins of skews begin at 1250, 1562 and 1953
    grid = [Cell(mean, int(mean * skew), f"at {skew}") for mean in MEANS for skew in skews]
    corner = np.array([mean >= 2000 and skew >= 1.7 for mean in MEANS for skew in skews])
    r = np.where(corner[:, None], SLOWER, np.full(ROUNDS, FASTER))
    samples = bucket_of({DEFAULT: np.full(r.shape, 100.0), XQA: 100 * np.exp(r)}, grid)
    planned = (np.arange(ROUNDS) < 2) | ~corner[:, None]
    found = prepared(replace(samples, longest=samples.longest * planned, means=samples.means * planned))
    every = range(len(grid))
    # in a bin with two pairs of the corner, 4 of 34 rounds are lost
    assert all(held(found, ROW, every, g, RULE).in_cell.all() for g in (found.pair, found.mean_bin, found.skew_bin))
    assert not everywhere(found, every)
    assert everywhere(found, np.flatnonzero(~corner).tolist())


@pytest.mark.parametrize(("slower", "whether"), [(2, True), (3, False)])
def test_rounds_whose_longest_request_is_above_a_power_of_two_are_judged_by_themselves(slower, whether):
    """Of 30 rounds of a pair, 2 or 3 are lost, which is less than 0.15; all of those above 1024 are."""
    above = np.arange(2 * ROUNDS).reshape(2, ROUNDS) < slower
    grid = [Cell(900, 1000, "equal"), Cell(900, 1000, "as equal")]
    samples = bucket_of({DEFAULT: [100.0] * 2, XQA: 100 * np.exp(np.where(above, SLOWER, FASTER))}, grid)
    found = prepared(replace(samples, longest=np.where(above, 1100, 1000)))
    every = range(len(found.pair))
    assert held(found, ROW, every, found.pair, RULE).in_cell.all()
    assert everywhere(found, every) == whether


@pytest.mark.parametrize("seed", range(10))
def test_no_candidate_is_beaten_that_holds_in_the_end(seed):
    """`beaten` looks at some rounds of a pair, `held` at all: once beaten, no outcome of the others is held."""
    rng = np.random.default_rng(seed)
    r = rng.choice([FASTER, TIE, SLOWER], (len(GRID), ROUNDS), p=[0.5, 0.3, 0.2])
    planned = np.full(len(GRID), ROUNDS)
    for so_far in range(ROUNDS + 1):
        lost = (r[:, :so_far] > RULE.tie).sum(axis=1)
        best = np.where(np.arange(ROUNDS) < so_far, r, FASTER)
        # if all that is to come is won: beaten where the pair is not held, and there alone
        assert (beaten(lost, planned, RULE) == ~in_pairs(evidence(best)).in_cell).all()


def test_two_planned_rounds_are_never_beaten():
    assert beaten(np.array([2, 3, 0]), np.array([2, 3, 0]), RULE).tolist() == [False, True, False]
