"""What several layer groups cost an engine's start: one time budget in all, and one plan for those that are alike."""

from __future__ import annotations

import pytest

import dispatch.engine.choose
from dispatch.config import DispatchConfig
from dispatch.errors import MeasureError
from tests.engine import Engine
from tests.fakes import backend, registry_of, spec_of

BUDGET_S, TOOK_S = 100.0, 60.0


@pytest.fixture
def asked(monkeypatch):
    """(window, time budget) of each plan that is asked for; each takes `TOOK_S`."""
    asked, clock = [], [0.0]

    def obtain_plan(request, *args, left_s):
        assert request.config.time_budget_s == BUDGET_S  # by which it is judged what took too much of it
        asked.append((request.spec.sliding_window, left_s))
        clock[0] += TOOK_S
        raise MeasureError("not today")

    monkeypatch.setattr(dispatch.engine.choose, "obtain_plan", obtain_plan)
    monkeypatch.setattr(dispatch.engine.choose, "monotonic", lambda: clock[0])
    return asked


def start(tmp_path, *specs):
    config = DispatchConfig(enabled=True, cache_dir=tmp_path, isolation="none", time_budget_s=BUDGET_S)
    runner = Engine(*specs).runner(None, config=config, backends=registry_of(backend("a"), backend("b")))
    return runner.trigger_init_capture()


def test_groups_share_one_time_budget_and_one_that_comes_too_late_may_still_have_a_stored_plan(tmp_path, asked):
    start(tmp_path, spec_of(), spec_of(sliding_window=10), spec_of(sliding_window=20))
    assert asked == [(None, BUDGET_S), (10, BUDGET_S - TOOK_S), (20, 0.0)]


def test_groups_that_are_alike_have_one_plan(tmp_path, asked):
    report = start(tmp_path, spec_of(), spec_of(sliding_window=10), spec_of(), spec_of(sliding_window=10))
    assert [window for window, _ in asked] == [None, 10]
    assert report.why_default == ["not today"] * 4
