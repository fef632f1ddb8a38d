"""Length profiles: the means asked for, the spread promised, and the same lengths in every run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from dispatch.bench.profiles import (
    SIGMAS,
    FromTrace,
    LogNormal,
    PlannedCell,
    Profile,
    default_profiles,
    plan_cells,
)
from dispatch.bench.trace import Trace

ROUNDS = 15
LONGEST = 1 << 20  # no length of these tests comes near it, unless it says so
PLENTY = 1 << 40


@dataclass(frozen=True)
class Fixed:
    """The lengths that it was given."""

    raw: tuple[tuple[float, ...], ...]
    name: str = "fixed"

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float64]:
        return np.array(self.raw)


def trace_of(requests: list[tuple[int, int]]) -> Trace:
    inputs, outputs = np.array(requests, dtype=np.int64).T
    return Trace(inputs, outputs, "0" * 16)


TRACE = trace_of([(100, 10), (2000, 300), (50, 1000), (7, 0), (8000, 1)])


def cells_of(
    bucket: int,
    grid: tuple[int, ...] = (512, 4096),
    profiles: tuple[Profile, ...] = default_profiles(),
    max_seq_len: int = LONGEST,
    capacity: int = PLENTY,
    rounds: int = ROUNDS,
) -> tuple[PlannedCell, ...]:
    return plan_cells(bucket, grid, profiles, max_seq_len, capacity, rounds)


def names(cells: tuple[PlannedCell, ...]) -> list[tuple[int, str]]:
    return [(planned.cell.mean_kv, planned.cell.profile) for planned in cells]


def drawn(planned: PlannedCell) -> list[list[int]]:
    lengths: list[list[int]] = planned.lengths.tolist()
    return lengths


# --- the cells of a bucket


def test_a_cell_is_a_point_and_a_profile_and_has_a_length_a_round_and_request() -> None:
    cells = cells_of(32, profiles=default_profiles(TRACE))
    every = ["equal", "lognormal-0.3", "lognormal-0.7", "lognormal-1.2", "trace"]
    assert names(cells) == [(mean, name) for mean in (512, 4096) for name in every]
    assert {(planned.lengths.shape, planned.lengths.dtype) for planned in cells} == {((ROUNDS, 32), np.dtype(np.int64))}


@pytest.mark.parametrize("bucket", [2, 8, 32, 128])
def test_the_mean_of_every_round_is_the_points_within_rounding(bucket: int) -> None:
    for planned in cells_of(bucket, profiles=default_profiles(TRACE)):
        means = planned.lengths.mean(axis=1)
        assert np.abs(means - planned.cell.mean_kv).max() <= 0.5  # each length is rounded to a token


@pytest.mark.parametrize("bucket", [8, 32, 128])
def test_a_larger_sigma_has_a_longer_longest_request(bucket: int) -> None:
    # Over 15 rounds chance may turn two medians round; over 400 it does not.
    longest = [planned.cell.max_kv for planned in cells_of(bucket, grid=(4096,), rounds=400)]
    assert longest[0] == 4096
    assert all(below < above for below, above in pairwise(longest))


def test_equal_lengths_are_all_the_points() -> None:
    (planned,) = cells_of(8, grid=(512,), profiles=(LogNormal(0.0),))
    assert drawn(planned) == [[512] * 8] * ROUNDS


def test_log_normal_lengths_spread_by_their_sigma() -> None:
    # The standard deviation of n normal numbers is sigma within sigma / sqrt(2 n): 0.35% of it for 40000.
    logs = np.log(LogNormal(0.7).draw(np.random.default_rng(0), (100, 400)))
    assert abs(logs.std() - 0.7) < 4 * 0.0035 * 0.7


def test_the_names_tell_the_profiles_apart() -> None:
    assert [LogNormal(sigma).name for sigma in SIGMAS] == ["equal", "lognormal-0.3", "lognormal-0.7", "lognormal-1.2"]
    assert [profile.name for profile in default_profiles()] == [LogNormal(sigma).name for sigma in SIGMAS]
    assert [profile.name for profile in default_profiles(TRACE)][len(SIGMAS) :] == ["trace"]


def test_the_longest_request_of_a_cell_is_the_median_over_the_rounds() -> None:
    raw = ((1.0, 3.0), (1.0, 1.0), (2.0, 3.0))  # of mean 1000: 500 and 1500; 1000 twice; 800 and 1200
    (planned,) = cells_of(2, grid=(1000,), profiles=(Fixed(raw),), rounds=3)
    assert drawn(planned) == [[500, 1500], [1000, 1000], [800, 1200]]
    assert planned.cell.max_kv == 1200


def test_no_request_is_shorter_than_a_token() -> None:
    (planned,) = cells_of(2, grid=(1000,), profiles=(Fixed(((1e-9, 1.0),)),), rounds=1)
    assert drawn(planned) == [[1, 2000]]


# --- clipping


@pytest.mark.parametrize("bucket", [2, 32, 128])
def test_no_request_is_longer_than_the_longest_served(bucket: int) -> None:
    cells = cells_of(bucket, max_seq_len=6000)
    assert max(int(planned.lengths.max()) for planned in cells) == 6000
    assert max(planned.cell.max_kv for planned in cells) <= 6000


# 500 and 1500 have a mean of 1000. Clipped at 1400 it is 950, exactly 5% short; clipped at 1399 it is 949.5.
@pytest.mark.parametrize(("longest", "kept"), [(1500, True), (1400, True), (1399, False)])
def test_a_cell_that_clipping_leaves_more_than_5_percent_short_is_left_out(longest: int, kept: bool) -> None:
    cells = cells_of(2, grid=(1000,), profiles=(Fixed(((1.0, 3.0),)),), max_seq_len=longest, rounds=1)
    assert len(cells) == kept


def test_a_shortfall_is_judged_by_the_mean_over_the_rounds() -> None:
    raw = ((1.0, 3.0), (1.0, 1.0))  # clipped at 1300 the first round is 10% short, and both together 5%
    assert len(cells_of(2, grid=(1000,), profiles=(Fixed(raw),), max_seq_len=1300, rounds=2)) == 1


def test_at_the_longest_served_only_equal_lengths_are_left() -> None:
    assert names(cells_of(32, grid=(4096,), max_seq_len=4096)) == [(4096, "equal")]


# --- capacity, and lengths that are there already


@pytest.mark.parametrize(("capacity", "points"), [(8 * 4096, [512, 4096]), (8 * 4096 - 1, [512]), (8 * 512 - 1, [])])
def test_points_that_fill_more_than_the_capacity_are_left_out(capacity: int, points: list[int]) -> None:
    cells = cells_of(8, profiles=(LogNormal(0.3),), capacity=capacity)
    assert [planned.cell.mean_kv for planned in cells] == points


def test_a_batch_of_one_has_one_cell_a_point_because_all_its_lengths_are_the_mean() -> None:
    cells = cells_of(1, profiles=default_profiles(TRACE))
    assert names(cells) == [(512, "equal"), (4096, "equal")]
    assert [drawn(planned) for planned in cells] == [[[512]] * ROUNDS, [[4096]] * ROUNDS]


def test_the_first_of_two_profiles_with_the_same_lengths_is_kept() -> None:
    raw = ((1.0, 3.0),)
    profiles = (Fixed(raw, "first"), Fixed(((2.0, 6.0),), "twice as long"), Fixed(((3.0, 1.0),), "another order"))
    cells = cells_of(2, grid=(1000,), profiles=profiles, rounds=1)
    assert names(cells) == [(1000, "first"), (1000, "another order")]


# --- the same lengths in every run


def test_two_runs_draw_the_same_lengths() -> None:
    first = cells_of(32, profiles=default_profiles(TRACE))
    np.random.default_rng().random(5)
    cells_of(8)
    second = cells_of(32, profiles=default_profiles(TRACE))
    assert [drawn(planned) for planned in first] == [drawn(planned) for planned in second]


def test_cells_that_are_left_out_change_no_others() -> None:
    every = {name: drawn(planned) for planned in cells_of(32) for name in names((planned,))}
    fewer = cells_of(32, capacity=32 * 4095)
    assert {name: drawn(planned) for planned in fewer for name in names((planned,))} == {
        (mean, name): lengths for (mean, name), lengths in every.items() if mean == 512
    }


def test_a_trace_changes_no_general_cell() -> None:
    general = [drawn(planned) for planned in cells_of(32)]
    with_trace = [drawn(p) for p in cells_of(32, profiles=default_profiles(TRACE)) if p.cell.profile != "trace"]
    assert with_trace == general


def test_every_round_bucket_point_and_profile_draws_its_own() -> None:
    ragged, grid = (LogNormal(0.7), LogNormal(0.7)), (1 << 16, 1 << 17)
    cells = [planned for bucket in (32, 33) for planned in cells_of(bucket, grid, ragged)]
    # Relative to their mean, and to a hundredth, which rounding to tokens does not reach.
    shapes = {tuple((row[:32] / row[:32].mean()).round(2)) for planned in cells for row in planned.lengths}
    assert len(shapes) == 8 * ROUNDS


# --- a trace


def moments(requests: list[tuple[int, int]]) -> tuple[float, float]:
    """Mean and variance of the KV length in a slot of a full batch.

    A slot holds request (i, o) with a probability of o / sum(o), and then i + 1 .. i + o tokens, each as likely:
    i + (o + 1) / 2 on average, with a mean square of i^2 + i (o + 1) + (o + 1)(2 o + 1) / 6.
    """
    total = sum(o for _, o in requests)
    mean = sum(o * (i + (o + 1) / 2) for i, o in requests) / total
    square = sum(o * (i * i + i * (o + 1) + (o + 1) * (2 * o + 1) / 6) for i, o in requests) / total
    return mean, square - mean * mean


def test_a_trace_gives_the_lengths_of_a_random_decode_step() -> None:
    requests = [(100, 10), (2000, 300), (50, 1000), (8000, 1)]
    lengths = FromTrace(trace_of(requests)).draw(np.random.default_rng(1), (200, 500))
    mean, variance = moments(requests)
    error = math.sqrt(variance / lengths.size)
    assert abs(lengths.mean() - mean) < 4 * error
    # Wrong would be: every request as likely, or all of its output counted. Both are far off these limits.
    assert abs(np.mean([i + (o + 1) / 2 for i, o in requests]) - mean) > 100 * error
    assert abs(sum(o * (i + o) for i, o in requests) / sum(o for _, o in requests) - mean) > 100 * error


def test_a_request_is_met_at_each_of_its_decode_steps() -> None:
    lengths = FromTrace(trace_of([(10, 4)])).draw(np.random.default_rng(0), (10, 40))
    assert set(lengths.ravel()) == {11, 12, 13, 14}  # the new token included


def test_a_request_without_output_is_never_met() -> None:
    lengths = FromTrace(trace_of([(1000, 0), (10, 1), (2000, 0)])).draw(np.random.default_rng(0), (10, 40))
    assert set(lengths.ravel()) == {11}


def test_a_request_is_met_as_often_as_it_has_steps() -> None:
    # (0, 300) against (1000, 100): three quarters of the slots, within 4 * sqrt(3/16 / 40000) = 0.9%
    lengths = FromTrace(trace_of([(0, 300), (1000, 100)])).draw(np.random.default_rng(0), (100, 400))
    assert abs((lengths < 1000).mean() - 0.75) < 0.009
