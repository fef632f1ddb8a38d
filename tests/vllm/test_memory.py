"""What graphs and kernels may take of the GPU's memory, and what is left of it for vLLM while it serves."""

from __future__ import annotations

import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.engine.choose import Choice
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.errors import RanksError
from dispatch.plugins.vllm import runner
from dispatch.plugins.vllm.graphs import Served
from dispatch.plugins.vllm.memory import MIB, free_mib, spare_mib
from tests.vllm.test_decode import DEFAULT, OTHER, decoder
from tests.vllm.test_runner import Manager

BUDGET = DispatchConfig().capture_budget_mib  # 2048
ANOTHER = Candidate("torch_sdpa", "another=1")


class Gpu:
    """Of which so many MiB are free; torch holds some that nobody uses."""

    def __init__(self, free, cached=0):
        self.free, self.cached = free, cached

    def give_back(self):
        self.free, self.cached = self.free + self.cached, 0


@pytest.fixture
def gpu(monkeypatch):
    its = Gpu(20_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (its.free * MIB, 141_000 * MIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", its.give_back)
    return its


def test_what_torch_holds_for_nobody_is_free(gpu):
    gpu.free, gpu.cached = 700, 300
    assert free_mib() == 1000


def test_activations_that_vllm_has_profiled_are_left_free(monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self: 0)
    monkeypatch.setattr(GPUModelRunner, "profile_run", lambda self: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 19_000 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 16_000 * MIB)
    its = SimpleNamespace()
    assert spare_mib(its) is None
    runner.hook()
    GPUModelRunner.profile_run(its)
    assert spare_mib(its) == 3000 + 512


@pytest.fixture
def capture(gpu, monkeypatch):
    """Captures torch_sdpa and then another kernel at bucket 4, each of which takes so many MiB."""

    def captured(takes, builder, **given):
        serving = builder.decoder
        serving.serves = False
        serving.steps[4, ANOTHER] = serving.steps[4, OTHER]
        served = Served([Choice(DEFAULT)], [builder], ALONE, DispatchConfig(), **given)
        monkeypatch.setattr(served, "_variants", lambda planned: {(OTHER,): {4}, (ANOTHER,): {4}})
        manager = Manager([serving], 4)
        manager.capture()

        def capture_model(its):
            its.cudagraph_manager.capture()
            gpu.free -= takes

        served.capture(SimpleNamespace(cudagraph_manager=manager), capture_model)
        return served

    return captured


@pytest.fixture
def builder():
    return SimpleNamespace(decoder=decoder())


@pytest.mark.parametrize(
    ("given", "takes", "kept"),
    [
        ({}, 1000, [OTHER, ANOTHER]),
        ({"spare_mib": 20_000}, 1000, []),  # just so many are free
        ({"spare_mib": 18_500}, 1000, [OTHER]),  # the other one leaves 18 000
        ({}, 1100, [OTHER]),  # together 2200
        ({"built_mib": 1500}, 500, [OTHER]),  # with the kernels 2500
        ({"built_mib": 2500}, 0, []),
    ],
)
def test_what_takes_more_than_its_budget_or_leaves_vllm_too_little_is_not_kept(
    capture, builder, caplog, given, takes, kept
):
    assert BUDGET == 2048
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        served = capture(takes, builder, **given)
    assert [variant[0] for variant in served.graphs] == kept
    assert ("and what follows keep the default" in caplog.text) is (len(kept) < 2)


def test_kernels_that_no_graph_was_captured_of_are_given_back(capture, builder):
    kernel = weakref.ref(builder.decoder.steps[4, OTHER])
    served = capture(1000, builder, spare_mib=20_000)
    assert builder.decoder is None
    assert served.decoders == []
    assert kernel() is None


def test_where_ranks_part_while_they_capture_nothing_serves(capture, builder, monkeypatch):
    calls = iter(range(3))

    def agreed(self, at, objection):
        if next(calls) == 2:  # after the first variant is captured
            raise RanksError("rank 1 is gone")
        return ""

    monkeypatch.setattr(Ranks, "agreed", agreed)
    with pytest.raises(RanksError):
        capture(0, builder)
    assert builder.decoder is None
