"""Cutting the (mean KV, skew) plane. Times are microseconds; the default takes 100 everywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dispatch._core import BackendPlan
from dispatch.bench.profiles import default_profiles, means_of, plan_cells
from dispatch.confirm import decide_cells
from dispatch.decision import Reason, Rule
from dispatch.part import Part
from dispatch.partition import Search
from dispatch.plane import Plane
from dispatch.regimes import decide_bucket
from dispatch.samples import TWIN, Box, Cell, Exclusion
from dispatch.subcells import Subcells
from tests.tables import DEFAULT, PRIORITY, ROUNDS, bucket_of, prepared

XQA, CUDNN = "flashinfer_xqa", "flashinfer_cudnn"
RULE = Rule()
MEANS = (128, 512, 2048, 8192)
RAGGED = 4  # max over mean of the ragged profile


def cells(means=MEANS):
    """Each mean with equal lengths, and ragged."""
    return [Cell(m, m * k, name) for m in means for k, name in ((1, "equal"), (RAGGED, "ragged"))]


def decide(time_of, incumbent=(), means=MEANS, **kinds):
    """Regimes of a bucket in which candidate `name` takes time_of[name](cell)."""
    grid = cells(means)
    times = {DEFAULT: [100.0] * len(grid)} | {name: [f(c) for c in grid] for name, f in time_of.items()}
    return decide_bucket(bucket_of(times, grid, **kinds), 1, PRIORITY, RULE, incumbent)


def served(regimes, cell):
    return [r.box.candidate for r in regimes if r.box.holds(cell.mean_kv, cell.max_kv)]


def test_one_winner_everywhere_is_one_box_around_all_cells():
    (regime,) = decide({XQA: lambda c: 80})
    assert regime.box == Box(8, 128, 8192, 1000, 1000 * RAGGED, XQA)


def test_the_default_everywhere_is_one_box_for_the_default():
    (regime,) = decide({XQA: lambda c: 120})
    assert (regime.box.candidate, regime.decision.reason) == (DEFAULT, Reason.NOT_FASTER)


def test_a_box_ends_with_the_bins_that_were_measured():
    # bins of means end at 512, and begin at 1449, behind sqrt(2) * 1024: nothing was measured between
    short, long = decide({XQA: lambda c: 80 if c.mean_kv <= 512 else 126})
    assert (short.box.candidate, long.box.candidate) == (XQA, DEFAULT)
    assert (short.box.mean_kv_max, long.box.mean_kv_min) == (512, 1449)


def test_two_winners_have_a_box_each():
    short, long = decide(
        {XQA: lambda c: 70 if c.mean_kv <= 512 else 95, CUDNN: lambda c: 70 if c.mean_kv > 512 else 95}
    )
    assert (short.box.candidate, short.box.mean_kv_max) == (XQA, 512)
    assert (long.box.candidate, long.box.mean_kv_min) == (CUDNN, 1449)


def test_a_winner_on_equal_lengths_alone_is_not_chosen_for_ragged_ones():
    regimes = decide({CUDNN: lambda c: 80 if c.profile == "equal" else 350})
    for cell in cells():
        chosen = served(regimes, cell)
        assert chosen == [DEFAULT] or (chosen == [CUDNN] and cell.profile == "equal")


def test_as_many_boxes_are_made_as_pay():
    regimes = decide({XQA: lambda c: 70 if c.mean_kv in (128, 2048) else 130})
    assert len(regimes) == 4
    for cell in cells():
        assert served(regimes, cell) == [XQA if cell.mean_kv in (128, 2048) else DEFAULT]


@pytest.mark.parametrize(("time", "boxes"), [(79.6, 1), (79.1, 2)])
def test_a_cut_that_saves_less_than_a_third_of_a_percent_is_not_made(time, boxes):
    # cudnn beats xqa in the one half by log(80 / 79.6) = 0.5% or log(80 / 79.1) = 1.1%: by half of it on average
    assert len(decide({XQA: lambda c: 80, CUDNN: lambda c: time if c.mean_kv > 512 else 90})) == boxes


@pytest.mark.parametrize(
    ("rounds", "slowest", "winner"),
    [
        (20, 98.0, XQA),  # of 20 one may gain less than the 3% that a winner gains on average
        (19, 98.0, DEFAULT),
        (19, 97.0, XQA),  # log(100 / 97) is above 0.03
        (8, 97.0, XQA),
        (7, 97.0, DEFAULT),
    ],
)
def test_a_box_has_twenty_rounds_or_eight_of_which_each_gains(rounds, slowest, winner):
    samples = few_rounds(rounds, slowest)
    regimes = decide_bucket(samples, 1, PRIORITY, RULE)
    assert [served(regimes, cell) for cell in samples.cells] == [[winner], [DEFAULT]]


@pytest.mark.parametrize(("noise", "winner"), [(0.01, XQA), (0.02, DEFAULT)])
def test_in_few_rounds_each_gains_what_the_noise_asks_for(noise, winner):
    # 100 / 96.5 is 3.6%: of noise of 2%, the margin is 4%
    decision = decide_cells(prepared(few_rounds(8, 96.5, noise)), [0], RULE)
    (verdict,) = (v for v in decision.verdicts if v.candidate == XQA)
    few = Reason.TOO_FEW_ROUNDS, "8 of 20, or 8 where each gains"
    assert decision.candidate == winner
    assert (verdict.reason, verdict.detail) == (few if winner == DEFAULT else (Reason.FASTEST, ""))


def few_rounds(rounds, slowest, noise=0.0):
    """A cell of few rounds, in which XQA takes 80 but in the last, and one of 20. cuDNN is slow in both."""
    short, long = [[80.0] * (rounds - 1) + [slowest] + [np.nan] * (20 - rounds), [130.0] * 20]
    twin = [[100 * np.exp(noise)] * 20, [100.0] * 20]
    times = {DEFAULT: [[100.0] * 20] * 2, TWIN: twin, CUDNN: [[140.0] * 20] * 2, XQA: [short, long]}
    samples = bucket_of(times, [Cell(128, 128, "a"), Cell(8192, 8192, "b")])
    samples.longest[0, rounds:] = samples.means[0, rounds:] = 0  # not drawn
    return samples


def test_every_measured_cell_lies_in_exactly_one_box():
    rng = np.random.default_rng(3)
    for _ in range(20):
        level = {c: rng.uniform(60, 140, size=2) for c in cells()}
        regimes = decide({XQA: lambda c, t=level: t[c][0], CUDNN: lambda c, t=level: t[c][1]})
        for i, cell in enumerate(cells()):
            assert len(served(regimes, cell)) == 1
            assert [i in r.cells for r in regimes].count(True) == 1


def test_boxes_do_not_overlap():
    rng = np.random.default_rng(4)
    for _ in range(20):
        level = {c: rng.uniform(60, 140) for c in cells()}
        regimes = decide({XQA: lambda c, t=level: t[c]})
        for a, b in itertools.combinations([r.box for r in regimes], 2):
            apart_in_mean = a.mean_kv_max < b.mean_kv_min or b.mean_kv_max < a.mean_kv_min
            apart_in_max = a.skew_max < b.skew_min or b.skew_max < a.skew_min
            assert apart_in_mean or apart_in_max


def test_no_box_reaches_beyond_the_measured_lengths():
    rng = np.random.default_rng(5)
    level = {c: rng.uniform(60, 140) for c in cells()}
    for box in (r.box for r in decide({XQA: lambda c: level[c]})):
        assert min(MEANS) <= box.mean_kv_min <= box.mean_kv_max <= max(MEANS)
        assert 1000 <= box.skew_min <= box.skew_max <= 1000 * RAGGED


def test_a_tactic_for_short_requests_is_not_chosen_beyond_them():
    narrow = f"{XQA}[max_kv=1000]"
    regimes = decide({narrow: lambda c: 70 if c.max_kv <= 1000 else np.nan})
    chosen = [r.box for r in regimes if r.box.candidate == narrow]
    assert chosen
    for box in chosen:  # the longest request of a box: its mean at a skew just below the next thousandth
        assert (box.mean_kv_max * (box.skew_max + 1) - 1) // 1000 <= 1000


@pytest.mark.parametrize("missing", MEANS)
def test_cells_in_which_the_default_was_not_measured_are_left_to_it(missing):
    grid = cells()
    default = [100.0 if c.mean_kv != missing else np.nan for c in grid]
    regimes = decide_bucket(bucket_of({DEFAULT: default, XQA: [80.0] * len(grid)}, grid), 1, PRIORITY, RULE)
    for cell in grid:
        assert served(regimes, cell) == [DEFAULT if cell.mean_kv == missing else XQA]


def test_a_bucket_in_which_nothing_was_measured_has_no_box():
    samples = bucket_of({DEFAULT: [np.nan], XQA: [np.nan]})
    assert decide_bucket(samples, 1, PRIORITY, RULE) == ()


def test_a_candidate_that_failed_in_one_cell_may_win_the_boxes_without_it():
    failed = Exclusion(XQA, Reason.FAILED, "out of memory", cell=7)
    regimes = decide({XQA: lambda c: 70 if c != cells()[7] else np.nan}, exclusions=[failed])
    assert served(regimes, cells()[0]) == [XQA]
    assert served(regimes, cells()[7]) == [DEFAULT]


def stored(*rows):
    return [Box(8, *bounds, name) for *bounds, name in rows]


LOW = (128, 512, 1000, 1000 * RAGGED)
HIGH = (1449, 8192, 1000, 1000 * RAGGED)


def test_stored_boundaries_stay_when_moving_them_gains_less_than_delta():
    before = stored((*LOW, XQA), (*HIGH, DEFAULT))
    # the crossing has moved a point up, by 2% in one point of four: 0.5% on average
    regimes = decide({XQA: lambda c: 80 if c.mean_kv <= 512 else (98 if c.mean_kv == 2048 else 130)}, before)
    assert [r.box for r in regimes] == before


def test_stored_boundaries_go_when_new_ones_gain_delta():
    before = stored((*LOW, XQA), (*HIGH, DEFAULT))
    # the winner's region has grown: a quarter of the cells would gain 22%, 5.6% on average
    low, high = decide({XQA: lambda c: 80 if c.mean_kv <= 2048 else 125}, before)
    assert (low.box.mean_kv_max, low.box.candidate, high.box.candidate) == (2048, XQA, DEFAULT)


def test_a_stored_winner_that_is_now_slower_than_the_default_goes_even_where_its_box_stays():
    before = stored((*LOW, XQA), (*HIGH, DEFAULT))
    regimes = decide({XQA: lambda c: 101}, before)
    assert {r.box.candidate for r in regimes} == {DEFAULT}


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_threshold_does_not_flip_a_stored_plan(seed):
    rng = np.random.default_rng(seed)
    grid = cells()

    def draw():
        return {
            name: base * np.exp(rng.normal(0, 0.01, size=(len(grid), 15)))
            for name, base in ((DEFAULT, 100.0), (XQA, 96.9), (CUDNN, 96.5))  # all around 3%
        }

    plan = [r.box for r in decide_bucket(bucket_of(draw(), grid), 1, PRIORITY, RULE)]
    for _ in range(20):
        again = [r.box for r in decide_bucket(bucket_of(draw(), grid), 1, PRIORITY, RULE, plan)]
        assert again == plan


def test_a_choice_that_neither_half_of_the_rounds_makes_is_left_to_the_default():
    # The twin is off by +2% in even rounds and -2% in odd ones: in all of them its median is near 0, so that a gain of
    # 3.5% clears delta, and in each half it is 2%, so that a choice must gain 4%.
    twin = [100.0] * ROUNDS
    twin[0:10:2], twin[10::2] = [102.0] * 5, [99.9] * 3
    twin[1:9:2], twin[9::2] = [98.0] * 4, [100.1] * 3
    grid = cells(MEANS[:1])[:1]
    (regime,) = decide_bucket(
        bucket_of({DEFAULT: [100.0], "default/twin": [twin], XQA: [96.5]}, grid), 1, PRIORITY, RULE
    )
    assert (regime.box.candidate, regime.decision.reason, regime.speedup) == (DEFAULT, Reason.UNCONFIRMED, 1.0)
    (verdict,) = regime.decision.verdicts
    assert verdict.reason is Reason.UNCONFIRMED and verdict.mean_r == pytest.approx(np.log(0.965))
    steady = {DEFAULT: [100.0], XQA: [96.5]}
    assert decide_bucket(bucket_of(steady, grid), 1, PRIORITY, RULE)[0].box.candidate == XQA


def test_a_challenger_that_its_halves_do_not_confirm_leaves_a_stored_choice_that_is_still_good():
    twin = [100.0] * ROUNDS
    twin[0:10:2], twin[10::2] = [102.0] * 5, [99.9] * 3
    twin[1:9:2], twin[9::2] = [98.0] * 4, [100.1] * 3
    grid = cells(MEANS[:1])[:1]
    times = {DEFAULT: [100.0], "default/twin": [twin], XQA: [99.5], CUDNN: [96.2]}
    held = [Box(8, 128, 128, 1000, 1000, XQA)]
    (regime,) = decide_bucket(bucket_of(times, grid), 1, PRIORITY, RULE, held)
    assert (regime.box.candidate, regime.decision.reason) == (XQA, Reason.INCUMBENT)


# --- rounds as batches: what a plan is asked by is each round's own longest request


def ragged(longest, lost, base=70.0):
    """One mean, 2 x 15 rounds with these longest requests; xqa takes `base`, and 200 in the rounds of `lost`."""
    xqa = [200.0 if i in lost else base for i in range(ROUNDS)]
    grid = [Cell(1000, 2000, "ragged"), Cell(1000, 2000, "as ragged")]
    samples = bucket_of({DEFAULT: [100.0] * 2, XQA: [xqa] * 2}, grid)
    return replace(samples, longest=np.array([longest] * 2))


def test_batches_with_a_longer_request_are_decided_apart():
    longest = [1500] * 10 + [6000] * 5
    regimes = decide_bucket(ragged(longest, range(10, 15)), 1, PRIORITY, RULE)
    short, long = sorted(regimes, key=lambda r: r.box.skew_min)
    assert (short.box.candidate, long.box.candidate) == (XQA, DEFAULT)
    assert (short.box.skew_max, long.box.skew_min) == (1561, 5960)  # bins of 1.25^2 = 1.5625 and 1.25^8 = 5.9605
    assert (short.box.skew_min, long.box.skew_max) == (1500, 6000)


def test_without_a_difference_between_them_they_stay_one_box_with_all_that_was_measured():
    (regime,) = decide_bucket(ragged([1500] * 10 + [6000] * 5, ()), 1, PRIORITY, RULE)
    assert regime.box == Box(8, 1000, 1000, 1500, 6000, XQA)


def test_between_two_points_every_length_is_served_and_a_jump_at_a_power_of_two_is_a_border():
    planned = plan_cells(1, (1024, 4096, 16384), default_profiles(), 16384, 16384, ROUNDS)
    means = np.array([means_of(cell.lengths) for cell in planned])
    times = {DEFAULT: np.full(means.shape, 100.0), XQA: np.where(means <= 4096, 80.0, 120.0)}
    samples = bucket_of(times, [cell.cell for cell in planned], bucket=1)
    regimes = decide_bucket(replace(samples, means=means, longest=means), 1, PRIORITY, RULE)
    for kv in range(1024, 16385, 16):
        assert [r.box.candidate for r in regimes if r.box.holds(kv, kv)] == [XQA if kv <= 4096 else DEFAULT]


FA2 = "flashinfer_fa2_tc"
STRIPS = (
    Cell(128, 128, "equal"),
    Cell(512, 512, "equal"),
    Cell(2048, 2048, "equal"),
    Cell(128, 512, "ragged"),
    Cell(2048, 8192, "ragged"),
)
TWICE = (*STRIPS, *(replace(cell, profile=f"as {cell.profile}") for cell in STRIPS))


@pytest.mark.parametrize(
    ("xqa", "fa2"),
    [([60, 75, 130, 300, 300], [130, 60, 130, 80, 300]), ([60, 60, 130, 130, 130], [130, 130, 130, 90, 250])],
)
def test_boxes_of_one_strip_of_skews_never_take_the_cells_of_another(xqa, fa2):
    samples = bucket_of({DEFAULT: [100.0] * 10, XQA: xqa * 2, FA2: fa2 * 2}, TWICE)
    regimes = decide_bucket(samples, 1, PRIORITY, RULE)
    table = BackendPlan([8], [DEFAULT, XQA, FA2])
    for box in (r.box for r in regimes):
        table.set(
            8, box.mean_kv_min, box.mean_kv_max, box.skew_min, box.skew_max, backend=box.candidate
        )  # or it raises
    for i, cell in enumerate(STRIPS):
        fastest = min((100, DEFAULT), (xqa[i], XQA), (fa2[i], FA2))[1]
        assert served(regimes, cell) == [fastest]


def test_a_tactic_whose_limit_leaves_it_no_box_leaves_the_part_to_the_default():
    narrow = f"{CUDNN}[max_kv=4096]"
    samples = bucket_of({DEFAULT: [100.0], narrow: [70.0]}, [Cell(4096, 4096, "equal")])
    (regime,) = decide_bucket(samples, 1, PRIORITY, RULE)  # at a skew below 1.001, a mean of 4093 may have 4097 tokens
    assert regime.box == Box(8, 4096, 4096, 1000, 1000, DEFAULT)


def test_the_search_proposes_no_rectangle_that_is_too_long_for_a_tactic():
    narrow = f"{CUDNN}[max_kv=4096]"
    grid = [Cell(mean, round(mean * skew), "lognormal-0.7") for mean in (1000, 1400, 2000) for skew in (1.1, 1.9, 2.5)]
    samples = bucket_of({DEFAULT: [100.0] * 9, narrow: [70.0] * 9}, grid)
    evidence = prepared(samples)
    search = Search(evidence, Plane.of(evidence, Subcells.of(samples).bins), RULE)
    found = list(search.rectangles.within(Part(tuple(range(9))), 0.1))
    assert found
    for rectangle in found:
        cells = list(rectangle.part.cells)
        mean, skew = evidence.mean_range[1, cells].max(), evidence.skew_range[1, cells].max()
        assert (mean * (skew + 1) - 1) // 1000 <= 4096
