"""What a lookup costs: in C++, through Python, and in the dict with bisect that one would write instead."""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from dispatch._core import BackendPlan, PlanEntry, lookup_ns

Query = tuple[int, int, int]
Box = tuple[int, int, int, int]  # mean_kv_min, mean_kv_max, skew_min, skew_max

SHAPES = ((20, 3), (1366, 3), (20, 205))  # buckets, boxes a bucket: a usual table, and two of about 4096
LONGEST_KV = 131072
BATCHES_PER_BUCKET = 8  # captured sizes of an engine lie about 8 apart
# A short list would be learnt by the branch predictor, and its boxes would stay in the first-level cache.
CPP_QUERIES = 16384
PYTHON_QUERIES = 2048  # fewer, because the dict takes microseconds for the last shape
REPEATS = 4


@dataclass(frozen=True, slots=True)
class LookupTiming:
    """`ns` a lookup, the median over the rounds; `vs_dict` is ns over dict_bisect's for the same shape."""

    implementation: str  # "cpp", "python" or "dict_bisect"
    buckets: int
    boxes_per_bucket: int
    ns: float
    vs_dict: float


class DictBisect:
    """The plan's lookup in plain Python: bisect over the buckets, then a scan of that bucket's boxes."""

    def __init__(self, plan: BackendPlan) -> None:
        self._buckets = plan.buckets
        self._rows: dict[int, list[tuple[int, int, int, int, PlanEntry]]] = {b: [] for b in self._buckets}
        for e in plan.entries:
            self._rows[e.bucket].append((e.mean_kv_min, e.mean_kv_max, e.skew_min, e.skew_max, e))

    def lookup(self, batch_size: int, mean_kv: int, skew: int) -> PlanEntry | None:
        """As BackendPlan.lookup."""
        at = bisect_left(self._buckets, batch_size)
        if batch_size <= 0 or at == len(self._buckets):
            return None
        for mean_min, mean_max, skew_min, skew_max, entry in self._rows[self._buckets[at]]:
            if mean_min > mean_kv:  # the entries are sorted by it
                return None
            if mean_kv <= mean_max and skew_min <= skew <= skew_max:
                return entry
        return None


def random_boxes(rng: random.Random, count: int) -> list[Box]:
    """`count` disjoint boxes of random cuts that leave a hole of about one box, so that some lookups miss."""
    boxes: list[Box] = []

    def split(box: Box, parts: int) -> None:
        if parts == 1:
            boxes.append(box)
            return
        left = rng.randint(max(1, parts // 4), max(1, 3 * parts // 4))
        mean_min, mean_max, skew_min, skew_max = box
        if rng.random() < 0.5:
            cut = mean_min + (mean_max - mean_min) * left // parts
            split((mean_min, cut, skew_min, skew_max), left)
            split((cut + 1, mean_max, skew_min, skew_max), parts - left)
        else:
            cut = skew_min + (skew_max - skew_min) * left // parts
            split((mean_min, mean_max, skew_min, cut), left)
            split((mean_min, mean_max, cut + 1, skew_max), parts - left)

    split((0, LONGEST_KV, 0, LONGEST_KV), count + 1)
    boxes.pop(rng.randrange(len(boxes)))
    return boxes


def random_plan(rng: random.Random, buckets: int, boxes_per_bucket: int) -> BackendPlan:
    """A frozen plan whose buckets are cut differently, so that no branch is the same for all."""
    sizes = [BATCHES_PER_BUCKET * (i + 1) for i in range(buckets)]
    names = ["fa3", "flashinfer_cudnn", "flashinfer_xqa"]
    plan = BackendPlan(sizes, names)
    for size in sizes:
        for box in random_boxes(rng, boxes_per_bucket):
            plan.set(size, *box, backend=rng.choice(names))
    plan.freeze()
    return plan


def random_queries(rng: random.Random, plan: BackendPlan, count: int) -> list[Query]:
    """Steps of every batch size that the plan holds, and of every length."""
    largest = plan.buckets[-1]
    return [(rng.randint(1, largest), rng.randint(0, LONGEST_KV), rng.randint(0, LONGEST_KV)) for _ in range(count)]


def _python_ns(lookup: Callable[[int, int, int], PlanEntry | None], queries: list[Query], repeats: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(repeats):
        for batch_size, mean_kv, skew in queries:
            lookup(batch_size, mean_kv, skew)
    return (time.perf_counter_ns() - start) / (len(queries) * repeats)


def _timers(plan: BackendPlan, queries: list[Query]) -> dict[str, Callable[[], float]]:
    few = queries[:PYTHON_QUERIES]
    twin = DictBisect(plan)
    return {
        "cpp": lambda: lookup_ns(plan, queries, REPEATS),
        "python": lambda: _python_ns(plan.lookup, few, REPEATS),
        "dict_bisect": lambda: _python_ns(twin.lookup, few, REPEATS),
    }


def run(seed: int = 0, rounds: int = 15) -> list[LookupTiming]:
    """Time the three implementations on each of SHAPES in one process, `rounds` times in turn.

    The lookups are independent of one another and follow without a pause: the cost in a stream, not that of a
    first touch of cold memory. The Python figures include the loop around the call.
    """
    rng = random.Random(seed)
    timers: list[tuple[int, int, str, Callable[[], float]]] = []
    for buckets, boxes in SHAPES:
        plan = random_plan(rng, buckets, boxes)
        queries = random_queries(rng, plan, CPP_QUERIES)
        timers += [(buckets, boxes, name, timer) for name, timer in _timers(plan, queries).items()]
    samples: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for buckets, boxes, name, timer in timers:
            samples[buckets, boxes, name].append(timer())
    ns = {key: statistics.median(values) for key, values in samples.items()}
    return [
        LookupTiming(name, buckets, boxes, value, value / ns[buckets, boxes, "dict_bisect"])
        for (buckets, boxes, name), value in ns.items()
    ]
