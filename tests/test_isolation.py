"""Candidates are tried in real child processes: whatever they do to one, the tuner goes on."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dispatch.isolation.trial
import dispatch.tuner
from dispatch.backends import Registry
from dispatch.backends.torch_chunked import TorchChunked
from dispatch.backends.torch_sdpa import TorchSdpa
from dispatch.bench import faulty
from dispatch.bench.faults import FAULTS
from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.device import current_device
from dispatch.errors import MeasureError
from dispatch.isolation.limits import Limits
from dispatch.isolation.process import Child
from dispatch.isolation.quarantine import Quarantine
from dispatch.isolation.trial import NONE_LEFT
from dispatch.obtain import obtain_plan
from dispatch.plan import TIME_BUDGET_OVER
from dispatch.request import TuneRequest
from dispatch.store import Store
from dispatch.tuner import tune
from tests import rude
from tests.fakes import backend, spec_of

ROOT = Path(dispatch.__file__).parents[1]
# A sound backend takes milliseconds; a busy machine may take a second.
PATIENT = Limits(import_s=4.0, first_s=4.0, replay_s=4.0)
NAMES = {fault: fault.replace(" ", "_").replace(",", "") for fault in FAULTS}
# How each ends, by what the fault is.
EXPECTED = {
    "sleeps in build": "build at batch 1: hung: no end of it within 4 s",
    "hangs": "replay at batch 1: hung: no end of it within 4 s",
    "raises in build": "build at batch 1: RuntimeError: Ninja build failed. Ninja output:",
    "raises": "replay at batch 1: random: RuntimeError: no kernel for these sizes",
    "segfaults": "replay at batch 1: killed by SIGSEGV",
    "aborts": "replay at batch 1: killed by SIGABRT",
    "ends the process": "replay at batch 1: ended its process with status 127",
    "raises SystemExit": "replay at batch 1: SystemExit: giving up",
    "exhausts memory": "build at batch 1: out of memory: RuntimeError: ",
    "illegal access": "replay at batch 1: random: IndexError: index 1099511627776 is out of bounds",
    "wrong numbers": "numbers at batch 1: random: row 0 of length 64, head 3: relative error 0.05",
    "writes out of bounds": "numbers at batch 1: random: memory around the output was written to",
    "leaves rows unwritten": "numbers at batch 1: random: row 0 of length 64, head 0: NaN, or not written",
    "differs between runs": "numbers at batch 1: random: row 0 of length ",
    "wrong, forges reports": "numbers at batch 1: random: row 0 of length 64, head 3: relative error 0.05",
}


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    monkeypatch.setattr("dispatch.bench.harness.WARM_UP_S", 0.0)


def registry_with(**classes):
    registry = Registry()
    for name, cls in classes.items():
        registry.register(name, lambda cls=cls: cls)
    return registry


def request(buckets=(1, 2), **config):
    return TuneRequest(spec_of(), buckets, 64, 256, DispatchConfig(**config))


def tuned(quarantine=None, ask=None, limits=PATIENT, left_s=None, **classes):
    registry = registry_with(**{"steady": TorchChunked, **classes})
    return tune(ask or request(), current_device("cpu"), registry, quarantine=quarantine, limits=limits, left_s=left_s)


def measured(samples):
    return {bucket.bucket: {name.partition("[")[0] for name in bucket.candidates[2:]} for bucket in samples.buckets}


@pytest.fixture
def children(monkeypatch):
    """The tasks of the children that are started."""
    tasks = []

    def start(task, log):
        tasks.append(task)
        return Child(task, log)

    monkeypatch.setattr(dispatch.isolation.trial, "Child", start)
    return tasks


@pytest.fixture(scope="module")
def all_faults(tmp_path_factory):
    """One run with every fault there is beside two sound backends, and what it has put into quarantine."""
    ask = request()
    registry = registry_with(
        steady=TorchChunked, **{NAMES[fault]: cls for fault, cls in FAULTS.items()}, other=TorchSdpa
    )
    key = ask.key(current_device("cpu"), registry, "steady")
    plan_path = tmp_path_factory.mktemp("store") / "plan.json"
    quarantine = Quarantine(plan_path, key)
    plan, samples = tune(ask, current_device("cpu"), registry, quarantine=quarantine, limits=PATIENT)
    return plan, samples, plan_path, key, registry


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_candidate_and_says_what_it_did_and_where(all_faults, fault):
    plan = all_faults[0]
    assert plan.refused[NAMES[fault]].startswith(f"quarantined: {EXPECTED[fault]}")


def test_the_sound_candidates_beside_all_the_faults_are_measured_in_every_bucket(all_faults):
    plan, samples, *_ = all_faults
    assert measured(samples) == {1: {"steady", "other"}, 2: {"steady", "other"}}
    assert plan.unmeasured == {}


def test_the_next_run_tries_nothing_that_is_in_quarantine(all_faults, children):
    plan, _, path, key, registry = all_faults
    again, _ = tune(request(), current_device("cpu"), registry, quarantine=Quarantine(path, key), limits=PATIENT)
    assert again.refused == plan.refused
    assert [set(task.backends) for task in children] == [{"steady", "other"}]


def test_what_candidates_print_and_where_they_failed_is_in_a_log_beside_the_plan(all_faults):
    log = all_faults[2].with_suffix(".log").read_bytes()
    assert b'\xff\x00\n["proven", 1]\n["done"]\n' in log
    assert b"RuntimeError: Ninja build failed. Ninja output:\n[1/3] ..." in log
    assert b"Fatal Python error: Segmentation fault" in log


def test_no_core_file_and_no_process_is_left_behind(all_faults):
    assert _children_of(os.getpid()) == []
    assert list(Path.cwd().glob("core*")) == []


def test_a_default_that_kills_its_process_stays_and_nothing_is_decided_against_it(children, caplog, tmp_path):
    ask = request()
    classes = {"steady": faulty.Segfaults, "other": TorchSdpa}
    quarantine = Quarantine(tmp_path / "plan.json", ask.key(current_device("cpu"), registry_with(**classes), "steady"))
    plan, samples = tuned(quarantine, ask, **classes)
    why = "failed while it was built or measured: the default steady: quarantined: replay at batch 1: killed by SIGSEGV"
    assert (plan.default, plan.boxes, samples.buckets) == ("steady", (), ())
    assert plan.unmeasured == {1: why, 2: why}
    assert not plan.is_partial
    assert "every bucket keeps the default steady, which failed in a child process" in caplog.text
    again, _ = tuned(quarantine, ask, **classes)
    assert again.unmeasured == plan.unmeasured
    assert len(children) == 1


def test_a_default_that_raises_is_tried_again_by_the_next_run():
    quarantine = Quarantine()
    plan, _ = tuned(quarantine, steady=faulty.RaisesInBuild, other=TorchSdpa)
    assert plan.unmeasured[1].startswith("failed, to be tried again: the default steady: build: RuntimeError: Ninja")
    assert plan.is_partial
    assert list(quarantine) == []


def test_a_default_with_wrong_numbers_is_said_so():
    plan, _ = tuned(steady=faulty.WrongNumbers, other=TorchSdpa)
    assert plan.unmeasured[2].startswith("wrong numbers: the default steady: quarantined: numbers at batch 1: random: ")


@pytest.mark.parametrize("cls", [rude.OnlyLargeFails, rude.CrashesInLarge])
def test_what_fails_in_one_bucket_is_out_of_all_of_them_and_those_proven_before_are_not_proven_again(cls, children):
    plan, samples = tuned(faulty=cls, other=TorchSdpa)
    assert "at batch 2: " in plan.refused["faulty"]
    assert measured(samples) == {1: {"steady", "other"}, 2: {"steady", "other"}}
    crashed = cls is rude.CrashesInLarge
    assert [[w.bucket for w in task.work] for task in children] == [[1, 2], [2]][: 1 + crashed]


def test_where_all_others_are_refused_there_is_nothing_to_measure():
    plan, samples = tuned(steady=TorchSdpa, faulty=faulty.Raises)
    assert plan.unmeasured == {1: NONE_LEFT, 2: NONE_LEFT}
    assert samples.buckets == ()


def test_buckets_measured_before_lose_a_candidate_that_fails_now():
    ask = request(isolation="none")
    _, before = tuned(None, ask, faulty=faulty.Faulty, other=TorchSdpa)
    assert measured(before)[1] == {"steady", "faulty", "other"}
    registry = registry_with(steady=TorchChunked, faulty=faulty.Faulty, other=TorchSdpa)
    quarantine = Quarantine()
    quarantine.add("faulty", 1, "replay", Reason.FAILED, "killed by SIGSEGV")
    plan, _ = tune(ask, current_device("cpu"), registry, stored=before, quarantine=quarantine)
    assert {(e.bucket, e.candidate, e.detail) for e in plan.excluded} == {
        (bucket, "faulty", "quarantined: replay at batch 1: killed by SIGSEGV") for bucket in (1, 2)
    }
    assert "faulty" not in {box.box.candidate for box in plan.boxes}


def test_a_stored_plan_is_used_without_a_child_and_so_is_the_tuner_where_isolation_is_off(children, tmp_path):
    registry, device, store = (
        registry_with(steady=TorchChunked, other=TorchSdpa),
        current_device("cpu"),
        Store(tmp_path),
    )
    obtain_plan(request(isolation="none"), device, registry, store)
    assert children == []
    assert obtain_plan(request(), device, registry, store).source.startswith("read from the store")
    assert children == []
    assert obtain_plan(request(), device, registry, store, force=True).source.startswith("measured in")
    assert len(children) == 1


def test_a_candidate_that_hangs_costs_no_more_than_the_time_budget_and_its_compilers_end_with_it(monkeypatch):
    seconds = f"1009.{os.getpid()}"  # no other process has these
    monkeypatch.setenv("RUDE_SLEEP", seconds)
    start = time.monotonic()
    plan, _ = tuned(ask=request(time_budget_s=5.0), limits=Limits(), hangs=rude.LeavesCompilersBehind, other=TorchSdpa)
    assert time.monotonic() - start < 30
    assert plan.unmeasured == {1: TIME_BUDGET_OVER, 2: TIME_BUDGET_OVER}
    assert all(seconds.encode() not in line for line in _command_lines())


def test_a_candidate_that_is_cut_as_others_have_had_the_time_is_not_to_blame_and_is_tried_again(tmp_path):
    quarantine = Quarantine(tmp_path / "plan.json", {})
    plan, _ = tuned(quarantine, request(time_budget_s=60.0), Limits(), left_s=5.0, hangs=faulty.SleepsInBuild)
    assert plan.unmeasured == {1: TIME_BUDGET_OVER, 2: TIME_BUDGET_OVER}
    assert list(quarantine) == []


def _command_lines():
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            yield Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue


TUNER = """
from tests.test_isolation import TorchChunked, current_device, faulty, registry_with, request, tune
registry = registry_with(steady=TorchChunked, hangs=faulty.SleepsInBuild)
tune(request(), current_device("cpu"), registry, lambda done, total, what: print(what, flush=True))
"""


def test_a_tuner_that_is_killed_takes_its_child_along():
    with subprocess.Popen([sys.executable, "-c", TUNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tuner:
        while "hangs in a child process, batch 1: build" not in tuner.stdout.readline():
            pass
        child = _children_of(tuner.pid)
        tuner.kill()
    assert len(child) == 1
    assert _await(lambda: not Path(f"/proc/{child[0]}").exists())


def _children_of(parent):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(stat.parent.name)
        except OSError:  # it has ended meanwhile
            continue
    return found


def _await(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def test_after_tuning_the_process_is_as_it_was(monkeypatch):
    monkeypatch.setattr(faulty.Hangs, "before", lambda self, out: None)  # sound in this process, and not in the child
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = _state()
    tuned(hangs=faulty.Hangs, crashes=faulty.Segfaults, other=TorchSdpa, limits=Limits(replay_s=2.0))
    assert _state() == before


def _state():
    gc.collect()
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "search path": list(sys.path),
        "files": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's": str(np.random.get_state()),
        "python's": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "torch's threads": torch.get_num_threads(),
        "signals": [signal.getsignal(s) for s in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)],
    }


def test_a_backend_is_found_where_this_process_finds_it_whatever_lies_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    for name in ("dispatch", "torch", "json"):
        (tmp_path / "here" / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    (tmp_path / "odd place").mkdir()
    (tmp_path / "odd place" / "odd_backend.py").write_text(
        "from dispatch.bench.faulty import Faulty as Odd\n\nclass B(Odd): pass"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "odd place"))
    monkeypatch.chdir(tmp_path / "here")
    import odd_backend

    plan, samples = tuned(odd=odd_backend.B)
    assert measured(samples)[1] == {"steady", "odd"}
    assert plan.refused == {}


def test_a_class_that_a_child_cannot_import_is_refused_with_the_reason_and_can_be_fixed():
    local = backend("local")
    plan, samples = tuned(local=local, renamed=rude.NeverImported, other=TorchSdpa)
    assert plan.refused["local"].startswith(
        "a child process cannot import backend.<locals>.Fake, which is defined within a"
    )
    assert (
        "cannot be imported: AttributeError: module 'tests.rude' has no attribute 'Elsewhere'"
        in plan.refused["renamed"]
    )
    assert measured(samples)[1] == {"steady", "other"}


def test_a_program_without_the_memory_for_a_child_keeps_its_default(monkeypatch):
    monkeypatch.setattr(dispatch.isolation.trial, "available_bytes", lambda device: 1535 << 20)
    with pytest.raises(MeasureError, match="1535 MiB are free, and trying candidates in a child process may take 1536"):
        tuned(other=TorchSdpa)


def test_a_program_without_a_python_to_start_keeps_its_default(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(MeasureError, match="no child process can be started: "):
        tuned(other=TorchSdpa)


def test_a_child_that_ends_before_it_is_ready_is_nobodys_fault(monkeypatch):
    monkeypatch.setattr("dispatch.isolation.process.PROGRAM", "raise SystemExit(3) # {path!r}")
    quarantine = Quarantine()
    with pytest.raises(MeasureError, match="ended its process with status 3 before it was ready"):
        tuned(quarantine, other=TorchSdpa)
    assert list(quarantine) == []


def test_who_waits_is_told_which_candidate_is_built(monkeypatch, caplog):
    said = []
    registry = registry_with(steady=TorchChunked, other=TorchSdpa)
    tune(request(), current_device("cpu"), registry, lambda done, total, what: said.append((done, total, what)))
    assert (0, said[-1][1], "other in a child process, batch 2: build") in said


def test_where_rows_do_not_fit_after_all_shorter_ones_are_tried_and_nobody_is_blamed(monkeypatch, children):
    """Less than what the gate holds is foretold: 32,768 tokens of 256 bytes each, some ten times."""
    monkeypatch.setattr("dispatch.isolation.task.SPARE", 0.4)
    monkeypatch.setattr("dispatch.isolation.task.MOST_LONGEST", 1 << 15)
    monkeypatch.setattr(dispatch.isolation.trial, "CHILD_BYTES", 24 << 20)
    long, quarantine = replace(request((1,)), max_seq_len=1 << 15, capacity=1 << 15), Quarantine()
    plan, samples = tuned(quarantine, ask=long, other=TorchSdpa)
    assert len(children) > 1
    assert (list(quarantine), plan.refused) == ([], {})
    assert measured(samples)[1] == {"steady", "other"}


def test_while_a_child_tries_a_backend_its_library_is_imported_here(monkeypatch):
    monkeypatch.setattr(TorchSdpa, "library", "colorsys")  # of the standard library, and nobody's here
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    tuned(other=TorchSdpa)
    assert "colorsys" in sys.modules
