"""Ranks of an engine: all of them use the plan or none, whatever is wrong on one; and none waits in vain.

The cases are in rank_cases.py; each runs in processes of its own (rank_process.py), which talk over gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from dispatch.engine.agree import difference
from dispatch.engine.ranks import ALONE

LIMIT_S = 10.0  # of a case, from its first call to the other ranks
PATIENCE_S = 40.0  # for a set of processes on a busy machine
BOTH = (2, 4)
LATE = "late"


class Launcher:
    """Starts sets of ranks. Several may run at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_process"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            text=True,
        )

    def start(self, case: str, world: int) -> None:
        folder = self.folder / f"{case}-{world}"
        folder.mkdir()
        self.started[case, world] = folder / "result.json"
        self.process.stdin.write(json.dumps({"case": case, "world": world, "folder": str(folder)}) + "\n")
        self.process.stdin.flush()

    def run(self, case: str, world: int) -> list[dict]:
        """The reports of the ranks."""
        if (case, world) not in self.started:
            self.start(case, world)
        result, end = self.started[case, world], time.monotonic() + PATIENCE_S
        while not result.exists():
            assert time.monotonic() < end and self.process.poll() is None, f"{case}: no result"
            time.sleep(0.01)
        return json.loads(result.read_text())


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("ranks"))
    yield launcher
    launcher.process.stdin.close()
    launcher.process.wait()


@pytest.fixture(scope="module")
def run(launcher, request):
    """Runs a case. The one that takes long because a rank is late goes on beside the others, if it is asked for."""
    if any(LATE in item.name for item in request.session.items):
        for world in BOTH:
            launcher.start(LATE, world)
    return launcher.run


def served(run, case, world):
    """The reports of ranks that have all served, in step."""
    reports = run(case, world)
    assert [(r["status"], r["error"]) for r in reports] == [(0, "")] * world, reports
    for report in reports[1:]:
        assert report["at"] == reports[0]["at"]  # the same calls in the same order
        assert report["sums"] == reports[0]["sums"]  # and as many steps of the engine
        for same in ("dropped", "hits", "misses"):
            assert report[same] == reports[0][same]
    assert all(all(report["right"]) for report in reports)
    assert max(report["seconds"] for report in reports) < LIMIT_S
    return reports


# --- the plan is the leader's


@pytest.mark.parametrize("world", BOTH)
@pytest.mark.parametrize("case", ["warm", "corrupt", LATE])
def test_a_plan_that_the_leader_has_serves_on_all_ranks_and_the_others_read_no_store(run, case, world):
    reports = served(run, case, world)
    assert [r["tuned"] for r in reports] == [0] * world
    assert all(r["why"] == [""] and r["hits"] == {"2 b": 3, "4 b": 1} and r["log"] == [] for r in reports)
    others = [len(r["files"]) for r in reports[1:]]
    assert others == [0] * (world - 2) + [1 if case == "corrupt" else 0]  # which was not even set aside


@pytest.mark.parametrize("world", BOTH)
@pytest.mark.parametrize("case", ["cold", "warm_elsewhere", "corrupt_leader"])
def test_where_the_leader_has_no_plan_it_alone_tunes_and_its_plan_serves_on_all_ranks(run, case, world):
    reports = served(run, case, world)
    assert [r["tuned"] for r in reports] == [1] + [0] * (world - 1)
    assert all(r["why"] == [""] and r["hits"] == {"2 b": 2, "4 b": 1} for r in reports)  # [5] is in no measured box
    assert any(".json" in name for name in reports[0]["files"])
    assert any(".bad-" in name for name in reports[0]["files"]) == (case == "corrupt_leader")


@pytest.mark.parametrize("world", BOTH)
def test_replicas_on_one_host_tune_once_and_all_read_that_plan(run, world):
    """Two single ranks, or two pairs."""
    reports = served(run, "replicas", world)
    assert sum(r["tuned"] for r in reports) == 1
    assert all(r["why"] == [""] and r["hits"] == {"2 b": 2, "4 b": 1} for r in reports)


# --- all use the default


APART = {
    "another_version": f"the ranks differ: on rank {{last}} backends.b is '0.0.1', and '{version('torch')}' on rank 0",
    "another_registry": f"the ranks differ: on rank {{last}} backends.b is 'nothing', and '{version('torch')}' on rank",
    "another_gpu": "the ranks differ: on rank {last} device.name is 'another', and '",
    "refusing": "the ranks differ: on rank {last} eligible.0 is ['a'], and ['a', 'b'] on rank 0",
    "raises_in_choosing": "the ranks differ: on rank {last} refusal is 'RuntimeError: no key', and '' on rank 0",
    "raises_in_reading": "rank {last}: RuntimeError: unreadable",
    "raises_in_tuning_leader": "rank 0: RuntimeError: no luck",
}
APART_IN_BOTH = ("another_version", "raises_in_choosing", "raises_in_tuning_leader")


@pytest.mark.parametrize(("case", "world"), [(c, w) for c in APART for w in (BOTH if c in APART_IN_BOTH else (2,))])
def test_where_one_rank_differs_or_raises_all_use_the_default_and_the_log_of_each_says_why(run, case, world):
    reports = served(run, case, world)
    why = reports[0]["why"][0]
    assert why.startswith(APART[case].format(last=world - 1))
    for report in reports:
        assert (report["why"], report["hits"], report["dropped"]) == ([why], {}, {})
        assert len(report["log"]) == 1 and report["log"][0].endswith(f" serves every step: {why}")


def test_a_rank_that_is_switched_off_has_the_others_use_the_default(run):
    on, off = served(run, "switched_off", 2)
    assert on["why"] == ["the ranks differ: on rank 1 refusal is 'switched off', and '' on rank 0"]
    assert off["why"] == ["switched off"]
    assert on["log"] == off["log"] == [f"the default serves every step: {on['why'][0]}"]


# --- a variant is used on all ranks or on none


DROPPED = {
    "raises_in_reserving": "ZeroDivisionError: division by zero",
    "raises_in_building": "MemoryError: no room",
    "raises_in_planning": "RuntimeError: no plan",
    "raises_in_attending": "RuntimeError: no kernel image",
    "raises_in_capturing": "RuntimeError: not permitted when capturing",
    "raises_in_checking": "ZeroDivisionError: division by zero",
    "wrong_output": "another output than the default's: with a row of length 7: row 0 is off by 0.5, allowed 0.1",
}
DROPPED_IN_BOTH = ("raises_in_building", "raises_in_checking")


@pytest.mark.parametrize(("case", "world"), [(c, w) for c in DROPPED for w in (BOTH if c in DROPPED_IN_BOTH else (2,))])
def test_a_variant_that_fails_on_one_rank_is_used_on_none(run, case, world):
    for report in served(run, case, world):
        assert report["dropped"] == {f"{bucket} b": f"rank {world - 1}: {DROPPED[case]}" for bucket in (2, 4)}
        assert report["why"] == [""] and report["hits"] == {}


def test_when_the_capture_budget_ends_on_one_rank_all_stop_at_the_same_variant(run):
    for report in served(run, "budget_ended", 2):
        assert report["dropped"] == {"2 b": "rank 1: the capture budget has ended"}
        assert report["hits"] == {"4 b": 1}


def test_a_default_whose_graph_is_not_captured_on_one_rank_runs_eagerly_on_all(run):
    why = "rank 1: RuntimeError: not permitted when capturing"
    for report in served(run, "default_not_captured", 2):
        assert report["dropped"] == {"2 default": why, "4 default": why}
        assert f"bucket 4: the default's graph is not used, it runs eagerly: {why}" in report["log"]


def test_a_variant_that_no_rank_can_plan_in_a_step_is_dropped_by_all_in_that_step(run):
    for report in served(run, "cannot_plan", 2):
        assert report["misses"] == {
            "2 b could not plan: RuntimeError: Buffer overflow": 1,
            "2 b is planned and not available": 2,
        }


# --- what the ranks cannot go on from


ENDS = {  # what the last rank raises, and the others; None: the last rank is gone
    "default_not_built": ("MemoryError: no room", "RanksError: rank {last} has given up: MemoryError: no room"),
    "no_default": (
        "ConfigError: --default a: it is Fr",
        "RanksError: rank {last} has given up: ConfigError: --default a",
    ),
    "engine_step_raises": ("ZeroDivisionError: a mistake of the engine", "RuntimeError: "),  # of the engine's own call
    "elsewhere": (
        "RanksError: rank 0 is elsewhere (bucket 4: the default is built), and rank {last} here: bucket 8",
        "RanksError: rank {last} is elsewhere (bucket 8: the default is built), and rank 0 here: bucket 4",
    ),
    "cannot_plan_alone": ("RanksError: rank 0 did not come within 0.5 s: bucket 2: b could not plan", "RuntimeError: "),
    "never_comes": (None, "RanksError: rank {last} did not come within 0.5 s: what each rank is"),
    "dies_before": (None, "RanksError: rank {last} is gone: what each rank is"),
    "dies_in_building": (None, "RanksError: rank {last} is gone: bucket 4: b is built"),
    "dies_in_checking": (None, "RanksError: rank {last} is gone: bucket 4: "),
}
ENDS_IN_BOTH = ("default_not_built", "dies_before", "dies_in_building")


@pytest.mark.parametrize(("case", "world"), [(c, w) for c in ENDS for w in (BOTH if c in ENDS_IN_BOTH else (2,))])
def test_where_a_rank_is_gone_or_gives_up_the_others_end_and_say_which(run, case, world):
    *others, last = run(case, world)
    of_last, of_others = ENDS[case]
    if of_last is None:
        assert last["status"] == 9
    else:
        assert last["status"] == 1 and last["error"].startswith(of_last.format(last=world - 1)), last
    for report in others:
        assert report["status"] == 1, report
        assert report["error"].startswith(of_others.format(last=world - 1)), report
        assert report["seconds"] < LIMIT_S


def test_where_the_leader_dies_while_it_tunes_the_others_end(run):
    leader, *others = run("dies_in_tuning_leader", 2)
    assert leader["status"] == 9
    assert [(r["status"], r["error"]) for r in others] == [(1, "RanksError: rank 0 is gone: layer group 0: the plan")]


# --- differences, without processes


class Told:
    """Ranks that have shared these facts."""

    def __init__(self, *facts):
        self.facts = facts

    def share(self, at, mine):
        return list(self.facts)


def test_ranks_that_are_alike_do_not_differ_and_one_rank_never_does():
    facts = {"refusal": "", "backends": {"a": "1"}}
    assert difference(Told(facts, dict(facts)), facts) == ""
    assert difference(ALONE, facts) == ""


def test_every_rank_that_differs_is_named_with_at_most_five_fields():
    facts = {"refusal": "", "spec": {"0": dict.fromkeys("abcdefg", 1)}}
    most = {"refusal": "", "spec": {"0": dict.fromkeys("abcdefg", 2)}}
    one = {"refusal": "", "spec": {"0": {**dict.fromkeys("abcdefg", 1), "c": 3}}}
    shown = "; ".join(f"spec.0.{name} is 2, and 1 on rank 0" for name in "abcde")
    expected = f"the ranks differ: on rank 1 {shown}; and 2 more; on rank 3 spec.0.c is 3, and 1 on rank 0"
    assert difference(Told(facts, most, facts, one), facts) == expected
