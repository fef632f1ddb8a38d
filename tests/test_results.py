"""The plans and samples that are kept in the repository: every one of them is shown, explained and decided again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.planfile import read_plans
from dispatch.samplesfile import SUFFIX, samples_path

RESULTS = Path(__file__).parents[1] / "smoke" / "results"
SAMPLES = sorted(RESULTS.rglob(f"*{SUFFIX}"))
EARLIER = {"cpu/qwen3-8b"}  # measured under a rule whose samples are read no more


def name_of(samples):
    return str(samples.relative_to(RESULTS)).removesuffix(SUFFIX)


def plan_of(samples):
    return samples.with_name(samples.name.removesuffix(SUFFIX) + ".json")


def invoke(*args):
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def test_the_samples_lie_beside_all_the_plans_and_no_other_file():
    plans = [path for path in RESULTS.rglob("*.json") if "plans" in json.loads(path.read_text())]
    assert sorted(map(samples_path, plans)) == SAMPLES
    assert {name_of(samples) for samples in SAMPLES} >= EARLIER | {"h200/qwen3-8b", "h200/vllm/qwen3-8b"}


@pytest.mark.parametrize("samples", SAMPLES, ids=name_of)
def test_a_kept_plan_is_shown_and_explained_with_a_warning_only_where_its_samples_are_an_earlier_rules(samples, caplog):
    (plan,) = read_plans(plan_of(samples))
    box = plan.boxes[len(plan.boxes) // 2].box
    status, out, err = invoke("show", plan_of(samples))
    assert (status, err, str(plan_of(samples)) in out) == (0, "", True)
    longest = -(-box.mean_kv_min * box.skew_min // 1000)
    asked = ["-b", box.bucket, "--kv", box.mean_kv_min, "--max-kv", longest]
    status, out, err = invoke("explain", plan_of(samples), *asked)
    assert (status, err) == (0, "")
    assert f"batch {box.bucket}, mean KV {box.mean_kv_min}, max KV {longest}: {box.candidate}\n" in out
    assert ("microseconds a step" in out) == (name_of(samples) not in EARLIER)
    assert len(caplog.messages) == (2 if name_of(samples) in EARLIER else 0)


@pytest.mark.parametrize("samples", SAMPLES, ids=name_of)
def test_kept_samples_are_decided_again_or_one_line_says_what_they_lack(samples):
    status, out, err = invoke("select", samples)
    if name_of(samples) in EARLIER:
        assert (status, out, err) == (2, "", f"Error: {samples}: runs: rule: tie: missing\n")
    else:
        assert (status, err, "winners" in out) == (0, "", True)
