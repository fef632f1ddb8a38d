"""The watch over a real GPU, which must be idle but for what these tests start."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from time import monotonic

import pytest
import torch

from dispatch.bench.sanity import nominal_bandwidth, watch_for
from dispatch.device import current_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COMPUTE = """
import time, torch
a = torch.ones(4096, 4096, device="cuda")
end = time.monotonic() + 60  # should nobody end it
while time.monotonic() < end:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    print("computing", flush=True)
"""


@contextmanager
def another_process():
    """A process that computes on the GPU, from its first result on."""
    with subprocess.Popen([sys.executable, "-c", COMPUTE], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "computing\n"
            yield child
        finally:
            child.stdout.close()
            child.kill()


@pytest.fixture
def watch():
    found = watch_for(current_device("cuda"))
    if "other processes" not in found.describe().split(" (")[0]:
        pytest.skip(found.describe())
    return found


def test_a_process_that_computes_is_found_and_is_forgotten_once_it_ended(watch):
    with another_process():
        assert "another process" in watch.refusal()
    assert watch.refusal() == ""


def test_what_this_process_just_computed_does_not_count(watch):
    a = torch.ones(4096, 4096, device="cuda")
    end = monotonic() + 1.5
    while monotonic() < end:
        a @ a
    assert watch.refusal() == ""


def test_a_look_at_the_clocks_is_short_beside_a_round_of_samples(watch):
    times = []
    for _ in range(100):
        start = monotonic()
        watch.throttling()
        times.append(monotonic() - start)
    assert sorted(times)[50] < 2e-3


def test_the_bandwidth_is_that_of_a_card_and_above_what_a_read_reaches():
    peak = nominal_bandwidth(torch.device("cuda"))
    if peak is None:
        pytest.skip("not told by the driver")
    data = torch.ones(1 << 28, device="cuda")  # 1 GiB
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    data.sum()
    begin.record()
    for _ in range(10):
        data.sum()
    end.record()
    end.synchronize()
    read_bytes_per_s = 10 * (1 << 30) / (begin.elapsed_time(end) / 1e3)
    assert 0.4 * peak < read_bytes_per_s < peak
