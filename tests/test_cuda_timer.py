"""The GPU timer on a GPU. Its figures are compared within one run, with wide limits."""

from __future__ import annotations

import statistics

import pytest
import torch

from dispatch.backends import DecodeImpl, registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import PagedPool
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.tuner import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_vo=128, page_size=16, num_layers=36)


class Reads(DecodeImpl):
    """A kernel that reads so many bytes a layer, and nothing else."""

    def __init__(self, size_bytes, device):
        self.data = torch.zeros(max(1, size_bytes // 4), device=device)
        self.sum = torch.zeros((), device=device)

    def begin_step(self, inputs):
        pass

    def forward(self, q, kv_cache, out, sinks=None):
        torch.sum(self.data, dim=0, out=self.sum)


class Plans(DecodeImpl):
    """Copies lengths to the GPU in its plan, for which it waits before the next; each layer sleeps, and logs them."""

    needs_plan, plan_waits = True, False

    def __init__(self, sleep_cycles, device):
        self.sleep_cycles, self.copied = sleep_cycles, torch.cuda.Event()
        self.pinned, self.lengths = (
            torch.zeros(1, dtype=torch.int32).pin_memory(),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self.layers = torch.zeros(1, dtype=torch.int64, device=device)
        self.begun = torch.zeros(1, dtype=torch.int32, device=device)
        self.log = torch.zeros(2, 64, dtype=torch.int32, device=device)  # by the plan, and by the inputs

    def plan(self, inputs):
        self.copied.synchronize()
        self.pinned.copy_(inputs.lengths_host)
        self.lengths.copy_(self.pinned, non_blocking=True)
        self.copied.record()

    def begin_step(self, inputs):
        self.begun.copy_(inputs.lengths)

    def forward(self, q, kv_cache, out, sinks=None):
        torch.cuda._sleep(self.sleep_cycles)
        for log, lengths in zip(self.log, (self.lengths, self.begun), strict=True):
            log.index_copy_(0, self.layers, lengths)
        self.layers.add_(1)


def layer_us(size_bytes, layers=4):
    device = torch.device("cuda")
    pool = PagedPool(SPEC, 64, layers, device)
    recording = CudaTimer(device).record(Reads(size_bytes, device), pool.inputs(1, 256), pool.chain(1))
    for _ in range(50):
        recording.run(layers)
    return statistics.median(recording.start(layers)().layer_us for _ in range(15))


def test_the_filler_is_subtracted_so_that_a_kernel_that_does_nothing_costs_a_launch_in_a_graph():
    assert layer_us(4) < 10


def test_a_read_from_cold_memory_does_not_exceed_the_bandwidth_of_the_card():
    # 32 MiB fit into the cache: without the flush, and the filler between layers, they would come from there
    us = layer_us(32 << 20)
    assert (32 << 20) / us / 1e6 < 4.8  # TB/s, the H200's nominal; other cards so far have less


def test_a_step_begun_behind_others_has_its_own_lengths_and_its_plan_holds_no_wait_for_them():
    device, layers = torch.device("cuda"), 1
    pool, timer = PagedPool(SPEC, 64, layers, device), CudaTimer(device)
    inputs, chain = pool.inputs(1, 256), pool.chain(1)
    slow, quick = Plans(50_000_000, device), Plans(1000, device)  # some 25 ms
    recordings = [timer.record(impl, inputs, chain) for impl in (slow, quick)]
    for recording in recordings:
        recording.start(layers)()
    slow.layers.zero_(), quick.layers.zero_()
    torch.cuda.synchronize()
    begun = []
    for length in (100, 101, 102):
        pool.load(inputs, [length])
        begun += [recording.start(layers) for recording in recordings]
    times = [read() for read in begun]
    assert all(time.layer_us > 5000 for time in times[::2])
    assert all(time.plan_us < 2000 for time in times)
    for impl in (slow, quick):
        assert impl.log[:, :3].tolist() == [[100, 101, 102]] * 2


def test_tune_measures_checks_and_decides_on_the_gpu():
    request = TuneRequest(SPEC, (1, 4), 1024, 4096, DispatchConfig(time_budget_s=120))
    plan, samples = tune(request, current_device("cuda"), registry)
    assert {d.box.bucket for d in plan.boxes} == {1, 4}
    assert plan.excluded == ()
    assert all((b.times[-1, 0] > 0).all() for b in samples.buckets)


def test_after_tuning_the_memory_is_given_back():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    request = TuneRequest(SPEC, (2,), 512, 4096, DispatchConfig(time_budget_s=120))
    tune(request, current_device("cuda"), registry)
    assert torch.cuda.memory_allocated() - before < 64 << 20  # cuBLAS keeps a workspace
