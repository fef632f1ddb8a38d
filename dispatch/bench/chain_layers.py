"""How many layers to time back to back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.pool import PagedPool
from dispatch.bench.profiles import PlannedCell
from dispatch.bench.sanity import visible_bytes
from dispatch.bench.timer import Timer
from dispatch.spec import AttentionSpec

# Above so many bytes of KV a layer (some 30 us and 100 us on an H200) fewer layers back to back are enough to time one,
# and there is no need to wait for more.
LONG_LAYER_BYTES = (100 << 20, 400 << 20)


def chain_layers(pool: PagedPool, timer: Timer, cell: PlannedCell) -> int:
    """How many layers of the pool to time back to back in this cell."""
    return min(layers_for(pool.spec, timer, cell.lengths), len(pool.kv_caches))


def layers_for(spec: AttentionSpec, timer: Timer, lengths: NDArray[np.int64]) -> int:
    """How many of the timer's, for a layer that reads what these rounds do, [round, row]."""
    layer_bytes = np.mean([visible_bytes(spec, row) for row in lengths])
    step = sum(bool(layer_bytes > limit) for limit in LONG_LAYER_BYTES)
    return timer.chain_layers[min(step, len(timer.chain_layers) - 1)]
