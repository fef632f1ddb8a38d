"""Whether tuning again decides the same: which choices count as other ones, what they cost, and real runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import dispatch.bench.stability_run
from dispatch.bench.stability import Run, stability
from dispatch.bench.stability_run import Stable, run_stability
from dispatch.cli import main
from dispatch.decision import Reason
from dispatch.errors import MeasureError
from dispatch.plan import DecidedBox
from dispatch.samples import Box, Cell
from tests.make import TINY, make_plan, make_samples

CELLS = (Cell(128, 128, "equal"), Cell(1024, 1024, "equal"))
DEFAULT, OTHER = "torch_sdpa", "torch_chunked"


def run_of(*choices, buckets=(8,), layer_us=None):
    """A run whose plan serves each of CELLS, in every bucket, with one of `choices`; None: with no box."""
    layer_us = layer_us or {DEFAULT: (10, 40), OTHER: (8, 50)}
    samples = make_samples(layer_us, cells=CELLS, buckets=buckets, noise=0.0)
    boxes = [
        DecidedBox(Box(bucket, cell.mean_kv, cell.mean_kv, 1000, 1000, choice), Reason.FASTEST, 1.0)
        for bucket in buckets
        for cell, choice in zip(CELLS, choices, strict=True)
        if choice is not None
    ]
    return Run(make_plan(samples, boxes=tuple(boxes)), samples)


def test_runs_that_serve_every_cell_alike_are_stable_however_they_came_to_it():
    found = stability([run_of(DEFAULT, OTHER), run_of(None, OTHER)])  # without a box, the default serves
    assert (found.buckets, found.cells, found.flips) == (1, 2, ())
    assert (found.share_of_buckets, found.share_of_cells, found.cheap) == (0.0, 0.0, True)


def test_a_cell_that_a_run_serves_otherwise_than_most_is_a_flip_with_its_cost():
    usual = run_of(OTHER, DEFAULT, buckets=(1, 8))
    odd = run_of(OTHER, OTHER, buckets=(1, 8))
    odd = replace_boxes(odd, lambda box: box.bucket == 8, usual)
    found = stability([usual, odd, usual, odd, usual])
    flip, again = found.flips
    assert again == replace(flip, run=3)
    assert (flip.bucket, flip.cell, flip.run, flip.choice, flip.majority) == (8, CELLS[1], 1, OTHER, DEFAULT)
    # steps of 4 layers and 1 us of begin_step: 201 us against 161
    assert flip.cost == pytest.approx(math.log(201 / 161))
    assert found.share_of_buckets == 2 / 10  # of 5 runs with 2 buckets
    assert found.share_of_cells == 2 / 20
    assert not found.cheap


def replace_boxes(run, wanted, other):
    """The run with its boxes where `wanted`, and with another's elsewhere."""
    boxes = [d for d in run.plan.boxes if wanted(d.box)] + [d for d in other.plan.boxes if not wanted(d.box)]
    return Run(replace(run.plan, boxes=tuple(boxes)), run.samples)


def test_a_bucket_with_two_flips_differs_once():
    usual = run_of(DEFAULT, DEFAULT)
    found = stability([usual, usual, run_of(OTHER, OTHER)])
    assert (found.share_of_buckets, found.share_of_cells) == (1 / 3, 2 / 6)


@pytest.mark.parametrize(("us", "cheap"), [(42.0, True), (42.8, False), (38.0, True)])
def test_another_plan_of_a_bucket_is_cheap_up_to_the_threshold_on_average_over_its_cells(us, cheap):
    times = {DEFAULT: (10, 40), OTHER: (8, us)}  # in one of two cells: 4 layers of 42 us take 5% more, of 42.8 7%
    usual = run_of(DEFAULT, DEFAULT, layer_us=times)
    found = stability([usual, usual, run_of(DEFAULT, OTHER, layer_us=times)])
    assert found.threshold == 0.03
    assert found.dearest == pytest.approx(math.log((4 * us + 1) / 161) / 2 if us > 40 else math.log(153 / 161) / 2)
    assert found.cheap is cheap


def test_what_one_bucket_of_a_run_loses_another_does_not_make_up_for():
    times = {DEFAULT: (10, 40), OTHER: (8, 44)}
    usual = run_of(DEFAULT, DEFAULT, buckets=(1, 8), layer_us=times)
    faster, slower = (run_of(*its, buckets=(1, 8), layer_us=times) for its in ((OTHER, DEFAULT), (DEFAULT, OTHER)))
    found = stability([usual, usual, replace_boxes(slower, lambda box: box.bucket == 8, faster)])
    assert found.dearest == pytest.approx(math.log(177 / 161) / 2)


def test_a_cost_is_of_all_runs():
    # the run that flips saw it 20% faster; three runs say 25% slower: the median over all rounds is theirs
    slower, faster = {DEFAULT: (10, 40), OTHER: (8, 50)}, {DEFAULT: (10, 40), OTHER: (8, 32)}
    usual = run_of(DEFAULT, DEFAULT, layer_us=slower)
    (flip,) = stability([usual, usual, usual, run_of(DEFAULT, OTHER, layer_us=faster)]).flips
    assert flip.cost == pytest.approx(math.log(201 / 161))


def test_a_flip_whose_cost_no_run_knows_is_not_cheap():
    usual, odd = run_of(DEFAULT, DEFAULT), run_of(DEFAULT, OTHER)
    for run in (usual, odd):
        run.samples.buckets[0].times[:, 2] = np.nan
    found = stability([usual, usual, odd])
    assert found.flips[0].cost is None
    assert not found.cheap


def test_a_bucket_that_one_run_did_not_come_to_is_served_by_its_default_there():
    usual = run_of(OTHER, OTHER)
    partial = Run(replace(usual.plan, boxes=()), replace(usual.samples, buckets=()))
    for order in ([usual, usual, partial], [partial, usual, usual]):
        found = stability(order)
        assert (found.buckets, found.cells) == (1, 2)
        assert {(flip.choice, flip.majority) for flip in found.flips} == {(DEFAULT, OTHER)}


def test_as_json_every_flip_is_there():
    usual = run_of(DEFAULT, DEFAULT)
    report = json.loads(json.dumps(stability([usual, usual, run_of(DEFAULT, OTHER)]).to_json(), allow_nan=False))
    assert report["share_of_buckets"] == 1 / 3
    assert report["flips"][0]["cell"] == {"mean_kv": 1024, "max_kv": 1024, "profile": "equal"}


# --- runs


def test_each_run_is_a_process_with_a_store_of_its_own_and_then_all_challenge_the_first_ones(tmp_path, monkeypatch):
    calls = []

    def tune(options, store, out, progress):
        calls.append((tuple(options), store.name))
        return (run_of(DEFAULT, DEFAULT),)

    monkeypatch.setattr(dispatch.bench.stability_run, "_tune", tune)
    found = run_stability(["--model", "m"], 3, tmp_path, lambda what: None)
    plain, force = ("--model", "m"), ("--model", "m", "--force")
    assert calls == [(plain, f"store-{i}") for i in range(3)] + [(force, "store-0")] * 2
    assert (found.fresh[0].runs, found.stored[0].runs, found.ok) == (3, 3, True)


def test_a_stored_choice_that_flips_is_not_right_however_cheap():
    usual, cheap = run_of(DEFAULT, DEFAULT), run_of(OTHER, DEFAULT)
    flipped, same = stability([usual, usual, cheap]), stability([usual, usual])
    assert flipped.cheap
    assert Stable((flipped,), (same,)).ok
    assert not Stable((same,), (flipped,)).ok


def test_a_run_that_fails_ends_it_with_what_the_run_says(tmp_path):
    with pytest.raises(MeasureError, match=r"^a run of tune ended with status 2: 'qwen9' is neither a preset nor"):
        run_stability(["--model", "qwen9"], 2, tmp_path, lambda what: None)


def invoke(*args):
    done = CliRunner().invoke(main, ["bench", "stability", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def test_real_runs_leave_nothing_in_the_users_store_and_are_compared_cell_by_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_DECODE_CACHE_DIR", str(tmp_path / "mine"))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ["--model", tmp_path / "config.json", "--buckets", "1", "--max-seq-len", "128", "--page-size", "4"]
    status, out, err = invoke("--runs", 2, *options, "--json")
    report = json.loads(out)
    assert status == (0 if report["ok"] else 1)
    (group,) = report["groups"]
    assert (group["fresh"]["runs"], group["stored"]["runs"]) == (2, 2)
    assert group["fresh"]["buckets"] == 1
    assert group["fresh"]["cells"] == group["stored"]["cells"] > 1
    assert err.count(" to measure and decide") == 3
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("flips", "status"), [([DEFAULT, DEFAULT], 0), ([DEFAULT, OTHER], 1)])
def test_a_dear_flip_is_status_1_and_is_named(monkeypatch, flips, status):
    runs = [run_of(DEFAULT, DEFAULT)] * 2 + [run_of(*flips)]
    result = Stable((stability(runs),), (stability(runs[:2]),))
    monkeypatch.setattr(dispatch.bench.stability_run, "run_stability", lambda *args: result)
    found, out, _ = invoke("--model", "qwen3-8b", "--tp", "2", "--runs", 3)
    assert found == status
    text = " ".join(out.split())
    assert (
        "run 3, batch 8, equal, mean KV 1024, longest 1024: torch_chunked, most runs torch_sdpa, +24.8%" in text
    ) is (status == 1)


BAD = [
    (["--model", "qwen3-8b", "--force"], "--force: not with bench stability"),
    (["--model", "qwen3-8b", "--out", "x"], "--out: not with bench stability"),
    (["--model", "qwen3-8b", "--plan", "x"], "--plan: not with bench stability"),
    (["--model", "qwen3-8b", "--runs", "1"], "'--runs': 1 is not in the range x>=2"),
    (["--model", "qwen3-8b", "--frobnicate"], "No such option"),
    (["--model", "qwen3-8b", "--tp", "0"], "'--tp': 0 is not in the range x>=1"),
    ([], "Missing option '--model'"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_a_users_mistake_is_told_before_anything_runs(monkeypatch, args, message):
    monkeypatch.setattr(dispatch.bench.stability_run, "_tune", None)
    status, _, err = invoke(*args)
    assert status == 2
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("Error")]) == 1
