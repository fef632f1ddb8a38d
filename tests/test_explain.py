"""`explain` and `show`, on plans of samples that are made up."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.decision import Reason
from dispatch.key import RULE_VERSION
from dispatch.plan import Excluded
from dispatch.planfile import write_plans
from dispatch.samples import Cell
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


RULE = 3  # of the plans below: an earlier version's


def plan_of(samples, **changes):
    """A plan in which the boxes of short requests are changed, and the samples that lie beside it."""
    samples = replace(samples, key={**samples.key, "rule_version": RULE})
    plan = make_plan(samples)
    boxes = tuple(
        replace(d, box=replace(d.box, **changes)) if d.box.candidate == "torch_chunked" else d for d in plan.boxes
    )
    return replace(plan, boxes=boxes), samples


def test_where_todays_rule_chooses_another_one_that_is_said_and_its_verdicts_are_not_shown(tmp_path):
    path = put(tmp_path, *plan_of(make_samples(), candidate="torch_sdpa"))
    out = invoke("explain", path, "-b", 1, "--kv", 128)
    again = "the plan was decided otherwise: of the same samples this version makes torch_chunked (fastest) in the box"
    assert again in out
    assert f"; its rule is version {RULE}, ours {RULE_VERSION}\n" in out
    assert "paired by round" not in out
    assert "microseconds a step of 4 layers" in out
    (answer,) = json.loads(invoke("explain", path, "-b", 1, "--kv", 128, "--json"))["answers"]
    assert (answer["candidate"], answer["decided_again"]["candidate"]) == ("torch_sdpa", "torch_chunked")
    assert "decision" not in answer


def test_where_todays_rule_stays_with_the_default_that_is_said_without_a_losers_reason(tmp_path):
    samples = make_samples()
    plan = make_plan(samples)
    boxes = tuple(replace(d, box=replace(d.box, candidate="torch_chunked")) for d in plan.boxes)
    out = invoke("explain", put(tmp_path, replace(plan, boxes=boxes), samples), "-b", 1, "--kv", 1024)
    assert "of the same samples this version makes the default torch_sdpa in the box" in out


def test_where_todays_rule_draws_another_box_for_the_same_winner_the_verdicts_say_of_which_they_are(tmp_path):
    plan, samples = plan_of(make_samples(), mean_kv_max=140)
    out = invoke("explain", put(tmp_path, plan, samples), "-b", 1, "--kv", 128)
    (mine,) = [d.box for d in make_plan(samples).boxes if d.box.holds(128, 128) and d.box.bucket == 1]
    assert "box of mean KV 128 to 140 and" in out
    assert f"makes torch_chunked (fastest) in the box of mean KV 128 to {mine.mean_kv_max} and" in out
    assert "paired by round" in out


def test_where_todays_rule_decides_the_same_nothing_is_said_of_it_whatever_its_version(tmp_path):
    out = invoke("explain", put(tmp_path, *plan_of(make_samples())), "-b", 1, "--kv", 128)
    assert "paired by round" in out
    assert "decided otherwise" not in out


def test_the_gain_and_the_times_say_of_which_rounds_they_are(tmp_path):
    samples = make_samples()
    path = put(tmp_path, make_plan(samples), samples)
    won = invoke("explain", path, "-b", 1, "--kv", 128)
    assert re.search(r"1\.\d{3}x over the default torch_sdpa where one half of the rounds chose for the other\n", won)
    assert "paired by round; all rounds count, those that chose the winner too" in " ".join(won.split())
    assert "those that chose" not in invoke("explain", path, "-b", 1, "--kv", 1024)  # where the default stays


NAMES = ["fa3", "flashinfer_fa2_tc", "flashinfer_cudnn", *(f"flashinfer_xqa[max_kv={n}]" for n in (4096, 8192, 16384))]
POINTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.fixture
def wide(tmp_path):
    """A plan with one box of eight cells, of candidates with long names."""
    cells = [Cell(point, point, "trace-of-a-long-name") for point in POINTS]
    samples = make_samples({name: [20.0 + i] * len(cells) for i, name in enumerate(NAMES)}, cells=cells, buckets=(1,))
    return put(tmp_path, make_plan(samples), samples)


def times_of(out):
    """The rows of the table of times: the first column, and the others."""
    table = out[out.index("microseconds a step") :]
    rows = [[field.strip() for field in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    return {name: rest for name, *rest in rows if name}


def test_the_samples_nearest_to_the_batch_are_shown_the_nearest_first_and_each_candidate_by_its_short_name(wide):
    out = invoke("explain", wide, "-b", 1, "--kv", 1100)
    assert "the nearest 6 of 8 cells" in out
    shown = times_of(out)
    assert shown["mean KV"] == ["1024", "2048", "512", "4096", "256", "8192"]
    shorts = ["fa3", "default/twin", "fa2_tc", "cudnn", "xqa[max_kv=4096]", "xqa[max_kv=8192]", "xqa[max_kv=16384]"]
    assert list(shown) == ["mean KV", "max KV", "profile", *shorts]
    assert len(shown["fa2_tc"]) == 6


@pytest.mark.parametrize("width", [90, 160])
def test_tables_are_as_wide_as_COLUMNS_says_and_no_name_is_cut(wide, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = invoke("explain", wide, "-b", 1, "--kv", 1100)
    assert max(len(line) for line in out.splitlines() if line.startswith("│")) <= width
    assert "…" not in out
    assert "xqa[max_kv=16384]" in times_of(out)
