"""The bins that boxes are made of: where they end, and what is nowhere in them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dispatch.bins import RATIO, Bins, of_longest, of_skews, skews
from dispatch.samples import EVEN


def test_bins_of_means_end_at_powers_of_two_and_in_the_geometric_middle_between_them():
    # 2^7.5 = 181.02, 2^8.5 = 362.04: a mean is a whole number, so it is the one below
    bins = Bins.of(np.array([130, 500]))
    assert (bins.first, bins.tops) == (130, (181, 256, 362, 500))
    assert [bins.means(k) for k in range(4)] == [(130, 181), (182, 256), (257, 362), (363, 500)]


@pytest.mark.parametrize("only", [1, 2, 3, 128, 1000])
def test_one_mean_is_one_bin(only):
    bins = Bins.of(np.array([only, only]))
    assert [bins.means(k) for k in range(len(bins.tops))] == [(only, only)]
    assert bins.of_means([1, only, 10**6]).tolist() == [0, 0, 0]


def test_a_mean_at_the_end_of_a_bin_is_in_it_and_the_next_one_is_not():
    bins = Bins.of(np.array([100, 1000]))
    for k in range(len(bins.tops) - 1):
        assert bins.of_means([bins.tops[k], bins.tops[k] + 1]).tolist() == [k, k + 1]


@pytest.mark.parametrize("seed", range(20))
def test_every_bin_holds_a_mean_and_ends_below_the_next(seed):
    rng = np.random.default_rng(seed)
    means = rng.integers(1, 2 ** rng.integers(1, 18), 50)
    bins = Bins.of(means)
    ends = [bins.means(k) for k in range(len(bins.tops))]
    assert all(low <= high for low, high in ends)
    assert (ends[0][0], ends[-1][1]) == (means.min(), means.max())
    for mean, k in zip(means.tolist(), bins.of_means(means).tolist(), strict=True):
        assert ends[k][0] <= mean <= ends[k][1]


def test_bins_of_skews_begin_at_powers_of_their_ratio():
    # 1000 * 1.25^k: 1000, 1250, 1562.5, 1953.1, 2441.4
    assert [skews(k)[0] for k in range(5)] == [1000, 1250, 1562, 1953, 2441]
    assert of_skews([1561, 1562, 2440, 2441]).tolist() == [1, 2, 3, 4]


def test_bins_of_the_longest_request_end_at_powers_of_two():
    assert of_longest([1, 2, 3, 4, 5, 1024, 1025, 2048, 131072, 131073]).tolist() == [0, 1, 2, 2, 3, 10, 11, 11, 17, 18]
    assert of_longest([0]).tolist() == [0]  # of a round that is not the cell's


def test_a_request_that_is_all_of_a_large_batch_has_a_bin_of_its_own():
    largest = 4096 * EVEN  # one long request among 4096
    index = int(of_skews([largest])[0])
    assert index == int(math.log(4096) / math.log(RATIO))
    assert skews(index)[0] <= largest <= skews(index)[1]
