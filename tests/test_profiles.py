"""Length profiles: the means asked for, the spread promised, and the same lengths in every run."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from dispatch.bench.profiles import (
    SIGMAS,
    Drawn,
    FromTrace,
    LogNormal,
    OneLong,
    PlannedCell,
    Profile,
    default_profiles,
    plan_cells,
)
from dispatch.bench.trace import Trace

ROUNDS = 15
LONGEST = 1 << 20  # no length of these tests comes near it, unless it says so
PLENTY = 1 << 40


class Fixed(Drawn):
    """The lengths that it was given."""

    def __init__(self, raw: tuple[tuple[float, ...], ...], name: str = "fixed") -> None:
        self.raw, self.name = raw, name

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
    capacity: int | None = None,
    rounds: int = ROUNDS,
) -> tuple[PlannedCell, ...]:
    """Unless it says so, the server is full at the last point, and no other point is measured."""
    return plan_cells(bucket, grid, profiles, max_seq_len, capacity or bucket * grid[-1], rounds)


def points(cells: tuple[PlannedCell, ...]) -> list[int]:
    return list(dict.fromkeys(planned.cell.mean_kv for planned in cells))


def names(cells: tuple[PlannedCell, ...]) -> list[tuple[int, str]]:
    return [(planned.cell.mean_kv, planned.cell.profile) for planned in cells]


def drawn(planned: PlannedCell) -> list[list[int]]:
    lengths: list[list[int]] = planned.lengths.tolist()
    return lengths


# --- the cells of a bucket


def test_a_cell_is_a_point_and_a_profile_and_has_a_length_a_round_and_request() -> None:
    cells = cells_of(32, profiles=default_profiles([TRACE]))
    every = ["equal", "lognormal-0.3", "lognormal-0.7", "lognormal-1.2", "one-long", "trace-requests"]
    assert names(cells) == [(mean, name) for mean in (512, 4096) for name in every]
    assert {(planned.lengths.shape, planned.lengths.dtype) for planned in cells} == {((ROUNDS, 32), np.dtype(np.int64))}


@pytest.mark.parametrize("bucket", [1, 2, 8, 32, 128])
def test_the_means_of_a_cells_rounds_are_spread_evenly_from_the_middle_below_to_the_middle_above(bucket: int) -> None:
    profiles = default_profiles([TRACE])
    ends = [512, math.sqrt(512 * 4096), math.sqrt(4096 * 16384), 16384]  # the outermost points end at themselves
    for k, planned in enumerate(cells_of(bucket, grid=(512, 4096, 16384), profiles=profiles)):
        (low, high), j = ends[k // 6 :][:2], k % 6
        means = np.sort(planned.lengths.mean(axis=1))
        asked = low * (high / low) ** ((np.arange(ROUNDS) + (j + 0.5) / 6) / ROUNDS)
        assert np.abs(means - asked).max() <= 0.5  # each length is rounded to a token


def test_profiles_of_a_point_have_means_between_those_of_one_another() -> None:
    cells = cells_of(32, grid=(512, 4096))[:5]
    means = np.sort([sorted(planned.lengths.mean(axis=1)) for planned in cells], axis=None)
    # 5 profiles of 15 rounds: 75 means from 512 to sqrt(512 * 4096) = 1448.2, each 1.4% above the last one
    assert np.diff(np.log(means)) == pytest.approx(math.log(8) / 2 / 75, rel=0.15)  # rounded to tokens


def test_where_there_is_one_point_all_rounds_lie_on_it() -> None:
    for planned in cells_of(8, grid=(512,)):
        assert np.abs(planned.lengths.mean(axis=1) - 512).max() <= 0.5


@pytest.mark.parametrize("bucket", [8, 32, 128])
def test_a_larger_sigma_has_a_longer_longest_request_and_one_long_request_the_longest(bucket: int) -> None:
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


def test_rounds_of_a_general_profile_spread_over_its_sigmas_and_over_how_many_are_as_long_as_the_longest() -> None:
    rounds, batch = 400, 128
    raw = LogNormal(0.7, (0.5, 1.0)).draw(np.random.default_rng(0), (rounds, batch))
    alike = (raw == raw.max(axis=1, keepdims=True)).sum(axis=1)
    # 32 to the power of what is evenly spread, rounded: below k + 1 where that power is below k + 0.5
    assert (alike.min(), alike.max()) == (1, 32)
    expected = [math.log(k + 0.5) / math.log(32) for k in (1, 2, 4, 8, 16)]
    assert [(alike <= k).mean() for k in (1, 2, 4, 8, 16)] == pytest.approx(expected, abs=0.01)
    # half of all lengths are below the median, which no limit reaches: their spread tells sigma, within
    # sigma x 0.13 for a normal sample's lower quartile distance of 128
    logs = np.log(raw)
    sigmas = (np.median(logs, axis=1) - np.quantile(logs, 0.25, axis=1)) / 0.6745
    assert np.quantile(sigmas, [0.1, 0.5, 0.9]) == pytest.approx([0.55, 0.75, 0.95], abs=0.1)


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (4, 1), (8, 2), (16, 4), (32, 8)])
def test_small_batches_are_cut_to_a_limit_too(batch: int, most: int) -> None:
    raw = LogNormal(0.7, (0.5, 1.0)).draw(np.random.default_rng(0), (400, batch))
    assert (raw == raw.max(axis=1, keepdims=True)).sum(axis=1).max() == most


def test_the_general_profiles_leave_no_spread_out() -> None:
    ends = [profile.sigmas for profile in default_profiles() if isinstance(profile, LogNormal)]
    assert ends[0] == (0.0, 0.0)  # equal lengths
    assert [low for low, _ in ends[1:]] == [high for _, high in ends[:-1]]
    assert all(low < high for low, high in ends[1:])


def test_the_names_tell_the_profiles_apart() -> None:
    assert [LogNormal(sigma).name for sigma in SIGMAS] == ["equal", "lognormal-0.3", "lognormal-0.7", "lognormal-1.2"]
    general = [*(LogNormal(sigma).name for sigma in SIGMAS), "one-long"]
    assert [profile.name for profile in default_profiles()] == general
    assert [profile.name for profile in default_profiles([TRACE])] == [*general, "trace-requests"]


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


# 500 and 1500 have a mean of 1000. Clipped at 1400 it is 950, exactly 5% short; clipped at 1399 it is 949.5.
@pytest.mark.parametrize(("longest", "kept"), [(1500, True), (1400, True), (1399, False)])
def test_a_cell_that_clipping_leaves_more_than_5_percent_short_is_left_out(longest: int, kept: bool) -> None:
    cells = cells_of(2, grid=(1000,), profiles=(Fixed(((1.0, 3.0),)),), max_seq_len=longest, rounds=1)
    assert len(cells) == kept


def test_a_shortfall_is_judged_by_the_mean_over_the_rounds() -> None:
    raw = ((1.0, 3.0), (1.0, 1.0))  # clipped at 1300 the first round is 10% short, and both together 5%
    assert len(cells_of(2, grid=(1000,), profiles=(Fixed(raw),), max_seq_len=1300, rounds=2)) == 1


def test_at_the_longest_served_only_what_is_never_clipped_is_left() -> None:
    assert names(cells_of(32, grid=(4096,), max_seq_len=4096)) == [(4096, "equal"), (4096, "one-long")]


# --- one long request


def one_long(batch: int, mean_kv: int, longest: int, rounds: int = ROUNDS) -> NDArray[np.float64]:
    return OneLong().lengths(np.random.default_rng(0), batch, np.full(rounds, float(mean_kv)), longest)


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("longest", [1000, 1700, 50_000, LONGEST])  # from the mean to above nine tenths of all tokens
def test_one_long_request_leaves_the_mean_of_every_round_as_it_is(batch: int, longest: int) -> None:
    lengths = one_long(batch, 1000, longest)
    assert lengths.shape == (ROUNDS, batch)
    assert np.abs(lengths.mean(axis=1) - 1000).max() < 1e-9


# 8 requests of 1000 are 8000 tokens: nine tenths are 7200, and 800 are left for 7 requests.
@pytest.mark.parametrize(
    ("longest", "long"), [(LONGEST, 7200), (7201, 7200), (7200, 7200), (7199, 7199), (4096, 4096), (1001, 1001)]
)
def test_one_request_has_nine_tenths_of_the_tokens_or_is_the_longest_served(longest: int, long: int) -> None:
    lengths = np.sort(one_long(8, 1000, longest), axis=1)
    assert lengths[:, -1].tolist() == [long] * ROUNDS
    assert np.abs(lengths[:, :-1] - (8000 - long) / 7).max() < 1e-9


def test_the_long_request_is_any_of_the_batch_from_round_to_round() -> None:
    # 800 rounds: each of 8 requests is it 100 times, within 4 * sqrt(800 * 1/8 * 7/8) = 38.
    times = np.bincount(one_long(8, 1000, LONGEST, rounds=800).argmax(axis=1), minlength=8)
    assert np.abs(times - 100).max() <= 38


def test_one_request_alone_is_as_long_as_the_mean() -> None:
    assert one_long(1, 1000, LONGEST).tolist() == [[1000]] * ROUNDS


def test_where_the_mean_is_the_longest_served_no_request_is_longer_than_another() -> None:
    assert one_long(8, 1000, 1000).tolist() == [[1000] * 8] * ROUNDS


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("mean_kv", [1, 10, 1000])
def test_with_one_long_request_none_is_longer_than_the_longest_served(batch: int, mean_kv: int) -> None:
    for longest in (mean_kv, mean_kv + 1, 2 * mean_kv, 100 * mean_kv):
        assert one_long(batch, mean_kv, longest).max() <= longest


def test_a_cell_of_one_long_request_tells_its_length() -> None:
    cells = [*cells_of(8, (1000,), (OneLong(),)), *cells_of(8, (1000,), (OneLong(),), max_seq_len=4096)]
    assert [planned.cell.max_kv for planned in cells] == pytest.approx([7200, 4096], rel=0.002)  # a skew is in 1/1000


# --- the full server


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (8 * 4096, [512, 4096]),
        (8 * 4096 - 1, [512, 4095]),  # 4095 tokens for each of 8 requests, and 7 that are no whole token each
        (8 * 4095 - 1, [512, 4094]),
        (8 * 512, [512]),
        (8 * 512 - 1, [511]),
        (8, [1]),
        (7, []),
    ],
)
def test_a_point_above_the_capacity_gives_way_to_the_full_server(capacity: int, expected: list[int]) -> None:
    assert points(cells_of(8, profiles=(LogNormal(0.3),), capacity=capacity)) == expected


@pytest.mark.parametrize("grid", [(128, 1024, 65536), (128, 1024, 8192, 65536)])
def test_all_points_above_the_capacity_give_way_to_one(grid: tuple[int, ...]) -> None:
    assert points(cells_of(32, grid, capacity=128_000)) == [128, 1024, 4000]


def test_a_bucket_with_no_point_within_the_capacity_is_measured_at_the_full_server_alone() -> None:
    cells = cells_of(32, grid=(8192, 65536), capacity=128_000)
    assert names(cells) == [(4000, profile.name) for profile in default_profiles()]


def test_a_bucket_of_more_requests_than_the_server_has_tokens_is_not_measured() -> None:
    assert cells_of(32, capacity=31) == ()
    assert points(cells_of(32, profiles=(LogNormal(0.0),), capacity=32)) == [1]


# 1100 is 10% above 1000
@pytest.mark.parametrize(("full", "expected"), [(1001, [1000]), (1100, [1000]), (1101, [1000, 1101])])
def test_a_full_server_within_10_percent_of_the_last_point_is_that_point(full: int, expected: list[int]) -> None:
    assert points(cells_of(8, grid=(1000, 65536), capacity=8 * full)) == expected


def test_the_distance_of_a_full_server_is_that_from_the_last_point_within_it() -> None:
    assert points(cells_of(8, grid=(100, 1000, 1050), capacity=8 * 1049)) == [100, 1000]
    assert points(cells_of(8, grid=(100, 1000, 1050), capacity=8 * 1050)) == [100, 1000, 1050]  # a point as it is


def test_a_server_that_holds_every_request_at_its_longest_is_measured_up_to_there_and_no_further() -> None:
    assert points(cells_of(8, grid=(512, 4096), max_seq_len=4096, capacity=PLENTY)) == [512, 4096]
    assert points(cells_of(8, grid=(512, 8192), max_seq_len=4096, capacity=PLENTY)) == [512, 4096]


def test_the_requests_of_a_full_server_have_all_its_tokens() -> None:
    cells = cells_of(32, grid=(65536,), profiles=default_profiles([TRACE]), capacity=128_000)
    tokens = np.stack([planned.lengths.sum(axis=1) for planned in cells])
    assert tokens[0].tolist() == [128_000] * ROUNDS  # equal lengths
    assert np.abs(tokens - 128_000).max() <= 32 / 2  # each length is rounded to a token


# --- one request


def test_a_batch_of_one_is_measured_with_every_profile_since_each_has_other_means() -> None:
    cells = cells_of(1)
    assert names(cells) == [(mean, profile.name) for mean in (512, 4096) for profile in default_profiles()]
    assert len({planned.lengths.tobytes() for planned in cells}) == len(cells)


# --- the same lengths in every run


def test_two_runs_draw_the_same_lengths() -> None:
    first = cells_of(32, profiles=default_profiles([TRACE]))
    np.random.default_rng().random(5)
    cells_of(8)
    second = cells_of(32, profiles=default_profiles([TRACE]))
    assert [drawn(planned) for planned in first] == [drawn(planned) for planned in second]


def test_points_that_are_left_out_change_no_others_but_their_neighbours() -> None:
    def at_512(cells: tuple[PlannedCell, ...]) -> list[list[list[int]]]:
        return [drawn(planned) for planned in cells if planned.cell.mean_kv == 512]

    grid = (512, 4096, 32768)
    every, full = cells_of(32, grid), cells_of(32, grid, capacity=32 * 30000)
    assert [points(cells) for cells in (every, full)] == [[512, 4096, 32768], [512, 4096, 30000]]
    assert at_512(every) == at_512(full)


def test_a_trace_takes_its_share_of_the_means_and_leaves_the_shapes_of_the_general_cells() -> None:
    def shapes(profiles: tuple[Profile, ...]) -> list[NDArray[np.float64]]:
        cells = cells_of(32, grid=(1 << 16, 1 << 17), profiles=profiles, max_seq_len=1 << 22)
        cells = [p for p in cells if "lognormal" in p.cell.profile]
        return [p.lengths / p.lengths.mean(axis=1, keepdims=True) for p in cells]

    for general, beside in zip(shapes(default_profiles()), shapes(default_profiles([TRACE])), strict=True):
        assert np.abs(general - beside).max() < 1e-3  # but for rounding to tokens


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
