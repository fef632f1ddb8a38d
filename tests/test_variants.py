"""Which combinations of candidates are captured, where several layer groups have plans."""

from __future__ import annotations

from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.engine.variants import MOST_EXTRA, extra_variants
from dispatch.plan import DecidedBox, StoredPlan
from dispatch.samples import Box

A, B, C, D = map(Candidate, "abcd")


def plan_of(*boxes):
    """Of (mean_kv_min, mean_kv_max, candidate, speedup), at bucket 8 and any skew up to 9000."""
    decided = [DecidedBox(Box(8, low, high, 1000, 9000, name), Reason.FASTEST, gain) for low, high, name, gain in boxes]
    return StoredPlan({}, "", "a", (8,), tuple(decided))


def test_one_group_wants_what_its_boxes_name_beside_the_default_the_best_first():
    plan = plan_of((1, 9, "b", 1.1), (10, 19, "a", 1.0), (20, 29, "c", 1.3), (30, 39, "b", 1.05))
    assert extra_variants([plan], (A,), 8) == [(C,), (B,)]
    assert extra_variants([plan], (A,), 4) == []  # no box there
    assert extra_variants([None], (A,), 8) == []


def test_as_many_are_wanted_as_may_be_captured_beside_the_default():
    plan = plan_of(*((10 * i, 10 * i + 9, f"x{i}", 1.1 + i / 10) for i in range(MOST_EXTRA + 2)))
    best = [f"x{i}" for i in range(MOST_EXTRA + 1, 1, -1)]
    assert extra_variants([plan], (A,), 8) == [(Candidate(name),) for name in best]


def test_groups_with_the_same_boxes_choose_together_and_no_mixture_takes_the_place_of_what_is_chosen():
    plan = plan_of((1, 9, "b", 1.3), (10, 19, "c", 1.1), (20, 29, "d", 1.05))
    assert extra_variants([plan, plan], (A, A), 8) == [(B, B), (C, C), (D, D)]


def test_where_a_group_has_no_box_its_default_is_combined_with_what_the_others_choose():
    plans = [plan_of((1, 19, "b", 1.3)), plan_of((10, 29, "c", 1.2)), None]
    # 10 to 19, then 1 to 9, then 20 to 29
    assert extra_variants(plans, (A, D, D), 8) == [(B, C, D), (B, D, D), (A, C, D)]


def test_boxes_that_touch_are_no_overlap():
    plans = [plan_of((1, 9, "b", 1.3)), plan_of((10, 19, "c", 1.2))]
    assert extra_variants(plans, (A, A), 8) == [(B, A), (A, C)]


def test_the_number_of_groups_costs_no_more_than_their_boxes():
    plan = plan_of((1, 9, "b", 1.3), (10, 19, "c", 1.1))
    assert extra_variants([plan] * 64, (A,) * 64, 8) == [(B,) * 64, (C,) * 64]  # of 3 to the power of 64 combinations
