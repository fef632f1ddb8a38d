"""XQA on a machine without a GPU: what is eligible, what is refused and why, and what the kernel is handed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from dispatch.backends import flashinfer_xqa
from dispatch.backends.flashinfer_xqa import SEMAPHORE_BYTES, FlashInferXqa
from dispatch.backends.narrow_table import NarrowTable, narrow_tactics
from dispatch.errors import MeasureError
from dispatch.step import StepInputs
from tests.eligibility import GROUPS, H200, PAGES, PAIRS, layer
from tests.fakes import CPU


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())


def reason(spec, device=H200):
    return FlashInferXqa().support(spec, device).reason


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_head_dim_and_group_is_served_with_pages_of_16_and_more(dim, pair):
    for group, page, extras in product(
        GROUPS, PAGES, ({}, {"sliding_window": 128}, {"has_sinks": True}, {"kv_layout": "HND"})
    ):
        spec = layer(group, dim, page, dtype=pair[0], kv_dtype=pair[1], **extras)
        assert FlashInferXqa().support(spec, H200).ok == (page >= 16 and pair[0] != "fp32")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32: bf16 or fp16"),
        ({"page": 8}, "page size 8: 16, 32, 64 or 128"),
        ({"page": 256}, "page size 256: 16, 32, 64 or 128"),
        ({"head_dim_vo": 64}, "head dim 128 of K and 64 of V: must be equal"),
        ({"dim": 72}, "head dim 72: a multiple of 16, up to 256"),
        ({"dim": 272}, "head dim 272: a multiple of 16, up to 256"),
        ({"dim": 160}, "head dim 160: up to 128, or 192 and more"),
        ({"group": 17}, "group size 17: at most 16"),
        ({"logits_soft_cap": 30.0}, "soft cap: the kernel has none"),
        ({"kv_strides": (8196, 260, 130)}, "KV strides (8196, 260, 130): must be multiples of 16 bytes"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_its_reason(changes, why):
    assert reason(layer(**changes)).startswith(why)


def test_the_device_is_looked_at_before_the_library_and_the_library_before_the_shape(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None)
    assert reason(layer(page=8), CPU) == "needs a CUDA device"
    assert reason(layer(page=8), replace(H200, capability=(8, 0))) == "needs SM90, SM10x or SM12x, this is SM80"
    assert reason(layer(page=8)) == "not installed: pip install flashinfer-python"


@pytest.mark.parametrize(
    ("batch", "max_kv", "tactics"),
    [
        (2, 131072, ("", "max_kv=4096", "max_kv=16384")),  # 4 KV heads
        (2, 16384, ("", "max_kv=4096")),
        (1, 4096, ("",)),
        (3, 131072, ("",)),  # 6 KV heads
    ],
)
def test_narrower_tables_are_tried_for_few_kv_heads_and_below_what_is_served(batch, max_kv, tactics):
    assert FlashInferXqa().tactics(layer(), H200, batch, max_kv) == tactics
    assert narrow_tactics(layer(), batch, max_kv) == tactics


def test_the_narrow_table_is_contiguous_holds_the_first_pages_and_never_moves():
    wide = torch.arange(24, dtype=torch.int32).view(2, 12)
    narrow = NarrowTable(4)
    table = narrow.read(wide)
    assert table.is_contiguous()
    assert table.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    wide.add_(100)
    again = narrow.read(wide)
    assert again.data_ptr() == table.data_ptr()
    assert table.tolist() == [[100, 101, 102, 103], [112, 113, 114, 115]]


def test_a_table_of_the_right_width_is_used_as_it_is_unless_its_rows_lie_apart():
    table = torch.zeros(2, 4, dtype=torch.int32)
    assert NarrowTable(4).read(table) is table
    apart = torch.arange(24, dtype=torch.int32).view(2, 12)[:, :4]
    copy = NarrowTable(4).read(apart)
    assert copy.is_contiguous()
    assert copy.tolist() == apart.tolist()


@pytest.fixture
def calls(monkeypatch):
    """What the kernel is called with, in place of the library."""
    found = []
    module = SimpleNamespace(xqa=lambda *args, **kwargs: found.append((args, kwargs)))
    monkeypatch.setattr(flashinfer_xqa, "importlib", SimpleNamespace(import_module=lambda name: module))
    return found


def step(spec, max_kv=4096, sinks=None):
    backend = FlashInferXqa()
    workspace = torch.zeros(backend.workspace_bytes(spec, 3, max_kv), dtype=torch.uint8)
    impl = backend.build(spec, 3, max_kv, workspace, {})
    pages = torch.zeros(5, 16, 2, 128, dtype=torch.bfloat16)
    lengths = torch.tensor([1, 20, 300], dtype=torch.int32)
    inputs = StepInputs(3, lengths, lengths, torch.zeros(3, 256, dtype=torch.int32))
    q, out = (torch.zeros(3, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    impl.begin_step(inputs)
    impl.forward(q, (pages, pages), out, sinks)
    return inputs, workspace, out


def test_the_kernel_gets_the_lengths_the_table_and_out_in_place(calls):
    inputs, workspace, out = step(layer(sliding_window=128))
    (_, _, _, table, lengths, output, scratch, semaphores, heads, page), options = calls[0]
    assert table is inputs.block_table
    assert (lengths.dtype, lengths.shape, lengths.data_ptr()) == (torch.uint32, (3, 1), inputs.lengths.data_ptr())
    assert (output.shape, output.data_ptr()) == ((3, 1, 8, 128), out.data_ptr())
    assert (heads, page, options["sliding_win_size"], options["kv_layout"]) == (2, 16, 128, "NHD")
    assert semaphores.data_ptr() == workspace.data_ptr()
    assert scratch.data_ptr() == workspace.data_ptr() + SEMAPHORE_BYTES


def test_a_narrow_build_reads_a_narrow_table(calls):
    step(layer(), max_kv=1024)
    assert calls[0][0][3].shape == (3, 64)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
def test_the_scales_come_to_those_of_the_layer_and_count_only_for_fp8(calls, kv_dtype):
    step(layer(kv_dtype=kv_dtype, k_scale=0.25, v_scale=0.5, sm_scale=0.1))
    q_scale, kv_scale = calls[0][1]["q_scale"], calls[0][1]["kv_scale"]
    k_scale, v_scale = (0.25, 0.5) if kv_dtype == "fp8_e4m3" else (1.0, 1.0)
    assert q_scale * kv_scale / 128**0.5 == pytest.approx(0.1 * k_scale)  # the kernel's formula
    assert kv_scale == v_scale
    assert isinstance(q_scale, float)  # anything else would be taken for a tensor
    assert isinstance(kv_scale, float)


def test_sinks_are_grouped_by_kv_head(calls):
    step(layer(has_sinks=True), sinks=torch.arange(8.0))
    assert calls[0][1]["sinks"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_more_rows_than_semaphores_are_refused():
    with pytest.raises(MeasureError, match="semaphores"):
        FlashInferXqa().build(layer(), SEMAPHORE_BYTES // 8 + 1, 16, torch.empty(0, dtype=torch.uint8), {})


def test_the_boundary_between_semaphores_and_scratch_is_the_same_for_every_bucket():
    backend = FlashInferXqa()
    assert backend.workspace_bytes(layer(), 1, 16) == backend.workspace_bytes(layer(16, 256), 512, 131072)
