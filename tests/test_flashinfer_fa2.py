"""The FlashInfer FA2 and trtllm-gen backends, as far as they can be tested without a GPU."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from dispatch.backends.flashinfer_fa2 import FlashInferFa2, FlashInferFa2TensorCores
from dispatch.backends.flashinfer_trtllm_gen import FlashInferTrtllmGen
from dispatch.backends.page_lists import HostPageLists, PageLists
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from tests.fakes import CPU

FA2 = (FlashInferFa2, FlashInferFa2TensorCores)
GROUPS = (*range(1, 9), 16)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (1, 8, 16, 32, 64, 128)
DTYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp8_e4m3"), ("fp16", "fp8_e4m3"))


def card(major, minor=0):
    return DeviceFingerprint("cuda", "test", (major, minor), 132, "580.0", "13.0", "2.11.0")


def spec_of(group=4, d=128, **changes):
    values = {
        "num_qo_heads": 2 * group,
        "num_kv_heads": 2,
        "head_dim_qk": d,
        "head_dim_vo": d,
        "page_size": 16,
        "num_layers": 2,
    }
    return AttentionSpec(**{**values, **changes})


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())


@pytest.mark.parametrize("backend", FA2)
def test_eligibility_over_the_whole_matrix_is_what_the_kernels_serve(backend, installed):
    groups = {1, 2, 3, 4, 8} if backend is FlashInferFa2 else set(GROUPS)
    options = itertools.product(GROUPS, HEAD_DIMS, PAGE_SIZES, DTYPES, (None, 128), (None, 30.0), (False, True))
    eligible = 0
    for group, d, page, (dtype, kv_dtype), window, cap, sinks in options:
        spec = spec_of(
            group,
            d,
            page_size=page,
            dtype=dtype,
            kv_dtype=kv_dtype,
            sliding_window=window,
            logits_soft_cap=cap,
            has_sinks=sinks,
        )
        served = group in groups and d in (64, 128, 256) and dtype != "fp32" and not sinks
        served = served and (window is None or backend is FlashInferFa2TensorCores)
        support = backend().support(spec, card(9))
        assert support.ok == served, (spec, support)
        assert bool(support.reason) != served
        eligible += served
    assert eligible == (5 * 3 * 6 * 4 * 2 if backend is FlashInferFa2 else 9 * 3 * 6 * 4 * 2 * 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d": 80}, "head dim 80: 64, 128 or 256"),
        ({"d": 192, "head_dim_vo": 128}, "head dim 192 of K and 128 of V: must be equal"),
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32: bf16 or fp16"),
        ({"has_sinks": True}, "sinks: the kernel has none"),
        ({"kv_strides": (8200, 260, 130)}, "KV strides (8200, 260, 130): must be multiples of 16 bytes"),
        ({"kv_strides": (2**32, 256, 128)}, "KV strides (4294967296, 256, 128): must fit into 32 bits"),
    ],
)
@pytest.mark.parametrize("backend", FA2)
def test_refusals_of_both_say_what_is_wrong(backend, changes, reason, installed):
    assert backend().support(spec_of(**changes), card(9)).reason == reason


def test_refusals_of_one_say_what_is_wrong(installed):
    cores, tensor = (cls() for cls in FA2)
    assert cores.support(spec_of(6), card(9)).reason == "group size 6: 1, 2, 3, 4 or 8"
    assert tensor.support(spec_of(32), card(9)).reason == "group size 32: at most 16"
    assert "the window has left behind" in cores.support(spec_of(sliding_window=128), card(9)).reason


@pytest.mark.parametrize("backend", FA2)
def test_strided_caches_are_served_where_rows_stay_aligned(backend, installed):
    assert backend().support(spec_of(kv_strides=(2 * 16 * 256, 256, 128)), card(9)).ok


@pytest.mark.parametrize("backend", [*FA2, FlashInferTrtllmGen])
def test_the_device_is_looked_at_before_the_library(backend, monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None)
    assert backend().support(spec_of(), CPU).reason == "needs a CUDA device"
    needed = "SM100" if backend is FlashInferTrtllmGen else "SM80"
    assert backend().support(spec_of(), card(7, 5)).reason == f"needs {needed}, this is SM75"
    assert backend().support(spec_of(), card(10)).reason == "not installed: pip install flashinfer-python"


def test_support_does_not_import_the_library(monkeypatch):
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    for backend in FA2:
        backend().support(spec_of(), card(9))
    assert "flashinfer" not in sys.modules


def test_trtllm_gen_serves_sm100_alone(installed):
    backend = FlashInferTrtllmGen()
    assert backend.support(spec_of(), card(9)).reason == "needs SM100, this is SM90"
    assert backend.support(spec_of(), card(12)).reason == "needs SM100 or SM103, this is SM120"
    assert backend.support(spec_of(), card(10)).ok and backend.support(spec_of(), card(10, 3)).ok
    assert backend.support(spec_of(page_size=8), card(10)).reason == "page size 8: 16, 32 or 64"
    assert backend.support(spec_of(kv_dtype="fp8_e4m3"), card(10)).reason == "bf16 Q with fp8_e4m3 KV: must be equal"
    for changes in ({"logits_soft_cap": 30.0}, {"has_sinks": True}, {"d": 256}, {"kv_strides": (4096, 256, 128)}):
        assert not backend.support(spec_of(**changes), card(10)).ok


def test_scratch_of_tensor_cores_holds_the_largest_bucket_known():
    spec = spec_of(16, 256)
    assert spec.num_qo_heads == 32
    sums = 536_346_624 // 256
    assert 0 <= FlashInferFa2TensorCores().workspace_bytes(spec, 512, 4096) - (536_346_624 + sums) < 1024


@pytest.mark.parametrize("backend", FA2)
def test_scratch_never_shrinks_with_the_batch(backend):
    sizes = [backend().workspace_bytes(spec_of(), batch, 4096) for batch in (1, 8, 64, 512)]
    assert sizes == sorted(sizes) and sizes[0] > 0
    # one request of 8 heads, d 128, on 132 SMs: two blocks an SM over 2 KV heads
    assert sizes[0] > 8 * 132 * 128 * 4


def plain_csr(lengths, table, page):
    indptr, indices, last = [0], [], []
    for row, length in enumerate(lengths):
        pages = -(-length // page)
        indices += table[row][:pages]
        indptr.append(indptr[-1] + pages)
        last.append(length - (pages - 1) * page)
    return indptr, indices, last


def inputs_of(lengths, page, width, bounds=None):
    random = torch.Generator().manual_seed(sum(lengths))
    return StepInputs(
        num_live=len(lengths),
        lengths_host=torch.tensor(bounds or lengths, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.randint(1, 1000, (len(lengths), width), dtype=torch.int32, generator=random),
    )


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_page_lists_match_a_plain_loop_and_never_move(page):
    longest = 300
    width = -(-longest // page)
    lists, on_host = PageLists(5, width, page, torch.device("cpu")), HostPageLists(5, page)
    buffers = (lists.indptr, lists.indices, lists.last_page_len, on_host.indptr, on_host.last_page_len)
    addresses = [t.data_ptr() for t in buffers]
    for lengths in ([1, 1, 1, 1, 1], [longest, 1, page, page + 1, 2 * page], [longest] * 5, [7, longest, 1, 33, 299]):
        lengths = [min(n, longest) for n in lengths]
        for extra in (0, 3):  # an engine's table may be wider than what was built for
            inputs = inputs_of(lengths, page, width + extra)
            lists.fill(inputs.lengths, inputs.block_table)
            indptr, indices, last = plain_csr(lengths, inputs.block_table.tolist(), page)
            assert lists.indptr.tolist() == indptr
            assert lists.indices[: len(indices)].tolist() == indices
            assert lists.last_page_len.tolist() == last
        on_host.measure(inputs.lengths_host)
        assert (on_host.indptr.tolist(), on_host.last_page_len.tolist()) == (indptr, last)
    buffers = (lists.indptr, lists.indices, lists.last_page_len, on_host.indptr, on_host.last_page_len)
    assert addresses == [t.data_ptr() for t in buffers]


class FakeDecode(types.ModuleType):
    """flashinfer.decode as far as it is called; its plan copies what the real one's copies."""

    def __init__(self):
        super().__init__("flashinfer.decode")
        module = self
        self.calls = []

        class Wrapper:
            def __init__(self, workspace, **options):
                self.workspace, self.options = workspace, options
                self.buffers = [options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]

            def plan(self, indptr, indices, last_page_len, **constants):
                module.note("plan", self, indptr, indices, last_page_len, constants)
                for buffer, value in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                    buffer[: len(value)].copy_(value)

            def run(self, q, kv_cache, **options):
                module.ran = options
                options["out"].fill_(7.0)

        self.BatchDecodeWithPagedKVCacheWrapper = Wrapper

    def fast_decode_plan(self, wrapper, indptr, indices, last_page_len, **constants):
        self.note("fast", wrapper, indptr, indices, last_page_len, constants)

    def note(self, kind, wrapper, indptr, indices, last_page_len, constants):
        assert indices.data_ptr() == wrapper.buffers[1].data_ptr(), "plan would copy other indices over ours"
        self.calls.append((kind, indptr.tolist(), last_page_len.tolist(), constants))


@pytest.fixture
def fake(monkeypatch):
    module = FakeDecode()
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    return module


@pytest.mark.parametrize("backend", FA2)
def test_each_replay_is_planned_with_its_own_lengths_in_buffers_that_stay(backend, fake):
    spec = spec_of(sliding_window=100, logits_soft_cap=30.0, sm_scale=0.5)
    scratch = torch.zeros(64, dtype=torch.uint8)
    impl = backend().build(spec, 4, 8192, scratch, {})
    wrapper = impl.wrapper
    assert impl.needs_plan
    assert wrapper.workspace is scratch and wrapper.options["use_cuda_graph"] and wrapper.options["backend"] == "fa2"
    assert wrapper.options["use_tensor_cores"] == (backend is FlashInferFa2TensorCores)
    addresses = [t.data_ptr() for t in wrapper.buffers]
    for lengths in ([8192, 1, 1, 1], [300, 7000, 5, 64], [1, 1, 1, 1]):
        inputs = inputs_of(lengths, 16, 512)
        impl.plan(inputs)
        impl.begin_step(inputs)
        indptr, indices, last = plain_csr(lengths, inputs.block_table.tolist(), 16)
        assert fake.calls[-1][1:3] == (indptr, last)
        assert wrapper.buffers[0].tolist() == indptr and wrapper.buffers[2].tolist() == last
        assert wrapper.buffers[1][: len(indices)].tolist() == indices
    assert [call[0] for call in fake.calls] == ["plan", "fast", "fast"]
    assert addresses == [t.data_ptr() for t in wrapper.buffers]
    for *_, constants in fake.calls:
        assert (constants["window_left"], constants["logits_soft_cap"], constants["sm_scale"]) == (99, 30.0, 0.5)


def test_the_plan_takes_the_hosts_bounds_and_the_kernel_exact_lengths(fake):
    impl = FlashInferFa2TensorCores().build(spec_of(), 2, 8192, torch.zeros(64, dtype=torch.uint8), {})
    inputs = inputs_of([16, 40], 16, 512, bounds=[17, 64])
    impl.plan(inputs)
    impl.begin_step(inputs)
    assert fake.calls[-1][1:3] == ([0, 2, 6], [1, 16])
    assert impl.wrapper.buffers[0].tolist() == [0, 1, 4] and impl.wrapper.buffers[2].tolist() == [16, 8]


def test_a_plan_waits_for_the_copies_of_the_one_before(fake):
    impl = FlashInferFa2().build(spec_of(), 2, 64, torch.zeros(64, dtype=torch.uint8), {})
    calls = fake.calls
    impl.copied = types.SimpleNamespace(
        synchronize=lambda: calls.append(("wait",)), record=lambda: calls.append(("record",))
    )
    for _ in range(2):
        impl.plan(inputs_of([16, 40], 16, 4))
    assert [call[0] for call in calls] == ["wait", "plan", "record", "wait", "fast", "record"]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
def test_scales_are_passed_for_an_fp8_cache_alone(kv_dtype, fake):
    spec = spec_of(kv_dtype=kv_dtype, k_scale=0.25, v_scale=0.5)
    impl = FlashInferFa2().build(spec, 2, 64, torch.zeros(64, dtype=torch.uint8), {})
    out = torch.zeros(2, 8, 128)
    impl.forward(torch.zeros_like(out), (out, out), out)
    scales = {k: v for k, v in fake.ran.items() if k != "out"}
    assert scales == ({"k_scale": 0.25, "v_scale": 0.5} if kv_dtype == "fp8_e4m3" else {})
    assert fake.ran["out"] is out and bool((out == 7).all())
