"""Buckets to capture, and mean KV lengths to measure."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.errors import ConfigError
from dispatch.grid import capture_buckets, check_buckets, kv_grid

UP_TO_512 = (
    *(1, 2, 4, 8),
    *(16, 24, 32, 40, 48, 56, 64),
    *(80, 96, 112, 128),
    *(160, 192, 224, 256),
    *(320, 384, 448, 512),
)


# --- capture_buckets


def test_the_buckets_up_to_512_are_spaced_as_engines_space_them() -> None:
    assert capture_buckets(512) == UP_TO_512


def test_above_512_every_step_is_128() -> None:
    assert capture_buckets(800) == (*UP_TO_512, 640, 768, 800)


@pytest.mark.parametrize("most", [*range(1, 150), 511, 513, 639, 640, 641, 5000])
def test_smaller_buckets_are_followed_by_the_largest_batch_itself(most: int) -> None:
    below = [bucket for bucket in capture_buckets(most + 1000) if bucket < most]
    assert capture_buckets(most) == (*below, most)


@pytest.mark.parametrize("most", [0, -1])
def test_a_largest_batch_below_1_is_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=f"max batch size {most}"):
        capture_buckets(most)


# --- check_buckets


def test_ascending_buckets_are_taken_as_a_tuple() -> None:
    assert check_buckets([1, 3, 1000]) == (1, 3, 1000)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "at least one"),
        ([0], "bucket 0: must be at least 1"),
        ([-1, 2], "bucket -1: must be at least 1"),
        ([1, 2, 0], "bucket 0: must be at least 1"),
        ([1, 1], "bucket 1 is listed twice"),
        ([1, 4, 2], "bucket 2 comes after 4"),
        ([8, 4, 4], "bucket 4 comes after 8"),
    ],
)
def test_buckets_that_are_not_positive_and_ascending_are_refused(buckets: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_buckets(buckets)


# --- kv_grid


def test_up_to_16384_the_points_are_the_powers_of_2() -> None:
    assert kv_grid(16384) == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # 7 octaves: the 8 points allowed


def test_beyond_16384_the_8_points_move_apart() -> None:
    assert kv_grid(131072) == tuple(round(128 * 1024 ** (i / 7)) for i in range(8))  # 10 octaves are a factor of 1024


def test_an_octave_that_is_begun_is_no_reason_for_a_point() -> None:
    # 4.9996 octaves are four steps of (4095 / 128) ** (1 / 4) = 2.3783: 304.4, 724.0, 1721.9
    assert kv_grid(4095) == (128, 304, 724, 1722, 4095)
    assert len(kv_grid(4096)) == 6


def test_below_1024_the_points_begin_at_an_eighth_of_the_longest() -> None:
    assert kv_grid(800) == (100, 200, 400, 800)
    assert kv_grid(64) == (8, 16, 32, 64)


@pytest.mark.parametrize(("longest", "points"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (8, (1, 2, 4, 8))])
def test_the_shortest_requests_have_the_points_that_there_are(longest: int, points: tuple[int, ...]) -> None:
    assert kv_grid(longest) == points


@settings(deadline=None)
@given(st.integers(1024, 2**31 - 1) | st.integers(1024, 20_000))
def test_the_points_go_from_128_to_the_longest_at_least_2x_apart(longest: int) -> None:
    grid = kv_grid(longest)
    assert (grid[0], grid[-1]) == (128, longest)
    assert len(grid) <= 8
    assert all(above >= 2 * below - 1 for below, above in pairwise(grid))  # each is rounded


@settings(deadline=None)
@given(st.integers(1, 1023))
def test_shorter_ones_end_at_the_longest_too_and_ascend(longest: int) -> None:
    grid = kv_grid(longest)
    assert (grid[0], grid[-1]) == (max(1, longest // 8), longest)
    assert all(above > below for below, above in pairwise(grid))


@settings(deadline=None)
@given(st.integers(1024, 2**31 - 1))
def test_the_points_are_evenly_spaced_in_their_logarithm(longest: int) -> None:
    grid = kv_grid(longest)
    ratio = (longest / 128) ** (1 / (len(grid) - 1))
    for below, above in pairwise(grid):
        assert (below - 0.5) * ratio - 0.5 <= above <= (below + 0.5) * ratio + 0.5  # each is rounded


@pytest.mark.parametrize("longest", [0, -128])
def test_a_longest_request_below_1_token_is_refused(longest: int) -> None:
    with pytest.raises(ConfigError, match=f"max sequence length {longest}"):
        kv_grid(longest)
