"""Faults that others have reported, on a GPU, with every kernel that serves the layer. test_public_faults has a table.

Compiles kernels where the machine has none yet, which takes minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

from dispatch.backends import registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import RESERVED_PAGE, PagedPool, raw_bits
from dispatch.candidate import Candidate
from dispatch.device import current_device
from dispatch.gate import Gate
from dispatch.gate_checks import compare
from dispatch.gate_inputs import gate_pages
from dispatch.reference import reference_decode
from dispatch.workspace import Workspaces
from tests.fakes import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[1]
DEVICE = "cuda"
HANGS_AFTER_S = 300
SLEEP_CYCLES = 200_000_000  # 0.1 s of an H200's clock: far longer than all that the host does meanwhile
LAYERS = {"bf16": {}, "fp8 KV": {"kv_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}}


def layer(**changes):
    sizes = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128, "page_size": 16}
    return spec_of(**{**sizes, "dtype": "bf16", "kv_dtype": "bf16", "num_layers": 36, **changes})


@pytest.fixture(scope="module")
def timer():
    return CudaTimer(torch.device(DEVICE))


class Bucket:
    """A bucket's buffers over a pool of its own, and every kernel that serves them, each captured with one long row."""

    def __init__(self, timer, spec, rows, max_kv, tokens=None, scratch=None, names=None):
        """`tokens`: of all rows together; `scratch`: of other buckets as well; `names`: of these backends alone."""
        self.spec, self.rows, self.max_kv = spec, rows, max_kv
        self.device, kernel = torch.device(DEVICE), current_device(DEVICE)
        # a page more a row than its tokens need, and the gate's
        pages = (tokens or rows * max_kv) // spec.page_size + rows
        self.pool = PagedPool(spec, max(pages, gate_pages(spec, rows, max_kv)), 1, self.device)
        self.inputs, self.chain = self.pool.inputs(rows, max_kv), self.pool.chain(rows)
        self.scratch = Workspaces(self.device) if scratch is None else scratch
        kernels = [name for name in registry.names() if not name.startswith("torch_") and name in (names or [name])]
        refused = {name: registry.support(name, spec, kernel) for name in kernels}
        self.impls, self.recordings = {}, {}
        for name in (name for name in kernels if refused[name].ok):
            backend = registry.get(name)
            self.scratch.reserve(backend.family, backend.workspace_bytes(spec, rows, max_kv))
            for tactic in backend.tactics(spec, kernel, rows, max_kv):
                candidate = Candidate(name, tactic)
                self.load([candidate.max_kv or max_kv, *[1] * (rows - 1)])
                impl = backend.build(
                    spec, rows, candidate.max_kv or max_kv, self.scratch.get(backend.family), candidate.knobs
                )
                self.impls[candidate] = impl
                self.recordings[candidate] = timer.record(impl, self.inputs, self.chain)
        if not self.impls:
            pytest.skip("; ".join(f"{name}: {support.reason}" for name, support in refused.items()))

    def load(self, lengths):
        """Rows of these lengths, and padding of one token on the reserved page behind them."""
        live = len(lengths)
        self.pool.load(self.inputs, [*lengths, *[1] * (self.rows - live)])
        self.inputs.num_live = live
        self.inputs.block_table[live:] = RESERVED_PAGE

    def serving(self, longest):
        """Candidates that may serve a row so long."""
        return [candidate for candidate in self.impls if longest <= (candidate.max_kv or self.max_kv)]

    def run(self, candidate):
        """One step into an output of NaN; the live rows."""
        self.chain.outs[0].fill_(float("nan"))
        self.recordings[candidate].run(1)
        return self.chain.outs[0][: self.inputs.num_live].clone()

    def expected(self):
        return reference_decode(self.spec, self.chain.q, self.chain.kv_caches[0], self.inputs, self.chain.sinks)

    def wrong(self, out, expected=None):
        return compare(self.spec, out[None], self.expected() if expected is None else expected, self.inputs).worst()

    def all_wrong(self):
        """What is wrong with what is loaded, by candidate."""
        longest = int(self.inputs.lengths_host.max())
        found = {str(candidate): self.wrong(self.run(candidate)) for candidate in self.serving(longest)}
        return {candidate: what for candidate, what in found.items() if what}

    def fill_reserved(self, value):
        """So in every slot of the reserved page."""
        for pages in self.chain.kv_caches[0]:
            raw_bits(pages)[RESERVED_PAGE] = raw_bits(torch.full((1,), value, device=self.device).to(pages.dtype))


# --- wrong numbers


@pytest.mark.parametrize(("rows", "lengths"), [(4, [17, 1, 4096]), (8, [300, 17, 1, 4096, 64])])
@pytest.mark.parametrize("name", LAYERS)
def test_padding_leaves_live_rows_as_they_are_to_the_bit(timer, name, rows, lengths):
    bucket = Bucket(timer, layer(**LAYERS[name]), rows, 4096)
    bucket.load(lengths)
    q, changed = bucket.chain.q.clone(), {}
    for candidate in bucket.serving(max(lengths)):
        outs = []
        for padding in (0.0, 0.0, -3.0, 200.0):
            bucket.fill_reserved(padding)
            bucket.chain.q.copy_(q)
            bucket.chain.q[len(lengths) :] = padding
            outs.append(bucket.run(candidate))
        what = next(filter(None, map(bucket.wrong, outs)), "")
        if torch.equal(outs[0], outs[1]) and not all(torch.equal(outs[0], out) for out in outs[2:]):
            what = what or "live rows changed with the padding"
        changed[str(candidate)] = what
    assert {candidate: what for candidate, what in changed.items() if what} == {}


def gated(timer, spec, rows, max_kv):
    """What the gate finds, by candidate."""
    bucket = Bucket(timer, spec, rows, max_kv)
    found = {}
    for candidate in bucket.serving(max_kv):
        gate = Gate(bucket.pool, bucket.inputs, bucket.chain, max_kv)
        found |= gate.check({str(candidate): bucket.recordings[candidate]})
        gate.restore()
    return {candidate: what for candidate, what in found.items() if what}


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_soft_cap_of_models_is_applied(timer, cap):
    assert gated(timer, layer(logits_soft_cap=cap), 8, 1024) == {}  # with logits of five times the cap, among others


def test_on_scratch_that_others_have_used_seven_rows_are_right(timer):
    spec, scratch = layer(num_qo_heads=64, num_kv_heads=16), Workspaces(torch.device(DEVICE))
    for name in registry.names():  # for the largest first: scratch never grows
        if registry.support(name, spec, current_device(DEVICE)).ok:
            backend = registry.get(name)
            scratch.reserve(backend.family, max(backend.workspace_bytes(spec, rows, 4096) for rows in (64, 7, 1)))
    buckets = {rows: Bucket(timer, spec, rows, 4096, tokens=64 * 4096, scratch=scratch) for rows in (64, 7, 1)}
    seven = [4096, 1, 17, 300, 2048, 33, 129]
    for rows, lengths in ((64, [1000] * 64), (7, seven), (1, [4096]), (7, seven[::-1]), (64, [64] * 64), (7, seven)):
        buckets[rows].load(lengths)
        assert buckets[rows].all_wrong() == {}


@pytest.mark.parametrize("rows", [1, 4])
def test_pages_that_a_window_has_left_behind_may_be_gone(timer, rows):
    # the runner puts the reserved page where an engine has -1
    bucket = Bucket(timer, layer(sliding_window=128), rows, 4096)
    bucket.fill_reserved(200.0)
    for lengths in ([4096, 300, 129, 128][:rows], [4095, 1000, 2048, 5][:rows], [3969, 144, 143, 4096][:rows]):
        bucket.load(lengths)
        for row, length in enumerate(lengths):
            bucket.inputs.block_table[row, : max(0, length - 128) // 16] = RESERVED_PAGE
        assert bucket.all_wrong() == {}


def test_a_sink_of_zero_is_one_key_more_in_the_denominator(timer):
    # q = 0 and V = 1: n keys of weight 1 / (n + 1)
    bucket = Bucket(timer, layer(has_sinks=True), 4, 1024)
    bucket.chain.sinks.zero_()
    bucket.chain.q.zero_()
    bucket.chain.kv_caches[0][1].fill_(1.0)
    bucket.load([1, 7, 100, 1024])
    keys = torch.tensor([1.0, 7.0, 100.0, 1024.0], device=bucket.device)[:, None, None]
    for candidate in bucket.serving(1024):
        out = bucket.run(candidate).float()
        torch.testing.assert_close(out, (keys / (keys + 1)).expand_as(out), rtol=2**-7, atol=0.0, msg=str(candidate))


# --- capture and replay


@pytest.mark.parametrize("name", LAYERS)
def test_what_was_captured_for_one_long_row_serves_other_lengths(timer, name):
    bucket = Bucket(timer, layer(**LAYERS[name]), 4, 8192)  # captured with [8192, 1, 1, 1]
    addresses = [t.data_ptr() for t in (bucket.inputs.lengths, bucket.inputs.block_table, bucket.chain.outs[0])]
    rows = [300, 7000, 5, 64]
    for step in range(6):
        bucket.load([length + step for length in rows])  # each grows
        assert bucket.all_wrong() == {}
        rows[step % 4] = 1  # one leaves, and another comes in its place
    bucket.load([8192, 1, 1, 1])
    assert bucket.all_wrong() == {}
    assert addresses == [t.data_ptr() for t in (bucket.inputs.lengths, bucket.inputs.block_table, bucket.chain.outs[0])]


@pytest.mark.parametrize("name", LAYERS)
def test_whatever_ran_before_on_the_same_scratch_each_is_right(timer, name):
    spec, scratch = layer(num_qo_heads=8, num_kv_heads=1, **LAYERS[name]), Workspaces(torch.device(DEVICE))
    lengths = {8: [8192, 1, 17, 300, 2048, 33, 129, 5000], 1: [8000]}
    for backend in [registry.get(n) for n in registry.names() if registry.support(n, spec, current_device(DEVICE)).ok]:
        scratch.reserve(backend.family, max(backend.workspace_bytes(spec, rows, 8192) for rows in lengths))
    buckets = {rows: Bucket(timer, spec, rows, 8192, scratch=scratch) for rows in lengths}
    expected, ready = {}, []
    for rows, bucket in buckets.items():
        bucket.load(lengths[rows])
        expected[rows] = bucket.expected()
        ready += [(rows, candidate) for candidate in bucket.serving(max(lengths[rows]))]
    wrong = {}
    for pair in permutations(ready, 2):
        for rows, candidate in (*pair, pair[0]):
            found = buckets[rows].wrong(buckets[rows].run(candidate), expected[rows])
            if found:
                wrong[f"batch {rows}: {candidate}, after {pair}"] = found
    assert wrong == {}


def test_512_requests_of_wide_heads_fit_into_the_scratch_that_is_reserved(timer):
    spec = layer(num_qo_heads=32, num_kv_heads=2, head_dim_qk=256, head_dim_vo=256)
    bucket = Bucket(timer, spec, 512, 4096, tokens=512 * 1024 + 4096)
    for lengths in ([1024] * 512, [4096, *[1 + 2 * i for i in range(511)]], [1] * 512):
        bucket.load(lengths)
        assert bucket.all_wrong() == {}


def test_two_plans_behind_a_long_kernel_each_serve_their_own_step(timer):
    bucket = Bucket(timer, layer(), 4, 8192)
    steps = []
    for lengths in ([300, 7000, 5, 64], [8192, 1, 4000, 17]):
        bucket.load(lengths)
        i = bucket.inputs
        steps.append((i.lengths_host.clone(), i.lengths.clone(), i.block_table.clone(), bucket.expected()))
    wrong = {}
    for candidate in bucket.serving(8192):
        impl, recording, outs = bucket.impls[candidate], bucket.recordings[candidate], []
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for (
            lengths_host,
            lengths,
            table,
            _,
        ) in steps:  # nothing here waits for the device, but for what plan() waits for
            bucket.inputs.lengths_host.copy_(lengths_host)
            bucket.inputs.lengths.copy_(lengths)
            bucket.inputs.block_table.copy_(table)
            if impl.needs_plan:
                impl.plan(bucket.inputs)
            recording.begin.replay()
            recording.layers[1].replay()
            outs.append(bucket.chain.outs[0].clone())
        torch.cuda.synchronize()
        for step, (out, (lengths_host, *_, expected)) in enumerate(zip(outs, steps, strict=True)):
            bucket.inputs.lengths_host.copy_(lengths_host)
            if found := bucket.wrong(out, expected):
                wrong[f"{candidate}, step {step}"] = found
    assert wrong == {}


# A hang, or an illegal access, costs this child alone.
WINDOW_511 = """
import json, torch
from dispatch.bench.cuda_timer import CudaTimer
from tests.test_public_faults_gpu import Bucket, layer
sizes = {"num_qo_heads": 64, "num_kv_heads": 8, "page_size": 32, "kv_dtype": "fp8_e4m3"}
timer, wrong = CudaTimer(torch.device("cuda")), {}
bucket = Bucket(timer, layer(**sizes, sliding_window=511), 2, 4096, names=["fa3"])
for lengths in ([256, 1], [257, 1], [511, 512], [513, 257], [4096, 1000]):
    bucket.load(lengths)
    wrong |= {f"{lengths}: {candidate}": what for candidate, what in bucket.all_wrong().items()}
print(json.dumps(wrong))
"""


def test_fa3_over_fp8_with_a_window_of_511_neither_hangs_nor_is_wrong():
    spec = layer(num_qo_heads=64, num_kv_heads=8, page_size=32, kv_dtype="fp8_e4m3", sliding_window=511)
    support = registry.support("fa3", spec, current_device(DEVICE))
    if not support.ok:
        pytest.skip(support.reason)
    try:
        done = subprocess.run(
            [sys.executable, "-c", WINDOW_511],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs: Fa3.support must refuse the layer")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
