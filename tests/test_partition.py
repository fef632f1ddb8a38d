"""Boxes over batches as they are drawn: what is measured in a bin is served by the box that holds it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dispatch._core import BackendPlan
from dispatch.bench.profiles import default_profiles, means_of, plan_cells
from dispatch.decision import Rule
from dispatch.evidence import Evidence, within_limit
from dispatch.part import Part
from dispatch.plane import Plane
from dispatch.rectangles import Rectangles
from dispatch.regimes import decide_bucket
from dispatch.samples import skews_of
from dispatch.subcells import Subcells
from tests.tables import DEFAULT, PRIORITY, ROUNDS, bucket_of

XQA, CUDNN, NARROW = "flashinfer_xqa", "flashinfer_cudnn", "flashinfer_xqa[max_kv=4096]"
RULE = Rule()
CELLS = plan_cells(16, (512, 1024, 2048, 4096), default_profiles(), 65536, 10**6, ROUNDS)
MEANS = np.array([means_of(cell.lengths) for cell in CELLS])
LONGEST = np.array([cell.lengths.max(axis=1) for cell in CELLS])
SKEWS = LONGEST / MEANS


def decide(times, stored=()):
    samples = bucket_of({DEFAULT: np.full(MEANS.shape, 100.0), **times}, [cell.cell for cell in CELLS], bucket=16)
    samples = replace(samples, means=MEANS, longest=LONGEST)
    return samples, decide_bucket(samples, 1, PRIORITY, RULE, stored)


def served(regimes, mean, longest):
    return [regime.box.candidate for regime in regimes if regime.box.holds(int(mean), int(longest))]


def noisy(seed):
    rng = np.random.default_rng(seed)
    x, y = np.log(MEANS / 1024), np.log(SKEWS)
    times = {}
    for name in (XQA, CUDNN, NARROW):
        r = rng.normal(-0.05, 0.05) + rng.normal(0, 0.1) * x + rng.normal(0, 0.1) * y + rng.normal(0, 0.01, x.shape)
        times[name] = 100 * np.exp(r)
    times[NARROW] = np.where(LONGEST <= 4096, 0.93 * times[NARROW], np.nan)
    return times


@pytest.mark.parametrize("seed", range(8))
def test_every_batch_is_served_by_one_box_and_boxes_do_not_overlap(seed):
    samples, regimes = decide(noisy(seed))
    assert sorted(c for regime in regimes for c in regime.cells) == list(range(sum(len(r.cells) for r in regimes)))
    table = BackendPlan([16], [DEFAULT, XQA, CUDNN, NARROW])
    for box in (regime.box for regime in regimes):
        table.set(
            16, box.mean_kv_min, box.mean_kv_max, box.skew_min, box.skew_max, backend=box.candidate
        )  # or it raises
    for mean, longest in zip(MEANS.ravel(), LONGEST.ravel(), strict=True):
        assert len(served(regimes, mean, longest)) == 1
    assert skews_of(samples).min() >= 1000


@pytest.mark.parametrize("seed", range(8))
def test_deciding_again_beside_the_stored_boxes_changes_nothing(seed):
    stored = [regime.box for regime in decide(noisy(seed))[1]]
    assert [regime.box for regime in decide(noisy(seed), stored)[1]] == stored


def test_a_tactic_for_short_requests_serves_all_that_was_counted_for_it():
    boxes = 0
    for seed in range(8):
        samples, regimes = decide(noisy(seed))
        parts = Subcells.of(samples)
        for regime in (regime for regime in regimes if regime.box.candidate == NARROW):
            boxes += 1
            for part in regime.cells:
                own, cell = parts.own[part], parts.source[part]
                for mean, longest in zip(MEANS[cell][own], LONGEST[cell][own], strict=True):
                    assert regime.box.holds(int(mean), int(longest))
            # the longest request of its box: its largest mean at a skew just below the next thousandth
            assert (regime.box.mean_kv_max * (regime.box.skew_max + 1) - 1) // 1000 <= 4096
    assert boxes > 2


# So many rounds that each pair of bins speaks for itself (slopes.MANY).
MANY_CELLS = plan_cells(16, (512, 1024, 2048, 4096), default_profiles()[:3], 65536, 10**6, 20 * ROUNDS)
MANY_MEANS = np.array([means_of(cell.lengths) for cell in MANY_CELLS])
MANY_LONGEST = np.array([cell.lengths.max(axis=1) for cell in MANY_CELLS])


def served_of_many(times):
    """What serves each of these batches, in their order."""
    times = {DEFAULT: np.full(MANY_MEANS.shape, 100.0), **times}
    samples = bucket_of(times, [cell.cell for cell in MANY_CELLS], bucket=16)
    regimes = decide_bucket(replace(samples, means=MANY_MEANS, longest=MANY_LONGEST), 1, PRIORITY, RULE)
    return [served(regimes, *of) for of in zip(MANY_MEANS.ravel(), MANY_LONGEST.ravel(), strict=True)]


def test_a_candidate_that_is_faster_in_one_rectangle_gets_that_rectangle():
    skews = MANY_LONGEST * 1000 // MANY_MEANS  # bins of means from 725 to 2048, of skews from 1250 to 2440
    inside = (MANY_MEANS > 724) & (MANY_MEANS <= 2048) & (skews >= 1250) & (skews <= 2440)
    expected = [[XQA if here else DEFAULT] for here in inside.ravel()]
    assert served_of_many({XQA: np.where(inside, 90.0, 110.0)}) == expected


def test_a_faster_candidate_within_another_ones_box_has_a_box_of_its_own():
    inside = MANY_MEANS <= 1024
    times = {XQA: np.full(MANY_MEANS.shape, 90.0), CUDNN: np.where(inside, 80.0, 120.0)}
    assert served_of_many(times) == [[CUDNN if here else XQA] for here in inside.ravel()]


def test_where_it_loses_in_one_pair_of_bins_a_candidate_does_not_serve_it():
    lost = (MEANS > 1024) & (MEANS <= 1448) & (SKEWS < 1.25)
    assert lost.sum() >= 3
    regimes = decide({XQA: np.where(lost, 101.5, 85.0)})[1]  # by less than makes a batch a lost one
    for mean, longest, here in zip(MEANS.ravel(), LONGEST.ravel(), lost.ravel(), strict=True):
        assert not here or served(regimes, mean, longest) == [DEFAULT]
    assert any(regime.box.candidate == XQA for regime in regimes)


def test_a_few_batches_that_are_faster_are_no_box():
    few = np.zeros(MEANS.shape, dtype=bool)
    few[np.unravel_index(np.argsort(-SKEWS, axis=None)[:19], SKEWS.shape)] = True  # the most ragged ones
    regimes = decide({XQA: np.where(few, 50.0, 110.0)})[1]
    assert {regime.box.candidate for regime in regimes} == {DEFAULT}


@pytest.mark.parametrize("over", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_rectangles_are_all_ranges_of_bins_where_one_candidate_may_win_and_gains_enough(seed, over):
    samples, _ = decide(noisy(seed))
    parts = Subcells.of(samples)
    evidence = Evidence.of(parts.split(samples), parts, 1, PRIORITY)
    plane = Plane.of(evidence, parts.bins)
    search, least = Rectangles(evidence, plane, RULE), 0.003 * evidence.planned.sum()
    mean_bin, skew_bin = np.array(plane.mean_bin), np.array(plane.skew_bin)
    expected = {}
    for (first, last), (low, high) in itertools.product(ranges(mean_bin), ranges(skew_bin)):
        cells = np.flatnonzero((first <= mean_bin) & (mean_bin <= last) & (low <= skew_bin) & (skew_bin <= high))
        if len(cells) and {low, high} <= set(skew_bin[cells]):  # or those of a smaller range
            sums, planned = search.sums[:, cells].sum(axis=1), evidence.planned[cells].sum()
            longest = evidence.mean_range[1, cells].max(), evidence.skew_range[1, cells].max()
            may = search.may_win[:, cells].all(axis=1) & (sums <= -RULE.threshold * planned)
            gains = [sums[over] - sums[i] for i in np.flatnonzero(may) if within_limit(evidence.limits[i], *longest)]
            if max(gains, default=0.0) >= least:
                expected[first, last, low, high] = max(gains), tuple(cells.tolist())
    found = list(search.within(Part(tuple(range(len(mean_bin)))), least, over))
    gains = [rectangle.gain for rectangle in found]
    assert gains == sorted(gains, reverse=True)
    assert sorted(gains) == pytest.approx(sorted(gain for gain, _ in expected.values()))
    assert sorted(rectangle.part.cells for rectangle in found) == sorted(cells for _, cells in expected.values())
    for rectangle in found:
        pieces = (rectangle.part, *rectangle.rest)
        assert sorted(cell for piece in pieces for cell in piece.cells) == list(range(len(mean_bin)))


def ranges(bins):
    """The first and the last of some bins that follow one another."""
    return itertools.combinations_with_replacement(sorted(set(bins.tolist())), 2)
