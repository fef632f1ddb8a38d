# mypy: ignore-errors
"""The two kernels of fa3_balance: what each size of parts would take, and the schedule of the best one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _parts(blocks, size, live, most_splits):
    """How many parts each row is split into, and the blocks of each."""
    splits = tl.minimum(tl.maximum(tl.cdiv(blocks, size), 1), most_splits)
    return tl.where(live, splits, 0), tl.cdiv(blocks, splits)


@triton.jit
def _own_size(blocks, live, heads, units):
    """Blocks of a part as FA3 chooses it."""
    total = tl.sum(tl.where(live, blocks, 0), axis=0).to(tl.float32)
    return tl.ceil(total * 1.1 * heads.to(tl.float32) / units.to(tl.float32)).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "heads", "units", "most_splits", "halvings", "waves", "step"])
def compare_sizes(
    lengths,
    sizes,
    ends,
    batch,
    heads,
    units,
    most_splits,
    halvings,
    waves,
    step,
    block_tokens: tl.constexpr,
    rows_padded: tl.constexpr,
    places: tl.constexpr,
    launch: tl.constexpr,
    per_wave: tl.constexpr,
    per_part_added: tl.constexpr,
    favour: tl.constexpr,
):
    """Of a size of parts, and some of the SMs: the size, and when the last of them is done, in half blocks (float32).

    A program for each size, the first of which is FA3's own, and for each `places` SMs. `step`: of so many SMs, side by
    side, all take the same tiles.
    """
    one, some = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, rows_padded)
    live = rows < batch
    blocks = tl.maximum(tl.cdiv(tl.load(lengths + rows, mask=live, other=0), block_tokens), 1)
    if one == 0:
        size = _own_size(blocks, live, heads, units)
    else:  # the smallest size with which all tiles fit into so many eighths of a wave
        eighths = tl.maximum(8, tl.cdiv(8 * batch * heads, units)) + one - 1
        fitting = eighths * units // (8 * heads)
        size = tl.full((), 1, tl.int32)
        high = tl.max(tl.where(live, blocks, 1), axis=0)
        for _ in range(halvings):
            middle = (size + high) // 2
            splits, _ = _parts(blocks, middle, live, most_splits)
            fits = (tl.sum(splits, axis=0) <= fitting) | (size >= high)
            high = tl.where(fits, middle, high)
            size = tl.where(fits, size, middle + 1)
    splits, per_part = _parts(blocks, size, live, most_splits)
    tiles = splits * heads
    # The kernel takes the longest tiles first. Before those of row i come so many:
    before = tl.sum(tl.where(per_part[None, :] > per_part[:, None], tiles[None, :], 0), axis=1)
    cost = 2 * per_part + 1  # half blocks: a tile costs half a block beside its blocks
    # The shortest SM of a wave takes the longest tile of the next one: to and fro.
    place = (some * places + tl.arange(0, places)) * step
    count = tl.sum(tiles, axis=0)
    done = tl.zeros((places,), tl.int32)
    for wave in range(waves):
        tile = wave * units + tl.where(wave % 2 == 0, place, units - step - place)
        here = tl.where(live[None, :] & (before[None, :] <= tile[:, None]), cost[None, :], 1 << 30)
        done += tl.where((place < units) & (tile < count), tl.min(here, axis=1), 0)
    end = tl.max(done, axis=0).to(tl.float32)
    if (one == 0) & (count > 2 * units):  # in many waves an SM takes what is left: FA3's own may do better than that
        longest, least = tl.max(tl.where(live, cost, 0), axis=0), tl.min(tl.where(live, cost, 1 << 30), axis=0)
        share = tl.sum(tiles * cost, axis=0).to(tl.float32) / units
        end = tl.maximum(longest.to(tl.float32), share + least / 2)
    # Parts of rows are added up by a second kernel, one after the other within a row.
    parts = tl.sum(tl.where(splits > 1, tiles, 0), axis=0).to(tl.float32) / units
    end += launch + per_wave * parts + per_part_added * tl.max(splits, axis=0).to(tl.float32)
    tl.store(sizes + one, size)
    tl.store(ends + some * tl.num_programs(0) + one, end * favour if one == 0 else end)


@triton.jit(do_not_specialize=["batch", "heads", "units", "most_splits", "parts_at", "counter_at", "groups"])
def write_schedule(
    lengths,
    sizes,
    ends,
    metadata,
    order,
    lengths_taken,
    batch,
    heads,
    units,
    most_splits,
    parts_at,
    counter_at,
    groups,
    block_tokens: tl.constexpr,
    rows_padded: tl.constexpr,
    rows_at_once: tl.constexpr,
    sizes_compared: tl.constexpr,
    is_split: tl.constexpr,
):
    """The splits of the best size, the rows with the longest parts first, and their lengths; a program for some rows.

    `sizes_compared`: 0 for FA3's own. `groups`: of SMs, that were looked at. `order` may lie in `metadata`.
    """
    rows = tl.arange(0, rows_padded)
    live = rows < batch
    blocks = tl.maximum(tl.cdiv(tl.load(lengths + rows, mask=live, other=0), block_tokens), 1)
    if sizes_compared == 0:
        size = _own_size(blocks, live, heads, units)
    else:
        every = tl.arange(0, sizes_compared)
        end = tl.zeros((sizes_compared,), tl.float32)
        for some in range(groups):
            end = tl.maximum(end, tl.load(ends + some * sizes_compared + every))
        size = tl.load(sizes + tl.argmin(end, axis=0))
    _, per_part = _parts(blocks, size, live, most_splits)
    mine = tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once)
    alive = mine < batch
    length = tl.load(lengths + mine, mask=alive, other=0)
    splits, its = _parts(tl.maximum(tl.cdiv(length, block_tokens), 1), size, alive, most_splits)
    first = (per_part[None, :] > its[:, None]) | ((per_part[None, :] == its[:, None]) & (rows[None, :] < mine[:, None]))
    rank = tl.sum((first & live[None, :]).to(tl.int32), axis=1)
    if is_split:
        tl.store(metadata + parts_at + rank, splits, mask=alive)
    tl.store(order + rank, mine, mask=alive)
    tl.store(lengths_taken + rank, length, mask=alive)
    if tl.program_id(0) == 0:
        tl.store(metadata + counter_at, 0)
