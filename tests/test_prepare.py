"""The plan's implementation where it has one, the default otherwise; never an exception because of the plan."""

from __future__ import annotations

import logging

import pytest
import torch

from dispatch import BackendPlan, BuiltImpls, Candidate, StepInputs, prepare_fmha_impl
from dispatch.engine.prepare import ABOVE_BUCKETS, NO_ROWS, OUTSIDE

DEFAULT, XQA, FA3 = "the default", "xqa, built", "fa3 with splits, built"


@pytest.fixture
def plan():
    table = BackendPlan([4, 8], ["fa3", "flashinfer_xqa"])
    table.set(4, 100, 1000, 100, 4000, "flashinfer_xqa")
    table.set(8, 100, 1000, 100, 4000, "fa3", "num_splits=2")
    table.freeze()
    return table


@pytest.fixture
def impls():
    built = BuiltImpls(Candidate("torch_sdpa"))
    built.add(4, Candidate("flashinfer_xqa"), XQA)
    built.add(8, Candidate("fa3", "num_splits=2"), FA3)
    return built


def step(*lengths, padding=0):
    rows = torch.tensor([*lengths, *[1] * padding], dtype=torch.int32)
    return StepInputs(len(lengths), rows, rows, torch.zeros(len(rows), 1, dtype=torch.int32))


def test_a_step_inside_a_box_gets_the_planned_implementation(plan, impls):
    assert prepare_fmha_impl(step(200, 300, 400), plan, impls, DEFAULT) == XQA
    assert impls.hits == {(4, "flashinfer_xqa"): 1}


def test_the_tactic_is_part_of_what_is_looked_for(plan, impls):
    assert prepare_fmha_impl(step(*[200] * 5), plan, impls, DEFAULT) == FA3
    assert impls.hits == {(8, "fa3[num_splits=2]"): 1}


def test_padding_rows_count_neither_as_batch_nor_in_the_mean(plan, impls):
    # two live rows of 1000 are the box's edge; the padding's two tokens would make it 1001
    assert prepare_fmha_impl(step(1000, 1000, padding=2), plan, impls, DEFAULT) == XQA


@pytest.mark.parametrize(("extra", "served"), [(0, XQA), (1, DEFAULT)])
def test_the_mean_is_rounded_up(plan, impls, extra, served):
    # four rows of 1000 are the box's edge; with a token more the mean is 1000.25, which counts as 1001
    lengths = (1000, 1000, 1000, 1000 + extra)
    assert prepare_fmha_impl(step(*lengths), plan, impls, DEFAULT) == served


def test_lengths_outside_every_box_get_the_default(plan, impls):
    assert prepare_fmha_impl(step(200, 4001), plan, impls, DEFAULT) == DEFAULT
    assert impls.misses == {(4, OUTSIDE): 1}


def test_a_batch_above_the_largest_bucket_gets_the_default(plan, impls):
    assert prepare_fmha_impl(step(*[200] * 9), plan, impls, DEFAULT) == DEFAULT
    assert impls.misses == {(0, ABOVE_BUCKETS): 1}


def test_a_batch_without_live_rows_gets_the_default(plan, impls):
    assert prepare_fmha_impl(step(padding=4), plan, impls, DEFAULT) == DEFAULT
    assert impls.misses == {(0, NO_ROWS): 1}


def test_a_planned_backend_that_was_not_built_gets_the_default(plan):
    impls = BuiltImpls(Candidate("torch_sdpa"))
    assert prepare_fmha_impl(step(200, 300), plan, impls, DEFAULT) == DEFAULT
    assert impls.misses == {(4, "flashinfer_xqa is planned and not available"): 1}


def test_another_tactic_than_the_planned_one_is_not_taken_for_it(plan):
    impls = BuiltImpls(Candidate("torch_sdpa"))
    impls.add(8, Candidate("fa3"), FA3)
    assert prepare_fmha_impl(step(*[200] * 5), plan, impls, DEFAULT) == DEFAULT


def test_a_box_that_the_default_won_is_a_hit_and_served_by_it(plan):
    impls = BuiltImpls(Candidate("flashinfer_xqa"))
    assert prepare_fmha_impl(step(200, 300), plan, impls, DEFAULT) == DEFAULT
    assert (impls.hits, impls.misses) == ({(4, "flashinfer_xqa"): 1}, {})


def test_an_empty_plan_gives_the_default_everywhere():
    empty = BackendPlan([4], [])
    empty.freeze()
    assert prepare_fmha_impl(step(200), empty, BuiltImpls(Candidate("fa3")), DEFAULT) == DEFAULT


def test_every_miss_is_counted_and_each_bucket_and_reason_is_logged_once(plan, impls, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            prepare_fmha_impl(step(200, 4001), plan, impls, DEFAULT)
            prepare_fmha_impl(step(*[5000] * 5), plan, impls, DEFAULT)
    assert impls.misses == {(4, OUTSIDE): 3, (8, OUTSIDE): 3}
    assert [r.getMessage() for r in caplog.records] == [
        "bucket 4: lengths outside what was measured: the default serves it",
        "bucket 8: lengths outside what was measured: the default serves it",
    ]
