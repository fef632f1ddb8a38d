"""The ranks of test_ranks.py, as processes that are forked from one in which torch is imported.

A line on stdin, {"case", "world", "folder"}, starts a set of ranks. Its result.json in the folder then says, of each
rank, its exit status, what it reported, and the last lines that it said on stderr.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests import rank_cases
from tests.engine import Engine
from tests.fakes import backend, registry_of
from tests.rank_cases import Rank

PATIENCE_S = 20.0  # for the whole of a case
BATCHES = ([9, 33], [64, 1, 64, 3], [5], [9, 33])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what is loaded at the first use is then there in all ranks
        Engine().runner(Path(folder), backends=registry_of(backend("a"))).trigger_init_capture()
    gc.collect()
    gc.freeze()  # or every rank would look through all of torch's objects again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_set(**json.loads(line))
            return


def _run_set(case: str, world: int, folder: str) -> None:
    place, children = Path(folder), []
    for rank in range(world):
        child = os.fork()
        if not child:
            with (place / f"rank{rank}.err").open("wb") as words:
                os.dup2(words.fileno(), 2)
            _run_rank(case, rank, world, place)  # it ends as any program does, so that it is seen whether it can
        children.append(child)
    statuses = _waited(children)
    told = json.dumps([_told(place, rank, status) for rank, status in enumerate(statuses)])
    (place / "result.part").write_text(told)
    (place / "result.part").rename(place / "result.json")
    os._exit(0)


def _waited(children: list[int]) -> list[int]:
    """Exit statuses; -9 of one that had to be killed."""
    end, statuses = time.monotonic() + PATIENCE_S, {}
    while len(statuses) < len(children):
        for child in [child for child in children if child not in statuses]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [statuses[child] for child in children]


def _told(folder: Path, rank: int, status: int) -> dict:
    report = folder / f"rank{rank}.json"
    words = (folder / f"rank{rank}.err").read_text(errors="replace").splitlines()
    return {**(json.loads(report.read_text()) if report.exists() else {}), "status": status, "stderr": words[-3:]}


def _run_rank(case: str, number: int, world: int, folder: Path) -> None:
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=world, timeout=timedelta(seconds=60))
    twin, log = _Twin(), _Log()
    logging.getLogger("dispatch").addHandler(log)
    rank = Rank(number, world, folder)
    report = {"error": "", "at": [], "log": log.lines, "began": 0.0}
    try:
        runner = getattr(rank_cases, case)(rank)
        _note_calls(runner.ranks, report)
        capture = runner.trigger_init_capture()
        report["why"] = list(capture.why_default)
        names = ["default" if v.is_default else v.variant for v in capture.variants]
        dropped = zip(names, capture.variants, strict=True)
        report["dropped"] = {f"{v.bucket} {name}": v.dropped for name, v in dropped if v.dropped}
        report["right"] = [twin.agrees(rank.engine, runner, lengths) for lengths in BATCHES]
        report["hits"] = {f"{bucket} {what}": count for (bucket, what), count in runner.counts.hits.items()}
        report["misses"] = {f"{bucket} {why}": count for (bucket, why), count in runner.counts.misses.items()}
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["seconds"] = time.monotonic() - (report["began"] or time.monotonic())
    files = sorted(path.name for path in rank.store.glob("plans/*.json*"))
    report |= {"sums": rank.engine.sums, "tuned": rank.happened["tuned"], "files": files}
    (folder / f"rank{number}.json").write_text(json.dumps(report))
    if report["error"]:
        # A thread of gloo's may still hold the tensor of a call that has failed; it aborts the process where it drops
        # that while Python ends (pytorch's pull request 179291). To destroy the groups waits for it, as engines do.
        dist.destroy_process_group()
        sys.exit(1)
    dist.barrier()
    os._exit(0)  # half a second faster


def _note_calls(ranks, report: dict) -> None:
    share = ranks.share

    def noted(at, *args):
        report["began"] = report["began"] or time.monotonic()
        report["at"].append(at)
        return share(at, *args)

    ranks.share = noted


class _Twin:
    """An engine of one rank, without a plan, that serves the same requests."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.runner = self.engine.runner(None, enabled=False, backends=registry_of(backend("a")))
        self.runner.trigger_init_capture()

    def agrees(self, engine, runner, lengths: list[int]) -> bool:
        found, expected = (one.run(*e.request(lengths)) for e, one in ((engine, runner), (self.engine, self.runner)))
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


if __name__ == "__main__":
    main()
