"""What failed in a child process stays out, until somebody asks for another try; a damaged file never does harm."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dispatch.decision import Reason
from dispatch.isolation.quarantine import Quarantine
from tests.make import make_key, paths, put_at

KEY = make_key()


@pytest.fixture
def plan(tmp_path):
    return tmp_path / "plans" / "abc.json"


@pytest.fixture
def held(plan):
    quarantine = Quarantine(plan, KEY)
    quarantine.add("torch_chunked", 8, "replay", Reason.FAILED, "killed by SIGSEGV")
    quarantine.add("torch_sdpa[splits=4]", 0, "import", Reason.GATE_FAILED, "row 3")
    return quarantine


def test_it_is_read_back_as_it_was_written(held, plan):
    assert list(Quarantine(plan, KEY)) == list(held)
    assert held.get("torch_chunked").describe() == "quarantined: replay at batch 8: killed by SIGSEGV"
    assert held.get("torch_sdpa[splits=4]").describe() == "quarantined: import: row 3"


def test_what_holds_for_a_backend_holds_for_its_tactics_and_not_the_other_way_round(held):
    assert held.get("torch_chunked[chunk=512]").candidate == "torch_chunked"
    assert held.get("torch_sdpa") is None
    assert held.get("torch_sdpa[splits=2]") is None


def test_the_default_is_no_refusal_since_it_serves_all_the_same(held):
    assert set(held.refusals("torch_chunked")) == {"torch_sdpa[splits=4]"}


def test_cleared_it_is_gone_from_the_disk_as_well(held, plan):
    assert held.clear() == ("torch_chunked", "torch_sdpa[splits=4]")
    assert list(held) == list(Quarantine(plan, KEY)) == []
    assert Quarantine(plan, KEY).clear() == ()


def test_it_lies_beside_the_plan_and_is_no_plan_file(held, plan):
    assert [path.name for path in plan.parent.iterdir()] == ["abc.quarantine"]


def test_a_file_cut_anywhere_counts_as_empty_with_one_warning_and_is_set_aside(held, plan, caplog):
    content = held.path.read_bytes()
    for end in range(0, len(content) - 1, 7):
        caplog.clear()
        held.path.write_bytes(content[:end])
        with caplog.at_level(logging.WARNING):
            assert list(Quarantine(plan, KEY)) == []
        assert len(caplog.records) == 1
        assert "set aside" in caplog.text
        assert not held.path.exists()


def test_no_value_in_it_can_be_replaced_unnoticed(held, plan, caplog):
    body = json.loads(held.path.read_bytes())
    for at in paths(body):
        held.path.write_text(json.dumps(put_at(body, at, {"x": [1]})))
        assert list(Quarantine(plan, KEY)) == []


def test_one_for_another_key_is_not_used(held, plan, caplog):
    assert list(Quarantine(plan, make_key(max_seq_len=8192))) == []
    assert "max_seq_len: the plan has 4096, here it is 8192" in caplog.text


def test_one_that_cannot_be_written_holds_in_this_process_with_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    quarantine = Quarantine(tmp_path / "file" / "abc.json", KEY)
    quarantine.add("torch_chunked", 1, "build", Reason.FAILED, "hung")
    assert quarantine.get("torch_chunked") is not None
    assert "the quarantine was not stored" in caplog.text


def test_without_a_plan_it_is_in_memory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quarantine = Quarantine()
    quarantine.add("torch_chunked", 1, "build", Reason.FAILED, "hung")
    assert (quarantine.clear(), list(Path.cwd().iterdir())) == (("torch_chunked",), [])
