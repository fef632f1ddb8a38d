"""What a child process is asked to do, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dispatch.bench.pool import page_bytes
from dispatch.bench.proving import GATE_COPIES
from dispatch.gate_inputs import gate_pages
from dispatch.spec import AttentionSpec

MOST_LONGEST = 4096  # tokens: long rows, split over many blocks, at a fraction of the memory of the longest served
REFERENCE_COPIES = 3  # of a row's K and V in float32, that the reference holds at a time
SPARE = 1.5  # for what graphs hold, kernels allocate, and the allocator cannot use


@dataclass(frozen=True, slots=True)
class Work:
    """Candidates of a bucket, the default first, and the rows to prove them on: see Gate."""

    bucket: int
    longest: int
    most_tokens: int
    candidates: tuple[str, ...]

    def pages(self, spec: AttentionSpec) -> int:
        """Of the pool that it takes."""
        return gate_pages(spec, self.bucket, self.longest, self.most_tokens)


@dataclass(frozen=True, slots=True)
class Task:
    """`backends`: "module:qualified name" of each class. `index`: of the device among its kind. `memory_bytes`: what
    torch may take. `parent`: the process that asks; without it, nobody wants an answer."""

    spec: AttentionSpec
    max_seq_len: int
    finite_kv: bool
    work: tuple[Work, ...]
    backends: Mapping[str, str]
    workspace_bytes: Mapping[str, int]
    kind: str
    index: int
    memory_bytes: int
    parent: int

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps({**asdict(self), "spec": self.spec.to_json()}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Task:
        """Inverse of `to_bytes`."""
        data = json.loads(content)
        work = tuple(Work(**{**w, "candidates": tuple(w["candidates"])}) for w in data["work"])
        return cls(**{**data, "spec": AttentionSpec.from_json(data["spec"]), "work": work})


def work_that_fits(
    spec: AttentionSpec, bucket: int, max_seq_len: int, candidates: tuple[str, ...], room_bytes: int
) -> Work | None:
    """The longest rows whose pages, with the gate's copies, fit into so much memory; None where not even short do."""
    longest = min(MOST_LONGEST, max_seq_len)
    while longest >= min(spec.page_size, max_seq_len):
        work = Work(bucket, longest, 2 * longest, candidates)
        pages = (1 + GATE_COPIES) * (work.pages(spec) + 1) * page_bytes(spec)
        row = longest * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo) * 4
        if SPARE * (pages + REFERENCE_COPIES * row) <= room_bytes:
            return work
        longest //= 2
    return None
