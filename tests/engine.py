"""A toy engine: two layers of attention over its own pages, with a runner's step over static token buffers."""

from __future__ import annotations

from datetime import datetime, timezone

import torch

from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.device import current_device
from dispatch.eligible import eligible
from dispatch.engine import DecodeGraphRunner, LayerGroup
from dispatch.plan import DecidedBox, StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import Box
from dispatch.store import Store
from tests.fakes import spec_of

MAX_KV, PAGES, RESERVED, VOCABULARY = 64, 80, 79, 32
BUCKETS = (2, 4)


class Engine:
    """Layers write the new token's K and V where the block table says, and attend. Each group has its own pages."""

    def __init__(self, *specs, buckets=BUCKETS):
        self.specs = specs or (spec_of(),)
        self.buckets = buckets
        random = torch.Generator().manual_seed(0)
        normal = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
        self.caches = [
            tuple(normal(PAGES, s.page_size, s.num_kv_heads, s.head_dim_qk) for _ in range(2)) for s in self.specs
        ]
        self.embedding = [normal(VOCABULARY, s.num_qo_heads + 2 * s.num_kv_heads, s.head_dim_qk) for s in self.specs]
        self.tokens = torch.zeros(16, dtype=torch.int64)
        self.steps = 0

    @property
    def groups(self):
        return [LayerGroup(spec, (i,)) for i, spec in enumerate(self.specs)]

    def step(self, inputs, attend):
        self.steps += 1
        outs = []
        for i, (spec, cache) in enumerate(zip(self.specs, self.caches, strict=True)):
            rows = len(inputs[i].lengths)
            heads = self.embedding[i][self.tokens[:rows]] * (1 + 0.01 * inputs[i].lengths[:, None, None])
            q, k, v = heads.split([spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            position = inputs[i].lengths.long() - 1
            page = inputs[i].block_table.gather(1, (position // spec.page_size)[:, None])[:, 0].long()
            for pages, new in zip(cache, (k, v), strict=True):
                pages[page, position % spec.page_size] = new
            out = torch.empty(rows, spec.num_qo_heads, spec.head_dim_vo)
            attend(i, q.contiguous(), cache, out)
            outs.append(out.flatten(1))
        return torch.cat(outs, dim=1)

    def runner(self, tmp_path, enabled=True, **options):
        config = options.pop("config", None)
        config = config or DispatchConfig(enabled=enabled, cache_dir=tmp_path, isolation="none")
        options = {"reserved_page": RESERVED, "device": "cpu", "default": "a", **options}
        return DecodeGraphRunner(self.step, self.groups, self.buckets, MAX_KV, 1000, config, **options)

    def request(self, lengths, tokens=None):
        """Rows with pages of their own; fills the token buffer. Returns what `run` takes."""
        self.tokens[: len(lengths)] = torch.tensor(tokens or [1 + i for i in range(len(lengths))])
        tables = []
        for spec in self.specs:
            width, first = spec.max_pages(MAX_KV), 0
            table = torch.full((len(lengths), width), RESERVED, dtype=torch.int32)
            for row, length in enumerate(lengths):
                count = spec.max_pages(length)
                table[row, :count] = torch.arange(first, first + count)
                first += count
            tables.append(table)
        return torch.tensor(lengths, dtype=torch.int32), tables


def store_plan(runner, boxes, group=0):
    """Put a plan of these (bucket, mean KV from, to, skew from, to, candidate) where the runner will look for it."""
    request = TuneRequest(**{**_fields(runner.request), "spec": runner.groups[group].spec})
    device, backends = current_device("cpu"), runner.backends
    default = eligible(request, device, backends).default
    plan = StoredPlan(
        key=request.key(device, backends, default),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        default=default,
        buckets=request.buckets,
        boxes=tuple(DecidedBox(Box(*box), Reason.FASTEST, 1.1) for box in boxes),
    )
    Store(request.config.cache_dir).save(plan, None)


def _fields(request):
    names = ("buckets", "max_seq_len", "capacity", "config", "default", "traces", "traits")
    return {name: getattr(request, name) for name in names}
