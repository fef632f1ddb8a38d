"""What planes tell of the corners of bins in which few rounds lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dispatch.bins import Bins, of_skews
from dispatch.decision import Rule
from dispatch.regimes import decide_bucket
from dispatch.samples import TWIN, Cell
from dispatch.selector import select_stable
from dispatch.slopes import FEW, MANY, in_bins, over_default_at_its_best, worst_corners
from tests.tables import DEFAULT, PRIORITY, bucket_of, prepared

XQA = "flashinfer_xqa"
RNG = np.random.default_rng(3)
# Bins of means end at powers of two and between, those of skews grow by a quarter: here 6 x 5 bins around 1024 and 2.
MEANS, SKEWS = 2 ** RNG.uniform(9, 12, 400), 1000 * 1.25 ** RNG.uniform(1, 6, 400)


def one_cell_a_round(r_of):
    """r, means, skews of cells with one round each."""
    means, skews = np.rint(MEANS).astype(int), np.rint(SKEWS).astype(int)
    return r_of(*in_bins(means, skews))[None, :, None], means[:, None], skews[:, None]


def corners_of(r, means, skews):
    """worst_corners of cells of one round each, in the bins of their means."""
    grid = Bins.of(means)
    last = np.array([grid.means(index)[1] for index in grid.of_means(means[:, 0])])
    return worst_corners(r, means, skews, last, of_skews(skews[:, 0]))


def thinned(means, skews, bin_of_mean, bin_of_skew, kept):
    """Which rounds to keep, so that a pair of bins has so many."""
    x, y = in_bins(means[:, 0], skews[:, 0])
    here = np.flatnonzero((np.ceil(x) == bin_of_mean) & (np.floor(y) == bin_of_skew))
    assert len(here) > MANY
    return np.setdiff1d(np.arange(len(means)), here[kept:]), here[:kept]


@pytest.mark.parametrize("slope", [(0.05, 0.1), (-0.05, 0.1), (0.0, -0.2), (0.0, 0.0)])
def test_the_slowest_corner_of_a_plane_is_found_from_what_lies_around(slope):
    r, means, skews = one_cell_a_round(lambda x, y: slope[0] * (x - 21) + slope[1] * (y - 3))
    kept, here = thinned(means, skews, 21, 3, MANY - 1)
    corners = corners_of(r[:, kept], means[kept], skews[kept])
    # the bin goes from 20 to 21, and from 3 to 4
    expected = max(slope[0] * (x - 21) + slope[1] * (y - 3) for x in (20, 21) for y in (3, 4))
    at = np.searchsorted(kept, here)
    flattened = 0.05 * np.abs(slope).sum()  # by FLAT
    assert corners[0, at] == pytest.approx(np.full(len(at), expected), abs=flattened)


def test_where_many_rounds_lie_they_are_asked_themselves():
    r, means, skews = one_cell_a_round(lambda x, y: x - x + 0.5)
    kept, here = thinned(means, skews, 21, 3, MANY)
    assert np.isneginf(corners_of(r[:, kept], means[kept], skews[kept])[0, np.searchsorted(kept, here)]).all()


@pytest.mark.parametrize("around", [FEW - 1, FEW])
def test_a_few_rounds_are_no_plane(around):
    means, skews = np.full((around, 1), 1000), np.full((around, 1), 2000)
    means[MANY - 1 :] = 1040  # in the next bin
    found = corners_of(np.full((1, around, 1), 0.2), means, skews)[0, 0]
    assert found == (-np.inf if around < FEW else pytest.approx(0.2))


def test_rounds_side_by_side_have_no_slope():
    means = np.array([[1000], [1001], [1001], [1002], [1030], [1031], [1032]])
    r = np.array([0.0, 0.02, -0.02, 0.0, 0.0, 0.02, -0.02])[None, :, None]
    assert abs(corners_of(r, means, np.full((7, 1), 2000))[0, 0]) < 0.03


def test_what_lies_far_off_says_nothing():
    r, means, skews = one_cell_a_round(lambda x, y: np.where((abs(x - 20.5) < 2.1) & (abs(y - 3.5) < 2.1), 0.0, 5.0))
    kept, here = thinned(means, skews, 21, 3, MANY - 1)
    corners = corners_of(r[:, kept], means[kept], skews[kept])
    assert np.abs(corners[0, np.searchsorted(kept, here)]).max() < 1e-9


def test_a_mean_at_the_lower_end_of_the_first_bin_belongs_to_it_in_whatever_order_rounds_come():
    # 128 is where the first bin begins, and where the one below it would end
    around, found = [[mean] * 3 for mean in range(190, 255, 10)], []
    for first in ([128, 150, 160], [150, 128, 160]):
        means = np.array([first, *around])
        last = np.array([181, *[256] * len(around)])
        r = 0.1 * (in_bins(means, means)[0] - 15)[None]
        its = worst_corners(r, means, np.full(means.shape, 2000), last, of_skews(np.full(len(means), 2000)))
        found.append(its[0, 0])
    assert found == pytest.approx([0.0, 0.0], abs=0.005)  # at 181, where the bin ends at 15


# It takes 0.8 of the default's time at a skew of 2, as long at 2.64, and 1.3 at 4. Two rounds lie in the bin from 2.44
# to 3.05, where it is still faster, and many behind it.
EDGE = np.array([*np.linspace(2.0, 2.4, 59), 2.46, 2.5, *np.linspace(3.1, 6.0, 59)]).reshape(8, 15)


def edge():
    times = {DEFAULT: 100.0, XQA: 100 * (0.8 + 0.5 * np.log2(EDGE / 2))}
    cells = [Cell(1000, round(1000 * row[7]), "lognormal-0.7") for row in EDGE]
    return replace(bucket_of(times, cells), longest=np.rint(1000 * EDGE).astype(int))


def test_a_kernel_is_not_fast_at_an_edge_because_the_default_was_slow_there():
    """In a bin of two rounds and behind it the default takes 1.4 times as long as with its other tactic; before, as
    long. A kernel that takes 0.9 of the other's time before, and 1.1 from there on, is faster than the default too.
    """
    there = EDGE > 2.441
    for at_edge, whether in ((90.0, True), (110.0, False)):
        times = {
            DEFAULT: np.where(there, 140.0, 100.0),
            "fa3[balanced=1]": 100.0,
            XQA: np.where(there, at_edge, 90.0),
        }
        cells = [Cell(1000, round(1000 * row[7]), "lognormal-0.7") for row in EDGE]
        evidence = prepared(replace(bucket_of(times, cells), longest=np.rint(1000 * EDGE).astype(int)))
        with_edge = [i for i, last in enumerate(evidence.skew_range[1]) if last <= 2500]
        assert (select_stable(evidence, with_edge, Rule()).candidate == XQA) == whether


def test_the_tactics_of_the_default_are_measured_by_the_default():
    log_step = np.log([[[100.0, 140.0]], [[100.0, 140.0]], [[101.0, 100.0]], [[90.0, 99.0]]])
    names = (DEFAULT, TWIN, f"{DEFAULT}[balanced=1]", XQA)
    over = np.exp(over_default_at_its_best(names, log_step))
    assert over[0] == pytest.approx(np.array([[1.0, 1.0]]))
    assert over[2] == pytest.approx(np.array([[1.01, 100 / 140]]))
    assert over[3] == pytest.approx(np.array([[0.9, 0.99]]))


def test_a_candidate_does_not_serve_the_edge_towards_which_it_becomes_slower():
    served = {box.candidate: box for box in (regime.box for regime in decide_bucket(edge(), 1, PRIORITY, Rule()))}
    assert served[XQA].skew_max < 2500


def test_the_rule_refuses_such_an_edge_whoever_proposes_it():
    evidence = prepared(edge())
    before = [i for i, last in enumerate(evidence.skew_range[1]) if last < 2441]
    with_edge = [i for i, last in enumerate(evidence.skew_range[1]) if last <= 2500]
    assert len(with_edge) > len(before)
    assert select_stable(evidence, before, Rule()).candidate == XQA
    assert select_stable(evidence, with_edge, Rule()).candidate == DEFAULT
