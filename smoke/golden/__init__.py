"""Goldens: what the float32 reference says next, greedily, and how far ahead of the second best each token was.

One file a model and KV dtype; `python -m smoke.golden` makes them. Prompts and weights come from seeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from dispatch.atomic import write_atomically
from smoke.reference import Reference
from smoke.sizes import DENSE, MOE, Sizes
from smoke.weights import make_weights

# By golden: the model, and the dtype of its KV cache.
MODELS: dict[str, tuple[Sizes, str]] = {
    "dense": (DENSE, "bf16"),
    "dense-fp8": (DENSE, "fp8_e4m3"),
    "moe": (MOE, "bf16"),
}
# Prompts of one token, about one page of 16 and its edges, several pages; with 24 tokens more, one crosses 128.
PROMPT_TOKENS = (33, 1, 16, 110, 7, 15, 17, 60, 48, 5, 90, 31)
NEW_TOKENS = 24
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Golden:
    """A request: its prompt, the tokens that follow, and of each how far its logit is above the second best."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def prompt_of(index: int, tokens: int, vocab: int) -> tuple[int, ...]:
    """The prompt of a request, from its index."""
    return tuple(np.random.RandomState(1000 + index).randint(0, vocab, tokens).tolist())


@cache
def reference(name: str) -> Reference:
    """The float32 model of a golden file."""
    sizes, kv_dtype = MODELS[name]
    return Reference(sizes, make_weights(sizes), kv_dtype)


@cache
def expected_logits(name: str, golden: Golden) -> torch.Tensor:
    """The reference's logits before each of the golden's tokens: float32 [tokens, vocab]."""
    logits = reference(name).logits([*golden.prompt, *golden.tokens[:-1]])
    return logits[len(golden.prompt) - 1 :]


def gaps_of(logits: torch.Tensor) -> torch.Tensor:
    """The best logit less the second best, of each row."""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def make(name: str) -> tuple[Golden, ...]:
    """Let the reference say what follows each prompt."""
    vocab = MODELS[name][0].vocab
    made = []
    for index, count in enumerate(PROMPT_TOKENS):
        prompt = prompt_of(index, count, vocab)
        golden = Golden(prompt, tuple(reference(name).greedy(prompt, NEW_TOKENS)), ())
        gaps = (round(gap, 4) for gap in gaps_of(expected_logits(name, golden)).tolist())
        made.append(Golden(golden.prompt, golden.tokens, tuple(gaps)))
    return tuple(made)


def path_of(name: str) -> Path:
    """Where a golden file lies."""
    return FOLDER / f"{name}.json"


def write(name: str, goldens: tuple[Golden, ...]) -> None:
    """One line a request, so that a difference can be read."""
    lines = ",\n".join(json.dumps(asdict(golden), separators=(",", ":")) for golden in goldens)
    write_atomically(path_of(name), f"[\n{lines}\n]\n".encode())


@cache
def read(name: str) -> tuple[Golden, ...]:
    """The goldens as they are in the repository."""
    return tuple(Golden(**{k: tuple(v) for k, v in each.items()}) for each in json.loads(path_of(name).read_text()))
