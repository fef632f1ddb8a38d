"""How often each step found what it looked for."""

from __future__ import annotations

import logging
from collections import Counter

_log = logging.getLogger(__name__)


class Counts:
    """`hits` by (bucket, what served it), `misses` by (bucket, reason); bucket 0 is no bucket of the plan's."""

    def __init__(self) -> None:
        self.hits: Counter[tuple[int, str]] = Counter()
        self.misses: Counter[tuple[int, str]] = Counter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hits={dict(self.hits)}, misses={dict(self.misses)})"

    def hit(self, bucket: int, what: str) -> None:
        """Count a step that the plan served."""
        self.hits[bucket, what] += 1

    def missed(self, bucket: int, reason: str) -> None:
        """Count a step that the default serves; logged once for each bucket and reason."""
        self.misses[bucket, reason] += 1
        if self.misses[bucket, reason] == 1:
            where = f"bucket {bucket}" if bucket else "every bucket"
            _log.warning("%s: %s: the default serves it", where, reason)
