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
    assert kv_grid(511) == (128, 511)
    assert kv_grid(512) == (128, 256, 512)


@pytest.mark.parametrize("longest", [1, 5, 127, 128])
def test_lengths_that_are_all_short_have_one_point(longest: int) -> None:
    assert kv_grid(longest) == (longest,)


@pytest.mark.parametrize("longest", [129, 200, 255])
def test_just_above_the_smallest_point_there_are_the_two_ends(longest: int) -> None:
    assert kv_grid(longest) == (128, longest)


@settings(deadline=None)
@given(st.integers(256, 2**31 - 1) | st.integers(256, 20_000))
def test_the_points_go_from_128_to_the_longest_at_least_2x_apart(longest: int) -> None:
    grid = kv_grid(longest)
    assert (grid[0], grid[-1]) == (128, longest)
    assert len(grid) <= 8
    assert all(above >= 2 * below for below, above in pairwise(grid))


@settings(deadline=None)
@given(st.integers(256, 2**31 - 1))
def test_the_points_are_evenly_spaced_in_their_logarithm(longest: int) -> None:
    grid = kv_grid(longest)
    ratio = (longest / 128) ** (1 / (len(grid) - 1))
    for below, above in pairwise(grid):
        assert (below - 0.5) * ratio - 0.5 <= above <= (below + 0.5) * ratio + 0.5  # each is rounded


@pytest.mark.parametrize("longest", [0, -128])
def test_a_longest_request_below_1_token_is_refused(longest: int) -> None:
    with pytest.raises(ConfigError, match=f"max sequence length {longest}"):
        kv_grid(longest)
