"""How well FA3's time is told by when its last SM is done, and what `fa3[balanced=1]` gains, on compared batches.

    python -m smoke.facts.balance COMPARISON --trace requests.csv --seed 9 --snapshots 16

COMPARISON is what `compare --out` wrote; the rest is what it was given. The batches are drawn
again, and split as FA3 splits them (fa3_layout.own_parts): its microseconds a layer, of its step without a microsecond
for each layer of plan or begin_step, beside

    half a block x (fa3_layout.COSTS + 2 x blocks and 1 for each tile of the SM that is done last)
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dispatch.backends.fa3 import most_splits
from dispatch.backends.fa3_layout import COSTS, own_parts
from dispatch.bench.trace import read_traces
from dispatch.bench.traffic import batches
from dispatch.samples import TWIN
from dispatch.spec import AttentionSpec
from smoke.facts.replan import comparison_of

UNITS, BLOCK_TOKENS = 132, 128  # of an H200, and of FA3's kernel for head dim 128
HALF_BLOCK_US = 0.975
BALANCED = "fa3[balanced=1]"


def told_us(lengths: NDArray[np.int64], heads: int, most: int) -> float:
    """Of a layer."""
    blocks = -(-lengths // BLOCK_TOKENS)
    parts = own_parts(blocks, heads, UNITS, most)
    longest = -(-blocks // parts)
    done = [0.0] * UNITS
    for i in np.argsort(-longest, kind="stable"):
        for part in range(int(parts[i])):
            cost = 1 + 2 * max(0, min(longest[i], blocks[i] - part * longest[i]))
            for _ in range(heads):
                heapq.heapreplace(done, done[0] + cost)
    added = COSTS["per_wave"] * heads * parts[parts > 1].sum() / UNITS + COSTS["per_part_added"] * parts.max()
    return HALF_BLOCK_US * (COSTS["launch"] + max(done) + float(added))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.balance", description=__doc__)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--snapshots", type=int, required=True)
    options = parser.parse_args(arguments)
    compared = comparison_of(options.comparison)
    key = compared["key"]
    spec, longest = AttentionSpec.from_json(key["spec"]), key["max_seq_len"]
    most, pages = most_splits(spec, UNITS, longest), key["capacity"] // spec.page_size
    rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for trace in read_traces(options.trace):
        for batch in sorted({each["batch"] for each in compared["snapshots"]}):
            its = [e for e in compared["snapshots"] if (e["trace"], e["batch"]) == (trace.name, batch)]
            if its:
                drawn, _ = batches(trace, batch, options.snapshots, longest, pages, spec.page_size, options.seed)
            for lengths, each in zip(drawn if its else (), its, strict=True):
                assert int(lengths.max()) == each["max_kv"], "drawn with another seed or number of snapshots"
                us = {name: np.array(times, dtype=float) for name, times in each["step_us"].items()}
                both = (us["fa3"] + us[TWIN]) / 2
                off = np.log(np.nanmedian(both) / spec.num_layers / told_us(lengths, spec.num_kv_heads, most))
                gain = np.nanmedian(np.log(both / us[BALANCED])) if BALANCED in us else np.nan
                rows[batch].append((float(off), float(gain)))
    for batch, found in rows.items():
        off, gain = np.array(found).T
        line = f"batch {batch}: {len(off)} batches, fa3's time over what is told: {np.expm1(off.mean()):+.1%}"
        line += f", standard deviation {off.std():.1%}"
        if np.isfinite(gain).any():
            mean, least, most_gained = (float(np.exp(f(gain))) for f in (np.mean, np.min, np.max))
            line += f"; balanced over fa3: {mean:.3f}x, {least:.3f}x to {most_gained:.3f}x"
        print(line)


if __name__ == "__main__":
    main()
