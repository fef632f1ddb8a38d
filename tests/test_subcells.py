"""Cells in parts: every sample is in one, with its bins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dispatch.bins import Bins, of_skews, skews
from dispatch.decision import Reason
from dispatch.samples import Cell, Exclusion, skews_of
from dispatch.subcells import Subcells, pairs_of
from tests.tables import DEFAULT, ROUNDS, bucket_of

XQA = "flashinfer_xqa"


@pytest.fixture
def samples():
    """Means 100 to 114, the bins of which end at 128; skews of 1, and of 2.95, 3.05 and 30."""
    grid = [Cell(100, 100, "equal"), Cell(100, 900, "ragged")]
    layer = np.arange(2 * ROUNDS, dtype=float).reshape(2, ROUNDS) + 1
    bucket = bucket_of(
        {DEFAULT: layer, XQA: layer + 100}, grid, exclusions=[Exclusion(XQA, Reason.FAILED, "why", cell=1)]
    )
    longest = np.array([[100] * ROUNDS, [295] * 5 + [305] * 5 + [3000] * 5])
    return replace(bucket, longest=longest)


def test_every_sample_is_in_one_part_with_its_mean_and_its_profile(samples):
    parts = Subcells.of(samples)
    found = parts.split(samples)
    assert [(c.mean_kv, c.max_kv, c.profile) for c in found.cells] == [
        (100, 100, "equal"),
        (100, 300, "ragged"),  # the median of five times 295 and five times 305; 1.25^4 = 2.44 to 1.25^5 = 3.051
        (100, 3000, "ragged"),
    ]
    assert parts.source.tolist() == [0, 1, 1]
    assert parts.own.sum(axis=1).tolist() == [15, 10, 5]
    for c, source in enumerate(parts.source):
        own = found.longest[c] > 0
        assert np.array_equal(own, parts.own[c])
        assert np.array_equal(found.longest[c][own], samples.longest[source][own])
        assert np.array_equal(found.times[:, :, c][:, :, own], samples.times[:, :, source][:, :, own])
        assert np.isnan(found.times[:, :, c][:, :, ~own]).all()


def test_rounds_on_both_sides_of_a_power_of_two_are_in_parts_of_their_own(samples):
    means = np.array([[1000] * 7 + [1024] * 3 + [1025] * 5, [1000] * ROUNDS])
    parts = Subcells.of(replace(samples, means=means, longest=means))
    assert parts.own.sum(axis=1).tolist() == [10, 5, 15]
    assert len(set(parts.mean_bin[[0, 2]])) == 1  # the third is in the bin of the first, and so is its pair
    assert pairs_of(parts.mean_bin, parts.skew_bin).tolist() == [0, 1, 0]


def test_rounds_whose_longest_request_is_on_either_side_of_a_power_of_two_are_in_parts_of_one_pair(samples):
    means = np.full((2, ROUNDS), 900)  # from 725 to 1024, and skews to 1249: all one pair
    longest = np.array([[1024] * 11 + [1025] * 4, [1000] * ROUNDS])
    parts = Subcells.of(replace(samples, means=means, longest=longest))
    assert parts.own.sum(axis=1).tolist() == [11, 4, 15]
    assert parts.longest_bin.tolist() == [10, 11, 10]
    assert pairs_of(parts.mean_bin, parts.skew_bin).tolist() == [0, 0, 0]


def test_the_rounds_of_a_part_lie_in_its_bins(samples):
    rng = np.random.default_rng(0)
    means = rng.integers(100, 20000, samples.longest.shape)
    spread = replace(samples, means=means, longest=means * rng.integers(1, 30, means.shape))
    parts = Subcells.of(spread)
    assert parts.own.sum() == means.size
    for c, own, m, s in zip(parts.source, parts.own, parts.mean_bin, parts.skew_bin, strict=True):
        (low, high), (least, most) = parts.bins.means(m), skews(s)
        assert low <= spread.means[c][own].min() <= spread.means[c][own].max() <= high
        assert least <= skews_of(spread)[c][own].min() <= skews_of(spread)[c][own].max() <= most


def test_a_candidate_excluded_in_a_cell_is_excluded_in_its_parts_and_one_excluded_everywhere_once(samples):
    parts = Subcells.of(samples)
    assert [e.cell for e in parts.split(samples).exclusions] == [1, 2]
    everywhere = replace(samples, exclusions=(Exclusion(XQA, Reason.GATE_FAILED, "why"),))
    assert [e.cell for e in parts.split(everywhere).exclusions] == [None]


@pytest.mark.parametrize("ends", [(1, 1), (100, 100), (100, 128), (128, 5000), (3, 65536)])
def test_bins_of_means_leave_nothing_out_and_end_at_powers_of_two(ends):
    first, last = ends
    bins = Bins.of(np.array(ends))
    covered = [mean for k in range(len(bins.tops)) for mean in range(bins.means(k)[0], bins.means(k)[1] + 1)]
    assert covered == list(range(first, last + 1))
    assert {2**k for k in range(20) if first < 2**k < last} <= set(bins.tops)
    assert bins.of_means([first - 1, first, last, last + 1]).tolist() == [0, 0] + [len(bins.tops) - 1] * 2


def test_bins_of_skews_follow_one_another():
    assert of_skews([0, 1000, 1249, 1250, 1561, 1562]).tolist() == [0, 0, 0, 1, 1, 2]
    for k in range(40):
        low, high = skews(k)
        assert of_skews([low, high]).tolist() == [k, k]
        assert skews(k + 1)[0] == high + 1
