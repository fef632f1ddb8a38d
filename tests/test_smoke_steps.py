"""`python -m smoke.steps`: which batches it draws, what it calls a step, and what its report says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from smoke.steps import times
from smoke.steps.__main__ import geometric_mean, main
from smoke.steps.times import AGAIN, ARMS, OFF, ON, StepTimes


def test_a_gain_is_the_time_without_over_the_time_with_it():
    step = StepTimes(10, 20, "fa3", {ON: 2.0, OFF: 3.0, AGAIN: 4.0}, {})
    assert (step.gain, step.twin) == (1.5, 0.75)
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_DECODE_CACHE_DIR", str(tmp_path / "store"))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    model, trace = tmp_path / "model.json", tmp_path / "chat.csv"
    model.write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 9, **sizes}))
    trace.write_text("input_tokens,output_tokens\n30,20\n200,40\n")
    out = tmp_path / "steps.json"
    arguments = ["--model", str(model), "--trace", str(trace), "--out", str(out), "--device", "cpu"]
    return [*arguments, "--max-seq-len", "256", "--snapshots", "2"], out


def test_every_runner_serves_every_batch_and_the_report_has_what_was_printed(files, monkeypatch, capsys):
    arguments, out = files
    monkeypatch.setattr(times, "ROUNDS", 3)
    assert main([*arguments, "--kv-tokens", "2048", "--batch", "1", "4"]) == 0
    report = json.loads(out.read_text())
    assert report["why_no_plan"] == ""
    assert set(report["captures"]) == set(ARMS)
    assert [(row["trace"], row["batch"], len(row["batches"])) for row in report["steps"]] == [
        ("chat", 1, 2),
        ("chat", 4, 2),
    ]
    printed = capsys.readouterr().out
    for row in report["steps"]:
        gains = [b["ms"][OFF] / b["ms"][ON] for b in row["batches"]]
        assert row["worst"] == min(gains)
        assert row["gain"] == pytest.approx(float(np.prod(gains)) ** 0.5)
        assert all(b["served"] in ("torch_sdpa", "torch_chunked") for b in row["batches"])
        assert f"batch {row['batch']:4}: {row['gain']:.3f}x" in printed


def test_a_batch_size_of_which_no_batch_fits_is_said_to_be_so(files, capsys):
    arguments, out = files
    assert main([*arguments, "--kv-tokens", "64", "--batch", "4"]) == 0
    assert "no batch fits into the KV cache" in capsys.readouterr().out
    assert json.loads(out.read_text())["steps"][0]["batches"] == []


def test_layers_of_two_kinds_are_refused_in_one_line(files, capsys):
    arguments, _ = files
    with pytest.raises(SystemExit):
        main([*arguments, "--model", "gemma-2-9b", "--kv-tokens", "64"])
    assert "layers of 2 kinds" in capsys.readouterr().err.splitlines()[-1]
