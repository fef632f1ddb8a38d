"""Which combinations of candidates are captured, where several layer groups have plans."""

from __future__ import annotations

from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.engine.variants import extra_variants
from dispatch.plan import DecidedBox, StoredPlan
from dispatch.samples import Box

A, B, C, D = map(Candidate, "abcd")


def plan_of(*boxes):
    """Of (mean_kv_min, mean_kv_max, candidate, speedup), at bucket 8 and any skew up to 9000."""
    decided = [DecidedBox(Box(8, low, high, 1000, 9000, name), Reason.FASTEST, gain) for low, high, name, gain in boxes]
    return StoredPlan({}, "", "a", (8,), tuple(decided))


def test_one_group_wants_what_its_boxes_name_beside_the_default_the_best_first():
    plan = plan_of((10, 19, "b", 1.1), (20, 39, "a", 1.0), (40, 79, "c", 1.3), (80, 159, "b", 1.05))
    assert extra_variants([plan], (A,), 8) == [(C,), (B,)]
    assert extra_variants([plan], (A,), 4) == []  # no box there
    assert extra_variants([None], (A,), 8) == []


def test_what_gains_most_over_the_lengths_that_it_serves_comes_first():
    """Seen in vLLM at batch 128: of four kernels one gained 1.23x over two bins, another 1.08x over most lengths."""
    plan = plan_of((100, 199, "b", 1.2), (200, 399, "c", 1.11), (400, 799, "c", 1.1), (800, 1599, "d", 1.15))
    # 0.2, 0.11 + 0.1 and 0.15, each over a doubling of the mean
    assert extra_variants([plan], (A,), 8) == [(C,), (B,), (D,)]


def test_a_box_from_no_tokens_on_is_no_error():
    assert extra_variants([plan_of((0, 9, "b", 1.1))], (A,), 8) == [(B,)]


def test_groups_with_the_same_boxes_choose_together_and_no_mixture_takes_the_place_of_what_is_chosen():
    plan = plan_of((1, 9, "b", 1.3), (10, 19, "c", 1.1), (20, 29, "d", 1.05))
    assert extra_variants([plan, plan], (A, A), 8) == [(B, B), (C, C), (D, D)]


def test_where_a_group_has_no_box_its_default_is_combined_with_what_the_others_choose():
    plans = [plan_of((10, 39, "b", 1.3)), plan_of((20, 79, "c", 1.2)), None]
    # 20 to 39, then 10 to 19, then 40 to 79
    assert extra_variants(plans, (A, D, D), 8) == [(B, C, D), (B, D, D), (A, C, D)]


def test_boxes_that_touch_are_no_overlap():
    plans = [plan_of((1, 9, "b", 1.3)), plan_of((10, 19, "c", 1.2))]
    assert extra_variants(plans, (A, A), 8) == [(B, A), (A, C)]


def test_the_number_of_groups_costs_no_more_than_their_boxes():
    plan = plan_of((1, 9, "b", 1.3), (10, 19, "c", 1.1))
    assert extra_variants([plan] * 64, (A,) * 64, 8) == [(B,) * 64, (C,) * 64]  # of 3 to the power of 64 combinations
