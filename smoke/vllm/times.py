"""Time for each output token of real vLLM: the plugin, FLASH_ATTN and FLASHINFER side by side, taking turns.

    python -m smoke.vllm.times --trace requests.csv [--trace ...] --out FILE [--fp8] [--compiled] [--without ENGINE]

A model of Qwen3-8B's sizes with random weights. Each backend is a process of its own on the same GPU, of which one runs
at a time; FLASH_ATTN is two, since two processes with the same kernels are not equally fast. A batch is prompts as long
as those of requests drawn from a trace, at most 16384 tokens. They are cached by vLLM, so that what is timed is
decoding: from the last request's first token to the last token, by vLLM's own clock. A batch that the KV cache does not
hold is left out. At last the plugin is started once more, which then finds its plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import numpy as np

from dispatch.bench.trace import read_traces
from smoke.vllm.engine import BACKENDS, PLUGIN, engine, generate, surroundings
from smoke.vllm.model import QWEN3_8B, write

BATCHES, REPEATS, TOKENS, LONGEST = (1, 8, 32, 128), 5, 48, 16384
CHUNK = 8192  # of prompts; four engines have to fit
TWIN = "FLASH_ATTN again"
MODULE = "smoke.vllm.times"


def lengths_of(trace: Path, batch: int) -> list[int]:
    """Prompt lengths of so many requests, the same in every process."""
    (found,) = read_traces([trace])
    random = np.random.default_rng([batch, len(found.input_tokens)])
    return np.minimum(random.choice(found.input_tokens, batch), LONGEST).astype(int).tolist()


def work(backend: str, kv_gib: float, fp8: bool, compiled: bool) -> None:
    """Start an engine at the first line of stdin, and answer each other one, {trace, batch}, with the seconds for a
    token, until there is none."""
    surroundings(backend)
    import vllm  # noqa: F401  takes long, and no GPU

    sys.stdin.readline()
    folder, max_len = write(Path(mkdtemp()), QWEN3_8B), LONGEST + 256
    given = {"enable_prefix_caching": True, "disable_log_stats": False, "max_num_batched_tokens": CHUNK}
    llm, ready = engine(folder, backend, kv_gib, max_len, fp8, compiled, **given)
    print(json.dumps({"ready_s": ready}), flush=True)
    cached = None
    for line in sys.stdin:
        asked = json.loads(line)
        lengths = lengths_of(Path(asked["trace"]), asked["batch"])
        random = np.random.default_rng(asked["batch"])
        prompts = [random.integers(2, QWEN3_8B["vocab_size"], length).tolist() for length in lengths]
        if asked != cached:
            generate(llm, prompts, 1)
            cached = asked
        found = [output.metrics for output in generate(llm, prompts, 1 + TOKENS)]
        took = max(its.last_token_ts for its in found) - max(its.first_token_ts for its in found)
        print(json.dumps({"token_s": took / TOKENS}), flush=True)


class Worker:
    """A backend in a process of its own. Its engine waits for `ready_s`."""

    def __init__(self, backend: str, options: argparse.Namespace) -> None:
        command = [sys.executable, "-m", MODULE, "--worker", backend, "--kv-gib", str(options.kv_gib)]
        command += [flag for flag in ("--fp8", "--compiled") if vars(options)[flag[2:]]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready_s(self) -> float:
        """Start it: the seconds that its engine took."""
        self._tell("")
        return float(self._answer()["ready_s"])

    def ask(self, trace: Path, batch: int) -> float:
        """Seconds for a token."""
        self._tell(json.dumps({"trace": str(trace), "batch": batch}))
        return float(self._answer()["token_s"])

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
            print(line, end="", file=sys.stderr)  # vLLM's
        raise SystemExit(f"a worker ended with status {self.process.wait()}")


def summary(token_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Paired medians over the repeats, of FLASH_ATTN's time over each: above 1 is faster."""
    base = token_s["FLASH_ATTN"]
    return {
        name: median(b / t for b, t in zip(base, times, strict=True))
        for name, times in token_s.items()
        if name != "FLASH_ATTN"
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile")
    parser.add_argument(
        "--kv-gib", type=float, default=13.6, help="of each engine's KV cache; four of them have to fit"
    )
    parser.add_argument("--without", choices=(BACKENDS[-1], TWIN), help="makes room for more")
    parser.add_argument("--worker")
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.kv_gib, options.fp8, options.compiled)
        return
    if not options.out:
        parser.error("--out: where to?")
    engines = {**{name: name for name in BACKENDS}, TWIN: "FLASH_ATTN"}
    workers = {name: Worker(backend, options) for name, backend in engines.items() if name != options.without}
    again = Worker(PLUGIN, options)
    ready = {name: worker.ready_s() for name, worker in workers.items()}  # the plugin first: it tunes on an idle GPU
    token_bytes = 2 * QWEN3_8B["num_hidden_layers"] * QWEN3_8B["num_key_value_heads"] * QWEN3_8B["head_dim"]
    capacity = options.kv_gib * (1 << 30) / (token_bytes * (1 if options.fp8 else 2))
    how = {"fp8": options.fp8, "compiled": options.compiled}
    random, found = np.random.default_rng(0), {**how, "ready_s": ready, "rows": (rows := [])}
    for trace, batch in product(options.trace, BATCHES):
        lengths = lengths_of(trace, batch)
        row: dict[str, Any] = {"trace": trace.stem, "batch": batch, "tokens": sum(lengths), "longest": max(lengths)}
        rows.append(row)
        if sum(lengths) + batch * (TOKENS + 32) > capacity:
            row["left_out"] = "more than the KV cache holds"
            continue
        token_s: dict[str, list[float]] = {name: [] for name in workers}
        for repeat in range(-1, REPEATS):  # the first one warms up
            for name in map(str, random.permutation(list(workers))):
                took = workers[name].ask(trace, batch)
                if repeat >= 0:
                    token_s[name].append(took)
        row |= {"token_s": token_s, "over_flash_attn": summary(token_s)}
        shown = ", ".join(f"{name} {its:.3f}x" for name, its in row["over_flash_attn"].items())
        ms = 1e3 * median(token_s[PLUGIN])
        print(f"{trace.stem}, batch {batch}, {sum(lengths)} tokens: {shown}; plugin {ms:.2f} ms", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")  # what there is, should a later batch fail
    for worker in workers.values():
        worker.process.kill()
        worker.process.wait()
    ready["plugin, its plan stored"] = again.ready_s()
    again.process.kill()
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print("ready:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in ready.items()))


if __name__ == "__main__":
    main()
