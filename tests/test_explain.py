"""`explain` and `show`, on plans of samples that are made up."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.decision import Reason
from dispatch.plan import Excluded
from dispatch.planfile import write_plans
from dispatch.samplesfile import samples_path, write_samples
from tests.make import make_plan, make_samples


def invoke(*args):
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def put(folder, plan, samples=None):
    """A plan file, and its samples beside it."""
    path = folder / "plan.json"
    write_plans(path, [plan])
    if samples is not None:
        write_samples(samples_path(path), [samples])
    return path


ASKED = [["show"], ["explain", "-b", 1, "--kv", 128]]


@pytest.mark.parametrize("command", ASKED, ids=["show", "explain"])
def test_a_plan_whose_samples_cannot_be_read_is_shown_with_one_warning(tmp_path, caplog, command):
    path = put(tmp_path, make_plan())
    samples_path(path).write_bytes(b"not samples")
    out = invoke(command[0], path, *command[1:])
    assert "torch_chunked" in out
    (warning,) = caplog.messages
    assert warning.startswith(f"the plan is taken without its samples: {samples_path(path)}: ")
    assert json.loads(invoke(command[0], path, *command[1:], "--json"))["path"] == str(path)


def test_without_samples_explain_says_what_is_in_the_plan(tmp_path):
    out_here = Excluded(1, "torch_chunked[chunk=512]", Reason.GATE_FAILED, "NaN at row 0")
    elsewhere = Excluded(8, "torch_chunked[chunk=64]", Reason.FAILED, "killed")
    out = invoke("explain", put(tmp_path, make_plan(excluded=(out_here, elsewhere))), "-b", 1, "--kv", 128)
    assert "rule: fastest; " in out
    assert "without its samples beside the plan, what the others lost by cannot be told" in out
    assert "refused: flashinfer_xqa: needs a GPU" in out
    assert "excluded at batch 1: torch_chunked[chunk=512]: wrong numbers: NaN at row 0" in out
    assert "chunk=64" not in out


def test_what_was_refused_is_told_beside_the_verdicts_too(tmp_path):
    samples = make_samples()
    out = invoke("explain", put(tmp_path, make_plan(samples), samples), "-b", 1, "--kv", 128)
    assert "paired by round" in out
    assert "refused: flashinfer_xqa: needs a GPU" in out
