"""A schedule for FA3 that looks at whole waves: how many parts each row is split into, decided on the device.

FA3 splits rows into parts of 1.1 times what each SM would have if tiles were infinitely small (fa3_layout.own_parts). A
part too many then starts a second wave on a card that is otherwise done: at batch 8 with 8 KV heads, 152 tiles on 132
SMs take nearly twice as long as 128. Here some sizes of parts are compared by the time at which the last SM would be
done, FA3's own among them, and the best one is written where FA3's kernel reads its schedule. Nothing else changes; the
parts of a row add up to the same sum however many they are. Where the kernel takes rows as they come, and not the
longest parts first, the time of several waves is that which it takes at most.
"""

from __future__ import annotations

import math

from torch import Tensor, empty, float32, int32

from dispatch.backends.fa3_balance_kernels import compare_sizes, write_schedule
from dispatch.backends.fa3_layout import COSTS, Layout, rounded

SIZES = 16  # of parts that are compared: FA3's own, and those with an eighth of a wave more each
FAVOUR = 0.95  # FA3's own size is left alone unless another is better by more than this
PLACES = 16  # SMs that a program looks at
FEWEST_ROWS = 16  # that the kernels are compiled for: one binary for all smaller batches
# Of an H200: fewer warps for more rows, for what they tell one another takes longest.
FEW_ROWS, WARPS, WARPS_OF_MANY = 32, 4, 2


class BalancedSchedule:
    """Writes a schedule of `batch` rows into FA3's metadata. Capturable; reads no lengths on the host."""

    def __init__(
        self, batch: int, heads: int, units: int, most_splits: int, max_kv: int, layout: Layout, metadata: Tensor
    ) -> None:
        """`heads`: KV heads. `units`: SMs. `metadata`: int32, as FA3 wrote it for so many rows, in this layout."""
        self.metadata = metadata
        step = math.gcd(heads, units)  # tiles come in multiples of the heads, waves in multiples of the SMs
        is_sorted = layout.order is not None
        groups = -(-units // (step * PLACES)) if is_sorted else 1
        self.grid = (SIZES, groups)
        self.sizes = empty(SIZES, dtype=int32, device=metadata.device)
        self.ends = empty(SIZES * groups, dtype=float32, device=metadata.device)
        halvings = (-(-max_kv // layout.block_tokens)).bit_length() + 1
        self.sizing = (batch, heads, units, most_splits, halvings, most_waves(batch, heads, units), step)
        at = [vector * rounded(batch) for vector in (layout.parts, layout.order or 0)]
        self.placing = (batch, most_splits, *at, len(metadata) - 1, groups)
        rows = max(FEWEST_ROWS, 1 << (batch - 1).bit_length())
        self.shape = {
            "block_tokens": layout.block_tokens,
            "is_sorted": is_sorted,
            "rows_padded": rows,
            "num_warps": WARPS if rows <= FEW_ROWS else WARPS_OF_MANY,
        }

    def write(self, lengths: Tensor) -> None:
        """For rows of these lengths, int32 [batch] on the device."""
        found = (lengths, self.sizes, self.ends)
        compare_sizes[self.grid](*found, *self.sizing, **self.shape, places=PLACES, favour=FAVOUR, **COSTS)
        write_schedule[(1,)](*found, self.metadata, *self.placing, **self.shape, sizes_compared=SIZES)


def most_waves(batch: int, heads: int, units: int) -> int:
    """Waves of tiles that any of the compared sizes may take: two more than rows that are not split take, and one for
    FA3's own."""
    return -(-batch * heads // units) + SIZES // 8 + 1
