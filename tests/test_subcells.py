"""Cells whose longest requests lie close together, made of the cells that were measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dispatch.decision import Reason
from dispatch.samples import Cell, Exclusion
from dispatch.subcells import BIN, split
from tests.tables import DEFAULT, ROUNDS, bucket_of

XQA = "flashinfer_xqa"


@pytest.fixture
def samples():
    grid = [Cell(100, 100, "equal"), Cell(100, 900, "ragged")]
    layer = np.arange(2 * ROUNDS, dtype=float).reshape(2, ROUNDS) + 1
    bucket = bucket_of(
        {DEFAULT: layer, XQA: layer + 100}, grid, exclusions=[Exclusion(XQA, Reason.FAILED, "why", cell=1)]
    )
    longest = np.array([[100] * ROUNDS, [295] * 5 + [305] * 5 + [3000] * 5])
    return replace(bucket, longest=longest)


def test_every_sample_is_in_one_cell_with_its_mean_and_its_profile(samples):
    parts = split(samples)
    assert [(c.mean_kv, c.max_kv, c.profile) for c in parts.cells] == [
        (100, 100, "equal"),
        (100, 300, "ragged"),  # the median of five times 295 and five times 305; 1.25^4 = 2.44 to 1.25^5 = 3.051
        (100, 3000, "ragged"),
    ]
    assert (parts.longest > 0).sum(axis=1).tolist() == [15, 10, 5]
    for c, source in enumerate((0, 1, 1)):
        own = parts.longest[c] > 0
        assert np.array_equal(parts.longest[c][own], samples.longest[source][own])
        assert np.array_equal(parts.times[:, :, c][:, :, own], samples.times[:, :, source][:, :, own])
        assert np.isnan(parts.times[:, :, c][:, :, ~own]).all()


def test_longest_requests_of_a_cell_are_not_much_further_apart_than_a_bin(samples):
    rng = np.random.default_rng(0)
    spread = replace(samples, longest=rng.integers(100, 50000, samples.longest.shape))
    for longest in split(spread).longest:
        assert longest.max() <= BIN * longest[longest > 0].min()


def test_a_candidate_excluded_in_a_cell_is_excluded_in_its_parts_and_one_excluded_everywhere_once(samples):
    assert [e.cell for e in split(samples).exclusions] == [1, 2]
    everywhere = replace(samples, exclusions=(Exclusion(XQA, Reason.GATE_FAILED, "why"),))
    assert [e.cell for e in split(everywhere).exclusions] == [None]


def test_splitting_again_changes_nothing(samples):
    once = split(samples)
    twice = split(once)
    assert twice.cells == once.cells
    assert np.array_equal(twice.longest, once.longest)
    assert np.array_equal(twice.times, once.times, equal_nan=True)
