"""What the child says: a JSON line before and after each thing that a candidate does, on a pipe that it does not know.

["ready"]; ["begin", candidate, bucket, stage], ["end"]; ["refused", candidate, bucket, stage, reason, why]: it failed,
and nothing else did; ["poisoned", why]: what was begun last has spoilt this process, which ends; ["proven", bucket];
["crowded", why]: no memory for the gate itself; ["error", why]: no candidate's fault either; ["done"].
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from dispatch.backends import DecodeImpl
from dispatch.bench.pool import Chain
from dispatch.bench.timer import Recording, StepTime, Timer
from dispatch.errors import one_line
from dispatch.step import StepInputs

OUT_OF_MEMORY = "out of memory"  # how the reason begins where it is that
LONGEST_TEXT = 200  # characters; so a line is written in one piece


class Report:
    """The child's end of the pipe. `settle`: waits for the device, and raises where it does not work any more."""

    def __init__(self, pipe: int, settle: Callable[[], None] = lambda: None) -> None:
        os.set_inheritable(pipe, False)  # or a compiler that outlives this process would keep it open
        self._pipe, self.settle = pipe, settle
        self.candidate = ""
        self.failed_in: dict[str, str] = {}
        """The stage in which a candidate raised."""

    def say(self, *message: object) -> None:
        """One line, at once, each text of it cut short: an error's may be a compiler's whole output."""
        short = [part[:LONGEST_TEXT] if isinstance(part, str) else part for part in message]
        os.write(self._pipe, json.dumps(short).encode() + b"\n")

    def leave(self) -> NoReturn:
        """End the process here and now: nothing of a candidate's runs at its exit."""
        os._exit(0)

    @contextmanager
    def stage(self, candidate: str, bucket: int, what: str) -> Iterator[None]:
        """Around what a candidate does. What it launched comes to an end in here, or to light.

        An exception goes on to the caller where this process is still good for other candidates.
        """
        self.candidate = candidate
        self.say("begin", candidate, bucket, what)
        try:
            yield
            self.settle()
        except BaseException as error:  # SystemExit as well
            traceback.print_exc()
            if spoilt := self._spoilt_by(error):
                self.say("poisoned", spoilt)
                self.leave()
            self.failed_in[candidate] = what
            self.say("end")
            raise
        self.say("end")

    def _spoilt_by(self, error: BaseException) -> str:
        if not isinstance(error, Exception):
            return one_line(error)
        if is_out_of_memory(error):  # who holds it may be another than who asked last: both have to go
            return f"{OUT_OF_MEMORY}: {one_line(error)}"
        try:
            self.settle()
        except Exception:
            return f"the device does not work any more: {one_line(error)}"
        return ""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()  # torch's allocator for the CPU, and CUDA's own calls, have no type for it
    return "out of memory" in text or "can't allocate memory" in text


class ReportingTimer:
    """A timer whose recordings say when they run. Nothing is timed."""

    peak_bytes_per_s: float | None = None

    def __init__(self, timer: Timer, report: Report) -> None:
        self.timer, self.report = timer, report
        self.chain_layers = timer.chain_layers

    def record(self, impl: DecodeImpl, inputs: StepInputs, chain: Chain) -> Recording:
        """Within the stage of the candidate whose recording it is."""
        return _Reporting(self.timer.record(impl, inputs, chain), self.report, len(inputs.lengths_host))


class _Reporting:
    def __init__(self, recording: Recording, report: Report, bucket: int) -> None:
        self.recording, self.report, self.candidate, self.bucket = recording, report, report.candidate, bucket

    def run(self, layers: int) -> None:
        with self.report.stage(self.candidate, self.bucket, "replay"):
            self.recording.run(layers)

    def start(self, layers: int) -> Callable[[], StepTime]:
        raise NotImplementedError("a child proves; it times nothing")
