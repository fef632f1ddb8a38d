"""Plans made by hand and put into a store, so that what a case shows does not depend on what was faster today."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dispatch.backends import registry
from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.device import current_device
from dispatch.eligible import Eligible, eligible
from dispatch.plan import DecidedBox, StoredPlan
from dispatch.samples import EVEN, Box
from dispatch.spec import AttentionSpec
from dispatch.store import Store
from smoke.engine import request_of
from smoke.sizes import BUCKETS, MAX_SEQ_LEN

CREATED = "2026-01-01T00:00:00+00:00"


def asked(spec: AttentionSpec, config: DispatchConfig, kind: str) -> Eligible:
    """Which backends serve the layer on this kind of device ("cuda" or "cpu"); the default comes first."""
    return eligible(request_of(spec, config), current_device(kind), registry)


def challengers(spec: AttentionSpec, config: DispatchConfig, kind: str) -> list[str]:
    """The backends that serve the layer and are not the default."""
    found = asked(spec, config, kind)
    return [name for name in found.tactics if name != found.default]


def everywhere(candidate: str, buckets: Iterable[int] = BUCKETS, up_to: int = MAX_SEQ_LEN, above: int = 0) -> list[Box]:
    """A box in each bucket for requests whose mean is `above` + 1 to `up_to` tokens, of any skew."""
    return [Box(bucket, above + 1, up_to, EVEN, EVEN * MAX_SEQ_LEN, candidate) for bucket in buckets]


def store_plan(spec: AttentionSpec, config: DispatchConfig, kind: str, boxes: Sequence[Box]) -> None:
    """Have a runner with this config find these boxes as its plan."""
    default = asked(spec, config, kind).default
    key = request_of(spec, config).key(current_device(kind), registry, default)
    decided = tuple(DecidedBox(box, Reason.FASTEST, 1.1) for box in boxes)
    Store(config.cache_dir).save(StoredPlan(key, CREATED, default, BUCKETS, decided), None)
