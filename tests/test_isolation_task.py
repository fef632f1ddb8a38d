"""What a child is asked: as large as fits into its memory, and the same on both ends of the pipe."""

from __future__ import annotations

import pytest

from dispatch.gate_inputs import gate_pages, row_sets
from dispatch.isolation.limits import CHILD_BYTES, OUTSIDE_TORCH_BYTES
from dispatch.isolation.task import MOST_LONGEST, Task, work_that_fits
from tests.make import make_spec

ROOM = CHILD_BYTES - OUTSIDE_TORCH_BYTES - (300 << 20)  # beside 300 MiB of scratch


@pytest.mark.parametrize("bucket", [1, 8, 256])
@pytest.mark.parametrize("layer", [{"num_qo_heads": 32, "num_kv_heads": 8}, {"num_qo_heads": 8, "num_kv_heads": 1}])
def test_five_copies_of_the_pages_and_three_of_a_row_in_float32_fit(bucket, layer):
    spec = make_spec(head_dim_qk=128, head_dim_vo=128, **layer)
    work = work_that_fits(spec, bucket, 65536, ("a", "b"), ROOM)
    token_bytes = spec.num_kv_heads * 128 * 2 * 2  # K and V in bf16
    used = 5 * (work.pages(spec) + 1) * 16 * token_bytes + 3 * work.longest * 2 * token_bytes
    assert used <= ROOM
    assert work.longest in (MOST_LONGEST, MOST_LONGEST // 2, MOST_LONGEST // 4)


def test_rows_are_shorter_where_there_is_less_room_and_none_where_there_is_nearly_none():
    spec = make_spec()
    lengths = [work_that_fits(spec, 8, 65536, ("a",), room).longest for room in (1 << 30, 20 << 20, 5 << 20)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2]
    assert work_that_fits(spec, 8, 65536, ("a",), 1 << 10) is None


def test_what_is_served_shorter_than_that_is_tried_at_its_own_length():
    assert work_that_fits(make_spec(), 8, 100, ("a",), 1 << 30).longest == 100


def test_a_batch_holds_no_more_tokens_beside_its_longest_row_than_asked_for():
    spec = make_spec(page_size=1)
    for lengths in row_sets(spec, 64, 4096, 500)[:-1]:
        assert sum(n for n in lengths[1:] if n > 1) <= 500
    assert gate_pages(spec, 64, 4096, 500) <= 4096 + 500 + 63 + 64


def test_a_task_arrives_as_it_was_sent():
    spec = make_spec(kv_strides=(2**14, 128, 64), sliding_window=300)
    work = (work_that_fits(spec, 2, 512, ("a", "b[splits=4]"), 1 << 30),)
    task = Task(spec, 512, True, work, {"a": "m:A"}, {"f": 3}, "cuda", 3, 1 << 29, 17)
    assert Task.from_bytes(task.to_bytes()) == task
