"""The KV capacity that `tune` assumes where none is given."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.cli.capacity import default_capacity
from dispatch.device import DeviceFingerprint
from dispatch.models import load_model
from tests.make import TINY

# Weights, in elements: 2 x 1000 x 64, and in each layer 64 x (4 + 2) x (16 + 16) and 64 x 128 x 3.
WEIGHTS = 2 * 238_592  # bytes
TOKEN = 384  # bytes: 3 layers x 2 heads x (16 + 16) elements
PAGE = 4  # tokens
PLENTY = 10**9  # tokens
GPU = DeviceFingerprint("cuda", "a GPU", (9, 0), 132, "", "", "")
CPU = DeviceFingerprint("cpu", "a CPU", (0, 0), 1, "", "", "")


@pytest.fixture
def free(monkeypatch):
    """Set the bytes of the GPU, of which a third is free at the moment."""

    def set_free(count):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (count // 3, count))

    return set_free


@pytest.fixture
def capacity(tmp_path):
    """The default for TINY, with these fields changed, and what limits it."""

    def capacity(device=GPU, tp=1, wanted=PLENTY, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in (TINY | changes).items() if value is not None}))
        return default_capacity(str(path), tp, device, load_model(str(path)).layer_groups(tp, PAGE), wanted)

    return capacity


def test_on_a_gpu_it_is_nine_tenths_of_the_memory_less_the_weights(free, capacity):
    free(1_000_000)
    assert capacity()[0] == 1101  # (900,000 - 477,184) / 384 = 1101.04


def test_a_rank_holds_its_share_of_the_weights_and_of_the_kv_heads(free, capacity):
    free(1_000_000)
    assert capacity(tp=2)[0] == 3444  # (900,000 - 238,592) / 192 = 3444.8


def test_an_fp8_cache_does_not_make_the_weights_smaller(free, tmp_path):
    free(1_000_000)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    groups = load_model(str(path)).layer_groups(1, PAGE, "fp8_e4m3")
    assert default_capacity(str(path), 1, GPU, groups, PLENTY)[0] == 2202  # (900,000 - 477,184) / 192 = 2202.2


def test_what_limits_it_is_said_with_the_weights(free):
    free(140 << 30)
    tokens, limit = default_capacity("qwen3-8b", 1, GPU, load_model("qwen3-8b").layer_groups(1, 16), PLENTY)
    # 36 layers x 8 heads x 256 x 2 bytes = 147,456 a token; 126 GiB less 2 x 8,190,427,136 bytes
    assert tokens == 806_414
    assert limit == "what fits beside 15.3 GiB of weights"


def test_it_is_never_above_what_the_requests_need(free, capacity):
    free(1_000_000)
    assert capacity(wanted=1101) == (1101, "every request at its longest")
    assert capacity(wanted=1102)[0] == 1101


def test_weights_that_leave_one_page_are_served(free, capacity):
    free(531_912)  # nine tenths: 478,720 = 477,184 + 4 x 384
    assert capacity()[0] == PAGE


def test_weights_that_leave_no_page_are_one_line_that_says_what_to_pass(free, monkeypatch, tmp_path):
    free(531_911)
    monkeypatch.setattr("dispatch.device.current_device", lambda kind: GPU)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    args = ["tune", "--model", str(tmp_path), "--page-size", str(PAGE)]
    done = CliRunner().invoke(main, args, env={"DYN_DECODE_CACHE_DIR": str(tmp_path)})
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("Error: 0.0 GiB of weights a rank leave no room for a KV page in the 0.0 GiB")
    assert done.stderr.endswith("90% of the memory: pass --tp or --kv-capacity\n")


def test_where_the_weights_are_not_known_it_is_all_that_a_server_takes_and_one_line_says_so(free, capacity, capsys):
    free(1_000_000)
    assert capacity(vocab_size=None) == (2343, "what fits into 90% of the memory")  # 900,000 / 384 = 2343.75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no weights are subtracted from the KV capacity: ")
    assert line.endswith("config.json: missing vocab_size")


def test_a_cpu_that_only_measures_holds_no_weights(capacity, monkeypatch, capsys):
    monkeypatch.setattr("dispatch.bench.memory.free_bytes", lambda device: WEIGHTS + 5 * TOKEN)
    assert capacity(device=CPU) == (WEIGHTS // TOKEN + 5, "what fits into free memory")
    assert capsys.readouterr().err == ""
