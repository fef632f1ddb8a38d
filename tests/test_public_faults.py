"""Faults that others have reported of tools and kernels of this kind: for each, where its tests are; here, the rest.

What says "gpu" runs on a GPU alone. Of drafts (more than one query token) and latent attention nothing is served: what
refuses them is tested.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dispatch.bench.cuda_timer
import dispatch.tuner
from dispatch.backends import DecodeImpl, Support, registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import RESERVED_PAGE, PagedPool
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.errors import RegistryError, one_line
from dispatch.gate_checks import compare
from dispatch.reference import reference_decode
from dispatch.request import TuneRequest
from dispatch.tuner import tune
from tests.engine import BUCKETS, MAX_KV, RESERVED, Engine, store_plan
from tests.fakes import CPU, ScriptedTimer, backend, registry_of, spec_of
from tests.test_gate import Bench, without
from tests.test_harness import bench_of, measure
from tests.test_runner import EVERYWHERE, eager, runner_of

HERE = Path(__file__).parent
FAULTS: dict[str, str] = {
    # --- wrong numbers
    "draft mask ignored": """
        test_runner::test_what_speaks_against_switching_is_said_once_and_the_default_serves
        test_runner::test_a_step_of_another_kind_is_the_engines_own_counted_and_logged_once""",
    "padded rows": """
        test_public_faults::test_padding_leaves_live_rows_as_they_are_to_the_bit
        test_public_faults_gpu::test_padding_leaves_live_rows_as_they_are_to_the_bit
        test_gate::test_wrong_numbers_are_caught  test_gate::test_a_row_that_is_not_written_is_called_so
        test_runner::test_padded_and_full_buckets_give_each_request_what_it_would_get_alone""",
    "soft cap dropped": """
        test_public_faults::test_a_kernel_that_drops_a_soft_cap_is_caught_at_caps_of_models
        test_public_faults_gpu::test_a_soft_cap_of_models_is_applied""",
    "uniform probe, large logits, scales, NaN slots, dirty scratch": """
        test_gate::test_the_uniform_probe_sees_one_key_more_where_random_data_within_fp8_tolerance_does_not
        test_gate::test_wrong_numbers_are_caught  test_kernels_gpu::test_what_is_eligible_is_right
        test_gate::test_a_candidate_that_is_right_on_clean_scratch_only_is_caught_beside_one_of_its_family_that_dirties_it
        test_public_faults_gpu::test_on_scratch_that_others_have_used_seven_rows_are_right""",
    "evicted window pages": """
        test_public_faults::test_pages_that_a_window_has_left_behind_may_be_gone
        test_public_faults_gpu::test_pages_that_a_window_has_left_behind_may_be_gone
        test_gate::test_wrong_numbers_are_caught""",
    "sinks accepted and not applied": """
        test_public_faults::test_a_sink_of_zero_is_one_key_more_in_the_denominator
        test_runner::test_sinks_that_are_forgotten_or_not_declared_are_an_error_at_start
        test_flashinfer_fa2::test_refusals_of_both_say_what_is_wrong
        test_public_faults_gpu::test_a_sink_of_zero_is_one_key_more_in_the_denominator""",
    # --- capture and replay
    "stale plan at replay": """
        test_flashinfer_fa2::test_each_replay_is_planned_with_its_own_lengths_in_buffers_that_stay
        test_runner::test_plan_runs_before_every_step_and_begin_step_before_every_layer
        test_runner::test_requests_grow_join_and_finish_over_buffers_that_never_move
        test_runner::test_a_variant_that_does_not_see_each_rows_own_length_is_dropped
        test_public_faults_gpu::test_what_was_captured_for_one_long_row_serves_other_lengths""",
    "no-split grid on dirty scratch; shared dirty workspace": """
        test_gate::test_a_candidate_that_is_right_on_clean_scratch_only_is_caught_beside_one_of_its_family_that_dirties_it
        test_harness::test_backends_of_one_family_share_a_scratch_sized_for_the_largest_and_families_do_not
        test_public_faults_gpu::test_whatever_ran_before_on_the_same_scratch_each_is_right""",
    "scratch too small at the largest bucket": """
        test_flashinfer_fa2::test_scratch_of_tensor_cores_holds_the_largest_bucket_known
        test_runner::test_the_largest_bucket_is_captured_first_and_all_scratch_is_sized_before
        test_harness::test_a_scratch_never_grows_once_it_was_given_out
        test_public_faults_gpu::test_512_requests_of_wide_heads_fit_into_the_scratch_that_is_reserved""",
    "pinned buffer race": """
        test_flashinfer_fa2::test_a_plan_waits_for_the_copies_of_the_one_before
        test_public_faults_gpu::test_two_plans_behind_a_long_kernel_each_serve_their_own_step""",
    "a candidate that hangs or dies": """
        elsewhere: the tests of the child process that candidates run in first
        test_public_faults_gpu::test_fa3_over_fp8_with_a_window_of_511_neither_hangs_nor_is_wrong""",
    # --- measuring
    "launch cost measured instead of the kernel": """
        test_public_faults::test_the_cost_of_launching_is_not_on_the_clock
        test_cuda_timer::test_the_filler_is_subtracted_so_that_a_kernel_that_does_nothing_costs_a_launch_in_a_graph""",
    "a busy host changes the choice": """
        test_public_faults::test_a_busy_host_changes_no_time
        test_public_faults::test_a_host_that_stalls_now_and_then_changes_no_choice
        test_tuner::test_one_outlier_of_the_default_costs_no_cell""",
    "near ties flip": """
        test_selection_study::test_where_no_true_difference_is_near_a_threshold_a_thousand_runs_give_one_answer
        test_selection_study::test_at_a_threshold_a_thousand_runs_give_the_stored_answer
        test_regimes::test_noise_around_a_threshold_does_not_flip_a_stored_plan""",
    "unrepresentative lengths": """
        test_regimes::test_a_box_ends_with_the_bins_that_were_measured
        test_regimes::test_no_box_reaches_beyond_the_measured_lengths
        test_tuner::test_a_winner_on_equal_lengths_that_loses_on_ragged_ones_is_not_planned_for_them
        test_runner::test_a_step_inside_a_box_runs_the_planned_variant_and_one_outside_the_default""",
    "plan() ignored": """
        test_selector::test_a_plan_of_150_us_outweighs_a_gain_of_3_us_a_layer_at_one_layer_and_not_at_64
        test_tuner::test_the_cost_of_plan_counts_once_a_step_whatever_the_number_of_layers""",
    "undersized flush": """
        test_cuda_timer::test_a_read_from_cold_memory_does_not_exceed_the_bandwidth_of_the_card
        test_tuner::test_a_backend_that_claims_more_than_the_memory_can_is_not_chosen""",
    # --- cache, ranks, time
    "ranks diverge": "elsewhere: the tests of ranks that agree",
    "killed in the middle of writing; concurrent writers": """
        test_store_survives::test_two_hundred_killed_writers_lose_no_plan_and_what_they_leave_is_removed
        test_store_survives::test_eight_processes_tune_each_key_once_and_agree_also_when_one_is_killed_while_it_tunes
        test_store_survives::test_a_plan_that_ends_at_any_byte_is_a_miss_and_the_next_one_is_stored
        test_store::test_four_writers_at_once_leave_a_whole_plan_at_every_moment""",
    "key too small": """
        test_key::test_changing_a_leaf_changes_the_digest_and_is_named_as_the_only_difference
        test_key::test_each_argument_of_a_request_changes_the_key
        test_key::test_each_setting_that_decides_changes_the_key
        test_store::test_a_plan_for_something_else_is_a_miss_wherever_it_lies_and_the_warning_names_the_field""",
    "a valid cache discarded at each start": """
        test_public_faults::test_the_key_is_the_same_in_every_process
        test_tuner::test_a_second_run_with_the_same_key_reads_the_plan_and_measures_nothing""",
    "tuning after the KV cache took the memory": """
        test_harness::test_a_candidate_that_cannot_be_built_is_excluded_and_the_others_are_measured
        test_tuner::test_memory_that_is_not_there_is_an_error_of_the_packages_own
        test_tuner::test_when_the_budget_ends_measured_buckets_are_planned_and_the_rest_is_resumed_later
        test_runner::test_where_nothing_can_be_measured_the_default_serves_and_one_line_says_why
        test_cuda_timer::test_after_tuning_the_memory_is_given_back""",
    # --- choosing
    "auto changed under an upgrade": """
        test_public_faults::test_there_is_no_backend_called_auto_and_a_plan_names_what_it_resolved_to
        test_flashinfer_fa2::test_each_replay_is_planned_with_its_own_lengths_in_buffers_that_stay""",
    "an unsupported dtype pair fails deep in the compiler": """
        test_fa3::test_what_the_kernel_lacks_is_refused_with_its_reason
        test_flashinfer_cudnn::test_what_the_graph_lacks_is_refused_with_its_reason
        test_flashinfer_fa2::test_trtllm_gen_serves_sm100_alone
        test_public_faults::test_a_build_that_fails_in_the_compiler_costs_one_candidate_and_its_reason_is_short""",
    "one layer group kills start-up": """
        test_public_faults::test_a_group_of_layers_that_a_backend_does_not_serve_costs_the_other_group_nothing
        test_runner::test_each_layer_group_has_a_plan_of_its_own""",
    "a factory that catches every error": """
        test_runner::test_an_engines_own_mistakes_are_one_line
        test_runner::test_what_the_engines_own_step_raises_is_the_engines_to_hear
        test_prepare::test_every_miss_is_counted_and_each_bucket_and_reason_is_logged_once""",
    "autotune overrode an explicit choice": """
        test_runner::test_what_speaks_against_switching_is_said_once_and_the_default_serves""",
    "silent choice of a slower backend": """
        test_selector::test_a_candidate_slower_in_one_cell_is_never_chosen_however_much_it_gains_in_the_others
        test_selector::test_a_winner_must_gain_three_percent_in_log_time
        test_tuner::test_a_named_default_is_the_one_to_beat""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_the_tests_that_the_table_names(fault):
    named = re.findall(r"(\w+)::(\w+)", FAULTS[fault])
    assert named or FAULTS[fault].startswith("elsewhere")
    for module, test in named:
        assert f"def {test}(" in (HERE / f"{module}.py").read_text()


# --- wrong numbers


@pytest.mark.parametrize("lengths", [[17, 1, 64], [9, 33, 64, 5, 1]])
@pytest.mark.parametrize("name", ["torch_sdpa", "torch_chunked"])
def test_padding_leaves_live_rows_as_they_are_to_the_bit(name, lengths):
    # seen to fail: with logits over the longest row instead of a mask of each, and with a scale taken over all rows
    spec, live = spec_of(), len(lengths)
    bucket = 1 << (live - 1).bit_length()
    pool = PagedPool(spec, 64, 1, torch.device("cpu"))
    inputs, chain = pool.inputs(bucket, MAX_KV), pool.chain(bucket)
    pool.load(inputs, [*lengths, *[1] * (bucket - live)])
    inputs.num_live = live
    inputs.block_table[live:] = RESERVED_PAGE
    impl = registry.get(name).build(spec, bucket, MAX_KV, torch.zeros(0, dtype=torch.uint8), {})
    found = []
    for padding in (0.0, float("nan"), 1e30):
        for pages in chain.kv_caches[0]:
            pages[RESERVED_PAGE] = padding
        chain.q[live:] = padding
        chain.outs[0].fill_(float("nan"))
        impl.plan(inputs)
        impl.begin_step(inputs)
        impl.forward(chain.q, chain.kv_caches[0], chain.outs[0])
        found.append(chain.outs[0][:live].clone())
    expected = reference_decode(spec, chain.q, chain.kv_caches[0], inputs, None)
    assert compare(spec, found[0][None], expected, inputs).worst() == ""
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_kernel_that_drops_a_soft_cap_is_caught_at_caps_of_models(cap):
    # seen to fail: with q as it is in place of `Cases._large_q`, logits of a few never come near the cap
    spec = spec_of(dtype="bf16", kv_dtype="bf16", logits_soft_cap=cap)
    found = Bench(spec, 4).check(backend("wrong", **without(logits_soft_cap=None)))
    assert found.startswith("large logits: ")


@pytest.mark.parametrize("tables", ["-1", "reserved"])
def test_pages_that_a_window_has_left_behind_may_be_gone(tmp_path, tables):
    # seen to fail: with the table copied as it is, torch raises IndexError, and a GPU's kernel reads at page -1
    engine, twin = Engine(spec_of(sliding_window=10)), Engine(spec_of(sliding_window=10))
    runner = runner_of(engine, tmp_path, boxes=EVERYWHERE)
    runner.trigger_init_capture()
    lengths, (table,) = engine.request([60, 13, 64])
    gone = table.clone()
    for row, length in enumerate(lengths.tolist()):
        gone[row, : (length - 10) // 4] = -1 if tables == "-1" else RESERVED
    assert torch.equal(runner.run(lengths, [gone]), runner.run(lengths, [table]))
    torch.testing.assert_close(runner.run(lengths, [gone]), eager(twin, [60, 13, 64]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 7, 64])
def test_a_sink_of_zero_is_one_key_more_in_the_denominator(length):
    # seen to fail: with sinks that are not handed on, the sum is 1. q = 0 and V = 1: n keys of weight 1 / (n + 1)
    spec = spec_of(has_sinks=True)
    pool = PagedPool(spec, 64, 1, torch.device("cpu"))
    inputs, chain = pool.inputs(2, MAX_KV), pool.chain(2)
    pool.load(inputs, [length, length])
    k, v = chain.kv_caches[0]
    v.fill_(1.0)
    impl = registry.get("torch_chunked").build(spec, 2, MAX_KV, torch.zeros(0, dtype=torch.uint8), {})
    impl.plan(inputs)
    impl.begin_step(inputs)
    impl.forward(torch.zeros_like(chain.q), (k, v), chain.outs[0], torch.zeros(spec.num_qo_heads))
    torch.testing.assert_close(chain.outs[0], torch.full_like(chain.outs[0], length / (length + 1)))


# --- measuring


class Machine:
    """A host and a GPU, each with a clock in microseconds: a launch costs the host, and runs when the GPU is free."""

    def __init__(self):
        self.host_us = self.gpu_us = 0.0
        self.captured: list[float] | None = None
        self.replay_host_us = lambda: 5.0

    def kernel(self, gpu_us, host_us=2.0):
        self.host_us += host_us
        if self.captured is None:
            self.gpu_us = max(self.gpu_us, self.host_us) + gpu_us
        else:
            self.captured.append(gpu_us)

    def wait(self):
        self.host_us = max(self.host_us, self.gpu_us)


class Kernel(DecodeImpl):
    def __init__(self, machine, gpu_us, host_us):
        self.machine, self.gpu_us, self.host_us = machine, gpu_us, host_us

    def begin_step(self, inputs):
        pass

    def forward(self, q, kv_cache, out, sinks=None):
        self.machine.kernel(self.gpu_us, self.host_us)


class Planner(Kernel):
    """Plans for 20 us, once what its last plan has queued is done, as FlashInfer's copy from pinned memory is."""

    needs_plan, plan_waits = True, False
    copied = None

    def plan(self, inputs):
        if self.copied is None:
            self.copied = torch.cuda.Event()
        self.copied.synchronize()
        self.machine.host_us += 20.0
        self.copied.record()


@pytest.fixture
def machine(monkeypatch):
    """torch.cuda, as far as the timer calls it, on a machine of our own. The flush takes 58 us, as on an H200."""
    it = Machine()

    class Event:
        def __init__(self, enable_timing=False):
            self.timing, self.at_us = enable_timing, 0.0

        def record(self):
            self.at_us = it.gpu_us = max(it.gpu_us, it.host_us)

        def synchronize(self):
            it.host_us = max(it.host_us, self.at_us)

        def elapsed_time(self, end):
            assert self.timing and end.timing
            return (end.at_us - self.at_us) / 1e3

    class Graph:
        def replay(self):
            it.host_us += it.replay_host_us()
            it.gpu_us = max(it.gpu_us, it.host_us) + sum(self.kernels)

    @contextmanager
    def capture(graph, **options):
        it.captured = graph.kernels = []
        yield
        it.captured = None

    @contextmanager
    def nothing(*_):
        yield

    class Stream:
        def wait_stream(self, other):
            pass

    class Filler:
        def __init__(self, weights, batch):
            pass

        def before(self):
            it.kernel(4.0)

        def after(self):
            it.kernel(4.0)

        def layers(self, count):
            it.kernel(8.0 * count)

    class Flush:
        def fill_(self, value):
            it.kernel(58.0)

    fakes = {"Event": Event, "CUDAGraph": Graph, "graph": capture, "stream": nothing}
    fakes |= {"Stream": lambda device: Stream(), "current_stream": lambda device: Stream()}
    fakes |= {"synchronize": lambda device: it.wait(), "graph_pool_handle": lambda: None}
    fakes |= {"current_device": lambda: 0, "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    module = dispatch.bench.cuda_timer
    monkeypatch.setattr(module, "Filler", Filler)
    monkeypatch.setattr(module, "FillerWeights", lambda device: None)
    monkeypatch.setattr(module, "nominal_bandwidth", lambda device: None)
    monkeypatch.setattr(module, "LEAST_FLUSH_BYTES", 1)
    monkeypatch.setattr(module, "perf_counter_ns", lambda: int(it.host_us * 1e3))
    it.timer = CudaTimer(torch.device("cpu"))
    it.timer.flush = Flush()
    return it


def layer_us(machine, gpu_us, host_us):
    pool = PagedPool(spec_of(), 16, 2, torch.device("cpu"))
    recording = machine.timer.record(Kernel(machine, gpu_us, host_us), pool.inputs(1, 16), pool.chain(1))
    return [recording.start(2)().layer_us for _ in range(20)]


def test_the_cost_of_launching_is_not_on_the_clock(machine):
    # seen to fail: with `self._forward(layers)` in place of the replay of its graph, the first takes 200 us
    assert layer_us(machine, 10.0, 200.0) == pytest.approx([10.0] * 20)
    assert layer_us(machine, 12.0, 5.0) == pytest.approx([12.0] * 20)


def test_a_busy_host_changes_no_time(machine):
    # seen to fail: with the flush behind the first event, or without it, the GPU waits for the host on the clock
    busy = random.Random(0)
    machine.replay_host_us = lambda: busy.uniform(2, 28)
    assert layer_us(machine, 10.0, 5.0) == pytest.approx([10.0] * 20)


def test_steps_that_begin_behind_others_hold_no_wait_for_them(machine):
    # seen to fail: without the wait for what the last plan queued, a plan takes as long as the steps before it
    pool = PagedPool(spec_of(), 16, 2, torch.device("cpu"))
    inputs, chain = pool.inputs(1, 16), pool.chain(1)
    kernels = Kernel(machine, 1000.0, 5.0), Planner(machine, 10.0, 5.0)
    slow, planner = (machine.timer.record(kernel, inputs, chain) for kernel in kernels)
    times = [read() for read in [recording.start(2) for _ in range(3) for recording in (slow, planner)]]
    assert [time.layer_us for time in times] == pytest.approx([1000.0, 10.0] * 3)
    assert [time.plan_us for time in times] == pytest.approx([0.0, 20.0] * 3)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_stalls_now_and_then_changes_no_choice(monkeypatch, seed):
    # seen to fail: with the mean over rounds in place of the median (`median_of_rounds`)
    rng = np.random.default_rng(seed)

    def layer_us(name, lengths, sample):
        return {"a": 100.0, "b": 80.0, "c": 90.0}[name] * (10.0 if rng.random() < 0.02 else 1.0)

    monkeypatch.setattr(dispatch.tuner, "timer_for", lambda device: ScriptedTimer(layer_us))
    request = TuneRequest(spec_of(), (1,), 8, 10_000, DispatchConfig(isolation="none"))
    plan, _ = tune(request, CPU, registry_of(*map(backend, "abc")), lambda *_: None)
    assert {d.box.candidate for d in plan.boxes} == {"b"}


# --- cache

KEY_DIGEST = """
import json
from dispatch.backends import registry
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.key import digest
from dispatch.models import load_model
from dispatch.request import TuneRequest
(spec,) = load_model("qwen3-8b").layer_groups(1, 16, None)
config = DispatchConfig(exclude=("torch_sdpa", "fa3", "flashinfer_xqa"))
key = TuneRequest(spec, (1, 8), 4096, 8192, config).key(current_device("cpu"), registry, "torch_chunked")
print(json.dumps(digest(key)))
"""


def test_the_key_is_the_same_in_every_process(tmp_path):
    # seen to fail: with `list(set(exclude))` in the key, whose order is that of the process's own hashes
    found = set()
    for seed, folder in (("1", tmp_path), ("2", HERE)):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", KEY_DIGEST]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        found.add(json.loads(done.stdout.splitlines()[-1]))
    assert len(found) == 1


# --- choosing


def test_there_is_no_backend_called_auto_and_a_plan_names_what_it_resolved_to(monkeypatch):
    assert "auto" not in registry.names()
    with pytest.raises(RegistryError, match="no backend 'auto'; there are fa3, "):
        registry.get("auto")
    monkeypatch.setattr(dispatch.tuner, "timer_for", lambda device: ScriptedTimer(lambda name, *_: ord(name)))
    backends = registry_of(backend("b"), backend("a"))
    plan, _ = tune(
        TuneRequest(spec_of(), (1,), 8, 100, DispatchConfig(isolation="none")), CPU, backends, lambda *_: None
    )
    assert (plan.default, {d.box.candidate for d in plan.boxes}) == ("b", {"b"})  # "a" gains 1%
    assert plan.key["default"] == "b" and set(plan.key["backends"].values()) == {backends.version("a")} != {""}


def test_a_build_that_fails_in_the_compiler_costs_one_candidate_and_its_reason_is_short():
    # seen to fail: with the whole first line, which holds the compiler's command
    error = RuntimeError("nvcc -I" + "include " * 2000 + "\n" + "error: static assertion failed\n" * 500)
    samples = measure(bench_of(backend("a"), backend("broken", build_error=error), backend("c")), "a", "broken", "c")
    (excluded,) = samples.exclusions
    assert (excluded.candidate, excluded.reason) == ("broken", Reason.FAILED)
    assert excluded.detail.startswith("RuntimeError: nvcc -Iinclude") and len(excluded.detail) == 300
    assert one_line(ValueError("short\nand more")) == "ValueError: short"


def test_a_group_of_layers_that_a_backend_does_not_serve_costs_the_other_group_nothing(tmp_path, caplog):
    # seen to fail: with one plan asked for the first group's layers and used for all
    narrow, wide = spec_of(head_dim_qk=16, head_dim_vo=16), spec_of(head_dim_qk=32, head_dim_vo=32)
    b = backend("b")
    b.support = lambda self, spec, device: Support(spec.head_dim_qk == 16, "head dim 32: 16 only")
    engine = Engine(narrow, wide)
    runner = runner_of(engine, tmp_path, backend("a"), b)
    store_plan(runner, EVERYWHERE, group=0)
    with caplog.at_level(logging.WARNING):
        report = runner.trigger_init_capture()
    assert [v.dropped for v in report.variants] == [""] * 2 * len(BUCKETS)
    runner.run(*engine.request([9, 33]))
    a, mine = Candidate("a"), Candidate("b")
    assert set(runner.serving.ready) == {(bucket, v) for bucket in BUCKETS for v in ((a, a), (mine, a))}
