"""Whether the plan is applied: the attention kernels of a decode step, by batch size, out of a profile.

    python -m smoke.vllm.applied --backend plugin --out applied.json

`--backend`: as in smoke.vllm.numbers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch.profiler import ProfilerActivity, profile

from smoke.vllm.engine import SIZES, engine, generate
from smoke.vllm.model import SMALL, write

PROMPT, TOKENS = 300, 4
# Of the names of kernels; the others of a step are products, norms and the like.
ATTENTION = (
    "flash",
    "Flash",
    "mha",
    "BatchPrefill",
    "BatchDecode",
    "prepare_varlen",
    "balance",
    "schedule",
    "merge_states",
)


def kernels(llm: object, batch: int) -> dict[str, int]:
    """How often each attention kernel ran while `batch` requests decoded, after their prompts were cached."""
    random = torch.Generator().manual_seed(batch)
    prompts = [torch.randint(2, SMALL["vocab_size"], (PROMPT,), generator=random).tolist() for _ in range(batch)]
    generate(llm, prompts, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        generate(llm, prompts, TOKENS)
    names = Counter(event.name[:120] for event in found.events() if any(part in event.name for part in ATTENTION))
    return dict(names.most_common())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.vllm.applied", description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    llm, _ = engine(write(Path(mkdtemp()), SMALL), options.backend, 4.0, 4096, options.fp8)
    by_batch = {batch: kernels(llm, batch) for batch in SIZES}
    options.out.write_text(json.dumps({"backend": options.backend, "kernels": by_batch}, indent=1) + "\n")
    for batch, names in by_batch.items():
        print(batch, "; ".join(f"{count} x {name[:60]}" for name, count in names.items()))


if __name__ == "__main__":
    main()
