"""Following a child process: which candidate is to blame where it dies, hangs, or is spoilt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dispatch.bench.phases import Phases
from dispatch.decision import Reason
from dispatch.errors import MeasureError
from dispatch.isolation.limits import COMPILING, Limits
from dispatch.isolation.process import Child
from dispatch.isolation.report import OUT_OF_MEMORY

_log = logging.getLogger(__name__)

LOOK_S = 0.5  # between looks at whether a compiler runs


@dataclass(frozen=True, slots=True)
class Blamed:
    """What a candidate did, and in which stage. `by_chance`: it may go well another time, for lack of memory or where
    an exception was all."""

    candidate: str
    bucket: int
    stage: str
    reason: Reason
    why: str
    by_chance: bool = False

    @property
    def out_of_memory(self) -> bool:
        """Whether that is what it did."""
        return self.why.startswith(OUT_OF_MEMORY)


class NoRoom(MeasureError):
    """The child had no memory for the gate's own numbers."""


@dataclass(frozen=True, slots=True)
class _Begun:
    candidate: str = ""
    bucket: int = 0
    stage: str = ""

    def hung(self, seconds: float) -> Blamed:
        return self.blamed(f"hung: no end of it within {seconds:.0f} s")

    def blamed(self, why: str, by_chance: bool = False) -> Blamed:
        return Blamed(self.candidate, self.bucket, self.stage, Reason.FAILED, why, by_chance)


_START, _OWN = _Begun(stage="start"), _Begun()


class Watch:
    """Of one child, until a deadline on the monotonic clock; `budget_s`: the whole time that a start has to tune.
    `built`: told of candidates that were built. `proven`: buckets. `out_of_time`: the deadline passed."""

    def __init__(
        self,
        limits: Limits,
        deadline: float,
        budget_s: float,
        say: Callable[[str], None],
        phases: Phases,
        built: Callable[[str], None] = lambda candidate: None,
    ) -> None:
        self.limits, self.deadline, self.budget_s = limits, deadline, budget_s
        self.say, self.phases, self.built = say, phases, built
        self.proven: set[int] = set()
        self.out_of_time = False
        self._compiled: set[str] = set()

    def follow(self, child: Child, refuse: Callable[[Blamed], None]) -> Blamed | None:
        """Until it is done (None), or has to be replaced by another without the candidate that is to blame.

        `refuse` is told of candidates that failed and did no harm. A stage that the deadline cuts is to blame only if
        it took over half of the budget: it would do so at each start. Raises MeasureError where no candidate is to
        blame.
        """
        now, last = _START, _START
        while True:
            match self._next(child, now):
                case ["ready"] | ["end"]:
                    now = _OWN
                case ["begin", candidate, bucket, stage]:
                    now = last = _Begun(candidate, bucket, stage)
                    self.say(f"{candidate} in a child process{f', batch {bucket}' if bucket else ''}: {stage}")
                    if stage == "capture":  # not after the end of a build, which may be that it raised
                        self.built(candidate)
                case ["refused", candidate, bucket, stage, reason, why]:
                    refuse(Blamed(candidate, bucket, stage, Reason[reason], why, Reason[reason] is Reason.FAILED))
                case ["proven", bucket]:
                    self.proven.add(bucket)
                case ["done"]:
                    return None
                case ["poisoned", why]:
                    return last.blamed(why, by_chance=why.startswith(OUT_OF_MEMORY))
                case ["crowded", why]:
                    raise NoRoom(f"candidates cannot be tried in a child process: {OUT_OF_MEMORY}: {why}")
                case ["error", why]:
                    raise MeasureError(f"candidates cannot be tried in a child process: {why}")
                case ["late", waited]:
                    self.out_of_time = True
                    return now.hung(waited) if now.candidate and waited > self.budget_s / 2 else None
                case ["hung", _] | ["closed"] if last is _START:
                    raise MeasureError(f"the child process to try candidates in {self._end(child)} before it was ready")
                case ["hung", waited]:
                    return last.hung(waited)
                case ["closed"]:
                    return last.blamed(child.how_it_ended())

    def _next(self, child: Child, now: _Begun) -> list[Any]:
        """Its next message, or one of ours: "closed", "late" or "hung", the last two with the seconds waited."""
        began = looked = monotonic()
        compiling_s = 0.0
        with self.phases(f"in a child: {now.stage or 'gate, and between'}"):
            while True:
                left_s = self.deadline - looked
                if left_s <= 0:
                    return ["late", looked - began]
                message = child.next(min(LOOK_S, left_s))
                if message is not None:
                    return message
                if child.closed:
                    return ["closed"]
                before, looked = looked, monotonic()
                if now.stage in COMPILING and child.compiles():
                    compiling_s += looked - before
                    self._tell_of_compiling(now.candidate)
                waited = looked - began
                if waited - compiling_s > self.limits.of(now.stage) or compiling_s > self.limits.compile_s:
                    return ["hung", waited]

    def _tell_of_compiling(self, candidate: str) -> None:
        self.say(f"compiling {candidate}")
        if candidate not in self._compiled:
            self._compiled.add(candidate)
            _log.info("compiling %s, in a child process", candidate)

    @staticmethod
    def _end(child: Child) -> str:
        return child.how_it_ended() if child.closed else "hung"
