"""A study of the deciding rule with seeded noise, against picking the fastest mean and the best mean rank.

True times are the H200 measurement beside the checkout where it is there, and a small table otherwise. A bucket's
cells are its KV points, with equal and with ragged lengths. Noise: 1% a sample, and a drift of 1% a round that all
candidates of the round share; one sample in 200 is an outlier of 20% (of those kept under smoke/results/h200, two of
the default are over 15% apart in 0.01% to 0.9% of rounds).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dispatch.decision import Rule
from dispatch.regimes import decide_bucket
from dispatch.samples import TWIN, BucketSamples, Cell
from dispatch.selector import select_stable
from tests.tables import prepared

MEASURED = Path(__file__).parents[2] / "shared" / "data" / "h200_chain_uniform_ragged.json"
NAMES = ("fa3", "fa2tc", "xqa", "cudnn", "fa2cc")  # the default first, in priority order
ROUNDS = 15
RULE = Rule()

# Microseconds of NAMES at KV 1024 and 16384, equal and ragged: shapes of crossings that were seen, in round numbers.
SMALL = {
    "one wins by far": [[20, 21, 14, 16, 24], [20, 21, 14, 16, 24], [60, 64, 48, 50, 70], [61, 64, 49, 50, 70]],
    "one wins short, another long": [
        [20, 21, 15, 19, 24],
        [20, 21, 15, 19, 24],
        [60, 50, 70, 58, 70],
        [62, 50, 90, 60, 70],
    ],
    "fast on equal lengths only": [
        [20, 21, 19, 18, 24],
        [20, 21, 22, 40, 24],
        [60, 62, 58, 50, 70],
        [61, 62, 90, 210, 70],
    ],
    "all close": [
        [20, 20.1, 20.2, 19.9, 21],
        [20, 20.2, 20, 19.8, 21],
        [60, 60.5, 59.8, 60.2, 63],
        [60, 60.2, 60.4, 59.6, 63],
    ],
    "a gain of 2%": [[20, 21, 19.6, 20, 24], [20, 21, 19.6, 20, 24], [60, 64, 58.8, 60, 70], [60, 64, 58.8, 60, 70]],
    "a gain of 5%": [[20, 21, 19, 20, 24], [20, 21, 19, 20, 24], [60, 64, 57, 60, 70], [60, 64, 57, 60, 70]],
}


def true_times():
    """[cell, candidate] microseconds for each bucket of the study."""
    if not MEASURED.exists():
        return {name: np.array(rows, dtype=float) for name, rows in SMALL.items()}
    buckets = defaultdict(list)
    for row in json.loads(MEASURED.read_text())["rows"]:
        heads, times = tuple(row[:5]), row[-1]
        if all(times.get(name) for name in NAMES):
            buckets[heads].append([times[name] for name in NAMES])
    return {name: np.array(rows) for name, rows in buckets.items() if len(rows) >= 3}


def noisy(times, rng):
    """One run's samples of a bucket: [candidate with the twin, cell, round]."""
    with_twin = np.concatenate([times[:, :1], times], axis=1).T[:, :, None]
    shape = (with_twin.shape[0], with_twin.shape[1], ROUNDS)
    drift = rng.normal(0, 0.01, size=(1, shape[1], ROUNDS))
    outlier = 0.2 * (rng.random(shape) < 0.005)
    layer = with_twin * np.exp(rng.normal(0, 0.01, size=shape) + drift + outlier)
    profiles = ("equal", "ragged")
    cells = tuple(
        Cell(1000 * 4 ** (i // 2), 1000 * 4 ** (i // 2) * (1 + i % 2), profiles[i % 2]) for i in range(shape[1])
    )
    zero = np.zeros_like(layer)
    longest = np.array([[cell.max_kv] * ROUNDS for cell in cells])
    means = np.array([[cell.mean_kv] * ROUNDS for cell in cells])
    return BucketSamples(1, cells, (NAMES[0], TWIN, *NAMES[1:]), np.stack([zero, zero, layer]), longest, means)


def evidence_of(samples):
    return prepared(samples, 1, NAMES)


def regimes(samples):
    """The pick for each cell, as the tuner decides: at most three boxes."""
    picks = {i: r.box.candidate for r in decide_bucket(samples, 1, NAMES, RULE) for i in r.cells}
    return [picks[i] for i in range(len(samples.cells))]


def stable(samples, incumbent=None):
    """One pick for all cells."""
    name = select_stable(evidence_of(samples), range(len(samples.cells)), RULE, incumbent).candidate
    return [name] * len(samples.cells)


def _rows(evidence):
    return [i for i, name in enumerate(evidence.candidates) if name != TWIN]


def argmin(samples):
    """The least mean time over cells, each relative to the default: what a tuner without a rule does."""
    evidence = evidence_of(samples)
    rows = _rows(evidence)
    means = np.log(np.exp(evidence.log_step).mean(axis=2))
    return [evidence.candidates[rows[int((means - means[0])[rows].mean(axis=1).argmin())]]] * len(samples.cells)


def mean_rank(samples):
    """The best rank on average over cells and rounds."""
    evidence = evidence_of(samples)
    rows = _rows(evidence)
    ranks = evidence.log_step[rows].argsort(axis=0).argsort(axis=0).mean(axis=(1, 2))
    return [evidence.candidates[rows[int(ranks.argmin())]]] * len(samples.cells)


@dataclass(frozen=True)
class Outcome:
    """Shares of choices. A regression: some cell truly over 1% slower than the default. `flip_cost`: log time."""

    regressions: float
    flips: float
    flip_cost: float
    gain: float


def outcome(choose, table, drawn):
    regressions, flips, costs, gains = [], [], [0.0], []
    for times, runs in zip(table.values(), drawn, strict=True):
        log_time = np.log(times / times[:, :1])
        picks = [tuple(choose(samples)) for samples in runs]
        usual = max(set(picks), key=picks.count)
        true = {pick: log_time[range(len(times)), [NAMES.index(name) for name in pick]] for pick in picks}
        regressions += [bool((true[pick] > 0.01).any()) for pick in picks]
        gains += [-true[pick].mean() for pick in picks]
        flips += [pick != usual for pick in picks]
        costs += [abs(true[pick].mean() - true[usual].mean()) for pick in picks]
    return Outcome(*(float(x) for x in (np.mean(regressions), np.mean(flips), max(costs), np.mean(gains))))


@pytest.fixture(scope="module")
def study():
    """What each way of choosing makes of the same ten runs of every bucket."""
    rng = np.random.default_rng(11)
    table = true_times()
    drawn = [[noisy(times, rng) for _ in range(10)] for times in table.values()]
    return {choose.__name__: outcome(choose, table, drawn) for choose in (regimes, stable, argmin, mean_rank)}


def test_the_rule_leaves_a_cell_slower_than_the_default_in_less_than_half_a_percent_of_choices(study):
    assert study["regimes"].regressions < 0.005
    assert study["stable"].regressions < 0.005


def test_argmin_leaves_a_cell_slower_in_more_than_one_choice_of_ten(study):
    assert study["argmin"].regressions > 0.1


def test_boxes_gain_more_than_argmin_and_than_one_stable_choice_a_bucket(study):
    assert study["regimes"].gain > study["argmin"].gain > study["stable"].gain > 0.01


def test_a_flip_of_boxes_between_runs_without_a_store_costs_less_than_the_threshold_and_its_noise(study):
    # the two partitions are equal to the rule: to delta, 3%, and the noise of a median of 15 rounds, below 1%
    assert study["regimes"].flips < 0.35
    assert study["regimes"].flip_cost < 0.03


def test_where_no_true_difference_is_near_a_threshold_a_thousand_runs_give_one_answer():
    times = np.array([[100, 120, 85, 110, 130], [200, 240, 170, 220, 260]], dtype=float)
    rng = np.random.default_rng(12)
    assert {stable(noisy(times, rng))[0] for _ in range(1000)} == {"xqa"}


@pytest.mark.parametrize("gain", [0.03, 0.0])  # at the threshold; level with the default
@pytest.mark.parametrize("rival", [0.0, 0.01])  # another candidate level with the first; at the margin from it
def test_at_a_threshold_a_thousand_runs_give_the_stored_answer(gain, rival):
    first = 100 * np.exp(-gain)
    times = np.array([[100, 120, first, first * np.exp(-rival), 130]] * 4)
    rng = np.random.default_rng(13)
    stored = stable(noisy(times, rng))[0]
    answers = [stable(noisy(times, rng), stored)[0] for _ in range(1000)]
    assert answers.count(stored) >= 998  # noise of three to four standard deviations may pass once or twice


def test_at_a_threshold_without_the_store_the_answer_flips():
    # what the two tests above protect from: without an incumbent the same times give both answers
    times = np.array([[100, 120, 100 * np.exp(-0.03), 110, 130]] * 4)
    rng = np.random.default_rng(13)
    assert {stable(noisy(times, rng))[0] for _ in range(100)} == {"fa3", "xqa"}
