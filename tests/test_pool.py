"""The bench's paged KV cache: every row its own pages, laid out as asked for, in buffers that never move."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatch.bench.pool
from dispatch.bench.pool import RESERVED_PAGE, PagedPool, page_bytes, raw_bits
from dispatch.errors import MeasureError
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from tests.make import make_spec

CPU = torch.device("cpu")
MAX_KV = 100  # 7 pages of 16


def pool_of(num_pages: int = 20, num_layers: int = 1, **changes: Any) -> PagedPool:
    return PagedPool(make_spec(**changes), num_pages, num_layers, CPU)


def pages_of(inputs: StepInputs, spec: AttentionSpec) -> list[list[int]]:
    """The pages that hold tokens of each row."""
    lengths = inputs.lengths.tolist()
    return [row[: spec.max_pages(n)] for row, n in zip(inputs.block_table.tolist(), lengths, strict=True)]


# --- rows and pages


def test_fresh_inputs_are_rows_of_one_token_on_the_reserved_page() -> None:
    inputs = pool_of().inputs(3, MAX_KV)
    assert inputs.num_live == 3
    assert inputs.lengths_host.tolist() == inputs.lengths.tolist() == [1, 1, 1]
    assert inputs.block_table.tolist() == [[RESERVED_PAGE] * 7] * 3
    assert {t.dtype for t in (inputs.lengths_host, inputs.lengths, inputs.block_table)} == {torch.int32}


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, MAX_KV), min_size=1, max_size=6))
def test_rows_have_disjoint_pages_and_never_the_reserved_one(lengths: list[int]) -> None:
    pool = pool_of(num_pages=6 * 7)
    inputs = pool.inputs(len(lengths), MAX_KV)
    for _ in range(3):  # from another page on each time
        pool.load(inputs, lengths)
    used = [page for row in pages_of(inputs, pool.spec) for page in row]
    assert len(set(used)) == len(used) == sum(-(-n // 16) for n in lengths)
    assert set(used) <= set(range(1, 6 * 7 + 1)) - {RESERVED_PAGE}
    assert inputs.lengths_host.tolist() == inputs.lengths.tolist() == lengths


def test_entries_behind_the_last_page_of_a_row_are_the_reserved_page() -> None:
    pool = pool_of()
    inputs = pool.inputs(2, MAX_KV)
    pool.load(inputs, [100, 100])
    pool.load(inputs, [17, 16])  # 2 pages and 1, where there were 7
    assert [row[2:] for row in inputs.block_table.tolist()] == [[RESERVED_PAGE] * 5] * 2
    assert inputs.block_table[1, 1] == RESERVED_PAGE


def test_rows_that_are_given_no_length_are_padding_of_one_token_on_the_reserved_page() -> None:
    pool = pool_of()
    inputs = pool.inputs(3, MAX_KV)
    pool.load(inputs, [20, 30, 40])
    pool.load(inputs, [50])
    assert inputs.num_live == 1
    assert inputs.lengths_host.tolist() == inputs.lengths.tolist() == [50, 1, 1]
    assert RESERVED_PAGE not in inputs.block_table[0, :4]
    assert inputs.block_table[1:].tolist() == [[RESERVED_PAGE] * 7] * 2


def test_every_page_of_the_pool_can_be_given_out() -> None:
    pool = pool_of(num_pages=14)
    inputs = pool.inputs(2, MAX_KV)
    pool.load(inputs, [100, 112])  # 7 pages each
    assert sorted(inputs.block_table.ravel().tolist()) == list(range(1, 15))


def test_pages_come_in_random_order_out_of_the_whole_pool() -> None:
    pool = pool_of(num_pages=1000)
    inputs = pool.inputs(1, 16 * 64)
    orders = []
    for _ in range(2):
        pool.load(inputs, [16 * 64])
        orders.append(inputs.block_table[0].tolist())
    assert orders[0] != orders[1]
    # 64 of 1000 pages at random: all in the first or the last half with a probability of 2^-63, in order with 1/64!
    assert min(orders[0]) <= 500 < max(orders[0])
    assert orders[0] != sorted(orders[0])


def test_a_new_order_comes_with_a_shuffle_and_until_then_the_same_one_from_another_page_on() -> None:
    pool = pool_of(num_pages=64)
    inputs = pool.inputs(1, 16 * 64)  # one row that takes them all
    follows, firsts = [], set()
    for shuffled in (False, False, False, True):
        if shuffled:
            pool.shuffle()
        pool.load(inputs, [16 * 64])
        row = inputs.block_table[0].tolist()
        firsts.add(row[0])
        follows.append({*pairwise(row), (row[-1], row[0])})
    assert follows[0] == follows[1] == follows[2] != follows[3]
    assert len(firsts) > 1


def test_a_row_may_begin_at_the_last_page_in_a_table_wider_than_the_pool() -> None:
    pool = pool_of(num_pages=3)
    inputs = pool.inputs(3, MAX_KV)
    for _ in range(30):  # from each of the three pages on, but for a chance of 3 (2/3)^30
        pool.load(inputs, [16, 16, 16])
        assert sorted(inputs.block_table[:, 0].tolist()) == [1, 2, 3]
        assert not inputs.block_table[:, 1:].any()


def test_only_the_first_pages_are_used_where_so_many_are_asked_for() -> None:
    pool = pool_of(num_pages=1000)
    inputs = pool.inputs(2, MAX_KV)
    pool.load(inputs, [100, 100], num_pages=14)
    assert sorted(inputs.block_table.ravel().tolist()) == list(range(1, 15))


@pytest.mark.parametrize("num_pages", [7, 8, 13])  # of the 14 needed: no page, one or several are left for the second
def test_rows_that_need_more_pages_than_there_are_get_none(num_pages: int) -> None:
    pool = pool_of(num_pages=num_pages)
    inputs = pool.inputs(2, MAX_KV)
    with pytest.raises(MeasureError, match=f"need 14 pages; the pool has {num_pages}"):
        pool.load(inputs, [100, 100])
    assert inputs.lengths.tolist() == [1, 1]
    assert inputs.block_table.unique().tolist() == [RESERVED_PAGE]


def test_a_refresh_keeps_every_address() -> None:
    pool = pool_of()
    inputs = pool.inputs(2, MAX_KV)

    def addresses() -> list[int]:
        return [t.data_ptr() for t in (inputs.lengths_host, inputs.lengths, inputs.block_table)]

    before = addresses()
    for lengths in ([100, 1], [5, 50]):
        pool.load(inputs, lengths)
        assert addresses() == before
        assert inputs.lengths.tolist() == lengths


# --- how pages lie in memory


@pytest.mark.parametrize(("layout", "inner"), [("NHD", (16, 2)), ("HND", (2, 16))])
def test_pages_are_dense_in_the_layout_asked_for(layout: str, inner: tuple[int, int]) -> None:
    k, v = pool_of(head_dim_qk=64, head_dim_vo=128, kv_layout=layout).kv_caches[0]
    assert (tuple(k.shape), tuple(v.shape)) == ((21, *inner, 64), (21, *inner, 128))  # the reserved page is one more
    assert k.is_contiguous()
    assert v.is_contiguous()


# Pages 16 tokens of 2 heads of 64, with room for 3 heads; then K and V of a page side by side, as some engines do.
@pytest.mark.parametrize(
    ("layout", "strides"),
    [("NHD", (3072, 192, 64)), ("HND", (3072, 64, 192)), ("NHD", (4096, 128, 64)), ("HND", (4096, 1024, 64))],
)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
def test_pages_have_the_strides_of_the_engines_cache(layout: str, strides: tuple[int, int, int], kv_dtype: str) -> None:
    pool = pool_of(kv_layout=layout, kv_strides=strides, kv_dtype=kv_dtype)
    assert [pages.stride() for pages in pool.kv_caches[0]] == [(*strides, 1)] * 2
    assert [tuple(pages.shape[1:]) for pages in pool.kv_caches[0]] == [
        (16, 2, 64) if layout == "NHD" else (2, 16, 64)
    ] * 2


@pytest.mark.parametrize("strides", [None, (4096, 128, 64)])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
def test_page_bytes_are_what_a_page_takes(strides: tuple[int, int, int] | None, kv_dtype: str) -> None:
    pool = pool_of(num_pages=9, kv_strides=strides, kv_dtype=kv_dtype)
    taken = sum(pages.untyped_storage().nbytes() for pages in pool.kv_caches[0])
    # Of the last page, the gap behind its 16 x 128 values is not there: of K and of V, in bytes.
    gap = 0 if strides is None else 2 * (4096 - 2048) * (2 if kv_dtype == "bf16" else 1)
    assert page_bytes(pool.spec) * 10 == taken + gap


def test_page_bytes_count_head_dims_of_k_and_of_v() -> None:
    assert page_bytes(make_spec(head_dim_qk=192, head_dim_vo=128)) == 16 * 2 * (192 + 128) * 2  # tokens, heads, bytes


# --- what is in them


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_hold_normal_numbers(layout: str, kv_dtype: str) -> None:
    k, v = (pages.float() for pages in pool_of(kv_layout=layout, kv_dtype=kv_dtype).kv_caches[0])
    for values in (k, v):  # 21 x 2048: the mean is 0 and the deviation 1 within 4 / sqrt(43008) = 2%, and rounding
        assert bool(values.isfinite().all())
        assert abs(float(values.mean())) < 0.02
        assert abs(float(values.std()) - 1) < 0.03


def test_a_pool_that_is_filled_in_pieces_is_filled_to_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.bench.pool, "_CHUNK_PAGES", 4)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # so that a page that is left out shows
    k, v = pool_of(num_pages=9).kv_caches[0]
    assert bool((k != 0).any(dim=(1, 2, 3)).all())
    assert bool((v != 0).any(dim=(1, 2, 3)).all())


def test_layers_and_k_and_v_have_memory_and_numbers_of_their_own() -> None:
    pages = [pages for layer in pool_of(num_layers=3).kv_caches for pages in layer]
    assert len({p.data_ptr() for p in pages}) == 6
    assert not any(torch.equal(a, b) for i, a in enumerate(pages) for b in pages[:i])


def test_two_pools_hold_the_same_numbers() -> None:
    a, b = pool_of(num_layers=2), pool_of(num_layers=2)
    assert all(
        torch.equal(x, y) for p, q in zip(a.kv_caches, b.kv_caches, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("bf16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn)])
def test_pages_have_the_caches_type_and_queries_the_activations(kv_dtype: str, dtype: torch.dtype) -> None:
    pool = pool_of(kv_dtype=kv_dtype)
    chain = pool.chain(3)
    assert {pages.dtype for pages in pool.kv_caches[0]} == {dtype}
    assert {chain.q.dtype, *(out.dtype for out in chain.outs)} == {torch.bfloat16}


def test_raw_bits_of_fp8_are_the_same_memory_as_bytes() -> None:
    pages = pool_of(kv_dtype="fp8_e4m3").kv_caches[0][0]
    bits = raw_bits(pages)
    assert (bits.dtype, bits.shape, bits.data_ptr()) == (torch.uint8, pages.shape, pages.data_ptr())


def test_raw_bits_of_other_types_are_the_tensor_itself() -> None:
    pages = pool_of().kv_caches[0][0]
    assert raw_bits(pages) is pages


# --- the chain


def test_a_chain_has_one_query_and_an_output_for_each_layer() -> None:
    pool = pool_of(num_layers=3, head_dim_qk=192, head_dim_vo=128)
    chain = pool.chain(5)
    assert tuple(chain.q.shape) == (5, 8, 192)
    assert [tuple(out.shape) for out in chain.outs] == [(5, 8, 128)] * 3
    assert len({out.data_ptr() for out in chain.outs}) == 3
    assert chain.kv_caches is pool.kv_caches


def test_the_queries_of_a_chain_lie_as_far_apart_as_the_engines_own() -> None:
    dense, strided = (pool_of(head_dim_qk=64, q_stride=stride).chain(5).q for stride in (None, 8 * 64 + 128))
    assert dense.shape == strided.shape == (5, 8, 64)
    assert (dense.stride(), strided.stride()) == ((512, 64, 1), (640, 64, 1))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_chain_has_a_sink_for_each_query_head_where_the_layer_has_them(has_sinks: bool) -> None:
    sinks = pool_of(has_sinks=has_sinks).chain(2).sinks
    assert (None if sinks is None else (tuple(sinks.shape), sinks.dtype)) == (
        ((8,), torch.float32) if has_sinks else None
    )


# --- K and V in one tensor

PACKED = {"kv_strides": (16 * 2 * 128, 2 * 128, 128)}  # 16 tokens of 2 heads, in each row K and then V of 64


def test_where_v_lies_behind_k_both_are_views_of_one_tensor() -> None:
    pool = pool_of(num_pages=5, **PACKED)
    ((k, v),) = pool.kv_caches
    assert k.shape == v.shape == (6, 16, 2, 64)
    assert k.stride() == v.stride() == (*PACKED["kv_strides"], 1)
    assert v.data_ptr() - k.data_ptr() == 64 * 2
    assert k.untyped_storage().nbytes() == 6 * page_bytes(pool.spec)
    assert page_bytes(pool.spec) == page_bytes(make_spec())
    assert all(0.9 < pages.float().std() < 1.1 for pages in (k, v))


def test_strides_with_other_gaps_are_two_tensors() -> None:
    spec = make_spec(kv_strides=(16 * 2 * 80, 2 * 80, 80))
    assert not spec.is_packed
    ((k, v),) = PagedPool(spec, 5, 1, CPU).kv_caches
    assert k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()


def test_heads_outside_of_tokens_are_packed_too() -> None:
    spec = make_spec(kv_layout="HND", kv_strides=(2 * 16 * 128, 16 * 128, 128))
    assert spec.is_packed
    ((k, v),) = PagedPool(spec, 5, 1, CPU).kv_caches
    assert k.shape == (6, 2, 16, 64)
    assert v.data_ptr() - k.data_ptr() == 64 * 2
