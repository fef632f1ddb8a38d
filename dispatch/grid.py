"""Which batch sizes are captured, and at which mean KV lengths they are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dispatch.errors import ConfigError

SMALLEST_MEAN_KV = 128  # below it a decode kernel's time is its launch, whichever kernel it is
MAX_POINTS = 8
_BUCKET_STEPS = ((8, 8), (64, 8), (128, 16), (256, 32), (512, 64))  # (up to, step), as engines space their captures


def capture_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, then steps that widen, up to and including `max_batch_size`."""
    if max_batch_size < 1:
        raise ConfigError(f"max batch size {max_batch_size}: must be at least 1")
    buckets = [1, 2, 4]
    for limit, step in _BUCKET_STEPS:
        buckets += range(buckets[-1] // step * step + step, limit + 1, step)
    while buckets[-1] < max_batch_size:
        buckets.append(buckets[-1] + 128)
    return (*(b for b in buckets if b < max_batch_size), max_batch_size)


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets as a tuple. Raises ConfigError unless they are positive and strictly ascending."""
    if not buckets:
        raise ConfigError("buckets: at least one batch size is needed")
    for before, bucket in zip((0, *buckets), buckets, strict=False):
        if bucket < 1:
            raise ConfigError(f"bucket {bucket}: must be at least 1")
        if bucket == before:
            raise ConfigError(f"bucket {bucket} is listed twice")
        if bucket < before:
            raise ConfigError(f"bucket {bucket} comes after {before}: buckets must be ascending")
    return tuple(buckets)


def kv_grid(max_seq_len: int) -> tuple[int, ...]:
    """Mean KV lengths in tokens, log-spaced up to `max_seq_len`: at most 8, neighbours at least 2x apart.

    They begin at 128, or at an eighth of a `max_seq_len` below 1024. A factor of 2 is fine enough: between two
    neighbours the ratio of two kernels' times is nearly straight.
    """
    if max_seq_len < 1:
        raise ConfigError(f"max sequence length {max_seq_len}: must be at least 1")
    smallest = min(SMALLEST_MEAN_KV, max(1, max_seq_len // 8))
    octaves = math.log2(max_seq_len / smallest)
    steps = max(1, min(MAX_POINTS - 1, math.floor(octaves)))
    points = (round(smallest * 2 ** (octaves * i / steps)) for i in range(steps + 1))
    return tuple(dict.fromkeys(points))
