"""The child process: proves candidates on a device context of its own, and says what it does before it does it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from dispatch.backends import Registry
from dispatch.backends.registry import importer
from dispatch.bench.pool import PagedPool
from dispatch.bench.proving import Proving
from dispatch.bench.timer import CpuTimer, Timer
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import RegistryError, one_line
from dispatch.isolation.report import Report, ReportingTimer, is_out_of_memory
from dispatch.isolation.task import Task, Work
from dispatch.workspace import Workspaces

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do the task on standard input; say how it goes on the pipe whose number is the first argument."""
    report = Report(int(sys.argv[1]))
    task = Task.from_bytes(sys.stdin.buffer.read())
    _end_with(task.parent)
    try:
        _Child(task, report).run()
    except Exception as error:
        traceback.print_exc()
        try:
            report.settle()
        except Exception:
            report.say("poisoned", f"the device does not work any more: {one_line(error)}")
        else:
            report.say("crowded" if is_out_of_memory(error) else "error", one_line(error))
    report.leave()


class _Child:
    def __init__(self, task: Task, report: Report) -> None:
        self.task, self.report = task, report
        self.refused: set[str] = set()
        self.device, self.timer = _prepare(task, report)
        self.registry = Registry()
        for name, target in task.backends.items():
            self.registry.register(name, importer(target))

    def run(self) -> None:
        """Every bucket, as long as nothing is wrong with the default."""
        task, spec = self.task, self.task.spec
        default = task.work[0].candidates[0]
        pool = PagedPool(spec, max(work.pages(spec) for work in task.work), 1, self.device)
        workspaces = Workspaces(self.device)
        for family, size in task.workspace_bytes.items():
            workspaces.reserve(family, size)
        self.report.say("ready")
        self._import()
        for work in task.work:
            if default in self.refused:
                break
            self._prove(work, pool, workspaces)
        self.report.say("done")

    def _import(self) -> None:
        for name in self.task.backends:
            try:
                with self.report.stage(name, 0, "import"):
                    self.registry.get(name)
            except RegistryError as error:
                self._refuse(name, 0, "import", Reason.FAILED, str(error))

    def _prove(self, work: Work, pool: PagedPool, workspaces: Workspaces) -> None:
        def stage(candidate: Candidate, what: str) -> AbstractContextManager[None]:
            return self.report.stage(str(candidate), work.bucket, what)

        task, report = self.task, self.report
        timer = ReportingTimer(self.timer, report)
        proving = Proving(
            pool,
            workspaces,
            self.registry,
            timer,
            task.max_seq_len,
            task.finite_kv,
            stage,
            most_tokens=work.most_tokens,
        )
        candidates = {name: Candidate.parse(name) for name in work.candidates}
        left = {n: c for n, c in candidates.items() if not self.refused & {n, c.backend}}
        inputs, chain = pool.inputs(work.bucket, task.max_seq_len), pool.chain(work.bucket)
        _, exclusions = proving.prove(left, inputs, chain, work.longest)
        for e in exclusions:
            stage_of = report.failed_in.get(e.candidate, "numbers")
            self._refuse(e.candidate, work.bucket, stage_of, e.reason, e.detail)
        report.say("proven", work.bucket)

    def _refuse(self, candidate: str, bucket: int, stage: str, reason: Reason, why: str) -> None:
        self.refused.add(candidate)
        self.report.say("refused", candidate, bucket, stage, reason.name, why)


def _prepare(task: Task, report: Report) -> tuple[torch.device, Timer]:
    """The device, with its memory limited, and a timer for it."""
    torch.set_grad_enabled(False)
    if task.kind == "cpu":
        _limit_host_memory(task.memory_bytes)
        return torch.device("cpu"), CpuTimer()
    from dispatch.bench.cuda_timer import CudaTimer

    device = torch.device(task.kind, task.index)
    torch.cuda.set_device(device)
    report.settle = partial(torch.cuda.synchronize, device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(task.memory_bytes / total, device)
    return device, CudaTimer(device, flushes=False)


def _limit_host_memory(more_bytes: int) -> None:
    """So much on top of what is there now; the threads of torch included, which the first product starts."""
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
    status = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + more_bytes, held + more_bytes))


def _end_with(parent: int) -> None:
    """Die with the parent, and leave no core file: it would be as large as the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be told of
        os._exit(1)
