"""Whether the harness predicts what a stack of layers sees: the verdicts, how both are timed, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import dispatch.bench.truth_run
from dispatch.backends import registry
from dispatch.bench.model_stack import ModelStack
from dispatch.bench.rounds import ROUNDS
from dispatch.bench.timer import StepTime
from dispatch.bench.truth import PARTS, Truth, TruthCell, Verdict, judge
from dispatch.bench.truth_bench import TruthBench
from dispatch.bench.truth_run import planned_cells, run_truth
from dispatch.cli import main
from dispatch.errors import ConfigError, MeasureError
from dispatch.gate_inputs import row_sets
from dispatch.hf_dense import DenseSizes
from dispatch.request import TuneRequest
from dispatch.samples import TWIN
from dispatch.spec import AttentionSpec
from tests.fakes import backend, registry_of, spec_of

# --- a verdict


# The default takes 100 us a layer: up to 3 us are a near tie. The size may be a third of the real difference off, or 1.
@pytest.mark.parametrize(
    ("real", "predicted", "verdict"),
    [
        (-30.0, -30.0, Verdict.RIGHT),
        (-30.0, -39.9, Verdict.RIGHT),  # a third of 30 is 10
        (-30.0, -40.1, Verdict.WRONG_SIZE),
        (30.0, 20.1, Verdict.RIGHT),
        (30.0, 19.9, Verdict.WRONG_SIZE),
        (30.0, -30.0, Verdict.WRONG_ORDER),
        (3.1, -0.1, Verdict.WRONG_ORDER),
        (3.1, 0.0, Verdict.WRONG_ORDER),  # it predicts no difference where there is one
        (2.9, 2.0, Verdict.NEAR_TIE),  # a third of 2.9 is 0.97: 1 us is more
        (2.9, 1.8, Verdict.WRONG_SIZE),  # 1.1 us off
        (0.5, -0.4, Verdict.NEAR_TIE),
        (0.5, -0.6, Verdict.WRONG_SIZE),
        (0.0, 0.0, Verdict.NEAR_TIE),
    ],
)
def test_a_prediction_is_judged_by_its_sign_and_its_size(real, predicted, verdict):
    assert judge(real, predicted, default_us=100.0) is verdict
    assert judge(-real, -predicted, default_us=100.0) is verdict


def test_three_percent_are_of_the_defaults_attention_time():
    # 2 us are 2% of 100, and 20% of 10
    assert judge(2.0, -0.5, default_us=10.0) is Verdict.WRONG_ORDER
    assert judge(2.0, 1.5, default_us=10.0) is Verdict.RIGHT
    assert judge(2.0, 1.5, default_us=100.0) is Verdict.NEAR_TIE


def cell_of(times, backends=("fa3", TWIN, "xqa"), num_layers=4, **changes):
    fields = {"batch": 8, "mean_kv": 1024, "max_kv": 3000, "num_layers": num_layers, "backends": backends}
    return TruthCell(**{**fields, **changes}, times=np.asarray(times, dtype=np.float64))


def times_of(stack, begin, layer, plan=0.0):
    """[PARTS, backend, round]; each argument is [backend, round]."""
    stack = np.asarray(stack, dtype=np.float64)
    return np.stack(
        [np.broadcast_to(np.asarray(part, dtype=np.float64), stack.shape) for part in (stack, plan, begin, layer)]
    )


def test_differences_are_a_layers_and_begin_step_is_spread_over_the_layers():
    # stack: 400, 402, 360 us of 4 layers. begin_step: 8, 8, 0; a layer: 20, 20, 13.
    times = times_of([[400] * 3, [402] * 3, [360] * 3], [[8], [8], [0]], [[20], [20], [13]])
    default, twin, xqa = cell_of(times).comparisons()
    assert (xqa.real_us, xqa.predicted_us) == (-10.0, -9.0)  # (360 - 400) / 4; (0 - 8) / 4 + 13 - 20
    assert (default.attention_us, xqa.attention_us) == (22.0, 13.0)  # 8 / 4 + 20
    assert xqa.verdict is Verdict.RIGHT
    assert (twin.real_us, twin.predicted_us) == (0.5, 0.0)


def test_what_plan_takes_on_the_host_is_in_neither():
    stack, begin, layer = [[400] * 3, [400] * 3, [360] * 3], [[8], [8], [0]], [[20], [20], [13]]
    with_plan = cell_of(times_of(stack, begin, layer, plan=[[0], [0], [90]]))
    assert with_plan.comparisons() == cell_of(times_of(stack, begin, layer)).comparisons()


def test_differences_are_paired_by_round():
    # 8 us a step faster in two rounds of three; the median of its times alone is 8 us above the default's
    default, its = np.array([400.0, 500.0, 600.0]), np.array([508.0, 492.0, 592.0])
    times = times_of([default, default, its], 0, [default / 10, default / 10, its / 10])
    xqa = cell_of(times).comparisons()[2]
    assert (xqa.real_us, xqa.predicted_us) == (-2.0, pytest.approx(-0.8))


def test_a_round_that_something_disturbed_does_not_count():
    times = times_of([[400] * 5, [400] * 5, [360, 360, 9000, 360, 360]], 0, [[20] * 5, [20] * 5, [900, 10, 10, 10, 10]])
    xqa = cell_of(times).comparisons()[2]
    assert (xqa.real_us, xqa.predicted_us) == (-10.0, -10.0)


def test_the_default_and_its_second_run_get_no_verdict():
    times = times_of([[400] * 3, [500] * 3, [360] * 3], 0, [[20], [20], [10]])
    assert [c.verdict for c in cell_of(times).comparisons()] == [None, None, Verdict.RIGHT]


def test_a_backend_that_failed_in_a_round_is_not_compared():
    times = times_of([[400] * 3, [400] * 3, [360, 360, np.nan]], 0, [[20], [20], [10]])
    assert [c.backend for c in cell_of(times).comparisons()] == ["fa3", TWIN]


def truth_of(*cells, failed=()):
    return Truth({"name": "a GPU"}, spec_of(), 4, "fa3", cells, {"torch_sdpa": "a fallback"}, tuple(failed))


RIGHT = times_of([[400] * 3, [400] * 3, [360] * 3], 0, [[20], [20], [10]])
WRONG = times_of([[400] * 3, [400] * 3, [360] * 3], 0, [[20], [20], [30]])
FAILED = times_of([[400] * 3, [400] * 3, [np.nan] * 3], 0, [[20], [20], [10]])


def test_a_run_is_right_if_every_verdict_is():
    assert truth_of(cell_of(RIGHT), cell_of(RIGHT)).ok
    assert not truth_of(cell_of(RIGHT), cell_of(WRONG)).ok
    assert truth_of(cell_of(RIGHT), cell_of(FAILED), failed=["batch 8: xqa: no"]).ok  # it lost itself alone


def test_a_run_in_which_nothing_was_compared_is_not_right():
    assert not truth_of(cell_of(FAILED)).ok
    assert not truth_of().ok


def test_as_json_every_round_is_there_and_a_time_that_is_not_is_null():
    report = json.loads(json.dumps(truth_of(cell_of(WRONG), cell_of(FAILED)).to_json(), allow_nan=False))
    first, second = (cell["backends"]["xqa"] for cell in report["cells"])
    assert (first["real_us"], first["predicted_us"], first["verdict"]) == (-10.0, 10.0, "wrong order")
    assert first["rounds"] == {
        "stack_us": [360.0] * 3,
        "plan_us": [0.0] * 3,
        "begin_us": [0.0] * 3,
        "layer_us": [30.0] * 3,
    }
    assert second["rounds"]["stack_us"] == [None] * 3
    assert "verdict" not in second


# --- how it is timed


class Clock:
    """Runs every step and stack for real, reports scripted times, and remembers what ran on which lengths."""

    chain_layers = (3, 2)
    peak_bytes_per_s = None

    def __init__(self, fail_at=None):
        self.log, self.captured_at, self.fail_at, self.stacks = [], [], fail_at or {}, {}

    def record(self, impl, inputs, chain):
        self.captured_at.append(tuple(inputs.lengths.tolist()))
        return Recording(self, impl, inputs)

    def prepare(self, work):
        impl, inputs = work.args[:2]
        self.captured_at.append(tuple(inputs.lengths.tolist()))
        assert impl.calls[-1] == "plan"
        done = len(impl.calls)
        work()
        assert impl.calls[done:] == ["begin_step", *["forward"] * 2]  # of a stack of two layers

        def time():
            name = impl.name
            self.log.append(("stack", name, tuple(inputs.lengths.tolist())))
            self.stacks[name] = self.stacks.get(name, 0) + 1
            if self.stacks[name] > self.fail_at.get(name, np.inf):
                raise RuntimeError("the kernel failed")
            assert impl.calls[-1] == "plan"  # nothing has run since
            work()
            return 100.0

        return time


class Recording:
    def __init__(self, clock, impl, inputs):
        self.clock, self.impl, self.inputs = clock, impl, inputs

    def start(self, layers):
        self.clock.log.append((f"chain of {layers}", self.impl.name, tuple(self.inputs.lengths.tolist())))
        return lambda: StepTime(7.0, 4.0, 10.0)


def bench_of(clock, *backends, batch=2, mean_kvs=(8,), num_layers=2, free_bytes=1 << 24):
    for cls in backends:
        build = cls.build

        def planning(*args, build=build):
            impl = build(*args)
            impl.needs_plan = True
            return impl

        cls.build = planning
    stack = ModelStack(spec_of(), DenseSizes(32, 48), num_layers, 32, torch.device("cpu"))
    planned = {batch: planned_cells(batch, mean_kvs, 32)}
    return TruthBench(stack, planned, {}, 32, registry_of(*backends), clock, clock.prepare, free_bytes)


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    monkeypatch.setattr("dispatch.bench.truth_bench.WARM_UP_S", 0.0)


def test_all_backends_run_on_the_same_lengths_in_each_round_and_these_differ_between_rounds():
    clock = Clock()
    bench_of(clock, backend("a"), backend("b")).compare(2, ("a", "b"))
    rounds = [clock.log[i : i + 6] for i in range(0, len(clock.log), 6)]  # a, its second run and b, each timed twice
    assert len(rounds) == ROUNDS
    assert all(len({lengths for _, _, lengths in one}) == 1 for one in rounds)
    assert len({one[0][2] for one in rounds}) > ROUNDS // 2
    assert all(sorted(name for _, name, _ in one) == ["a"] * 4 + ["b"] * 2 for one in rounds)


def test_the_order_is_shuffled():
    clock = Clock()
    bench_of(clock, backend("a"), backend("b")).compare(2, ("a", "b"))
    orders = {tuple(name for _, name, _ in clock.log[i : i + 6 : 2]) for i in range(0, len(clock.log), 6)}
    assert orders == {("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")}


def test_a_sample_has_the_stacks_time_and_the_harness_s_parts():
    (cell,) = bench_of(Clock(), backend("a"), backend("b")).compare(2, ("a", "b"))
    assert cell.backends == ("a", TWIN, "b")
    assert PARTS == ("stack_us", "plan_us", "begin_us", "layer_us")
    assert np.array_equal(cell.times, np.broadcast_to(np.array([100.0, 7.0, 4.0, 10.0])[:, None, None], (4, 3, ROUNDS)))


def test_everything_is_captured_with_the_longest_request_among_others_as_the_harness_does():
    clock = Clock()
    bench_of(clock, backend("a"), backend("b")).compare(2, ("a", "b"))
    assert clock.captured_at == [row_sets(spec_of(), 2, 32)[0]] * 6  # three arms, each in the harness and in the stack
    assert max(clock.captured_at[0]) == 32


def test_the_chain_is_as_long_as_the_harness_makes_it():
    clock = Clock()
    bench_of(clock, backend("a"), backend("b")).compare(2, ("a", "b"))
    assert {what for what, _, _ in clock.log} == {"stack", "chain of 3"}  # short layers: the longest chain


def test_a_backend_that_cannot_be_built_loses_only_itself():
    bench = bench_of(Clock(), backend("a"), backend("b", build_error=RuntimeError("no kernel")), backend("c"))
    (cell,) = bench.compare(2, ("a", "b", "c"))
    assert [c.backend for c in cell.comparisons()] == ["a", TWIN, "c"]
    assert bench.failed == ["batch 2: b: RuntimeError: no kernel"]


def test_a_backend_that_fails_while_it_is_timed_keeps_the_cells_before_and_loses_only_itself():
    bench = bench_of(Clock({"b": ROUNDS + 3}), backend("a"), backend("b"), backend("c"), mean_kvs=(8, 16))
    cells = bench.compare(2, ("a", "b", "c"))
    assert [[c.backend for c in cell.comparisons()] for cell in cells] == [["a", TWIN, "b", "c"], ["a", TWIN, "c"]]
    assert bench.failed == ["batch 2, mean KV 16: b: RuntimeError: the kernel failed"]


@pytest.mark.parametrize("fault", [{"build_error": RuntimeError("no kernel")}, {}])
def test_without_the_default_there_is_nothing_to_compare_with(fault):
    bench = bench_of(Clock({} if fault else {"a": 5}), backend("a", **fault), backend("b"))
    with pytest.raises(
        MeasureError, match=r"^the default cannot be timed: batch 2.*: (a|default/twin): RuntimeError: "
    ):
        bench.compare(2, ("a", "b"))


def test_nor_without_its_second_run():
    default = backend("a")
    bench = bench_of(Clock(), default, backend("b"))
    build = default.build

    def once(*args):
        if default.built:
            raise RuntimeError("no kernel")
        return build(*args)

    default.build = once
    with pytest.raises(MeasureError, match=f"^the default cannot be timed: batch 2: {TWIN}: RuntimeError: no kernel$"):
        bench.compare(2, ("a", "b"))


def test_a_stack_with_more_layers_than_there_are_caches_is_refused():
    with pytest.raises(MeasureError, match=r"^a stack of 4 layers: the harness has KV caches for 3$"):
        bench_of(Clock(), backend("a"), num_layers=4)


def test_a_mean_length_that_the_longest_request_does_not_allow_is_refused():
    assert [p.cell.mean_kv for p in planned_cells(8, (1024, 8192), 40960)] == [1024, 8192]
    with pytest.raises(ConfigError, match=r"^mean KV 9000, 16000 at batch 8: too near the longest request, 10000$"):
        planned_cells(8, (1024, 9000, 16000), 10000)


# --- the command


@pytest.fixture
def run(monkeypatch):
    """Run the command with a result made up; (exit status, standard output, standard error), and what it asked for."""
    asked = []

    def invoke(*args, result=None):
        if result is not None:
            monkeypatch.setattr(dispatch.bench.truth_run, "run_truth", lambda *a: asked.append(a) or result)
        done = CliRunner().invoke(main, ["bench", "truth", *args])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.stdout, done.stderr

    invoke.asked = asked
    return invoke


def test_a_run_that_is_right_is_a_table_and_status_0(run):
    status, out, _ = run(result=truth_of(cell_of(RIGHT)))
    assert status == 0
    row = next(line for line in out.splitlines() if "xqa" in line)
    assert "-10.00" in row
    assert "right" in row
    assert "1 of 1 predictions are right" in out
    assert "refused: torch_sdpa: a fallback" in out


def test_a_wrong_prediction_is_status_1(run):
    status, out, _ = run(result=truth_of(cell_of(RIGHT), cell_of(WRONG), failed=["batch 8: fa2: no kernel"]))
    assert status == 1
    assert "wrong order" in out
    assert "1 of 2 predictions are right" in out
    assert "failed: batch 8: fa2: no kernel" in out


def test_as_json_the_status_is_the_same(run):
    status, out, _ = run("--json", result=truth_of(cell_of(WRONG)))
    assert status == 1
    assert json.loads(out)["ok"] is False


def test_it_asks_for_a_ranks_share_of_the_model_and_the_batches_and_lengths_given(run):
    options = ["--model", "llama-3.1-70b", "--tp", "8", "--batches", "8,1", "--mean-kv", "4096", "--layers", "2"]
    run(*options, "--page-size", "32", "--kv-dtype", "fp8_e4m3", result=truth_of(cell_of(RIGHT)))
    ((request, sizes, num_layers, mean_kvs, *_),) = run.asked
    spec = request.spec
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.page_size, spec.kv_dtype) == (8, 1, 32, "fp8_e4m3")
    assert (sizes, num_layers, mean_kvs) == (DenseSizes(8192, 3584), 2, (4096,))
    assert (request.buckets, request.max_seq_len) == ((1, 8), 65536)


BAD = [
    (["--model", "qwen3-30b-a3b"], "num_experts=128: not served: a mixture of experts; this is for dense models"),
    (["--model", "gemma-2-9b"], "gemma-2-9b: its layers are of 2 kinds; the stack's are all alike"),
    (["--batches", "1,x"], "--batches '1,x': must be whole numbers above 0, separated by commas"),
    (["--mean-kv", "0"], "--mean-kv '0': must be whole numbers above 0, separated by commas"),
    (["--layers", "0"], "'--layers': 0 is not in the range x>=1"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_a_users_mistake_is_one_line_and_status_2(run, args, message):
    status, _, err = run(*args)
    assert status == 2
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("Error")]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_line(run):
    assert run() == (2, "", "Error: device cuda: torch sees no CUDA device here\n")


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_eligible_backend_runs_in_a_stack_of_small_layers():
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128, page_size=16, num_layers=4)
    request = TuneRequest(spec, (1, 4), 2048, 4 * 512)
    result = run_truth(request, DenseSizes(1024, 2048), 2, (128, 512), registry, lambda what: None)
    assert result.failed == ()
    assert [(cell.batch, cell.mean_kv) for cell in result.cells] == [(1, 128), (1, 512), (4, 128), (4, 512)]
    for cell in result.cells:
        assert not np.isnan(cell.times).any()
        assert bool((cell.times[0] > 0).all())
