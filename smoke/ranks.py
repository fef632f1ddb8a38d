"""A model over several ranks: each a process of its own, started here and run by this module as a program."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dispatch.config import DispatchConfig
from dispatch.engine.runner import DecodeGraphRunner
from smoke.direct import DirectRunner
from smoke.engine import make_decoder, make_runner
from smoke.forced import everywhere, store_plan
from smoke.golden import read
from smoke.serve import Runner, serve
from smoke.threads import one_thread

PATIENCE_S = 120.0  # for a collective call, and for all ranks to end; importing torch takes seconds of it
ROOT = Path(__file__).parents[1]


def run_ranks(world: int, task: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Of each rank, what `serve` returned. Raises RuntimeError with the last line of a rank that failed.

    `task`: golden, device ("cuda": a GPU for each rank), dtype, requests, steps, and the backend to use: directly, or,
    with "planned", through the runner by a plan that names it.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"rank{rank}.pt" for rank in range(world)]
        shared = {**task, "world": world, "meet": str(Path(folder) / "meet")}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, result in enumerate(results):
                ranks.append(_started({**shared, "rank": rank, "result": str(result)}))
            _wait(ranks, results)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [torch.load(result, weights_only=True) for result in results]


def _started(task: dict[str, Any]) -> subprocess.Popen[bytes]:
    """What it says on stderr goes to a file, which never fills up as a pipe does."""
    with _words(Path(task["result"])).open("wb") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "smoke.ranks", json.dumps(task)],
            cwd=ROOT,
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},  # the host's name may lead nowhere
            stdout=subprocess.DEVNULL,
            stderr=words,
        )


def _words(result: Path) -> Path:
    return result.with_suffix(".stderr")


def _wait(ranks: list[subprocess.Popen[bytes]], results: list[Path]) -> None:
    """Until all have ended well. Raises RuntimeError when one has not."""
    end = time.monotonic() + PATIENCE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        if any(process.poll() for process in ranks):
            break  # the others would wait for it
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        if process.poll():
            last = _last_words(_words(results[rank])).removeprefix(f"[rank{rank}]: ")
            raise RuntimeError(f"rank {rank} ended with status {process.returncode}: {last}")
    if any(process.poll() is None for process in ranks):
        raise RuntimeError(f"ranks still ran after {PATIENCE_S:.0f} s")


def _last_words(path: Path) -> str:
    """The last line that torch's own log, which begins with "[W" or the like, did not write."""
    lines = path.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip() and not line.startswith(("[W", "[E", "[I"))), "")


def _rank(task: dict[str, Any]) -> None:
    rank, world, on_gpu = task["rank"], task["world"], task["device"] == "cuda"
    one_thread()
    if on_gpu:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{task['meet']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    _serve(task, device)
    gc.collect()  # NCCL's communicator waits at its end for every graph that has captured its calls
    dist.barrier()
    dist.destroy_process_group()


def _serve(task: dict[str, Any], device: torch.device) -> None:
    rank = task["rank"]
    decoder = make_decoder(task["golden"], device, task["dtype"], rank, task["world"])
    with tempfile.TemporaryDirectory() as folder:
        runner: Runner
        if task["planned"]:
            config = DispatchConfig(enabled=True, cache_dir=Path(folder))
            if rank == 0:  # the others hear of the plan from it
                store_plan(decoder.cache.spec, config, device.type, everywhere(task["backend"]))
            runner = make_runner(decoder, config, dist.new_group(backend="gloo"))
            dropped = [v.dropped for v in runner.report.variants if v.dropped]
            if dropped:
                raise RuntimeError(f"{task['backend']} was not captured: {dropped[0]}")
            if rank and any(Path(folder).iterdir()):
                raise RuntimeError("a rank that is not the leader has used its store")
        else:
            runner = DirectRunner(decoder, task["backend"])
        goldens = read(task["golden"])[: task["requests"]]
        torch.save(serve(decoder, runner, goldens, steps=task["steps"]), task["result"])
        if isinstance(runner, DecodeGraphRunner) and {what for _, what in runner.counts.hits} != {task["backend"]}:
            raise RuntimeError(f"{task['backend']} was to serve: {dict(runner.counts.hits)}")


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
