"""The C++ that engines have too: the table of a tuning decision, and the page size.

csrc/backend_plan.h and csrc/page_size.h have the contracts.
"""

from collections.abc import Sequence

from numpy import int32
from numpy.typing import NDArray

class PlanEntry:
    """One box of a bucket; inclusive bounds of the mean KV length in tokens, and of the skew (see `batch_of`).

    `tactic` is text like "num_splits=4", or empty.
    """

    def __init__(
        self,
        bucket: int,
        mean_kv_min: int,
        mean_kv_max: int,
        skew_min: int,
        skew_max: int,
        backend: str,
        tactic: str = "",
    ) -> None: ...
    @property
    def bucket(self) -> int: ...
    @property
    def mean_kv_min(self) -> int: ...
    @property
    def mean_kv_max(self) -> int: ...
    @property
    def skew_min(self) -> int: ...
    @property
    def skew_max(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def tactic(self) -> str: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class BackendPlan:
    """Bucket and (mean KV, skew) box to backend and tactic.

    Whatever breaks its contract raises PlanError and leaves it unchanged.
    """

    def __init__(self, buckets: Sequence[int], names: Sequence[str]) -> None: ...
    def set(
        self,
        bucket: int,
        mean_kv_min: int,
        mean_kv_max: int,
        skew_min: int,
        skew_max: int,
        backend: str,
        tactic: str = "",
    ) -> None:
        """Add a box; bounds inclusive."""

    def freeze(self) -> None:
        """End writing and build the index; idempotent."""

    def lookup(self, batch_size: int, mean_kv: int, skew: int) -> PlanEntry | None:
        """The entry for a step, of the smallest bucket that holds the batch; None on a miss."""

    def to_bytes(self) -> bytes:
        """The same bytes on every machine for the same content."""

    @staticmethod
    def from_bytes(data: bytes) -> BackendPlan:
        """A frozen plan from to_bytes()."""

    def digest(self) -> str:
        """16 hex digits over the content."""

    @property
    def buckets(self) -> list[int]: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def entries(self) -> list[PlanEntry]: ...
    @property
    def frozen(self) -> bool: ...

def lookup_ns(plan: BackendPlan, queries: Sequence[tuple[int, int, int]], repeats: int) -> float:
    """Nanoseconds per C++ lookup over (batch_size, mean_kv, skew) triples, passed `repeats` times."""

def batch_of(lengths: NDArray[int32]) -> tuple[int, int, int, int]:
    """What a plan is asked: rows, their mean KV length rounded up, the skew; and the longest. `lengths`: int32 [rows].

    The skew is the longest over the mean, in thousandths: 1000 where all are alike. No rows: all 0, which is in no
    plan. Raises ValueError for anything but contiguous int32 in one dimension.
    """

def kernel_page_size(block_size: int) -> int:
    """The kernels' page for an engine's block size, both in tokens: the largest of 128, 64, 32 and 16 that divides it.

    A larger block is block_size / page consecutive pages of a cache that is laid out by pages: in
    `StepInputs.block_table`, block b is the pages from b * block_size / page on. Raises ConfigError for a
    block size that is not a multiple of 16 above 0.
    """
