"""FA3's balanced schedule: the layout is recognised or refused; what is written is valid, and no worse than FA3's."""

from __future__ import annotations

import heapq
from itertools import product

import numpy as np
import pytest
import torch

from dispatch.backends.fa3 import Fa3
from dispatch.backends.fa3_balance import BalancedSchedule
from dispatch.backends.fa3_layout import TOKENSPEED, VLLM, UnknownLayout, block_tokens, compares, own_parts, rounded
from smoke.facts.balance import told_us
from tests.eligibility import H200, layer

UNITS = 132
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # Triton's interpreter
UNTOUCHED = 77


def blocks_of(lengths, tokens=128):
    return -(-np.asarray(lengths, dtype=np.int64) // tokens)


def fa3(tokens, heads, most, vectors=4):
    """FA3's schedule of some lengths, as its metadata."""

    def schedule(lengths):
        blocks = blocks_of(lengths, tokens)
        parts = own_parts(blocks, heads, UNITS, most)
        order = np.argsort(-blocks_of(blocks, parts), kind="stable")
        place = rounded(len(blocks))
        metadata = torch.zeros(vectors * place + 1, dtype=torch.int32)
        metadata[: len(blocks)] = torch.from_numpy(parts[order])
        metadata[2 * place : 2 * place + len(blocks)] = torch.from_numpy(order)
        return metadata

    return schedule


def vllms(tokens, heads, most, vectors=3):
    """The same as vLLM 0.26.0 keeps it, as seen on an H200: rows as they come, behind the queries of each row."""

    def schedule(lengths):
        rows, place = len(lengths), rounded(len(lengths))
        metadata = torch.zeros(vectors * place + 1, dtype=torch.int32)
        metadata[:place] = 4
        metadata[place : place + rows] = torch.from_numpy(own_parts(blocks_of(lengths, tokens), heads, UNITS, most))
        return metadata

    return schedule


@pytest.mark.parametrize(("heads", "vectors"), [(1, 4), (2, 3), (8, 4), (32, 4)])
@pytest.mark.parametrize("tokens", [64, 80, 112, 128, 176, 224])
def test_the_tokens_of_a_block_are_found_out(tokens, heads, vectors):
    most = min(128, UNITS // heads)
    assert block_tokens(fa3(tokens, heads, most, vectors), heads, UNITS, most, TOKENSPEED) == tokens
    assert block_tokens(vllms(tokens, heads, most, vectors - 1), heads, UNITS, most, VLLM) == tokens


def _without_order(lengths):
    metadata = fa3(128, 8, 16)(lengths)
    metadata[2 * rounded(len(lengths)) :] = 0
    return metadata


def _shortest_first(lengths):
    metadata, place, rows = fa3(128, 8, 16)(lengths), rounded(len(lengths)), len(lengths)
    for start in (0, 2 * place):
        metadata[start : start + rows] = metadata[start : start + rows].flip(0)
    return metadata


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (TOKENSPEED, _without_order),
        (TOKENSPEED, _shortest_first),
        (TOKENSPEED, lambda lengths: fa3(128, 8, 16)(lengths)[:-1]),
        (TOKENSPEED, lambda lengths: fa3(128, 8, 16, vectors=5)(lengths)),
        (TOKENSPEED, lambda lengths: fa3(128, 8, 16)(lengths).roll(1)),
        (TOKENSPEED, lambda lengths: fa3(128, 4, 16)(lengths)),  # splits by another rule
        (TOKENSPEED, vllms(128, 8, 16)),
        (VLLM, lambda lengths: vllms(128, 8, 16)(lengths)[:-1]),
        (VLLM, lambda lengths: vllms(128, 8, 16, vectors=4)(lengths)),
        (VLLM, lambda lengths: vllms(128, 8, 16)(lengths).roll(1)),
        (VLLM, lambda lengths: vllms(128, 4, 16)(lengths)),
        (VLLM, fa3(128, 8, 16, vectors=3)),
        (VLLM, lambda lengths: lengths),
    ],
    ids=[
        *("no order", "shortest first", "no counter", "more vectors", "counter first", "another rule", "vLLM's"),
        *("vLLM, no counter", "vLLM, more vectors", "vLLM, counter first", "vLLM, another rule", "sorted", "lengths"),
    ],
)
def test_another_layout_is_refused(layout, other):
    with pytest.raises(UnknownLayout):
        block_tokens(other, 8, UNITS, 16, layout)


def by_place(lengths, heads, most=16, tokens=128, max_kv=65536):
    """Rows in the order in which the kernel takes them, and their parts; checks that nothing else was written."""
    rows, place = len(lengths), rounded(len(lengths))
    metadata = torch.full((4 * place + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    schedule = BalancedSchedule(rows, heads, UNITS, most, max_kv, tokens, TOKENSPEED, metadata)
    schedule.write(torch.as_tensor(lengths, dtype=torch.int32, device=DEVICE))
    found = metadata.cpu().numpy()
    order, parts = found[2 * place : 2 * place + rows].copy(), found[:rows].copy()
    assert found[-1] == 0  # the counter of tiles
    found[-1] = found[2 * place : 2 * place + rows] = found[:rows] = UNTOUCHED
    assert (found == UNTOUCHED).all()
    return order, parts


def end(blocks, parts, heads, tile=0.5, is_sorted=True):
    """Blocks until the last SM is done; an SM that is done takes the next tile, longest rows first or as they come."""
    longest = blocks_of(blocks, parts)
    done = [0.0] * UNITS
    for i in np.argsort(-longest, kind="stable") if is_sorted else range(len(blocks)):
        of_row = [tile + min(longest[i], blocks[i] - part * longest[i]) for part in range(parts[i])]
        for cost in of_row * heads:
            heapq.heapreplace(done, done[0] + max(0, cost))
    return max(done)


def ragged(rows, mean, seed):
    drawn = np.random.default_rng(seed).lognormal(0, 0.8, rows) * mean
    return np.clip(drawn.astype(np.int64), 1, 65536)


@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (5, 8), (16, 8), (33, 8), (40, 1), (3, 64)])
def test_what_is_written_is_a_schedule(rows, heads):
    most = max(2, min(128, UNITS // heads))
    lengths = ragged(rows, 3000, rows)
    order, parts = by_place(lengths, heads, most)
    assert sorted(order) == list(range(rows))
    assert parts.min() >= 1
    assert parts.max() <= most
    assert (np.diff(blocks_of(blocks_of(lengths[order]), parts)) <= 0).all()


def by_row(lengths, heads, most=16):
    """The parts of each row."""
    order, parts = by_place(lengths, heads, most)
    mine = np.empty_like(parts)
    mine[order] = parts
    return mine


def test_rows_of_which_fa3_makes_some_parts_too_many_take_one_wave():
    # FA3's parts are of ceil(1.1 * 8 * 308 / 132) = 21 blocks: 2 of the rows of 22, 28 and 42, and 3 of the others are
    # 21 parts, 168 tiles on 132 SMs. 16 parts in all would do with 22 blocks: 1, 2, 2 of 14, 21 and 2 of the others.
    blocks = np.array([28, 42, 43, 43, 43, 43, 44, 22])
    own = own_parts(blocks, 8, UNITS, 16)
    assert own.tolist() == [2, 2, 3, 3, 3, 3, 3, 2]
    mine = by_row(blocks * 128, 8)
    assert mine.tolist() == [2, 2, 2, 2, 2, 2, 2, 1]
    assert (end(blocks, own, 8), end(blocks, mine, 8)) == (29.0, 22.5)  # a last part of 13, then one of 15


@pytest.mark.parametrize("lengths", [[1], [1] * 8, [4096] * 16, [128, 1, 1]])
def test_where_one_wave_is_full_or_nothing_can_be_split_the_parts_are_those_of_fa3(lengths):
    assert by_row(np.array(lengths), 8).tolist() == own_parts(blocks_of(lengths), 8, UNITS, 16).tolist()


def test_it_gains_over_fa3_on_ragged_batches_and_loses_next_to_nothing():
    gains = []
    for rows, seed in product((4, 8, 16), range(2)):
        blocks = blocks_of(ragged(rows, 9000, seed))
        own = own_parts(blocks, 8, UNITS, 16)
        gains.append(end(blocks, own, 8) / end(blocks, by_row(blocks * 128, 8), 8))
    assert np.exp(np.log(gains).mean()) > 1.05
    assert min(gains) > 0.95


@pytest.mark.parametrize("rows", [7, 64, 200])
def test_rows_that_are_taken_as_they_come_are_given_longest_parts_first(rows):
    heads, most, place = 12, 11, rounded(rows)
    lengths = np.roll(np.sort(ragged(rows, 3000, rows)), 3)  # nearly the worst order
    metadata = torch.full((3 * place + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    schedule = BalancedSchedule(rows, heads, UNITS, most, 65536, 128, VLLM, metadata)
    schedule.write(torch.as_tensor(lengths, dtype=torch.int32, device=DEVICE))
    found, order = metadata.cpu(), schedule.order.cpu().numpy()
    parts, blocks = found[place : place + rows].clone().numpy(), blocks_of(lengths)
    assert sorted(order) == list(range(rows))
    assert schedule.row_starts.tolist() == [*order, rows]
    assert schedule.lengths.tolist() == lengths[order].tolist()
    assert (np.diff(blocks_of(blocks[order], parts)) <= 0).all()
    assert found[-1] == 0
    found[-1] = found[place : place + rows] = UNTOUCHED
    assert (found == UNTOUCHED).all()
    own = own_parts(blocks, heads, UNITS, most)
    assert compares(rows, heads, UNITS) == (rows == 7)
    assert compares(rows, heads, UNITS) or parts.tolist() == own[order].tolist()
    as_it_was = end(blocks, own, heads, is_sorted=False)
    assert as_it_was > 1.05 * end(blocks[order], parts, heads, is_sorted=False)


def test_it_is_offered_where_a_wave_more_or_less_matters(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())

    def offered(batch, max_kv=65536, **changes):
        return "balanced=1" in Fa3().tactics(layer(**changes), H200, batch, max_kv)

    assert offered(1)
    assert offered(128)  # two KV heads
    assert not offered(129)  # rows that are compared with one another
    assert offered(24, num_qo_heads=16, num_kv_heads=16)  # three waves are 24.75 rows
    assert not offered(25, num_qo_heads=16, num_kv_heads=16)
    assert not offered(8, sliding_window=128)  # FA3 keeps another order there
    assert not offered(8, max_kv=128)  # a block: nothing to split
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None if name == "triton" else object())
    assert not offered(8)


def test_the_time_that_is_told_is_that_of_the_sm_that_is_done_last_and_of_adding_up_parts():
    # One row of a block: its tile costs 3 half blocks, and a launch 6.5; one part, which nothing is added to.
    assert told_us(np.array([128]), 1, 16) == pytest.approx(0.975 * (6.5 + 3 + 0.08))
    # 512 blocks, 8 heads: parts of ceil(1.1 * 8 * 512 / 132) = 35 blocks, 15 of them: 120 tiles, all at once
    told = 6.5 + (2 * 35 + 1) + 1.9 * 120 / 132 + 0.08 * 15
    assert told_us(np.array([65536]), 8, 16) == pytest.approx(0.975 * told)
