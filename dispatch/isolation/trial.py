"""The trial: one child process after the other, until one has proven all candidates that are left."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

import torch

from dispatch.backends import Registry
from dispatch.bench.memory import available_bytes
from dispatch.bench.phases import Phases
from dispatch.candidate import Candidate
from dispatch.device import DeviceFingerprint
from dispatch.eligible import Eligible
from dispatch.errors import MeasureError
from dispatch.isolation.ahead import Ahead
from dispatch.isolation.blame import Blamed, NoRoom, Watch
from dispatch.isolation.limits import CHILD_BYTES, OUTSIDE_TORCH_BYTES, Limits
from dispatch.isolation.process import Child
from dispatch.isolation.quarantine import Quarantine
from dispatch.isolation.task import Task, Work, work_that_fits
from dispatch.plan import FAILED_NOW, TIME_BUDGET_OVER
from dispatch.request import TuneRequest

_log = logging.getLogger(__name__)

NONE_LEFT = "every candidate but the default was refused"
TOO_LARGE = "its rows do not fit into the memory in which candidates are tried"
TIMER_BYTES = 160 << 20  # on a GPU: what the timer puts between layers, and cuBLAS's workspaces


class Trial:
    """What is tried, under which limits, and what has come of it so far."""

    def __init__(
        self,
        request: TuneRequest,
        device: DeviceFingerprint,
        registry: Registry,
        able: Eligible,
        quarantine: Quarantine,
        limits: Limits,
        phases: Phases,
    ) -> None:
        """Raises MeasureError where there is no memory for a child."""
        self.request, self.able, self.quarantine = request, able, quarantine
        self.limits, self.phases = limits, phases
        self.kind = device.kind
        self.refused: dict[str, str] = {}
        self.unmeasured: dict[int, str] = {}
        free = available_bytes(torch.device(device.kind))
        if free < CHILD_BYTES:
            raise MeasureError(
                f"{free >> 20} MiB are free, and trying candidates in a child process may take {CHILD_BYTES >> 20}"
            )
        self.torch_bytes = CHILD_BYTES - (OUTSIDE_TORCH_BYTES if device.kind == "cuda" else 0)
        self.room_share = 1.0
        self.index = torch.cuda.current_device() if device.kind == "cuda" else None
        self.registry, self.backends = registry, self._importable(registry)

    def run(
        self, buckets: Sequence[int], deadline: float, say: Callable[[str], None]
    ) -> tuple[Eligible, dict[int, str]]:
        """Try every candidate of `buckets`, until the deadline on the monotonic clock. `say`: told what is going on.

        Returns what is left, and the buckets that are not to be measured now, with the reason.

        Raises MeasureError where no child can be had, or one fails without a candidate to blame.
        """
        todo = list(buckets)
        with self._log_file() as log, Ahead(self.registry, self.index) as ahead:
            while (work := self._work(todo)) and not set(todo) <= self.unmeasured.keys():
                budget_s = self.request.config.time_budget_s
                watch = Watch(self.limits, deadline, budget_s, say, self.phases, ahead.built)
                child = Child(self._task(work), log)
                try:
                    blamed = watch.follow(child, self._refuse)
                    crowded = blamed is not None and blamed.out_of_memory and self.room_share == 1.0
                except NoRoom:
                    blamed, crowded = None, True
                finally:
                    child.kill()
                todo = [bucket for bucket in todo if bucket not in watch.proven]
                if watch.out_of_time:
                    self.unmeasured |= dict.fromkeys(todo, TIME_BUDGET_OVER)
                if crowded:  # more is allocated than can be foretold: on shorter rows, before anyone is blamed
                    self.room_share /= 2
                elif blamed is None:
                    break
                else:
                    self._refuse(blamed)
        left = self.able.without(self.refused)
        nothing = {b: NONE_LEFT for b in buckets if len(left.candidates(b)) == 1}
        return left, {**nothing, **self.unmeasured}

    def _work(self, buckets: Sequence[int]) -> list[Work]:
        """What is left to be proven of the buckets."""
        spec, longest = self.request.spec, self.request.max_seq_len
        room = self.torch_bytes - sum(self.able.workspace_bytes.values())
        room -= TIMER_BYTES if self.kind == "cuda" else 0
        wanted = []
        for bucket in buckets:
            names = tuple(n for n in self.able.candidates(bucket) if not self._is_refused(n))
            work = work_that_fits(spec, bucket, longest, names, int(self.room_share * room))
            if work is None:
                self.unmeasured[bucket] = TOO_LARGE
            elif len(names) > 1:
                wanted.append(work)
        return wanted

    def _task(self, work: list[Work]) -> Task:
        wanted = {Candidate.parse(name).backend for each in work for name in each.candidates}
        return Task(
            spec=self.request.spec,
            max_seq_len=self.request.max_seq_len,
            finite_kv=self.request.traits.finite_kv,
            work=tuple(work),
            backends={name: target for name, target in self.backends.items() if name in wanted},
            workspace_bytes=self.able.workspace_bytes,
            kind=self.kind,
            index=self.index or 0,
            memory_bytes=self.torch_bytes,
            parent=os.getpid(),
        )

    def _refuse(self, blamed: Blamed) -> None:
        """Keep the candidate out, now and later. The default stays the default, and nothing is decided against it."""
        name, default = blamed.candidate, self.able.default
        if name == default and blamed.by_chance:
            self._default_failed(FAILED_NOW, f"{blamed.stage}: {blamed.why}")
            return
        held = self.quarantine.add(name, blamed.bucket, blamed.stage, blamed.reason, blamed.why)
        if name == default:
            self._default_failed(blamed.reason.value, held.describe())
            return
        _log.warning("%s is not used: %s", name, held.describe())
        self.refused[name] = held.describe()

    def _default_failed(self, kind: str, why: str) -> None:
        _log.warning("every bucket keeps the default %s, which failed in a child process: %s", self.able.default, why)
        what = f"{kind}: the default {self.able.default}: {why}"
        self.unmeasured |= dict.fromkeys(self.request.buckets, what)

    def _is_refused(self, candidate: str) -> bool:
        return not self.refused.keys().isdisjoint((candidate, Candidate.parse(candidate).backend))

    def _importable(self, registry: Registry) -> dict[str, str]:
        """Where a child finds each backend's class; those that it cannot find are refused."""
        found = {}
        for name in self.able.tactics:
            cls = type(registry.get(name))
            if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
                why = f"a child process cannot import {cls.__qualname__}, which is defined within a "
                why += "function" if "<locals>" in cls.__qualname__ else "program: put it into a module"
                if name == self.able.default:
                    raise MeasureError(f"the default {name} cannot be tried: {why}")
                self.refused[name] = why
            else:
                found[name] = f"{cls.__module__}:{cls.__qualname__}"
        return found

    def _log_file(self) -> IO[bytes]:
        """For what the children print: beside the plan, or where nothing can be written there, nowhere.

        What was printed by those in quarantine is kept.
        """
        try:
            if self.quarantine.log is not None:
                self.quarantine.log.parent.mkdir(parents=True, exist_ok=True)
                return open(self.quarantine.log, "ab" if any(self.quarantine) else "wb")
        except OSError as error:
            _log.warning("no log of what candidates print: %s: %s", self.quarantine.log, error.strerror)
        return tempfile.TemporaryFile()
