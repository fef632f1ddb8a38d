"""The command line, with the real backends and the real clock on a tiny model."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch import __version__
from dispatch.bench import lookup
from dispatch.bench.faults import FaultResult
from dispatch.cli import main
from dispatch.decision import Reason
from dispatch.isolation.quarantine import Quarantine
from dispatch.planfile import read_plans, write_plans
from dispatch.samplesfile import write_samples
from tests.make import TINY, make_key, make_plan, make_samples

SMALL = ["--buckets", "1,2", "--max-seq-len", "256", "--page-size", "4"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command with a store of its own; (exit status, standard output, standard error).

    Without child processes, which take a second each, unless a test asks for them.
    """
    monkeypatch.setenv("DYN_DECODE_ISOLATION", "none")
    monkeypatch.setenv("DYN_DECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("dispatch.bench.harness.WARM_UP_S", 0.0)

    def invoke(*args, env=None):
        done = CliRunner().invoke(main, [str(a) for a in args], env=env)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.stdout, done.stderr

    return invoke


def ok(result):
    status, out, err = result
    assert status == 0, err
    return out


def test_the_main_job_measures_prints_and_stores_a_plan_that_the_second_run_reads(run, model):
    as_it_is = {"DYN_DECODE_ISOLATION": ""}
    first = ok(run("tune", "--model", model, *SMALL, "--profile-time", env=as_it_is))
    assert "torch_sdpa" in first
    assert "in a child: replay" in first
    assert re.search(r"plan measured in \d+\.\d s; it is in \S+\.json", first)
    second = ok(run("tune", "--model", model, *SMALL, env=as_it_is))
    assert re.search(r"plan read from the store in \d+\.\d ms", second)


@pytest.mark.parametrize(
    ("args", "said"),
    [([], "512 in all (every request at its longest)"), (["--kv-capacity", 300], "300 in all (as given)")],
)
def test_what_limits_the_kv_capacity_is_printed(run, model, args, said):
    assert said in " ".join(ok(run("tune", "--model", model, *SMALL, *args)).split())  # 2 requests of 256 tokens


def test_as_json_every_bucket_is_accounted_for(run, model):
    (plan,) = json.loads(ok(run("tune", "--model", model, *SMALL, "--json")))["plans"]
    assert {box["bucket"] for box in plan["boxes"]} | {int(b) for b in plan["unmeasured"]} == {1, 2}
    assert plan["key"]["spec"]["num_layers"] == 3
    assert plan["source"].startswith("measured in ")


def test_force_measures_again(run, model):
    ok(run("tune", "--model", model, *SMALL))
    assert "measured in" in ok(run("tune", "--model", model, *SMALL, "--force"))


def test_what_failed_in_a_child_is_listed_left_out_and_tried_again_when_asked(run, model):
    (plan,) = json.loads(ok(run("tune", "--model", model, *SMALL, "--json")))["plans"]
    quarantine = Quarantine(Path(plan["path"]), plan["key"])
    quarantine.add("torch_chunked", 2, "replay", Reason.FAILED, "killed by SIGSEGV")
    why = "quarantined: replay at batch 2: killed by SIGSEGV"
    assert f"quarantine torch_chunked for 4/2 heads, d 16, page 4, bf16, 3 layers: {why}" in ok(run("doctor"))
    (listed,) = json.loads(ok(run("doctor", "--json")))["quarantined"]
    assert (listed["candidate"], listed["stage"], listed["bucket"]) == ("torch_chunked", "replay", 2)

    (again,) = json.loads(ok(run("tune", "--model", model, *SMALL, "--force", "--json")))["plans"]
    assert again["refused"]["torch_chunked"] == why
    assert set(again["unmeasured"].values()) == {"every candidate but the default was refused"}

    retried = ok(run("tune", "--model", model, *SMALL, "--retry-quarantined", "--isolation", "process"))
    assert "torch_chunked: " not in retried
    assert "measured in" in retried
    assert not quarantine.path.exists()
    assert "read from the store" in ok(run("tune", "--model", model, *SMALL, "--retry-quarantined"))


def test_explain_says_what_is_in_quarantine(run, model):
    (plan,) = json.loads(ok(run("tune", "--model", model, *SMALL, "--json")))["plans"]
    Quarantine(Path(plan["path"]), plan["key"]).add("torch_chunked[chunk=512]", 0, "import", Reason.FAILED, "hung")
    ok(run("tune", "--model", model, *SMALL, "--force"))
    assert "refused: torch_chunked[chunk=512]: quarantined: import: hung" in ok(run("explain", "-b", 1, "--kv", 130))


def test_bench_faults_tunes_with_a_fault_and_says_what_happened(run):
    (fault,) = json.loads(ok(run("bench", "faults", "segfaults", "--device", "cpu", "--json")))["faults"]
    assert fault["happened"] == "quarantined: replay at batch 1: killed by SIGSEGV"
    assert fault["measured"] == ["other", "steady", "steady[chunk=512]"]
    assert fault["seconds"] > 0
    status, _, err = run("bench", "faults", "explodes")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "no fault 'explodes'; there are sleeps in build, hangs" in err


def test_bench_faults_ends_with_status_1_where_a_faulty_backend_was_measured(run, monkeypatch):
    result = FaultResult("hangs", "", ("faulty", "other", "steady"), 1.0)
    monkeypatch.setattr("dispatch.bench.faults.run_fault", lambda name, device: result)
    status, out, _ = run("bench", "faults", "hangs")
    assert status == 1
    assert "nothing: it was measured like the others" in out


def test_a_sample_file_gives_the_same_decisions_again(run, model, tmp_path):
    ok(run("tune", "--model", model, *SMALL, "--out", tmp_path / "plan.json"))
    ok(run("select", tmp_path / "plan.samples.json.gz", "--out", tmp_path / "again.json"))
    (first,), (again,) = read_plans(tmp_path / "plan.json"), read_plans(tmp_path / "again.json")
    assert (again.boxes, again.unmeasured, again.key) == (first.boxes, first.unmeasured, first.key)


def test_explain_gives_the_choice_the_rule_what_the_others_lost_by_and_the_samples(run, model):
    ok(run("tune", "--model", model, *SMALL))
    out = ok(run("explain", "--batch-size", 2, "--kv", 130, "--max-kv", 140))
    assert "bucket 2, box of mean KV" in out
    assert "against torch_sdpa, paired by round" in out
    assert "torch_chunked" in out
    assert "microseconds a step of 3 layers" in out


def test_explain_says_why_there_is_no_entry(run, model):
    ok(run("tune", "--model", model, *SMALL))
    assert "batch 3 is above the largest bucket 2" in ok(run("explain", "--batch-size", 3, "--kv", 130))
    assert "lie outside what was measured" in ok(run("explain", "--batch-size", 1, "--kv", 4000))


def test_explain_as_json_holds_the_verdict_of_every_candidate(run, model):
    ok(run("tune", "--model", model, *SMALL))
    (answer,) = json.loads(ok(run("explain", "-b", 2, "--kv", 130, "--json")))["answers"]
    assert {v["candidate"] for v in answer["decision"]["verdicts"]} == {"torch_chunked", "torch_chunked[chunk=512]"}
    assert answer["hit"] is True


def test_show_prints_the_plan_stored_last_and_a_plan_file(run, model, tmp_path):
    ok(run("tune", "--model", model, *SMALL, "--out", tmp_path / "plan.json"))
    assert "winners" in ok(run("show"))
    assert str(tmp_path / "plan.json") in ok(run("show", tmp_path / "plan.json"))
    assert json.loads(ok(run("show", "--json")))["plans"][0]["default"] == "torch_sdpa"


def test_a_plan_file_serves_where_it_fits(run, model, tmp_path):
    ok(run("tune", "--model", model, *SMALL, "--out", tmp_path / "plan.json"))
    env = {"DYN_DECODE_CACHE_DIR": str(tmp_path / "another")}
    assert "plan taken from" in ok(run("tune", "--model", model, *SMALL, "--plan", tmp_path / "plan.json", env=env))
    assert "read from the store" in ok(run("tune", "--model", model, *SMALL, env=env))


@pytest.mark.parametrize(
    ("name", "why"),
    [("absent/x", "No such file"), ("", "Is a directory"), ("config.json/x", "Not a"), ("x" * 250, "File name too")],
)
def test_an_out_that_cannot_be_written_is_told_before_anything_is_measured(run, model, tmp_path, name, why):
    status, out, err = run("tune", "--model", model, *SMALL, "--out", tmp_path / name)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{tmp_path / name} cannot be written: {why}" in err
    assert not (tmp_path / "cache").exists()


def test_what_was_measured_is_printed_though_the_out_can_no_longer_be_written(run, model, tmp_path, monkeypatch):
    def full(path, plans):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dispatch.cli.tuned.write_plans", full)
    status, out, err = run("tune", "--model", model, *SMALL, "--out", tmp_path / "plan.json")
    said = f"Error: {tmp_path / 'plan.json'} cannot be written: No space left on device"
    assert (status, err.splitlines()[-1]) == (2, said)
    assert "winners" in out
    assert "written to" not in out


def test_the_out_is_named_with_samples_only_where_there_were_some(run, model, tmp_path):
    plan, samples = tmp_path / "plan.json", tmp_path / "plan.samples.json.gz"
    assert f"plan written to {plan}, samples to {samples}\n" in ok(run("tune", "--model", model, *SMALL, "--out", plan))
    samples.unlink()
    assert f"plan written to {plan}\n" in ok(run("tune", "--model", model, *SMALL, "--out", plan))  # from the store
    assert not samples.exists()


def test_a_trace_is_one_more_profile(run, model, tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,50\n1,10,200\n2,300,5\n")
    out = ok(run("tune", "--model", model, *SMALL, "--trace", tmp_path / "trace.csv"))
    assert "one-long, trace" in out.replace("\n", " ")


def test_a_model_with_two_kinds_of_layers_gets_a_plan_for_each(run, tmp_path):
    config = TINY | {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = json.loads(ok(run("tune", "--model", tmp_path / "config.json", *SMALL, "--json")))["plans"]
    found = [(p["key"]["spec"]["sliding_window"], p["key"]["spec"]["num_layers"]) for p in plans]
    assert found == [(64, 1), (None, 2)]


def test_doctor_says_what_is_here_and_what_each_backend_serves(run):
    out = ok(run("doctor", "--model", "gemma-2-9b"))
    assert "device     " in out
    assert "checks     while tuning: " in out
    assert "flashinfer-python" in out
    assert "logits soft cap: scaled_dot_product_attention has none" in out
    report = json.loads(ok(run("doctor", "--json")))
    assert report["layers"][0]["backends"]["torch_sdpa"] == {"ok": True, "reason": ""}


def test_doctor_says_why_no_plan_can_be_stored(run, tmp_path):
    assert json.loads(ok(run("doctor", "--json")))["store_problem"] == ""
    assert list((tmp_path / "cache" / "plans").iterdir()) == []
    (tmp_path / "file").write_text("")
    env = {"DYN_DECODE_CACHE_DIR": str(tmp_path / "file")}
    store = tmp_path / "file" / "plans"
    assert f"store      {store} (no plan can be stored: Not a directory)\n" in ok(run("doctor", env=env))
    assert json.loads(ok(run("doctor", "--json", env=env)))["store_problem"] == "Not a directory"


def test_doctor_refuses_to_exclude_a_backend_that_does_not_exist(run):
    status, out, err = run("doctor", env={"DYN_DECODE_EXCLUDE": "fa3,fa9"})
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("Error: DYN_DECODE_EXCLUDE: no backend 'fa9'; there are fa3, ")


def test_doctor_names_a_variable_that_nothing_reads(run):
    assert run("doctor")[2] == ""
    status, out, err = run("doctor", "--json", env={"DYN_DECODE_TRESHOLD": "0.1"})
    assert (status, len(err.splitlines())) == (0, 1)
    assert err.startswith("warning: DYN_DECODE_TRESHOLD is set, and nothing reads it; there are DYN_DECODE_THRESHOLD, ")
    assert json.loads(out)["enabled"] is False


def test_bench_lookup_puts_the_table_beside_a_dict_in_one_run(run, monkeypatch):
    timings = lookup.run(rounds=1)
    monkeypatch.setattr(lookup, "run", lambda: timings)
    assert "dict with bisect" in ok(run("bench", "lookup"))
    rows = json.loads(ok(run("bench", "lookup", "--json")))
    assert {(r["buckets"], r["boxes_per_bucket"]) for r in rows} == {(20, 3), (1366, 3), (20, 205)}
    assert {r["vs_dict"] for r in rows if r["implementation"] == "dict_bisect"} == {1.0}


BAD = [
    # arguments after `tune --model MODEL`, environment, what the line says
    (["--tp", "0"], {}, "'--tp': 0 is not in the range x>=1"),
    (["--page-size", "-4"], {}, "'--page-size': -4 is not in the range x>=1"),
    (["--kv-capacity", "0"], {}, "'--kv-capacity': 0 is not in the range x>=1"),
    (["--max-batch-size", "0"], {}, "'--max-batch-size': 0 is not in the range x>=1"),
    (["--max-seq-len", "-1"], {}, "'--max-seq-len': -1 is not in the range x>=1"),
    (["--max-seq-len", "many"], {}, "'--max-seq-len': 'many' is not a valid integer"),
    (["--tp", "3"], {}, "4 query heads cannot be split over tp=3 ranks"),
    (["--max-seq-len", "8"], {}, "max sequence length 8 is below a page (16 tokens)"),
    (["--kv-capacity", "8"], {}, "KV capacity 8 tokens is below a page (16 tokens)"),
    (["--buckets", "4,2"], {}, "bucket 2 comes after 4: buckets must be ascending"),
    (["--buckets", "2,2"], {}, "bucket 2 is listed twice"),
    (["--buckets", "0,2"], {}, "bucket 0: must be at least 1"),
    (["--buckets", "1,two"], {}, "--buckets '1,two': must be whole numbers separated by commas"),
    (["--buckets", "1,2", "--max-batch-size", "4"], {}, "--max-batch-size 4 is not the last of --buckets 1,2"),
    (["--kv-dtype", "int3"], {}, "int3"),
    (["--default", "fa9"], {}, "--default: no backend 'fa9'; there are fa3, "),
    (["--default", "torch_sdpa", "--dyn-decode-exclude", "torch_sdpa"], {}, "excluded by DYN_DECODE_EXCLUDE"),
    (["--exclude", "fa9"], {"DYN_DECODE_EXCLUDE": "fa3"}, "Error: --dyn_decode_exclude: no backend 'fa9'"),
    ([], {"DYN_DECODE_EXCLUDE": "fa9"}, "Error: DYN_DECODE_EXCLUDE: no backend 'fa9'"),
    (["--dyn-decode-exclude", "torch_sdpa,torch_chunked"], {}, "no backend serves this layer"),
    (["--dyn_decode_threshold", "nan"], {}, "--dyn_decode_threshold"),
    ([], {"DYN_DECODE_THRESHOLD": "nan"}, "DYN_DECODE_THRESHOLD='nan'"),
    ([], {"DYN_DECODE_THRESHOLD": "3%"}, "DYN_DECODE_THRESHOLD='3%'"),
    ([], {"DYN_DECODE_CLUSTER_MARGIN": "-1"}, "DYN_DECODE_CLUSTER_MARGIN='-1'"),
    ([], {"DYN_DECODE_TIME_BUDGET": "0"}, "DYN_DECODE_TIME_BUDGET='0'"),
    ([], {"ENABLE_DYNAMIC_DECODE_BACKEND": "maybe"}, "ENABLE_DYNAMIC_DECODE_BACKEND='maybe'"),
    (["--trace", "absent.csv"], {}, "absent.csv: No such file or directory"),
    (["--plan", "absent.json"], {}, "absent.json: No such file or directory"),
    (["--plan", "x", "--force"], {}, "--force measures and --plan does not"),
    (["--plan", "x", "--retry-quarantined"], {}, "--retry-quarantined measures and --plan does not"),
    (["--isolation", "thread"], {}, "--dyn_decode_isolation='thread': must be process or none"),
    (["--device", "tpu"], {}, "'--device': 'tpu' is not one of"),
    (["--frobnicate"], {}, "No such option"),
]


@pytest.mark.parametrize(("args", "env", "message"), BAD, ids=[" ".join([*a, *map(str, e.items())]) for a, e, _ in BAD])
def test_a_users_mistake_is_one_line_and_status_2(run, model, args, env, message):
    status, _, err = run("tune", "--model", model, *args, env=env)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("Error")]) == 1


BAD_MODELS = [
    ({"num_attention_heads": 5}, "num_attention_heads"),
    ({"head_dim": 100}, "head_dim_qk=100: must be a multiple of 8"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_attention_heads": "many"}, "num_attention_heads"),
    ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"torch_dtype": "int4"}, "int4"),
]


@pytest.mark.parametrize(("change", "message"), BAD_MODELS, ids=[str(c) for c, _ in BAD_MODELS])
def test_a_model_that_cannot_be_served_is_one_line_that_names_the_field(run, tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | change))
    status, _, err = run("tune", "--model", path)
    assert status == 2
    assert message in err
    assert err.startswith("Error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "max_position_embeddings"])
def test_a_model_without_a_field_is_one_line_that_names_it(run, tmp_path, field):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in TINY.items() if name != field}))
    status, _, err = run("tune", "--model", path)
    assert (status, len(err.splitlines())) == (2, 1)
    assert field in err


def test_an_unknown_model_is_answered_with_the_presets(run):
    status, _, err = run("tune", "--model", "qwen9")
    assert status == 2
    assert "qwen3-8b" in err


BAD_TRACES = [
    ("input_tokens,output_tokens\n", "no requests"),
    ("input_tokens,output_tokens\n5,-1\n", ":2: output_tokens='-1'"),
    ("input_tokens\n5\n", "output_tokens"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TRACES)
def test_a_bad_trace_is_one_line_that_names_what_is_wrong(run, model, tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    status, _, err = run("tune", "--model", model, "--trace", tmp_path / "trace.csv")
    assert (status, len(err.splitlines())) == (2, 1)
    assert message in err


def test_a_plan_for_another_model_is_refused_with_the_field_that_differs(run, model, tmp_path):
    ok(run("tune", "--model", model, *SMALL, "--out", tmp_path / "plan.json"))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(TINY | {"num_key_value_heads": 1}))
    status, _, err = run("tune", "--model", other, *SMALL, "--plan", tmp_path / "plan.json")
    assert status == 2
    assert "spec.num_kv_heads: the plan has 2, here it is 1" in err


@pytest.mark.parametrize("command", ["show", "select", "explain"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\x00\xff", b'{"format": 99}'])
def test_a_file_that_is_no_plan_is_one_line(run, tmp_path, command, content):
    (tmp_path / "x.json").write_bytes(content)
    extra = ["-b", "1", "--kv", "1"] if command == "explain" else []
    status, _, err = run(command, tmp_path / "x.json", *extra)
    assert (status, len(err.splitlines())) == (2, 1)
    assert str(tmp_path / "x.json") in err


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("show", "plan.samples.json.gz", "compressed, as samples are, which `select` reads, and plan files are not"),
        ("show", "plan.samples.json", "this is a samples file, which `select` reads"),
        ("show", "plan.quarantine", "this is a quarantine, which `doctor` lists"),
        ("select", "plan.json", "this is a plan file, which `show` and `explain` read"),
    ],
)
def test_a_file_of_another_kind_is_told_what_it_is(run, tmp_path, command, name, said):
    samples = make_samples()
    write_plans(tmp_path / "plan.json", [make_plan(samples)])
    write_samples(tmp_path / "plan.samples.json", [samples])
    write_samples(tmp_path / "plan.samples.json.gz", [samples])
    Quarantine(tmp_path / "plan.json", make_key()).add("torch_chunked", 2, "replay", Reason.FAILED, "killed")
    status, _, err = run(command, tmp_path / name)
    assert (status, err) == (2, f"Error: {tmp_path / name}: {said}\n")


def test_without_a_stored_plan_show_says_what_to_do(run):
    status, _, err = run("show")
    assert status == 2
    assert "run `tune` first" in err


def test_a_maximum_below_the_mean_is_refused(run):
    status, _, err = run("explain", "-b", 1, "--kv", 100, "--max-kv", 50)
    assert status == 2
    assert "50 is below the mean 100" in err


def test_as_a_program_of_its_own_a_mistake_ends_with_status_2_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dispatch", "tune", "--model", "qwen3-8b", "--tp", "5"],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1


def test_the_version_is_printed_whether_the_package_is_installed_or_not(run):
    assert ok(run("--version")).endswith(f", version {__version__}\n")


def test_explain_shows_a_log_ratio_as_a_difference_in_time():
    from dispatch.cli.explain_view import percent

    assert percent(math.log(0.8), sign=True) == "-20.0%"
    assert percent(math.log(1.25), sign=True) == "+25.0%"


def test_a_plan_for_a_cpu_is_compared_as_it_was_tuned_and_kept_though_nobody_reads_what_is_printed(model, tmp_path):
    (tmp_path / "t.csv").write_text("input_tokens,output_tokens\n" + "20,9\n" * 40)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"DYN_DECODE_CACHE_DIR": str(tmp_path / "cache")}
    program = f"{sys.executable} -m dispatch"
    tune = f"{program} tune --model {model} {' '.join(SMALL)} --device cpu --isolation none --out plan.json"
    compare = f"{program} compare plan.json --trace t.csv --batch-size 2 --snapshots 2 --rounds 2"
    for command in (f"{tune} | true", compare):
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (tmp_path / "plan.json").exists()
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(("told", "threads"), [(None, 1), ("2", 2)])
def test_a_cpu_is_measured_with_one_thread_unless_the_user_says_otherwise(told, threads):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if told is not None:
        environment["OMP_NUM_THREADS"] = told
    lines = (
        "import os, torch",
        "from dispatch.cli.device import device_to_measure",
        "print(device_to_measure('cpu').units, torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == ([str(threads)] * 3, "")
