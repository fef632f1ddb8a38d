"""vLLM's build of FA3 in an emulation of its two operators, written from its sources: hopper/flash_api_stable.cpp,
seqlen.h."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dispatch.backends.fa3_layout import own_parts, rounded
from dispatch.bench.pool import PagedPool
from dispatch.plugins.vllm.fa3 import VllmFa3
from dispatch.reference import reference_decode
from dispatch.step import StepInputs
from tests.eligibility import H200, layer

UNITS, BLOCK, MAX_KV, UNTOUCHED = 132, 128, 4096, 77
SPEC = layer(group=2, dim=16, num_qo_heads=16, num_kv_heads=8)


def get_scheduler_metadata(batch, max_q, max_k, heads, kv_heads, dim, dim_v, dtype, lengths, starts, *others):
    """Rows as they come, behind the queries of each row; without parts where no row is split."""
    assert starts.shape == (batch + 1,)
    if others[-3] == 1:
        return torch.full((2 * rounded(batch) + 1,), UNTOUCHED, dtype=torch.int32)
    metadata = torch.zeros(3 * rounded(batch) + 1, dtype=torch.int32)
    blocks = -(-lengths.numpy().astype(np.int64) // BLOCK)
    metadata[rounded(batch) :][:batch] = torch.from_numpy(own_parts(blocks, kv_heads, UNITS, others[-3]))
    return metadata


class Emulated:
    """`fwd`, that keeps what the kernel takes one after the other."""

    get_scheduler_metadata = staticmethod(get_scheduler_metadata)

    def fwd(self, *, q, k, v, out, cu_seqlens_q, seqused_q, seqused_k, page_table, kv_batch_idx, **given):
        batch = len(cu_seqlens_q) - 1
        metadata, is_split = given["scheduler_metadata"], given["num_splits"] > 1
        assert metadata.shape == ((3 if is_split else 2) * rounded(batch) + 1,)
        assert is_split or (metadata[:-1] == UNTOUCHED).all()
        self.lengths = seqused_k.tolist()
        self.parts = metadata[rounded(batch) :][:batch].tolist() if is_split else [1] * batch
        for i in range(batch):
            start = int(cu_seqlens_q[i])
            assert (int(cu_seqlens_q[i + 1]) - start if seqused_q is None else int(seqused_q[i])) == 1
            length = self.lengths[i]
            row = page_table[i if kv_batch_idx is None else int(kv_batch_idx[i])][: SPEC.max_pages(length)].long()
            keys, values = (pages[row].flatten(0, 1)[:length].float() for pages in (k, v))
            grouped = q[start].float().unflatten(0, (SPEC.num_kv_heads, -1))
            weights = torch.einsum("hgd,nhd->hgn", grouped, keys).mul(given["softmax_scale"]).softmax(-1)
            out[start] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1).to(out.dtype)


@pytest.fixture
def emulated(monkeypatch):
    its = Emulated()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", its, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=UNITS))
    return its


@pytest.mark.parametrize("tactic", [{}, {"balanced": 1}, {"balanced": 1, "num_splits": 1}])
def test_each_row_is_attended_over_its_own_pages_in_whatever_order_the_kernel_takes_them(emulated, tactic):
    impl = VllmFa3().build(SPEC, 6, MAX_KV, torch.empty(0), tactic)
    for seed, lengths in enumerate(([700, 3, 2000, 128, 4000, 1], [5, 4096, 17, 900, 900, 33])):
        pool = PagedPool(SPEC, 600, 1, torch.device("cpu"))
        for pages in pool.kv_caches[0]:
            pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(seed)))
        table = torch.zeros(6, SPEC.max_pages(MAX_KV), dtype=torch.int32)
        order = torch.randperm(600, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        for row, length in enumerate(lengths):
            count = SPEC.max_pages(length)
            table[row, :count], order = order[:count], order[count:]
        given = torch.tensor(lengths, dtype=torch.int32)
        inputs = StepInputs(6, given, given.clone(), table)
        q = torch.randn(6, SPEC.num_qo_heads, SPEC.head_dim_qk).to(torch.bfloat16)
        out = torch.full_like(q, float("nan"))
        impl.begin_step(inputs)
        impl.forward(q, pool.kv_caches[0], out)
        expected = reference_decode(SPEC, q, pool.kv_caches[0], inputs, None)
        assert (out.float() - expected).abs().max() < 0.02
        assert inputs.lengths.tolist() == lengths
        if tactic:
            blocks = -(-np.array(emulated.lengths) // BLOCK)
            assert (np.diff(-(-blocks // np.array(emulated.parts))) <= 0).all()
        else:
            assert emulated.lengths == lengths


def test_rows_that_are_not_split_are_sorted_by_their_tokens(emulated):
    impl = VllmFa3().build(SPEC, 4, MAX_KV, torch.empty(0), {"balanced": 1, "num_splits": 1})
    lengths = torch.tensor([900, 901, 5, 4096], dtype=torch.int32)  # two of as many blocks
    impl.begin_step(StepInputs(4, lengths, lengths.clone(), torch.zeros(4, 256, dtype=torch.int32)))
    assert impl.lengths.tolist() == [4096, 901, 900, 5]
    assert impl.given["row_starts"].tolist() == [3, 1, 0, 2, 4]
    assert impl.metadata[-1] == 0


def test_it_is_offered_wherever_rows_may_be_in_a_bad_order(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())

    def tactics(batch, **changes):
        return VllmFa3().tactics(layer(num_qo_heads=32, num_kv_heads=8, **changes), H200, batch, MAX_KV)

    def offered(batch, **changes):
        return "balanced=1" in tactics(batch, **changes)

    assert tactics(16) == ("", "balanced=1")
    assert tactics(17) == ("", "num_splits=1", "balanced=1", "balanced=1,num_splits=1")  # 136 rows of KV heads
    assert offered(512)  # thirty-one waves of rows that are not split
    assert not offered(513)  # rows that are compared with one another
    assert not offered(8, sliding_window=128)
