"""On a GPU: errors that stay with a CUDA context stay in the child, and nothing of tuning stays in this process."""

from __future__ import annotations

import gc
import hashlib
import random

import numpy as np
import pytest
import torch

from dispatch.backends import Registry, registry
from dispatch.backends.torch_chunked import TorchChunked
from dispatch.backends.torch_sdpa import TorchSdpa
from dispatch.bench.faults import FAULTS, run_fault
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.isolation.limits import CHILD_BYTES
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.tuner import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128, page_size=16, num_layers=4)
WORKSPACE_BYTES = 64 << 20  # cuBLAS keeps one for the stream of captures, once in a process
MODULES_BYTES = 256 << 20  # loaded modules stay on the device


def sound():
    """Two backends that need no library, under names that are no fallbacks."""
    two = Registry()
    two.register("steady", lambda: TorchChunked)
    two.register("other", lambda: TorchSdpa)
    return two


def request(**config):
    return TuneRequest(SPEC, (1, 4), 1024, 4096, DispatchConfig(time_budget_s=120, **config))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_the_others_are_measured_and_this_context_works(fault):
    result = run_fault(fault, current_device("cuda"))
    assert result.ok, result
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_an_illegal_access_is_told_from_an_error_that_leaves_the_device_as_it_was():
    assert "the device does not work any more" in run_fault("illegal access", current_device("cuda")).happened
    assert "the device does not work any more" not in run_fault("raises", current_device("cuda")).happened


def test_a_kernel_that_does_not_return_is_a_hang():
    assert "hung: no end of it within 8 s" in run_fault("hangs", current_device("cuda")).happened


def test_memory_is_taken_from_a_child_before_it_is_taken_from_the_engine():
    free, _ = torch.cuda.mem_get_info()
    assert free > 4 * CHILD_BYTES
    assert "out of memory" in run_fault("exhausts memory", current_device("cuda")).happened


def test_after_tuning_the_process_is_as_it_was():
    tune(request(), current_device("cuda"), sound())  # what is loaded and allocated once
    cache = torch.randn(1 << 24, device="cuda")
    digest = hashlib.sha256(cache.cpu().numpy().tobytes()).hexdigest()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before, free = _state(), torch.cuda.mem_get_info()[0]
    tune(request(), current_device("cuda"), sound())
    assert _state() == before
    assert abs(torch.cuda.mem_get_info()[0] - free) <= MODULES_BYTES
    assert hashlib.sha256(cache.cpu().numpy().tobytes()).hexdigest() == digest


def test_the_first_run_leaves_a_workspace_at_most():
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    tune(request(), current_device("cuda"), registry)
    assert torch.cuda.memory_allocated() - allocated <= WORKSPACE_BYTES
    assert torch.cuda.memory_reserved() - reserved <= 2 * WORKSPACE_BYTES


def _state():
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "device": torch.cuda.current_device(),
        "stream": torch.cuda.current_stream().cuda_stream,
        "capturing": torch.cuda.is_current_stream_capturing(),
        "random numbers": torch.cuda.get_rng_state().tolist(),
        "of the host": torch.get_rng_state().tolist(),
        "numpy's": str(np.random.get_state()),
        "python's": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
    }
