"""Whether vLLM's numbers are right with the adapter: log-probabilities against transformers in float32.

    python -m smoke.vllm.numbers --backend plugin --out plugin.json
    python -m smoke.vllm.numbers --compare plugin.json FLASH_ATTN.json ...

The first runs a backend ("plugin"; "off": the switch off; "absent": without our package; "forced": other kernels than
timing would choose) over prompts of 17 to 2000 tokens and 32 new tokens; `--fp8` with an fp8 KV cache, `--compiled` by
torch.compile, `--tp 2` on two GPUs. The second tells each file's mean difference from the reference, over that of the
file FLASH_ATTN.json, and which files are equal in every bit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from smoke.vllm.engine import engine, generate, logprobs
from smoke.vllm.model import SMALL, weights, write

LENGTHS = (17, 33, 64, 100, 255, 400, 777, 1024, 1500, 2000)
NEW_TOKENS = 32
BATCHES = (1, 3, 10)  # of the first so many prompts, and all


def prompts() -> list[list[int]]:
    """Random tokens."""
    random = torch.Generator().manual_seed(7)
    return [torch.randint(2, SMALL["vocab_size"], (length,), generator=random).tolist() for length in LENGTHS]


def run(backend: str, fp8: bool, compiled: bool, tp: int) -> dict[str, Any]:
    """What the backend says of each prompt, in batches of several sizes."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of `load`, to the workers of several GPUs
    given = {"enable_prefix_caching": False, "tensor_parallel_size": tp}
    llm, seconds = engine(write(Path(mkdtemp()), SMALL), backend, 4.0, 4096, fp8, compiled, **given)
    llm.apply_model(load)
    found = [logprobs(generate(llm, prompts()[:count], NEW_TOKENS)) for count in BATCHES]
    return {"backend": backend, "fp8": fp8, "ready_s": seconds, "batches": found}


def load(model: Any) -> None:
    """Its weights, in place of random ones."""
    model.load_weights(weights(SMALL))


def reference(content: dict[str, Any]) -> list[list[list[float]]]:
    """transformers' log-probabilities of the same tokens, float32, each after the tokens before it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "torch_dtype": "float32"})).float()
    missing = model.load_state_dict({name: its.float() for name, its in weights(SMALL)}, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    model = model.to(device).eval()
    found = []
    with torch.no_grad():
        for batch in content["batches"]:
            rows = []
            for prompt, its in zip(prompts(), batch, strict=False):
                tokens = [token for token, _ in its]
                logits = model(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1]
                rows.append(logits.log_softmax(-1)[range(len(tokens)), tokens].tolist())
            found.append(rows)
    return found


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Each file's mean absolute difference from the reference, and which files agree in every bit."""
    contents = {path.stem: json.loads(path.read_text()) for path in paths}
    off = {}
    for name, content in contents.items():
        ours = [p for batch in content["batches"] for row in batch for _, p in row]
        theirs = [p for batch in reference(content) for row in batch for p in row]
        off[name] = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
    equal = [
        sorted((a, b)) for a in contents for b in contents if a < b and contents[a]["batches"] == contents[b]["batches"]
    ]
    base = off.get("FLASH_ATTN")
    return {
        "mean_difference": off,
        "over_flash_attn": {n: d / base for n, d in off.items()} if base else {},
        "equal": equal,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.vllm.numbers", description=__doc__)
    parser.add_argument("--backend")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs="+", default=[])
    options = parser.parse_args(arguments)
    if options.compare:
        content = compare(options.compare)
    else:
        content = run(options.backend, options.fp8, options.compiled, options.tp)
    text = json.dumps(content, indent=None if options.backend else 1)
    print(text if options.compare else f"{options.backend}: ready in {content['ready_s']:.1f} s")
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
