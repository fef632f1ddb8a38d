"""Backends that do what a backend must not: each computes with torch_chunked, and has one fault."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support
from dispatch.backends.torch_chunked import TorchChunked
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

FOR_EVER_S = 1e6
FOR_EVER_CYCLES = 1 << 60  # of a GPU's clock: decades
PIECE_BYTES = 256 << 20
MOST_PIECES = 256  # 64 GiB, never touched: without a limit on memory, address space is all that goes


class Faulty(Backend):
    """Without a fault, as it stands. A subclass overrides what happens at one point."""

    family = "faulty"
    distribution = "torch"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        return SUPPORTED

    def build(
        self, spec: AttentionSpec, batch_size: int, max_kv: int, workspace: torch.Tensor, tactic: Mapping[str, int]
    ) -> DecodeImpl:
        self.at_build(workspace.device)
        return _Faulty(self, TorchChunked().build(spec, batch_size, max_kv, workspace, tactic))

    def at_build(self, device: torch.device) -> None:
        """While it is built."""

    def before(self, out: torch.Tensor) -> None:
        """Before a layer's output is written."""

    def after(self, out: torch.Tensor) -> None:
        """After it is."""


class _Faulty(DecodeImpl):
    def __init__(self, backend: Faulty, inner: DecodeImpl) -> None:
        self.backend, self.inner, self.needs_plan = backend, inner, inner.needs_plan

    def plan(self, inputs: StepInputs) -> None:
        self.inner.plan(inputs)

    def begin_step(self, inputs: StepInputs) -> None:
        self.inner.begin_step(inputs)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.backend.before(out)
        self.inner.forward(q, kv_cache, out, sinks)
        self.backend.after(out)


class SleepsInBuild(Faulty):
    """Never ends building, as a compiler that hangs."""

    def at_build(self, device: torch.device) -> None:
        time.sleep(FOR_EVER_S)


class Hangs(Faulty):
    """Never ends running: on a GPU, a kernel that does not return."""

    def before(self, out: torch.Tensor) -> None:
        if out.is_cuda:
            torch.cuda._sleep(FOR_EVER_CYCLES)  # type: ignore[no-untyped-call]
        else:
            time.sleep(FOR_EVER_S)


class RaisesInBuild(Faulty):
    """Raises while it is built, as where a compiler fails."""

    def at_build(self, device: torch.device) -> None:
        raise RuntimeError("Ninja build failed. Ninja output:\n[1/3] ...")


class Raises(Faulty):
    """Raises while it runs."""

    def before(self, out: torch.Tensor) -> None:
        raise RuntimeError("no kernel for these sizes")


class Segfaults(Faulty):
    """Reads from address 0 on the host."""

    def before(self, out: torch.Tensor) -> None:
        ctypes.string_at(0)


class Aborts(Faulty):
    """Aborts the process, as a failed assertion of a C++ library."""

    def before(self, out: torch.Tensor) -> None:
        os.abort()


class Exits(Faulty):
    """Ends the process with status 127, as the dynamic linker where a symbol is missing at a first launch."""

    def before(self, out: torch.Tensor) -> None:
        os._exit(127)


class ExitsPolitely(Faulty):
    """Raises SystemExit, which no handler of errors catches."""

    def before(self, out: torch.Tensor) -> None:
        sys.exit("giving up")


class ExhaustsMemory(Faulty):
    """Allocates until there is no more, and keeps it."""

    held: list[torch.Tensor]

    def at_build(self, device: torch.device) -> None:
        self.held = []
        for _ in range(MOST_PIECES):
            self.held.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device))


class IllegalAccess(Faulty):
    """Reads far behind a tensor's end: on a GPU, an error that stays with the context."""

    def at_build(self, device: torch.device) -> None:
        self.few, self.far = torch.ones(4, device=device), torch.full((1,), 1 << 40, device=device)

    def before(self, out: torch.Tensor) -> None:
        self.few[self.far]


class WrongNumbers(Faulty):
    """5% too much, in the last head of the last row."""

    def after(self, out: torch.Tensor) -> None:
        out[-1, -1] *= 1.05


class WritesOutOfBounds(Faulty):
    """Writes one row more than there is."""

    def after(self, out: torch.Tensor) -> None:
        behind = out.storage_offset() + out.numel()
        torch.as_strided(out, out.shape[1:], out.stride()[1:], behind).fill_(0)


class LeavesRowsUnwritten(Faulty):
    """Leaves the last row as it found it."""

    def before(self, out: torch.Tensor) -> None:
        self.found = out[-1].clone()

    def after(self, out: torch.Tensor) -> None:
        out[-1].copy_(self.found)


class DiffersBetweenRuns(Faulty):
    """Wrong in every third run, as where a kernel races with itself."""

    def at_build(self, device: torch.device) -> None:
        self.runs = torch.zeros((), dtype=torch.int32, device=device)

    def after(self, out: torch.Tensor) -> None:
        self.runs += 1
        out.mul_(torch.where(self.runs % 3 == 0, 1.5, 1.0).to(out.dtype))


class Forges(WrongNumbers):
    """Wrong, and prints bytes that are no text, and lines that would be the child's reports on the right pipe."""

    def before(self, out: torch.Tensor) -> None:
        for number in (1, 2):
            os.write(number, b'\xff\x00\n["proven", 1]\n["done"]\n')
