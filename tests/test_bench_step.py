"""bench step: what it times is what the runner does, and its numbers are those that it prints."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dispatch.bench import step as bench_step
from dispatch.bench.step import step_cost
from dispatch.cli import main
from tests.fakes import CPU, backend, registry_of, spec_of


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench_step, "REPEATS", 5)


def test_every_backend_that_serves_the_layer_plans_once_a_step_and_once_before():
    a, b = backend("a"), backend("b", build_error=None)
    cost = step_cost(spec_of(), 4, CPU, registry_of(a, b))
    assert set(cost.plan_us) == {"a", "b"}
    assert [impl.calls.count("plan") for impl in (*a.built, *b.built)] == [6, 6]
    assert min(cost.refresh_us, cost.choose_us, *cost.plan_us.values()) > 0


def test_the_command_prints_what_it_measured():
    done = CliRunner().invoke(main, ["bench", "step", "--batch", "4", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["batch"]) == (0, 4)
    assert {"refresh_us", "choose_us", "plan_us", "device"} <= set(found)
