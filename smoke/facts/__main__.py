"""Measures the facts of DESIGN 2 again with this project's harness: `python -m smoke.facts`, on a GPU node.

Prints one table (fact, then, now, note) and writes all medians. Without a GPU, only what samples files tell.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from dispatch.atomic import write_atomically
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.device import current_device
from dispatch.errors import one_line
from smoke.facts import build, clock, from_samples, kernels, plan
from smoke.facts.table import Found, show
from smoke.versions import versions

CLOCKS = "clocks"  # always first: it wants a card that nothing has loaded yet
ON_GPU: dict[str, Callable[[CudaTimer], Found]] = {
    CLOCKS: clock.clocks,
    "1": kernels.raggedness,
    "2b": kernels.straw_men,
    "4": kernels.ways_of_timing,
    "5": kernels.declared_maximum,
    "6": plan.plan_cost,
    "3": kernels.fp8,
    "7": kernels.fa3_of_flashinfer,
}


class Report:
    """What was found so far, written after each fact: a later one may take the process with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.device, self.versions = path, current_device().describe(), versions()
        self.found: dict[str, Found] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Found]) -> None:
        """One fact. Whatever it raises, the others go on."""
        start = monotonic()
        try:
            self.found[name] = work()
        except Exception as error:
            self.failed[name] = one_line(error)
            print(f"fact {name}: failed: {self.failed[name]}", flush=True)
        self.seconds[name] = round(monotonic() - start, 1)
        print(f"fact {name}: {self.seconds[name]} s", flush=True)
        self._write()

    def _write(self) -> None:
        body = {
            "device": self.device,
            "versions": self.versions,
            "seconds": self.seconds,
            "failed": self.failed,
            "facts": {
                name: {"rows": [asdict(row) for row in found.rows], "raw": found.raw}
                for name, found in self.found.items()
            },
        }
        write_atomically(self.path, json.dumps(body, indent=1).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts", description=__doc__)
    parser.add_argument("--samples", nargs="*", type=Path, default=[], metavar="FILE", help="of `tune --out`")
    parser.add_argument("--out", type=Path, default=Path("facts.json"), metavar="FILE")
    parser.add_argument("--only", default="", metavar="FACTS", help=f"of {','.join(ON_GPU)},samples; all if not given")
    parser.add_argument(
        "--with-fa3-wrapper", action="store_true", help="fact 7 too, whose kernel takes a minute to compile"
    )
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(",")) if options.only else {*ON_GPU, "samples"}
    if unknown := wanted - {*ON_GPU, "samples"}:
        parser.error(f"--only: no fact {', '.join(sorted(unknown))}")
    if not options.with_fa3_wrapper:
        wanted.discard("7")
    report = Report(options.out)
    if torch.cuda.is_available():
        _on_gpu(report, wanted)
    else:
        print("no GPU here: only what samples files tell", flush=True)
    if options.samples and "samples" in wanted:
        report.run("samples", partial(from_samples.from_samples, options.samples))
    order = sorted((row for found in report.found.values() for row in found.rows), key=lambda row: row.fact.split()[0])
    show(order, f"DESIGN 2 on {report.device}")


def _on_gpu(report: Report, wanted: set[str]) -> None:
    timer = CudaTimer(torch.device("cuda"))
    names = [name for name in ON_GPU if name in wanted]
    if CLOCKS in names:
        report.run(CLOCKS, partial(clock.clocks, timer))
        names.remove(CLOCKS)
    if names:
        start = monotonic()
        build.compile_modules("7" in names)
        print(f"compiled ahead: {monotonic() - start:.1f} s", flush=True)
    for name in names:
        report.run(name, partial(ON_GPU[name], timer))
        gc.collect()  # graphs, wrappers and pages of the fact, some of them in cycles
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
