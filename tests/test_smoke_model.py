"""The smoke decoder against its float32 reference: paged, sharded, with experts; and the goldens made from it."""

from __future__ import annotations

import pytest
import torch

from smoke.direct import DirectRunner
from smoke.engine import make_decoder
from smoke.golden import MODELS, NEW_TOKENS, PROMPT_TOKENS, expected_logits, gaps_of, prompt_of, read, reference
from smoke.mlp import expert_weights, mlp
from smoke.model import Decoder
from smoke.ranks import run_ranks
from smoke.serve import serve
from smoke.sizes import BUCKETS, MAX_SEQ_LEN
from smoke.tolerance import TOLERANCES, Tally, tally

CPU = torch.device("cpu")
STEPS = 6
FLOAT32_ERROR = 1e-3  # of logits of size 1, through three layers; what was found is 1e-5


def served(name: str, dtype: str, requests: int = 4, backend: str = "torch_chunked") -> list[torch.Tensor]:
    decoder = make_decoder(name, CPU, dtype)
    return serve(decoder, DirectRunner(decoder, backend), read(name)[:requests], steps=STEPS)


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


# --- numbers


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_paged_decode_in_float32_is_the_reference(name):
    expected = [expected_logits(name, golden)[:STEPS] for golden in read(name)[:4]]
    assert largest_difference(served(name, "fp32"), expected) < FLOAT32_ERROR


@pytest.mark.parametrize("name", MODELS)
def test_paged_decode_in_bf16_says_the_golden_tokens(name):
    found = tally(name, read(name)[:4], served(name, "bf16", backend="torch_sdpa"))
    assert found.wrong == []
    assert found.tokens == 4 * STEPS


def test_requests_that_join_and_leave_get_what_they_get_alone():
    decoder, goldens = make_decoder("dense", CPU, "fp32"), read("dense")[:5]
    runner = DirectRunner(decoder, "torch_chunked")
    before = decoder.cache.free_pages
    alone = [serve(decoder, runner, [golden], steps=STEPS)[0] for golden in goldens]
    together = serve(decoder, runner, goldens, joins=[0, 0, 2, 3, 7], steps=STEPS)
    assert largest_difference(alone, together) < FLOAT32_ERROR
    assert decoder.cache.free_pages == before


def test_the_weights_and_prompts_are_the_same_on_every_machine():
    # Read off once; made by hand they would be RandomState(0)'s first number less 1/2, times sqrt(12), in bf16.
    first = reference("dense").weights.embedding[0, 0]
    assert float(first) == float(torch.tensor((0.5488135039273248 - 0.5) * 12**0.5).bfloat16())
    assert prompt_of(0, 4, 256) == prompt_of(0, 33, 256)[:4] == read("dense")[0].prompt[:4]


# --- that attention matters


@pytest.mark.parametrize("name", MODELS)
def test_a_kv_cache_mixed_up_between_requests_is_far_outside_the_tolerance(name):
    goldens = [golden for golden in read(name) if len(golden.prompt) > 16]
    decoder = make_decoder(name, CPU)
    direct = DirectRunner(decoder, "torch_sdpa")

    class MixedUp:
        def run(self, lengths_host, block_tables):
            table = block_tables[0].clone()
            table[:, 0] = table[:, 0].roll(1)  # each reads another's first page; within a request, order means nothing
            return direct.run(lengths_host, [table])

    logits = serve(decoder, MixedUp(), goldens, steps=2)
    errors = [
        float((found[1] - expected_logits(name, golden)[1]).abs().max())
        for golden, found in zip(goldens, logits, strict=True)
    ]
    assert min(errors) > 1.5 * TOLERANCES[name]


@pytest.mark.parametrize("name", MODELS)
def test_one_other_token_far_back_is_outside_the_tolerance(name):
    (golden,) = [golden for golden in read(name) if len(golden.prompt) == 48]
    other = [(golden.prompt[0] + 1) % 256, *golden.prompt[1:]]
    error = (reference(name).logits(other)[-1] - expected_logits(name, golden)[0]).abs().max()
    assert float(error) > 1.5 * TOLERANCES[name]


# --- experts


def test_experts_in_fixed_shapes_are_a_plain_loop_over_tokens_and_their_experts():
    (layer, *_), active = reference("moe").weights.layers, MODELS["moe"][0].active
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    for row, found in zip(x, mlp(layer, x, active), strict=True):
        expected, shares = torch.zeros(256), torch.softmax(layer.router @ row, dim=0)
        for expert in sorted(range(8), key=lambda e: -float(shares[e]))[:active]:
            gate, up = layer.gate_up[expert, 0] @ row, layer.gate_up[expert, 1] @ row
            expected += shares[expert] * (layer.down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_expert_is_somebodys_and_the_last_one_chosen_counts_little():
    (layer, *_), active = reference("moe").weights.layers, MODELS["moe"][0].active
    shares = expert_weights(layer.router, torch.randn(200, 256, generator=torch.Generator().manual_seed(0)), active)
    assert (shares > 0).sum(dim=1).tolist() == [active] * 200
    assert (shares > 0).any(dim=0).all()
    assert float(shares.sort(dim=1, descending=True).values[:, active - 1].median()) < 0.1


# --- ranks


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_two_ranks_compute_what_one_does(name):
    task = {"golden": name, "device": "cpu", "dtype": "fp32", "requests": 4, "steps": STEPS}
    ranks = run_ranks(2, {**task, "backend": "torch_chunked", "planned": False})
    alone = served(name, "fp32")
    for rank in ranks:
        assert largest_difference(rank, alone) < FLOAT32_ERROR


def test_a_rank_that_fails_is_an_error_that_names_it():
    task = {"golden": "dense", "device": "cpu", "dtype": "fp32", "requests": 1, "steps": 1}
    with pytest.raises(RuntimeError, match=r"rank 0 ended with status 1: \S+Error: .*no backend 'nowhere'"):
        run_ranks(1, {**task, "backend": "nowhere", "planned": False})


# --- goldens


@pytest.mark.parametrize("name", MODELS)
def test_the_golden_files_are_what_the_reference_says(name):
    goldens = read(name)
    assert [golden.prompt for golden in goldens] == [prompt_of(i, n, 256) for i, n in enumerate(PROMPT_TOKENS)]
    for golden in goldens:
        logits = expected_logits(name, golden)
        torch.testing.assert_close(gaps_of(logits), torch.tensor(golden.gaps), rtol=0, atol=0.02)
        clear = torch.tensor(golden.gaps) > 0.02  # another machine's float32 rounds differently, and fp8 magnifies it
        assert (logits.argmax(dim=1) == torch.tensor(golden.tokens))[clear].all()
        assert len(golden.tokens) == NEW_TOKENS
    assert max(len(g.prompt) for g in goldens) + NEW_TOKENS <= MAX_SEQ_LEN
    assert len(goldens) > BUCKETS[-1]


def test_a_tally_counts_near_ties_and_names_what_is_wrong():
    (golden, *_) = read("dense")
    logits = expected_logits("dense", golden).clone()
    near, clear = (
        next(i for i, gap in enumerate(golden.gaps) if low < gap < high) for low, high in ((0, 0.1), (0.3, 9))
    )
    found = Tally(tolerance=0.15)
    swapped = logits.clone()
    swapped[near, golden.tokens[near]] -= golden.gaps[near] + 0.01  # now the second best is ahead
    found.add("dense", golden, swapped)
    assert (found.near_ties, found.wrong) == (1, [])
    logits[clear, golden.tokens[clear]] -= golden.gaps[clear] + 0.01
    found.add("dense", golden, logits)
    assert found.near_ties == 1
    assert found.wrong[0].startswith(f"prompt of 33, token {clear}: ")
    found.add("dense", golden, torch.full_like(logits, float("nan")))
    assert "logits off by nan" in found.wrong[1]


def test_a_step_has_shapes_of_the_batch_alone_and_waits_for_no_device():
    """A device without data cannot answer `.item()` or `.nonzero()`, as a CUDA graph's capture cannot."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dispatch.step import StepInputs

    for name in MODELS:
        decoder: Decoder = make_decoder(name, CPU)
        inputs = StepInputs(3, *(torch.ones(4, dtype=torch.int32) for _ in range(2)), torch.zeros(4, 16).int())
        with FakeTensorMode(allow_non_fake_inputs=True):
            logits = decoder.step((inputs,), lambda layer, q, kv_cache, out: out.copy_(q))
        assert logits.shape == (4, 256)
