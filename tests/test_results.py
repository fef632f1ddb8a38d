"""The plans and samples that are kept in the repository: each is shown, explained, and what its samples say today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.conclude import conclude
from dispatch.key import RULE_VERSION
from dispatch.planfile import read_plans
from dispatch.samplesfile import SUFFIX, read_samples, samples_path

RESULTS = Path(__file__).parents[1] / "smoke" / "results"
SAMPLES = sorted(RESULTS.rglob(f"*{SUFFIX}"))
each = pytest.mark.parametrize("samples", SAMPLES, ids=lambda path: str(path.relative_to(RESULTS)).removesuffix(SUFFIX))


def plan_of(samples):
    return samples.with_name(samples.name.removesuffix(SUFFIX) + ".json")


def invoke(*args):
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def test_the_samples_lie_beside_all_the_plans_and_no_other_file():
    plans = [path for path in RESULTS.rglob("*.json") if "plans" in json.loads(path.read_text())]
    assert sorted(map(samples_path, plans)) == SAMPLES
    assert {"cpu", "h200", "vllm"} <= {samples.parent.name for samples in SAMPLES}


@each
def test_a_kept_plan_is_what_todays_rule_makes_of_its_samples(samples):
    (plan,), (found,) = read_plans(plan_of(samples)), read_samples(samples)
    assert plan.key["rule_version"] == RULE_VERSION
    assert plan.boxes == conclude(found, {}).boxes


@each
def test_a_kept_plan_is_shown_and_explained(samples):
    (plan,) = read_plans(plan_of(samples))
    box = plan.boxes[len(plan.boxes) // 2].box
    status, out, err = invoke("show", plan_of(samples))
    assert (status, err, str(plan_of(samples)) in out) == (0, "", True)
    longest = -(-box.mean_kv_min * box.skew_min // 1000)
    asked = ["-b", box.bucket, "--kv", box.mean_kv_min, "--max-kv", longest]
    status, out, err = invoke("explain", plan_of(samples), *asked)
    assert (status, err) == (0, "")
    assert f"batch {box.bucket}, mean KV {box.mean_kv_min}, max KV {longest}: {box.candidate}\n" in out
    assert "microseconds a step" in out and "decided otherwise" not in out


@each
def test_kept_samples_are_decided_again(samples):
    status, out, err = invoke("select", samples)
    assert (status, err, "winners" in out) == (0, "", True)
