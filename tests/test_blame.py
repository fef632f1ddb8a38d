"""Whom the parent blames, from what a child said last: a scripted child, and real seconds, but few of them."""

from __future__ import annotations

import time

import pytest

from dispatch.bench.phases import Phases
from dispatch.decision import Reason
from dispatch.errors import MeasureError
from dispatch.isolation import blame
from dispatch.isolation.blame import Blamed, NoRoom, Watch
from dispatch.isolation.limits import Limits

READY, END = ["ready"], ["end"]
QUICK = Limits(start_s=0.1, import_s=0.1, first_s=0.1, compile_s=0.4, replay_s=0.1, own_s=0.1)


class Scripted:
    """A child that says these messages, then nothing. `ends`: it closes its pipe. `compiling_s`: of compilers."""

    def __init__(self, *messages, ends="", compiling_s=0.0):
        self.messages, self.ends = list(messages), ends
        self.closed, self.until = False, time.monotonic() + compiling_s

    def next(self, seconds):
        if self.messages:
            return self.messages.pop(0)
        if self.ends:
            self.closed = True
            return None
        time.sleep(seconds)
        return None

    def compiles(self):
        return time.monotonic() < self.until

    def how_it_ended(self):
        return self.ends


def begin(stage, candidate="b", bucket=4):
    return ["begin", candidate, bucket, stage]


def follow(*messages, limits=QUICK, deadline=float("inf"), budget_s=100.0, refused=None, **child):
    watch = Watch(limits, time.monotonic() + deadline, budget_s, lambda what: None, Phases())
    blamed = watch.follow(Scripted(*messages, **child), (refused if refused is not None else []).append)
    return watch, blamed


@pytest.fixture(autouse=True)
def short_looks(monkeypatch):
    monkeypatch.setattr(blame, "LOOK_S", 0.02)


@pytest.mark.parametrize("stage", ["import", "build", "capture", "replay"])
def test_a_stage_without_an_end_is_a_hang_of_its_candidate(stage):
    _, blamed = follow(READY, begin("import", "a"), END, begin(stage))
    assert blamed == Blamed("b", 4, stage, Reason.FAILED, "hung: no end of it within 0 s")


def test_who_began_last_is_to_blame_for_what_shows_only_after_its_end():
    messages = READY, begin("replay", "a"), END, begin("replay"), END
    assert follow(*messages, ends="killed by SIGABRT")[1].candidate == "b"
    assert follow(*messages, ["poisoned", "the device does not work any more"])[1].candidate == "b"
    assert follow(*messages)[1].why.startswith("hung")


def test_nobody_is_to_blame_before_a_candidate_began():
    for begun in ((), (READY,)):
        with pytest.raises(MeasureError, match="killed by SIGKILL before it was ready"):
            follow(*begun, ends="killed by SIGKILL")
        with pytest.raises(MeasureError, match="hung before it was ready"):
            follow(*begun)


def test_an_error_of_the_childs_own_is_no_candidates_fault():
    with pytest.raises(MeasureError, match="cannot be tried in a child process: MeasureError: odd"):
        follow(READY, begin("build"), END, ["error", "MeasureError: odd"])


def test_a_compiler_that_runs_has_a_time_of_its_own():
    done = [READY, begin("build")]
    start = time.monotonic()
    assert follow(*done, compiling_s=0.2)[1].stage == "build"
    assert time.monotonic() - start > 0.25  # 0.2 s of compiling, and then 0.1 s, less a look
    start = time.monotonic()
    assert follow(*done, compiling_s=100.0)[1].stage == "build"
    assert time.monotonic() - start > 0.4
    start = time.monotonic()  # what else runs beside a kernel is no compiler
    follow(READY, begin("replay"), compiling_s=100.0)
    assert time.monotonic() - start < 0.4


@pytest.mark.parametrize(("budget_s", "is_blamed"), [(0.5, False), (0.3, True)])
def test_a_stage_that_the_deadline_cuts_is_to_blame_if_it_took_over_half_of_the_budget(budget_s, is_blamed):
    watch, blamed = follow(READY, begin("build"), limits=Limits(), deadline=0.2, budget_s=budget_s)
    assert watch.out_of_time
    assert (blamed is not None) is is_blamed


def test_what_was_proven_and_refused_before_the_deadline_counts():
    refused = []
    said = [READY, ["refused", "b", 1, "numbers", "GATE_FAILED", "row 3"], ["proven", 1], begin("build", "c", 2)]
    watch, blamed = follow(*said, limits=Limits(), deadline=0.1, refused=refused)
    assert (watch.proven, watch.out_of_time, blamed) == ({1}, True, None)
    assert refused == [Blamed("b", 1, "numbers", Reason.GATE_FAILED, "row 3")]


def test_memory_and_exceptions_may_go_better_another_time():
    refused = []
    follow(READY, ["refused", "b", 1, "build", "FAILED", "ValueError"], ["done"], refused=refused)
    assert refused[0].by_chance
    assert follow(READY, begin("build"), ["poisoned", "out of memory: ..."])[1].by_chance
    assert not follow(READY, begin("build"), ["poisoned", "the device does not work any more"])[1].by_chance


def test_a_candidate_is_told_of_as_built_when_something_comes_after_its_build_and_not_when_that_raised():
    built = []
    child = Scripted(READY, begin("build", "a"), END, begin("build", "b"), END, begin("capture", "b"), END, ["done"])
    Watch(QUICK, float("inf"), 1.0, lambda what: None, Phases(), built.append).follow(child, lambda blamed: None)
    assert built == ["b"]


def test_the_time_is_told_by_stage():
    phases = Phases()
    child = Scripted(READY, begin("import"), END, begin("build"), END, ["done"])
    Watch(QUICK, float("inf"), 1.0, lambda what: None, phases).follow(child, lambda blamed: None)
    assert set(phases.seconds) == {f"in a child: {what}" for what in ("start", "import", "build", "gate, and between")}


def test_a_gate_that_has_no_memory_itself_is_nobodys_fault():
    with pytest.raises(NoRoom, match="out of memory: 16 MiB"):
        follow(READY, begin("replay"), END, ["crowded", "16 MiB"])
