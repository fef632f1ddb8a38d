"""A schedule for FA3 that looks at whole waves: how many parts each row is split into, decided on the device.

FA3 splits rows into parts of 1.1 times what each SM would have if tiles were infinitely small (fa3_layout.own_parts). A
part too many then starts a second wave on a card that is otherwise done: at batch 8 with 8 KV heads, 152 tiles on 132
SMs take nearly twice as long as 128. Here some sizes of parts are compared by the time at which the last SM would be
done, FA3's own among them, and the best one is written where FA3's kernel reads its schedule. Nothing else changes; the
parts of a row add up to the same sum however many they are.

FA3's kernel takes the rows with the longest parts first. vLLM's build takes rows as they come, and may begin a long one
last; so it is given them in that order. In many waves that is all that matters, and parts are of FA3's own size.
"""

from __future__ import annotations

import math

from torch import Tensor, arange, empty, float32, int32

from dispatch.backends.fa3_balance_kernels import compare_sizes, write_schedule
from dispatch.backends.fa3_layout import COSTS, Layout, compares, rounded

SIZES = 16  # of parts that are compared: FA3's own, and those with an eighth of a wave more each
FAVOUR = 0.95  # FA3's own size is left alone unless another is better by more than this
PLACES = 16  # SMs that a program looks at
FEWEST_ROWS = 16  # that the kernels are compiled for: one binary for all smaller batches
# Of an H200: fewer warps for more rows, for what they tell one another takes longest.
FEW_ROWS, WARPS, WARPS_OF_MANY = 32, 4, 2
ROWS_AT_ONCE = 16  # that a program sorts in among the others


class BalancedSchedule:
    """Writes a schedule of `batch` rows into FA3's metadata. Capturable; reads no lengths on the host.

    `order`: int32 [batch], the rows as the kernel is to take them. It is a part of the metadata, or where a build takes
    rows as they come, the beginning of `row_starts` [batch + 1], with a last element that nothing depends on.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        units: int,
        most_splits: int,
        max_kv: int,
        block_tokens: int,
        layout: Layout,
        metadata: Tensor,
    ) -> None:
        """`heads`: KV heads. `units`: SMs. `block_tokens`: of a block of FA3's kernel.

        `metadata`: int32, as FA3 wrote it for so many rows, in this layout.
        """
        self.metadata = metadata
        self.row_starts = arange(batch + 1, dtype=int32, device=metadata.device)
        self.lengths = empty(batch, dtype=int32, device=metadata.device)
        kept = self.row_starts if layout.order is None else metadata[layout.order * rounded(batch) :]
        self.order = kept[:batch]
        step = math.gcd(heads, units)  # tiles come in multiples of the heads, waves in multiples of the SMs
        groups = -(-units // (step * PLACES))
        self.grid = (SIZES, groups)
        self.sizes = empty(SIZES, dtype=int32, device=metadata.device)
        self.ends = empty(SIZES * groups, dtype=float32, device=metadata.device)
        halvings = (-(-max_kv // block_tokens)).bit_length() + 1
        self.sizing = (batch, heads, units, most_splits, halvings, most_waves(batch, heads, units), step)
        self.placing = (batch, heads, units, most_splits, layout.parts * rounded(batch), len(metadata) - 1, groups)
        self.is_split = most_splits > 1
        self.sizes_compared = SIZES if self.is_split and compares(batch, heads, units) else 0
        rows = max(FEWEST_ROWS, 1 << (batch - 1).bit_length())
        self.shape = {
            "block_tokens": block_tokens,
            "rows_padded": rows,
            "num_warps": WARPS if rows <= FEW_ROWS else WARPS_OF_MANY,
        }

    def write(self, lengths: Tensor) -> None:
        """For rows of these lengths, int32 [batch] on the device; and into `self.lengths` those of `self.order`."""
        found = (lengths, self.sizes, self.ends)
        if self.sizes_compared:
            compare_sizes[self.grid](*found, *self.sizing, **self.shape, places=PLACES, favour=FAVOUR, **COSTS)
        written = (self.metadata, self.order, self.lengths)
        some = {"rows_at_once": ROWS_AT_ONCE, "sizes_compared": self.sizes_compared, "is_split": self.is_split}
        write_schedule[(-(-len(lengths) // ROWS_AT_ONCE),)](*found, *written, *self.placing, **self.shape, **some)


def most_waves(batch: int, heads: int, units: int) -> int:
    """Waves of tiles that any of the compared sizes may take: two more than rows that are not split take, and one for
    FA3's own."""
    return -(-batch * heads // units) + SIZES // 8 + 1
