"""`python -m smoke`: what passes, what fails and what is skipped; the cases themselves are run by the smoke command."""

from __future__ import annotations

import json

import pytest
import torch

import smoke.cases
import smoke.place
from dispatch.backends.torch_chunked import TorchChunked
from smoke.__main__ import main
from smoke.cases import CASES
from smoke.off import allowed
from smoke.outcome import run_case
from smoke.place import Place


@pytest.fixture
def place(tmp_path):
    return Place("cpu", tmp_path)


@pytest.mark.parametrize("name", ["padding", "turnover", "winners", "missing-entry"])
def test_a_case_whose_plan_is_made_by_hand_passes(name, place):
    outcome = run_case(name, CASES[name], place)
    assert (outcome.status, outcome.why) == ("passed", [])
    assert outcome.tokens > 100
    assert outcome.largest_error < outcome.tolerance


def test_a_kernel_that_misses_the_newest_token_fails(place, monkeypatch):
    plan = TorchChunked.build

    def short(self, spec, *rest):
        impl = plan(self, spec, *rest)
        begin = impl.begin_step

        def begin_step(inputs):
            begin(inputs)
            impl.inputs = type(inputs)(
                inputs.num_live, inputs.lengths_host, (inputs.lengths - 1).clamp(min=1), inputs.block_table
            )

        impl.begin_step = begin_step
        return impl

    monkeypatch.setattr(TorchChunked, "build", short)
    outcome = run_case("winners", CASES["winners"], place)
    assert outcome.status == "failed"
    assert any("dropped" in why for why in outcome.why), outcome.why


def test_wrong_logits_fail_and_the_exit_status_says_so(monkeypatch, capsys):
    serve = smoke.place.serve
    monkeypatch.setattr(smoke.place, "serve", lambda *args: [logits + 1 for logits in serve(*args)])
    assert main(["--case", "padding", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "failed  padding" in printed
    assert "logits off by 1" in printed
    assert printed.endswith("0 passed, 1 failed, 0 skipped\n")


def test_what_this_node_cannot_run_is_skipped_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(smoke.place, "challengers", lambda *_: [])
    assert main(["--case", "padding", "--device", "cpu"]) == 0
    assert "only the default serves this layer here" in capsys.readouterr().out


def test_two_ranks_on_gpus_need_two(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_case("two-ranks", CASES["two-ranks"], Place("cuda", tmp_path)).why == ["needs two GPUs"]


def test_a_case_that_raises_fails_alone(monkeypatch, capsys):
    def broken(place):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(smoke.cases.CASES, "moe", broken)
    assert main(["--case", "moe", "--case", "missing-entry", "--device", "cpu", "--json"]) == 1
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [(case["case"], case["status"]) for case in cases] == [("moe", "failed"), ("missing-entry", "passed")]
    assert cases[0]["why"] == ["RuntimeError: out of luck"]
    assert cases[1]["log"], "the missing entry is to be logged"
    assert {v["bucket"] for v in cases[1]["facts"]["missing"]["capture"]["variants"]} == {1, 2, 4, 8}


def test_an_unknown_case_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--case", "sparse"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m smoke: error: --case: no case sparse; there")


def test_a_default_may_import_its_own_library_alone():
    assert allowed("torch_sdpa") == set()
    assert allowed("fa3") == {"flash_attn_interface"}
    assert allowed("flashinfer_fa2_tc") == {"flashinfer"}
