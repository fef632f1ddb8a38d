"""Which batches of a trace are drawn."""

from __future__ import annotations

import numpy as np

from dispatch.bench.trace import Trace
from dispatch.bench.traffic import batches


def trace_of(inputs, outputs):
    return Trace(np.array(inputs, dtype=np.int64), np.array(outputs, dtype=np.int64), "digest")


def test_batches_fit_into_the_pages_and_have_the_lengths_of_requests_that_are_being_served():
    trace = trace_of([10, 100], [5, 50])
    drawn, share = batches(trace, 4, 20, 1000, num_pages=20, page_size=16)
    assert drawn.shape == (20, 4)
    assert bool(((drawn >= 11) & (drawn <= 15) | (drawn >= 101) & (drawn <= 150)).all())
    assert int((-(-drawn // 16)).sum(axis=1).max()) <= 20  # four of the long ones take 28 at least
    assert 0 < share < 1


def test_no_batch_where_none_fits_and_all_where_all_do_and_none_longer_than_served():
    trace = trace_of([1000], [10])
    assert batches(trace, 4, 20, 2000, num_pages=200, page_size=16)[0].shape == (0, 4)
    drawn, share = batches(trace, 4, 20, 64, num_pages=16, page_size=16)
    assert share == 1
    assert drawn.tolist() == [[64] * 4] * 20
